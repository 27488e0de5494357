"""The trace of a simulated run. Two runs are the same if their traces are equal."""

from __future__ import annotations


class Trace:
    """One line for each request that was sent, answered, throttled, failed or cancelled.

    A line has the time in seconds with six decimals, the source, the sample, and the event.
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
