"""GRPO in plain PyTorch on SmolLM2-135M-Instruct; the one line that is about this package is ``torch.compile``.

python examples/grpo_torch.py [--backend dualkv|inductor|eager] [--steps 50] [--rollouts 8] [--tokens 32]
    [--examples 24] [--record FILE | --replay FILE] [--json FILE]

``--record`` keeps the rollouts, ``--replay`` trains on kept ones, so that backends can be compared on the same data
(`compare_runs.py`). Every generation is used twice, the second time with a clipped ratio.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from reversed_words import problem, score
from torch import Tensor

from dualkv_compile.demo.loss import group_advantages, grpo_loss, token_log_probs
from dualkv_compile.demo.model import load_pretrained

UPDATES = 2  # per generation


def main() -> None:
    arguments = _arguments()
    torch.manual_seed(0)
    policy = load_pretrained()
    model, tokenizer = policy.model, policy.tokenizer
    forward = model if arguments.backend == "eager" else torch.compile(model, backend=arguments.backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.0)

    def generate(index: int) -> dict[str, Tensor]:
        task = problem(index, arguments.examples)
        prompt = tokenizer(task.prompt, return_tensors="pt").input_ids.expand(arguments.rollouts, -1)
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        length = {"min_new_tokens": arguments.tokens, "max_new_tokens": arguments.tokens}
        ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), **sampling, **length)
        texts = tokenizer.batch_decode(ids[:, prompt.shape[1] :], skip_special_tokens=True)
        return {"ids": ids, "rewards": torch.tensor([score(task.answer, text) for text in texts])}

    def log_probs(ids: Tensor) -> Tensor:
        logits = forward(input_ids=ids, use_cache=False, logits_to_keep=arguments.tokens + 1).logits
        return token_log_probs(logits[:, :-1], ids[:, -arguments.tokens :])

    kept: list[dict[str, Tensor]] = torch.load(arguments.replay) if arguments.replay else []
    curves: list[dict[str, Any]] = []
    for number in range(arguments.steps):
        if number % UPDATES == 0:
            if not arguments.replay:
                kept.append(generate(number // UPDATES))
            batch = kept[number // UPDATES]
            old = None
        start = time.perf_counter()
        new = log_probs(batch["ids"])
        old = new.detach() if old is None else old
        advantages = group_advantages(batch["rewards"], arguments.rollouts)
        loss = grpo_loss(new, old, advantages, torch.ones_like(new))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - start
        reward = batch["rewards"].mean().item()
        curves.append({"reward": reward, "loss": loss.item(), "grad_norm": norm.item(), "seconds": seconds})
        shown = f"reward {reward:.3f}  loss {loss.item():+.6f}  norm {norm.item():.5f}  {seconds:.2f} s"
        print(f"{number + 1:3}  {shown}", flush=True)
    if arguments.record:
        torch.save(kept, arguments.record)
    if arguments.json:
        sizes = {"prompt": kept[0]["ids"].shape[1] - arguments.tokens, **vars(arguments)}
        described = {"script": "grpo_torch.py", "torch": torch.__version__, "settings": sizes}
        Path(arguments.json).write_text(json.dumps({**described, "steps": curves}))


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
