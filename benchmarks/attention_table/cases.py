"""Batches of rollouts as trees of lengths, and how many query-key pairs attention has to compute for them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dualkv_compile import PrefixPlan


@dataclass(frozen=True)
class Case:
    """Every prompt gets every response; all rows begin with the system prompt. Lengths in tokens."""

    name: str
    prompts: tuple[int, ...]
    responses: tuple[int, ...]
    system: int = 0

    def grid(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Token ids int64 [B, S] and which of them are there, bool [B, S]; rows are padded on the right."""

        def ids(count: int) -> Tensor:
            return torch.randint(0, 150_000, (count,), generator=generator)

        width = self.system + max(self.prompts) + max(self.responses)
        system, rows, lengths = ids(self.system), [], []
        for prompt in self.prompts:
            head = torch.cat([system, ids(prompt)])
            for response in self.responses:
                rows.append(torch.cat([head, ids(width - len(head))]))
                lengths.append(len(head) + response)
        return torch.stack(rows), torch.arange(width) < torch.tensor(lengths)[:, None]


#: Table 1 of the paper (N responses of 2,048 tokens to one prompt of P), ragged prompts and responses, three levels.
PAPER = ((28, 4096), (28, 16384), (16, 32768), (28, 32768), (16, 65536))
RAGGED = Case("ragged", (8190, 8192, 7900, 8001), tuple(torch.linspace(131, 2048, 16).int().tolist()))
CASES = (
    *(Case(f"{count}x{prompt}", (prompt,), (2048,) * count) for count, prompt in PAPER),
    RAGGED,
    Case("tree", (4096,) * 4, (1024,) * 8, system=2048),
)
QUICK_CASES = (
    Case("3x128", (128,), (64,) * 3),
    Case("ragged", (100, 96), (17, 64)),
    Case("tree", (64,) * 2, (32,) * 2, system=64),
)


@dataclass(frozen=True)
class Batch:
    """A case on a device."""

    case: Case
    ids: Tensor  # int64 [B, S]
    keep: Tensor | None  # bool [B, S], None if nothing is padding
    plan: PrefixPlan

    @staticmethod
    def of(case: Case, device: torch.device) -> Batch:
        """The same token ids every time."""
        ids, keep = (x.to(device) for x in case.grid(torch.Generator().manual_seed(0)))
        some = None if bool(keep.all()) else keep
        return Batch(case, ids, some, PrefixPlan.from_rows(ids, keep=some))

    @property
    def replicated_tokens(self) -> int:
        """B * S, padding included."""
        return self.ids.numel()

    @cached_property
    def pairs(self) -> int:
        """Query-key pairs of the tree, for one head: what the packed contenders have to compute."""
        return sum(
            triangle(stop - start) + (stop - start) * (query_stop - stop)
            for start, stop, query_stop in self.plan.nodes.tolist()
        )

    @property
    def replicated_pairs(self) -> int:
        """The same for the rows one by one, padding included, which a causal kernel cannot tell from tokens."""
        rows, columns = self.ids.shape
        return rows * triangle(columns)


def triangle(tokens: int) -> int:
    """Pairs of causal attention over ``tokens`` tokens."""
    return tokens * (tokens + 1) // 2
