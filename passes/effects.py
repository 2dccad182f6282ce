"""Whole-graph conditions, checked before and after normalisation.

Sharing copies is only meaningful in a graph that computes values from values. What this pass finds either is made
functional (an in-place operator whose old value nobody reads) or ends the rewriting of the whole graph with a reason.

Before:  ``scaled = aten.div_.Scalar(logits, 0.7)``     (``logits`` is not read afterwards)
After:   ``scaled = aten.div.Scalar(logits, 0.7)``
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator

import torch
import torch.fx as fx

from dualkv_compile.passes.normalize import CHECKPOINT
from dualkv_compile.passes.reasons import WholeGraphUnsupported, reason_at

aten = torch.ops.aten

_DROPOUTS = {aten.dropout.default: (1, 2), aten.feature_dropout.default: (1, 2), aten.alpha_dropout.default: (1, 2)}
#: Draw random numbers without carrying torch's seeded tag.
_RANDOM = {aten.native_dropout.default, aten.bernoulli.default, aten.multinomial.default}
#: Where the functions of a Dynamo graph may come from. Those of einops only call views and reductions.
_KNOWN_PACKAGES = ("torch", "_operator", "operator", "builtins", "math", "einops")


def check_dynamo_graph(gm: fx.GraphModule) -> None:
    """Raise WholeGraphUnsupported for what tracing would not keep whole.

    ``make_fx(pre_dispatch=True)`` inlines the forward of a custom autograd function and drops its backward, among
    other higher-order operators; only activation checkpointing is known to survive. It also looks into functions that
    the user keeps from Dynamo (``allow_in_graph``, ``nonstrict_trace``), which may hold such functions, or hooks.
    """
    for node in _all_nodes(gm):
        if node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator):
            if node.target is not CHECKPOINT:
                raise WholeGraphUnsupported(reason_at(node, "this higher-order operator cannot be rewritten"))
        elif node.op == "call_function" and _is_opaque(node.target):
            raise WholeGraphUnsupported(
                reason_at(node, "a function that Dynamo does not look into: tracing it could lose its own backward")
            )
        elif node.op == "call_module":
            raise WholeGraphUnsupported(reason_at(node, "a module call was left in the graph"))
        elif _is_distributed(node.meta.get("example_value")):
            raise WholeGraphUnsupported(
                reason_at(node, "a tensor that is spread over ranks (DTensor): its operators contain collectives")
            )


def _is_distributed(value: object) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # what nobody has imported, nobody has made
    return module is not None and isinstance(value, module.DTensor)


def _is_opaque(target: object) -> bool:
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return False
    module = getattr(target, "__module__", None) or "builtins"
    # Dynamo wraps functions given to ``nonstrict_trace`` into one of its own.
    return module.split(".")[0] not in _KNOWN_PACKAGES or module.startswith("torch._dynamo.")


def check_normal_graph(gm: fx.GraphModule) -> None:
    """Make harmless in-place operators functional; raise WholeGraphUnsupported for randomness, mutation and
    collectives.
    """
    for module in _graph_modules(gm):
        for node in list(module.graph.nodes):
            if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
                continue
            _check_random(node)
            if _is_collective(node.target):
                raise WholeGraphUnsupported(reason_at(node, "a collective runs in this graph: ranks must not disagree"))
            if node.target._schema.is_mutable:
                _functionalize(module, node)
        module.graph.lint()


def _is_collective(target: torch._ops.OpOverload) -> bool:
    """Whether an operator waits for other ranks: those of torch's communication libraries name their group."""
    return "c10d" in target.namespace or any(argument.name == "group_name" for argument in target._schema.arguments)


def _check_random(node: fx.Node) -> None:
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    if target in _DROPOUTS:
        probability, training = (node.args[position] for position in _DROPOUTS[target])
        if training and probability:
            raise WholeGraphUnsupported(
                reason_at(node, f"dropout with p={probability} in training: copies would differ")
            )
        return
    if target is aten.scaled_dot_product_attention.default:
        probability = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        if probability:
            raise WholeGraphUnsupported(reason_at(node, f"attention dropout with p={probability}: copies would differ"))
        return
    if torch.Tag.nondeterministic_seeded in target.tags or target in _RANDOM:
        raise WholeGraphUnsupported(reason_at(node, "a random operator: copies would differ"))


def _functionalize(module: fx.GraphModule, node: fx.Node) -> None:
    """Replace an in-place operator by its functional twin, if no other name of the changed memory is read later."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    if target is aten.detach_.default:
        node.target = aten.detach.default
        return
    changed = node.args[0] if node.args else None
    if not isinstance(changed, fx.Node) or not _first_argument_only(target):
        raise WholeGraphUnsupported(reason_at(node, "writes into a tensor in place"))
    root = _memory_root(changed)
    if root.op != "call_function":
        raise WholeGraphUnsupported(reason_at(node, "writes into an input of the graph in place"))
    order = {other: position for position, other in enumerate(module.graph.nodes)}
    for name in _names_of(root, exclude=node):
        if any(order[user] > order[node] for user in name.users):
            raise WholeGraphUnsupported(
                reason_at(node, "writes in place into memory that is read again under another name")
            )
    twin = _functional_twin(target)
    if twin is None or not _same_result(twin, node):
        raise WholeGraphUnsupported(reason_at(node, "an in-place operator without an equal functional form"))
    node.target = twin


def _first_argument_only(target: torch._ops.OpOverload) -> bool:
    """``op_(self, ...)``: writes its first argument, and only that, and returns it."""
    arguments = target._schema.arguments
    written = [
        index for index, argument in enumerate(arguments) if argument.alias_info and argument.alias_info.is_write
    ]
    return written == [0] and str(arguments[0].type) == "Tensor"


def _functional_twin(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    name = target._schema.name.split("::")[1]
    if not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(getattr(torch.ops, target.namespace), name[:-1], None)
    return getattr(packet, target._overloadname, None) if packet is not None else None


def _same_result(twin: torch._ops.OpOverload, node: fx.Node) -> bool:
    """Whether the twin returns the same dtype and shape (``x_bf16.add_(y_fp32)`` stays bf16, ``add`` would promote)."""
    changed = node.meta["val"]
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
    with changed.fake_mode:
        result = twin(*args, **kwargs)
    return result.dtype == changed.dtype and len(result.shape) == len(changed.shape)


def _is_view(node: fx.Node) -> bool:
    """Whether the result of ``node`` may share memory with its first argument."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return node.op == "call_function" and not _is_own_result(node)
    schema = node.target._schema
    if any(returned.alias_info is not None for returned in schema.returns):
        return True
    # CompositeImplicit operators (reshape, contiguous, to) may return their argument without saying so in the schema.
    return node.target in _MAYBE_ALIAS


def _is_own_result(node: fx.Node) -> bool:
    """Whether ``node`` takes one result of an operator that gives each of its results memory of its own (``topk``)."""
    source = node.args[0] if node.target is operator.getitem else None
    if not isinstance(source, fx.Node) or not isinstance(source.target, torch._ops.OpOverload):
        return False
    if any(returned.alias_info is not None for returned in source.target._schema.returns):
        return False
    results = [user.args[1] for user in source.users if user.target is operator.getitem]
    # Two nodes for one result are two names of one memory; a list of results says nothing about their memory.
    returns = source.target._schema.returns
    return len(returns) > 1 and len(results) == len(set(results)) == len(source.users)


_MAYBE_ALIAS = {
    aten.reshape.default,
    aten.contiguous.default,
    aten.to.dtype,
    aten.to.device,
    aten.to.dtype_layout,
    aten.to.other,
    aten.flatten.using_ints,
    aten.type_as.default,
    aten.dropout.default,
    aten.pad.default,
    aten.expand_as.default,
    aten.reshape_as.default,
    aten.view_as.default,
}


def _memory_root(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and _is_view(node) and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _names_of(root: fx.Node, exclude: fx.Node) -> Iterator[fx.Node]:
    """Every node that may share memory with ``root``, not following the result of ``exclude``."""
    stack, seen = [root], {root}
    while stack:
        node = stack.pop()
        yield node
        for user in node.users:
            if user is not exclude and user not in seen and _is_view(user) and user.args and user.args[0] is node:
                seen.add(user)
                stack.append(user)


def _graph_modules(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            yield module


def _all_nodes(gm: fx.GraphModule) -> Iterator[fx.Node]:
    for module in _graph_modules(gm):
        yield from module.graph.nodes
