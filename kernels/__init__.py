"""Attention on packed tokens: operators, strategies and the merge of partial results.

Importing this package registers the operators ``dualkv::packed_attention``, ``dualkv::pack``, ``dualkv::unpack``,
``dualkv::block_mask``, ``dualkv::pair_vectors`` and ``dualkv::read_mask``.
"""

from dualkv_compile.kernels import block_mask, data_mask, gather, packed_attention, pair_mask

__all__ = ["block_mask", "data_mask", "gather", "packed_attention", "pair_mask"]
