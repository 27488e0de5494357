"""`qreward` on the command line: check a configuration, score a file, run a judge server."""

from __future__ import annotations

from .app import main

__all__ = ["main"]
