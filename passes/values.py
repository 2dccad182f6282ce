"""What the layout proof knows about each value of a graph.

A value either runs *as written* (on the grid, nothing claimed) or is *packed*: it is proven that its content at a grid
position (row, column) is a function of nothing but the keys of that row up to that column, of parameters, and of the
column number. Rows whose keys agree up to a column therefore agree in every packed value there, and one copy suffices.

Packed tensors keep their rank: the row dimension gets size 1 and the column dimension size T (the number of packed
tokens); a flattened row-times-column dimension gets size T. So ``[B, H, S, D]`` becomes ``[1, H, T, D]`` and ``[B*S,
C]`` becomes ``[T, C]``, and most operators run on them with unchanged arguments.

Mixture-of-experts layers flatten tokens with features. With N = B*S tokens:

* ASSIGNMENT: N*k entries, k for each token, token by token (``topk_index[N, k].reshape(-1)``); packed size T*k.
* STACKED: m*N entries, all tokens once per expert (``x[N, C].repeat(m, 1)``); packed size m*T.
* SORTED: the assignments in an order that was computed from them (`Ordering`); packed size T*k.

Which assignment stands at which place of a sorted dimension depends on all tokens of the batch, so positions and counts
are no per-token values. They are *numberings* (`Numbering`): as-written values that also have a packed form, in which
they number or count packed tokens. Only operators that use them to put rows into the order, to bring them back, or to
bound the groups of a grouped product may read the packed form; all others read the numbers of the grid.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import sympy
import torch
import torch.fx as fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._sympy.functions import FloorDiv

Size = int | torch.SymInt


class Dim(enum.Enum):
    """The meaning of one dimension of a packed value."""

    FEATURE = "feature"
    ROW = "row"
    COLUMN = "column"
    TOKEN = "token"
    ASSIGNMENT = "assignment"
    STACKED = "stacked"
    SORTED = "sorted"

    def __repr__(self) -> str:
        return self.name


Tags = tuple[Dim, ...]


def same(a: Size, b: Size) -> bool:
    """Whether two sizes are equal for every input the graph accepts (never adds a guard)."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(statically_known_true(a == b)) or _expression(a) == _expression(b)


def hint(size: Size) -> int:
    """A present value of ``size`` (reading it adds no guard)."""
    return size if isinstance(size, int) else int(size.node.hint)


def simplified(size: Size) -> Size:
    """``size``, as a number where it is one for all inputs."""
    if isinstance(size, int):
        return size
    expression = _expression(size)
    return int(expression) if expression.is_Integer else size


def _expression(size: Size) -> sympy.Expr:
    return sympy.Integer(size) if isinstance(size, int) else _without_exact_divisions(size.node.expr)


@lru_cache(maxsize=4096)
def _without_exact_divisions(expression: sympy.Expr) -> sympy.Expr:
    """Replace ``a // b`` by ``a / b`` where that is a polynomial with integer coefficients, so that nothing is rounded.

    Tracing views with inferred sizes leaves quotients such as ``(32 * s**2) // (8 * s**2)`` that torch does not
    simplify.
    """

    def exact(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
        quotient = sympy.cancel(a / b)
        symbols = sorted(quotient.free_symbols, key=str)
        if quotient.is_Integer:
            return quotient
        whole = symbols and quotient.is_polynomial(*symbols)
        if whole and all(coefficient.is_Integer for coefficient in sympy.Poly(quotient, *symbols).coeffs()):
            return quotient
        return FloorDiv(a, b)

    return sympy.expand(expression.replace(FloorDiv, exact))


@dataclass(eq=False)
class Root:
    """Where per-token data enters: a graph input, or a repeat written in the graph.

    ``node`` is the original graph's node. For an input, rows are compared by its data at each call (``groups is
    None``).
    With ``is_mask``, rows are compared by what ``kernels.data_mask`` reads in it, if that is all there is to it.
    An input that requires grad is a root only of a graph that is given its tree from outside (``requires_grad``).
    For a repeat written in the graph, ``groups`` tells how rows are grouped and ``shared`` how many leading columns the
    rows of a group have in common: known without looking at any data.
    """

    node: fx.Node
    tags: Tags
    input_index: int | None = None
    groups: RowGroups | None = None
    shared: Size | None = None
    requires_grad: bool = False
    is_mask: bool = False

    def by_column(self, x: torch.Tensor) -> torch.Tensor:
        """An input's data with the columns behind the rows, ``[B, S, ...]``."""
        return x.movedim(dim_of(self.tags, Dim.COLUMN), 1)

    @property
    def static(self) -> bool:
        """Whether the graph itself proves the repetition, without data."""
        return self.groups is not None


@dataclass(frozen=True)
class RowGroups:
    """How ``count`` source rows were repeated to B rows: ``block`` copies in a row, or the whole block tiled."""

    count: Size
    interleaved: bool

    def ids(self, rows: int, count: int) -> list[int]:
        """The group of each of ``rows`` rows, given the number of source rows."""
        repeats = rows // count
        return [row // repeats if self.interleaved else row % count for row in range(rows)]


@dataclass(frozen=True)
class Slice:
    """One ``x[:, start:stop]`` along the columns, as the graph wrote it (ints may be symbolic or negative)."""

    start: Size
    stop: Size

    def equals(self, other: Slice) -> bool:
        """Whether both slices keep the same columns."""
        return same(self.start, other.start) and same(self.stop, other.stop)


@dataclass(eq=False)
class Frame:
    """A set of columns whose distinct tokens are packed together.

    The base frame of a batch holds all S columns and owns the prefix tree; a slice along the columns gives a derived
    frame with only the tokens of that window. ``inputs`` are the plan tensors that the packed graph takes, created when
    first needed and named in ``PLAN_TENSORS``.
    """

    index: int
    rows: Size
    columns: Size
    parent: Frame | None = None
    window: Slice | None = None
    inputs: dict[str, fx.Node] = field(default_factory=dict)
    roots: list[Root] = field(default_factory=list)
    windows: list[Frame] = field(default_factory=list)

    @property
    def base(self) -> Frame:
        """The frame of the whole batch."""
        return self if self.parent is None else self.parent.base

    def slices(self) -> list[Slice]:
        """The slices that lead from the base frame to this one, outermost first."""
        if self.parent is None or self.window is None:
            return []
        return [*self.parent.slices(), self.window]


@dataclass(eq=False)
class Ordering(Frame):
    """One order of the assignments of ``parent``'s tokens, made by sorting ``keys``.

    Values of two orderings never meet, since operands must have the same frame: row i of one sorted tensor and row i of
    another belong to the same assignment. ``keys`` is the original node whose entries were sorted (see
    `expert_ids.origin`), ``assignments`` how many there are for each token, ``tag`` the kind of dimension they form.
    """

    keys: fx.Node | None = None
    key_roots: frozenset[Root] = frozenset()
    assignments: int = 1
    tag: Dim = Dim.ASSIGNMENT
    ascending: bool = True


class Numbers(enum.Enum):
    """What the numbers of a `Numbering` say."""

    PERMUTATION = "the assignment at each sorted place"
    TOKENS = "the token at each sorted place"
    INVERSE = "the sorted place of each assignment"
    COUNTS = "how many keys have each value 0 .. bins - 1"
    OFFSETS = "how many keys have each value or a smaller one"


@dataclass(frozen=True)
class Numbering:
    """Positions in an ordering, or counts of the entries of ``keys``."""

    kind: Numbers
    ordering: Ordering | None = None
    keys: fx.Node | None = None
    bins: int = 0


#: Tensors of a plan (base frame) or of a window of it (derived frame) that a packed graph may take as inputs.
BASE_TENSORS = ("token", "inverse", "rank", "column", "end", "nodes")
WINDOW_TENSORS = ("index", "inverse", "column")


@dataclass(eq=False)
class Value:
    """A tensor of the original graph during rewriting: its tags and the new-graph nodes that hold it.

    ``tags is None`` means *as written*: only ``grid`` exists. Otherwise ``packed`` and ``grid`` are made from one
    another when first asked for, always at the place where the value is defined: a conversion emitted later could
    stand inside a ``no_grad`` or autocast region that its other users are outside of.
    ``roots`` is the set of roots the value depends on through its packed form.
    ``numbering`` is set on an as-written value that numbers or counts assignments. The grid form of such a value, and
    of a sorted one, is made by running its operator on the grid: ``call`` holds its arguments.
    """

    source: fx.Node
    tags: Tags | None = None
    frame: Frame | None = None
    roots: frozenset[Root] = frozenset()
    packed: fx.Node | None = None
    grid: fx.Node | None = None
    position: int | None = None
    outer: Value | None = None
    numbering: Numbering | None = None
    call: tuple[Any, Any] | None = None
    aligned: dict[tuple[Tags, Frame], fx.Node] = field(default_factory=dict)

    @property
    def is_packed(self) -> bool:
        """Whether the value is proven determined by the prefix."""
        return self.tags is not None

    @property
    def depends_on_order(self) -> bool:
        """Whether its packed form belongs to an order of the packed tokens, so that it cannot be un-packed."""
        return self.numbering is not None or (self.tags is not None and Dim.SORTED in self.tags)

    @property
    def meta(self) -> torch.Tensor:
        """The fake tensor of the original graph: sizes here are the grid's."""
        val = self.source.meta["val"]
        if self.position is not None:
            val = val[self.position]
        assert isinstance(val, torch.Tensor)
        return val

    @property
    def shape(self) -> Sequence[Size]:
        """The grid's sizes."""
        return self.meta.shape

    @property
    def ndim(self) -> int:
        """The number of dimensions, the same in both forms."""
        return self.meta.ndim


def fake_value(node: fx.Node) -> Any:
    """``node.meta["val"]``, or None for nodes without a value (grad-mode and autocast markers)."""
    return node.meta.get("val")


def align(tags: Tags, rank: int) -> Tags:
    """Tags of a value broadcast on the left to ``rank`` dimensions."""
    return (Dim.FEATURE,) * (rank - len(tags)) + tags


def dim_of(tags: Tags, kind: Dim) -> int:
    """The position of the only dimension of ``kind``; -1 if there is none."""
    return tags.index(kind) if kind in tags else -1


_FLAT = (Dim.TOKEN, Dim.ASSIGNMENT, Dim.STACKED, Dim.SORTED)


def flat_dim(tags: Tags) -> int:
    """The position of the dimension in which rows and columns are flattened together; -1 if they are apart."""
    return next((place for place, kind in enumerate(tags) if kind in _FLAT), -1)


def well_formed(tags: Tags) -> bool:
    """Exactly one row and one column dimension, row first, or exactly one flat dimension."""
    rows, columns = tags.count(Dim.ROW), tags.count(Dim.COLUMN)
    flat = sum(tags.count(kind) for kind in _FLAT)
    if flat:
        return flat == 1 and rows == 0 and columns == 0
    return rows == 1 and columns == 1 and tags.index(Dim.ROW) < tags.index(Dim.COLUMN)


def ratio(whole: Size, part: Size) -> int | None:
    """``whole / part`` if that is one integer for every input the graph accepts, else None."""
    if isinstance(whole, int) and isinstance(part, int):
        return whole // part if part and whole % part == 0 else None
    quotient = sympy.cancel(_expression(whole) / _expression(part))
    return int(quotient) if quotient.is_Integer else None
