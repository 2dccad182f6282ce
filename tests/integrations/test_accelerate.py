"""Accelerate takes the backend's name, compiles in place for it, and is otherwise what it was."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DynamoBackend, TorchDynamoPlugin

import dualkv_autoload
import dualkv_compile
from dualkv_compile.integrations.in_place import compile_arguments_of, compile_in_place, steady
from tests.models.harness import EXACT, build, rollouts

PROGRAM = """
import importlib, sys
import torch
if "{first}":
    importlib.import_module("{first}")
from transformers import TrainingArguments
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
import accelerate
assert ("dualkv_compile" in sys.modules) == bool("{first}")
arguments = TrainingArguments(output_dir=".", torch_compile=True, torch_compile_backend="dualkv", use_cpu=True)
assert TorchDynamoPlugin(backend=arguments.torch_compile_backend).to_kwargs() == {{"backend": "dualkv"}}
assert not any(type(finder).__module__ == "dualkv_autoload" for finder in sys.meta_path)
assert accelerate.accelerator.__spec__.loader.get_source("accelerate.accelerator")
try:
    TorchDynamoPlugin(backend="dualkw")
except ValueError:
    print("refused")
"""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.mark.parametrize(("autoload", "first"), [("1", ""), ("0", "dualkv_compile")])
def test_the_name_is_known_to_a_fresh_process(tmp_path: Path, autoload: str, first: str) -> None:
    """Without importing the package; or, where torch loads no extensions, with it."""
    # Not the root of the sources, where transformers takes our kernels/ for the package of that name, and imports it.
    path = os.pathsep.join(entry for entry in sys.path if entry and not (Path(entry) / "kernels" / "flex.py").exists())
    environment = {**os.environ, "PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}
    command = [sys.executable, "-c", PROGRAM.format(first=first)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert result.stdout == "refused\n", result.stderr


def test_the_member_is_like_the_others() -> None:
    assert DynamoBackend("DUALKV") is DynamoBackend.DUALKV is DynamoBackend["DUALKV"]
    assert "DUALKV" in DynamoBackend and DynamoBackend.list()[-1] == "DUALKV" == str(DynamoBackend.DUALKV)
    assert list(DynamoBackend)[-1] is DynamoBackend.DUALKV and len(set(DynamoBackend)) == len(DynamoBackend)
    for again in (copy.deepcopy, lambda member: pickle.loads(pickle.dumps(member))):
        assert again(DynamoBackend.DUALKV) is DynamoBackend.DUALKV
    assert DynamoBackend("INDUCTOR") is DynamoBackend.INDUCTOR
    assert TorchDynamoPlugin(backend="dualkv", mode="default").to_kwargs() == {"backend": "dualkv"}


def test_connecting_twice_changes_nothing_and_neither_does_another_accelerate() -> None:
    module = sys.modules["accelerate.accelerator"]
    before = module.Accelerator.prepare_model, len(DynamoBackend)
    dualkv_autoload.register()
    dualkv_autoload.connect(module)
    assert (module.Accelerator.prepare_model, len(DynamoBackend)) == before
    other = types.ModuleType("accelerate.accelerator")
    dualkv_autoload.connect(other)
    assert not hasattr(other, "Accelerator")


def test_prepared_models_are_compiled_in_place() -> None:
    """The model itself runs compiled, as trainers call it for old log-probabilities; its state dict keeps its keys."""
    model, eager = build("llama", num_hidden_layers=1), build("llama", num_hidden_layers=1)
    keys = list(model.state_dict())
    accelerator = Accelerator(dynamo_plugin=TorchDynamoPlugin(backend="dualkv", options=EXACT), cpu=True)
    assert accelerator.prepare(model) is model
    assert accelerator.state.dynamo_plugin.backend is DynamoBackend.DUALKV
    assert list(model.state_dict()) == list(accelerator.get_state_dict(model)) == keys
    batch = rollouts()
    dualkv_compile.reset_stats()
    torch.testing.assert_close(model(**batch).logits, eager(**batch).logits, rtol=0, atol=1e-5)
    assert dualkv_compile.stats()["packed_calls"] == 1
    assert compile_arguments_of(build("llama")) is None


def test_other_backends_are_left_to_accelerate() -> None:
    model = torch.nn.Linear(2, 2)
    prepared = Accelerator(dynamo_backend="eager", cpu=True).prepare(model)
    assert isinstance(prepared, torch._dynamo.eval_frame.OptimizedModule) and model._compiled_call_impl is None
    AcceleratorState._reset_state(True)
    own = build("llama", num_hidden_layers=1)
    own.compile(backend="eager")
    before = own._compiled_call_impl
    assert Accelerator(cpu=True).prepare(own)._compiled_call_impl is before
    assert "enable_input_require_grads" not in own.__dict__
    compile_in_place(own, options=EXACT)
    assert own._compiled_call_impl is before


def test_generation_and_toggled_checkpointing_need_no_graphs() -> None:
    """A training loop as TRL's: one graph with gradients and one without, however often it generates."""
    model = build("llama", num_hidden_layers=1, pad_token_id=0, eos_token_id=None)
    model.compile(backend="dualkv", options=EXACT)
    arguments = compile_arguments_of(model)
    assert arguments is not None and (arguments["backend"], arguments["options"]) == ("dualkv", EXACT)
    steady(model)
    compiled = model._compiled_call_impl
    steady(model)
    assert model._compiled_call_impl is compiled
    assert compile_arguments_of(model) == arguments
    model.gradient_checkpointing_enable()
    batch = rollouts()
    dualkv_compile.reset_stats()
    for _ in range(4):
        model.gradient_checkpointing_disable()
        model.generate(**batch, max_new_tokens=2, do_sample=False)
        with torch.no_grad():
            model(**batch, use_cache=False)
        model.gradient_checkpointing_enable()
        model(**batch, use_cache=False).logits.sum().backward()
    stats = dualkv_compile.stats()
    assert (stats["calls"], stats["packed_calls"], stats["reasons"]) == (8, 8, {})
    assert stats["graphs_compiled"] == 2
    assert len(model.model.embed_tokens._forward_hooks) == 1
    twin = copy.deepcopy(model)
    twin.disable_input_require_grads()
    twin.enable_input_require_grads()
    assert len(model.model.embed_tokens._forward_hooks) == len(twin.model.embed_tokens._forward_hooks) == 1
    assert twin.enable_input_require_grads._model is twin


def test_the_last_graph_that_dynamo_allows_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dualkv_compile.backend._told", set())
    model = torch.compile(build("llama", num_hidden_layers=1), backend="dualkv", options=EXACT)
    batch = rollouts()
    told = []
    for grad in (False, True):
        with torch._dynamo.config.patch(recompile_limit=2), torch.set_grad_enabled(grad):
            model(**batch, use_cache=False)
        told.append("the most that Dynamo allows" in caplog.text)
    assert told == [False, True]
