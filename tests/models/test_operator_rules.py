"""Single operators between two attentions: packed where each token's result is its own, as written where it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualkv_compile
from tests.models.harness import EXACT, distance, rollouts, trie_size
from tests.models.test_refusals import Decoder

Between = Callable[[torch.Tensor], torch.Tensor]
STATE = torch.linspace(-1, 1, 16, dtype=torch.float64)
TABLE = torch.linspace(-1, 1, 40 * 16, dtype=torch.float64).sin().view(40, 16)


def flag(x: torch.Tensor) -> torch.Tensor:
    return (x[..., 0] > 0).long()


def rotated(x: torch.Tensor) -> torch.Tensor:
    angles = torch.arange(x.shape[1], device=x.device).double()[:, None] * STATE[:8]
    turn = torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (8, 2))) * turn).flatten(-2)


def filled(x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(x.shape)
    out[..., :4].copy_(x[..., 12:])
    out[..., 4:].copy_(x[..., :12])
    return out


def marked(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[x > 0.5] = 0
    return y


def normalized(x: torch.Tensor) -> torch.Tensor:
    top, index = torch.topk(x, 4, dim=-1)
    top /= top.sum(-1, keepdim=True).abs() + 1
    return x + top.sum(-1, keepdim=True) + index.double().mean(-1, keepdim=True)


PACKED: dict[str, Between] = {
    "features_by_constants": lambda x: x[..., [3, 1, 0, 2, *range(4, 16)]],
    "einsum": lambda x: x + torch.einsum("bsd,de,bse->bse", x, TABLE[:16], x),
    "group_norm": lambda x: F.group_norm(x.flatten(0, 1), 4).view(x.shape),
    "complex_rotary": rotated,
    "state_for_every_token": lambda x: x + STATE.expand_as(x),
    "filled_in_parts": filled,
    "set_where_flagged": marked,
    "table_of_flags": lambda x: x + TABLE[:1].expand(x.shape[0], -1).gather(1, flag(x)).unsqueeze(-1),
    "table_of_repeated_columns": lambda x: x + TABLE[torch.arange(x.shape[1]).unsqueeze(0).repeat(x.shape[0], 1)],
    "one_result_of_two_changed": normalized,
}


def read_in_between(x: torch.Tensor) -> torch.Tensor:
    out = x.new_zeros(x.shape)
    out[..., :4].copy_(x[..., 12:])
    early = out.sum(-1, keepdim=True)
    out[..., 4:].copy_(x[..., :12])
    return out + early


def overlapping(x: torch.Tensor) -> torch.Tensor:
    out = x.new_zeros(x.shape)
    out[..., :8].copy_(x[..., 8:])
    out[..., 4:].copy_(x[..., :12])
    return out


def changed_between_copies(x: torch.Tensor) -> torch.Tensor:
    out, source = x.new_zeros(x.shape), x * 1
    out[..., :4].copy_(source[..., 12:])
    source.mul_(2)
    out[..., 4:].copy_(source[..., :12])
    return out


def one_row_set(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[torch.arange(x.shape[0]) == 1] = 0
    return y


def other_result_read(x: torch.Tensor) -> torch.Tensor:
    top, index = torch.topk(x, 4, dim=-1)
    half = top[..., :2]
    top *= 0.5
    return x + half.sum(-1, keepdim=True) + index.double().mean(-1, keepdim=True)


AS_WRITTEN: dict[str, Between] = {
    "columns_by_constants": lambda x: x + x[:, [*reversed(range(20))]],
    "einsum_over_columns": lambda x: x + torch.einsum("bsd,bse->bde", x, x).sum(1, keepdim=True),
    "einsum_of_two_columns": lambda x: x + torch.einsum("bsd,btd->bst", x, x).mean(-1, keepdim=True),
    "group_norm_over_columns": lambda x: F.group_norm(x.transpose(1, 2), 4).transpose(1, 2),
    "table_of_each_row": lambda x: x + TABLE[: x.shape[0], :2].contiguous().gather(1, flag(x)).unsqueeze(-1),
    "state_of_each_row": lambda x: x + TABLE[: x.shape[0], None, :].expand_as(x),
    "table_of_rows": lambda x: x + TABLE[torch.arange(x.shape[0]).unsqueeze(1).repeat(1, x.shape[1])],
    "read_in_between": read_in_between,
    "overlapping": overlapping,
    "changed_between_copies": changed_between_copies,
    "one_row_set": one_row_set,
    "other_result_read": other_result_read,
}


def compare(model: nn.Module, *inputs: torch.Tensor) -> dict[str, Any]:
    """Run eager and compiled; outputs and gradients must agree. Returns the statistics."""

    def step(function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        out = function(*inputs)
        real = inputs[1][..., None] if len(inputs) > 1 else 1
        (out * real * out.detach().cos()).sum().backward()
        return [out.detach() * real, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    expected = step(model)
    torch._dynamo.reset()
    dualkv_compile.reset_stats()
    got = step(torch.compile(model, backend="dualkv", options=EXACT))
    stats = dualkv_compile.stats()
    assert len(got) == len(expected) > 2
    for a, b in zip(got, expected, strict=True):
        assert distance(a, b) < 1e-11
    return stats


@pytest.mark.parametrize("name", PACKED)
def test_packed(name: str) -> None:
    ids = rollouts()["input_ids"]
    stats = compare(Decoder(PACKED[name]).double(), ids)
    assert stats["reasons"] == {}
    assert (stats["packed_calls"], stats["tokens_computed"]) == (1, trie_size(ids))


@pytest.mark.parametrize("name", AS_WRITTEN)
def test_as_written(name: str) -> None:
    stats = compare(Decoder(AS_WRITTEN[name]).double(), rollouts()["input_ids"])
    assert stats["reasons"] != {}


class Chunked(Decoder):
    """Attention within chunks of five columns that are counted from each row's first valid column."""

    def __init__(self, valid: Callable[[torch.Tensor], torch.Tensor], hides: bool = True) -> None:
        super().__init__(lambda x: x)
        self.valid, self.hides = valid, hides

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        valid = self.valid(mask)
        start = (valid.cumsum(-1) == torch.zeros_like(valid)).sum(-1)
        row, column = torch.arange(ids.shape[0]), torch.arange(ids.shape[1])
        first, query, key = start[row][:, None, None, None], column[:, None], column
        allowed = (key <= query) & ((key - first) // 5 == (query - first) // 5)
        if self.hides:
            allowed = allowed & valid[row[:, None, None, None], key]
        x = self.embed(ids)
        for layer in self.layers:
            q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in layer(x).chunk(3, dim=-1))
            x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=allowed).transpose(1, 2).flatten(2)
        return self.head(x)


def test_chunks_counted_from_the_first_valid_column() -> None:
    batch = rollouts(prompts=(9, 12), right_padding=(0, 3, 0, 0, 1, 0, 0, 0))
    ids, mask = batch["input_ids"], batch["attention_mask"]
    stats = compare(Chunked(lambda mask: mask.bool()).double(), ids, mask)
    assert stats["reasons"] == {}
    assert (stats["packed_calls"], stats["tokens_computed"]) == (1, trie_size(ids, mask))


def test_padding_that_is_counted_must_be_hidden() -> None:
    batch = rollouts(prompts=(9, 12))
    model = Chunked(lambda mask: mask.bool(), hides=False).double()
    stats = compare(model, batch["input_ids"], batch["attention_mask"])
    assert any("does not hide it" in reason for reason in stats["reasons"])


def test_numbers_are_no_mask_to_count_by() -> None:
    """The running sum of numbers may return to 0 behind a negative one, so the first column is not known early."""
    batch = rollouts(prompts=(9, 12))
    model = Chunked(lambda mask: mask, hides=False).double()
    stats = compare(model, batch["input_ids"], batch["attention_mask"])
    assert any("row as a whole" in reason for reason in stats["reasons"])
