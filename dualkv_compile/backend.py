"""The ``torch.compile`` backend ``"dualkv"``, found through the entry point group ``torch_dynamo_backends``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx

from dualkv_compile.compiled import compile_now
from dualkv_compile.errors import InputError, UnsupportedGraphError
from dualkv_compile.options import Options
from dualkv_compile.passes.pipeline import Analysis, analyse, mentions_attention
from dualkv_compile.passes.reasons import Reason
from dualkv_compile.runtime import Dispatcher, Refused, can_drop_padding

log = logging.getLogger("dualkv_compile")
_told: set[str] = set()


def dualkv(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph so that every distinct prefix of its batch is computed once.

    Use as ``torch.compile(model, backend="dualkv", options={...})``; see `Options` for the options. Where sharing
    cannot be proven exact, the untouched graph is compiled by Inductor and the reason is logged and counted.

    Raises OptionError for a bad option. UnsupportedGraphError (with ``on_unsupported="error"``) is raised by the
    compiled function, since an error raised here would only make Dynamo try smaller graphs.
    """
    parsed = Options.parse(options, mode)
    error: Exception | None = None
    try:
        analysis = analyse(gm, example_inputs, strategy=parsed.attention, compiled=parsed.compiler == "inductor")
    except InputError as wrong:  # the way of attention that was asked for cannot run
        return _raiser(wrong)
    except Exception as caught:  # any failure of ours must end in the plain graph, counted and told
        error = caught
        failure = Reason("", f"the passes failed ({type(error).__name__}: {error})")
        analysis = Analysis(has_attention=mentions_attention(gm), reasons=[failure])
    _tell(analysis, error)
    if analysis.has_attention:
        _tell_last_graph()
    if analysis.reasons and parsed.on_unsupported == "error" and analysis.has_attention:
        return _raiser(UnsupportedGraphError("not (completely) shareable: " + "; ".join(map(str, analysis.reasons))))
    if analysis.packed is not None:
        if parsed.padding == "drop" and not can_drop_padding(analysis.packed):
            log.warning("padding='drop' has no effect: the masks of this graph do not tell which positions are padding")
        dynamic = any(isinstance(example, torch.SymInt) for example in example_inputs)
        # Dynamo does not trace a graph that holds the higher-order operator of flex_attention a second time.
        plain = compile_now(gm, example_inputs, parsed) if analysis.conditions else None
        return Dispatcher(gm, analysis, parsed, dynamic=dynamic, plain=plain)
    compiled = compile_now(gm, example_inputs, parsed)
    return Refused(compiled, analysis.reasons) if analysis.has_attention else compiled


def _raiser(error: Exception) -> Callable[..., Any]:
    """Raise at the call: an error raised while compiling would only make Dynamo try smaller graphs."""

    def refuse(*args: Any) -> Any:
        raise error

    return refuse


def _tell_last_graph() -> None:
    """Log once that a frame has used up what Dynamo keeps for it: from its next change on, it runs uncompiled."""
    compilation = torch._guards.CompileContext.current_compile_id()
    if compilation is None or compilation.frame_compile_id is None:
        return
    limit = torch._dynamo.config.recompile_limit
    if compilation.frame_compile_id == limit - 1 and "recompile_limit" not in _told:
        _told.add("recompile_limit")
        log.warning(
            "a part of the model was compiled %d times, the most that Dynamo allows (torch._dynamo.config."
            "recompile_limit): from its next change on it runs uncompiled and shares nothing. TORCH_LOGS=recompiles "
            "tells what changes; with TRL, dualkv_compile.integrations.trl.share_prefixes(trainer) removes the known "
            "causes",
            limit,
        )


def _tell(analysis: Analysis, error: Exception | None = None) -> None:
    """Log each reason once in the process, with the traceback of the failure if it was one."""
    for reason in analysis.reasons if analysis.has_attention else ():
        text = str(reason)
        if text not in _told:
            _told.add(text)
            what = "this part runs as written" if analysis.packed else "the plain graph runs"
            log.warning("%s; %s", text, what, exc_info=error)
    if analysis.packed is not None:
        log.info(
            "packed %d of %d attentions, %.1f%% of the operations",
            analysis.packed_attentions,
            analysis.attentions,
            100 * analysis.share,
        )
