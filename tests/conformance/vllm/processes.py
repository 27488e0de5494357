"""Finds the processes of servers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit


def servers(url: str) -> list[int]:
    """The processes of the server at `url`, other than guards, whose command lines name its port."""
    return [pid for pid in processes(str(urlsplit(url).port)) if os.getpgid(pid) != pid]


def owner_of(server: int) -> int:
    """The process that started a server: its guard, which leads its session, has the number as its first argument."""
    words = Path(f"/proc/{os.getsid(server)}/cmdline").read_bytes().decode().split("\0")
    return int(words[next(at for at, word in enumerate(words) if word.endswith("guard.py")) + 1])


def members(group: int) -> list[int]:
    return [pid for pid in all_processes() if group_of(pid) == group]


def all_processes() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def processes(*words: str) -> list[int]:
    """The processes, other than guards, whose command lines hold all of these words."""
    found = []
    for pid in all_processes():
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if all(any(word in part for part in line) for word in words) and not any("guard.py" in part for part in line):
            found.append(pid)
    return found
