"""Compiling a model in place for training loops that also generate with it and toggle checkpointing.

``model.compile(backend="dualkv")`` alone sends every call through one compiled frame. Two habits of training loops then
use up the few graphs that Dynamo keeps for a frame (``torch._dynamo.config.recompile_limit``), after which the frame
runs uncompiled without a word:

* ``generate`` calls the model with a KV cache, in several shapes and modes. Such calls have nothing to share.
* TRL switches gradient checkpointing off and on around each pass without gradient. Each time, transformers adds one
  more forward hook to the embedding, and Dynamo's guard on their number fails.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from dualkv_compile.published import ATTACHED, attach

_ARGUMENTS = "_dualkv_compile_arguments"
#: What a model's argument for the KV cache is called; transformers 5 renamed it.
CACHE = ("cache", "past_key_values")


def compile_in_place(model: torch.nn.Module, **compile_arguments: Any) -> None:
    """``model.compile(backend="dualkv", **compile_arguments)`` for a model that also generates (`steady`).

    A model that is compiled in place already, it or a part of it (as the base model of an adapter), keeps what it has,
    whatever the backend.
    """
    if not any(part._compiled_call_impl is not None for part in model.modules()):
        model.compile(**{"backend": "dualkv", **compile_arguments})
    steady(model)


def steady(model: torch.nn.Module) -> None:
    """Keep the frame of a model that this backend compiles in place free of what needs no compilation; once.

    * Calls with a KV cache (what ``generate`` makes) run as written.
    * A model with frozen parameters is attached (`dualkv_compile.attach`): with checkpointing, Dynamo cuts models with
      adapters behind the embedding, and what follows does not see the tokens.
    * ``enable_input_require_grads`` does not add a second hook while the first is there.

    All are attributes of these modules; nothing outside changes, and neither do parameters or state dict.
    """
    for part in list(model.modules()):
        arguments = compile_arguments_of(part)
        if hasattr(part._compiled_call_impl, _ARGUMENTS) or (arguments is None and not hasattr(part, ATTACHED)):
            continue
        if any(not parameter.requires_grad for parameter in part.parameters()) and not hasattr(part, ATTACHED):
            attach(part)
        assert part._compiled_call_impl is not None
        part._compiled_call_impl = _without_cache(part, part._compiled_call_impl, arguments)
        for inner in part.modules():
            kind = type(inner)
            if hasattr(kind, "enable_input_require_grads") and hasattr(kind, "disable_input_require_grads"):
                # An instance's attribute hides the method from the model's own calls of it as well.
                inner.__dict__.setdefault("enable_input_require_grads", _EnableOnce(inner))


def compile_arguments_of(model: torch.nn.Module) -> dict[str, Any] | None:
    """The arguments of ``model.compile`` if it was compiled in place by this backend, otherwise None.

    torch keeps them in the closure of what it made. Where a version keeps them elsewhere, the answer is None.
    """
    compiled = model._compiled_call_impl
    if hasattr(compiled, _ARGUMENTS):
        return getattr(compiled, _ARGUMENTS)
    closure = inspect.getclosurevars(compiled).nonlocals if inspect.isfunction(compiled) else {}
    backend: Any = closure.get("callback")
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inner
    if getattr(backend, "compiler_name", None) != "dualkv":
        return None
    return {"backend": "dualkv", "dynamic": backend.dynamic, **backend.kwargs}


def _without_cache(
    module: torch.nn.Module, compiled: Callable[..., Any], arguments: dict[str, Any] | None
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if any(kwargs.get(name) is not None for name in CACHE):
            return module._call_impl(*args, **kwargs)
        return compiled(*args, **kwargs)

    setattr(call, _ARGUMENTS, arguments)
    return call


class _EnableOnce:
    """The method ``enable_input_require_grads`` of one model, without effect while its hooks are in place."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self) -> None:
        if not getattr(self._model, "_require_grads_hooks", None):
            type(self._model).enable_input_require_grads(self._model)
