"""The command line, ``dualkv-compile``, also as ``python -m dualkv_compile``: the demo, and the table of operators."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dualkv_compile import operators

_TRANSFORMERS_MISSING = "the demo needs transformers: pip install 'dualkv-compile[hf]'"


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse ``arguments`` (default: those of the process), run the command, and give its exit status."""
    parser = argparse.ArgumentParser(prog="dualkv-compile", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("operators", help="print which operators have a rule, as docs/operators.md")
    demo = commands.add_parser("demo", help="a GRPO step of SmolLM2-135M three ways: eager, inductor, dualkv")
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["operators"]:
        parser.parse_args(given)
        print(operators.table(), end="")
        return 0
    try:
        from dualkv_compile.demo.run import add_arguments, run
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        parser.exit(2, _TRANSFORMERS_MISSING + "\n")
    add_arguments(demo)
    return run(parser.parse_args(given))


if __name__ == "__main__":
    sys.exit(main())
