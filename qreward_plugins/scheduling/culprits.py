"""Counts how many different samples must be to blame for the failures of a source.

A response can provoke a failure, so a failure says little about its source until several different samples had it. A
request of several calls fails because of any of them: two failed requests with a common sample prove one culprit only.
So the count is that of failed requests of which no two have a sample in common. It is never too high.
"""

from __future__ import annotations

from collections.abc import Set

_MOST_SHARED = 64
"""Most failed requests of several calls that are remembered; the oldest is forgotten."""


class Culprits:
    """The samples, by number, that failed at one source since it last answered."""

    def __init__(self) -> None:
        self._alone: set[int] = set()
        self._shared: list[frozenset[int]] = []
        """Requests of several calls that no other failure explains."""
        self._least = 0

    def __len__(self) -> int:
        """The least number of samples that can have caused all failures."""
        return self._least

    def __contains__(self, sample: int) -> bool:
        """Whether this sample may be to blame."""
        return sample in self._alone or any(sample in request for request in self._shared)

    def add(self, samples: Set[int]) -> None:
        """Note a failed request, which carried these samples."""
        if len(samples) == 1:
            self._alone |= samples
        elif not any(request <= samples for request in self._shared):
            self._shared = [request for request in self._shared if not samples <= request]
            self._shared.append(frozenset(samples))
        # A sample that failed alone explains the failures of all requests that carried it.
        self._shared = [request for request in self._shared if self._alone.isdisjoint(request)][-_MOST_SHARED:]
        self._least = max(self._least, len(self._alone) + self._apart())

    def clear(self) -> None:
        """Forget them, because the source has answered."""
        if not self._least:
            return
        self._alone.clear()
        self._shared.clear()
        self._least = 0

    def all_failed_alone(self, samples: Set[int]) -> bool:
        """Whether each of these samples failed in a request of its own."""
        return samples <= self._alone

    def _apart(self) -> int:
        """Count shared requests of which no two have a sample in common. Small ones come first, which leaves room for
        more.
        """
        seen: set[int] = set()
        count = 0
        for request in sorted(self._shared, key=len):
            if seen.isdisjoint(request):
                seen |= request
                count += 1
        return count
