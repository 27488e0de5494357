"""The command `qreward`: check a configuration, score a file, plan a step, run a judge server."""

from __future__ import annotations

from .app import main

__all__ = ["main"]
