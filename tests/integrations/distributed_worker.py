"""One rank of the tests in test_distributed.py; started by torchrun, asserts and says so on rank 0."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
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


class Summed(nn.Module):
    """A module whose outputs are added up over the ranks, as those of a projection that is cut by columns."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return collectives.all_reduce(self.inner(x), "sum", dist.group.WORLD)


def all_reduce_of_an_mlp() -> nn.Module:
    model = build("llama")
    model.model.layers[0].mlp = Summed(model.model.layers[0].mlp)
    return model


def all_reduce_of_the_logits() -> nn.Module:
    model = build("llama")
    model.lm_head = Summed(model.lm_head)
    return model


def tensor_parallel_mlps() -> nn.Module:
    """Weights are DTensors: their collectives are in no graph that a backend sees."""
    model = build("llama")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer.mlp, mesh, plan)
    return model


COLLECTIVES: dict[str, Callable[[], nn.Module]] = {
    function.__name__: function for function in (all_reduce_of_an_mlp, all_reduce_of_the_logits, tensor_parallel_mlps)
}


def outcome(model: nn.Module, rank: int) -> list[Tensor]:
    """Losses of both micro-batches, and gradients."""
    losses = [loss_of(model, batch) for batch in batches(rank)]
    for loss in losses:
        loss.backward()
    return [*(loss.detach() for loss in losses), *(whole(p.grad) for p in model.parameters() if p.grad is not None)]


def runs_plain(make: Callable[[], nn.Module], rank: int) -> None:
    """One rank could share prompts, the other could not: both run the same graph, with one reason, told once."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dualkv_compile").addHandler(handler)
    model = make()
    model.compile(backend="dualkv", options=OPTIONS)
    dualkv_compile.reset_stats()
    got, expected = outcome(model, rank), outcome(make(), rank)
    for ours, theirs in zip(got, expected, strict=True):
        assert float((ours - theirs).abs().max()) <= 1e-6 * max(1.0, float(theirs.abs().max()))
    statistics = dualkv_compile.stats()
    assert statistics["plain_calls"] == statistics["calls"] == 2, statistics
    ((reason, count),) = statistics["reasons"].items()
    assert "collective" in reason and count == 2, statistics
    assert [text for text in told if "collective" in text] == [f"{reason}; the plain graph runs"], told


def shares(name: str, rank: int) -> None:
    """A training step: what is shared on each rank, and the weights afterwards."""
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


def main(name: str) -> None:
    # A rank that waits for another in vain says so.
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank = dist.get_rank()
    if name in COLLECTIVES:
        runs_plain(COLLECTIVES[name], rank)
    else:
        shares(name, rank)
    dist.barrier()
    if rank == 0:
        print(f"{name}: passed")
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
