"""``docs/operators.md`` is what the command prints, and the command prints what is registered."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dualkv_compile import operators, tokenwise
from dualkv_compile.__main__ import main
from dualkv_compile.passes import registry

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "operators.md"


def test_the_document_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["operators"]) == 0
    assert DOCUMENT.read_text() == capsys.readouterr().out, "run: dualkv-compile operators > docs/operators.md"


def test_every_rule_is_listed_and_described_but_those_from_outside() -> None:
    own = torch.library.custom_op(
        "dualkv_rules::listed", lambda x: x.clone(), mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    tokenwise(own)
    text = operators.table()
    for target, entry in registry.rules().items():
        listed = target is not torch.Tag.pointwise and entry.family != registry.USER
        assert (f"`{target}`" in text) == listed, target
    assert "dualkv_rules" not in text
    assert all(len(line.split(" | ")) == 2 for line in text.splitlines() if line.startswith("| `"))
    assert " |  |" not in text


def test_what_the_tag_promises() -> None:
    """The operators that the document leaves to torch's tag, and those it says are excluded."""
    aten = torch.ops.aten
    for target in (aten.silu.default, aten.mul.Tensor):
        assert target not in registry.rules()
        assert registry.lookup(target) is not None
    for target in (aten.silu_.default, aten.rrelu.default, aten.frexp.Tensor, aten.native_dropout.default):
        assert registry.lookup(target) is None
