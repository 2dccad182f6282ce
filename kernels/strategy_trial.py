"""Try one strategy on this machine: is it right, and how long does it take?

Reads ``{"name": strategy, "workload": {...}}`` from standard input and writes ``{"milliseconds": ..., "failure": ...}``
as the last line of standard output. Run by :mod:`~dualkv_compile.kernels.strategy`, one process per strategy.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dualkv_compile.kernels import flex, flex_compiled, reference
from dualkv_compile.kernels.packed_attention import packed_attention
from dualkv_compile.kernels.strategy import Trial, Workload
from dualkv_compile.plan import PrefixPlan
from dualkv_compile.plan_cache import PlanCache

#: Largest root mean square of the error, relative to that of the right value: two roundings of the dtype, where correct
#: kernels stay under one. For float32 enough to tell it from tf32.
TOLERANCE = {"float16": 2e-3, "bfloat16": 8e-3, "float32": 2e-5}
_RUNS = 7
_PADDING = 5
_MASK = "('k', 0)"  # which tokens are real
_SOFTCAP = 3.0  # so low that it bends the scores of random operands


def tree(groups: Sequence[tuple[int, Sequence[int]]], device: torch.device) -> tuple[PrefixPlan, Tensor]:
    """Prompts of given lengths with responses of given lengths, as packed tokens; and which of them are real.

    The first tokens of every row are padding: they see no key, and nobody sees them. So is the last one of every third
    row, which sees keys itself.
    """
    columns = max(prompt + max(responses) for prompt, responses in groups)
    lengths = [prompt + response for prompt, responses in groups for response in responses]
    ids = torch.arange(len(lengths)).unsqueeze(1).repeat(1, columns) + len(groups)
    row = 0
    for number, (prompt, responses) in enumerate(groups):
        ids[row : row + len(responses), :prompt] = number
        row += len(responses)
    keep = torch.arange(columns) < torch.tensor(lengths).unsqueeze(1)
    valid = keep & (torch.arange(columns) >= _PADDING)
    valid[::3] &= torch.arange(columns) < torch.tensor(lengths).unsqueeze(1)[::3] - 1
    keep, valid = keep.to(device), valid.to(device)
    plan, _ = PlanCache().get(ids.to(device), 1, keep, valid)
    return plan, valid.flatten()[plan.token]


def attend(name: str, q: Tensor, k: Tensor, v: Tensor, plan: PrefixPlan, valid: Tensor | None, **bent: Any) -> Tensor:
    """Attention by one strategy; ``valid`` bool ``[T]`` hides keys, ``bent`` are sinks and softcap."""
    vectors, mask = ([], "") if valid is None else ([valid], _MASK)
    places = (plan.rank, plan.column, plan.end)
    scale = q.shape[-1] ** -0.5
    if name in flex.BACKENDS:
        return flex_compiled.run(q, k, v, *places, vectors, mask, scale=scale, strategy=name, **bent)[0]
    nodes = plan.nodes
    if name == "dense" and valid is not None:
        assert plan.visible is not None
        name, nodes = "dense_visible", plan.visible
    return packed_attention(q, k, v, *places, nodes, vectors, mask, scale=scale, strategy=name, **bent)[0]


def bent_scores(workload: Workload) -> dict[str, Any]:
    """Sinks that require gradients and a soft cap, of those that the workload has."""
    given: dict[str, Any] = {}
    if "sinks" in workload.scores:
        device = torch.device("cuda", workload.device)
        generator = torch.Generator(device).manual_seed(1)
        given["sinks"] = torch.randn(workload.heads, device=device, generator=generator).requires_grad_()
    if "softcap" in workload.scores:
        given["softcap"] = _SOFTCAP
    return given


def operands(workload: Workload, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random q, k, v (requiring gradients) and gradient of the output."""
    device, dtype = torch.device("cuda", workload.device), getattr(torch, workload.dtype)
    generator = torch.Generator(device).manual_seed(0)

    def values(heads: int, size: int) -> Tensor:
        x = torch.randn(1, tokens, heads, size, device=device, generator=generator).to(dtype)
        return x.transpose(1, 2)

    q, k = values(workload.heads, workload.head_dim), values(workload.kv_heads, workload.head_dim)
    v, grad = values(workload.kv_heads, workload.value_dim), values(workload.heads, workload.value_dim)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad


def worst_error(name: str, workload: Workload) -> float:
    """Largest relative RMS error of the output and all gradients on ragged trees, NaN if any is not finite."""
    device = torch.device("cuda", workload.device)
    worst = 0.0
    # Two sizes, so that a kernel compiled for any size is also used at another one.
    for groups in ([(300, (131, 60, 5)), (77, (200, 1))], [(513, (64, 129, 250, 33))]):
        plan, real = tree(groups, device)
        valid = None if workload.mask == "none" else real
        q, k, v, grad = operands(workload, plan.tokens)
        bent = bent_scores(workload)
        out = attend(name, q, k, v, plan, valid, **bent)
        leaves = {"q": q, "k": k, "v": v, **{key: x for key, x in bent.items() if isinstance(x, Tensor)}}
        grads = torch.autograd.grad(out, list(leaves.values()), grad)
        exact = {key: x.detach().double().requires_grad_() for key, x in leaves.items()}
        extra = None if valid is None else valid.unsqueeze(0)
        tree_ = {"rank": plan.rank, "column": plan.column, "end": plan.end, "scale": q.shape[-1] ** -0.5}
        right, _ = reference.packed_attention(**{**bent, **exact}, **tree_, extra=extra)
        right_grads = torch.autograd.grad(right, list(exact.values()), grad.double())
        for got, expected in zip((out, *grads), (right, *right_grads), strict=True):
            error = (got.double() - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
            if not math.isfinite(float(error)):
                return math.nan
            worst = max(worst, float(error))
    return worst


def milliseconds(name: str, workload: Workload) -> float:
    """Median time of forward and backward: a prompt of 4096 tokens with 16 responses of 1024."""
    plan, real = tree([(4096, (1024,) * 16)], torch.device("cuda", workload.device))
    valid = None if workload.mask == "none" else real
    q, k, v, grad = operands(workload, plan.tokens)
    bent = bent_scores(workload)
    leaves = [q, k, v, *(x for x in bent.values() if isinstance(x, Tensor))]
    times = []
    for run in range(_RUNS + 3):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # Work in front of the first event, so that the launches behind it are not waited for.
        torch.cuda._sleep(2_000_000)
        start.record()
        torch.autograd.grad(attend(name, q, k, v, plan, valid, **bent), leaves, grad)
        stop.record()
        torch.cuda.synchronize()
        if run >= 3:
            times.append(start.elapsed_time(stop))
    return statistics.median(times)


def attempt(name: str, workload: Workload) -> Trial:
    """Check a strategy, then time it."""
    torch.cuda.set_device(workload.device)
    torch.use_deterministic_algorithms(workload.repeatable)
    error = worst_error(name, workload)
    allowed = TOLERANCE[workload.dtype]
    if not error <= allowed:
        return Trial(failure=f"its error against float64 is {error:.1e}, allowed are {allowed:.0e}")
    return Trial(milliseconds(name, workload))


def main() -> None:
    """Answer the question on standard input."""
    question = json.load(sys.stdin)
    try:
        result = attempt(question["name"], Workload(**question["workload"]))
    except Exception as error:  # whatever goes wrong is the answer
        result = Trial(failure=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}")
    print(json.dumps({"milliseconds": result.milliseconds, "failure": result.failure}))


if __name__ == "__main__":
    main()
