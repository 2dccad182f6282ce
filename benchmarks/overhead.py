"""What the backend adds to a call: the plan of a large batch, and the dispatch around the compiled graph.

python benchmarks/overhead.py [--rows 64] [--columns 8192] [--runs 50]

plan       PrefixPlan.from_rows of B x S rows with three int64 keys (ids, mask, positions), one thread or many
dispatch   everything between Dynamo's frame and the compiled packed graph: reading the rows (a batch seen before),
           judging the saving, preparing the inputs
nested     entering and leaving the nested torch.compile, guards included
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor

from dualkv_compile import PrefixPlan
from dualkv_compile.backend import dualkv
from dualkv_compile.compiled import CompiledGraph
from dualkv_compile.options import Options
from dualkv_compile.runtime import Dispatcher


def milliseconds(function: Callable[[], object], runs: int) -> list[float]:
    """Sorted times of ``runs`` calls, after three that do not count."""
    times = []
    for number in range(runs + 3):
        start = time.perf_counter()
        function()
        if number >= 3:
            times.append(1e3 * (time.perf_counter() - start))
    return sorted(times)


def keys(rows: int, columns: int, group: int = 8) -> list[Tensor]:
    """Ids, mask and positions of rollouts: groups of rows share the first three quarters."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, (rows, columns), generator=generator)
    shared = columns * 3 // 4
    ids[:, :shared] = ids[::group, :shared].repeat_interleave(group, 0)[:rows]
    mask = torch.ones_like(ids)
    mask[:, : columns // 64] = 0
    return [ids, mask, (mask.cumsum(1) - 1).clamp(min=0)]


def captured_dispatcher(rows: int, columns: int) -> tuple[Dispatcher, list[Any]]:
    """The dispatcher of a one-layer model, and the arguments that Dynamo's frame calls it with."""
    found: list[tuple[Dispatcher, list[Any]]] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        dispatcher = dualkv(gm, example_inputs, options={"min_shared": 1, "min_saving": 0, "compiler": "eager"})
        assert isinstance(dispatcher, Dispatcher)

        def call(*args: Any) -> Any:
            found.append((dispatcher, list(args)))
            return dispatcher(*args)

        return call

    table = torch.nn.Embedding(1000, 32)

    def model(ids: Tensor) -> Tensor:
        x = table(ids).view(*ids.shape, 2, 16).transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    torch.compile(model, backend=backend)(keys(rows, columns)[0])
    return found[-1]


def report(name: str, times: list[float]) -> None:
    low, high = times[len(times) // 20], times[-1 - len(times) // 20]
    print(f"{name:58s} {statistics.median(times):8.3f} ms   (5% to 95%: {low:.3f} to {high:.3f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--columns", type=int, default=8192)
    parser.add_argument("--runs", type=int, default=50)
    args = parser.parse_args()
    print(f"python {platform.python_version()}, torch {torch.__version__}, {torch.get_num_threads()} threads")

    batch = keys(args.rows, args.columns)
    report(
        f"plan, {args.rows} x {args.columns}, three int64 keys",
        milliseconds(lambda: PrefixPlan.from_rows(batch), args.runs),
    )

    dispatcher, inputs = captured_dispatcher(8, 64)

    def dispatch() -> None:
        plans = dispatcher.find_plans(inputs)
        given, computed = 8 * 64, sum(plan.tokens for plan in plans.values())
        assert dispatcher.worth(given, computed, plans.values())
        dispatcher.prepare(inputs, plans)

    report("dispatch, 8 x 64", milliseconds(dispatch, args.runs))

    graph = fx.Graph()
    # Dynamo compiles nothing for a graph without an operator.
    graph.output((graph.call_function(torch.neg, (graph.placeholder("x"),)),))
    nested = CompiledGraph(fx.GraphModule({}, graph), Options(compiler="eager"), dynamic=False, name="nested")
    x = torch.zeros(8)
    report("nested, a graph of one negation of 8 numbers", milliseconds(lambda: nested(x), args.runs))


if __name__ == "__main__":
    main()
