"""TRL: rows of a prompt stay together, and every log-probability pass runs compiled.

Use::

    trainer = GRPOTrainer(model=..., args=GRPOConfig(torch_compile=True, torch_compile_backend="dualkv", ...), ...)
    share_prefixes(trainer)
    trainer.train()

Nothing here imports trl: it works on the trainer that it is given.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from dualkv_compile.integrations.in_place import compile_arguments_of, compile_in_place

log = logging.getLogger("dualkv_compile")


def share_prefixes(trainer: Any, *, across_steps: bool = False, **compile_arguments: Any) -> None:
    """Prepare a TRL trainer (GRPO, RLOO, DPO and others with a model of their own) before ``trainer.train()``.

    * The model is compiled in place unless it is already (with ``compile_arguments``: ``options=...`` and so on), and
      so is a reference model, which TRL loads itself, with the arguments that the model has. Generation runs as written
      (`in_place`).
    * Trainers that generate keep rows of a prompt together (`keep_groups_together`).
    * Settings that leave nothing to share are logged, one line each, with the remedy.

    Raises TypeError for something that is not such a trainer, ValueError where `keep_groups_together` does.
    """
    if not isinstance(getattr(trainer, "model", None), torch.nn.Module) or not hasattr(trainer, "args"):
        raise TypeError(f"expected a trainer with a model and arguments, got {type(trainer).__name__}")
    for remedy in obstacles(trainer, across_steps=across_steps):
        log.warning("%s", remedy)
    compile_in_place(trainer.model, **compile_arguments)
    reference = getattr(trainer, "ref_model", None)
    if isinstance(reference, torch.nn.Module):
        present = (compile_arguments_of(part) for part in trainer.model.modules())
        compile_in_place(reference, **next(filter(None, present), compile_arguments))
    if hasattr(trainer, "_buffered_inputs"):
        keep_groups_together(trainer, across_steps=across_steps)


def keep_groups_together(trainer: Any, *, across_steps: bool = False) -> None:
    """Let a trainer that generates (GRPO, RLOO) cut its micro-batches along prompts.

    These trainers shuffle the rows of a generation batch and then cut it into micro-batches, which tears the rollouts
    of a prompt apart. From now on the rows of each optimizer step are put in order by prompt before they are used.

    What stays as it was: the rows of every optimizer step, each with its own advantage, old and reference
    log-probabilities; that each row is used once per iteration; the sizes of the micro-batches; the state of the random
    generators; the random order of the prompts, and of the rows within a prompt (that of their first appearance in
    TRL's own shuffle). So the gradient of an optimizer step is the same but for rounding, for every loss that weighs a
    row (or its tokens) the same in each micro-batch: ``grpo``, ``dapo``, ``dr_grpo``, ``cispo``, ``sapo``, ``vespo``,
    ``luspo`` and RLOO. Where a micro-batch normalises by something of its own (``bnpo``, ``entropy_coef``,
    ``top_entropy_quantile``, the auxiliary loss of experts), it does so over other rows than before.

    With ``across_steps=True`` the order is that of the whole generation batch, so that rows of a prompt also meet in
    the same optimizer step when there are several (``steps_per_generation > gradient_accumulation_steps``). Each row is
    still used once, but an optimizer step then holds whole prompts rather than a random choice of rows.

    Raises TypeError for a trainer that does not generate. A second call changes ``across_steps`` only.
    """
    if not hasattr(trainer, "_buffered_inputs") or not callable(getattr(trainer, "_prepare_inputs", None)):
        raise TypeError(f"{type(trainer).__name__} does not cut generated rows into micro-batches")
    present = trainer.__dict__.get("_prepare_inputs")
    if isinstance(present, _Grouped):
        present.across_steps = across_steps
    else:
        trainer._prepare_inputs = _Grouped(trainer, trainer._prepare_inputs, across_steps)


class _Grouped:
    """``trainer._prepare_inputs`` that puts new micro-batches in order before the first of them is used."""

    def __init__(self, trainer: Any, prepare: Callable[..., Any], across_steps: bool) -> None:
        self.across_steps = across_steps
        self._trainer = trainer
        self._prepare = prepare
        self._ordered: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs = self._prepare(*args, **kwargs)
        trainer = self._trainer
        batches = trainer._buffered_inputs
        if not trainer.model.training or batches is None:
            return inputs
        if batches is not self._ordered:
            trainer._buffered_inputs = self._ordered = self._in_order(batches)
        return self._ordered[trainer._step % len(self._ordered)]

    def _in_order(self, batches: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        count = len(batches)
        # Micro-batches of one optimizer step: steps begin at multiples of the accumulation.
        window = count if self.across_steps else math.gcd(count, self._trainer.args.gradient_accumulation_steps)
        ordered: list[dict[str, Any]] = []
        for start in range(0, count, window):
            ordered.extend(group_rows(batches[start : start + window]))
        return ordered


def group_rows(batches: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same rows in micro-batches of the same sizes, rows of a prompt next to each other.

    Each batch maps names to tensors ``[rows, ...]``, lists of ``rows`` items, 0-dim tensors (kept as they are) or None,
    among them ``prompt_ids`` and ``prompt_mask`` (``[rows, P]``). Batches with images are returned unchanged: their
    tensors are not cut by rows.
    """
    if len(batches) < 2 or any(value is not None for name in IMAGES for value in [batches[0].get(name)]):
        return [dict(batch) for batch in batches]
    sizes = [len(batch["prompt_ids"]) for batch in batches]
    prompts = [row for batch in batches for row in _prompts(batch)]
    first: dict[Hashable, int] = {}
    for index, prompt in enumerate(prompts):
        first.setdefault(prompt, index)
    order = sorted(range(len(prompts)), key=lambda index: first[prompts[index]])
    whole = {name: _select([batch[name] for batch in batches], order) for name in batches[0]}
    ordered, start = [], 0
    for size in sizes:
        ordered.append({name: _slice(value, start, start + size) for name, value in whole.items()})
        start += size
    return ordered


#: What TRL calls the inputs of images, which are cut by images and not by rows.
IMAGES = ("pixel_values", "image_grid_thw", "num_images", "image_sizes", "pixel_attention_mask", "image_position_ids")


def _prompts(batch: Mapping[str, Any]) -> list[Hashable]:
    ids, mask = batch["prompt_ids"].tolist(), batch["prompt_mask"].tolist()
    return [tuple(zip(row, kept, strict=True)) for row, kept in zip(ids, mask, strict=True)]


def _by_rows(value: Any) -> bool:
    return value is not None and not (isinstance(value, torch.Tensor) and value.ndim == 0)


def _select(parts: Sequence[Any], order: Sequence[int]) -> Any:
    """Rows ``order`` of the concatenation of ``parts``; what has no rows is the same in all of them."""
    if not _by_rows(parts[0]):
        return parts[0]
    if isinstance(parts[0], torch.Tensor):
        return torch.cat(list(parts))[torch.tensor(order, device=parts[0].device)]
    rows = [row for part in parts for row in part]
    return [rows[index] for index in order]


def _slice(value: Any, start: int, stop: int) -> Any:
    return value[start:stop] if _by_rows(value) else value


def obstacles(trainer: Any, *, across_steps: bool = False) -> list[str]:
    """The settings of a trainer that leave little or nothing to share, each with its remedy."""
    args = trainer.args
    found: list[str] = []
    attention = getattr(getattr(trainer.model, "config", None), "_attn_implementation", None)
    if attention not in (None, "sdpa", "eager", "flex_attention"):
        found.append(f'attn_implementation="{attention}" has no rule: nothing is shared; load the model with "sdpa"')
    backend = getattr(args, "torch_compile_backend", None)
    if backend not in (None, "dualkv"):
        found.append(
            f'torch_compile_backend="{backend}" compiles the model without sharing; set it to "dualkv" or leave it out'
        )
    if getattr(args, "padding_free", False) or getattr(args, "packing", False):
        found.append(
            "padding_free and packing put all rows into one, which shares nothing; switch them off: repeated prompts "
            "are then computed once, and options={'padding': 'drop'} skips the padding"
        )
    if getattr(args, "use_liger_kernel", False):
        found.append("use_liger_kernel puts operators without a rule into every layer: little is shared; switch it off")
    parallelism = getattr(args, "parallelism_config", None)
    for name, what in (("cp_size", "context"), ("sp_size", "sequence")):
        if (getattr(parallelism, name, None) or 1) > 1:
            found.append(f"{what} parallelism cuts rows into pieces, which share nothing; set {name} to 1")
    generates = hasattr(trainer, "_buffered_inputs")
    if generates and getattr(args, "per_device_train_batch_size", 2) == 1:
        found.append(
            "per_device_train_batch_size=1 leaves one row in a micro-batch, which shares nothing with itself; raise it "
            "to num_generations and lower gradient_accumulation_steps by the same factor"
        )
    steps = (getattr(args, "steps_per_generation", None) or 1) // (
        getattr(args, "gradient_accumulation_steps", None) or 1
    )
    if generates and steps > 1 and not across_steps:
        found.append(
            f"steps_per_generation spreads the rows of a prompt over {steps} optimizer steps, which share nothing; "
            "share_prefixes(trainer, across_steps=True) keeps them in one"
        )
    return found
