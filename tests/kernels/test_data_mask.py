"""Masks that arrive as data: what is read in them, and which are recognised as more than that."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dualkv_compile.kernels.data_mask import read_mask, readable

COLUMNS = 9
GRID = torch.empty(3, COLUMNS)
PLACE = torch.arange(COLUMNS)
CAUSAL = PLACE[None] <= PLACE[:, None]
PADDING = torch.tensor([[0] * n + [1] * (COLUMNS - n) for n in (0, 2, 4)]).bool()

MASKS: dict[str, Tensor] = {
    "causal": CAUSAL.expand(1, 1, -1, -1),
    "padding": (CAUSAL & PADDING[:, None]).unsqueeze(1),
    "window": (CAUSAL & (PLACE[None] > PLACE[:, None] - 3)).expand(1, 1, -1, -1),
    "padding and window": (CAUSAL & (PLACE[None] > PLACE[:, None] - 3) & PADDING[:, None]).unsqueeze(1),
    "chunks": (CAUSAL & (PLACE[None] // 4 == PLACE[:, None] // 4)).expand(1, 1, -1, -1),
    "hole": (CAUSAL & (PLACE != 3)).expand(3, 1, -1, -1),
    "nothing": torch.zeros(3, 1, COLUMNS, COLUMNS, dtype=torch.bool),
}


def change(mask: Tensor, query: int, key: int) -> Tensor:
    mask = mask.clone()
    mask[-1, 0, query, key] = ~mask[-1, 0, query, key]
    return mask


UNREADABLE = {
    "later key": change(MASKS["padding"], 3, 6),
    "hole of one query": change(MASKS["causal"], 7, 4),
    "not itself": change(MASKS["causal"], 5, 5),
    "bidirectional": torch.ones(1, 1, COLUMNS, COLUMNS, dtype=torch.bool),
}


def additive(mask: Tensor, dtype: torch.dtype, hidden: float | None = None) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min if hidden is None else hidden)


@pytest.mark.parametrize("form", ["bool", "lowest", "infinite"])
@pytest.mark.parametrize("name", MASKS)
def test_all_there_is_to_say(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualkv_compile.kernels.data_mask._CHUNK", 3 * COLUMNS * 2)  # two lines at a time
    seen = MASKS[name]
    given = seen if form == "bool" else additive(seen, torch.bfloat16, None if form == "lowest" else -torch.inf)
    valid, first = read_mask(given, GRID)
    assert valid.shape == first.shape == GRID.shape
    again = (first[..., None] <= PLACE) & CAUSAL & valid[:, None]
    assert torch.equal(again, seen[:, 0].expand(3, -1, -1))
    assert readable(given, valid, first)


@pytest.mark.parametrize("name", UNREADABLE)
def test_more_than_can_be_said(name: str) -> None:
    for given in (UNREADABLE[name], additive(UNREADABLE[name], torch.float32)):
        assert not readable(given, *read_mask(given, GRID))


def test_numbers_that_are_added_to_scores() -> None:
    given = additive(MASKS["padding"], torch.float32)
    given[0, 0, 5, 2] = -0.5
    assert not readable(given, *read_mask(given, GRID))
    given = additive(MASKS["padding"], torch.float32, -1e4)  # hides nearly, not quite
    assert not readable(given, *read_mask(given, GRID))
