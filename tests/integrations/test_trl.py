"""TRL's trainers, unmodified: log-probabilities, gradient norms and weights with the backend are those without."""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import dualkv_compile
from dualkv_compile.integrations.trl import group_rows, keep_groups_together, obstacles, share_prefixes
from tests.models.harness import EXACT, VOCAB, build, trie_size
from zoo_models.flops import counting

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
tokenizers = pytest.importorskip("tokenizers")

from accelerate.utils import TorchDynamoPlugin  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No graphs and no state of Accelerate of another test, and nothing looked up on the hub."""
    from accelerate.state import AcceleratorState

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch._dynamo.reset()
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as a trainer loads it (TRL loads the reference model by its name)."""
    path = tmp_path_factory.mktemp("model")
    build("qwen3", num_hidden_layers=1, eos_token_id=1, pad_token_id=0, bos_token_id=None).save_pretrained(path)
    return path


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(VOCAB - 3))]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    whole = tokenizers.Tokenizer(model)
    whole.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=whole, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def words(length: int, seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    return " ".join(f"w{int(i)}" for i in torch.randint(0, VOCAB - 3, (length,), generator=generator))


def prompts(lengths: tuple[int, ...]) -> Any:
    return Dataset.from_dict({"prompt": [words(lengths[i % len(lengths)], i) for i in range(8)]})


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(int(word[1:]) for word in text.split() if word[0] == "w") % 17) for text in completions]


def lora() -> Any:
    return peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj", "up_proj"],
        task_type="CAUSAL_LM",
        init_lora_weights=False,
    )


def policy_trainer(folder: Path, kind: str = "GRPO", *, adapter: bool = False, **settings: Any) -> Any:
    """A trainer of three steps of 8 rows, 4 to a prompt."""
    model = load(folder)
    if settings.pop("prepared", False):
        model.compile(backend="dualkv", options=EXACT)
    dataset = prompts(settings.pop("lengths", (14, 14, 9, 14)))
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "num_iterations": 2,
        "beta": 0.0,
    }
    return getattr(trl, f"{kind}Trainer")(
        model=model,
        reward_funcs=reward,
        args=getattr(trl, f"{kind}Config")(**{**common(folder), **arguments, **settings}),
        train_dataset=dataset,
        processing_class=tokenizer(),
        peft_config=lora() if adapter else None,
    )


def common(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "out"),
        "max_steps": 3,
        "learning_rate": 1e-2,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "seed": 0,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "gradient_checkpointing": True,
    }


class Run:
    """Three steps: what every log-probability pass gave, the gradient norms, the weights, and the counters."""

    def __init__(self, trainer: Any) -> None:
        self.passes: list[tuple[str, torch.Tensor]] = []
        compute = trainer._get_per_token_logps_and_entropies

        def record(model: Any, *args: Any, **kwargs: Any) -> Any:
            kind = "policy" if torch.is_grad_enabled() else "reference" if model is trainer.ref_model else "old"
            before = dualkv_compile.stats()["packed_calls"]
            result = compute(model, *args, **kwargs)
            self.packed[kind] += dualkv_compile.stats()["packed_calls"] - before
            self.passes.append((kind, result[0].detach().clone()))
            return result

        self.packed: Counter[str] = Counter()
        trainer._get_per_token_logps_and_entropies = record
        dualkv_compile.reset_stats()
        trainer.train()
        self.stats = dualkv_compile.stats()
        self.norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
        self.weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def assert_same(got: Run, expected: Run) -> None:
    assert [kind for kind, _ in got.passes] == [kind for kind, _ in expected.passes]
    for (_, ours), (_, theirs) in zip(got.passes, expected.passes, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert len(expected.norms) == 3 and min(expected.norms) > 1e-3
    assert got.norms == pytest.approx(expected.norms, rel=1e-4)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(got.weights[name], weight, rtol=0, atol=1e-5)


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("how", ["prepared", "arguments", "one call"])
def test_three_steps_of_grpo(monkeypatch: pytest.MonkeyPatch, folder: Path, how: str, adapter: bool) -> None:
    """Two prompts of 4 rows in each step, generated by the model; old log-probabilities in every second."""
    # Batches of one length for static graphs; lengths that differ from step to step for dynamic ones.
    # The reference model, which TRL loads, is not compiled by compiling the policy; an adapter's is the policy itself.
    settings: dict[str, Any] = {"beta": 0.0 if how == "prepared" and not adapter else 0.1}
    if how == "one call" and not adapter:
        settings["lengths"] = (14, 9, 12, 11)
    expected = Run(policy_trainer(folder, adapter=adapter, **settings))
    if how == "arguments":
        settings |= {"torch_compile": True, "torch_compile_backend": "dualkv"}
        # There is no argument for a backend's options; the defaults would compile and want 64 common tokens.
        given = TorchDynamoPlugin.to_kwargs
        monkeypatch.setattr(TorchDynamoPlugin, "to_kwargs", lambda self: {**given(self), "options": EXACT})
    trainer = policy_trainer(folder, prepared=how == "prepared", adapter=adapter, **settings)
    if how == "one call":
        share_prefixes(trainer, options=EXACT)
    got = Run(trainer)
    assert_same(got, expected)
    reference = {"reference": 2} if trainer.ref_model is not None else {}
    # Without a model of its own, the reference of an adapter is the policy's without it.
    assert got.packed == {"policy": 3, "old": 4 if adapter else 2, **reference}
    assert got.stats["reasons"] == {}
    assert got.stats["plain_calls"] == 0
    assert got.stats["calls"] == sum(got.packed.values())
    assert 0.3 < got.stats["tokens_computed"] / got.stats["tokens_given"] < 0.65
    assert got.weights.keys() == expected.weights.keys()


def observed_steps(trainer: Any) -> tuple[list[dict[str, Any]], list[list[torch.Tensor]], int]:
    """The micro-batches, the gradient of each optimizer step, and the operations of all policy passes."""
    batches: list[dict[str, Any]] = []
    gradients: list[list[torch.Tensor]] = []
    operations = 0
    compute = trainer._compute_loss
    step = trainer.training_step

    def record(model: Any, inputs: dict[str, Any]) -> Any:
        batches.append(dict(inputs))
        return compute(model, inputs)

    def count(model: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal operations
        # Asked for beforehand, so that generation is not counted.
        model.train()
        inputs = trainer._prepare_inputs(args[0])
        prepare, trainer._prepare_inputs = trainer._prepare_inputs, lambda _: inputs
        try:
            with counting() as counted:
                loss = step(model, *args, **kwargs)
        finally:
            trainer._prepare_inputs = prepare
        operations += counted.total
        return loss

    class Gradients(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            gradients.append([p.grad.clone() for p in trainer.model.parameters() if p.grad is not None])

    trainer._compute_loss, trainer.training_step = record, count
    trainer.add_callback(Gradients())
    trainer.train()
    return batches, gradients, operations


def rows(batches: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Each row with everything that belongs to it."""
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "old_per_token_logps")
    present = [name for name in names if batches[0].get(name) is not None]
    return [
        tuple(str(batch[name][i].tolist()) for name in present)
        for batch in batches
        for i in range(len(batch["prompt_ids"]))
    ]


@pytest.mark.parametrize(
    ("kind", "adapter", "checkpointing"),
    [("GRPO", False, False), ("GRPO", False, True), ("GRPO", True, True), ("RLOO", False, False)],
)
def test_grouped_rows_give_the_same_optimizer_steps(
    folder: Path, kind: str, adapter: bool, checkpointing: bool
) -> None:
    """4 micro-batches of 4 rows to a step, from 4 prompts: the rows and the gradient of each step are TRL's own, the
    micro-batches hold one prompt each, and the work is that of distinct tokens.
    """
    settings = {
        "adapter": adapter,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "gradient_checkpointing": checkpointing,
        "num_iterations": 1,
        "max_steps": 2,
    }
    theirs, expected, plain = observed_steps(policy_trainer(folder, kind, **settings))
    trainer = policy_trainer(folder, kind, **settings)
    share_prefixes(trainer, options=EXACT)
    dualkv_compile.reset_stats()
    ours, gradients, packed = observed_steps(trainer)
    stats = dualkv_compile.stats()

    assert len(ours) == len(theirs) == 8
    for step in (slice(0, 4), slice(4, 8)):
        assert sorted(rows(ours[step])) == sorted(rows(theirs[step]))
        assert all(len({row[0] for row in rows([batch])}) == 1 for batch in ours[step])
        assert len({row[0] for row in rows(ours[step])}) == 4
        order = list(dict.fromkeys(row[0] for row in rows(theirs[step])))
        assert list(dict.fromkeys(row[0] for row in rows(ours[step]))) == order
    assert any(len({row[0] for row in rows([batch])}) > 1 for batch in theirs)
    for got, wanted in zip(gradients, expected, strict=True):
        scale = max(gradient.abs().max().item() for gradient in wanted)
        assert all((a - b).abs().max().item() <= 1e-5 * scale for a, b in zip(got, wanted, strict=True))

    # The head is TRL's and runs on the whole grid, outside of every graph: a product forward, three backward (two
    # if the weight is frozen).
    products = 3 if adapter else 4
    heads = sum(
        products * 2 * 4 * (batch["prompt_ids"].shape[1] + batch["completion_ids"].shape[1] - 1) for batch in ours
    )
    head = heads * 32 * VOCAB
    policy = [trie_size(*grid(batch)) / grid(batch)[0].numel() for batch in ours]
    ideal = (plain - head) * sum(policy) / len(policy)
    assert stats["reasons"] == {} and stats["plain_calls"] == 0
    assert 0.9 * ideal < packed - head <= 1.15 * ideal


def grid(batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """``input_ids`` and ``attention_mask`` of a micro-batch, as the model gets them."""
    return (
        torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1),
        torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1),
    )


def test_steps_keep_their_rows_unless_told_otherwise() -> None:
    """Two optimizer steps from one generation batch: rows change places within a step only, or within the whole."""

    class Trainer:
        def __init__(self) -> None:
            generator = torch.Generator().manual_seed(0)
            order = torch.randperm(16, generator=generator)
            self.args = types.SimpleNamespace(gradient_accumulation_steps=2)
            self.model = torch.nn.Linear(1, 1)
            self._step = 0
            prompts = torch.arange(4).repeat_interleave(4)[order]
            self._buffered_inputs = [
                {
                    "prompt_ids": part[:, None],
                    "prompt_mask": torch.ones(4, 1),
                    "names": [f"row {i}" for i in numbers],
                    "num_items_in_batch": torch.tensor(7),
                    "old_per_token_logps": None,
                }
                for part, numbers in zip(prompts.split(4), order.split(4), strict=True)
            ]

        def _prepare_inputs(self, _: Any) -> Any:
            return self._buffered_inputs[self._step]

    def used(trainer: Trainer) -> list[dict[str, Any]]:
        batches = []
        for step in range(4):
            trainer._step = step
            batches.append(trainer._prepare_inputs(None))
        return batches

    def names(batches: list[dict[str, Any]]) -> list[str]:
        return sorted(name for batch in batches for name in batch["names"])

    before = used(Trainer())
    trainer = Trainer()
    keep_groups_together(trainer)
    within = used(trainer)
    assert used(trainer) == within  # a second iteration over the same rows
    trainer = Trainer()
    keep_groups_together(trainer)
    keep_groups_together(trainer, across_steps=True)
    across = used(trainer)
    for batches in (within, across):
        assert names(batches) == names(before)
        assert all(batch["num_items_in_batch"] == 7 and batch["old_per_token_logps"] is None for batch in batches)
    assert names(within[:2]) == names(before[:2])
    changes = [int((batch["prompt_ids"].diff(dim=0) != 0).sum()) for batch in across]
    assert changes == [0, 0, 0, 0]
    for half in (within[:2], within[2:]):
        ids = torch.cat([batch["prompt_ids"] for batch in half])[:, 0]
        assert int((ids.diff() != 0).sum()) == len(ids.unique()) - 1
    trainer.model.eval()
    trainer._buffered_inputs = before
    assert trainer._prepare_inputs(None) is before[3]
    with pytest.raises(TypeError, match="does not cut"):
        keep_groups_together(object())


def test_images_are_left_alone() -> None:
    batch = {"prompt_ids": torch.tensor([[1], [2]]), "prompt_mask": torch.ones(2, 1), "pixel_values": torch.zeros(3, 4)}
    assert [b["pixel_values"] is batch["pixel_values"] for b in group_rows([batch, batch])] == [True, True]


def test_preference_pairs_share_their_prompt(folder: Path) -> None:
    """DPO pads on the right and puts both answers of a pair into one batch: nothing needs to be grouped."""
    pairs = [{"prompt": words(12, i) + " ", "chosen": words(5, 50 + i), "rejected": words(4, 80 + i)} for i in range(8)]

    def trainer() -> Any:
        return trl.DPOTrainer(
            model=load(folder),
            args=trl.DPOConfig(**common(folder), per_device_train_batch_size=2),
            train_dataset=Dataset.from_list(pairs),
            processing_class=tokenizer(),
        )

    def norms(trainer: Any) -> list[float]:
        trainer.train()
        return [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]

    expected = norms(trainer())
    ours = trainer()
    share_prefixes(ours, options=EXACT)
    dualkv_compile.reset_stats()
    got = norms(ours)
    stats = dualkv_compile.stats()
    assert len(got) == 3 and got == pytest.approx(expected, rel=1e-4)
    assert stats["reasons"] == {}
    assert stats["packed_calls"] == stats["calls"] == 6  # policy and reference
    assert stats["tokens_computed"] < 0.8 * stats["tokens_given"]


def test_settings_that_share_nothing_are_told() -> None:
    model = build("llama", num_hidden_layers=1)
    settings = {
        "padding_free": True,
        "use_liger_kernel": True,
        "per_device_train_batch_size": 1,
        "torch_compile_backend": "inductor",
        "steps_per_generation": 4,
        "gradient_accumulation_steps": 2,
        "parallelism_config": types.SimpleNamespace(cp_size=2, sp_size=1),
    }
    trainer = types.SimpleNamespace(model=model, args=types.SimpleNamespace(**settings), _buffered_inputs=None)
    assert [line.split()[0].split("=")[0] for line in obstacles(trainer)] == [
        "torch_compile_backend",
        "padding_free",
        "use_liger_kernel",
        "context",
        "per_device_train_batch_size",
        "steps_per_generation",
    ]
    assert len(obstacles(trainer, across_steps=True)) == 5
    model.config._attn_implementation = "flash_attention_2"
    assert obstacles(trainer)[0].startswith("attn_implementation")
    plain = types.SimpleNamespace(model=build("llama", num_hidden_layers=1), args=types.SimpleNamespace())
    assert obstacles(plain) == []
    with pytest.raises(TypeError, match="expected a trainer"):
        share_prefixes(object())
