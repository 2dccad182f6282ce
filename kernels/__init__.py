"""Attention on packed tokens: operators, strategies and the merge of partial results.

Importing this package registers the operators ``dualkv::packed_attention``, ``dualkv::pack`` and ``dualkv::unpack``.
"""

from dualkv_compile.kernels import gather, packed_attention

__all__ = ["gather", "packed_attention"]
