"""Models that call ``flex_attention``: packed where the mask is proven and the block lists agree with it, else plain.

FlexAttention on the CPU has no backward, so most cases run without gradients. The expected values are those of
``scaled_dot_product_attention`` with the mask written out.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

import dualkv_compile
from dualkv_compile.passes.flex_call import FLEX, BlockLists, translate
from dualkv_compile.passes.reasons import Reason, WholeGraphUnsupported
from tests.models.harness import EXACT, build, compiled, distance, logits_step, rollouts, run_alone, trie_size

HEADS, KV_HEADS, WIDTH = 4, 2, 16
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Decoder(nn.Module):
    """Two layers of grouped attention with a block mask that comes with the call."""

    def __init__(self, checkpointed: bool = False, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(97, HEADS * WIDTH)
        sizes = HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * WIDTH
        self.layers = nn.ModuleList(nn.Linear(HEADS * WIDTH, sum(sizes)) for _ in range(2))
        self.sizes, self.checkpointed, self.options = sizes, checkpointed, options
        self.written_out: Tensor | None = None
        self.double()

    def block(self, x: Tensor, layer: nn.Module, block_mask: BlockMask | None) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for part in layer(x).split(self.sizes, -1))
        if self.written_out is not None:
            out = F.scaled_dot_product_attention(q, k, v, self.written_out, enable_gqa=True)
        else:
            out = flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True, **self.options)
        if isinstance(out, tuple):
            out = out[0] + out[1].lse.unsqueeze(-1)
        return x + out.transpose(1, 2).flatten(2)

    def forward(self, ids: Tensor, block_mask: BlockMask | None) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            if self.checkpointed:
                x = checkpoint(self.block, x, layer, block_mask, use_reentrant=False)
            else:
                x = self.block(x, layer, block_mask)
        return x


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def sliding(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q - k < 6)


def padded(valid: Tensor) -> MaskMod:
    return lambda b, h, q, k: (k <= q) & valid[b, k]


def documents(numbers: Tensor) -> MaskMod:
    return lambda b, h, q, k: (q >= k) & (numbers[b, q] == numbers[b, k])


def lists(mask_mod: MaskMod, ids: Tensor, block: int = 8) -> BlockMask:
    rows, columns = ids.shape
    return create_block_mask(mask_mod, rows, None, columns, columns, device="cpu", BLOCK_SIZE=block)


def expected(model: Decoder, ids: Tensor, mask_mod: MaskMod) -> Tensor:
    model.written_out = create_mask(mask_mod, ids.shape[0], 1, *([ids.shape[1]] * 2), device="cpu")
    try:
        return model(ids, None)
    finally:
        model.written_out = None


def counted(model: Decoder, ids: Tensor, block_mask: BlockMask | None, **options: Any) -> tuple[Tensor, dict[str, Any]]:
    packed = compiled(model, **options)
    dualkv_compile.reset_stats()
    return packed(ids, block_mask), dualkv_compile.stats()


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, which of them are real, and documents whose borders differ behind the prompt."""
    given = rollouts(prompts=(9, 12))
    ids, valid = given["input_ids"], given["attention_mask"].bool()
    numbers = (torch.arange(ids.shape[1]) >= torch.arange(12, 12 + ids.shape[0])[:, None] % 18).long()
    return ids, valid, numbers


@pytest.mark.parametrize("kind", ["causal", "sliding", "padded", "documents", "checkpointed", "dynamic"])
def test_packed(kind: str) -> None:
    ids, valid, numbers = batch()
    masks: dict[str, MaskMod] = {"causal": causal, "sliding": sliding, "documents": documents(numbers)}
    mask_mod = masks.get(kind, padded(valid))
    keys = [ids] if kind in ("causal", "sliding") else [ids, numbers if kind == "documents" else valid]
    model = Decoder(checkpointed=kind == "checkpointed")
    got, stats = counted(model, ids, lists(mask_mod, ids), dynamic=True if kind == "dynamic" else None)
    assert stats["reasons"] == {}
    assert stats["packed_calls"] == 1
    assert stats["tokens_computed"] == trie_size(*keys) < ids.numel()
    assert distance(got, expected(model, ids, mask_mod)) <= 1e-12


def test_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo is kept from refusing gradients on the CPU; the packed graph does not call the operator."""
    from torch.nn.attention import flex_attention as module

    monkeypatch.setattr(module, "_validate_device", lambda *args: None)
    ids, valid, _ = batch()
    model = Decoder()
    with torch.enable_grad():
        got, stats = counted(model, ids, lists(padded(valid), ids))
        weight = torch.randn(got.shape, generator=torch.Generator().manual_seed(1), dtype=got.dtype)
        weight = weight * valid.unsqueeze(-1)
        gradients = torch.autograd.grad((got * weight).sum(), list(model.parameters()))
        wanted = torch.autograd.grad((expected(model, ids, padded(valid)) * weight).sum(), list(model.parameters()))
    assert stats["packed_calls"] == 1
    assert all(distance(a, b) <= 1e-12 for a, b in zip(gradients, wanted, strict=True))


def test_lists_that_say_something_else_run_plain() -> None:
    """The graph that was rewritten for honest lists meets others; equal lists are packed again."""
    ids, valid, _ = batch()
    model = Decoder()
    honest = lists(padded(valid), ids)
    packed = compiled(model)
    dualkv_compile.reset_stats()
    packed(ids, honest)
    assert dualkv_compile.stats()["packed_calls"] == 1
    # A block mask may leave out blocks that the function would show: sparse attention by blocks.
    fewer = BlockMask.from_kv_blocks(
        honest.kv_num_blocks.clamp(max=1), honest.kv_indices, BLOCK_SIZE=8, mask_mod=padded(valid),
        seq_lengths=tuple(ids.shape[1:] * 2),
    )  # fmt: skip
    packed(ids, fewer)
    stats = dualkv_compile.stats()
    assert stats["packed_calls"] == 1
    assert stats["plain_calls"] == 1
    assert any("its block lists say something else" in reason for reason in stats["reasons"])
    packed(ids, honest)
    assert dualkv_compile.stats()["packed_calls"] == 2
    other = valid.clone()
    other[0, 3] = ~other[0, 3]
    stale = lists(padded(other), ids)
    assert distance(packed(ids, stale), expected(model, ids, padded(other))) <= 1e-12


def visible(block_mask: BlockMask, size: int) -> Tensor:
    """What a kernel shows that goes by the lists: ``[B, H, S, S]``."""
    rows, heads, blocks = block_mask.kv_num_blocks.shape
    block = block_mask.BLOCK_SIZE[0]
    shown = torch.zeros(rows, heads, blocks * block, blocks * block, dtype=torch.long)
    dense = create_mask(block_mask.mask_mod, rows, heads, size, size, device="cpu").long()
    dense = F.pad(dense, (0, blocks * block - size, 0, blocks * block - size))
    for counts, indices, full in (
        (block_mask.kv_num_blocks, block_mask.kv_indices, False),
        (block_mask.full_kv_num_blocks, block_mask.full_kv_indices, True),
    ):
        if counts is None:
            continue
        for row, head, line in torch.cartesian_prod(*(torch.arange(n) for n in (rows, heads, blocks))).tolist():
            for place in range(int(counts[row, head, line])):
                q, k = line * block, int(indices[row, head, line, place]) * block
                here = (row, head, slice(q, q + block), slice(k, k + block))
                shown[here] += 1 if full else dense[here]
    return shown[:, :, :size, :size]


@pytest.mark.parametrize("size", [16, 19])
def test_lists_and_mask_agree_exactly_if_a_kernel_would_show_the_same(size: int) -> None:
    """Lists with one random change each, judged by what a kernel would do with them."""
    generator = torch.Generator().manual_seed(size)
    ids = torch.zeros(2, size)
    numbers = torch.randint(0, 3, (2, size), generator=generator).sort(-1).values
    mask_mod = documents(numbers)
    graph = torch.fx.symbolic_trace(lambda b, h, q, k, held: (q >= k) & (held[b, q] == held[b, k]))
    seen = set()
    for trial in range(60):
        given = lists(mask_mod, ids, block=4)
        tensors = [given.kv_num_blocks, given.kv_indices, given.full_kv_num_blocks, given.full_kv_indices]
        changed = tensors[trial % 4] = tensors[trial % 4].clone()
        place = tuple(int(torch.randint(0, n, (), generator=generator)) for n in changed.shape)
        top = given.kv_indices.shape[-1] + trial % 2  # an index may be that of no block
        changed[place] = torch.randint(0, top, (), generator=generator)
        judged = BlockMask((size, size), *tensors, None, None, None, None, BLOCK_SIZE=(4, 4), mask_mod=mask_mod)
        same = torch.equal(visible(judged, size), create_mask(mask_mod, 2, 1, size, size, device="cpu").long())
        check = BlockLists(Reason("", ""), graph, (0, 1, 2, 3), (*[("number", size)] * 2, *[("number", 4)] * 2), (4,))
        assert (check.disagree([*tensors, numbers]) is None) == same
        seen.add(same)
    assert seen == {True, False}


def with_scores(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score + (q - k)


def test_refused_score_mod() -> None:
    ids, *_ = batch()
    for options, says in (
        ({"score_mod": with_scores}, "scores are modified"),
        ({"score_mod": lambda score, b, h, q, k: 20 * torch.tanh(score / 20)}, "scores are modified"),
    ):
        model = Decoder(**options)
        got, stats = counted(model, ids, lists(causal, ids))
        assert distance(got, model(ids, lists(causal, ids))) <= 1e-12
        assert stats["plain_calls"] == 1
        assert [says in reason for reason in stats["reasons"]] == [True]


def test_refused_log_sum_exp() -> None:
    """On the CPU Dynamo does not make such a graph: another result of the operator is put into one."""
    ids, *_ = batch()
    found: list[str] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        assert translate(gm) is not None
        for node in gm.graph.nodes:
            if node.target is operator.getitem and node.args[0].target is FLEX:
                node.args = (node.args[0], 1)
        with pytest.raises(WholeGraphUnsupported, match="more of it is used"):
            translate(gm)
        found.append("graph")
        return gm.forward

    model = Decoder()
    block_mask = lists(causal, ids)
    torch._dynamo.reset()
    with contextlib.suppress(Exception):  # the graph is no longer the function
        torch.compile(model, backend=backend)(ids, block_mask)
    assert found


@pytest.mark.parametrize(
    ("mask_mod", "says"),
    [
        (lambda b, h, q, k: k < 12, "does not cover every query"),
        (lambda b, h, q, k: (q >= k) | (k < 12), "later ones"),
        (lambda b, h, q, k: (q >= k) & (h + k > 2), "head"),
        (lambda b, h, q, k: (q >= k) & (b + k > 2), "row"),
        (lambda b, h, q, k: q * q >= k * k, "mask_mod calls mul"),
    ],
    ids=["no_order", "or", "head", "row", "product"],
)
def test_refused_masks(mask_mod: MaskMod, says: str) -> None:
    ids, *_ = batch()
    model = Decoder()
    rows, columns = ids.shape
    block_mask = create_block_mask(mask_mod, rows, HEADS, columns, columns, device="cpu")
    got, stats = counted(model, ids, block_mask)
    assert distance(got, model(ids, block_mask)) <= 1e-12
    assert stats["packed_calls"] == 0
    assert any(says in reason for reason in stats["reasons"]), stats["reasons"]


def test_no_mask_and_a_mask_made_inside() -> None:
    ids, *_ = batch()
    model = Decoder()
    got, stats = counted(model, ids, None)
    assert distance(got, model(ids, None)) <= 1e-12
    assert stats["packed_calls"] == 0

    def inside(ids: Tensor, block_mask: BlockMask | None) -> Tensor:
        return model(ids, lists(causal, ids))

    got, stats = counted(inside, ids, None)  # type: ignore[arg-type]
    assert distance(got, expected(model, ids, causal)) <= 1e-12
    assert stats["packed_calls"] == 0
    assert any("made inside" in reason for reason in stats["reasons"]), stats["reasons"]


def test_hugging_face() -> None:
    """The library makes the block mask between two graphs, so the layers start from hidden states."""
    batch = rollouts(prompts=(9, 12))
    model = build("llama", hidden_size=64).eval()
    flex = AutoModelForCausalLM.from_config(model.config, attn_implementation="flex_attention").eval()
    flex.load_state_dict(model.state_dict())
    model = AutoModelForCausalLM.from_config(model.config, attn_implementation="sdpa").eval()
    model.load_state_dict(flex.state_dict())
    dualkv_compile.reset_stats()
    torch._dynamo.reset()
    (got,) = run_alone(torch.compile(flex, backend="dualkv", options=EXACT), logits_step(), batch).outputs
    stats = dualkv_compile.stats()
    assert stats["reasons"] == {}
    assert stats["packed_calls"] == 1
    assert stats["tokens_computed"] == trie_size(*batch.values())
    (wanted,) = run_alone(model, logits_step(), batch).outputs
    assert distance(got, wanted) <= 1e-5
