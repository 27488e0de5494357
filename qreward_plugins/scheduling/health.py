"""The health of a source: whether it answers. It opens and closes the source's circuit breaker.

Four things open the circuit: failures in a row, silence, invalid replies, and refusals (a key, a URL). A response can
provoke each of them, so the circuit opens only if several different samples met the same. One answer closes it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Set
from typing import TYPE_CHECKING

from ..quotas.quota import Quota
from .breaker import SAMPLES_TO_OPEN, Breaker
from .culprits import Culprits
from .silence import DOUBTED_AT, SILENT_AT, Silence
from .validity import Validity

if TYPE_CHECKING:
    from .attempts import Attempt

_log = logging.getLogger("qreward_plugins.scheduling")

FAILURES_TO_AVOID = 3
"""Failures in a row from which the planner counts on other sources only."""
REFUSED_TO_OPEN = 3
"""Different samples refused (401, 403, 404 ...), without an answer in between, that open the circuit."""
PROBES_TO_UNUSABLE = 12
"""Refused probes in a row, of different samples, after which a source is unusable. They follow each other without a
pause, because refusals are quick."""
PROBES_WHILE_UNUSABLE = 3
"""The same for a source that is unusable: then samples that were submitted since fail, too."""


class Health:
    """The health of one source. Times are seconds of the event loop's clock.

    `local`: a function on this machine, which is never silent: if it hangs, the sample is to blame.
    """

    def __init__(self, name: str, quota: Quota, breaker: Breaker, silence: Silence, *, local: bool) -> None:
        self._name, self._quota, self._breaker, self._silence, self._local = name, quota, breaker, silence, local
        self._validity = Validity()
        self.unusable = ""
        """Why it is unusable: it refused so many different samples that no response can have provoked it. Samples that
        are submitted later probe it, and one answer ends this. "" if it is usable."""
        self.answered_at = -math.inf
        """Time of its last reply, valid or not."""
        self.down_for_all = False
        """Whether no sample can be to blame for its last failure."""
        self._refused = Culprits()
        """The samples that it refused since its last answer."""
        self._refused_probes = 0
        self._last_error = ""
        self._silent_senders = 0
        self._open_for_silence = False
        self._logged_error: str | None = None
        """The last logged error of this outage; None if none is logged, or the source has answered since."""

    @property
    def degraded(self) -> bool:
        """Whether most of its last replies were invalid."""
        return self._validity.degraded

    @property
    def reliable(self) -> bool:
        """Whether most of its last replies were valid; `False` while there are too few to tell."""
        return self._validity.reliable

    def judges_since(self, at: float) -> bool:
        """Whether it gave a valid reply after `at`, and not only by chance."""
        return self._validity.judges_since(at)

    def looks_dead(self, now: float) -> bool:
        """Whether answers are overdue, or the last attempts failed."""
        return self._breaker.failures_in_row >= FAILURES_TO_AVOID or self._missing(now) >= DOUBTED_AT

    @property
    def refusing(self) -> bool:
        """Whether it refused samples, so that the next probes follow at once."""
        return bool(self._refused_probes if self.unusable else len(self._refused))

    @property
    def open_for_silence(self) -> bool:
        """Whether the circuit is open because of silence, and nothing has come from the source since."""
        return self._open_for_silence and not self._breaker.closed

    # Ends of attempts

    def heard(self, now: float) -> None:
        """Note that the source ended an attempt: an answer, an error or a refusal."""
        if not self._local:
            self._silence.heard(now)
            self._open_for_silence = False

    def answered(self, now: float, *, said_sent: bool) -> None:
        """Note a reply. `said_sent`: the source reported before that the request was sent."""
        self._refused.clear()
        self._refused_probes = 0
        self.answered_at = now
        self.down_for_all = False
        self._silent_senders += not said_sent
        if self.unusable or self._logged_error is not None:
            self.unusable, self._logged_error = "", None
            _log.warning("source %s answers again", self._name)

    def judged(self, valid: bool, now: float, *, probe: bool, alternative: bool) -> None:
        """Note whether a reply was valid. The circuit of a degraded source opens if there is an
        `alternative`.
        """
        if valid and probe:
            self._validity.forgive()
        self._validity.learn(valid, now)
        if valid or not (alternative and self._validity.degraded):
            self._breaker.succeeded()
        elif probe:
            self._breaker.failed(now, probe=True, in_flight=self._quota.in_flight)
        elif self._breaker.trip(now):
            _log.warning(
                "source %s gives mostly invalid replies: circuit open for %.0f s, then one request probes it",
                self._name,
                self._breaker.wait_s(now),
            )

    def failed(self, now: float, *, probe: bool, samples: Set[int] | None = None, error: str = "") -> bool:
        """Note a transient failure of a request of these samples; return whether the circuit opens because of it."""
        self._last_error = error
        return self._log_outage(
            self._breaker.failed(now, probe=probe, in_flight=self._quota.in_flight, samples=samples)
        )

    def excuses(self, attempt: Attempt) -> bool:
        """Whether its sample cannot be to blame for the failure of `attempt`: the request was not sent, or several
        samples fail and none was answered since this one was submitted.
        """
        if self._local:
            return False
        # A source that has answered without reporting that it sent never reports that.
        unsent = not attempt.sent and not self._silent_senders
        several = len(self._breaker.failing) >= SAMPLES_TO_OPEN and self.answered_at < attempt.job.submitted_at
        self.down_for_all = unsent or several
        return self.down_for_all

    def refused(self, attempt: Attempt, reason: str, now: float, *, certain: bool) -> bool:
        """Note a refusal that may concern all samples (a key, a URL); return whether the source is unusable because of
        it. `certain`: no sample can have provoked it.

        One response can provoke such a refusal, for example by a firewall. Many probes in a row hardly can.
        """
        self._last_error = reason
        self._refused.add(attempt.samples)
        if attempt.decides:
            self._refused_probes += 1
            self._breaker.failed(now, probe=True, in_flight=self._quota.in_flight)
        elif len(self._refused) >= REFUSED_TO_OPEN and self._breaker.trip(now):
            _log.error("source %s refuses its requests, circuit open until it answers a probe: %s", self._name, reason)
        elif attempt.probe:
            self._breaker.abandoned(probe=attempt.decides)
        if certain or self._refused_probes >= (PROBES_WHILE_UNUSABLE if self.unusable else PROBES_TO_UNUSABLE):
            self._refused_probes = 0
            self.mark_unusable(reason, now)
            return True
        return False

    def silent(self, attempt: Attempt, now: float) -> bool:
        """Check for silence when `attempt` has grown older. Return whether the circuit opens, or stays open because
        this attempt is an overdue probe.
        """
        if attempt.probe and not self._breaker.closed:
            overdue = attempt.overdue and not attempt.superseded
            if overdue:
                attempt.superseded = True
                self._breaker.overdue(now)
            return overdue
        opened = self._missing(now) >= SILENT_AT and self._breaker.trip(now)
        if opened:
            self._open_for_silence = True
            self._last_error = "it stopped answering"
        return self._log_outage(opened)

    def mark_unusable(self, reason: str, now: float) -> None:
        """Note that the source is unusable, and log an error."""
        self._breaker.trip(now)
        if not self.unusable:
            _log.error("source %s is unusable, samples without another source fail at once: %s", self._name, reason)
        self.unusable = reason

    # State for people

    def state(self, *, paused: bool) -> str:
        """The state in one or two words."""
        if self.unusable or (self.refusing and not self._breaker.closed):
            return "unusable"
        if paused:
            return "paused"
        if not self._breaker.closed:
            return "down"
        return "degraded" if self.degraded else "up"

    def problem(self, *, paused: bool) -> str:
        """Why it takes no samples now, with its last error; "" if only its limits hold them back."""
        if self.unusable:
            return f"{self._name} is unusable ({self.unusable})"
        if not self._breaker.closed:
            problem = f"is down ({self._last_error})" if self._last_error else "has an open circuit"
            return f"{self._name} {problem}"
        return f"{self._name} throttles" if paused else ""

    def _missing(self, now: float) -> float:
        return 0.0 if self._local else self._silence.missing(now)

    def _log_outage(self, opened: bool) -> bool:
        # One line for a cause. A text that differs each time (a request's number in it) gets one for the 1st, 2nd, 4th,
        # 8th ... probe that failed: a source that is down may be probed every second.
        probes = self._breaker.probes
        if opened and self._last_error != self._logged_error and not probes & (probes - 1):
            self._logged_error = self._last_error
            _log.warning(
                "source %s is down (%s); one request at a time probes it until it answers", self._name, self._last_error
            )
        return opened
