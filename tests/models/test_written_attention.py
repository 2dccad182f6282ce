"""Attention that a model writes out itself: found in all its forms, packed, exact; near-misses stay as written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import dualkv_compile
from tests.models.harness import (
    VOCAB,
    assert_packed_and_exact,
    compiled,
    distance,
    logits_step,
    masked,
    rollouts,
    run,
    trie_size,
)

HEADS, WIDTH = 4, 6
Attention = Callable[["Decoder", Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Decoder(nn.Module):
    """Layers around a written attention of q, k, v ``[B, H, S, D]``, visible ``[B, 1, S, S]``, mask ``[B, S]``."""

    def __init__(self, attend: Attention, dtype: torch.dtype = torch.float64, layers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend = attend
        self.embed = nn.Embedding(VOCAB, 24)
        self.layers = nn.ModuleList(nn.Linear(24, 72) for _ in range(layers))
        self.head = nn.Linear(24, VOCAB)
        self.slopes = nn.Parameter(torch.rand(HEADS))
        self.sinks = nn.Parameter(torch.randn(HEADS))
        self.table = nn.Parameter(torch.randn(64, 64))
        self.to(dtype)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(input_ids)
        columns = torch.arange(input_ids.shape[1])
        visible = (columns <= columns[:, None]) & attention_mask.bool()[:, None, None, :]
        for layer in self.layers:
            q, k, v = (part.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for part in layer(x).chunk(3, dim=-1))
            x = x + self.attend(self, q, k, v, visible, attention_mask).transpose(1, 2).flatten(2)
        return self.head(x)


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) * WIDTH**-0.5


def additive(m: Decoder, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, mask: Tensor) -> Tensor:
    added = torch.zeros((), dtype=q.dtype).where(visible, torch.finfo(q.dtype).min)
    return torch.softmax(scores_of(q, k) + added, -1) @ v


def filled(m: Decoder, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, mask: Tensor) -> Tensor:
    scores = torch.matmul(q, k.mT).div(2.0).masked_fill(~visible, float("-inf"))
    return nn.functional.dropout(scores.softmax(dim=3), 0.0) @ v


def triangle(m: Decoder, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, mask: Tensor) -> Tensor:
    lower = torch.tril(torch.ones(q.shape[2], q.shape[2])).view(1, 1, q.shape[2], q.shape[2])
    return scores_of(q, k).masked_fill(lower == 0, float("-inf")).softmax(-1) @ v


def upper_triangle(m: Decoder, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, mask: Tensor) -> Tensor:
    above = torch.triu(torch.full((q.shape[2], q.shape[2]), float("-inf"), dtype=q.dtype), diagonal=1)
    return torch.softmax((q * 0.4) @ k.permute(0, 1, 3, 2) + above, -1) @ v


def softcap(m: Decoder, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, mask: Tensor) -> Tensor:
    scores = torch.tanh(scores_of(q, k) / 1.5) * 1.5
    return torch.where(visible, scores, float("-inf")).softmax(-1) @ v


def alibi(m: Decoder, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, mask: Tensor) -> Tensor:
    positions = ((mask.cumsum(-1) - 1) * mask)[:, None, :]
    bias = m.slopes[:, None] * positions
    scores = (scores_of(q, k) + bias[:, :, None, :]) * 0.5
    return torch.where(visible, scores, float("-inf")).softmax(-1) @ v


def alibi_of_columns(m: Decoder, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, mask: Tensor) -> Tensor:
    bias = m.slopes[:, None, None] * torch.arange(-63, 1).view(1, 1, 64)
    scores = scores_of(q, k) - bias[:, :, -q.shape[2] :]
    return scores.masked_fill(~visible, torch.finfo(q.dtype).min).softmax(-1) @ v


def sinks(m: Decoder, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, mask: Tensor) -> Tensor:
    scores = torch.where(visible, scores_of(q, k), float("-inf"))
    whole = torch.cat([scores, m.sinks.view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)], -1)
    whole = whole - whole.max(-1, keepdim=True).values
    return whole.softmax(-1)[..., :-1] @ v


def batched(m: Decoder, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, mask: Tensor) -> Tensor:
    """Rows and heads in one dimension throughout, with the bias as the operand of ``baddbmm``."""
    rows, _, columns, _ = q.shape
    bias = (m.slopes[:, None] * mask.cumsum(-1)[:, None, :]).reshape(rows * HEADS, 1, columns)
    q, k, v = (part.reshape(rows * HEADS, columns, WIDTH) for part in (q, k, v))
    scores = bias.baddbmm(q, k.transpose(1, 2), beta=0.7, alpha=0.4).view(rows, HEADS, columns, columns)
    scores = torch.max(scores + torch.where(visible, 0.0, -torch.inf), torch.tensor(torch.finfo(q.dtype).min))
    probabilities = scores.view(rows * HEADS, columns, columns).softmax(-1)
    return torch.bmm(probabilities, v).view(rows, HEADS, columns, WIDTH)


def grouped(m: Decoder, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, mask: Tensor) -> Tensor:
    """Two heads of keys, and one of values: half as wide, then repeated."""
    k = k[:, :2].repeat_interleave(2, dim=1)
    v = torch.cat([v[:, :1, :, :3]] * 2, -1).expand(-1, HEADS, -1, -1)
    return scores_of(q, k).masked_fill(~visible, -torch.inf).softmax(-1) @ v


def narrow_values(m: Decoder, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, mask: Tensor) -> Tensor:
    out = scores_of(q, k[:, :1]).masked_fill(~visible, -torch.inf).softmax(-1) @ v[..., :4]
    return nn.functional.pad(out, (0, WIDTH - 4))


def keys_without_gradient(m: Decoder, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, mask: Tensor) -> Tensor:
    """Packed, as what is computed without gradient is a value like any other."""
    with torch.no_grad():
        turned = k.transpose(-1, -2)
    scores = q @ turned
    return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v


def wide_scores(m: Decoder, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, mask: Tensor) -> Tensor:
    """Scores in another precision than the values."""
    scores = scores_of(q.float(), k.float())
    return scores.masked_fill(~visible, -torch.inf).softmax(-1).to(v.dtype) @ v


FORMS = [
    additive, filled, triangle, upper_triangle, softcap, alibi, alibi_of_columns, sinks, batched, grouped,
    narrow_values, keys_without_gradient,
]  # fmt: skip


def step(function: Callable[..., Any], batch: Any) -> list[Tensor]:
    return [masked(function(**batch), batch["attention_mask"])]


def layout(form: Attention) -> dict[str, Tensor]:
    """Padding on the right, where every query sees a key; none for the forms that look at no padding mask."""
    return rollouts(right_padding=() if form in (triangle, upper_triangle) else (0, 3, 5, 1))


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: Attention) -> None:
    batch = layout(form)
    model: Any = Decoder(form)
    assert_packed_and_exact(model, batch, step, tokens=trie_size(*batch.values()), tolerance=1e-12)


def test_dynamic_shapes() -> None:
    batch = layout(batched)
    model: Any = Decoder(batched, layers=2)
    assert_packed_and_exact(model, batch, step, tokens=trie_size(*batch.values()), tolerance=1e-12, dynamic=True)


def test_scores_of_another_precision() -> None:
    batch = layout(wide_scores)
    model: Any = Decoder(wide_scores, torch.bfloat16)
    exact = run(model.double(), model, step, batch)
    model.bfloat16()
    plain = run(model, model, step, batch)
    packed = compiled(model)
    dualkv_compile.reset_stats()
    got = run(model, packed, step, batch)
    assert dualkv_compile.stats()["packed_calls"] == 1
    assert dualkv_compile.stats()["reasons"] == {}
    assert got.outputs[0].dtype == torch.bfloat16

    def error(outcome: Any) -> float:
        return float((outcome.outputs[0].double() - exact.outputs[0]).norm() / exact.outputs[0].norm())

    assert error(got) <= 1.5 * error(plain)


# ------------------------------------------------------------------------------------------------------- near-misses
def along_queries(m: Decoder, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, mask: Tensor) -> Tensor:
    return scores_of(q, k).masked_fill(~visible, -1e3).softmax(-2) @ v


def looks_ahead(m: Decoder, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, mask: Tensor) -> Tensor:
    columns = torch.arange(q.shape[2])
    seen = visible | (columns == columns[:, None] + 1)
    return scores_of(q, k).masked_fill(~seen, -torch.inf).softmax(-1) @ v


def unmasked(m: Decoder, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, mask: Tensor) -> Tensor:
    return scores_of(q, k).softmax(-1) @ v


def soft_mask(m: Decoder, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, mask: Tensor) -> Tensor:
    return (scores_of(q, k) + torch.where(visible, 0.0, -1e4)).softmax(-1) @ v


def filled_with_zero(m: Decoder, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, mask: Tensor) -> Tensor:
    return scores_of(q, k).masked_fill(~visible, 0.0).softmax(-1) @ v


def masked_probabilities(m: Decoder, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, mask: Tensor) -> Tensor:
    return (scores_of(q, k).softmax(-1) * visible) @ v


def relative_bias(m: Decoder, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, mask: Tensor) -> Tensor:
    bias = m.table[: q.shape[2], : q.shape[2]]
    return (scores_of(q, k) + bias).masked_fill(~visible, -torch.inf).softmax(-1) @ v


def bias_of_the_row(m: Decoder, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, mask: Tensor) -> Tensor:
    """Differs from row to row, and not by what the tokens up to the key are."""
    bias = torch.arange(q.shape[0])[:, None, None, None] * torch.arange(q.shape[2]) * 0.01
    return (scores_of(q, k) + bias).masked_fill(~visible, -torch.inf).softmax(-1) @ v


def bias_of_the_query(m: Decoder, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, mask: Tensor) -> Tensor:
    """A number per query and key; the softmax does notice it."""
    bias = torch.arange(q.shape[2])[:, None] * torch.arange(q.shape[2]) * 0.01
    return (scores_of(q, k) + bias).masked_fill(~visible, -torch.inf).softmax(-1) @ v


def sinks_with_value(m: Decoder, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, mask: Tensor) -> Tensor:
    """The column of the sinks stays, and meets values of its own."""
    scores = torch.where(visible, scores_of(q, k), float("-inf"))
    whole = torch.cat([scores, m.sinks.view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)], -1)
    return whole.softmax(-1) @ torch.cat([v, v.new_ones(q.shape[0], HEADS, 1, WIDTH)], 2)


def last_key_dropped(m: Decoder, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, mask: Tensor) -> Tensor:
    probabilities = scores_of(q, k).masked_fill(~visible, -torch.inf).softmax(-1)
    return probabilities[..., :-1] @ v[:, :, :-1]


def shifted_by_another(m: Decoder, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, mask: Tensor) -> Tensor:
    """What is subtracted is the largest score of each key, not of each query."""
    scores = scores_of(q, k)
    scores = scores - scores.amax(-2, keepdim=True)
    return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v


def bias_by_head_and_row(m: Decoder, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, mask: Tensor) -> Tensor:
    """Laid out with heads before rows, and read as if rows came first."""
    rows, _, columns, _ = q.shape
    bias = (m.slopes[:, None, None] * mask.cumsum(-1)).reshape(rows * HEADS, 1, columns)
    scores = (scores_of(q, k).reshape(rows * HEADS, columns, columns) + bias).view(rows, HEADS, columns, columns)
    return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v


def detached_probabilities(m: Decoder, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, mask: Tensor) -> Tensor:
    return scores_of(q, k).masked_fill(~visible, -torch.inf).softmax(-1).detach() @ v


def scores_without_gradient(m: Decoder, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, mask: Tensor) -> Tensor:
    with torch.no_grad():
        probabilities = scores_of(q, k).masked_fill(~visible, -torch.inf).softmax(-1)
    return probabilities @ v


def bias_without_gradient(m: Decoder, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, mask: Tensor) -> Tensor:
    rows, _, columns, _ = q.shape
    bias = (m.slopes[:, None] * mask.cumsum(-1)[:, None, :]).reshape(rows * HEADS, 1, columns)
    with torch.no_grad():
        bias = bias + 1.0
    scores = (scores_of(q, k).reshape(rows * HEADS, columns, columns) + bias).view(rows, HEADS, columns, columns)
    return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v


def scaled_after_the_mask(m: Decoder, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, mask: Tensor) -> Tensor:
    return ((q @ k.mT).masked_fill(~visible, torch.finfo(torch.float16).min) * 1e-4).softmax(-1) @ v


WRITTEN = "attention written as softmax of a product: "
NEAR_MISSES = {
    along_queries: "matmul: ",
    looks_ahead: WRITTEN + "its mask lets a token see later ones",
    unmasked: WRITTEN + "its mask lets a token see later ones",
    soft_mask: WRITTEN + "its mask is added to the scores and is more than 0 and minus infinity",
    filled_with_zero: WRITTEN + "its scores are replaced by numbers other than minus infinity",
    masked_probabilities: "matmul: ",
    relative_bias: WRITTEN + "its mask is data that is indexed by both query and key",
    bias_of_the_row: WRITTEN,
    bias_of_the_query: WRITTEN + "its scores have a bias that is not known from head and key alone",
    sinks_with_value: "matmul: ",
    last_key_dropped: "matmul: ",
    shifted_by_another: "matmul: ",
    bias_by_head_and_row: WRITTEN,
    detached_probabilities: "matmul: ",
    scores_without_gradient: "matmul: ",
    bias_without_gradient: WRITTEN + "its scores have a bias that is cut off from its gradient",
    scaled_after_the_mask: WRITTEN + "its scores are scaled after they are masked",
}


@pytest.mark.parametrize("form", NEAR_MISSES)
def test_near_misses(form: Attention) -> None:
    batch = layout(form)
    model: Any = Decoder(form)
    expected = run(model, model, step, batch)
    packed = compiled(model)
    dualkv_compile.reset_stats()
    got = run(model, packed, step, batch)
    assert distance(got.outputs[0], expected.outputs[0]) <= 1e-12
    for name, gradient in expected.gradients.items():
        assert distance(got.gradients[name], gradient) <= 1e-11, name
    assert dualkv_compile.stats()["packed_calls"] == 0
    if NEAR_MISSES[form].startswith(WRITTEN):  # else there is nothing that looks like attention
        assert any(reason.startswith(NEAR_MISSES[form]) for reason in dualkv_compile.stats()["reasons"])


@pytest.mark.parametrize("what", ["scores", "probabilities"])
def test_returned_on_the_way(what: str) -> None:
    """What is read as a whole elsewhere must exist as a whole."""
    found: list[Tensor] = []

    def attend(m: Decoder, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, mask: Tensor) -> Tensor:
        scores = scores_of(q, k).masked_fill(~visible, -1e30)
        probabilities = scores.softmax(-1)
        found.append(scores if what == "scores" else probabilities)
        return probabilities @ v

    model: Any = Decoder(attend)
    batch = rollouts()

    def with_extra(**batch: Tensor) -> tuple[Tensor, ...]:
        found.clear()
        return model(**batch), *found

    def both(function: Callable[..., Any], batch: Any) -> list[Tensor]:
        return list(function(**batch))

    expected = run(model, with_extra, both, batch)
    packed = compiled(with_extra)
    dualkv_compile.reset_stats()
    got = run(model, packed, both, batch)
    for a, b in zip(got.outputs, expected.outputs, strict=True):
        assert distance(a, b) <= 1e-12
    for name, gradient in expected.gradients.items():
        assert distance(got.gradients[name], gradient) <= 1e-11, name


def test_dropout_inside() -> None:
    def attend(m: Decoder, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, mask: Tensor) -> Tensor:
        probabilities = scores_of(q, k).masked_fill(~visible, -torch.inf).softmax(-1)
        return nn.functional.dropout(probabilities, 0.1) @ v

    model = Decoder(attend)
    dualkv_compile.reset_stats()
    compiled(model)(**rollouts())
    assert dualkv_compile.stats()["packed_calls"] == 0


def test_reason_names_the_line_of_the_product() -> None:
    model = Decoder(soft_mask)
    dualkv_compile.reset_stats()
    compiled(model)(**rollouts())
    (reason,) = (reason for reason in dualkv_compile.stats()["reasons"] if "more than 0" in reason)
    assert "in soft_mask: return (scores_of(q, k) + torch.where(visible, 0.0, -1e4)).softmax(-1) @ v" in reason


# ------------------------------------------------------------------------------------------------------ whole models
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"head_dim": 8, "sliding_window": 6, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
    "falcon": {
        "alibi": True, "new_decoder_architecture": False, "multi_query": False, "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "xglm": {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "dropout": 0.0,
             "attention_dropout": 0.0},
    "deepseek_v3": LATENT,
}  # fmt: skip


def build(name: str, implementation: str = "eager") -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**COMMON, **MODELS[name]})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    return model.train()


@pytest.mark.parametrize("name", MODELS)
def test_model(name: str) -> None:
    batch = rollouts(prompts=(9, 12), group=2)
    model = build(name)
    if name in ("llama", "falcon", "deepseek_v3"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    # The gradients of biases of keys are 0 in theory, and rounding in practice: not measured to the last digit.
    tolerance = 1e-4 if name == "xglm" else 1e-5
    assert_packed_and_exact(model, batch, logits_step(), tokens=trie_size(*batch.values()), tolerance=tolerance)


@pytest.mark.parametrize("name", ["falcon", "deepseek_v3"])
def test_model_with_sdpa(name: str) -> None:
    """ALiBi as the mask of scaled_dot_product_attention; values of another width than keys."""
    batch = rollouts(prompts=(9, 12), group=2)
    assert_packed_and_exact(build(name, "sdpa"), batch, logits_step(), tokens=trie_size(*batch.values()))


def test_attention_with_sinks_of_a_model() -> None:
    """gpt-oss, its experts replaced by the identity."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt_oss", **COMMON, head_dim=8, sliding_window=6, num_local_experts=2)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    for layer in model.model.layers:
        layer.mlp = Identity()
        nn.init.normal_(layer.self_attn.sinks)
    batch = rollouts(prompts=(9, 12), group=2)
    assert_packed_and_exact(model, batch, logits_step(), tokens=trie_size(*batch.values()))


class Identity(nn.Module):
    """In the place of a mixture of experts, which gives its router's scores as well."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x, None
