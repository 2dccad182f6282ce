"""TRL's trainers, unmodified: log-probabilities, gradient norms and weights with the backend are those without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dualkv_compile
from dualkv_compile.integrations.trl import share_prefixes
from tests.models.harness import EXACT, VOCAB, build

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
tokenizers = pytest.importorskip("tokenizers")

from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
Observe = Callable[[Any], None]


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
    build("qwen3", eos_token_id=1, pad_token_id=0, bos_token_id=None).save_pretrained(path)
    return path


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(VOCAB - 3))]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    whole = tokenizers.Tokenizer(model)
    whole.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=whole, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def words(length: int, seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    return " ".join(f"w{int(i)}" for i in torch.randint(0, VOCAB - 3, (length,), generator=generator))


def prompts(count: int = 8) -> Any:
    return Dataset.from_dict({"prompt": [words((14, 9, 12, 11)[i % 4], i) for i in range(count)]})


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


def policy_trainer(folder: Path, kind: str = "GRPO", *, prepared: bool = False, adapter: bool = False, **settings: Any):
    """A trainer of three steps of 8 rows, 4 to a prompt; ``prepared``: its model is compiled beforehand."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)
    if prepared:
        model.compile(backend="dualkv", options=EXACT)
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
        args=getattr(trl, f"{kind}Config")(**common(folder), **{**arguments, **settings}),
        train_dataset=prompts(),
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


@pytest.mark.parametrize(
    ("how", "adapter"), [("prepared", False), ("arguments", False), ("one call", False), ("one call", True)]
)
def test_three_steps_of_grpo(folder: Path, how: str, adapter: bool) -> None:
    """Two prompts of 4 rows in each step, generated by the model; old log-probabilities in every second."""
    settings: dict[str, Any] = {"beta": 0.1} if how == "one call" else {}
    expected = Run(policy_trainer(folder, adapter=adapter, **settings))
    if how == "arguments":
        settings |= {"torch_compile": True, "torch_compile_backend": "dualkv"}
    trainer = policy_trainer(folder, prepared=how == "prepared", adapter=adapter, **settings)
    if how == "arguments":
        # There is no argument for a backend's options; the defaults would compile and want 64 common tokens.
        trainer.accelerator.state.dynamo_plugin.options = EXACT
    if how == "one call":
        share_prefixes(trainer, options=EXACT)
    got = Run(trainer)
    assert_same(got, expected)
    reference = {"reference": 2} if how == "one call" and not adapter else {}
    # Without a model of its own, the reference of an adapter is the policy's without it.
    assert got.packed == {"policy": 3, "old": 4 if adapter else 2, **reference}
    assert got.stats["reasons"] == {}
    assert got.stats["plain_calls"] == 0
    assert got.stats["calls"] == sum(got.packed.values())
    assert 0.3 < got.stats["tokens_computed"] / got.stats["tokens_given"] < 0.65
    assert got.weights.keys() == expected.weights.keys()
