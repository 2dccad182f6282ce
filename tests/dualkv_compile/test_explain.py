"""`explain`: says what would run and why, and changes nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dualkv_compile
from dualkv_compile import OptionError, explain
from dualkv_compile.backend import dualkv
from dualkv_compile.runtime import Dispatcher

VOCAB, WIDTH = 31, 16
PACK = {"min_shared": 1, "min_saving": 0, "compiler": "eager"}


class Decoder(nn.Module):
    """An attention and a product, with the mask as transformers writes it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.register_buffer("calls", torch.zeros(()))

    def attend(self, ids: Tensor, valid: Tensor | None) -> Tensor:
        x = self.embed(ids)[:, None]
        if valid is None:
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)[:, 0]
        row, column = torch.arange(ids.shape[0])[:, None, None, None], torch.arange(ids.shape[1])
        mask = (column[None, :] <= column[:, None]) & valid[row, column]
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)[:, 0]

    def forward(self, ids: Tensor, valid: Tensor | None = None) -> Tensor:
        logits: Tensor = self.head(self.attend(ids, valid))
        return logits


def rows(lengths: tuple[int, ...] = (6,), group: int = 3, response: int = 4, system: int = 0) -> tuple[Tensor, Tensor]:
    """Left-padded prompts of the given lengths, each with ``group`` responses that differ in their first token."""
    generator = torch.Generator().manual_seed(5)
    common, width = torch.randint(VOCAB, (system,), generator=generator), max(lengths)
    ids, valid = [], []
    for length in lengths:
        rest = torch.randint(VOCAB, (length - system,), generator=generator)
        prompt = torch.cat([torch.zeros(width - length, dtype=torch.long), common, rest])
        for member in range(group):
            answer = torch.randint(VOCAB, (response,), generator=generator)
            answer[0] = member
            ids.append(torch.cat([prompt, answer]))
            valid.append(torch.arange(width + response) >= width - length)
    return torch.stack(ids), torch.stack(valid)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    dualkv_compile.reset_stats()
    yield
    torch._dynamo.reset()


def test_a_packed_graph_in_numbers_and_words() -> None:
    ids, valid = rows((6, 4))
    explanation = explain(Decoder(), ids, valid, dualkv_options=PACK)
    (graph,) = explanation.graphs
    (batch,) = graph.batches
    assert (batch.rows, batch.columns, batch.tokens_given) == (6, 10, 60)
    assert batch.tokens_computed == 2 * 6 + 6 * 4
    assert (batch.padding_given, batch.padding_computed) == (3 * 2, 2)
    assert [(p.rows, p.start, p.stop, p.tokens) for p in batch.prompts] == [((0, 1, 2), 0, 6, 6), ((3, 4, 5), 0, 6, 4)]
    assert explanation.ratio == pytest.approx(60 / 36)
    assert (graph.runs, graph.attentions, graph.packed_attentions, graph.strategy) == ("packed", 1, 1, "regions")
    assert graph.operators_packed["linear"] == 1
    assert graph.operators_packed["scaled_dot_product_attention"] == 1
    assert graph.ended == []
    linear = 2 * WIDTH * VOCAB
    assert graph.flops_plain == 60 * linear + 2 * 6 * 10 * 10 * 2 * WIDTH
    assert graph.flops_packed == 36 * linear + 2 * 2 * WIDTH * (2 * (6 * 18 + 3 * 4 * 4))
    assert graph.saving == pytest.approx(1 - graph.flops_packed / graph.flops_plain)
    text = str(explanation)
    for part in (
        "Decoder, 1 graph",
        "runs packed, compiled by eager",
        "6 rows of 10 columns",
        "4 tokens and 2 of padding in columns 0 to 5, shared by 3 rows (3, 4, 5)",
        "given 60 (54 and 6 of padding), computed 36 (34 and 2 of padding): 1.67",
        "1 of 1 packed, computed by strategy 'regions'",
        f"{100 * graph.saving:.0f}% saved",
        "padding='drop' would skip 2 positions",
    ):
        assert part in text
    told = json.loads(json.dumps(explanation.to_dict()))
    assert told["tokens_computed"] == 36
    assert told["graphs"][0]["batches"][0]["prompts"][1]["rows"] == [3, 4, 5]
    assert told["graphs"][0]["saving"] == graph.saving


def test_nothing_of_the_user_changes() -> None:
    class Stateful(Decoder):
        def forward(self, ids: Tensor, valid: Tensor | None = None) -> Tensor:
            self.calls.add_(1)
            ids.add_(1)
            return super().forward(ids, valid)

    model = Stateful()
    ids, valid = rows()
    before = ids.clone()

    def step(ids: Tensor) -> Tensor:
        model.eval()
        loss = model(ids.remainder(VOCAB), valid).sum() + torch.rand(())
        loss.backward()
        return loss

    gradient = torch.ones_like(model.head.weight)
    model.head.weight.grad = gradient
    state = torch.get_rng_state()
    explanation = explain(step, ids, dualkv_options=PACK)
    assert len(explanation.graphs) >= 1
    assert torch.equal(torch.get_rng_state(), state)
    assert model.head.weight.grad is gradient
    assert torch.equal(gradient, torch.ones_like(gradient))
    assert model.embed.weight.grad is None
    assert model.training
    assert float(model.calls) == 0
    assert torch.equal(ids, before)
    assert dualkv_compile.stats() == {**dict.fromkeys(dualkv_compile.stats(), 0), "reasons": {}}


@pytest.mark.parametrize("how", ["model.compile", "torch.compile(model)", "torch.compile(function)"])
def test_compiled_models_are_explained_and_stay_as_they_are(how: str) -> None:
    model, (ids, valid) = Decoder(), rows()
    target: Any = model
    if how == "model.compile":
        model.compile(backend=dualkv, options=PACK)
    else:
        source = model if how == "torch.compile(model)" else (lambda ids, valid: model(ids, valid))
        target = torch.compile(source, backend=dualkv, options=PACK)
    expected = target(ids, valid)
    compilations = dualkv_compile.stats()["graphs_compiled"]
    for _ in range(2):
        assert [graph.runs for graph in explain(target, ids, valid, dualkv_options=PACK).graphs] == ["packed"]
    assert torch.equal(target(ids, valid), expected)
    stats = dualkv_compile.stats()
    assert stats["graphs_compiled"] == compilations == 1
    assert (stats["calls"], stats["packed_calls"]) == (2, 2)


def test_many_explanations_do_not_reach_a_recompile_limit() -> None:
    model = Decoder()
    for columns in range(12):
        ids, _ = rows((6 + columns,))
        assert [graph.runs for graph in explain(model, ids, dualkv_options=PACK).graphs] == ["packed"]


def test_what_ends_the_proof_is_named_with_the_line() -> None:
    model = Decoder()

    def function(ids: Tensor) -> Tensor:
        x = model.embed(ids)[:, None]
        return F.scaled_dot_product_attention(x, x, x)  # the bidirectional line

    (graph,) = explain(function, rows()[0], dualkv_options=PACK).graphs
    (reason,) = graph.ended
    assert graph.runs == "plain"
    assert reason.operator == "scaled_dot_product_attention"
    assert reason.code.endswith("# the bidirectional line")
    assert f"{__file__}:" in reason.location
    text = str(explain(function, rows()[0], dualkv_options={**PACK, "on_unsupported": "error"}))
    assert "raises UnsupportedGraphError" in text
    assert "the bidirectional line" in text


def test_a_partly_packed_graph_lists_what_runs_as_written() -> None:
    model = Decoder()

    def function(ids: Tensor) -> Tensor:
        return model.head(model.attend(ids, None).flip(1))

    (graph,) = explain(function, rows()[0], dualkv_options=PACK).graphs
    assert graph.runs == "packed"
    assert [reason.operator for reason in graph.ended] == ["flip"]
    assert graph.operators_as_written["linear"] == 1
    assert 0 < graph.packed_share < 1


def test_one_report_for_each_graph_that_dynamo_makes() -> None:
    model = Decoder()

    def function(ids: Tensor) -> Tensor:
        x = model.attend(ids, None)
        torch._dynamo.graph_break()
        return model.head(x) * 2

    explanation = explain(function, rows()[0], dualkv_options=PACK)
    assert [(graph.runs, graph.attentions) for graph in explanation.graphs] == [("packed", 1), ("plain", 0)]
    assert "graph 2 of 2: runs as written, compiled by eager; it contains no attention" in str(explanation)
    assert explanation.tokens_given == rows()[0].numel()


def test_a_function_without_a_graph() -> None:
    assert "found nothing to compile" in str(explain(lambda: 3))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"min_shared": 7}, "common prefixes of up to 6 columns are shorter than min_shared=7"),
        ({"min_shared": 1, "min_saving": 3}, "1.67 tokens given per token computed, below min_saving=3"),
    ],
)
def test_options_that_prevent_packing_are_named(options: dict[str, Any], expected: str) -> None:
    explanation = explain(Decoder(), rows()[0], dualkv_options=options)
    assert explanation.graphs[0].runs == "plain"
    assert explanation.ratio == 1
    assert expected in str(explanation)


def test_left_padding_that_hides_a_system_prompt_is_told() -> None:
    ids, valid = rows((8, 6), system=5)
    (graph,) = explain(Decoder(), ids, valid, dualkv_options=PACK).graphs
    # 8 + 6 prompt tokens and 6 responses of 4; aligned on the left, the system prompt is computed once.
    (hint,) = [hint for hint in graph.hints if "left padding" in hint]
    assert "common prefix (of up to 5 tokens)" in hint
    assert "33 tokens would be computed instead of 38" in hint
    for other in (rows((8, 8), system=5), rows((8, 6))):
        (graph,) = explain(Decoder(), *other, dualkv_options=PACK).graphs
        assert not [hint for hint in graph.hints if "left padding" in hint]


@pytest.mark.parametrize("stage", ["analyse", "run"])
def test_failures_of_our_own_are_told_and_not_raised(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a bug of ours")

    if stage == "analyse":
        # The package's attribute `explain` is the function; the module is found by its name.
        monkeypatch.setattr(sys.modules["dualkv_compile.explain"], "analyse", fail)
    else:
        monkeypatch.setattr(Dispatcher, "prepare", fail)
    explanation = explain(Decoder(), rows()[0], dualkv_options=PACK)
    assert explanation.graphs[0].runs == "plain"
    assert "a bug of ours" in str(explanation)


def test_errors_of_the_user_are_raised() -> None:
    with pytest.raises(OptionError):
        explain(Decoder(), rows()[0], dualkv_options={"nonsense": 1})
    with pytest.raises(TypeError):
        explain(Decoder())
