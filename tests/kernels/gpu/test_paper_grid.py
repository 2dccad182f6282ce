"""The cases of the DualKV paper's kernel tests, in both 16-bit dtypes, by every strategy that claims to support them.

Left out: cases in which a response's queries see all of its own keys. Packed attention is causal.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dualkv_compile.errors import InputError
from dualkv_compile.kernels import flex, flex_compiled, fused
from dualkv_compile.kernels.packed_attention import packed_attention
from dualkv_compile.plan import PrefixPlan
from tests.kernels.gpu.oracle import DEVICE, exact, exact_by_rows, faults, make_plan, operands, replicated
from tests.kernels.helpers import group

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

Case = dict[str, Any]
GRID: dict[str, list[Case]] = json.loads((Path(__file__).parent / "paper_cases.json").read_text(encoding="utf-8"))[
    "cases"
]
#: Packed tokens times heads beyond which all pairs in float64 are too many.
LARGE = 3072 * 32


def _classes() -> dict[str, list[Case]]:
    """Causal cases by group and sizes: what FlexAttention compiles once."""
    found: dict[str, list[Case]] = {}
    for name, cases in GRID.items():
        for case in cases:
            if case["causal"]:
                sizes = f"{case['heads']}-{case['kv_heads']}-{case['head_dim']}"
                found.setdefault(f"{name}-{sizes}", []).append(case)
    return found


CLASSES = _classes()
STRATEGIES = ("blocks", "dense", "flex", "flex_flash")


def claims(strategy: str, dim: int, dtype: torch.dtype) -> bool:
    if strategy == "dense":
        return fused.flash_usable(DEVICE, dim)
    if strategy == "flex_flash":
        try:
            flex.check_operands(strategy, dtype, dim, dim)
        except InputError:
            return False
        return flex.flash_available()
    return True


def run(strategy: str, plan: PrefixPlan, tensors: Sequence[Tensor], scale: float) -> list[Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    tree = [x.to(DEVICE) for x in (plan.rank, plan.column, plan.end)]
    if strategy in flex.BACKENDS:
        out, lse = flex_compiled.run(q, k, v, *tree, scale=scale, strategy=strategy)
        lse = torch.empty(0)
    else:
        out, lse = packed_attention(q, k, v, *tree, plan.nodes, scale=scale, strategy=strategy)
    return [out.detach(), lse, *torch.autograd.grad(out, (q, k, v), tensors[3])]


def test_the_grid_is_whole() -> None:
    assert sum(map(len, GRID.values())) == 258
    assert sum(map(len, CLASSES.values())) == sum(case["causal"] for cases in GRID.values() for case in cases)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CLASSES)
def test_cases(name: str, dtype: torch.dtype, strategy: str) -> None:
    heads, kv_heads, dim = (CLASSES[name][0][key] for key in ("heads", "kv_heads", "head_dim"))
    if not claims(strategy, dim, dtype):
        pytest.skip("not claimed")
    wrong: list[str] = []
    for case in CLASSES[name]:
        plan = make_plan(group(case["prompt"], case["responses"]))
        tensors = operands(plan, heads, kv_heads, dim, dtype)
        large = plan.tokens * heads > LARGE
        expected = (exact_by_rows if large else exact)(plan, tensors, dim**-0.5)
        found = faults(run(strategy, plan, tensors, dim**-0.5), replicated(plan, tensors, dim**-0.5), expected, dtype)
        wrong += [f"{case['prompt']}+{case['responses']}: {fault}" for fault in found]
    assert not wrong
