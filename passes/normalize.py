"""Dynamo graph -> pre-dispatch ATen graph.

Before (Dynamo):    ``hidden = torch._C._nn.linear(x, w); hidden.view(4, 20, -1, 8).transpose(1, 2)``
After (ATen):       ``linear = aten.linear.default(x, w); view = aten.view.default(linear, [4, 20, -1, 8]); ...``

The result has the same placeholders in the same order. It stands before autograd and before autocast, keeps the bodies
of activation checkpointing as sub-graphs, and every node keeps the stack trace of the user's line.

The trace runs inside Dynamo's own tracing context, on fake tensors of Dynamo's own shape environment: fresh symbols
would put guards between unrelated sizes into it and recompile for every length.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
import torch.fx.traceback as fx_traceback
import torch.utils._pytree as pytree
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import noop_context_fn

from dualkv_compile.passes.reasons import Reason, WholeGraphUnsupported

CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
_CONTEXT_FN = "_checkpoint_context_fn"


@dataclass
class GraphInput:
    """What is known of one placeholder of the Dynamo graph."""

    name: str
    source: str
    is_parameter: bool
    requires_grad: bool


@dataclass
class NormalGraph:
    """A pre-dispatch ATen graph, its inputs, and the float inputs whose value was built into it."""

    module: fx.GraphModule
    inputs: list[GraphInput]
    constants: dict[int, float | int | bool]


def normalize(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> NormalGraph:
    """Trace ``gm`` (a Dynamo graph) into pre-dispatch ATen operators.

    Must be called inside a backend call (Dynamo's tracing context is active). ``gm`` itself is left as it was.

    Raises WholeGraphUnsupported if the trace does not preserve the outputs' shapes, dtypes and ``requires_grad``.
    """
    context = TracingContext.try_get()
    if context is None or context.fake_mode is None:
        raise WholeGraphUnsupported(Reason("", "called outside of a torch.compile backend (no tracing context)"))
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    inputs = [_describe(node, example) for node, example in zip(placeholders, example_inputs, strict=True)]
    fake_mode = context.fake_mode
    fakes = [_fake(example, context, fake_mode) for example in example_inputs]
    constants = _scalar_constants(gm, placeholders, example_inputs)

    interpreter = _Interpreter(gm, {placeholders[index]: value for index, value in constants.items()})
    # A checkpoint around the compiled function counts what is saved for the backward; it must not see the trace.
    unseen = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with unseen, _checkpoint_bodies(gm), fx_traceback.preserve_node_meta(), enable_python_dispatcher(), fake_mode:
        results: list[Any] = []

        def run(*args: Any) -> Any:
            result = interpreter.run(*args)
            results.extend(pytree.tree_leaves(result))
            return result

        traced = make_fx(run, pre_dispatch=True, tracing_mode="real")(*fakes)
    for module in traced.modules():
        if isinstance(module, fx.GraphModule) and module.meta.get(_CONTEXT_FN) is noop_context_fn:
            del module.meta[_CONTEXT_FN]
    _check_outputs(gm, results)
    return NormalGraph(traced, inputs, constants)


class _Interpreter(fx.Interpreter):
    """Runs a Dynamo graph, replacing ``x.item()`` of a specialised scalar input by its value."""

    def __init__(self, module: fx.GraphModule, scalars: dict[fx.Node, float | int | bool]) -> None:
        super().__init__(module)
        self._scalars = scalars

    def run_node(self, n: fx.Node) -> Any:
        if _is_item(n) and n.args[0] in self._scalars:
            return self._scalars[n.args[0]]  # type: ignore[index]
        return super().run_node(n)


def _is_item(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target == "item"


def _scalar_constants(
    gm: fx.GraphModule, placeholders: Sequence[fx.Node], example_inputs: Sequence[Any]
) -> dict[int, float | int | bool]:
    """Input positions of 0-d CPU tensors that the graph only reads with ``.item()``, with their present value.

    With ``dynamic=True`` Dynamo passes every Python float of the model (epsilons, scalings) in this form. The value is
    built into the rewritten graph and compared at each call.
    """
    constants: dict[int, float | int | bool] = {}
    for index, (node, example) in enumerate(zip(placeholders, example_inputs, strict=True)):
        is_scalar = isinstance(example, torch.Tensor) and example.ndim == 0 and example.device.type == "cpu"
        if is_scalar and node.users and all(_is_item(user) for user in node.users):
            value = _item(node, example)
            if value is not None:
                constants[index] = value
    return constants


def _item(node: fx.Node, example: torch.Tensor) -> float | int | bool | None:
    if not isinstance(example, torch._subclasses.FakeTensor):
        return example.item()
    memo = getattr(node.meta.get("example_value"), "item_memo", None)
    if isinstance(memo, torch.SymFloat | torch.SymInt):
        return memo.node.hint
    return memo


def _fake(example: Any, context: TracingContext, fake_mode: Any) -> Any:
    if not isinstance(example, torch.Tensor) or isinstance(example, torch._subclasses.FakeTensor):
        return example
    symbolic = context.tensor_to_context.get(example)
    source = getattr(symbolic, "tensor_source", None)
    return fake_mode.from_tensor(example, symbolic_context=symbolic, source=source)


def _describe(node: fx.Node, example: Any) -> GraphInput:
    argument = node.meta.get("grapharg")
    source = getattr(argument, "source", None)
    name = getattr(source, "name", "")
    text = name() if callable(name) else str(name)
    held = "_parameters[" in text or "_buffers[" in text or "parameters_" in node.name or "buffers_" in node.name
    requires_grad = isinstance(example, torch.Tensor) and example.requires_grad
    return GraphInput(node.name, text, held or isinstance(example, torch.nn.Parameter), requires_grad)


@contextlib.contextmanager
def _checkpoint_bodies(gm: fx.GraphModule) -> Iterator[None]:
    """Give checkpoint bodies the metadata that tracing them asks for, and take it away again.

    Tracing reads ``meta["_checkpoint_context_fn"]`` of a body; left behind where the user gave none, the key would
    change how the graph is compiled (selective checkpointing).
    """
    added: list[fx.GraphModule] = []
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                if node.op == "call_function" and node.target is CHECKPOINT:
                    body = getattr(module, node.args[0].target)
                    if _CONTEXT_FN not in body.meta:
                        body.meta[_CONTEXT_FN] = noop_context_fn
                        added.append(body)
    told = logging.getLogger("torch._higher_order_ops.wrap")
    level = told.level
    if added:
        # It would warn of a context_fn that the user did not give.
        told.setLevel(logging.ERROR)
    try:
        yield
    finally:
        told.setLevel(level)
        for body in added:
            body.meta.pop(_CONTEXT_FN, None)


def _all_nodes(gm: fx.GraphModule) -> Iterator[fx.Node]:
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            yield from module.graph.nodes


def _check_outputs(gm: fx.GraphModule, results: Sequence[Any]) -> None:
    """Compare the traced results with what Dynamo saw (the traced nodes' own metadata is detached)."""
    (output,) = [node for node in gm.graph.nodes if node.op == "output"]
    expected = [
        leaf.meta.get("example_value") if isinstance(leaf, fx.Node) else leaf
        for leaf in pytree.tree_leaves(output.args[0])
    ]
    # Autocast regions inside the graph are recorded but not entered by the trace, so its dtypes say nothing there.
    has_regions = any(node.target is torch.amp.autocast_mode._enter_autocast for node in _all_nodes(gm))
    if len(expected) != len(results):
        raise WholeGraphUnsupported(
            Reason("", f"tracing changed the number of outputs from {len(expected)} to {len(results)}")
        )
    for index, (a, b) in enumerate(zip(expected, results, strict=True)):
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            continue
        dtypes_differ = a.dtype != b.dtype and not has_regions
        if dtypes_differ or a.ndim != b.ndim or a.requires_grad != b.requires_grad:
            message = (
                f"tracing changed output {index} from {a.dtype}, {a.ndim}-d, requires_grad={a.requires_grad} "
                f"to {b.dtype}, {b.ndim}-d, requires_grad={b.requires_grad}"
            )
            raise WholeGraphUnsupported(Reason("", message))
