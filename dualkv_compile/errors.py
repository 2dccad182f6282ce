"""The exceptions this package raises: each names what was given, what was expected, and what to do."""

from __future__ import annotations


class DualKVError(Exception):
    """Base class of every error raised by dualkv_compile."""


class OptionError(DualKVError, ValueError):
    """An unknown option, a value of the wrong type, or an impossible value."""


class InputError(DualKVError, ValueError):
    """A tensor given to a public function has the wrong shape, dtype or device."""


class RuleError(DualKVError, ValueError):
    """A rule cannot be registered for what it was given, or a registered rule returned something impossible."""


class UnsupportedGraphError(DualKVError, RuntimeError):
    """The graph (or a part of it) could not be proven shareable, and ``on_unsupported="error"`` was asked."""


class VerificationError(DualKVError, RuntimeError):
    """``verify`` found the packed graph's result to differ from the plain graph's."""


class CompilationError(DualKVError, RuntimeError):
    """The rewritten graph was meant to be compiled and was not."""


class RecomputationError(DualKVError, RuntimeError):
    """A graph is recomputed in a backward pass and it cannot be told which prefixes it shared in the forward pass."""
