"""The backend's options: one dataclass, checked when the backend is called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from dualkv_compile.errors import OptionError

#: Ways to compute attention on the packed tokens ("auto" chooses by capability).
ATTENTION = ("auto", "regions", "dense", "blocks", "flex", "flex_flash")
PADDING = ("keep", "drop")
ON_UNSUPPORTED = ("fallback", "error")
COMPILERS = ("inductor", "aot_eager", "eager")
VERIFY = (False, True, "first", "grad")
MODES = (None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True)
class Options:
    """What ``torch.compile(..., backend="dualkv", options={...})`` accepts.

    ``min_shared``
        Shortest common prefix, in tokens, that is worth a branch of the tree.
    ``min_saving``
        Tokens given divided by tokens computed under which the plain graph runs; 0 packs whenever it is proven exact.
    ``padding``
        "keep" computes every grid position as the plain graph does; "drop" also skips the positions that the attention
        mask declares padding, and returns zeros there.
    ``attention``
        "auto", or the name of one way to compute attention on the packed tokens: "regions" (fused CPU kernels on the
        tree's rectangles), "dense" (the same with torch's fused CUDA kernels), "blocks" (plain matrix products,
        anywhere), "flex" (FlexAttention's Triton kernel; forward only on the CPU) or "flex_flash" (FlexAttention
        through flash-attn-4).
    ``verify``
        Run the plain graph too and compare: "first" (the first packed call of each graph), True (every call), "grad"
        (every call, gradients as well). A difference raises VerificationError.
    ``on_unsupported``
        "fallback" runs the plain graph and says why; "error" raises UnsupportedGraphError.
    ``compiler``
        What compiles both graphs: "inductor", or "aot_eager" / "eager" for debugging and exact tests.
    ``inductor``
        Inductor configuration, passed on.
    ``mode``
        Inductor's mode (torch.compile refuses ``mode=`` beside ``options=``).
    """

    min_shared: int = 64
    min_saving: float = 1.1
    padding: str = "keep"
    attention: str = "auto"
    verify: bool | str = False
    on_unsupported: str = "fallback"
    compiler: str = "inductor"
    inductor: Mapping[str, Any] = field(default_factory=dict)
    mode: str | None = None

    @staticmethod
    def parse(options: Mapping[str, Any] | None, mode: str | None = None) -> Options:
        """Check user options. Raises OptionError naming the option, what came, and what is allowed."""
        if options is not None and not isinstance(options, Mapping):
            raise OptionError(f"options must be a dict, got {options!r}")
        given = dict(options or {})
        names = [f.name for f in fields(Options)]
        for key in given:
            if key not in names:
                raise OptionError(f"unknown option {key!r}; allowed are {', '.join(names)}")
        if mode is not None:
            given.setdefault("mode", mode)
        result = Options(**given)
        _integer("min_shared", result.min_shared, least=1)
        _number("min_saving", result.min_saving, least=0)
        _choice("padding", result.padding, PADDING)
        _choice("attention", result.attention, ATTENTION)
        _choice("verify", result.verify, VERIFY)
        _choice("on_unsupported", result.on_unsupported, ON_UNSUPPORTED)
        _choice("compiler", result.compiler, COMPILERS)
        _choice("mode", result.mode, MODES)
        _inductor(result.inductor)
        if result.compiler != "inductor" and (result.inductor or result.mode not in (None, "default")):
            raise OptionError(
                f"options 'inductor' and 'mode' need compiler='inductor', got compiler={result.compiler!r}"
            )
        if result.compiler != "inductor" and result.attention.startswith("flex"):
            # Any other compiler would run FlexAttention's dense form, which computes every score.
            raise OptionError(
                f"option 'attention'={result.attention!r} needs compiler='inductor', got compiler={result.compiler!r}"
            )
        return result


def _integer(name: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(f"option {name!r} must be an integer >= {least}, got {value!r}")


def _number(name: str, value: object, *, least: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < float("inf"):
        raise OptionError(f"option {name!r} must be a finite number >= {least}, got {value!r}")


def _choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if not any(type(value) is type(item) and value == item for item in allowed):
        raise OptionError(f"option {name!r} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def _inductor(value: object) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise OptionError(f"option 'inductor' must be a dict of Inductor settings, got {value!r}")
    if not value:
        return
    from torch._inductor import config

    known = config.get_config_copy()
    for key in value:
        if key.replace("-", "_") not in known:
            raise OptionError(f"option 'inductor' has the unknown setting {key!r} (see torch._inductor.config)")
