"""What a judge is to the rest of the core: pure functions from a sample to a request, and from a reply to a verdict.

No judge does I/O, sleeps, retries or knows a source. That keeps every rule about untrusted text and valid verdicts
testable with plain values.
"""

from __future__ import annotations

from typing import Protocol

from ..samples import Cause, Failed, Sample, Verdict
from ..sources.base import Reply, Request


class Judge(Protocol):
    """Turns a sample into a request, and the reply into a verdict."""

    @property
    def name(self) -> str: ...

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources that may answer."""
        ...

    @property
    def invalid_retries(self) -> int:
        """Further tries after an invalid verdict."""
        ...

    @property
    def fingerprint(self) -> str:
        """A short hash of everything that changes what this judge would say; part of the journal's key."""
        ...

    def screen(self, sample: Sample) -> Failed | None:
        """Return the failure of a sample that needs no judge to fail (an empty response), else None."""
        ...

    def request(self, sample: Sample, *, attempt: int) -> Request:
        """Build the request of the `attempt`-th try (from 0); another attempt draws another nonce.

        Raises `InputError` when the sample cannot be turned into a request.
        """
        ...

    def verdict(self, request: Request, reply: Reply) -> Verdict:
        """Read the reply, strictly. Raises `InvalidVerdict`."""
        ...

    def floor(self, cause: Cause) -> float | None:
        """The score that stands in for a failure of this cause; None: no number does."""
        ...

    def component_names(self) -> tuple[str, ...]:
        """Names of the components that every verdict of this judge carries, as far as they are known beforehand."""
        ...
