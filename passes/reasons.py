"""Why something was not packed: one record per operator that ended a proof."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import torch
import torch.fx as fx

#: A frame of a stack trace; the code line is missing where Python does not know the source.
_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)(?:\n(?!\s*File ")[ \t]*(?P<code>[^\n]*))?'
)

_TORCH = os.path.dirname(torch.__file__) + os.sep


@dataclass(frozen=True)
class Reason:
    """An operator, what about it ended the proof, and where the user wrote it.

    ``location`` is ``file:line in function`` of the innermost Python frame outside of torch, ``code`` the text of
    that line; both are empty where no frame is known (for reasons about inputs or the whole graph).
    """

    operator: str
    message: str
    location: str = ""
    code: str = ""

    def __str__(self) -> str:
        text = f"{self.operator}: {self.message}" if self.operator else self.message
        return f"{text} [{self.location}: {self.code}]" if self.location else text


class Unproven(Exception):
    """Raised by a rule whose conditions do not hold; the text says which."""


class WholeGraphUnsupported(Exception):
    """Raised when no part of a graph may be rewritten (mutation, randomness, unknown higher-order operators)."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


def source_of(node: fx.Node) -> tuple[str, str]:
    """``(location, code)`` of the innermost frame outside of torch in ``node.meta["stack_trace"]``; empty if
    unknown.
    """
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    if not frames:
        return "", ""
    outside = [frame for frame in frames if not frame[0].startswith(_TORCH)]
    file, line, function, code = outside[-1] if outside else frames[-1]
    return f"{file}:{line} in {function}", code.strip()


def operator_name(node: fx.Node) -> str:
    """A short, stable name for the operator of ``node`` (``aten.flip.default`` -> ``flip``)."""
    name = str(node.target)
    parts = name.split(".")
    return parts[1] if len(parts) >= 3 and parts[0] == "aten" else name


def reason_at(node: fx.Node, message: str) -> Reason:
    """The reason ``message`` about ``node``, with the user's source line."""
    location, code = source_of(node)
    return Reason(operator_name(node), message, location, code)
