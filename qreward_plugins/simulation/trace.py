"""What happened in a simulated run, line by line: two runs are the same if their traces are, byte for byte."""

from __future__ import annotations


class Trace:
    """A record of a run in text: one line each for what was sent, answered, throttled, failed and cancelled.

    A line is the time in seconds with six decimals, the source, the sample, and what happened.
    """

    def __init__(self) -> None:
        self._lines: list[str] = []

    def note(self, time_s: float, source: str, sample: str, what: str) -> None:
        """Write one line."""
        self._lines.append(f"{time_s:.6f} {source} {sample} {what}\n")

    def __len__(self) -> int:
        return len(self._lines)

    def __str__(self) -> str:
        return "".join(self._lines)
