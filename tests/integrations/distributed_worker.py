"""One rank of the tests in test_distributed.py; started by torchrun, asserts and says so on rank 0."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import dualkv_compile
from tests.models.harness import EXACT, build, rollouts, trie_size

Batch = Mapping[str, Tensor]
OPTIONS = {**EXACT, "compiler": "eager"}
RATE, LIMIT = 0.05, 0.5


def batches(rank: int) -> list[Batch]:
    """Two micro-batches of a rank: the first rank's rows share prompts, the second rank's share nothing."""
    if rank == 0:
        return [rollouts(prompts=(12, 9), group=2, seed=seed) for seed in (1, 2)]
    return [rollouts(prompts=(12, 9, 10, 11), group=1, seed=seed) for seed in (3, 4)]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(**batch, use_cache=False).logits
    return logits[batch["attention_mask"].bool()].square().mean() / 2


def expected() -> tuple[dict[str, Tensor], float]:
    """Weights after one step of one process over all micro-batches of all ranks, and the gradient norm."""
    model = build("llama")
    for rank in range(dist.get_world_size()):
        for batch in batches(rank):
            (loss_of(model, batch) / dist.get_world_size()).backward()
    return step(model)


def step(model: nn.Module) -> tuple[dict[str, Tensor], float]:
    norm = clip_grad_norm_(model.parameters(), LIMIT)
    torch.optim.SGD(model.parameters(), lr=RATE).step()
    total = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return {name: whole(tensor) for name, tensor in model.state_dict().items()}, float(total)


def whole(tensor: Any) -> Tensor:
    result: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return result.detach().clone()


def ddp_of_a_compiled_model() -> tuple[nn.Module, nn.Module]:
    model = build("llama")
    model.compile(backend="dualkv", options=OPTIONS)
    return DistributedDataParallel(model), model


def compiled_ddp_in_buckets() -> tuple[nn.Module, nn.Module]:
    """Dynamo cuts the graph where a bucket of gradients is full; only the first piece sees the tokens."""
    model = build("llama")
    dist._DEFAULT_FIRST_BUCKET_BYTES = 5_000  # not larger than the other buckets, which DDP asserts
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.01)
    wrapped.compile(backend="dualkv", options=OPTIONS)
    return dualkv_compile.attach(wrapped), model


def fsdp_by_block() -> tuple[nn.Module, nn.Module]:
    model = build("llama")
    for block in model.model.layers:
        fully_shard(block)
        block.compile(backend="dualkv", options=OPTIONS)
    fully_shard(model)
    return dualkv_compile.attach(model), model


def fsdp_in_bfloat16() -> tuple[nn.Module, nn.Module]:
    model = build("llama")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block, mp_policy=policy)
        block.compile(backend="dualkv", options=OPTIONS)
    fully_shard(model, mp_policy=policy)
    return dualkv_compile.attach(model), model


WAYS: dict[str, Callable[[], tuple[nn.Module, nn.Module]]] = {
    function.__name__: function
    for function in (ddp_of_a_compiled_model, compiled_ddp_in_buckets, fsdp_by_block, fsdp_in_bfloat16)
}


def accumulate(wrapped: nn.Module, rank: int) -> None:
    """Backward of both micro-batches; gradients are exchanged with the last."""
    *early, last = batches(rank)
    for batch in early:
        if isinstance(wrapped, DistributedDataParallel):
            with wrapped.no_sync():
                loss_of(wrapped, batch).backward()
        else:
            wrapped.set_requires_gradient_sync(False)
            loss_of(wrapped, batch).backward()
            wrapped.set_requires_gradient_sync(True)
    loss_of(wrapped, last).backward()


def main(name: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    names = list(build("llama").state_dict())
    wrapped, model = WAYS[name]()
    dualkv_compile.reset_stats()
    accumulate(wrapped, rank)
    statistics = dualkv_compile.stats()
    assert statistics["reasons"] == {}, statistics
    assert statistics["packed_calls"] == statistics["calls"] > 0, statistics
    share = sum(trie_size(*batch.values()) / batch["input_ids"].numel() for batch in batches(rank)) / 2
    assert abs(statistics["tokens_computed"] / statistics["tokens_given"] - share) < 1e-9, statistics
    assert (share < 0.9) == (rank == 0)
    weights, norm = step(model)
    goal, goal_norm = expected()
    assert list(weights) == names
    tolerance = 2e-2 if "bfloat16" in name else 1e-5
    assert abs(norm - goal_norm) <= tolerance * goal_norm, (norm, goal_norm)
    for key, tensor in goal.items():
        distance = float((weights[key] - tensor).abs().max())
        assert distance <= tolerance * RATE, (key, distance)
    saved = io.BytesIO()
    torch.save(weights, saved)
    saved.seek(0)
    build("llama").load_state_dict(torch.load(saved))
    dist.barrier()
    if rank == 0:
        print(f"{name}: passed")
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
