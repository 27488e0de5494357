"""The health of a source: whether it answers, and what speaks against it. It drives the source's circuit breaker.

Four things speak against a source: failures in a row, silence, replies that are no valid verdicts, and refusals (a key,
a URL). A response can provoke each of them, so a source is given a rest only for what several different samples met,
and one answer clears it.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from ..quotas import Quota
from .breaker import SAMPLES_TO_OPEN, Breaker
from .silence import DOUBTED_AT, SILENT_AT, Silence
from .validity import Validity

if TYPE_CHECKING:
    from .attempts import Attempt

_log = logging.getLogger("qreward_plugins.scheduling")

FAILURES_TO_DOUBT = 3
"""Failures in a row from which on nothing is planned with a source."""
REFUSED_TO_DOUBT = 3
"""Different samples refused (401, 403, 404 ...), without an answer in between, from which on a source is probed."""
PROBES_TO_OUT = 12
"""Probes in a row, of different samples, that are refused before a source is out. They follow at once: it is quick."""
PROBES_OF_OUT = 3
"""The same for a source that is out already, before what has been handed in since then is failed, too."""


class Health:
    """How one source is. Times are seconds of the event loop's clock.

    `local`: a function of this machine answers, so what hangs there is the sample, and the source is never silent.
    """

    def __init__(self, name: str, quota: Quota, breaker: Breaker, silence: Silence, *, local: bool) -> None:
        self._name, self._quota, self._breaker, self._silence, self._local = name, quota, breaker, silence, local
        self._validity = Validity()
        self.unusable = ""
        """Why this source is out: it refused so many different samples that no response can have provoked it. It is
        probed with what is handed in from then on, and one answer brings it back. Empty: it is not out."""
        self.answered_at = -math.inf
        """When it gave the last reply, whatever that was."""
        self.down_for_all = False
        """Whether its last failure can be no sample's fault."""
        self._refused: set[int] = set()
        self._refused_probes = 0
        self._last_error = ""
        self._silent_senders = 0
        self._silenced = False
        self._told_down: str | None = None
        """The error that the log has of this outage; None: it has none, or the source has answered since."""

    @property
    def garbled(self) -> bool:
        """Whether most of its last replies were no valid verdicts."""
        return self._validity.garbled

    def judges_since(self, at: float) -> bool:
        """Whether it gave valid verdicts after `at`, and not only by chance."""
        return self._validity.judges_since(at)

    def looks_dead(self, now: float) -> bool:
        """Whether answers are missing that should have come by now, or the last ones were failures."""
        return self._breaker.failures_in_row >= FAILURES_TO_DOUBT or self._missing(now) >= DOUBTED_AT

    @property
    def in_doubt(self) -> bool:
        """Whether it refused several samples, and a few more must show at once whether it is out."""
        return bool(self._refused_probes if self.unusable else self._refused)

    @property
    def resting_in_silence(self) -> bool:
        """Whether the source rests because it fell silent, and nothing has come from it since."""
        return self._silenced and not self._breaker.closed

    # What attempts tell

    def heard(self, now: float) -> None:
        """Note that an attempt ended by what the source did, whatever that was."""
        self._silence.heard(now)
        self._silenced = False

    def answered(self, now: float, *, said_sent: bool) -> None:
        """Note a reply. `said_sent`: the source had told that the request was sent."""
        self._refused.clear()
        self._refused_probes = 0
        self.answered_at = now
        self.down_for_all = False
        self._silent_senders += not said_sent
        if self.unusable or self._told_down is not None:
            self.unusable, self._told_down = "", None
            _log.warning("source %s answers again", self._name)

    def judged(self, valid: bool, now: float, *, probe: bool, alternative: bool) -> None:
        """Note whether a reply was a valid verdict. A garbled source rests, if there is an `alternative` to it."""
        if valid and probe:
            self._validity.forgive()
        self._validity.learn(valid, now)
        if valid or not (alternative and self._validity.garbled):
            self._breaker.succeeded()
        elif probe:
            self._breaker.failed(now, probe=True, in_flight=self._quota.in_flight)
        elif self._breaker.trip(now):
            _log.warning(
                "source %s answers mostly with invalid verdicts: it rests for %.0f s, then one request probes it",
                self._name,
                self._breaker.wait_s(now),
            )

    def failed(self, now: float, *, probe: bool, sample: int | None = None, error: str = "") -> bool:
        """Note a transient failure of a sample; return whether the source is given a rest because of it."""
        self._last_error = error
        return self._rests(self._breaker.failed(now, probe=probe, in_flight=self._quota.in_flight, sample=sample))

    def excuses(self, attempt: Attempt) -> bool:
        """Whether the failure of `attempt` can be no fault of its sample: nothing of it was sent, or several samples
        fail and none was answered since it came.
        """
        if self._local:
            return False
        # A source that answers what it never said it sent does not say when it sends.
        unsent = not attempt.sent and not self._silent_senders
        several = len(self._breaker.failing) >= SAMPLES_TO_OPEN and self.answered_at < attempt.job.submitted_at
        self.down_for_all = unsent or several
        return self.down_for_all

    def refused(self, attempt: Attempt, reason: str, now: float, *, certain: bool) -> bool:
        """Note that the source refused a sample in a way that may concern all of them (a key, a URL); return whether it
        is out for that. `certain`: no sample can have provoked it.

        One response can provoke such a refusal, as of a firewall; many in a row, asked for one by one, hardly can.
        """
        self._last_error = reason
        self._refused.add(attempt.job.sequence)
        if attempt.decides:
            self._refused_probes += 1
            self._breaker.failed(now, probe=True, in_flight=self._quota.in_flight)
        elif len(self._refused) >= REFUSED_TO_DOUBT and self._breaker.trip(now):
            _log.error("source %s is taken out until it answers a probe: %s", self._name, reason)
        elif attempt.probe:
            self._breaker.abandoned(probe=attempt.decides)
        if certain or self._refused_probes >= (PROBES_OF_OUT if self.unusable else PROBES_TO_OUT):
            self._refused_probes = 0
            self.take_out(reason, now)
            return True
        return False

    def silent(self, attempt: Attempt, now: float) -> bool:
        """Whether the source is given a rest now because it fell silent, as `attempt` shows, which has grown older."""
        if attempt.probe and not self._breaker.closed:
            overdue = attempt.overdue and not attempt.superseded
            if overdue:
                attempt.superseded = True
                self._breaker.overdue(now)
            return overdue
        opened = self._missing(now) >= SILENT_AT and self._breaker.trip(now)
        if opened:
            self._silenced = True
            self._last_error = "it fell silent"
        return self._rests(opened)

    def take_out(self, reason: str, now: float = 0.0) -> None:
        """Note that the source is out, and say so loudly."""
        self._breaker.trip(now)
        if not self.unusable:
            _log.error("source %s is out, what no other source can take fails at once: %s", self._name, reason)
        self.unusable = reason

    # What people are told

    def state(self, *, paused: bool) -> str:
        """One word or two for people."""
        if self.unusable or (self.in_doubt and not self._breaker.closed):
            return "out"
        if paused:
            return "paused"
        if not self._breaker.closed:
            return "resting"
        return "garbled" if self.garbled else "up"

    def trouble(self, *, paused: bool) -> str:
        """Why it takes no samples now, with the last error; empty where only its limits hold them back."""
        if self.unusable:
            return f"{self._name} is out ({self.unusable})"
        if not self._breaker.closed:
            return f"{self._name} is down ({self._last_error})" if self._last_error else f"{self._name} rests"
        return f"{self._name} throttles" if paused else ""

    def _missing(self, now: float) -> float:
        return 0.0 if self._local else self._silence.missing(now)

    def _rests(self, opened: bool) -> bool:
        # One line for a cause. A text that differs each time (a request's number in it) gets one for the 1st, 2nd, 4th,
        # 8th ... probe that failed: a source that is down may be probed every second.
        probes = self._breaker.probes
        if opened and self._last_error != self._told_down and not probes & (probes - 1):
            self._told_down = self._last_error
            _log.warning(
                "source %s is down (%s); one request at a time probes it until it answers", self._name, self._last_error
            )
        return opened
