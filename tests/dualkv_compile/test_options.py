"""Options: every wrong one is refused with what is allowed, before anything is compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dualkv_compile import OptionError, Options
from dualkv_compile.backend import dualkv
from dualkv_compile.compiled import _patches


def test_defaults() -> None:
    options = Options.parse(None)
    assert options == Options.parse({}) == Options()
    assert (options.min_shared, options.min_saving, options.padding) == (64, 1.1, "keep")
    assert (options.attention, options.verify, options.on_unsupported) == ("auto", False, "fallback")
    assert (options.compiler, dict(options.inductor), options.mode) == ("inductor", {}, None)


@pytest.mark.parametrize(
    "given",
    [
        {"min_shared": 1, "min_saving": 0},
        {"min_saving": 1e9, "padding": "drop"},
        {"verify": "first"},
        {"verify": True},
        {"verify": "grad"},
        {"attention": "blocks", "on_unsupported": "error"},
        {"compiler": "eager", "mode": "default"},
        {"mode": "reduce-overhead"},
        {"inductor": {"max_autotune": True}},
        {"inductor": {"max-autotune": True}},
    ],
)
def test_what_is_allowed(given: dict[str, Any]) -> None:
    options = Options.parse(given)
    for name, value in given.items():
        assert getattr(options, name) == value


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("min_shared", 0, "integer >= 1"),
        ("min_shared", True, "integer >= 1"),
        ("min_shared", 64.0, "integer >= 1"),
        ("min_saving", -0.1, ">= 0"),
        ("min_saving", float("nan"), ">= 0"),
        ("min_saving", float("inf"), "finite"),
        ("min_saving", "1", ">= 0"),
        ("padding", "remove", "'keep', 'drop'"),
        ("attention", "flash", "'auto', 'regions', 'dense', 'blocks', 'flex', 'flex_flash'"),
        ("attention", [], "'auto', 'regions', 'dense', 'blocks', 'flex', 'flex_flash'"),
        ("verify", 1, "False, True, 'first', 'grad'"),
        ("verify", "always", "False, True, 'first', 'grad'"),
        ("on_unsupported", None, "'fallback', 'error'"),
        ("compiler", "gcc", "'inductor', 'aot_eager', 'eager'"),
        ("mode", "fast", "'reduce-overhead'"),
        ("inductor", ["max_autotune"], "dict"),
        ("inductor", {"no_such_setting": 1}, "'no_such_setting'"),
        ("min_share", 1, "allowed are min_shared, min_saving"),
    ],
)
def test_what_is_refused(name: str, value: object, allowed: str) -> None:
    with pytest.raises(OptionError) as caught:
        Options.parse({name: value})
    assert repr(name) in str(caught.value)
    assert allowed in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("extra", [{"mode": "reduce-overhead"}, {"inductor": {"max_autotune": True}}])
def test_inductor_settings_need_inductor(extra: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="need compiler='inductor'"):
        Options.parse({"compiler": "eager", **extra})


def test_mode_reaches_inductor_either_way() -> None:
    for options in (Options.parse({"mode": "max-autotune"}), Options.parse(None, "max-autotune")):
        assert options.mode == "max-autotune"
        assert _patches(options)["max_autotune"] is True
    # CUDA graphs are recorded for fixed shapes only: the number of tokens changes from call to call.
    assert _patches(Options.parse({"mode": "reduce-overhead"}))["triton.cudagraph_skip_dynamic_graphs"] is True
    assert _patches(Options.parse({"inductor": {"max-autotune": True}})) == {"max_autotune": True}
    assert _patches(Options()) == {}


def test_a_bad_option_reaches_the_user_of_torch_compile() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x + 1, backend=dualkv, options={"padding": "remove"})
    with pytest.raises(Exception, match=r"option 'padding' must be one of 'keep', 'drop', got 'remove'"):
        compiled(torch.ones(2))


def test_torch_compile_passes_mode_alone() -> None:
    torch._dynamo.reset()
    seen: list[str | None] = []

    def spy(gm: Any, inputs: Any, **kwargs: Any) -> Any:
        seen.append(kwargs.get("mode"))
        return dualkv(gm, inputs, options={"compiler": "eager"})

    torch.compile(lambda x: x + 1, backend=spy, mode="max-autotune")(torch.ones(2))
    assert seen == ["max-autotune"]
