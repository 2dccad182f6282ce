"""What torch.compile and its surroundings do to a model: lengths, checkpoints, DDP, layers, options, failures."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import dualkv_compile
from dualkv_compile import OptionError, PrefixPlan, UnsupportedGraphError, packed_attention
from dualkv_compile import backend as backend_module
from dualkv_compile.compiled import CompiledGraph
from dualkv_compile.kernels.block_classes import classify_blocks
from tests.cases.common import Batch, base, grid, loss_step, response
from tests.models.harness import (
    EXACT,
    assert_packed_and_exact,
    build,
    compiled,
    distance,
    largest_distance,
    masked,
    rollouts,
    run,
    trie_size,
)

PROMPT = [11, 12, 13, 14, 15]


def three_rows() -> dict[str, torch.Tensor]:
    """One prompt of 5, three responses of 4: 17 tokens."""
    return grid([(PROMPT, response(n, 4)) for n in range(3)])


# ------------------------------------------------------------------ lengths


def test_ten_lengths_in_a_row(caplog: pytest.LogCaptureFixture) -> None:
    """Case 21: at most the first two lengths compile, and nothing falls back to running uncompiled."""
    model = build("llama", num_hidden_layers=1)
    calls: list[int] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        calls.append(len(inputs))
        return backend_module.dualkv(gm, inputs, options=EXACT)

    torch._dynamo.reset()
    function = torch.compile(model, backend=backend)
    dualkv_compile.reset_stats()
    tokens = 0
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True), caplog.at_level(logging.WARNING):
        for number in range(10):
            batch = rollouts(prompts=(4 + 2 * number, 3 + number), group=(2, 1 + number % 3), response=12 - number)
            tokens += trie_size(*batch.values())
            found = run(model, function, loss_step(), batch)
            assert largest_distance(found, run(model, model, loss_step(), batch)) <= 1e-5
    stats = dualkv_compile.stats()
    assert stats["calls"] == stats["packed_calls"] == 10
    assert stats["tokens_computed"] == tokens
    assert stats["reasons"] == {}
    assert 1 <= len(calls) <= 2
    assert 1 <= stats["graphs_compiled"] <= 3
    assert not [record for record in caplog.records if "recompile" in record.getMessage()]


def test_plan_of_a_hundred_thousand_tokens() -> None:
    """Case 22: plan and block classes take milliseconds and megabytes; in T x T they would take gigabytes."""
    rows, prompt, columns = 32, 4096, 7168
    ids = torch.randint(0, 1000, (rows, columns), generator=torch.Generator().manual_seed(0))
    ids[:, :prompt] = ids[0, :prompt]
    ids[:, prompt] = torch.arange(rows)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        plan = PrefixPlan.from_rows(ids)
        classes = classify_blocks(plan, 128)
        seconds.append(time.perf_counter() - start)
    assert plan.tokens == prompt + rows * (columns - prompt) > 100_000
    assert classes.shape == (-(-plan.tokens // 128),) * 2
    held = [plan.token, plan.inverse, plan.rank, plan.column, plan.end, plan.nodes, classes]
    assert sum(tensor.untyped_storage().nbytes() for tensor in held) < 10e6
    assert min(seconds) < 0.5, seconds  # a tenth of it on an idle machine


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_attention_of_a_hundred_thousand_tokens_on_a_gpu() -> None:
    """Case 22: nothing of T x T elements is allocated, forward or backward."""
    rows, prompt, columns = 32, 4096, 7168
    ids = torch.randint(0, 1000, (rows, columns), generator=torch.Generator().manual_seed(0)).cuda()
    ids[:, :prompt] = ids[0, :prompt]
    ids[:, prompt] = torch.arange(rows)
    plan = PrefixPlan.from_rows(ids)
    q, k, v = (torch.randn(1, 1, plan.tokens, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in "qkv")
    torch.cuda.reset_peak_memory_stats()
    packed_attention(q, k, v, plan).float().square().sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))
    assert torch.cuda.max_memory_allocated() < plan.tokens**2 // 4


def test_batch_of_fewer_tokens_than_a_block() -> None:
    """Case 22: T <= 128 is one block, and blocks are enough."""
    batch = three_rows()
    plan = PrefixPlan.from_rows(batch["input_ids"], min_shared=1)
    assert classify_blocks(plan, 128).tolist() == [[1]]
    assert_packed_and_exact(base(), batch, loss_step(), tokens=17, attention="blocks")


# ------------------------------------------------------------------ checkpoints, DDP, single layers


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(use_reentrant: bool) -> None:
    """Case 23."""
    model = base()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()
    batch = three_rows()
    assert_packed_and_exact(model, batch, loss_step(), tokens=17)
    # The checkpoints are in the graph: fewer tensors are saved than without.
    assert model.is_gradient_checkpointing


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_distributed_data_parallel_with_small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 24: DDP's optimizer cuts the graph into pieces that do not know the tokens: right, and it is said."""
    # DDP's optimizer asks that the first bucket be no larger than the others.
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1024)
    model = base()
    batch = three_rows()
    expected = run(model, model, loss_step(), batch)
    torch._dynamo.reset()
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.02)
    pieces: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        pieces.append(gm)
        return backend_module.dualkv(gm, inputs, options=EXACT)

    function = torch.compile(parallel, backend=backend)
    dualkv_compile.reset_stats()
    found = run(model, function, loss_step(), batch)
    assert largest_distance(found, expected) <= 1e-5
    assert len(pieces) > 1
    stats = dualkv_compile.stats()
    # Every piece with attention either shares or says what it misses.
    assert stats["calls"] >= 1
    assert stats["packed_calls"] == stats["calls"] or stats["reasons"]
    assert not [reason for reason in stats["reasons"] if "failed" in reason]
    assert stats["plain_calls"] == 0 or any("requires grad" in reason for reason in stats["reasons"])


@pytest.mark.usefixtures("process_group")
def test_distributed_data_parallel_uncut() -> None:
    """Case 24, the negative twin: with DDP's optimizer off there is one graph, and it shares."""
    model = base()
    batch = three_rows()
    with torch._dynamo.config.patch(optimize_ddp=False):
        parallel = DistributedDataParallel(model, bucket_cap_mb=0.02)
        assert_packed_and_exact(model, batch, loss_step(), tokens=17, function=parallel)


def test_layers_compiled_one_by_one() -> None:
    """Case 25: a layer gets hidden states with a gradient and no token ids: plain, right, and a reason that says so."""
    model = base()
    batch = three_rows()
    expected = run(model, model, loss_step(), batch)
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(backend="dualkv", options=EXACT)
    dualkv_compile.reset_stats()
    found = run(model, model, loss_step(), batch)
    assert largest_distance(found, expected) <= 1e-5
    stats = dualkv_compile.stats()
    assert stats["calls"] == stats["plain_calls"] == 2
    assert stats["reasons"]
    assert any("requires grad" in reason for reason in stats["reasons"]), stats["reasons"]


def test_layers_compiled_one_by_one_without_gradients() -> None:
    """Case 25 without gradients: hidden states are compared like any other per-token input."""
    model = base()
    batch = {"input_ids": three_rows()["input_ids"]}
    expected = model(**batch, use_cache=False).logits.detach()
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(backend="dualkv", options=EXACT)
    dualkv_compile.reset_stats()
    with torch.no_grad():
        found = model(**batch, use_cache=False).logits
    assert distance(found, expected) <= 1e-5
    stats = dualkv_compile.stats()
    assert stats["calls"] == stats["packed_calls"] == 2
    # The first layer's rows are equal in the prompt by their bits; the second layer's input is what the first put back.
    assert stats["tokens_computed"] == 2 * 17


# ------------------------------------------------------------------ what users do with the results


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_in_place_on_the_returned_logits(compiler: str) -> None:
    """Case 26: a temperature divided into a view of the output, outside of the compiled function."""
    mask = three_rows()["attention_mask"]

    def step(function: Callable[..., Any], batch: Batch) -> list[torch.Tensor]:
        output = function(**batch, use_cache=False)
        output.logits[:, :-1][:, -4:].div_(0.7)
        return [masked(output.logits, mask)]

    assert_packed_and_exact(base(), three_rows(), step, tokens=17, compiler=compiler)


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize(
    "pieces",
    [
        (slice(1, None), slice(None, 2)),
        (slice(None, -1), slice(-4, None)),
        (slice(2, -1), slice(1, -1), slice(1, None)),
    ],
)
def test_slice_of_a_slice(pieces: tuple[slice, ...], hidden: bool) -> None:
    """Columns cut from columns, of the logits or of the hidden states before the head."""
    model = base()

    def function(**batch: torch.Tensor) -> torch.Tensor:
        output = model(**batch, use_cache=False) if not hidden else model.model(**batch, use_cache=False)
        result = output.last_hidden_state if hidden else output.logits
        for piece in pieces:
            result = result[:, piece]
        return model.lm_head(result) if hidden else result

    assert_packed_and_exact(model, three_rows(), lambda f, b: [f(**b)], tokens=17, function=function, mutant=False)


def test_in_place_on_the_logits_inside_of_the_function() -> None:
    """Case 26 inside, where only the written view is read afterwards."""
    model = base()

    def function(**batch: torch.Tensor) -> torch.Tensor:
        return model(**batch, use_cache=False).logits[:, :-1][:, -4:].div_(0.7)

    assert_packed_and_exact(model, three_rows(), lambda f, b: [f(**b)], tokens=17, function=function)


def test_in_place_on_the_logits_that_are_read_again_runs_plain() -> None:
    """Case 26 inside, where the whole tensor is read as well: right, and the line is named."""
    model = base()

    def function(**batch: torch.Tensor) -> torch.Tensor:
        logits = model(**batch, use_cache=False).logits
        logits[:, :-1][:, -4:].div_(0.7)
        return logits

    def step(call: Callable[..., Any], batch: Batch) -> list[torch.Tensor]:
        return [call(**batch)]

    expected = run(model, function, step, three_rows())
    call = compiled(function)
    dualkv_compile.reset_stats()
    assert largest_distance(run(model, call, step, three_rows()), expected) <= 1e-5
    stats = dualkv_compile.stats()
    assert stats["packed_calls"] == 0
    (reason,) = stats["reasons"]
    assert "in place" in reason
    assert "div_(0.7)" in reason


def test_cache_comes_back_right() -> None:
    """Case 30: with ``use_cache`` as it is by default; decoding goes on from the cache as from eager's."""
    model = base().eval()
    batch = grid([(PROMPT, response(n, 4)) for n in range(3)] + [(PROMPT[:3], response(3, 4))])
    mask = batch["attention_mask"]

    def step(function: Callable[..., Any], batch: Batch) -> list[torch.Tensor]:
        output = function(**batch)
        assert output.past_key_values.get_seq_length() == 9
        outputs = [masked(output.logits, mask)]
        for layer in output.past_key_values.layers:
            outputs.extend(part * mask[:, None, :, None] for part in (layer.keys, layer.values))
        longer = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        following = model(
            input_ids=batch["input_ids"][:, -1:], attention_mask=longer, past_key_values=output.past_key_values
        )
        return [*outputs, following.logits]

    assert_packed_and_exact(model, batch, step, tokens=trie_size(*batch.values()))


# ------------------------------------------------------------------ options, installation, failures


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"min_share": 3}, "allowed are min_shared, min_saving, padding"),
        ({"min_shared": 0}, "integer >= 1"),
        ({"min_shared": "64"}, "integer >= 1"),
        ({"min_shared": True}, "integer >= 1"),
        ({"min_saving": -1.0}, "number >= 0"),
        ({"min_saving": float("nan")}, "number >= 0"),
        ({"padding": "remove"}, "'keep', 'drop'"),
        ({"attention": "fast"}, "'auto', 'regions', 'dense', 'blocks'"),
        ({"verify": "always"}, "False, True, 'first', 'grad'"),
        ({"verify": 1}, "False, True, 'first', 'grad'"),
        ({"on_unsupported": "raise"}, "'fallback', 'error'"),
        ({"compiler": "nvfuser"}, "'inductor', 'aot_eager', 'eager'"),
        ({"inductor": ["max_autotune"]}, "dict"),
        ({"inductor": {"max_autotuned": True}}, "max_autotuned"),
        ({"mode": "fast"}, "'reduce-overhead'"),
    ],
)
def test_bad_option_lists_what_is_allowed(options: dict[str, Any], allowed: str) -> None:
    """Case 27: through torch.compile, as a user meets it."""
    torch._dynamo.reset()
    function = torch.compile(lambda x: x + 1, backend="dualkv", options=options)
    with pytest.raises(Exception, match=next(iter(options))) as caught:
        function(torch.ones(2))
    assert allowed in str(caught.value)
    with pytest.raises(OptionError):
        dualkv_compile.Options.parse(options)


def test_backend_is_listed_in_a_process_that_imported_only_torch(tmp_path: Path) -> None:
    """Case 28."""
    program = "import sys, torch; print('dualkv' in torch._dynamo.list_backends(), 'dualkv_compile' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
    )
    assert result.stdout.split() == ["True", "False"], result.stderr


def broken(*args: Any, **kwargs: Any) -> Any:
    raise ZeroDivisionError("broken on purpose")


def warnings_of(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and text in record.getMessage() + str(record.exc_info)
    ]


@pytest.fixture
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has warned of nothing yet."""
    monkeypatch.setattr(backend_module, "_told", set())


PASSES = ["effects.check_dynamo_graph", "normalize", "find_roles", "pack", "packed_share"]


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.usefixtures("nothing_told")
def test_failure_inside_of_a_pass(name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Case 29: every call is counted with the reason, one warning tells, results are the plain graph's."""
    monkeypatch.setattr(f"dualkv_compile.passes.pipeline.{name}", broken)
    model = build("llama", num_hidden_layers=1)
    batch = three_rows()
    expected = run(model, model, loss_step(), batch)
    function = compiled(model)
    dualkv_compile.reset_stats()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert largest_distance(run(model, function, loss_step(), batch), expected) <= 1e-5
    stats = dualkv_compile.stats()
    assert (stats["calls"], stats["packed_calls"], stats["plain_calls"]) == (3, 0, 3)
    ((reason, count),) = stats["reasons"].items()
    assert "ZeroDivisionError: broken on purpose" in reason
    assert count == 3
    assert len(warnings_of(caplog, "broken on purpose")) == 1


@pytest.mark.usefixtures("nothing_told")
def test_same_failure_in_another_graph_is_not_told_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 29."""
    monkeypatch.setattr("dualkv_compile.passes.pipeline.pack", broken)
    dualkv_compile.reset_stats()
    with caplog.at_level(logging.WARNING):
        for layers in (1, 2):
            compiled(build("llama", num_hidden_layers=layers))(**three_rows(), use_cache=False)
    assert list(dualkv_compile.stats()["reasons"].values()) == [2]
    assert len(warnings_of(caplog, "broken on purpose")) == 1


@pytest.mark.parametrize("name", PASSES)
def test_failure_inside_of_a_pass_is_raised_when_asked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 29."""
    monkeypatch.setattr(f"dualkv_compile.passes.pipeline.{name}", broken)
    function = compiled(build("llama", num_hidden_layers=1), on_unsupported="error")
    with pytest.raises(UnsupportedGraphError, match="ZeroDivisionError: broken on purpose"):
        function(**three_rows(), use_cache=False)


@pytest.fixture
def broken_packed_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every packed graph fails when it is called (as a kernel might that cannot be launched)."""
    call = CompiledGraph.__call__

    def fail(self: CompiledGraph, *args: Any) -> Any:
        return broken() if self._name == "packed" else call(self, *args)

    monkeypatch.setattr(CompiledGraph, "__call__", fail)


@pytest.mark.usefixtures("nothing_told", "broken_packed_graph")
def test_failure_of_the_packed_graph(caplog: pytest.LogCaptureFixture) -> None:
    """Case 29: at run time."""
    model = build("llama", num_hidden_layers=1)
    batch = three_rows()
    expected = run(model, model, loss_step(), batch)
    function = compiled(model)
    dualkv_compile.reset_stats()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert largest_distance(run(model, function, loss_step(), batch), expected) <= 1e-5
    stats = dualkv_compile.stats()
    assert (stats["calls"], stats["packed_calls"], stats["plain_calls"]) == (3, 0, 3)
    ((reason, count),) = stats["reasons"].items()
    assert "broken on purpose" in reason
    assert count == 3
    assert len(warnings_of(caplog, "broken on purpose")) == 1


@pytest.mark.usefixtures("broken_packed_graph")
def test_failure_of_the_packed_graph_is_raised_when_asked() -> None:
    """Case 29."""
    function = compiled(build("llama", num_hidden_layers=1), on_unsupported="error")
    with pytest.raises(UnsupportedGraphError, match="broken on purpose"):
        function(**three_rows(), use_cache=False)
