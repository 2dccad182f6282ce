"""TRL's GRPOTrainer on SmolLM2-135M-Instruct, as it is, with eager, inductor or this package behind ``torch.compile``.

python examples/grpo_trl.py [--backend dualkv|inductor|eager] [--steps 50] [--rollouts 8] [--tokens 32]
    [--examples 24] [--record FILE | --replay FILE] [--json FILE]

``--record`` keeps the rollouts, ``--replay`` trains on kept ones, so that backends can be compared on the same data
(`compare_runs.py`). Every generation is used twice, the second time with a clipped ratio.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from reversed_words import problem, score
from transformers import TrainerCallback

from dualkv_compile.demo.model import load_pretrained
from dualkv_compile.integrations.trl import share_prefixes

UPDATES = 2  # per generation


def main() -> None:
    arguments = _arguments()
    policy = load_pretrained()
    policy.tokenizer.padding_side = "left"
    problems = [problem(index, arguments.examples) for index in range(-(-arguments.steps // UPDATES))]
    kept: list[list[list[int]]] = json.loads(Path(arguments.replay).read_text()) if arguments.replay else []
    given = iter(list(kept))

    def reward(
        completions: list[str], completion_ids: list[list[int]], answer: list[list[str]], **_: Any
    ) -> list[float]:
        if not arguments.replay:
            kept.append(completion_ids)
        return [score(tuple(words), text) for words, text in zip(answer, completions, strict=True)]

    def replay(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = trainer.processing_class(text=prompts)["input_ids"]
        return {"prompt_ids": ids, "completion_ids": next(given), "logprobs": None}

    compiled = (
        {"torch_compile": True, "torch_compile_backend": arguments.backend} if arguments.backend != "eager" else {}
    )
    with tempfile.TemporaryDirectory() as folder:
        config = trl.GRPOConfig(
            output_dir=folder,
            max_steps=arguments.steps,
            per_device_train_batch_size=arguments.rollouts,
            num_generations=arguments.rollouts,
            num_iterations=UPDATES,
            max_completion_length=arguments.tokens,
            generation_kwargs={"min_new_tokens": arguments.tokens},
            learning_rate=arguments.lr,
            lr_scheduler_type="constant",
            beta=0.0,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=not torch.cuda.is_available(),
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            **compiled,
        )
        clock = Clock()
        trainer = trl.GRPOTrainer(
            model=policy.model,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": p.prompt, "answer": list(p.answer)} for p in problems]),
            processing_class=policy.tokenizer,
            callbacks=[clock],
            rollout_func=replay if arguments.replay else None,
        )
        if arguments.backend == "dualkv":
            share_prefixes(trainer)
        trainer.train()
    if arguments.record:
        Path(arguments.record).write_text(json.dumps(kept))
    if arguments.json:
        logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
        curves = [
            {name: entry.get(name) for name in ("reward", "loss", "grad_norm")} | {"seconds": seconds}
            for entry, seconds in zip(logs, clock.seconds, strict=True)
        ]
        sizes = {"prompt": len(policy.tokenizer(problems[0].prompt)["input_ids"]), **vars(arguments)}
        described = {"script": "grpo_trl.py", "torch": torch.__version__, "trl": trl.__version__, "settings": sizes}
        Path(arguments.json).write_text(json.dumps({**described, "steps": curves}))


class Clock(TrainerCallback):
    """Seconds of each optimizer step, generation included where there is one."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="dualkv", choices=("dualkv", "inductor", "eager"))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rollouts", type=int, default=8, help="responses to each prompt")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of a response")
    parser.add_argument("--examples", type=int, default=24, help="worked examples in a prompt; 24 make 256 tokens")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--record", help="keep the rollouts in this file")
    parser.add_argument("--replay", help="train on the rollouts of this file")
    parser.add_argument("--json", help="write the curves to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
