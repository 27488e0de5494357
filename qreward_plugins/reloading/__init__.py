"""Reload: another configuration for an engine that runs, applied as a whole between two steps of its event loop."""

from __future__ import annotations

from .difference import Change, Difference, difference
from .reloader import Reloader
from .watcher import Watch, watch_file

__all__ = ["Change", "Difference", "Reloader", "Watch", "difference", "watch_file"]
