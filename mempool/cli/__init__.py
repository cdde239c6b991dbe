"""The ``mempool`` command: one file per verb; the verb's docstring is the help text."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit with a documented exit code."""
    if sys.argv[1:2] == ["run"]:
        from mempool.cli.run.exec import launch

        launch(sys.argv[2:])
    try:
        from mempool.cli.app import call

        code = call(sys.argv[1:])
    except KeyboardInterrupt:  # before a verb began
        sys.stderr.write("mempool: interrupted\n")
        code = 130
    sys.exit(code)
