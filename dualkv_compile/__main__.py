"""The command line: ``dualkv-compile demo``, also as ``python -m dualkv_compile demo``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

_TRANSFORMERS_MISSING = "the demo needs transformers: pip install 'dualkv-compile[hf]'"


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse ``arguments`` (default: those of the process), run the command, and give its exit status."""
    parser = argparse.ArgumentParser(prog="dualkv-compile", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="a GRPO step of SmolLM2-135M three ways: eager, inductor, dualkv")
    try:
        from dualkv_compile.demo.run import add_arguments, run
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        parser.exit(2, _TRANSFORMERS_MISSING + "\n")
    add_arguments(demo)
    return run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
