"""How much of the card's copy bandwidth the Triton merge moves, at the size of one prompt with N responses.

python benchmarks/merge_bandwidth.py [--responses 28] [--prompt 16384] [--length 2048] [--json FILE]

Counts what has to be read and written once; medians of --runs timings by CUDA events, the contenders in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from dualkv_compile.kernels.merge import merge
from dualkv_compile.kernels.rows import Rows, merge_rows, sum_rows


def contenders(args: argparse.Namespace) -> dict[str, tuple[Callable[[], object], int]]:
    """Name -> (function, bytes it has to move)."""
    device, dtype = torch.device("cuda"), getattr(torch, args.dtype)
    tokens, heads, size = args.prompt + args.responses * args.length, args.heads, args.dim

    def values(count: int) -> Tensor:
        return torch.randn(count, heads, size, device=device, dtype=dtype)

    def numbers(count: int) -> Tensor:
        return torch.randn(heads, count, device=device).T  # ordered by head, as the kernels give them

    def nbytes(*tensors: Tensor) -> int:
        return sum(x.numel() * x.element_size() for x in tensors)

    everything, responses = Rows(0, tokens), Rows(args.prompt, tokens)
    outs, lses = [values(tokens), values(tokens)], [numbers(tokens), numbers(tokens)]
    compact = [x.contiguous() for x in lses]
    below, below_lse = outs[1][args.prompt :], lses[1][args.prompt :]
    source, target = torch.cat(outs), torch.empty(2 * tokens, heads, size, device=device, dtype=dtype)
    leaves = [x.clone().requires_grad_() for x in (*outs, *compact)]
    merged, merged_lse = merge(leaves[:2], leaves[2:])
    grad, grad_lse = torch.randn_like(merged), torch.randn_like(merged_lse)

    def backward() -> object:
        return torch.autograd.grad((merged, merged_lse), leaves, (grad, grad_lse), retain_graph=True)

    whole = nbytes(outs[0], lses[0])
    return {
        "copy": (lambda: target.copy_(source), 2 * nbytes(source)),
        "merge of 2": (lambda: merge(outs, compact), 3 * whole),
        "merge of 2, LSE by head": (lambda: merge(outs, lses), 3 * whole),
        "merge of 2, backward": (backward, 5 * whole),
        "merge of all and the responses": (
            lambda: merge_rows([outs[0], below], [lses[0], below_lse], [everything, responses], tokens),
            2 * whole + nbytes(below, below_lse),
        ),
        "sum of all and the responses": (
            lambda: sum_rows([outs[0], below], [everything, responses], tokens),
            nbytes(outs[0], outs[0], below),
        ),
    }


def measure(functions: dict[str, tuple[Callable[[], object], int]], runs: int) -> dict[str, dict[str, float]]:
    """Milliseconds and GB/s by name."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(runs + 3):
        for name, (function, _) in functions.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            # The card is kept busy while Python prepares the launch, which otherwise would be timed along.
            torch.cuda._sleep(2_000_000)
            start.record()
            function()
            stop.record()
            torch.cuda.synchronize()
            if turn >= 3:
                times[name].append(start.elapsed_time(stop))
    medians = {name: statistics.median(found) for name, found in times.items()}
    return {name: {"ms": medians[name], "GB/s": functions[name][1] / medians[name] / 1e6} for name in functions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=28)
    parser.add_argument("--prompt", type=int, default=16384)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = measure(contenders(args), args.runs)
    copy = found["copy"]["GB/s"]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, median of {args.runs}")
    for name, row in found.items():
        print(f"{name:32s} {row['ms']:8.3f} ms {row['GB/s']:8.0f} GB/s {row['GB/s'] / copy:6.1%} of copy")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
