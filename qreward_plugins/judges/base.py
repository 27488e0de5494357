"""What a judge is to the rest of the core: pure functions from a sample to a request, and from a reply to a verdict.

No judge does I/O, sleeps, retries or knows a source. That keeps every rule about untrusted text and valid verdicts
testable with plain values.
"""

from __future__ import annotations

from typing import Protocol

from ..samples import Cause, Failed, RawScore, Sample, Verdict
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
        """A short hash of how this judge reads replies; part of the journal's key.

        What it asks is no part of it: that is hashed as it is sent.
        """
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

    def mapped(self, raw: RawScore) -> Verdict:
        """The verdict for numbers that this judge read before, perhaps under another reward range.

        Raises `InvalidVerdict` where they are no valid verdict under the present configuration.
        """
        ...

    def floor(self, cause: Cause) -> float | None:
        """The score that stands in for a failure of this cause; None: no number does."""
        ...

    def component_names(self) -> tuple[str, ...]:
        """Names of the components that every verdict of this judge carries, as far as they are known beforehand."""
        ...
