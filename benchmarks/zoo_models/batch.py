"""The batch every model gets: rollouts of two prompts, left-padded, rows shuffled; and its mutant."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zoo_models.sizes import VOCABULARY

#: Ids below are padding and the special tokens of the size table.
FIRST_ID = 4


@dataclass(frozen=True)
class Batch:
    """Token ids and mask ``[B, S]``, and where the prompts end."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    prompt: int

    def distinct(self) -> int:
        """The number of distinct prefixes of (id, mask): what sharing has to compute at least."""
        pairs = torch.stack([self.input_ids, self.attention_mask], -1).tolist()
        return len({tuple(map(tuple, row[: end + 1])) for row in pairs for end in range(len(row))})


def rollouts(prompts: tuple[int, ...] = (19, 24), group: int = 3, response: int = 8, seed: int = 1) -> Batch:
    """``group`` responses to each of the ``prompts`` (lengths), padded on the left to the longest."""
    generator = torch.Generator().manual_seed(seed)
    width = max(prompts)
    rows, masks = [], []
    for length in prompts:
        prompt = torch.randint(FIRST_ID, VOCABULARY, (length,), generator=generator)
        for member in range(group):
            tail = torch.randint(FIRST_ID, VOCABULARY, (response,), generator=generator)
            tail[0] = FIRST_ID + member
            rows.append(torch.cat([torch.zeros(width - length, dtype=torch.long), prompt, tail]))
            masks.append(torch.cat([torch.zeros(width - length), torch.ones(length + response)]).long())
    order = torch.randperm(len(rows), generator=generator)
    return Batch(torch.stack(rows)[order], torch.stack(masks)[order], width)


def mutant(batch: Batch) -> Batch:
    """The same batch with another last prompt token in row 0: within reach of every window."""
    ids = batch.input_ids.clone()
    column = batch.prompt - 1
    ids[0, column] = FIRST_ID + (ids[0, column] - FIRST_ID + 1) % (VOCABULARY - FIRST_ID)
    return Batch(ids, batch.attention_mask, batch.prompt)
