"""One module per operator family; importing this package registers every rule."""

from dualkv_compile.passes import attention
from dualkv_compile.passes.rules import indexing, matmul, pointwise, reductions, scans, views

__all__ = ["attention", "indexing", "matmul", "pointwise", "reductions", "scans", "views"]
