"""How often things are compiled, how large the packed graph's tensors are, and what a call costs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import dualkv_compile
from dualkv_compile import backend as backend_module
from dualkv_compile.runtime import Dispatcher
from tests.models.harness import EXACT, MODELS, build, distance, logits_step, rollouts, run, trie_size

LENGTHS = [(8, 12), (9, 8), (12, 12), (6, 14), (15, 5), (11, 11), (7, 9), (13, 6), (10, 10), (5, 16)]


@pytest.fixture
def dispatchers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Dispatcher]]:
    """Every dispatcher that the backend makes."""
    made: list[Dispatcher] = []

    class Recorded(Dispatcher):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

        def __call__(self, *args: Any) -> Any:
            self.last_args = args
            return super().__call__(*args)

    monkeypatch.setattr(backend_module, "Dispatcher", Recorded)
    return made


def counted(model: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], list[int]]:
    """The compiled function, and a list that grows by one entry per backend call."""
    calls: list[int] = []

    def backend(gm: Any, inputs: Any) -> Any:
        calls.append(1)
        return backend_module.dualkv(gm, inputs, options={**EXACT, **options})

    torch._dynamo.reset()
    return torch.compile(model, backend=backend), calls


@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference"])
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_ten_lengths_compile_twice(
    mode: str, compiler: str, dispatchers: list[Dispatcher], caplog: pytest.LogCaptureFixture
) -> None:
    """Ten lengths of prompt and response: two backend calls (static, then dynamic), as many inner compilations."""
    model = build("llama", num_hidden_layers=1)
    function, calls = counted(model, compiler=compiler)
    context = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]
    dualkv_compile.reset_stats()
    with caplog.at_level(logging.WARNING), context():
        for prompt, response in LENGTHS:
            batch = rollouts(prompts=(prompt - 2, prompt), group=3, response=response)
            batch = {key: value.clone() for key, value in batch.items()}
            got = run(model, function, logits_step(), batch)
            expected = run(model, model, logits_step(), batch)
            assert distance(got.outputs[0], expected.outputs[0]) <= 1e-5
            assert all(distance(got.gradients[n], g, 1e-3) <= 1e-5 for n, g in expected.gradients.items())
    stats = dualkv_compile.stats()
    assert stats["packed_calls"] == stats["calls"] == len(LENGTHS)
    assert 1 <= len(calls) <= 2
    assert len(dispatchers) == len(calls)
    compilations = [dispatcher.packed_compilations for dispatcher in dispatchers]
    assert all(1 <= count <= 2 for count in compilations), compilations
    assert sum(compilations) <= 3
    assert "recompile_limit" not in caplog.text
    assert dispatchers[0].plain_compilations == 0


def test_changing_logits_to_keep(dispatchers: list[Dispatcher]) -> None:
    model = build("llama", num_hidden_layers=1)
    function, calls = counted(model, compiler="aot_eager")
    batch = rollouts(prompts=(9, 12))
    dualkv_compile.reset_stats()
    for keep in (4, 9, 7, 5, 8, 3):
        step = logits_step(logits_to_keep=keep)
        assert distance(run(model, function, step, batch).outputs[0], run(model, model, step, batch).outputs[0]) <= 1e-5
    assert dualkv_compile.stats()["packed_calls"] == 6
    assert len(calls) <= 2


def sdpa_forward_flops(query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Torch has no formula for its fused attention on the CPU: two products over the whole square."""
    return int(2 * query[0] * query[1] * query[2] * key[2] * (query[3] + value[3]))


def sdpa_backward_flops(grad: Any, query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Five products over the whole square."""
    return int(2 * query[0] * query[1] * query[2] * key[2] * (3 * query[3] + 2 * value[3]))


@pytest.mark.parametrize("name", MODELS)
def test_work_is_the_share_of_distinct_tokens(name: str, dispatchers: list[Dispatcher]) -> None:
    """Operations of the packed graph, forward and backward, against T/(B*S) of the plain graph's."""
    batch = rollouts(prompts=(30,), group=6, response=6)
    function, _ = counted(build(name), compiler="eager")
    function(**batch, use_cache=False)
    (dispatcher,) = dispatchers

    def operations(graph: Callable[..., Any], inputs: Any) -> int:
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        formulas = {
            fused: sdpa_forward_flops,
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flops,
        }
        with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
            sum(output.sum() for output in graph(*inputs) if output.requires_grad).backward()
        return int(counter.get_total_flops())

    args = dispatcher.last_args  # type: ignore[attr-defined]
    packed = operations(dispatcher.packed.module, dispatcher.prepare(args, dispatcher.find_plans(args)))
    plain = operations(dispatcher.plain_module, args)
    tokens = trie_size(*batch.values())
    ratio = tokens / batch["input_ids"].numel()
    assert ratio < 0.4
    assert 0.3 * ratio * plain <= packed <= 1.05 * ratio * plain


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_no_tensor_of_columns_squared(name: str) -> None:
    """B=8, S=4096, left padding (and Mistral's window): no node of S*S elements, no allocation of S*S bytes."""
    rows, columns, prompt, pad = 8, 4096, 3968, 100
    torch.manual_seed(0)
    model = build(name, num_hidden_layers=1, hidden_size=16, intermediate_size=16, max_position_embeddings=columns)
    if name == "mistral":
        model.config.sliding_window = 256
    ids = torch.randint(1, 97, (rows, columns))
    ids[:, :prompt] = ids[0, :prompt]
    ids[:, prompt] = torch.arange(1, rows + 1)
    mask = torch.ones_like(ids)
    ids[:, :pad], mask[:, :pad] = 0, 0
    sizes: list[int] = []

    def record(graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            value = node.meta.get("val")
            for tensor in value if isinstance(value, tuple | list) else [value]:
                if isinstance(tensor, torch.Tensor):
                    # Memory that is really there: an expanded dimension has stride 0.
                    extent = 1
                    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
                        extent *= 1 if stride == 0 else int(size.node.hint if isinstance(size, torch.SymInt) else size)
                    sizes.append(extent)

    inductor = {"post_grad_custom_post_pass": record}
    torch._dynamo.reset()
    function = torch.compile(model, backend="dualkv", options={**EXACT, "compiler": "inductor", "inductor": inductor})
    arguments = {"input_ids": ids, "attention_mask": mask, "use_cache": False, "logits_to_keep": 8}
    dualkv_compile.reset_stats()
    function(**arguments).logits.sum().backward()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        function(**arguments).logits.sum().backward()
    stats = dualkv_compile.stats()
    assert stats["packed_calls"] == stats["calls"] == 2
    assert stats["tokens_computed"] == 2 * trie_size(ids, mask)
    assert sizes
    assert max(sizes) < columns * columns
    events = measured.profiler.kineto_results.events()
    largest = max(event.nbytes() for event in events if event.name() == "[memory]")
    assert 0 < largest < columns * columns
