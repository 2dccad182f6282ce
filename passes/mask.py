"""Attention masks: from a ``[B, 1, S, S]`` tensor back to the predicate it was computed from.

Before:   ``le(k[1,1,1,S], q[1,1,S,1]) & am[b[B,1,1,1], k[1,1,1,S]]  -> expand [B, 1, S, S]``
After:    causal, with the remaining term ``("k", 0)`` over the packed vector ``am``

The tensor is never computed. Its value is asked for at a symbolic position (row b, head h, query column, key column),
and the question is pulled back through the graph: ``unsqueeze`` drops an index, ``expand`` reads index 0, ``index``
substitutes indices, ``arange`` is its own index, pointwise operators make expressions. The question ends at per-token
values (read at the query or the key token) and at values that do not vary between rows (read at the query or key
column).
A key of the row may be read from the packed key token because it is visible only where the rows share that column.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx

from dualkv_compile.kernels.predicate import ARITY
from dualkv_compile.passes.collapse import VIEWS
from dualkv_compile.passes.reasons import Unproven, operator_name
from dualkv_compile.passes.uniform import is_uniform
from dualkv_compile.passes.values import Dim, Frame, Root, Size, Value, same

if TYPE_CHECKING:
    from dualkv_compile.passes.pack import Scope

aten = torch.ops.aten
Expr = tuple[Any, ...]

ROW: Expr = ("row",)
HEAD: Expr = ("head",)
ROW_AND_HEAD: Expr = ("rowhead",)  # their one index where a batched product has made them one dimension
QUERY: Expr = ("qcol",)
KEY: Expr = ("kcol",)
ZERO: Expr = ("const", 0)

_BINARY: dict[object, str] = {
    aten.le.Tensor: "le",
    aten.le.Scalar: "le",
    aten.lt.Tensor: "lt",
    aten.lt.Scalar: "lt",
    aten.ge.Tensor: "ge",
    aten.ge.Scalar: "ge",
    aten.gt.Tensor: "gt",
    aten.gt.Scalar: "gt",
    aten.eq.Tensor: "eq",
    aten.eq.Scalar: "eq",
    aten.ne.Tensor: "ne",
    aten.ne.Scalar: "ne",
    aten.__and__.Tensor: "and",
    aten.bitwise_and.Tensor: "and",
    aten.logical_and.default: "and",
    aten.__or__.Tensor: "or",
    aten.bitwise_or.Tensor: "or",
    aten.logical_or.default: "or",
    aten.mul.Tensor: "mul",
    aten.mul.Scalar: "mul",
    aten.floor_divide.default: "floordiv",
    aten.remainder.Scalar: "mod",
    aten.remainder.Tensor: "mod",
    aten.minimum.default: "minimum",
    aten.maximum.default: "maximum",
    aten.max.other: "maximum",
    aten.div.Tensor: "div",
    aten.div.Scalar: "div",
}
_SUMS: dict[object, str] = {
    aten.add.Tensor: "add",
    aten.add.Scalar: "add",
    aten.sub.Tensor: "sub",
    aten.sub.Scalar: "sub",
}
_WHERE = {aten.where.self, aten.where.Scalar, aten.where.ScalarSelf, aten.where.ScalarOther}
_MASKED_FILL = {aten.masked_fill.Scalar, aten.masked_fill.Tensor}
#: Where masks are put into numbers: a bias may be found inside, but not as a whole.
_TAKEN_APART = {*_WHERE, *_MASKED_FILL}
_LOGIC_NOT = {aten.bitwise_not.default, aten.logical_not.default}
_COPIES = {
    aten.to.dtype,
    aten.to.device,
    aten.to.dtype_layout,
    aten._to_copy.default,
    aten.alias.default,
    aten.contiguous.default,
    aten.clone.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
}


@dataclass
class Lifted:
    """The extra terms of a mask (None if plain causal), the packed vectors they read, and their roots.

    ``origins`` are the same vectors as ``vectors``, each in the scope where it is computed.
    """

    expression: Expr | None
    vectors: list[fx.Node]
    origins: list[tuple[Scope, fx.Node]]
    roots: frozenset[Root]
    validity: Value | None


@dataclass(frozen=True)
class Scores:
    """What a question about scores, not only about a mask, knows: their product (None for what is added to it)."""

    product: fx.Node | None
    heads: Size


@dataclass
class Question:
    """Shared state of one lifting: the frame, and what was found so far.

    With ``scores``, the answer may also hold ``("score",)``, the product of query and key, and ``("bias", n)``: the
    n-th of ``biases``, a number per head and key ``[H or 1, T]``, or per head ``[H]``.
    """

    frame: Frame
    scores: Scores | None = None
    vectors: list[tuple[Scope, fx.Node]] = field(default_factory=list)
    sources: list[Value] = field(default_factory=list)
    roots: set[Root] = field(default_factory=set)
    biases: list[Bias] = field(default_factory=list)
    counted: list[fx.Node] = field(default_factory=list)  # masks whose leading false values were counted
    stopped: bool = False  # whether what is asked about now reaches the scores without its gradient


@dataclass(frozen=True)
class Bias:
    """The node of a number per head and key, and whether it varies with either."""

    owner: Scope
    node: fx.Node
    dtype: torch.dtype
    per_head: bool
    per_key: bool


def lift(scope: Scope, mask: fx.Node, frame: Frame) -> Lifted:
    """The predicate of ``mask``, a boolean attention mask ``[B or 1, H or 1, S or 1, S]``.

    Raises Unproven if it is not causal, or not a function of the tokens and columns.
    """
    question = Question(frame)
    return understood(question, scope, at(question, scope, mask, position(mask, frame)))


def position(pairs: fx.Node, frame: Frame) -> tuple[Expr, ...]:
    """The symbolic position in a tensor ``[B or 1, H or 1, S, S]`` of all pairs."""
    shape = pairs.meta["val"].shape
    if len(shape) != 4:
        raise Unproven("its mask is not four-dimensional")
    if not same(shape[3], frame.columns) or not same(shape[2], frame.columns):
        raise Unproven("its mask does not cover every query and key column")
    return tuple(ZERO if same(size, 1) else item for size, item in zip(shape, (ROW, HEAD, QUERY, KEY), strict=True))


def understood(question: Question, scope: Scope, expression: Expr) -> Lifted:
    """The answer to ``question``, the condition under which a query sees a key, as a mask of packed tokens.

    Raises Unproven if it does not hide what comes later, or is not a function of the tokens and columns.
    """
    terms = list(_conjuncts(expression))
    by_position = _position_order_within_documents(question, terms)
    if by_position is None and not any(_is_causal(term) for term in terms):
        raise Unproven("its mask lets a token see later ones (it is not causal)")
    kept = [term for term in terms if not _implied(term) and term is not by_position]
    _check_counted(question, terms)
    for term in kept:
        _check_closed(term)
    joined: Expr | None = None
    for term in kept:
        joined = term if joined is None else ("and", joined, term)
    vectors = [bring(scope, owner, node) for owner, node in question.vectors]
    return Lifted(joined, vectors, question.vectors, frozenset(question.roots), _validity(question, kept))


def bring(scope: Scope, owner: Scope, node: fx.Node) -> fx.Node:
    """A node of ``owner``, ``scope`` itself or one of its callers, as a node of ``scope``."""
    if scope is owner:
        return node
    assert scope.parent is not None
    return scope.capture(bring(scope.parent, owner, node))


# ---------------------------------------------------------------------- pulling an index back


def at(question: Question, scope: Scope, node: fx.Node, index: tuple[Expr, ...]) -> Expr:
    """The value of ``node`` (an original node of ``scope``) at the symbolic position ``index``."""
    if question.scores is not None and node is question.scores.product:
        return _product(question, scope, node, index)
    if node.op == "placeholder" and scope.parent is not None and node in scope.callers:
        return at(question, scope.parent, scope.callers[node], index)
    value = scope.values.get(node)
    columns = {item[0] for item in index if item[0] in ("qcol", "kcol")}
    if question.scores is not None and "qcol" not in columns and isinstance(value, Value):
        found = _bias(question, scope, node, value, index)
        if found is not None:
            return found
    # ``causal & valid`` has a packed form too, [1, 1, S, T]; only pulling it apart tells that it is causal.
    if isinstance(value, Value) and value.is_packed and len(columns) < 2:
        return _leaf(question, scope, value, index)
    step = _TRANSLATORS.get(node.target) if node.op == "call_function" else None
    if step is not None:
        before = question.stopped
        question.stopped = before or node.target is aten.detach.default or scope.in_another_grad_mode(node)
        answer = step(question, scope, node, index)
        question.stopped = before
        if answer is not None:
            return answer
    if node.op == "get_attr" and not index:
        held = scope.held(node)
        if isinstance(held, torch.Tensor):
            return ("const", held.item())
    if isinstance(value, Value):
        return _leaf(question, scope, value, index)
    raise Unproven(f"its mask is made by {operator_name(node)}, which is not understood")


def product_position(node: fx.Node, heads: Size) -> tuple[Expr, ...]:
    """The symbolic position in scores ``[B, H, S, S]`` or ``[B * H, S, S]``."""
    shape = node.meta["val"].shape
    flat = ROW if same(heads, 1) else ROW_AND_HEAD
    names = (ROW, HEAD, QUERY, KEY) if len(shape) == 4 else (flat, QUERY, KEY)
    return tuple(ZERO if same(size, 1) else item for size, item in zip(shape, names, strict=True))


def _product(question: Question, scope: Scope, node: fx.Node, index: tuple[Expr, ...]) -> Expr:
    """The product of query and key; it is known at the query's and the key's own place only."""
    assert question.scores is not None
    if index != product_position(node, question.scores.heads):
        raise Unproven("its scores are moved to other rows, heads or columns")
    if node.target is not aten.baddbmm.default:
        return ("score",)
    added = _operand(question, scope, node.args[0], index)
    factors = [node.kwargs.get(name, 1) for name in ("alpha", "beta")]
    if not all(isinstance(factor, int | float) for factor in factors):
        raise Unproven("its scores are scaled by something that is not a number")
    product, added = (("mul", x, ("const", factor)) for x, factor in zip((("score",), added), factors, strict=True))
    return ("add", product, added)


def _bias(question: Question, scope: Scope, node: fx.Node, value: Value, index: tuple[Expr, ...]) -> Expr | None:
    """A floating-point value that depends on head and key only: a number that is added to scores."""
    if not node.meta["val"].is_floating_point() or not any(item in (HEAD, KEY) for item in index):
        return None
    if question.stopped:
        raise Unproven("its scores have a bias that is cut off from its gradient on the way")
    if node.op == "call_function" and node.target in _TAKEN_APART:
        return None
    if any(item not in (ROW, HEAD, KEY) and item[0] != "const" for item in index) or index.count(KEY) > 1:
        return None
    tags = tuple(Dim.ROW if item == ROW else Dim.COLUMN if item == KEY else Dim.FEATURE for item in index)
    if value.tags is not None:
        if value.frame is not question.frame or value.tags != tags:
            return None
        held = scope.packed(value)
    elif KEY in index:
        if not _uniform_rows(value, tags) or not same(value.shape[index.index(KEY)], question.frame.columns):
            return None
        held = _column_vector(question, scope, value, tags)
    elif ROW not in index:
        held = scope.grid(value)
    else:
        return None
    picks = [
        (dim, int(item[1]) if item[0] == "const" else 0)
        for dim, item in reversed(list(enumerate(index)))
        if item not in (HEAD, KEY)
    ]
    kept = [item for item in index if item in (HEAD, KEY)]

    def make() -> fx.Node:
        made = _pick(scope, held, picks)
        with scope.at_definition(made):
            if kept == [KEY, HEAD]:
                made = scope.emit(aten.transpose.int, made, 0, 1)
            elif kept == [KEY]:
                made = scope.emit(aten.unsqueeze.default, made, 0)
        return made

    made: fx.Node = scope.once(("bias", held, tuple(kept), *picks), make)
    question.roots |= value.roots
    question.biases.append(Bias(scope, made, value.meta.dtype, HEAD in index, KEY in index))
    return ("bias", len(question.biases) - 1)


def _uniform_rows(value: Value, tags: tuple[Dim, ...]) -> bool:
    return all(kind is not Dim.ROW or is_uniform(value.source, dim) for dim, kind in enumerate(tags))


def _operand(question: Question, scope: Scope, arg: Any, index: tuple[Expr, ...]) -> Expr:
    """An operand of a pointwise operator at the (broadcast) position ``index``."""
    if not isinstance(arg, fx.Node):
        return ("const", arg)
    val = arg.meta.get("val")
    if not isinstance(val, torch.Tensor):
        raise Unproven("its mask depends on a symbolic size")
    own = index[len(index) - val.ndim :] if val.ndim else ()
    own = tuple(ZERO if same(size, 1) else item for size, item in zip(val.shape, own, strict=True))
    return at(question, scope, arg, own)


def _leaf(question: Question, scope: Scope, value: Value, index: tuple[Expr, ...]) -> Expr:
    """A vector over the packed tokens, read at the query's or the key's token."""
    kinds = {item[0] for item in index if item[0] in ("qcol", "kcol")}
    if len(kinds) > 1:
        return _data_mask(question, scope, value, index)
    if any(item[0] not in ("row", "qcol", "kcol", "const") for item in index):
        raise Unproven("its mask is data that is indexed by both query and key")
    if not kinds:
        raise Unproven("its mask has a term that belongs to a row as a whole")
    (kind,) = kinds
    tags = tuple(Dim.ROW if item == ROW else Dim.COLUMN if item[0] == kind else Dim.FEATURE for item in index)
    if tags.count(Dim.COLUMN) != 1:
        raise Unproven("its mask is data that is indexed by both query and key")
    if value.tags is not None:
        if value.frame is not question.frame or value.tags != tags:
            raise Unproven("its mask reads per-token data of another layout")
        node = scope.packed(value)
        question.roots |= value.roots
    else:
        node = _column_vector(question, scope, value, tags)
    picks = [
        (dim, index[dim][1] if tags[dim] is Dim.FEATURE else 0)
        for dim in reversed(range(len(index)))
        if tags[dim] is not Dim.COLUMN
    ]
    # All layers ask about the same mask: they get the same nodes.
    node = scope.once(("vector", node, *picks), lambda: _pick(scope, node, picks))
    question.vectors.append((scope, node))
    question.sources.append(value)
    return ("q" if kind == "qcol" else "k", len(question.vectors) - 1)


def _data_mask(question: Question, scope: Scope, value: Value, index: tuple[Expr, ...]) -> Expr:
    """A mask that is data, ``[B or 1, 1, S, S]``: read as what it hides from each query and which keys it hides.

    That this is all it says, and the same for all copies, is compared at each call.
    """
    frame = question.frame
    floating = value.meta.dtype.is_floating_point
    if (
        scope.parent is not None
        or value.tags is not None
        or value.ndim != 4
        or index not in ((ROW, ZERO, QUERY, KEY), (ZERO, ZERO, QUERY, KEY))
        or not all(same(size, frame.columns) for size in value.shape[2:])
        or not (index[0] == ZERO or same(value.shape[0], frame.rows))
        or not (value.meta.dtype == torch.bool or (floating and value.source.op == "placeholder"))
        or value.meta.requires_grad
    ):
        raise Unproven("its mask is data that is indexed by both query and key")

    def make() -> tuple[Value, Value]:
        root = Root(value.source, (Dim.ROW, Dim.FEATURE, Dim.COLUMN, Dim.FEATURE), is_mask=True)
        scope.roles.roots.setdefault(value.source, (root, frame))
        node = scope.grid(value)
        with scope.at_definition(node):
            read = scope.emit(torch.ops.dualkv.read_mask.default, node, scope.plan(frame, "inverse"))
            valid, first = (scope.emit(operator.getitem, read, place) for place in range(2))
        tags, roots = (Dim.ROW, Dim.COLUMN), frozenset([root])
        return Value(value.source, tags, frame, roots, grid=valid), Value(value.source, tags, frame, roots, grid=first)

    valid, first = scope.once(("data mask", value.source), make)
    after = _leaf(question, scope, first, (ROW, QUERY))
    visible = ("and", ("and", ("le", KEY, QUERY), ("ge", KEY, after)), _leaf(question, scope, valid, (ROW, KEY)))
    return ("where", visible, ("const", 0.0), ("const", -math.inf)) if floating else visible


def _pick(scope: Scope, node: fx.Node, picks: Sequence[tuple[int, int]]) -> fx.Node:
    with scope.at_definition(node):
        for dim, place in picks:
            node = scope.emit(aten.select.int, node, dim, place)
    return node


def _column_vector(question: Question, scope: Scope, value: Value, tags: tuple[Dim, ...]) -> fx.Node:
    """An as-written value that does not vary between rows, taken at each token's column."""
    column = tags.index(Dim.COLUMN)
    if not same(value.shape[column], question.frame.columns):
        raise Unproven("its mask reads a tensor of another number of columns")
    for dim, kind in enumerate(tags):
        if kind is Dim.ROW and not is_uniform(value.source, dim):
            raise Unproven("its mask is data that differs from row to row and is not known from the tokens")
    source = scope.grid(value)

    def make() -> fx.Node:
        node = source
        with scope.at_definition(node):
            for dim, kind in enumerate(tags):
                if kind is Dim.ROW:
                    node = scope.emit(aten.narrow.default, node, dim, 0, 1)
            return scope.emit(torch.ops.dualkv.unpack.default, node, scope.plan(question.frame, "column"), column)

    node: fx.Node = scope.once(("column vector", source, tags, question.frame), make)
    return node


_Translator = Callable[[Question, "Scope", fx.Node, tuple[Expr, ...]], Expr | None]
_TRANSLATORS: dict[object, _Translator] = {}


def _translates(*targets: object) -> Callable[[_Translator], _Translator]:
    def decorate(translator: _Translator) -> _Translator:
        _TRANSLATORS.update(dict.fromkeys(targets, translator))
        return translator

    return decorate


@_translates(*_BINARY, *_SUMS)
def _binary(question: Question, scope: Scope, node: fx.Node, index: tuple[Expr, ...]) -> Expr | None:
    name = _BINARY.get(node.target) or _SUMS[node.target]
    if node.target in _SUMS and node.kwargs.get("alpha", 1) != 1:
        return None
    if not _exact_as_int64(node.meta["val"].dtype, name):
        return None
    a, b = (_operand(question, scope, arg, index) for arg in node.args[:2])
    return _decided(_fold((name, a, b)))


def _exact_as_int64(dtype: torch.dtype, name: str) -> bool:
    """Whether a result of ``dtype`` is what the predicate ``name`` says.

    Its logic is of truth values and its whole numbers are int64, so bits (``flags & 2``) and numbers that wrap (uint8)
    are not expressed by it.
    """
    if name in ("and", "or"):
        return dtype == torch.bool
    if name in ("add", "sub", "mul", "floordiv", "mod", "minimum", "maximum", "neg", "abs"):
        return dtype == torch.int64 or dtype.is_floating_point
    return True


@_translates(*_LOGIC_NOT)
def _not(question: Question, scope: Scope, node: fx.Node, index: tuple[Expr, ...]) -> Expr | None:
    if node.meta["val"].dtype != torch.bool:  # ``~flags`` of whole numbers
        return None
    return ("not", _operand(question, scope, node.args[0], index))


@_translates(aten.neg.default, aten.abs.default)
def _unary(question: Question, scope: Scope, node: fx.Node, index: tuple[Expr, ...]) -> Expr | None:
    if not _exact_as_int64(node.meta["val"].dtype, "neg"):
        return None
    return ("neg" if node.target is aten.neg.default else "abs", _operand(question, scope, node.args[0], index))


@_translates(*_COPIES)
def _copy(question: Question, scope: Scope, node: fx.Node, index: tuple[Expr, ...]) -> Expr | None:
    source, result = node.args[0].meta["val"].dtype, node.meta["val"].dtype  # type: ignore[union-attr]
    if result == torch.bool and source != torch.bool:
        # The cast of data itself is a leaf (its packed form exists); only masks made of columns come here.
        return _decided(("bool", _operand(question, scope, node.args[0], index)))
    wider = torch.promote_types(source, result) == result
    if (
        question.scores is not None
        and source.is_floating_point
        and result.is_floating_point
        and (wider or QUERY in index)
    ):
        # A wider type changes no number. Scores keep the precision of attention on packed tokens, which is not lower.
        return _operand(question, scope, node.args[0], index)
    # Whole numbers may change their type only where none can wrap.
    if result == source or (result == torch.int64 and not source.is_floating_point):
        return _operand(question, scope, node.args[0], index)
    if source == torch.bool:
        return ("bool", _operand(question, scope, node.args[0], index))
    return None


@_translates(*_WHERE)
def _where(question: Question, scope: Scope, node: fx.Node, index: tuple[Expr, ...]) -> Expr | None:
    condition, a, b = (_operand(question, scope, arg, index) for arg in node.args[:3])
    return ("where", condition, a, b)


@_translates(*_MASKED_FILL)
def _masked_fill(question: Question, scope: Scope, node: fx.Node, index: tuple[Expr, ...]) -> Expr | None:
    base, mask, fill = (_operand(question, scope, arg, index) for arg in node.args[:3])
    return ("where", mask, fill, base)


@_translates(aten.tanh.default)
def _tanh(question: Question, scope: Scope, node: fx.Node, index: tuple[Expr, ...]) -> Expr | None:
    return ("tanh", _operand(question, scope, node.args[0], index))


@_translates(aten.clamp.default, aten.clamp_min.default)
def _clamp(question: Question, scope: Scope, node: fx.Node, index: tuple[Expr, ...]) -> Expr | None:
    """A lower bound; the upper one of ``clamp`` is not understood."""
    low, high = (
        node.args[place] if len(node.args) > place else node.kwargs.get(name)
        for place, name in ((1, "min"), (2, "max"))
    )
    if not isinstance(low, int | float) or high is not None:
        return None
    return ("maximum", _operand(question, scope, node.args[0], index), ("const", low))


@_translates(aten.tril.default, aten.triu.default)
def _triangle(question: Question, scope: Scope, node: fx.Node, index: tuple[Expr, ...]) -> Expr | None:
    """The operand on one side of a diagonal, 0 on the other."""
    diagonal = node.args[1] if len(node.args) > 1 else node.kwargs.get("diagonal", 0)
    if not isinstance(diagonal, int):
        return None
    edge = _fold(("add", index[-2], ("const", diagonal)))
    kept = ("le" if node.target is aten.tril.default else "ge", index[-1], edge)
    inside = _operand(question, scope, node.args[0], index)
    return ("and", kept, inside) if node.meta["val"].dtype == torch.bool else ("where", kept, inside, ZERO)


@_translates(aten.unsqueeze.default)
def _unsqueeze(question: Question, scope: Scope, node: fx.Node, index: tuple[Expr, ...]) -> Expr | None:
    place = int(node.args[1]) % len(index)  # type: ignore[arg-type]
    return at(question, scope, node.args[0], (*index[:place], *index[place + 1 :]))  # type: ignore[arg-type]


@_translates(aten.expand.default, aten.expand_as.default)
def _expand(question: Question, scope: Scope, node: fx.Node, index: tuple[Expr, ...]) -> Expr | None:
    return _operand(question, scope, node.args[0], index)


@_translates(aten.permute.default, aten.transpose.int)
def _permute(question: Question, scope: Scope, node: fx.Node, index: tuple[Expr, ...]) -> Expr | None:
    order = list(range(len(index)))
    if node.target is aten.transpose.int:
        a, b = (int(dim) % len(index) for dim in node.args[1:3])  # type: ignore[arg-type]
        order[a], order[b] = order[b], order[a]
    else:
        order = [int(dim) % len(index) for dim in node.args[1]]  # type: ignore[union-attr,arg-type]
    source: list[Expr] = [ZERO] * len(index)
    for place, dim in enumerate(order):
        source[dim] = index[place]
    return at(question, scope, node.args[0], tuple(source))  # type: ignore[arg-type]


@_translates(*VIEWS)
def _view(question: Question, scope: Scope, node: fx.Node, index: tuple[Expr, ...]) -> Expr | None:
    """Views that insert or drop dimensions of size 1, or make rows and heads one dimension, or two again."""
    old, new = node.args[0].meta["val"].shape, node.meta["val"].shape  # type: ignore[union-attr]
    given = [(size, item) for size, item in zip(new, index, strict=True) if not same(size, 1)]
    source: list[Expr] = [ZERO] * len(old)
    solid = [dim for dim, size in enumerate(old) if not same(size, 1)]
    while solid and given:
        dim, (size, item) = solid.pop(0), given.pop(0)
        if same(old[dim], size):
            source[dim] = item
        elif item == ROW_AND_HEAD and solid and _are_rows_and_heads(question, old[dim], old[solid[0]], size):
            source[dim], source[solid.pop(0)] = ROW, HEAD
        elif item == ROW and given and given[0][1] == HEAD and same(size * given[0][0], old[dim]):
            source[dim] = ROW_AND_HEAD
            given.pop(0)
        else:
            return None
    return None if solid or given else at(question, scope, node.args[0], tuple(source))  # type: ignore[arg-type]


def _are_rows_and_heads(question: Question, first: Size, second: Size, size: Size) -> bool:
    """Whether two dimensions are rows and heads in this order (heads and rows have the same product)."""
    return question.scores is not None and same(second, question.scores.heads) and same(first * second, size)


@_translates(aten.slice.Tensor)
def _slice(question: Question, scope: Scope, node: fx.Node, index: tuple[Expr, ...]) -> Expr | None:
    dim = int(node.args[1]) % len(index) if len(node.args) > 1 else 0  # type: ignore[arg-type]
    start = node.args[2] if len(node.args) > 2 else 0
    step = node.args[4] if len(node.args) > 4 else 1
    start = 0 if start is None else start
    if not isinstance(start, int) or start < 0 or step != 1:
        return None
    moved = _fold(("add", index[dim], ("const", start)))
    return at(question, scope, node.args[0], (*index[:dim], moved, *index[dim + 1 :]))  # type: ignore[arg-type]


@_translates(aten.select.int)
def _select(question: Question, scope: Scope, node: fx.Node, index: tuple[Expr, ...]) -> Expr | None:
    rank = len(index) + 1
    dim, place = int(node.args[1]) % rank, node.args[2]  # type: ignore[arg-type]
    if not isinstance(place, int) or place < 0:
        return None
    return at(question, scope, node.args[0], (*index[:dim], ("const", place), *index[dim:]))  # type: ignore[arg-type]


@_translates(aten.index.Tensor)
def _index(question: Question, scope: Scope, node: fx.Node, index: tuple[Expr, ...]) -> Expr | None:
    """``x[i, j]`` with index tensors for the leading dimensions: their own values become the indices."""
    given = list(node.args[1])  # type: ignore[arg-type]
    source = node.args[0].meta["val"]  # type: ignore[union-attr]
    if any(item is None or item.meta["val"].dtype == torch.bool for item in given):
        return None
    rest = source.ndim - len(given)
    around = index[: len(index) - rest]
    found = tuple(_operand(question, scope, item, around) for item in given)
    if any(item[0] not in ("row", "head", "qcol", "kcol", "const") for item in found):
        return None
    return at(question, scope, node.args[0], (*found, *index[len(index) - rest :]))  # type: ignore[arg-type]


@_translates(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _arange(question: Question, scope: Scope, node: fx.Node, index: tuple[Expr, ...]) -> Expr | None:
    start = 0 if node.target is aten.arange.default else node.args[0]
    step = node.args[2] if node.target is aten.arange.start_step and len(node.args) > 2 else 1
    if not isinstance(start, int) or not isinstance(step, int):
        return None
    return _fold(("add", _fold(("mul", index[0], ("const", step))), ("const", start)))


@_translates(aten.new_ones.default, aten.ones.default, aten.ones_like.default)
def _ones(question: Question, scope: Scope, node: fx.Node, index: tuple[Expr, ...]) -> Expr | None:
    return ("const", 1)


@_translates(aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default)
def _zeros(question: Question, scope: Scope, node: fx.Node, index: tuple[Expr, ...]) -> Expr | None:
    return ZERO


@_translates(aten.new_full.default, aten.full.default, aten.full_like.default)
def _full(question: Question, scope: Scope, node: fx.Node, index: tuple[Expr, ...]) -> Expr | None:
    fill = node.args[1] if node.target is not aten.new_full.default else node.args[2]
    return ("const", fill) if isinstance(fill, int | float) else None


@_translates(aten.scalar_tensor.default)
def _scalar(question: Question, scope: Scope, node: fx.Node, index: tuple[Expr, ...]) -> Expr | None:
    return ("const", node.args[0]) if isinstance(node.args[0], int | float) else None


@_translates(aten.sum.dim_IntList)
def _leading_padding(question: Question, scope: Scope, node: fx.Node, index: tuple[Expr, ...]) -> Expr | None:
    """``(valid.cumsum(-1) == 0).sum(-1)``: how many padded columns a row begins with, as chunked masks count from it.

    A whole row's number, yet what a query sees of it is known from its prefix: from the first valid column on nothing
    is added, so ``(valid.cumsum(-1) == 0).cumsum(-1)`` has the same value there. Earlier queries see no key, which
    `_check_counted` makes sure of.
    """
    flags = node.args[0]
    if index != (ROW,) or not isinstance(flags, fx.Node) or node.args[1] not in ([-1], [1]) or node.kwargs:
        return None
    value = scope.values.get(flags)
    valid = _counted_mask(flags)
    if valid is None or not isinstance(value, Value) or value.tags != (Dim.ROW, Dim.COLUMN):
        return None

    def make() -> Value:
        grid = scope.grid(value)
        with scope.at_definition(grid):
            count = scope.emit(aten.cumsum.default, grid, 1)
        return Value(flags, value.tags, value.frame, value.roots, grid=count)

    question.counted.append(valid)
    return _leaf(question, scope, scope.once(("leading padding", flags), make), (ROW, QUERY))


def _counted_mask(flags: fx.Node) -> fx.Node | None:
    """The boolean mask ``valid`` ``[B, S]`` of ``valid.cumsum(-1) == 0``; None for anything else."""
    if flags.target not in (aten.eq.Tensor, aten.eq.Scalar):
        return None
    total, zero = flags.args[:2]
    if isinstance(zero, fx.Node):
        if zero.target not in (aten.zeros_like.default, aten.zeros.default, aten.new_zeros.default):
            return None
    elif zero != 0:
        return None
    if not isinstance(total, fx.Node) or total.target is not aten.cumsum.default or total.args[1] not in (-1, 1):
        return None
    valid = total.args[0]
    # Of whole numbers the sum could return to 0 behind a negative one.
    is_mask = isinstance(valid, fx.Node) and valid.meta["val"].dtype == torch.bool and valid.meta["val"].ndim == 2
    return _original(valid) if is_mask else None  # type: ignore[arg-type]


def _check_counted(question: Question, terms: Sequence[Expr]) -> None:
    """A row's padding may be counted only by a mask that hides this padding."""
    hidden = {
        _original(question.sources[leaf[1]].source)
        for term in terms
        for leaf in [term[1] if term[0] == "bool" else term]
        if leaf[0] == "k"
    }
    if any(valid not in hidden for valid in question.counted):
        raise Unproven("its mask counts the padding of a row and does not hide it")


# ---------------------------------------------------------------------- reading the predicate


def _fold(expression: Expr) -> Expr:
    """Drop neutral operands, so that ``arange + 0`` is still an index."""
    name, a, b = expression
    if name in ("add", "sub") and b == ZERO:
        return a
    if name == "add" and a == ZERO:
        return b
    if name == "mul" and b == ("const", 1):
        return a
    if name == "and" and a[0] == "const" and a[1] in (True, 1):
        return b
    if name == "and" and b[0] == "const" and b[1] in (True, 1):
        return a
    return expression


def _decided(expression: Expr) -> Expr:
    """A question about a choice between two numbers (``where(c, 0, -inf) < -1``), answered by the choice itself."""
    name, *operands = expression
    if name not in _DECIDES or operands[0][0] != "where":
        return expression
    _, condition, *branches = operands[0]
    if any(item[0] != "const" for item in (*branches, *operands[1:])):
        return expression
    yes, no = (bool(_DECIDES[name](branch[1], *(item[1] for item in operands[1:]))) for branch in branches)
    if yes == no:
        return ("const", yes)
    return condition if yes else ("not", condition)


_DECIDES: dict[str, Callable[..., Any]] = {
    "le": operator.le,
    "lt": operator.lt,
    "ge": operator.ge,
    "gt": operator.gt,
    "eq": operator.eq,
    "ne": operator.ne,
    "bool": bool,
}


def is_minus_infinity(expression: Expr) -> bool:
    """Minus infinity, or what models write for it: the lowest number of a floating-point type."""
    floors = [torch.finfo(dtype).min for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)]
    return expression[0] == "const" and (expression[1] == float("-inf") or expression[1] in floors)


def _conjuncts(expression: Expr) -> Iterator[Expr]:
    if expression[0] == "and":
        yield from _conjuncts(expression[1])
        yield from _conjuncts(expression[2])
    elif expression[0] == "bool" and expression[1][0] in ("and", "or", "not", "le", "lt", "ge", "gt", "eq", "ne"):
        yield from _conjuncts(expression[1])
    elif expression[0] == "not" and expression[1][0] in _NEGATED:
        name, a, b = expression[1]
        yield (_NEGATED[name], a, b)
    elif expression[0] == "not" and expression[1][0] == "not":
        yield from _conjuncts(expression[1][1])
    elif expression[0] == "not" and expression[1][0] == "or":
        yield from _conjuncts(("not", expression[1][1]))
        yield from _conjuncts(("not", expression[1][2]))
    else:
        yield expression


_NEGATED = {"le": "gt", "lt": "ge", "ge": "lt", "gt": "le"}


def _slack(term: Expr) -> int | None:
    """For a term equivalent to ``kcol <= qcol - slack``: the slack. None for any other term."""
    name = term[0]
    if name in ("ge", "gt"):
        return _slack(("le" if name == "ge" else "lt", term[2], term[1]))
    if name not in ("le", "lt"):
        return None
    left, right = _linear(term[1]), _linear(term[2])
    if left is None or right is None:
        return None
    key, query, constant = (a - b for a, b in zip(left, right, strict=True))
    if (key, query) != (1, -1) or not isinstance(constant, int):
        return None
    return constant + 1 if name == "lt" else constant


def _linear(expression: Expr) -> tuple[int, int, int] | None:
    """``(coefficient of kcol, coefficient of qcol, constant)`` of a sum of columns and integers."""
    name = expression[0]
    if name == "kcol":
        return 1, 0, 0
    if name == "qcol":
        return 0, 1, 0
    if name == "const":
        return (0, 0, expression[1]) if isinstance(expression[1], int) else None
    if name in ("add", "sub"):
        a, b = _linear(expression[1]), _linear(expression[2])
        if a is None or b is None:
            return None
        sign = 1 if name == "add" else -1
        return a[0] + sign * b[0], a[1] + sign * b[1], a[2] + sign * b[2]
    if name == "neg":
        a = _linear(expression[1])
        return None if a is None else (-a[0], -a[1], -a[2])
    return None


def _is_causal(term: Expr) -> bool:
    slack = _slack(term)
    return slack is not None and slack >= 0


def _position_order_within_documents(question: Question, terms: list[Expr]) -> Expr | None:
    """The term ``position[k] <= position[q]`` where another term makes it mean ``k <= q``; None if there is none.

    That other term is ``document[q] == document[k]`` with ``document = cumsum(diff(position) != 1)``: within a document
    positions grow by exactly one per column, so a later column has a larger position. This is how transformers masks
    rows that come with explicit positions and no attention mask.
    """
    positions = {
        source
        for term in terms
        if term[0] == "eq" and {term[1][0], term[2][0]} == {"q", "k"}
        for source in [_document_positions(question, term)]
        if source is not None
    }
    for term in terms:
        name, *operands = term
        if name in ("le", "ge") and all(operand[0] in ("q", "k") for operand in operands):
            key, query = operands if name == "le" else reversed(operands)
            sources = [_original(question.sources[operand[1]].source) for operand in (key, query)]
            if (key[0], query[0]) == ("k", "q") and sources[0] is sources[1] and sources[0] in positions:
                return term
    return None


def _original(node: fx.Node) -> fx.Node:
    """``node`` without no-op expands, casts and copies around it."""
    while node.op == "call_function" and (node.target in _COPIES or node.target is aten.expand.default):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        old, new = source.meta["val"], node.meta["val"]
        if old.dtype != new.dtype or old.ndim != new.ndim or not all(map(same, old.shape, new.shape)):
            break
        node = source
    return node


def _document_positions(question: Question, term: Expr) -> fx.Node | None:
    """The positions that the document numbers compared by ``term`` are counted from, if they are."""
    first, second = (question.sources[operand[1]].source for operand in term[1:])
    if first is not second or first.target is not aten.cumsum.default:
        return None
    changed = first.args[0]
    if not isinstance(changed, fx.Node) or changed.target is not aten.ne.Scalar or changed.args[1] != 1:
        return None
    difference = changed.args[0]
    if not isinstance(difference, fx.Node) or difference.target is not aten.diff.default:
        return None
    positions = difference.args[0]
    assert isinstance(positions, fx.Node)
    along_columns = int(first.args[1]) % first.meta["val"].ndim == first.meta["val"].ndim - 1
    last = difference.args[2] if len(difference.args) > 2 else difference.kwargs.get("dim", -1)
    positions = _original(positions)
    return positions if along_columns and last in (-1, first.meta["val"].ndim - 1) else None


def _implied(term: Expr) -> bool:
    """Terms that the prefix tree already says (``kcol <= qcol``), and constant truths."""
    return _slack(term) == 0 or (term[0] == "const" and bool(term[1]))


_LEAVES = ("q", "k", "qcol", "kcol", "const")


def _check_closed(term: Expr) -> None:
    """Rows and heads may appear only as the position of a leaf."""
    name = term[0]
    if name in ("row", "head", "rowhead"):
        raise Unproven(f"its mask depends on the number of the {'row' if name == 'row' else 'head'}")
    if name == "where":
        raise Unproven("its mask chooses between values in a way that is not understood")
    if name not in ARITY and name not in _LEAVES:
        raise Unproven(f"its mask is made with {name}, which is not understood")
    if name == "const" and not math.isfinite(term[1]):
        raise Unproven("its mask compares with infinity")
    for part in term[1:]:
        if isinstance(part, tuple):
            _check_closed(part)


def _validity(question: Question, terms: list[Expr]) -> Value | None:
    """The per-token value whose truth makes a key visible, if the mask has exactly one such term."""
    found = [term for term in terms if term[0] == "k" or (term[0] == "bool" and term[1][0] == "k")]
    if len(found) != 1:
        return None
    leaf = found[0] if found[0][0] == "k" else found[0][1]
    owner, _ = question.vectors[leaf[1]]
    source = question.sources[leaf[1]]
    # A value inside a checkpoint body cannot be computed from the graph's inputs alone, and only a value of the grid's
    # own shape (not ``[B, 1, 1, S]``) says of each position whether it is a token.
    whole = source.tags == (Dim.ROW, Dim.COLUMN) and source.ndim == 2
    return source if owner.parent is None and whole else None
