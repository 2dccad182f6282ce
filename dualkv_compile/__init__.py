"""A torch.compile backend that computes every repeated prompt of a batch once.

Use::

    model = torch.compile(model, backend="dualkv")
"""

import dualkv_autoload
from dualkv_compile.attention import packed_attention
from dualkv_compile.errors import (
    CompilationError,
    DualKVError,
    InputError,
    OptionError,
    RecomputationError,
    RuleError,
    UnsupportedGraphError,
    VerificationError,
)
from dualkv_compile.explain import Explanation, explain
from dualkv_compile.options import Options
from dualkv_compile.plan import PrefixPlan
from dualkv_compile.published import attach, shared_prefixes
from dualkv_compile.rules import register_rule, tokenwise
from dualkv_compile.statistics import reset_stats, stats

# Where torch did not call it: TORCH_DEVICE_BACKEND_AUTOLOAD=0.
dualkv_autoload.register()

__version__ = "0.1.0"

__all__ = [
    "CompilationError",
    "DualKVError",
    "Explanation",
    "InputError",
    "OptionError",
    "Options",
    "PrefixPlan",
    "RecomputationError",
    "RuleError",
    "UnsupportedGraphError",
    "VerificationError",
    "attach",
    "explain",
    "packed_attention",
    "register_rule",
    "reset_stats",
    "shared_prefixes",
    "stats",
    "tokenwise",
]
