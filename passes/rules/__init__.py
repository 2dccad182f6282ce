"""One module per operator family; importing this package registers every rule."""

from dualkv_compile.passes import attention
from dualkv_compile.passes.rules import experts, indexing, matmul, pointwise, reductions, scans, views

__all__ = ["attention", "experts", "indexing", "matmul", "pointwise", "reductions", "scans", "views"]
