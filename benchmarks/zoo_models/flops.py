"""Counting floating-point operations of calls that go through torch.compile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers.integrations.moe  # noqa: F401  (registers its grouped product)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten


def _cpu_attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _cpu_attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))


def _grouped(tokens: Any, weight: Any, *_: Any, **__: Any) -> int:
    return int(2 * tokens.shape[0] * weight.shape[-2] * weight.shape[-1])


def _grouped_backward(tokens: Any, weight: Any, *_: Any, **__: Any) -> int:
    return 2 * _grouped(tokens, weight)


def _added_product(_: Any, left: Any, right: Any, **__: Any) -> int:
    return int(2 * left.shape[0] * left.shape[1] * right.shape[1])


#: torch has no formula for its fused attention on the CPU, for a product that is added in place, nor for transformers'
#: grouped product.
_FORMULAS = {
    aten.addmm_: _added_product,
    torch.ops.transformers.grouped_mm_fallback: _grouped,
    torch.ops.transformers.grouped_mm_fallback_backward: _grouped_backward,
    aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,
}


class FlopCount(TorchDispatchMode):
    """Adds up the operations that reach the dispatcher, forward and backward.

    Unlike ``FlopCounterMode`` it does not keep Dynamo from running compiled code.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled frames run as compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = func._overloadpacket
        if packet in _FORMULAS:
            self.total += _FORMULAS[packet](*args, **kwargs)
        elif packet in flop_registry:
            self.total += int(flop_registry[packet](*args, **kwargs, out_val=result))
        return result


@contextmanager
def counting() -> Iterator[FlopCount]:
    """Count what runs inside."""
    with FlopCount() as count:
        yield count
