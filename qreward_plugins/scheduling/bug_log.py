"""Logs the bugs of the scheduler, which must not stop the calls that they do not concern."""

from __future__ import annotations

import logging

_log = logging.getLogger("qreward_plugins.scheduling")


class BugLog:
    """Logs each kind of bug once, with its traceback, because it may occur at every step."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def add(self, what: str, error: Exception) -> None:
        """Log `error` as a bug. `what` says what it has stopped."""
        key = f"{what} ({type(error).__name__})"
        if key not in self._logged:
            self._logged.add(key)
            _log.error("%s: this is a bug", key, exc_info=error)
