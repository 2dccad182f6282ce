"""Random programs over the operators that the graph passes know.

A program is data: sizes, and a list of steps with their arguments, so that a failing one is its own reproduction
(``repr``). Its `Network` is an ordinary module: token embeddings ``[B, S, C]`` (with positions, with a function of the
attention mask), then the steps in order, then an end. Between attentions a value may have any layout that the steps
reach, named by its dimensions: B rows, S columns, T = B * S flattened, C = H * D features, 1.

The generator is written against one function, ``choose(options)``, so that a seeded random generator and hypothesis
(which shrinks) draw the same programs. Every operator of `OPERATORS` is one whose result at a token is known from the
token's prefix and that the passes are meant to pack; those of `FORBIDDEN` must not be packed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Choose = Callable[[Sequence[Any]], Any]
Layout = tuple[str, ...]
BASE: Layout = ("B", "S", "C")
FEATURES = ("C", "H", "D")


@dataclass(frozen=True)
class Sizes:
    """B rows of S columns, H query and K key heads of width D; features C = H * D; V tokens."""

    B: int
    S: int
    H: int
    K: int
    D: int
    V: int = 29

    @property
    def C(self) -> int:
        return self.H * self.D


DISTINCT = Sizes(B=5, S=9, H=4, K=2, D=6)
COLLIDING = {
    "rows_columns": Sizes(B=8, S=8, H=4, K=2, D=6),
    "rows_heads": Sizes(B=4, S=9, H=4, K=2, D=6),
    "columns_width": Sizes(B=5, S=6, H=4, K=2, D=6),
    "columns_features": Sizes(B=5, S=8, H=2, K=1, D=4),
    "rows_width_columns_heads": Sizes(B=4, S=6, H=6, K=3, D=4),
    "all": Sizes(B=6, S=6, H=6, K=3, D=6),
}


@dataclass(frozen=True)
class Step:
    """One operator (a key of `OPERATORS`, `FORBIDDEN` or `ENDS`) and its arguments."""

    name: str
    args: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Program:
    """What `Network` runs. ``start`` names what is added to the token embeddings."""

    sizes: Sizes
    start: tuple[str, ...]
    steps: tuple[Step, ...]
    end: Step
    seed: int = 0

    @property
    def uses(self) -> tuple[str, ...]:
        """The per-token inputs that the packed values depend on: the keys of the plan."""
        read = {_READS.get(name) for name in self.start}
        read.update(item for step in self.steps for item in step.args if isinstance(item, str))
        return ("ids", *(name for name in ("mask", "positions") if name in read))


class Batch(NamedTuple):
    """Per-token inputs, int64 ``[B, S]``."""

    ids: Tensor
    mask: Tensor
    positions: Tensor

    def select(self, rows: Tensor) -> Batch:
        return Batch(*(tensor[rows] for tensor in self))

    def keys(self, program: Program) -> list[Tensor]:
        return [getattr(self, name) for name in program.uses]


class Given(NamedTuple):
    """What a step can read beside its operand."""

    ids: Tensor
    mask: Tensor
    positions: Tensor
    embedded: Tensor


def make_batch(sizes: Sizes, seed: int) -> Batch:
    """Rows that branch off one another at random columns, in random order; mask and positions branch with them."""
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    def fresh() -> tuple[Tensor, Tensor, Tensor]:
        ids = torch.randint(0, sizes.V, (sizes.S,), generator=generator)
        mask = torch.ones(sizes.S, dtype=torch.long)
        mask[: number(0, 3)] = 0
        return ids, mask, torch.arange(sizes.S) + number(0, 3)

    rows = [fresh()]
    for _ in range(sizes.B - 1):
        # Most rows share at least half of another one.
        parent = rows[number(0, len(rows))]
        shared = number(0, sizes.S + 1) if number(0, 4) == 0 else number(sizes.S // 2, sizes.S)
        ids, mask, positions = (
            torch.cat([old[:shared], new[shared:]]) for old, new in zip(parent, fresh(), strict=True)
        )
        mask[sizes.S - min(number(0, 3), sizes.S - shared) :] = 0
        rows.append((ids, mask, positions))
    order = torch.randperm(sizes.B, generator=generator)
    return Batch(*(torch.stack([rows[row][part] for row in order]) for part in range(3)))


# --------------------------------------------------------------------------------------------------------- the network


class Network(nn.Module):
    """Runs a program. Weights are made when the first, eager, run asks for them."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.generator = torch.Generator().manual_seed(program.seed)
        self.complete = False
        with torch.no_grad():
            self(*make_batch(program.sizes, program.seed))
        self.complete = True

    def weight(self, step: int, name: str, *shape: int, scale: float = 0.4) -> Tensor:
        """A trainable parameter of ``step``."""
        key = f"step{step}_{name}"
        if not self.complete:
            drawn = torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale
            self.register_parameter(key, nn.Parameter(drawn))
        return getattr(self, key)  # type: ignore[no-any-return]

    def constant(self, step: int, name: str, *shape: int) -> Tensor:
        """A fixed tensor of ``step``."""
        key = f"step{step}_{name}"
        if not self.complete:
            self.register_buffer(key, torch.rand(shape, generator=self.generator, dtype=torch.float64) + 0.2)
        return getattr(self, key)  # type: ignore[no-any-return]

    def forward(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Any:
        sizes = self.program.sizes
        x = F.embedding(ids, self.weight(-1, "table", sizes.V, sizes.C, scale=1.0))
        for name in self.program.start:
            x = STARTS[name](self, x, Given(ids, mask, positions, x))
        given = Given(ids, mask, positions, x)
        for number, step in enumerate(self.program.steps):
            run = OPERATORS[step.name].run if step.name in OPERATORS else FORBIDDEN[step.name]
            x = run(self, number, given, x, *step.args)
        return ENDS[self.program.end.name](self, given, x, *self.program.end.args)


def columns(x: Tensor, dim: int = 1) -> Tensor:
    """Column numbers, int64 [S]."""
    return torch.arange(x.shape[dim], device=x.device)


STARTS: dict[str, Callable[[Network, Tensor, Given], Tensor]] = {
    "arange": lambda m, x, g: x + F.embedding(columns(x), m.weight(-1, "learned", 2 * x.shape[1] + 4, x.shape[2])),
    "arange_row": lambda m, x, g: x + m.weight(-1, "row", 2 * x.shape[1] + 4, x.shape[2])[columns(x).unsqueeze(0)],
    "positions": lambda m, x, g: (
        x + F.embedding(g.positions, m.weight(-1, "positions", 2 * x.shape[1] + 4, x.shape[2]))
    ),
    "mask": lambda m, x, g: x * g.mask.unsqueeze(-1).to(x.dtype) + 0.1,
    "mask_positions": lambda m, x, g: (
        x + F.embedding((g.mask.cumsum(-1) - 1).clamp(min=0), m.weight(-1, "counted", x.shape[1] + 1, x.shape[2]))
    ),
    "mask_filled": lambda m, x, g: x.masked_fill((g.mask == 0)[:, :, None], 0.3),
}
#: Which input a start reads.
_READS = {"positions": "positions", "mask": "mask", "mask_positions": "mask", "mask_filled": "mask"}


def spread(x: Tensor, layout: Layout, windows: Sequence[tuple[int | None, int | None]]) -> Tensor:
    """A per-token tensor [B, S] so that it broadcasts against ``layout``, cut to the same columns."""
    for start, stop in windows:
        x = x[:, start:stop]
    if "T" in layout:
        x = x.reshape(-1)
    for dim, name in enumerate(layout):
        if name not in "BST":
            x = x.unsqueeze(dim)
    return x


# ------------------------------------------------------------------------------------------------------- the operators


@dataclass(frozen=True)
class State:
    """What the generator knows between two steps."""

    layout: Layout
    windows: tuple[tuple[int | None, int | None], ...] = ()
    attentions: int = 0
    inputs: frozenset[str] = frozenset()

    def features(self) -> list[int]:
        return [dim for dim, name in enumerate(self.layout) if name in FEATURES]

    def dim(self, name: str) -> int:
        return self.layout.index(name)


Drawn = tuple[tuple[Any, ...], State] | None


@dataclass(frozen=True)
class Operator:
    """``run(network, step, given, x, *args)``; ``draw`` gives arguments and the next state, None if it does not fit."""

    run: Callable[..., Tensor]
    draw: Callable[[Choose, State], Drawn]


OPERATORS: dict[str, Operator] = {}


def operator(draw: Callable[[Choose, State], Drawn]) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    def decorate(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        OPERATORS[run.__name__.rstrip("_")] = Operator(run, draw)
        return run

    return decorate


def anywhere(*options: Sequence[Any]) -> Callable[[Choose, State], Drawn]:
    """Fits every layout; one argument from each of ``options``."""
    return lambda choose, state: (tuple(choose(part) for part in options), state)


def along_feature(*options: Sequence[Any]) -> Callable[[Choose, State], Drawn]:
    """First argument: a feature dimension."""
    return lambda choose, state: ((choose(state.features()), *(choose(part) for part in options)), state)


def features_last(*options: Sequence[Any]) -> Callable[[Choose, State], Drawn]:
    """Fits where the last dimension is a feature."""

    def draw(choose: Choose, state: State) -> Drawn:
        return (tuple(choose(part) for part in options), state) if state.layout[-1] in FEATURES else None

    return draw


def in_layout(*layouts: Layout, options: Sequence[Sequence[Any]] = ()) -> Callable[[Choose, State], Drawn]:
    def draw(choose: Choose, state: State) -> Drawn:
        return (tuple(choose(part) for part in options), state) if state.layout in layouts else None

    return draw


# Pointwise ------------------------------------------------------------------------------------------------------------

_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sin": torch.sin,
    "gelu": F.gelu,
    "silu": F.silu,
    "square": lambda x: 0.3 * x.clamp(-2, 2) ** 2,
    "softplus": F.softplus,
    "gate": lambda x: x * torch.sigmoid(x) - 0.1,
    "addcmul": lambda x: torch.addcmul(x, x.cos(), x, value=0.2),
    "lerp": lambda x: torch.lerp(x, x.sin(), 0.3),
    "extremes": lambda x: torch.maximum(x, x.sin()) - torch.minimum(x, 0.2 * x),
    "where": lambda x: torch.where(x > 0.1, x, -0.5 * x),
    "where_number": lambda x: torch.where(x > 0.2, x, 0.1),
    "masked_fill": lambda x: x.masked_fill(x.detach() > 1.5, 0.7),
    "cast_bool": lambda x: x + (x > 0).to(x.dtype),
    "cast_float": lambda x: x + x.detach().float().type_as(x),
    "cast_int": lambda x: x + (3 * x.detach()).floor().long().to(torch.float64) / 4,
    "logical": lambda x: x + ((x > 0) & ~(x > 1) | (x < -1)).double(),
    "alike": lambda x: x * 0.9 + torch.ones_like(x) * 0.1 + x.new_full((x.shape[-1],), 0.2),
    "dropout_zero": lambda x: F.dropout(x, 0.0, training=True) * 1.1,
    "copy": lambda x: x.contiguous() + 0.5 * x.detach() + x.clone(),
}


@operator(anywhere(list(_UNARY)))
def unary(m: Network, i: int, g: Given, x: Tensor, name: str) -> Tensor:
    return _UNARY[name](x)


def _draw_constant(choose: Choose, state: State) -> Drawn:
    # A constant may vary along columns and features; a flattened token dimension has no constant of its own.
    kept = tuple(dim for dim, name in enumerate(state.layout) if name in ("S", *FEATURES) and choose([True, False]))
    return (kept, choose([True, False]), choose(["add", "mul", "where"])), state


@operator(_draw_constant)
def constant(m: Network, i: int, g: Given, x: Tensor, kept: Sequence[int], full_rank: bool, how: str) -> Tensor:
    """With a tensor as written: [S], [S, C], [C], [1, S, 1], [H, 1, D], ..."""
    shape = [x.shape[dim] if dim in kept else 1 for dim in range(x.ndim)]
    if not full_rank:
        shape = shape[min(kept, default=x.ndim - 1) :]
    held = m.constant(i, "constant", *shape)
    if how == "where":
        return torch.where(held > 0.7, x, 0.5 * x + held)
    return x + held if how == "add" else x * held


def _draw_numbers(choose: Choose, state: State) -> Drawn:
    if "S" not in state.layout:
        return None
    return (state.dim("S"), choose(["plain", "expanded", "expanded_features"])), state


@operator(_draw_numbers)
def column_numbers(m: Network, i: int, g: Given, x: Tensor, dim: int, how: str) -> Tensor:
    """With column numbers computed in the graph, also expanded over rows as models do."""
    numbers = columns(x, dim).to(x.dtype) / x.shape[dim]
    numbers = numbers.reshape([-1] + [1] * (x.ndim - dim - 1))
    if how == "expanded":
        numbers = numbers.expand(x.shape[0], *x.shape[1:dim], *numbers.shape) if x.ndim > 1 else numbers
    elif how == "expanded_features":
        numbers = numbers.expand(*x.shape[dim:])
    return x + torch.sin(3 * numbers)


def _draw_per_token(choose: Choose, state: State) -> Drawn:
    return (choose(sorted(state.inputs)), choose(["mul", "fill", "add"]), state.layout, state.windows), state


@operator(_draw_per_token)
def per_token(
    m: Network, i: int, g: Given, x: Tensor, name: str, how: str, layout: Layout, windows: tuple[Any, ...]
) -> Tensor:
    """With an input [B, S], brought to the layout of x."""
    given = spread(getattr(g, name), layout, windows)
    if how == "fill":
        return x.masked_fill(given % 3 == 1, 0.25)
    number = torch.cos(given.to(x.dtype))
    return x * number if how == "mul" else x + number


@operator(in_layout(BASE))
def residual(m: Network, i: int, g: Given, x: Tensor) -> Tensor:
    return x + g.embedded if x.shape[1] == g.embedded.shape[1] else 1.1 * x


# Views ----------------------------------------------------------------------------------------------------------------


def _merged(layout: Layout, dim: int, name: str) -> Layout:
    return (*layout[:dim], name, *layout[dim + 2 :])


def _draw_flatten_tokens(choose: Choose, state: State) -> Drawn:
    if "B" not in state.layout or state.dim("S") != state.dim("B") + 1:
        return None
    layout = _merged(state.layout, state.dim("B"), "T")
    return (state.dim("B"), choose(["flatten", "view", "reshape"])), replace(state, layout=layout)


@operator(_draw_flatten_tokens)
def flatten_tokens(m: Network, i: int, g: Given, x: Tensor, dim: int, how: str) -> Tensor:
    if how == "flatten":
        return x.flatten(dim, dim + 1)
    sizes = [*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :]]
    return x.contiguous().view(sizes) if how == "view" else x.reshape(sizes)


def _draw_unflatten_tokens(choose: Choose, state: State) -> Drawn:
    if "T" not in state.layout:
        return None
    dim = state.dim("T")
    layout = (*state.layout[:dim], "B", "S", *state.layout[dim + 1 :])
    return (dim, choose(["unflatten", "reshape"])), replace(state, layout=layout)


@operator(_draw_unflatten_tokens)
def unflatten_tokens(m: Network, i: int, g: Given, x: Tensor, dim: int, how: str) -> Tensor:
    rows = g.ids.shape[0]
    if how == "unflatten":
        return x.unflatten(dim, (rows, x.shape[dim] // rows))
    return x.reshape(*x.shape[:dim], rows, -1, *x.shape[dim + 1 :])


def _draw_split_heads(choose: Choose, state: State) -> Drawn:
    if "C" not in state.layout:
        return None
    dim = state.dim("C")
    layout = (*state.layout[:dim], "H", "D", *state.layout[dim + 1 :])
    return (dim, choose(["unflatten", "view", "inferred"])), replace(state, layout=layout)


@operator(_draw_split_heads)
def split_heads(m: Network, i: int, g: Given, x: Tensor, dim: int, how: str) -> Tensor:
    heads, width = m.program.sizes.H, m.program.sizes.D
    if how == "unflatten":
        return x.unflatten(dim, (heads, width))
    if how == "view":
        return x.contiguous().view(*x.shape[:dim], heads, width, *x.shape[dim + 1 :])
    return x.reshape(*x.shape[:dim], -1, width, *x.shape[dim + 1 :])


@operator(lambda choose, state: ((), replace(state, layout=("B", "H", "S", "D"))) if state.layout == BASE else None)
def to_heads(m: Network, i: int, g: Given, x: Tensor) -> Tensor:
    return x.view(x.shape[0], x.shape[1], -1, m.program.sizes.D).transpose(1, 2)


def _draw_merge_heads(choose: Choose, state: State) -> Drawn:
    if "H" not in state.layout or state.dim("D") != state.dim("H") + 1:
        return None
    dim = state.dim("H")
    return (dim, choose(["flatten", "reshape"])), replace(state, layout=_merged(state.layout, dim, "C"))


@operator(_draw_merge_heads)
def merge_heads(m: Network, i: int, g: Given, x: Tensor, dim: int, how: str) -> Tensor:
    if how == "flatten":
        return x.flatten(dim, dim + 1)
    return x.reshape(*x.shape[:dim], m.program.sizes.C, *x.shape[dim + 2 :])


def _ordered(layout: Layout) -> bool:
    return "B" not in layout or layout.index("B") < layout.index("S")


def _draw_permute(choose: Choose, state: State) -> Drawn:
    rank = len(state.layout)
    left = list(range(rank))
    order: list[int] = []
    while left:
        order.append(choose(left))
        left.remove(order[-1])
    layout = tuple(state.layout[dim] for dim in order)
    return ((tuple(order),), replace(state, layout=layout)) if _ordered(layout) else None


@operator(_draw_permute)
def permute(m: Network, i: int, g: Given, x: Tensor, order: tuple[int, ...]) -> Tensor:
    return x.permute(order)


def _draw_transpose(choose: Choose, state: State) -> Drawn:
    a, b = choose(range(len(state.layout))), choose(range(len(state.layout)))
    layout = list(state.layout)
    layout[a], layout[b] = layout[b], layout[a]
    how = choose(["transpose", "swapaxes", "mT"])
    if how == "mT" and (len(layout) < 2 or {a, b} != {len(layout) - 1, len(layout) - 2}):
        return None
    return ((a, b, how), replace(state, layout=tuple(layout))) if a != b and _ordered(tuple(layout)) else None


@operator(_draw_transpose)
def transpose(m: Network, i: int, g: Given, x: Tensor, a: int, b: int, how: str) -> Tensor:
    if how == "mT":
        return x.mT
    return x.transpose(a, b) if how == "transpose" else x.swapaxes(a - x.ndim, b)


def _draw_unsqueeze(choose: Choose, state: State) -> Drawn:
    if len(state.layout) > 4:
        return None
    dim = choose(range(len(state.layout) + 1))
    layout = (*state.layout[:dim], "1", *state.layout[dim:])
    return (dim, choose(["unsqueeze", "view", "none"])), replace(state, layout=layout)


@operator(_draw_unsqueeze)
def unsqueeze(m: Network, i: int, g: Given, x: Tensor, dim: int, how: str) -> Tensor:
    if how == "view":
        return x.reshape(*x.shape[:dim], 1, *x.shape[dim:])
    return x.unsqueeze(dim) if how == "unsqueeze" else x[(slice(None),) * dim + (None,)]


def _draw_squeeze(choose: Choose, state: State) -> Drawn:
    ones = [dim for dim, name in enumerate(state.layout) if name == "1"]
    if not ones:
        return None
    dim = choose(ones)
    return (dim, choose(["squeeze", "select"])), replace(state, layout=(*state.layout[:dim], *state.layout[dim + 1 :]))


@operator(_draw_squeeze)
def squeeze(m: Network, i: int, g: Given, x: Tensor, dim: int, how: str) -> Tensor:
    return x.squeeze(dim) if how == "squeeze" else x.select(dim, 0)


@operator(along_feature(["chunk", "split", "sizes", "slice", "narrow", "pad"]))
def halves(m: Network, i: int, g: Given, x: Tensor, dim: int, how: str) -> Tensor:
    """Parts of the features, put together again in another order."""
    size = x.shape[dim]
    if how == "chunk":
        a, b = x.chunk(2, dim)
        return x + torch.cat([-b, a], dim)
    if how == "split":
        a, b = x.split(size // 2, dim)
        return torch.cat([a + b, a - 0.5 * b], dim)
    if how == "sizes":
        a, b = x.split([1, size - 1], dim)
        return torch.cat([b, a.cos()], dim)
    if how == "narrow":
        return torch.cat([x.narrow(dim, 1, size - 1), x.narrow(dim, 0, 1)], dim)
    if how == "pad":
        pads = (0, 0) * (x.ndim - dim - 1) + (0, 1)
        return x + F.pad(x.narrow(dim, 1, size - 1), pads, value=0.1)
    index = (slice(None),) * dim
    return torch.cat([x[(*index, slice(size // 2, None))], x[(*index, slice(None, size // 2))] * 0.8], dim)


@operator(along_feature())
def unbind_stack(m: Network, i: int, g: Given, x: Tensor, dim: int) -> Tensor:
    parts = x.unbind(dim)
    return torch.stack([*parts[1:], parts[0].sin()], dim)


@operator(along_feature(["stack", "expand", "repeat", "interleave", "unsqueeze_cat"]))
def copies(m: Network, i: int, g: Given, x: Tensor, dim: int, how: str) -> Tensor:
    """A new feature dimension, and a sum over it."""
    scale = m.constant(i, "scale", 3, *[1] * (x.ndim - dim))
    if how == "stack":
        wide = torch.stack([x, x.sin(), x.cos()], dim)
    elif how == "expand":
        wide = x.unsqueeze(dim).expand(*x.shape[:dim], 3, *x.shape[dim:])
    elif how == "repeat":
        wide = x.unsqueeze(dim).repeat(*[1] * dim, 3, *[1] * (x.ndim - dim))
    elif how == "interleave":
        wide = x.unsqueeze(dim).repeat_interleave(3, dim=dim)
    else:
        wide = torch.cat([x.unsqueeze(dim), x.unsqueeze(dim).tanh(), 0.5 * x.unsqueeze(dim)], dim)
    return (wide * scale).sum(dim) * 0.6


@operator(along_feature(["select", "index"]))
def one_feature(m: Network, i: int, g: Given, x: Tensor, dim: int, how: str) -> Tensor:
    if how == "index":
        return x + 0.5 * x[(slice(None),) * dim + (1,)].unsqueeze(dim)
    return x + 0.5 * x.select(dim, -1).unsqueeze(dim)


# Reductions -----------------------------------------------------------------------------------------------------------

_REDUCTIONS: dict[str, Callable[[Tensor, int, bool], Tensor]] = {
    "mean": lambda x, dim, keep: x.mean(dim, keepdim=keep),
    "sum": lambda x, dim, keep: 0.3 * x.sum(dim, keepdim=keep),
    "amax": lambda x, dim, keep: x.amax(dim, keepdim=keep),
    "amin": lambda x, dim, keep: x.amin(dim, keepdim=keep),
    "max": lambda x, dim, keep: x.max(dim, keepdim=keep).values,
    "min": lambda x, dim, keep: x.min(dim, keepdim=keep).values,
    "max_index": lambda x, dim, keep: x.max(dim, keepdim=keep).indices.to(x.dtype) / 4,
    "var": lambda x, dim, keep: 0.3 * x.var(dim, keepdim=keep),
    "std": lambda x, dim, keep: (x + 0.01 * x.cos()).std(dim, unbiased=False, keepdim=keep),
    "logsumexp": lambda x, dim, keep: x.logsumexp(dim, keepdim=keep),
    "norm": lambda x, dim, keep: torch.linalg.vector_norm(x, dim=dim, keepdim=keep) * 0.3,
    "prod": lambda x, dim, keep: x.tanh().prod(dim, keepdim=keep),
    "argmax": lambda x, dim, keep: x.argmax(dim, keepdim=keep).to(x.dtype) / 4,
    "any": lambda x, dim, keep: (x > 1).any(dim, keepdim=keep).to(x.dtype),
    "all": lambda x, dim, keep: (x > -1).all(dim, keepdim=keep).to(x.dtype),
    "top": lambda x, dim, keep: x.topk(2, dim).values.mean(dim, keepdim=keep),
}


@operator(along_feature(list(_REDUCTIONS), [True, False]))
def reduce(m: Network, i: int, g: Given, x: Tensor, dim: int, name: str, keep: bool) -> Tensor:
    reduced = _REDUCTIONS[name](x, dim, keep)
    return 0.8 * x + (reduced if keep else reduced.unsqueeze(dim))


_ALONG: dict[str, Callable[[Tensor, int], Tensor]] = {
    "softmax": lambda x, dim: x + 2 * x.softmax(dim),
    "log_softmax": lambda x, dim: 0.5 * x.log_softmax(dim),
    "cumsum": lambda x, dim: 0.4 * x.cumsum(dim),
    "cumprod": lambda x, dim: x + (1 + 0.3 * x.tanh()).cumprod(dim),
    "flip": lambda x, dim: x + 0.7 * x.flip(dim),
    "sort": lambda x, dim: x.sort(dim, descending=True).values,
    "cummax": lambda x, dim: x + 0.2 * x.cummax(dim).values,
    "glu": lambda x, dim: x + torch.cat([F.glu(x, dim), F.glu(-x, dim)], dim),
}


@operator(along_feature(list(_ALONG)))
def along(m: Network, i: int, g: Given, x: Tensor, dim: int, name: str) -> Tensor:
    return _ALONG[name](x, dim)


def _features_at_end(state: State, count: int) -> bool:
    return len(state.layout) >= count and all(name in FEATURES for name in state.layout[-count:])


def _draw_norm(choose: Choose, state: State) -> Drawn:
    kinds = ["layer_norm", "layer_norm_weight", "rms_norm", "rms_by_hand"] if _features_at_end(state, 1) else []
    kinds += ["two"] * 2 if _features_at_end(state, 2) else []
    return ((choose(kinds),), state) if kinds else None


@operator(_draw_norm)
def norm(m: Network, i: int, g: Given, x: Tensor, how: str) -> Tensor:
    width = x.shape[-1]
    if how == "two":
        return F.layer_norm(x, x.shape[-2:], m.weight(i, "scale", *x.shape[-2:]))
    if how == "layer_norm":
        return F.layer_norm(x, (width,))
    scale = m.weight(i, "scale", width)
    if how == "layer_norm_weight":
        return F.layer_norm(x, (width,), scale, m.weight(i, "shift", width))
    if how == "rms_norm":
        return F.rms_norm(x, (width,), scale, 1e-5)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * scale


# Products -------------------------------------------------------------------------------------------------------------


def _draw_product(choose: Choose, state: State) -> Drawn:
    kinds: list[str] = []
    if _features_at_end(state, 1):
        kinds += ["linear", "linear_bias", "matmul", "matmul_transposed", "vector", "two_layers"]
    # Kinds that few layouts allow are drawn as often as all the others.
    special: list[str] = []
    if state.layout == ("T", "C"):
        special += ["mm", "addmm"]
    if state.layout == ("B", "H", "S", "D"):
        special += ["by_head"]
    if _features_at_end(state, 2):
        special += ["of_features"]
    if len(state.layout) > 1 and state.layout[-2] in FEATURES:
        special += ["from_left"]
    pools = [pool for pool in (kinds, special) if pool]
    return ((choose(choose(pools)),), state) if pools else None


@operator(_draw_product)
def product(m: Network, i: int, g: Given, x: Tensor, how: str) -> Tensor:
    width = x.shape[-1]
    if how == "vector":
        return x + (x @ m.weight(i, "vector", width)).unsqueeze(-1)
    if how == "by_head":  # [B, H, S, D] @ [H, D, D]
        return x + x @ m.weight(i, "weight", x.shape[1], width, width)
    if how == "of_features":  # a small attention between the heads of one token
        return x + torch.softmax(x @ x.transpose(-1, -2), -1) @ x
    if how == "from_left":  # [C, C] @ [..., C, S]
        return x + m.weight(i, "weight", x.shape[-2], x.shape[-2]) @ x
    weight = m.weight(i, "weight", width, width)
    if how == "linear":
        return x + F.linear(x, weight)
    if how == "linear_bias":
        return F.linear(x, weight, m.weight(i, "bias", width))
    if how == "mm":
        return x + torch.mm(x, weight)
    if how == "addmm":
        return x + torch.addmm(m.weight(i, "bias", width), x, weight)
    if how == "matmul":
        return x @ weight
    if how == "matmul_transposed":
        return x + torch.matmul(x, weight.t())
    return x + F.linear(F.gelu(F.linear(x, m.weight(i, "up", width + 1, width))), m.weight(i, "down", width, width + 1))


# Look-ups -------------------------------------------------------------------------------------------------------------


@operator(along_feature(["sorted", "top"]))
def gather(m: Network, i: int, g: Given, x: Tensor, dim: int, how: str) -> Tensor:
    other = x.sin() * 1.3
    indices = other.sort(dim).indices if how == "sorted" else other.topk(x.shape[dim], dim).indices
    return 0.5 * x + x.gather(dim, indices)


@operator(along_feature())
def index_select(m: Network, i: int, g: Given, x: Tensor, dim: int) -> Tensor:
    size = x.shape[dim]
    return x + 0.5 * x.index_select(dim, torch.arange(size - 1, -1, -1, device=x.device))


@operator(features_last(["index", "embedding", "functional"]))
def lookup(m: Network, i: int, g: Given, x: Tensor, how: str) -> Tensor:
    """A table read at a number computed from each token's features."""
    table = m.weight(i, "table", x.shape[-1], x.shape[-1])
    numbers = x.argmax(-1)
    if how == "index":
        return x + table[numbers]
    return x + (F.embedding(numbers, table) if how == "functional" else torch.embedding(table, numbers))


@operator(in_layout(BASE, options=[["index", "embedding"]]))
def lookup_of_ids(m: Network, i: int, g: Given, x: Tensor, how: str) -> Tensor:
    if x.shape[1] != g.ids.shape[1]:
        return x.cos()
    table = m.weight(i, "table", m.program.sizes.V, x.shape[-1])
    return x + (table[g.ids] if how == "index" else F.embedding(g.ids, table, padding_idx=0))


# Scans and windows ----------------------------------------------------------------------------------------------------


def _draw_scan(choose: Choose, state: State) -> Drawn:
    if "S" not in state.layout or state.windows:
        return None
    return (state.dim("S"), choose(["cumsum", "cumprod", "diff", "diff_negative"])), state


@operator(_draw_scan)
def scan(m: Network, i: int, g: Given, x: Tensor, dim: int, how: str) -> Tensor:
    if how == "cumsum":
        return x + 0.3 * x.cumsum(dim)
    if how == "cumprod":
        return x + (1 + 0.2 * x.tanh()).cumprod(dim)
    along = dim - x.ndim if how == "diff_negative" else dim
    return x + 0.7 * torch.diff(x, dim=along, prepend=x[(slice(None),) * dim + (slice(None, 1),)])


@operator(in_layout(BASE, options=[["document", "count"]]))
def scan_of_ids(m: Network, i: int, g: Given, x: Tensor, how: str) -> Tensor:
    """Counts along the row of whole numbers, as document and position numbers are made."""
    if x.shape[1] != g.ids.shape[1]:
        return x.cos()
    found = g.ids % 3 == 0
    if how == "document":
        found = torch.diff(g.ids, dim=-1, prepend=g.ids[:, :1]) > 0
    return x + torch.cos(found.cumsum(-1).to(x.dtype)).unsqueeze(-1)


_WINDOWS: list[tuple[int | None, int | None]] = [(1, None), (None, -1), (-3, None), (1, -1), (0, 4), (2, 5)]


def _draw_window(choose: Choose, state: State) -> Drawn:
    # Attention behind a slice of the columns is not meant to be packed; neither do slices of slices get short.
    if state.attentions or "S" not in state.layout or len(state.windows) > 1:
        return None
    window = choose(_WINDOWS if not state.windows else _WINDOWS[:2])
    return (state.dim("S"), *window), replace(state, windows=(*state.windows, window))


@operator(_draw_window)
def window(m: Network, i: int, g: Given, x: Tensor, dim: int, start: int | None, stop: int | None) -> Tensor:
    return x[(slice(None),) * dim + (slice(start, stop),)]


# Attention ------------------------------------------------------------------------------------------------------------


def to_base(m: Network, i: int, g: Given, x: Tensor, layout: Layout) -> Tensor:
    """Any layout -> [B, S, C]."""
    for dim in reversed(range(len(layout))):
        if layout[dim] == "1":
            x = x.squeeze(dim)
    solid = [name for name in layout if name != "1"]
    wanted = [name for name in ("T", "B", "S", "C", "H", "D") if name in solid]
    x = x.permute([solid.index(name) for name in wanted])
    if "T" in solid:
        rows = g.ids.shape[0]
        x = x.reshape(rows, x.shape[0] // rows, *x.shape[1:])
    return x.flatten(2) if "H" in solid else x


OPERATORS["to_base"] = Operator(
    to_base,
    lambda choose, state: ((state.layout,), replace(state, layout=BASE)) if state.layout != BASE else None,
)


def allowed(g: Given, kind: str) -> Tensor:
    """A boolean (or, for ``added``, additive) mask [B or 1, 1, S, S]."""
    query, key = columns(g.ids)[:, None], columns(g.ids)[None, :]
    causal = (key <= query)[None, None]
    valid = g.mask.bool()[:, None, None, :]
    if kind == "causal":
        return causal
    if kind == "valid":
        return causal & valid
    if kind == "both_valid":
        return valid & (causal & g.mask.bool()[:, None, :, None])
    if kind == "window":
        return causal & (key > query - 3)[None, None]
    if kind == "window_valid":
        return (query - key < 4)[None, None] & (key <= query) & valid
    if kind == "chunk":
        return causal & (key // 4 == query // 4)
    if kind == "strict_or_same":
        return ~(key > query)[None, None].expand(g.ids.shape[0], -1, -1, -1)
    if kind == "document":
        document = (g.ids % 5 == 0).cumsum(-1)
        return causal & (document[:, None, :, None] == document[:, None, None, :])
    if kind in ODD_MASKS:
        flags = g.ids % 4 + 1
        return causal & ODD_MASKS[kind](flags[:, None, :, None], flags[:, None, None, :])
    seen = causal & valid
    zero = torch.zeros((), dtype=g.embedded.dtype, device=g.ids.device)
    if kind == "added":
        return torch.where(seen, zero, float("-inf"))
    shape = (g.ids.shape[0], 1, g.ids.shape[1], g.ids.shape[1])
    return torch.zeros(shape, dtype=g.embedded.dtype, device=g.ids.device).masked_fill(~seen, float("-inf"))


#: Kinds of masks, and whether they read the mask input.
MASKS = {
    "is_causal": False,
    "causal": False,
    "window": False,
    "chunk": False,
    "strict_or_same": False,
    "document": False,
    "valid": True,
    "both_valid": True,
    "window_valid": True,
    "added": True,
    "filled": True,
}


#: Terms whose whole numbers are bits, or do not fit their type: what a predicate over int64 must not take for logic.
ODD_MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bits_and": lambda query, key: (query & key) != 0,
    "bits_or": lambda query, key: (query | key) != 3,
    "bits_not": lambda query, key: ~(query - key) != 0,
    "narrowed": lambda query, key: (query * 40 + key * 40).to(torch.uint8) > 100,
    "wrapped": lambda query, key: (query.to(torch.uint8) - key.to(torch.uint8)) < 8,
    "sum_of_truths": lambda query, key: ((query > 2) + (key > 2)) == 1,
}


def turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cosine + torch.cat([-b, a], -1) * sine


def attention(
    m: Network, i: int, g: Given, x: Tensor, mask: str, heads: str, rotary: str, fused: bool, reads: str = ""
) -> Tensor:
    """Self-attention as models write it."""
    sizes = m.program.sizes
    rows, count, width = x.shape[0], x.shape[1], sizes.D
    groups = sizes.H if heads == "all" else sizes.K
    normed = F.layer_norm(x, (sizes.C,))
    if fused:
        joined = F.linear(normed, m.weight(i, "qkv", (sizes.H + 2 * groups) * width, sizes.C))
        q, k, v = joined.split([sizes.H * width, groups * width, groups * width], -1)
    else:
        q = F.linear(normed, m.weight(i, "q", sizes.H * width, sizes.C))
        k = F.linear(normed, m.weight(i, "k", groups * width, sizes.C), m.weight(i, "k_bias", groups * width))
        v = F.linear(normed, m.weight(i, "v", groups * width, sizes.C))
    q = q.view(rows, count, sizes.H, width).transpose(1, 2)
    k = k.reshape(rows, count, -1, width).permute(0, 2, 1, 3)
    v = v.unflatten(-1, (groups, width)).transpose(1, 2)
    if rotary:
        numbers = columns(g.ids)
        if rotary == "row":
            numbers = numbers.unsqueeze(0)
        elif rotary == "expanded":
            numbers = numbers.unsqueeze(0).expand(rows, count)
        elif rotary == "positions":
            numbers = g.positions
        angles = numbers[..., None].to(x.dtype) * m.constant(i, "frequency", width // 2)
        angles = torch.cat([angles, angles], -1).unsqueeze(-3)
        q, k = (turned(part, angles.cos(), angles.sin()) for part in (q, k))
    if heads == "expand":
        k, v = (
            part[:, :, None].expand(rows, groups, sizes.H // groups, count, width).reshape(rows, sizes.H, count, width)
            for part in (k, v)
        )
    elif heads == "interleave":
        k, v = (part.repeat_interleave(sizes.H // groups, dim=1) for part in (k, v))
    elif heads == "tile":
        k, v = (part.repeat(1, sizes.H // groups, 1, 1) for part in (k, v))
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=None if mask == "is_causal" else allowed(g, mask),
        is_causal=mask == "is_causal",
        enable_gqa=heads == "native",
        scale=0.7 if mask == "window" else None,
    )
    return x + F.linear(out.transpose(1, 2).reshape(rows, count, sizes.C), m.weight(i, "out", sizes.C, sizes.C))


def _draw_attention(choose: Choose, state: State) -> Drawn:
    masks = [name for name, reads in MASKS.items() if not reads or "mask" in state.inputs]
    mask = choose(masks)
    rotary = ["", "plain", "row", "expanded", *(["positions"] if "positions" in state.inputs else [])]
    heads = choose(["all", "expand", "interleave", "tile", "native"])
    drawn = (mask, heads, choose(rotary), choose([True, False]), "mask" if MASKS[mask] else "")
    return drawn, replace(state, attentions=state.attentions - 1)


OPERATORS["attention"] = Operator(attention, _draw_attention)


# Ends -----------------------------------------------------------------------------------------------------------------


def logits(m: Network, x: Tensor) -> Tensor:
    return F.linear(x, m.weight(-2, "head", m.program.sizes.V, x.shape[-1]))


def chosen(m: Network, g: Given, x: Tensor) -> Tensor:
    """The log-probability of each next token, as trainers compute it."""
    scores = logits(m, x)[:, :-1].log_softmax(-1)
    return scores.gather(-1, g.ids[:, -scores.shape[1] :].unsqueeze(-1)).squeeze(-1)


#: All but ``mean`` give tensors whose first dimension is the row.
ENDS: dict[str, Callable[..., Any]] = {
    "logits": lambda m, g, x: logits(m, x),
    "log_softmax": lambda m, g, x: logits(m, x).log_softmax(-1),
    "chosen": chosen,
    "mean": lambda m, g, x: logits(m, x).square().mean(),
    "kept": lambda m, g, x: logits(m, x[:, -3:, :]),
    "last": lambda m, g, x: logits(m, x[:, -1]),
    "shifted": lambda m, g, x: (logits(m, x)[:, 1:], x[:, :-1].tanh()),
    "features": lambda m, g, x: (x, x.sin().mean(-1)),
}


# ------------------------------------------------------------------------------------------------ operators not to pack

#: Applied to [B, S, C]: what they give at a token depends on later columns, on other rows, or on the row's number.
FORBIDDEN: dict[str, Callable[..., Tensor]] = {
    "flip": lambda m, i, g, x: x + 0.5 * x.flip(1),
    "mean_over_rows": lambda m, i, g, x: x + x.mean(0, keepdim=True),
    "mean_over_columns": lambda m, i, g, x: x + x.mean(1, keepdim=True),
    "mean_over_all": lambda m, i, g, x: x + x.mean(),
    "roll": lambda m, i, g, x: x + x.roll(-1, 1),
    "roll_rows": lambda m, i, g, x: x + x.roll(1, 0),
    "look_ahead_pad": lambda m, i, g, x: x + F.pad(x, (0, 0, 0, 1))[:, 1:],
    "look_ahead_cat": lambda m, i, g, x: x + torch.cat([x[:, 1:], x[:, :1]], 1),
    "cumsum_from_right": lambda m, i, g, x: x + 0.2 * x.flip(1).cumsum(1).flip(1),
    "cumsum_rest": lambda m, i, g, x: x + 0.2 * (x.sum(1, keepdim=True) - x.cumsum(1)),
    "cumsum_over_rows": lambda m, i, g, x: x + 0.2 * x.cumsum(0),
    "softmax_columns": lambda m, i, g, x: x + x.softmax(1),
    "sort_columns": lambda m, i, g, x: x.sort(1).values,
    "gather_columns": lambda m, i, g, x: x + x.gather(1, (g.ids % g.ids.shape[1])[..., None].expand(x.shape)),
    "index_columns": lambda m, i, g, x: x + x[:, columns(x).flip(0)],
    "row_numbers": lambda m, i, g, x: x + torch.arange(x.shape[0], device=x.device)[:, None, None],
    "mixing_view": lambda m, i, g, x: x + x.unflatten(-1, (m.program.sizes.H, -1)).transpose(1, 2).reshape(x.shape),
    "swapped_tokens": lambda m, i, g, x: x + x.transpose(0, 1).reshape(x.shape),
    "mixing_columns": lambda m, i, g, x: x + (x.mT @ m.weight(i, "columns", x.shape[1], x.shape[1])).mT,
    "scores_by_hand": lambda m, i, g, x: x + (x @ x.mT).softmax(-1) @ x,
    "shift_by_cat": lambda m, i, g, x: x + torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1),
    "bidirectional": lambda m, i, g, x: x + F.scaled_dot_product_attention(*[x.unsqueeze(1)] * 3).squeeze(1),
    "look_ahead_mask": lambda m, i, g, x: (
        x
        + F.scaled_dot_product_attention(
            *[x.unsqueeze(1)] * 3, attn_mask=(columns(x)[None, :] <= columns(x)[:, None] + 1)[None, None]
        ).squeeze(1)
    ),
}


# -------------------------------------------------------------------------------------------------------- the generator


#: Operators that lead to another layout: drawn more often, for the others to be met in many.
LAYOUTS = [
    "flatten_tokens",
    "unflatten_tokens",
    "split_heads",
    "to_heads",
    "merge_heads",
    "permute",
    "transpose",
    "unsqueeze",
    "squeeze",
]


@dataclass
class _Builder:
    choose: Choose
    state: State
    steps: list[Step] = field(default_factory=list)

    def add(self, name: str) -> bool:
        drawn = OPERATORS[name].draw(self.choose, self.state)
        if drawn is None:
            return False
        args, self.state = drawn
        self.steps.append(Step(name, args))
        return True

    def some(self, count: int) -> None:
        others = [name for name in OPERATORS if name not in (*LAYOUTS, "attention", "to_base")]
        for _ in range(count):
            # An operator that does not fit the layout is drawn again, but not for ever (hypothesis draws equal ones).
            for _ in range(6):
                if self.add(self.choose(self.choose([others, others, LAYOUTS]))):
                    break


def generate(choose: Choose, sizes: Sizes | None = None, *, forbidden: bool = False) -> Program:
    """A random program; with ``forbidden``, one operator that must not be packed stands between two steps."""
    start = tuple(
        name
        for group in (("", "", "arange", "arange_row", "positions"), ("", "", "mask", "mask_positions", "mask_filled"))
        if (name := choose(group))
    )
    inputs = frozenset(["ids", *(_READS[name] for name in start if name in _READS)])
    attentions = choose([1, 1, 1, 2, 3])
    builder = _Builder(choose, State(BASE, attentions=attentions, inputs=inputs))
    for _ in range(attentions):
        builder.some(choose([0, 2, 4, 6]))
        builder.add("to_base")
        builder.add("attention")
    builder.some(choose([1, 3, 5, 7]))
    builder.add("to_base")
    steps = builder.steps
    if forbidden:
        # The places where the layout is [B, S, C].
        places = [0, *(place for place, step in enumerate(steps) if step.name == "attention"), len(steps)]
        place = choose(places)
        steps.insert(place, Step(choose(list(FORBIDDEN))))
    end = Step(choose(list(ENDS)))
    return Program(sizes or choose([DISTINCT, *COLLIDING.values()]), start, tuple(steps), end, seed=choose(range(1000)))
