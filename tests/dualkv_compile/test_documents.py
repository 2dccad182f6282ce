"""The code of docs/adding_an_operator.md does what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualkv_compile
from tests.models.harness import rollouts

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adding_an_operator.md"


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The names that the code blocks of the page define, run in order."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, Any] = {"__name__": "adding_an_operator"}
    # As they stand on the page: operators infer their schema from annotations, which must not be strings.
    exec(compile("\n".join(blocks), str(PAGE), "exec", dont_inherit=True), names)
    return names


class Model(nn.Module):
    """Both operators around one attention."""

    def __init__(self, page: dict[str, Any], dim: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(97, 16)
        self.project = nn.Linear(16, 64)
        self.weight = nn.Parameter(torch.rand(16) + 0.5)
        self.gated_norm, self.unit, self.dim = page["gated_norm"], page["unit"], dim
        self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        *heads, gate = self.project(self.unit(self.embed(ids), self.dim)).chunk(4, dim=-1)
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in heads)
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        normed, size = self.gated_norm(x, gate, self.weight, 1e-6)
        return normed + size.unsqueeze(-1)


def test_the_gradients_on_the_page_are_right(page: dict[str, Any]) -> None:
    def tensor(*sizes: int) -> torch.Tensor:
        return torch.rand(*sizes, dtype=torch.float64, requires_grad=True)

    assert torch.autograd.gradcheck(page["gated_norm"], (tensor(2, 3, 4), tensor(2, 3, 4), tensor(4), 1e-3))
    assert torch.autograd.gradcheck(page["unit"], (tensor(2, 3, 4), 1))


def test_the_operators_are_packed_and_checked(page: dict[str, Any]) -> None:
    dualkv_compile.reset_stats()
    torch._dynamo.reset()
    stats = page["check"](Model(page, -1), rollouts()["input_ids"])
    assert stats["packed_calls"] == 1
    assert stats["reasons"] == {}
    dualkv_compile.reset_stats()
    torch._dynamo.reset()
    stats = page["check"](Model(page, 1), rollouts()["input_ids"])
    assert stats["packed_calls"] == 0
    assert any("it normalises over rows or columns" in reason for reason in stats["reasons"])
