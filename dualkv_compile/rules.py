"""Rules for operators of your own: how they run on packed tokens.

`tokenwise` declares that an operator treats every token alone; `register_rule` takes a rule that you write. A rule is
called while a graph is compiled, for an operator with at least one packed operand::

    @dualkv_compile.register_rule(torch.ops.mylib.norm.default)
    def norm(cx: Scope, node: fx.Node, x: Value, weight: Value, eps: float) -> Value:
        if x.tags is None or x.tags[-1] is not Dim.FEATURE or weight.is_packed:
            raise Unproven("it normalises over rows or columns")
        new = cx.emit(node.target, cx.packed(x), cx.grid(weight), eps)
        return cx.result(node, x.tags, [x], new)

Tensor operands arrive as `Value`, everything else as the graph has it. The rule returns the operator's result as a
`Value` (a tuple of them for several results), or raises `Unproven` with the condition that failed; then the operator
runs as written on the grid.

What a rule may use, and what stays as it is between versions:

========================== ==========================================================================================
``Value.tags``             the meaning of each dimension (`Dim`), or None for a value that is *as written*: weights,
                           and what has no proof. ``(ROW, COLUMN, FEATURE)`` is ``[B, S, C]`` on the grid and
                           ``[1, T, C]`` packed; ``(TOKEN, FEATURE)`` is ``[B*S, C]`` and ``[T, C]``
``Value.is_packed``        whether ``tags`` are known
``Value.shape``, ``ndim``  sizes on the grid, number of dimensions
``cx.packed(value)``       the FX node that holds the packed form of a packed value
``cx.grid(value)``         the FX node that holds the grid form of any value
``cx.operand(value, tags,  any value, aligned to packed tensors with ``tags``; raises `Unproven` where it differs
frame)``                   between rows
``cx.join(values)``        ``(frame, roots)`` that the packed ones among ``values`` have in common, or `Unproven`
``cx.emit(target, ...)``   appends a call to the packed graph and gives its node
``cx.result(node, tags,    the packed result of ``node``, computed by ``new`` from the values ``like``;
like, new, position)``     ``position`` is the index of one of several results
``cx.on_grid(node, tags,   the operator run on the grid, whose result is known from the prefix all the same (a scan
like, args, kwargs)``      along the columns)
========================== ==========================================================================================

A rule is a promise: nothing can prove that your operator does what the rule says. Run with ``options={"verify":
"grad"}`` once; it compares the results and gradients of both graphs and raises `VerificationError`.

Rules are looked up when a graph is compiled. A graph that is compiled already keeps what it has until
``torch._dynamo.reset()``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch._library.custom_ops import CustomOpDef

from dualkv_compile.errors import RuleError
from dualkv_compile.passes import registry
from dualkv_compile.passes.pack import Scope
from dualkv_compile.passes.reasons import Unproven
from dualkv_compile.passes.registry import Rule
from dualkv_compile.passes.rules.tokenwise import tokenwise_rule
from dualkv_compile.passes.values import Dim, Frame, Tags, Value, same

__all__ = ["Dim", "Frame", "Rule", "RuleError", "Scope", "Tags", "Unproven", "Value", "register_rule", "tokenwise"]

#: What stands for an operator: an overload, its packet if it has one overload, or what ``custom_op`` returned.
Operator = torch._ops.OpOverload | torch._ops.OpOverloadPacket | CustomOpDef


def register_rule(*operators: Operator, replace: bool = False) -> Callable[[Rule], Rule]:
    """Register the decorated rule for ``operators``.

    Args:
        *operators: overloads (``torch.ops.mylib.norm.default``), operators with a single overload
            (``torch.ops.mylib.norm``), or functions made by ``torch.library.custom_op``.
        replace: whether the operators may have rules already, which are then replaced.

    Returns:
        A decorator that gives the rule back unchanged.

    Raises:
        RuleError: something is no operator, has a rule already, changes its arguments, or draws random numbers.
    """
    targets = [_overload(operator) for operator in operators]
    if not targets:
        raise RuleError("register_rule: expected at least one operator, as in register_rule(torch.ops.mylib.norm)")
    for target in targets:
        _check(target, replace)

    def decorate(rule: Rule) -> Rule:
        if not callable(rule):
            raise RuleError(f"register_rule: expected a function as the rule, got {type(rule).__name__}")
        for target in targets:
            registry.put(target, _checked(target, rule), registry.USER)
        return rule

    return decorate


def tokenwise(
    *operators: Operator,
    weights: Sequence[str] = (),
    token_dims: tuple[int] | tuple[int, int] | None = None,
    replace: bool = False,
) -> None:
    """Declare that ``operators`` compute each token of their results from the same token of their operands.

    The operator then runs on packed tokens as it is: on ``[1, T, ...]`` in place of ``[B, S, ...]``, or ``[T, ...]`` in
    place of ``[B*S, ...]``. Its gradient must be that of each token as well, which anything computed from the tokens
    alone fulfils; only weights may collect over tokens, by a sum (not a mean).

    Python functions and modules need no declaration: Dynamo traces them into operators that have rules of their own.
    Code that must stay whole belongs into a ``torch.library.custom_op``.

    Args:
        *operators: as for `register_rule`. All results must be tensors with the token dimensions of the operands.
        weights: names of tensor arguments that are the same for all tokens. All others are per-token; those that are
            as written are aligned (position tables ``[1, S, ...]`` are read at each token's column).
        token_dims: where the tokens are in operands and results: ``(row, column)``, or ``(token,)`` if the operator
            takes flattened tokens only. By default in front: ``[B, S, ...]`` or ``[B*S, ...]``. ``(0, 2)`` declares
            attention's ``[B, H, S, D]``.
        replace: whether the operators may have rules already, which are then replaced.

    Raises:
        RuleError: as `register_rule`; also for names that are no tensor arguments, for operators whose results are not
            all tensors, and for impossible ``token_dims``.
    """
    targets = [_overload(operator) for operator in operators]
    if not targets:
        raise RuleError("tokenwise: expected at least one operator, as in tokenwise(torch.ops.mylib.norm)")
    names = [weights] if isinstance(weights, str) else list(weights)
    dims = None if token_dims is None else tuple(token_dims)
    if dims is not None and (len(dims) not in (1, 2) or any(d < 0 for d in dims) or list(dims) != sorted(set(dims))):
        raise RuleError(
            f"tokenwise: token_dims: expected (row, column) in that order or (token,), counted from 0, got {token_dims}"
        )
    for target in targets:
        _check(target, replace)
        tensors = [argument.name for argument in target._schema.arguments if "Tensor" in str(argument.type)]
        unknown = [name for name in names if name not in tensors]
        if unknown:
            raise RuleError(
                f"tokenwise: {target}: weights: expected some of its tensor arguments {tensors}, got {unknown}"
            )
        if not set(tensors) - set(names):
            raise RuleError(f"tokenwise: {target}: none of its arguments {tensors} would be per-token")
        kinds = [str(result.type) for result in target._schema.returns]
        if not kinds or any(kind != "Tensor" for kind in kinds):
            raise RuleError(f"tokenwise: {target}: expected results that are tensors, got {kinds}; write a rule for it")
    for target in targets:
        rule = tokenwise_rule(target, frozenset(names), dims)
        registry.put(target, _checked(target, rule), registry.USER)


def _overload(operator: Any) -> torch._ops.OpOverload:
    if isinstance(operator, CustomOpDef):
        return operator._opoverload
    if isinstance(operator, torch._ops.OpOverload):
        return operator
    if isinstance(operator, torch._ops.OpOverloadPacket):
        overloads = operator.overloads()
        if len(overloads) == 1:
            overload: torch._ops.OpOverload = getattr(operator, overloads[0])
            return overload
        raise RuleError(f"{operator} has several overloads, each with a rule of its own: choose among {overloads}")
    if isinstance(operator, type) and issubclass(operator, torch.autograd.Function):
        raise RuleError(
            f"{operator.__name__} is a torch.autograd.Function, whose backward a rewritten graph cannot keep: make it "
            "a torch.library.custom_op with register_autograd, and register a rule for that"
        )
    if isinstance(operator, torch.nn.Module | type) or callable(operator):
        name = getattr(operator, "__name__", type(operator).__name__)
        raise RuleError(
            f"{name} is Python code, not an operator. Dynamo traces it into operators that have rules of their own, so "
            "nothing needs to be declared; make it a torch.library.custom_op if it must stay whole"
        )
    raise RuleError(
        f"expected an operator such as torch.ops.mylib.norm.default, got {type(operator).__name__} {operator!r:.80}"
    )


def _check(target: torch._ops.OpOverload, replace: bool) -> None:
    present = registry.lookup(target)
    if present is not None and not replace:
        raise RuleError(f"{target} has a rule already (family {present.family}); pass replace=True to replace it")
    if target._schema.is_mutable:
        raise RuleError(f"{target} changes its arguments: graphs with such operators are not rewritten")
    if present is None and torch.Tag.nondeterministic_seeded in target.tags:
        raise RuleError(f"{target} draws random numbers: copies of a token would differ, no rule can help")


def _checked(target: torch._ops.OpOverload, rule: Rule) -> Rule:
    """``rule``, with what it returns compared with the operator's results on the grid."""

    @functools.wraps(rule)
    def run(cx: Scope, node: fx.Node, *args: Any, **kwargs: Any) -> Any:
        result = rule(cx, node, *args, **kwargs)
        expected = node.meta["val"]
        if isinstance(expected, torch.Tensor):
            _check_value(target, result, expected)
            return result
        if not isinstance(result, tuple | list) or len(result) != len(expected):
            raise RuleError(f"the rule of {target} must return a tuple of {len(expected)} values, got {result!r:.80}")
        for part, tensor in zip(result, expected, strict=True):
            _check_value(target, part, tensor)
        return tuple(result)

    return run


def _check_value(target: torch._ops.OpOverload, value: Any, expected: Any) -> None:
    if not isinstance(value, Value):
        raise RuleError(f"the rule of {target} must return a Value (from cx.result), got {type(value).__name__}")
    if value.tags is None or value.frame is None:
        return
    if len(value.tags) != expected.ndim:
        raise RuleError(
            f"the rule of {target} gave tags for {len(value.tags)} dimensions, the result has {expected.ndim}"
        )
    frame = value.frame
    sizes = {Dim.ROW: frame.rows, Dim.COLUMN: frame.columns, Dim.TOKEN: frame.rows * frame.columns}
    for dim, kind in enumerate(value.tags):
        if kind is not Dim.FEATURE and not same(expected.shape[dim], sizes[kind]):
            raise RuleError(
                f"the rule of {target} calls dimension {dim} of the result its {kind.name}, but the size is "
                f"{expected.shape[dim]}, not {sizes[kind]}"
            )
