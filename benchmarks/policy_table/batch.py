"""The batch of a policy update: prompts, each repeated for its responses, and what the loss needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Shortest response of a ragged batch.
SHORTEST = 131


@dataclass(frozen=True)
class Batch:
    """``ids``, ``mask`` int64 [B, S]: ``prompt`` tokens, then a response, padded on the right.

    ``prompts`` of them are different, each in adjacent rows. ``lengths``: tokens of each row's response.
    ``advantages`` float32 [B].
    """

    ids: Tensor
    mask: Tensor
    prompts: int
    prompt: int
    lengths: tuple[int, ...]
    advantages: Tensor

    @staticmethod
    def of(
        prompts: int, rollouts: int, prompt: int, response: int, vocabulary: int, device: torch.device, *, ragged: bool
    ) -> Batch:
        """Random tokens; ``ragged`` responses have between 131 and ``response`` tokens, the first one all of them."""
        generator = torch.Generator().manual_seed(0)
        rows, columns = prompts * rollouts, prompt + response
        ids = torch.randint(vocabulary, (rows, columns), generator=generator)
        ids[:, :prompt] = ids[::rollouts, :prompt].repeat_interleave(rollouts, 0)
        lengths = torch.full((rows,), response)
        if ragged:
            lengths = torch.randint(min(SHORTEST, response), response + 1, (rows,), generator=generator)
            lengths[0] = response
        mask = (torch.arange(columns) < prompt + lengths.unsqueeze(1)).long()
        advantages = torch.randn(rows, generator=generator)
        # Padding is a token like any other: nothing may depend on which one it is.
        return Batch(ids.to(device), mask.to(device), prompts, prompt, tuple(lengths.tolist()), advantages.to(device))

    @property
    def rows(self) -> int:
        return self.ids.shape[0]

    @property
    def columns(self) -> int:
        return self.ids.shape[1]

    @property
    def scored(self) -> int:
        """Response tokens, each with a log-probability in the loss."""
        return sum(self.lengths)

    def predicting(self) -> Tensor:
        """Where in the flattened grid the response tokens are predicted: int64 [scored], one column ahead of them."""
        column = torch.arange(self.columns, device=self.ids.device)
        ends = self.mask.sum(1, keepdim=True)
        return ((column >= self.prompt - 1) & (column < ends - 1)).flatten().nonzero().squeeze(1)

    def targets(self) -> Tensor:
        """The response tokens, int64 [scored]."""
        return self.ids.flatten()[self.predicting() + 1]

    def advantage_of_each(self) -> Tensor:
        """The advantage of each response token's row, float32 [scored]."""
        return self.advantages[self.predicting() // self.columns]

    def split(self, rows: int) -> list[Batch]:
        """Micro-batches of ``rows`` rows; a prompt's rows may come to lie in several."""
        cuts = range(0, self.rows, rows)
        group = self.rows // self.prompts
        return [
            Batch(
                self.ids[at : at + rows].contiguous(),
                self.mask[at : at + rows].contiguous(),
                len({row // group for row in range(at, min(at + rows, self.rows))}),
                self.prompt,
                self.lengths[at : at + rows],
                self.advantages[at : at + rows].contiguous(),
            )
            for at in cuts
        ]
