"""What the processes of Ray say beside their results: the warnings of the adapter, and what Python finds wrong.

Each process writes to a file of its own in Ray's session. What counts as wrong is what only the interpreter says, of
tasks, coroutines and sockets that were left behind; ROLL logs much else that looks like an error.
"""

from __future__ import annotations

import re
from pathlib import Path

_SAID = re.compile(r"^(?:WARNING|ERROR):roll_adapter[\w.]*:(.*)$|^(.*\broll_adapter\b.*\[?WARNING.*)$", re.MULTILINE)
_WRONG = re.compile(
    r"^.*(?:was never awaited|exception was never retrieved|was destroyed but it is pending|Unclosed client session"
    r"|Unclosed connection|Exception ignored in|Fatal Python error|Exception in callback).*$",
    re.MULTILINE,
)


class Logs:
    """Reads what is new in the logs of the workers each time it is asked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}

    def take(self) -> dict[str, list[str]]:
        said: list[str] = []
        complaints: list[str] = []
        for path in sorted(self._folder.glob("session_2*/logs/worker-*.err")):
            with path.open(errors="replace") as log:
                log.seek(self._read.get(path, 0))
                text = log.read()
                self._read[path] = log.tell()
            said += [first or second for first, second in _SAID.findall(text)]
            complaints += _WRONG.findall(text)
        return {"said": said, "complaints": complaints}
