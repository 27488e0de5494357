"""The command `qreward`: check a configuration, score a file, plan a step, run a judge server."""

from __future__ import annotations

import sys

_INTERRUPTED = 130


def main() -> None:
    """Run the command line. Ctrl-C ends it with code 130 and no traceback, also while its modules are imported, which
    takes a second.
    """
    try:
        from .app import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


__all__ = ["main"]
