"""Evaluating the sizes of a graph from the inputs of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import sympy
import torch
import torch.fx as fx

from dualkv_compile.passes.values import Size


class SymbolTable:
    """Where each symbol of a graph's sizes can be read off its inputs.

    With static shapes there are none and every size is a number already.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self._places: dict[sympy.Symbol, tuple[int, int | None]] = {}
        for index, node in enumerate(node for node in gm.graph.nodes if node.op == "placeholder"):
            val = node.meta.get("val")
            if isinstance(val, torch.SymInt):
                self._add(val, index, None)
            elif isinstance(val, torch.Tensor):
                for dim, size in enumerate(val.shape):
                    self._add(size, index, dim)

    def _add(self, size: Size, index: int, dim: int | None) -> None:
        if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
            self._places.setdefault(size.node.expr, (index, dim))

    def evaluate(self, size: Size, args: Sequence[Any]) -> int:
        """The number that ``size`` stands for in a call with ``args``."""
        if isinstance(size, int):
            return size
        symbols, function = self._compile(size.node.expr)
        return int(function(*(self._read(symbol, args) for symbol in symbols)))

    def known(self, size: Size) -> bool:
        """Whether ``size`` can be evaluated from the inputs."""
        return isinstance(size, int) or all(symbol in self._places for symbol in size.node.expr.free_symbols)

    def _read(self, symbol: sympy.Symbol, args: Sequence[Any]) -> int:
        index, dim = self._places[symbol]
        return int(args[index]) if dim is None else int(args[index].shape[dim])

    @staticmethod
    @lru_cache(maxsize=256)
    def _compile(expression: sympy.Expr) -> tuple[list[sympy.Symbol], Callable[..., Any]]:
        symbols = sorted(expression.free_symbols, key=str)
        return symbols, sympy.lambdify(symbols, expression, modules=["math", "sympy"])
