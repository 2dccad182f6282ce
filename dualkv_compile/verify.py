"""``verify``: run the plain graph too, and compare it with what the packed graph gave.

    packed(inputs) -> result      compared with      plain(copies of args) -> outputs
    "grad": both graphs again on detached copies, one set of cotangents, torch.autograd.grad, gradients compared

A query that sees no key has no defined attention (fused kernels give 0, others an average over the future), so
positions whose query sees no key at one packed attention or more are left out, and so are the positions that
``padding="drop"`` skips. Nothing of the user's is touched: tensors that are no parameters are copied, gradients are
taken of detached stand-ins, and the states of the random number generators are put back.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx
import torch.utils._pytree as pytree
from torch import Tensor

from dualkv_compile.errors import VerificationError
from dualkv_compile.kernels.predicate import Expression, evaluate, from_text
from dualkv_compile.passes.normalize import CHECKPOINT
from dualkv_compile.passes.pack import PlanInput
from dualkv_compile.passes.values import Dim, Frame, Value, dim_of
from dualkv_compile.plan import PrefixPlan

if TYPE_CHECKING:
    from dualkv_compile.runtime import Dispatcher

#: Largest difference relative to a tensor's largest absolute value, by the least precise dtype of the graph.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
#: The same for float32 where products may be rounded to TF32 or bfloat16 (``torch.set_float32_matmul_precision``).
REDUCED_FLOAT32 = 1e-2
#: A gradient that is zero in theory (a key's bias) is rounding noise: differences below this part of the tolerance,
#: relative to the largest gradient of all inputs, are none.
GRADIENT_NOISE = 0.1
_CHUNK = 1 << 22  # elements compared, and query-key pairs evaluated, at a time


def verify_call(
    dispatcher: Dispatcher,
    args: Sequence[Any],
    inputs: Sequence[Any],
    plans: Mapping[Frame, PrefixPlan],
    result: Any,
) -> None:
    """Compare one packed call with the plain graph; with ``verify="grad"`` the gradients as well.

    Args:
        dispatcher: the graph's two forms and what the passes know of it.
        args: the arguments of the call.
        inputs: what the packed graph got: some of ``args``, and tensors of the plans.
        plans: the tree of each base frame.
        result: what the packed graph returned.

    Raises:
        VerificationError: naming the tensor, the position, both values, their difference and the tolerance.
    """
    check = _Check(dispatcher, args, inputs, plans)
    packed = pytree.tree_leaves(result)
    gradients = dispatcher.options.verify == "grad" and torch.is_grad_enabled() and bool(check.differentiable)
    # A checkpoint around the compiled function counts what is saved for the backward; it must not see this.
    with _generators_kept(args), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        if not gradients:
            with torch.no_grad():
                plain = pytree.tree_leaves(dispatcher.run_plain(*[_copy(arg) for arg in args]))
            check.outputs(packed, plain)
            return
        stand_ins = check.stand_ins()
        plain = pytree.tree_leaves(dispatcher.run_plain(*stand_ins))
        check.outputs(packed, plain)
        check.gradients(stand_ins, plain)


class _Check:
    """One verification of one call."""

    def __init__(
        self, dispatcher: Dispatcher, args: Sequence[Any], inputs: Sequence[Any], plans: Mapping[Frame, PrefixPlan]
    ) -> None:
        assert dispatcher.analysis.normal is not None
        self._dispatcher = dispatcher
        self._packed = dispatcher.packed
        self._args = args
        self._inputs = inputs
        self._plans = plans
        self._described = dispatcher.analysis.normal.inputs
        self._batches = {batch.frame: batch for batch in dispatcher.batches}
        self._precision = _least_precise(dispatcher.analysis.normal.module, args)
        self._own_excuses: dict[int, Tensor] | None = None
        self.differentiable = [index for index, arg in enumerate(args) if isinstance(arg, Tensor) and arg.requires_grad]
        with torch.no_grad():
            self._visible = visible_positions(self._packed.module, inputs, plans)

    # ------------------------------------------------------------------ outputs

    def outputs(self, packed: Sequence[Any], plain: Sequence[Any]) -> None:
        """Compare every output of the two graphs."""
        for number, (a, b) in enumerate(zip(packed, plain, strict=True)):
            if not isinstance(a, Tensor) or not isinstance(b, Tensor):
                if not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b:
                    continue
                raise VerificationError(f"output {number} is {a!r} in the packed graph and {b!r} in the plain graph")
            tolerance = self._tolerance(a.dtype)
            found = compare(a.detach(), b.detach(), self._compared(number), tolerance)
            if found is not None and not self._is_token(number) and self._somewhere_blind():
                # Known only now to be needed: which elements are made of nothing but positions that are not compared.
                found = compare(a.detach(), b.detach(), self._excuse(number), tolerance)
            if found is not None:
                place = self._place(number, found.index)
                raise VerificationError(f"output {number}: {found.text(place)}{self._advice()}")

    def _is_token(self, number: int) -> bool:
        value = self._packed.outputs[number]
        return isinstance(value, Value) and value.tags is not None

    def _compared(self, number: int) -> Tensor | None:
        """Where output ``number`` is compared, broadcastable to it; None for everywhere."""
        value = self._packed.outputs[number]
        if not isinstance(value, Value) or value.tags is None or value.frame is None:
            return None
        visible = self._window(value.frame)
        if Dim.TOKEN in value.tags:
            dim = dim_of(value.tags, Dim.TOKEN)
            return visible.reshape(-1, *[1] * (len(value.tags) - dim - 1))
        row, column = dim_of(value.tags, Dim.ROW), dim_of(value.tags, Dim.COLUMN)
        shape = [1] * len(value.tags)
        shape[row], shape[column] = visible.shape
        return visible.reshape(shape)

    def _window(self, frame: Frame) -> Tensor:
        """Bool ``[B, W]``: the positions of ``frame`` that are compared."""
        start, stop = self._batches[frame.base].bounds(frame, self._args)
        return self._visible[frame.base][:, start:stop]

    def _somewhere_blind(self) -> bool:
        return not all(bool(visible.all()) for visible in self._visible.values())

    def _place(self, number: int, index: tuple[int, ...]) -> str:
        """The row and column of an element, where the output has them."""
        value = self._packed.outputs[number]
        if not isinstance(value, Value) or value.tags is None or value.frame is None:
            return ""
        start, stop = self._batches[value.frame.base].bounds(value.frame, self._args)
        if Dim.TOKEN in value.tags:
            row, column = divmod(index[dim_of(value.tags, Dim.TOKEN)], stop - start)
        else:
            row, column = index[dim_of(value.tags, Dim.ROW)], index[dim_of(value.tags, Dim.COLUMN)]
        return f" (row {row}, column {start + column})"

    def _advice(self) -> str:
        if not self._somewhere_blind():
            return ""
        return "; if this value is computed from positions whose query sees no key (padding), leave them out of it"

    def _excuse(self, number: int) -> Tensor | None:
        """Where an output that is not per-token is compared: everywhere but at elements of blind positions alone.

        Such an output (per-token log-probabilities after a gather, a loss) was computed from un-packed values. Filling
        the blind positions of those with another token's values shows which elements depend on them; filling the others
        shows which elements depend on anything else. A loss depends on both and stays compared.
        """
        if self._own_excuses is None:
            with torch.no_grad():
                usual, blind, seen = (
                    pytree.tree_leaves(self._dispatcher.run_packed(*inputs))
                    for inputs in (self._inputs, self._filled(blind=True), self._filled(blind=False))
                )
                self._own_excuses = {
                    index: ~(_changed(before, blind[index]) & ~_changed(before, seen[index]))
                    for index, before in enumerate(usual)
                    if isinstance(before, Tensor)
                }
        return self._own_excuses.get(number)

    def _filled(self, *, blind: bool) -> list[Any]:
        """The packed graph's inputs with the blind (or all other) positions un-packed from a wrong token."""
        inputs = list(self._inputs)
        for place, item in enumerate(self._packed.inputs):
            if isinstance(item, PlanInput) and item.name == "inverse":
                inverse, visible = inputs[place], self._window(item.frame)
                other = (inverse + 1) % (inverse.max() + 1).clamp(min=1)
                inputs[place] = torch.where(visible, inverse, other) if blind else torch.where(visible, other, inverse)
        return inputs

    # ------------------------------------------------------------------ gradients

    def stand_ins(self) -> list[Any]:
        """The arguments of the call, with a detached leaf for each one that requires grad."""
        return [_leaf(arg) if index in self.differentiable else _copy(arg) for index, arg in enumerate(self._args)]

    def gradients(self, plain_args: Sequence[Any], plain: Sequence[Any]) -> None:
        """Compare the gradients of every input that requires grad, for one set of cotangents."""
        packed_args = self.stand_ins()
        inputs = [
            self._inputs[place] if isinstance(item, PlanInput) else packed_args[item]
            for place, item in enumerate(self._packed.inputs)
        ]
        packed = pytree.tree_leaves(self._dispatcher.run_packed(*inputs))
        chosen: list[int] = []
        for number, (a, b) in enumerate(zip(packed, plain, strict=True)):
            if not isinstance(a, Tensor) or not isinstance(b, Tensor):
                continue
            if a.requires_grad != b.requires_grad:
                raise VerificationError(
                    f"output {number}: requires_grad is {a.requires_grad} in the packed graph and {b.requires_grad} in "
                    "the plain graph"
                )
            if a.requires_grad:
                chosen.append(number)
        if not chosen:
            return
        cotangents = [self._cotangent(number, plain[number]) for number in chosen]
        ours = _gradients([packed[n] for n in chosen], [packed_args[n] for n in self.differentiable], cotangents)
        theirs = _gradients([plain[n] for n in chosen], [plain_args[n] for n in self.differentiable], cotangents)
        largest = max((_largest(gradient) for gradient in theirs), default=0.0)
        for index, a, b in zip(self.differentiable, ours, theirs, strict=True):
            a, b = self._of_copies(index, a), self._of_copies(index, b)
            tolerance = self._tolerance(b.dtype)
            found = compare(a, b, None, tolerance, noise=GRADIENT_NOISE * tolerance * largest)
            if found is not None:
                described = self._described[index]
                name = described.source or described.name
                raise VerificationError(f"gradient of {name}: {found.text()}{self._advice()}")

    def _of_copies(self, index: int, gradient: Tensor) -> Tensor:
        """The gradient of an input; added up over equal copies if those were declared to have one origin."""
        for frame, roots in self._packed.roots.items():
            for root in roots:
                if root.input_index == index and root.requires_grad:
                    plan, grid = self._plans[frame], root.by_column(gradient)
                    total = grid.new_zeros(plan.tokens, *grid.shape[2:])
                    return total.index_add_(0, plan.inverse.flatten(), grid.flatten(0, 1))
        return gradient

    def _cotangent(self, number: int, output: Tensor) -> Tensor:
        """The same pseudo-random numbers at each call, zero where the output is not compared."""
        generator = torch.Generator(output.device).manual_seed(number)
        real = torch.float64 if output.dtype in (torch.float64, torch.complex128) else torch.float32
        dtype = output.dtype if output.is_complex() else real
        drawn = torch.randn(output.shape, dtype=dtype, device=output.device, generator=generator).to(output.dtype)
        compared = self._compared(number)
        if compared is None and output.ndim and self._somewhere_blind():
            compared = self._excuse(number)
        return drawn if compared is None else drawn.masked_fill(~compared, 0)

    def _tolerance(self, dtype: torch.dtype) -> float:
        if not (dtype.is_floating_point or dtype.is_complex):
            return 0.0
        return max(self._precision, _tolerance_of(dtype.to_real()))


# ---------------------------------------------------------------------------------------------------- comparing tensors


@dataclass(frozen=True)
class Difference:
    """The place where two tensors differ most, and by how much."""

    index: tuple[int, ...]
    packed: float
    plain: float
    relative: float
    tolerance: float

    def text(self, place: str = "") -> str:
        """For an error message; ``place`` says more about the index."""
        return (
            f"the packed and the plain graph differ at {list(self.index)}{place}: {self.packed!r} and {self.plain!r}, "
            f"a difference of {self.relative:.3g} of the tensor's largest value (tolerance {self.tolerance:.3g})"
        )


def compare(
    packed: Tensor, plain: Tensor, compared: Tensor | None, tolerance: float, *, noise: float = 0.0
) -> Difference | None:
    """Where two tensors differ by more than ``tolerance`` times the largest absolute value; None if nowhere.

    Args:
        packed: the tensor in question.
        plain: what it should be.
        compared: bool, broadcastable to both; only positions with True are looked at. None: all.
        tolerance: relative to the largest finite absolute value of ``plain`` there. Integers and bools must be equal.
        noise: absolute differences up to this one are none.

    Raises:
        VerificationError: shapes or dtypes differ.
    """
    if packed.shape != plain.shape or packed.dtype != plain.dtype:
        raise VerificationError(
            f"the packed graph gives {packed.dtype} {list(packed.shape)} where the plain graph gives {plain.dtype} "
            f"{list(plain.shape)}"
        )
    if plain.numel() == 0:
        return None
    mask = None if compared is None else compared.expand(plain.shape)
    if plain.is_complex():
        packed, plain = torch.view_as_real(packed.resolve_conj()), torch.view_as_real(plain.resolve_conj())
        mask = None if mask is None else mask.unsqueeze(-1).expand(plain.shape)
    if plain.ndim == 0:
        packed, plain, mask = packed.reshape(1), plain.reshape(1), None if mask is None else mask.reshape(1)
        found = compare(packed, plain, mask, tolerance, noise=noise)
        return None if found is None else Difference((), found.packed, found.plain, found.relative, found.tolerance)
    worst, scale, where = 0.0, 0.0, (0,) * plain.ndim
    step = max(_CHUNK * plain.shape[0] // plain.numel(), 1)
    for start in range(0, plain.shape[0], step):
        part = slice(start, start + step)
        gap, size = _gap(packed[part], plain[part], None if mask is None else mask[part])
        scale = max(scale, float(size))
        place = int(gap.argmax())
        largest = float(gap.reshape(-1)[place])
        if largest > worst:
            worst = largest
            first, *rest = (int(i) for i in torch.unravel_index(torch.tensor(place), gap.shape))
            where = (start + first, *rest)
    if worst == 0.0 or worst <= max(tolerance * scale, noise):
        return None
    relative = worst / scale if scale else float("inf")
    return Difference(where, packed[where].item(), plain[where].item(), relative, tolerance)


def _gap(packed: Tensor, plain: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Absolute differences (infinite for a NaN in one only), and the largest finite absolute value."""
    if not plain.is_floating_point():
        gap = (packed != plain).to(torch.float64)
        size = gap.new_ones(())
    else:
        a, b = packed.to(torch.float64), plain.to(torch.float64)
        equal = (a == b) | (a.isnan() & b.isnan())
        gap = (a - b).abs_().nan_to_num_(nan=float("inf"), posinf=float("inf")).masked_fill_(equal, 0)
        size = b.abs().nan_to_num_(nan=0.0, posinf=0.0)
        size = size.max() if mask is None else size.masked_fill_(~mask, 0).max()
    return gap if mask is None else gap.masked_fill_(~mask, 0), size


def _changed(before: Tensor, after: Tensor) -> Tensor:
    if not before.is_floating_point():
        return before != after
    return (before != after) & ~(before.isnan() & after.isnan())


def _largest(gradient: Tensor) -> float:
    return float(gradient.abs().nan_to_num(nan=0.0, posinf=0.0).max()) if gradient.numel() else 0.0


def _tolerance_of(dtype: torch.dtype) -> float:
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return REDUCED_FLOAT32
    return TOLERANCES.get(dtype, max(TOLERANCES.values()))


def _least_precise(module: fx.GraphModule, args: Sequence[Any]) -> float:
    """The tolerance of the least precise dtype in a graph (Hugging Face casts norms and rotations to float32)."""
    found = {
        val.dtype
        for part in module.modules()
        if isinstance(part, fx.GraphModule)
        for node in part.graph.nodes
        if isinstance(val := node.meta.get("val"), Tensor) and val.is_floating_point()
    }
    for kind in {arg.device.type for arg in args if isinstance(arg, Tensor)}:
        if torch.is_autocast_enabled(kind):
            found.add(torch.get_autocast_dtype(kind))
    return max((_tolerance_of(dtype) for dtype in found), default=0.0)


# --------------------------------------------------------------------------------------------------- running the graphs


def _copy(arg: Any) -> Any:
    """A copy of a tensor that is no parameter, with its strides; anything else as it is."""
    if not isinstance(arg, Tensor) or isinstance(arg, torch.nn.Parameter):
        return arg
    # Broadcast dimensions hold one element each; a plain clone would fill them, and guards on strides would fail.
    thin = arg.detach()
    for dim, (size, stride) in enumerate(zip(arg.shape, arg.stride(), strict=True)):
        if stride == 0 and size > 1:
            thin = thin.narrow(dim, 0, 1)
    return thin.clone().expand(arg.shape).requires_grad_(arg.requires_grad)


def _leaf(arg: Tensor) -> Tensor:
    """A leaf that stands for ``arg``. A parameter stays one, so that guards hold; no packed graph writes into it."""
    if isinstance(arg, torch.nn.Parameter):
        return torch.nn.Parameter(arg.detach())
    copied: Tensor = _copy(arg)
    return copied


def _gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of all ``inputs``, zeros for those that no output depends on."""
    with contextlib.ExitStack() as stack:
        # As trainers do: a backward pass is not run under the forward's autocast.
        for kind in {output.device.type for output in outputs}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        found = torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)
    return [torch.zeros_like(x) if gradient is None else gradient for x, gradient in zip(inputs, found, strict=True)]


@contextlib.contextmanager
def _generators_kept(args: Sequence[Any]) -> Iterator[None]:
    """Put back the random number generators of the CPU and of the devices of ``args``."""
    devices = {arg.device.index for arg in args if isinstance(arg, Tensor) and arg.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices)):
        yield


# ----------------------------------------------------------------------------------------------- which query sees a key


def visible_positions(
    module: fx.GraphModule, inputs: Sequence[Any], plans: Mapping[Frame, PrefixPlan]
) -> dict[Frame, Tensor]:
    """The grid positions whose query sees a key at every packed attention, bool ``[B, S]`` for each base frame.

    Args:
        module: a rewritten graph.
        inputs: its inputs.
        plans: the trees whose tensors are among the inputs.
    """
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    reader = _Reader(module, dict(zip(placeholders, inputs, strict=True)))
    seeing = {frame: torch.ones_like(plan.rank, dtype=torch.bool) for frame, plan in plans.items()}
    done: set[tuple[Any, ...]] = set()
    for owner, node in reader.masks():
        # rank, column, end; vectors; the mask
        first, rest = (0, 3) if node.target is torch.ops.dualkv.block_mask.default else (3, 7)
        tree = [owner.value(arg) for arg in node.args[first : first + 3]]
        vectors = [owner.value(arg) for arg in node.args[rest]]  # type: ignore[union-attr]
        expression = from_text(str(node.args[rest + 1]))
        key = (id(tree[0]), expression, *map(id, vectors))
        if expression is None or key in done:  # without further terms every token sees itself
            continue
        done.add(key)
        (frame,) = [frame for frame, plan in plans.items() if plan.rank is tree[0]]
        seeing[frame] &= _sees_a_key(expression, vectors, *tree)
    return {
        frame: (plan.inverse >= 0) & seeing[frame][plan.inverse.clamp(min=0)] if plan.tokens else plan.inverse >= 0
        for frame, plan in plans.items()
    }


def _sees_a_key(expression: Expression, vectors: Sequence[Tensor], rank: Tensor, column: Tensor, end: Tensor) -> Tensor:
    """Bool ``[T]``: whether any key is visible to the query of each packed token."""
    tokens = rank.shape[0]
    found = torch.zeros(tokens, dtype=torch.bool, device=rank.device)
    width = 256
    for start in range(0, tokens, width):  # nearly every token sees itself: the diagonal, by small squares
        part = slice(start, start + width)
        found[part] = evaluate(expression, vectors, column, part, part).diagonal()
    rest = (~found).nonzero().squeeze(1)
    step = max(_CHUNK // max(tokens, 1), 1)
    for start in range(0, rest.shape[0], step):
        queries, keys = rest[start : start + step], slice(0, tokens)
        near = (rank <= rank[queries, None]) & (rank[queries, None] < end) & (column <= column[queries, None])
        found[queries] = (near & evaluate(expression, vectors, column, queries, keys)).any(1)
    return found


class _Reader:
    """Values of single nodes of a rewritten graph, computed when asked for: the vectors that masks read are cheap."""

    def __init__(self, module: fx.GraphModule, inputs: Mapping[fx.Node, Any], caller: _Reader | None = None) -> None:
        self._module = module
        self._inputs = inputs
        self._caller = caller
        self._known: dict[fx.Node, Any] = {}
        self._bodies: dict[fx.Node, _Reader] = {}

    def masks(self) -> Iterator[tuple[_Reader, fx.Node]]:
        """Every operator that takes an attention's mask, in checkpoint bodies too, with the reader of its graph."""
        operators = (torch.ops.dualkv.packed_attention.default, torch.ops.dualkv.block_mask.default)
        for node in self._module.graph.nodes:
            if node.op == "call_function" and node.target in operators:
                yield self, node
            elif node.op == "call_function" and node.target is CHECKPOINT:
                yield from self._body(node).masks()

    def _body(self, call: fx.Node) -> _Reader:
        if call not in self._bodies:
            body = getattr(self._module, call.args[0].target)  # type: ignore[union-attr,arg-type]
            placeholders = [node for node in body.graph.nodes if node.op == "placeholder"]
            self._bodies[call] = _Reader(body, dict(zip(placeholders, call.args[1:], strict=True)), self)
        return self._bodies[call]

    def value(self, arg: Any) -> Any:
        """The value of an argument of a node: of a node, of nodes in a list, or of a constant."""
        return fx.node.map_arg(arg, self._node)

    def _node(self, node: fx.Node) -> Any:
        if node not in self._known:
            self._known[node] = self._compute(node)
        return self._known[node]

    def _compute(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            given = self._inputs[node]
            return given if self._caller is None else self._caller.value(given)
        if node.op == "get_attr":
            return operator.attrgetter(str(node.target))(self._module)
        if node.target is operator.getitem:
            source, place = node.args
            if isinstance(source, fx.Node) and source.target is CHECKPOINT:
                body = self._body(source)
                (output,) = [n for n in body._module.graph.nodes if n.op == "output"]
                return body.value(output.args[0][place])
        assert callable(node.target)
        return node.target(*self.value(node.args), **self.value(node.kwargs))
