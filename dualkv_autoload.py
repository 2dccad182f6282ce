"""Makes Accelerate take ``"dualkv"`` as a compile backend, in processes that never import our package.

Accelerate (and with it ``TrainingArguments(torch_compile_backend=...)`` and TRL) checks the name of a backend against
an enumeration of its own before torch is asked for it, so torch's entry point for backends comes too late.
``import torch`` calls `register`, through torch's entry point group ``torch.backends``; it leaves a finder in
``sys.meta_path`` that waits for the import of one module, ``accelerate.accelerator``, and removes itself then.
`connect` then does two things, which matter only where the name ``"dualkv"`` is given:

* the enumeration gets the member ``DUALKV``;
* a model prepared for that backend is compiled in place instead of being wrapped, so that calls of the model itself,
  which trainers make for old log-probabilities, run compiled as well. That model, and one that the user compiled in
  place with this backend, is made steady (`dualkv_compile.integrations.in_place`).

This module stands outside the package because importing any part of that imports all of it, which ``import torch``
must not pay for. ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` switches torch's group off; ``import dualkv_compile`` then does
the same.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

WATCHED = "accelerate.accelerator"


def register() -> None:
    """Connect to Accelerate if it is imported, otherwise as soon as it is. May be called any number of times."""
    module = sys.modules.get(WATCHED)
    if module is not None and hasattr(module, "Accelerator"):
        connect(module)
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


class _Waiting(MetaPathFinder):
    """Lets the usual finders find ``accelerate.accelerator``, and connects once it has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != WATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_connect(module: ModuleType) -> None:
            execute(module)
            connect(module)

        spec.loader.exec_module = execute_and_connect  # type: ignore[method-assign]
        return spec


def connect(module: ModuleType) -> None:
    """Add the backend to what ``accelerate.accelerator`` (``module``) knows; once.

    A version of Accelerate that is not built as expected is left as it is: it then refuses the name as before.
    """
    backends = getattr(module, "DynamoBackend", None)
    accelerator = getattr(module, "Accelerator", None)
    if backends is None or not hasattr(accelerator, "prepare_model") or "DUALKV" in backends.__members__:
        return
    member = _add_member(backends, "DUALKV")
    accelerator.prepare_model = _in_place(accelerator.prepare_model, member, backends.NO)  # type: ignore[union-attr]


def _add_member(enumeration: Any, name: str) -> Any:
    """A new member of an enumeration of strings, with itself as its value."""
    member = str.__new__(enumeration, name)
    member._name_ = member._value_ = name
    member.__objclass__ = enumeration
    member._sort_order_ = len(enumeration.__members__)
    setattr(enumeration, name, member)
    enumeration._member_names_.append(name)
    enumeration._member_map_[name] = member
    enumeration._value2member_map_[name] = member
    return member


def _in_place(prepare_model: Callable[..., Any], ours: Any, none: Any) -> Callable[..., Any]:
    """``Accelerator.prepare_model`` that compiles in place, before wrapping, where our backend is asked for."""

    @functools.wraps(prepare_model)
    def prepare(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        plugin = self.state.dynamo_plugin
        # A model that this backend compiles has had the package imported.
        if "dualkv_compile" in sys.modules and hasattr(model, "_compiled_call_impl"):
            from dualkv_compile.integrations.in_place import steady

            steady(model)
        # Regional compilation compiles each layer apart, which is left to Accelerate.
        if plugin.backend is not ours or plugin.use_regional_compilation or not hasattr(model, "_compiled_call_impl"):
            return prepare_model(self, model, *args, **kwargs)
        from dualkv_compile.integrations.in_place import compile_in_place

        compile_in_place(model, **plugin.to_kwargs())
        plugin.backend = none
        try:
            return prepare_model(self, model, *args, **kwargs)
        finally:
            plugin.backend = ours

    return prepare
