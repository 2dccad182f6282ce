"""Compiling a graph or a function lazily, by a nested ``torch.compile``.

A GraphModule made during a backend call cannot be handed to ``torch.compile``: its frames are on Dynamo's skip list,
and it would run uncompiled without a word. So each graph gets a generated function of its own (its own code object, so
that guards and recompile limits of different graphs stay apart) that calls it, compiled with ``fullgraph=True``, and
the compilations are counted where they happen, in the inner backend.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch._dynamo.exc import FailOnRecompileLimitHit

from dualkv_compile.errors import CompilationError
from dualkv_compile.options import Options
from dualkv_compile.statistics import STATISTICS

#: One graph meets many modes: gradients on, off, inference, autocast, deterministic, one token, unusual strides, ...
RECOMPILE_LIMIT = 64
_HAS_LIMIT = "recompile_limit" in inspect.signature(torch.compile).parameters

#: Dynamo remembers sizes by file, line and name of a function: each generated function gets a number of its own.
_numbers = itertools.count()


def compile_now(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    """Compile ``gm`` at once with the compiler that ``options`` name."""
    STATISTICS.add(graphs_compiled=1)
    if options.compiler == "eager":
        forward: Callable[..., Any] = gm.forward
        return forward
    if options.compiler == "aot_eager":
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager(gm, list(example_inputs))
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(gm, list(example_inputs), config_patches=_patches(options))
    result: Callable[..., Any] = compiled
    return result


def _patches(options: Options) -> dict[str, Any]:
    patches: dict[str, Any] = {}
    if options.mode not in (None, "default"):
        from torch._inductor import list_mode_options

        patches.update(list_mode_options(options.mode))
        # A CUDA graph would be recorded for each number of tokens; only fixed shapes may be recorded.
        patches["triton.cudagraph_skip_dynamic_graphs"] = True
    patches.update({key.replace("-", "_"): value for key, value in options.inductor.items()})
    return patches


class CompiledFunction:
    """A function that is compiled when first called, and again for each new kind of call.

    Args:
        function: has a code object of its own, see :func:`generated_function`.
        options: name the compiler.
        dynamic: whether sizes are symbolic from the start; inputs whose first dimension changes from call to call are
            marked by the caller.
        name: for messages.

    ``compilations`` counts inner compilations. Raises CompilationError if a call ran without ever being compiled, or
    would need more than ``limit`` compilations.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        options: Options,
        *,
        dynamic: bool,
        name: str,
        limit: int = RECOMPILE_LIMIT,
    ) -> None:
        self.compilations = 0
        self._options = options
        self._name = name
        self._limit = limit
        extra: dict[str, Any] = {"recompile_limit": limit} if _HAS_LIMIT else {}
        self._function = torch.compile(
            function, backend=self._inner, fullgraph=True, dynamic=True if dynamic else None, **extra
        )

    def _inner(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.compilations += 1
        # A backward that fails to compile must fail now, while the plain graph can still take the call.
        with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
            return compile_now(gm, example_inputs, self._options)

    def __call__(self, *args: Any) -> Any:
        """Run the function, compiling it first if this kind of call is new."""
        if _HAS_LIMIT:
            limit: Any = contextlib.nullcontext()
        else:
            limit = torch._dynamo.config.patch(recompile_limit=self._limit, cache_size_limit=self._limit)
        try:
            with limit:
                result = self._function(*args)
        except FailOnRecompileLimitHit as error:
            raise CompilationError(
                f"the {self._name} graph was compiled {self.compilations} times, and this call would need it once "
                "more: it meets too many kinds of calls (TORCH_LOGS=recompiles tells which)"
            ) from error
        if self.compilations == 0:
            raise CompilationError(f"the {self._name} graph ran without being compiled")
        return result


class CompiledGraph(CompiledFunction):
    """A graph as a `CompiledFunction`."""

    def __init__(self, gm: fx.GraphModule, options: Options, *, dynamic: bool, name: str) -> None:
        for module in gm.modules():
            if isinstance(module, fx.GraphModule):
                module.recompile()
                # Lazily generated source would be generated, and skipped, while Dynamo traces the call.
                real_recompile = getattr(module, "real_recompile", None)
                if real_recompile is not None:
                    real_recompile()
        function = generated_function(name, "*args", "graph(*args)", {"graph": gm})
        super().__init__(function, options, dynamic=dynamic, name=name)


def generated_function(name: str, parameters: str, result: str, namespace: dict[str, Any]) -> Callable[..., Any]:
    """``def name(parameters): return result`` over ``namespace``, with a code object that no other function shares."""
    source = f"def {name}({parameters}):\n    return {result}\n"
    exec(compile(source, f"<dualkv {name} {next(_numbers)}>", "exec"), namespace)
    function: Callable[..., Any] = namespace[name]
    return function
