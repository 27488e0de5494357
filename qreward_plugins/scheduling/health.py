"""The health of a source: whether it answers. It opens and closes the source's circuit breaker.

The circuit breaker keeps samples away from a source that does not answer, and lets single probes pass. Without it a
source that refuses at once would look like the fastest of all, and every waiting sample would use up its attempts there
instead of waiting a little for a healthy source. While it is open, probes follow each other at the pace that
`Health.pace_s` says.

Four things open the circuit: failures in a row, silence, invalid replies, and refusals (a key, a URL). A response can
provoke each of them, so the circuit opens only if several different samples met the same. One answer closes it.

Silence: a source that accepts requests and never answers fails none of them until a time limit of minutes has passed.
The ages of its attempts tell earlier that it is down: if it were well, some of them would have been answered. A source
that has never answered may be loading its model. It is silent only while others answer, and are far quicker.

Invalid replies: a source that answers every sample with prose is broken. A source that answers some samples with prose
and others validly was provoked by those responses. Two measures tell these apart, because a batch may hold many
responses that provoke. A source is *degraded* if most of its last replies are invalid: other sources are preferred
then. It *can judge* if a small share of its replies over a longer time is valid.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Set
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .attempts import Attempt
    from .latency import Tail
    from .upstream import Upstream

_log = logging.getLogger("qreward_plugins.scheduling")

FAILURES_TO_OPEN = 5
"""Fewest failures in a row that open it."""
SHARE_TO_OPEN = 0.25
"""Failures in a row that open it, as a share of the attempts in flight. Errors come quicker than answers, so the first
ends of a burst are failures even if only one request in ten fails."""
SAMPLES_TO_OPEN = 3
"""Different samples among those failures, as long as others are in flight: a single sample may be to blame itself."""
_MOST_CULPRITS = 64

REFUSED_TO_OPEN = 3
"""Different samples refused (401, 403, 404 ...), without an answer in between, that open the circuit."""
PROBES_TO_UNUSABLE = 12
"""Refused probes in a row, of different samples, after which a source is unusable. They follow each other without a
pause, because refusals are quick."""
PROBES_WHILE_UNUSABLE = 3
"""The same for a source that is unusable: then samples that were submitted since fail, too."""
SILENT_AT = 9.0
"""Overdue answers from which a source is silent. A healthy source reaches this number with probability exp(-9).

The ages at which attempts end are learned (`Tail`), because a mere count of late attempts takes a source that has
become ten times slower for silent again and again, until samples are lost."""
SLOWED = 2.0
"""Factor by which a source may be slower than usual without being silent. Requests that are sent together are late
together, so their ages are not independent."""
SHORTEST_SILENCE_S = 3.0
"""Shortest silence, in seconds, however quick the source: garbage collection or a busy machine is no breakdown."""
FIRST_SILENCE_S = 30.0
"""Shortest silence, in seconds, of a source that has never answered: its server may be loading a model."""
FIRST_SILENCE = 8.0
"""The same as a multiple of the latency of other sources: it may have a slower model."""
FIRST_SILENCE_ALL = 2.0
"""The same as a multiple of the time in which the others would answer all its attempts: it may yet be quicker."""
_COUNTED_EVERY_S = 0.05
"""Least time, in seconds, between two counts of overdue answers."""
LEAST_VALID = 0.04
"""Share of valid replies from which a source can judge."""
_WINDOW = 50
"""Number of last replies that decide whether a source is degraded."""
_LEAST_REPLIES = 10
"""Fewest replies that decide it."""
_MEMORY = 500
"""Approximate number of replies behind the share of valid ones; older ones fade exponentially."""

SHORTEST_PACE_S = 0.5
"""Pace of the first probes: seconds from one to the next. It doubles with each probe that fails."""
LONGEST_PACE_S = 10.0
"""Longest pace, and that while no sample needs the source: none waits, or it answers nonsense and others are well."""
PROBE_GAP_S = 2.0
"""Shortest pace beside an overdue probe."""
LONGEST_FREE_PACE_S = 1.0
"""Longest pace while no sample can be to blame (nothing was sent, or several samples failed and none was answered). A
refused connection a second costs nothing, and a source that recovers shortly before a deadline must still be used."""
SHARE_OF_LIMIT = 0.2
"""Share of the source's request limit that probes may take. The rest is left for the moment when it recovers."""


class Culprits:
    """Counts how many different samples must be to blame for the failures of a source since it last answered.

    Any call in a request may make it fail. So it counts failed requests of which no two share a sample. The count is
    never too high.
    """

    def __init__(self) -> None:
        self._apart: list[Set[int]] = []

    def __len__(self) -> int:
        return len(self._apart)

    def __contains__(self, sample: int) -> bool:
        return any(sample in request for request in self._apart)

    def add(self, samples: Set[int]) -> None:
        """Note a failed request, which carried these samples."""
        common = [request for request in self._apart if not request.isdisjoint(samples)]
        if len(common) == 1 and samples < common[0]:
            self._apart.remove(common[0])  # fewer samples can have caused it
        if (not common or samples < common[0]) and len(self._apart) < _MOST_CULPRITS:
            self._apart.append(samples)


class Breaker:
    """Closed: every attempt may pass. Open for `pace_s` seconds. Half-open: one probe may pass, and its end decides."""

    def __init__(self, *, failures_to_open: float = FAILURES_TO_OPEN, pace_s: float = SHORTEST_PACE_S) -> None:
        self._failures_to_open = failures_to_open
        self.pace_s = pace_s
        """The least time between two probes, in seconds."""
        self.failures_in_row = 0
        self.failing = Culprits()
        """The samples that failed since the last answer."""
        self.probes = 0
        """Probes that failed, or were given up for the next one, since it opened."""
        self.closed = True
        """Whether every attempt may pass. An attribute and not a property, because each attempt asks seven times."""
        self.failed_at = -math.inf
        """When it opened, or a probe failed or became overdue; minus infinity if it is closed."""
        self._probing = False

    def wait_s(self, now: float) -> float:
        """Seconds until an attempt may pass; infinity while a probe is under way."""
        if self.closed:
            return 0.0
        if self._probing:
            return math.inf
        return max(0.0, self.failed_at + self.pace_s - now)

    def started(self) -> None:
        """Note that an attempt passed."""
        if not self.closed:
            self._probing = True

    def succeeded(self) -> None:
        """Note that the source answered."""
        if self.closed and not self.failures_in_row:
            return
        self.closed = True
        self.failures_in_row = 0
        self.failing = Culprits()
        self.failed_at = -math.inf
        self.probes = 0
        self._probing = False

    def failed(self, now: float, *, probe: bool, in_flight: int = 0, samples: Set[int] | None = None) -> bool:
        """Note a failure while `in_flight` other attempts are under way; return whether it opened just now.

        `probe`: the attempt started while the breaker was open. `samples`: the numbers of the samples that its request
        carried; None if each failure is that of another sample.
        """
        self.failures_in_row += 1
        if samples is not None:
            self.failing.add(samples)
        if probe and not self.closed:
            self.probes += 1
            self.open(now)
            return True
        several = samples is None or not in_flight or len(self.failing) >= SAMPLES_TO_OPEN
        enough = self.failures_in_row >= max(self._failures_to_open, SHARE_TO_OPEN * in_flight)
        return several and enough and self.trip(now)

    def trip(self, now: float) -> bool:
        """Open it for silence, refusals or invalid replies; return whether it was closed."""
        was_closed = self.closed
        if was_closed:
            self.open(now)
        return was_closed

    def opened_elsewhere(self) -> None:
        """Note that the circuit of another process is open. A probe may go here at once."""
        self.closed = False

    def answered_elsewhere(self) -> None:
        """Note that another process had an answer: a probe may go at once."""
        self.failed_at = -math.inf

    def abandoned(self, *, probe: bool) -> None:
        """Note that an attempt ended without evidence about the source (cancelled, throttled)."""
        if probe:
            self._probing = False

    def open(self, now: float) -> None:
        """Open it, or keep it open because a probe failed or is overdue. An overdue one may still answer."""
        self.closed = False
        self.failed_at = now
        self._probing = False


class Health:
    """The health of one source. Times are seconds of the event loop's clock.

    A function on this machine is never silent: if it hangs, the sample is to blame.
    """

    def __init__(self, upstream: Upstream) -> None:
        self._upstream, self._name = upstream, upstream.name
        self._heard_at = -math.inf
        self._failed_from = -math.inf
        """When the latest of the attempts that failed here had started."""
        self._counted_at = -math.inf
        """When its overdue answers were counted last."""
        self._last: deque[bool] = deque(maxlen=_WINDOW)
        """Whether each of its last replies was valid."""
        self._valid_at = -math.inf
        self._valid = self._replies = 0.0
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
        self.last_error = ""
        """Why it failed or refused last; "" if it never did."""
        self._silent_senders = 0
        self._gap_s = 0.0
        """The gap beside an overdue probe; 0 if nothing was overdue since the last sign of life."""
        self.open_for_silence = False
        """Whether the circuit is open because of silence, and nothing has come from the source since."""
        self._logged = False
        """Whether this outage is logged."""

    @property
    def degraded(self) -> bool:
        """Whether most of its last replies were invalid."""
        return len(self._last) >= _LEAST_REPLIES and 2 * self._last.count(False) > len(self._last)

    @property
    def reliable(self) -> bool:
        """Whether most of its last replies were valid; `False` while there are too few to tell."""
        return len(self._last) >= _LEAST_REPLIES and 2 * self._last.count(True) > len(self._last)

    def judges_since(self, at: float) -> bool:
        """Whether it gave a valid reply after `at`, and can judge: then a response provoked each invalid reply. The
        share of valid replies rules out replies that are valid by chance.
        """
        return self._valid_at >= at and self._valid >= LEAST_VALID * self._replies

    @property
    def refusing(self) -> bool:
        """Whether it refused samples, so that the next probes follow at once."""
        return bool(self._refused_probes if self.unusable else len(self._refused))

    @property
    def pace_s(self) -> float:
        """Least time between two probes, in seconds. Probes take a small part of the source's limits."""
        if self.refusing:
            return self._gap_s
        rate_per_s = self._upstream.quota.rate_per_s * SHARE_OF_LIMIT
        least_s = min(max(SHORTEST_PACE_S, 1 / rate_per_s if rate_per_s > 0 else math.inf), LONGEST_PACE_S)
        longest_s = LONGEST_FREE_PACE_S if self.down_for_all else LONGEST_PACE_S
        grown_s = SHORTEST_PACE_S * 2.0 ** min(self._upstream.breaker.probes, 10)
        return max(self._gap_s, least_s, min(grown_s, longest_s))

    # Ends of attempts

    def heard(self, now: float) -> None:
        """Note that the source ended an attempt: an answer, an error or a refusal."""
        self._heard_at = now
        self._gap_s = 0.0
        self.open_for_silence = False

    def excuse(self, *, since: float, now: float) -> None:
        """Leave the time from `since` to `now`, in which this process could not read answers, out of its silence."""
        self._heard_at = min(now, self._heard_at + now - since)

    def replied(self, attempt: Attempt, now: float, *, alternative: bool) -> None:
        """Note a reply, valid or not. The circuit of a degraded source opens if there is an `alternative`."""
        self._refused = Culprits()
        self._refused_probes = 0
        self.answered_at = now
        self.down_for_all = False
        self._silent_senders += not attempt.sent
        if self.unusable or self._logged:
            self.unusable, self._logged = "", False
            _log.warning("source %s answers again", self._name)
        valid = attempt.result == "valid"
        if valid and attempt.decides:
            self._last.clear()
        self._last.append(valid)
        self._valid += valid - self._valid / _MEMORY
        self._replies += 1 - self._replies / _MEMORY
        if valid:
            self._valid_at = now
        # An answer to an older request does not say that it accepts new ones.
        newer = self._upstream.breaker.closed or attempt.started_at >= self._failed_from
        if newer and (valid or not (alternative and self.degraded)):
            self._upstream.breaker.succeeded()
        elif attempt.decides:
            self._upstream.breaker.failed(now, probe=True, in_flight=self._upstream.quota.in_flight)
        elif self._upstream.breaker.trip(now):
            _log.warning("source %s gives mostly invalid replies: circuit open, single requests probe it", self._name)

    def failed(self, attempt: Attempt, error: str, now: float) -> bool:
        """Note a transient failure; return whether the circuit opens because of it."""
        self.last_error = error
        self._failed_from = max(self._failed_from, attempt.started_at)
        return self._log_outage(
            self._upstream.breaker.failed(
                now, probe=attempt.decides, in_flight=self._upstream.quota.in_flight, samples=attempt.samples
            )
        )

    def excuses(self, attempt: Attempt) -> bool:
        """Whether its sample cannot be to blame for the failure of `attempt`: the request was not sent, or several
        samples fail and none was answered since this one was submitted.
        """
        if self._upstream.local:
            return False
        # A source that has answered without reporting that it sent never reports that.
        unsent = not attempt.sent and not self._silent_senders
        several = len(self._upstream.breaker.failing) >= SAMPLES_TO_OPEN and self.answered_at < attempt.job.submitted_at
        self.down_for_all = unsent or several
        return self.down_for_all

    def refused(self, attempt: Attempt, reason: str, now: float, *, certain: bool) -> bool:
        """Note a refusal that may concern all samples (a key, a URL); return whether the source is unusable because of
        it. `certain`: no sample can have provoked it.

        One response can provoke such a refusal, for example by a firewall. Many probes in a row hardly can.
        """
        self.last_error = reason
        self._refused.add(attempt.samples)
        if attempt.decides:
            self._refused_probes += 1
            self._upstream.breaker.failed(now, probe=True, in_flight=self._upstream.quota.in_flight)
        elif len(self._refused) >= REFUSED_TO_OPEN and self._upstream.breaker.trip(now):
            _log.error("source %s refuses its requests, circuit open until it answers a probe: %s", self._name, reason)
        if not certain and self._refused_probes < (PROBES_WHILE_UNUSABLE if self.unusable else PROBES_TO_UNUSABLE):
            return False
        self._refused_probes = 0
        self._upstream.breaker.trip(now)
        if not self.unusable:
            _log.error("source %s is unusable, samples without another source fail at once: %s", self._name, reason)
        self.unusable = reason
        return True

    def silent(self, attempt: Attempt, now: float, tail: Tail, *, places: float) -> bool:
        """Check for silence when `attempt` has grown older. Return whether the circuit opens, or stays open because
        this attempt is an overdue probe. `tail`: the ages at which attempts end. `places`: the concurrency of the
        other sources that answer and could serve its job; only asked for if this one has never answered.
        """
        breaker = self._upstream.breaker
        if attempt.probe and not breaker.closed:
            silent = attempt.overdue and not attempt.superseded
            if silent:
                attempt.superseded, self._gap_s = True, PROBE_GAP_S
        else:
            silent = breaker.closed and self._missing(now, tail, places=places) >= SILENT_AT
        if silent:
            breaker.open(now)
            self.open_for_silence = not self._upstream.local
            self.last_error = "it does not answer"
        return self._log_outage(silent)

    def _missing(self, now: float, tail: Tail, *, places: float) -> float:
        """The expected number of answers since the last sign of life; infinity if it has never answered, and others
        would have done so long ago.
        """
        upstream = self._upstream
        if upstream.local or not upstream.live:
            return 0.0
        # Time without any request under way is no silence.
        first = next(iter(upstream.live))
        silent_s = now - max(self._heard_at, first.started_at)
        if not upstream.speed.known:
            # The latency to expect here is that of the others.
            rounds = max(FIRST_SILENCE, FIRST_SILENCE_ALL * len(upstream.live) / places) if places else math.inf
            return math.inf if silent_s >= max(FIRST_SILENCE_S, rounds * first.expected_s) else 0.0
        if silent_s < SHORTEST_SILENCE_S or now - self._counted_at < _COUNTED_EVERY_S:
            return 0.0
        self._counted_at = now
        # Calls that share a request are answered together.
        return sum(self._missing_of(attempt, now, tail) / attempt.together for attempt in upstream.live)

    def _missing_of(self, attempt: Attempt, now: float, tail: Tail) -> float:
        longest_s = SLOWED * attempt.longest_s
        age_s, when_heard_s = now - attempt.started_at, self._heard_at - attempt.started_at
        return tail.hazard(age_s / longest_s) - tail.hazard(when_heard_s / longest_s)

    def _log_outage(self, opened: bool) -> bool:
        if opened and not self._logged:
            self._logged = True
            _log.warning(
                "source %s is down (%s); one request at a time probes it until it answers",
                self._name,
                self.last_error,
            )
        return opened
