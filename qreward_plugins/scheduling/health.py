"""The health of a source: whether it answers. It opens and closes the source's circuit breaker.

The circuit breaker keeps samples away from a source that does not answer, and lets single probes pass. Without it a
source that refuses at once would look like the fastest of all, and every waiting sample would use up its attempts there
instead of waiting a little for a healthy source. While it is open, probes follow each other at the pace that
`Health.pace_s` says.

Four things open the circuit: failures in a row, silence, invalid replies, and refusals (a key, a URL). A response can
provoke each of them, so the circuit opens only if several different samples met the same. One answer closes it, unless
the source has failed newer requests since (`Health._accepts`).

A few samples that always fail look like an outage at the end of a batch, when no others are left. So the failures of a
sample that failed before, while others were answered, do not count against its source (`Health.suspects`).

Silence: a source that accepts requests and never answers fails none of them until a time limit of minutes has passed.
The ages of its attempts tell earlier that it is down: if it were well, some of them would have been answered. A source
that has never answered may be loading its model. It is silent only while others answer, and are far quicker.

Invalid replies: a source that answers every sample with prose is broken. A source that answers some samples with prose
and others validly was provoked by those responses. Two measures tell these apart, because a batch may hold many
responses that provoke. A source is *degraded* if most of its last replies are invalid: other sources are preferred
then. It *can judge* if a small share of its replies over a longer time is valid.

Some servers answer a request that they will never accept, such as a too long one, with 429 (OpenAI: "Request too large
for ... on tokens per min"). If such a 429 paused its source or lowered its limits, one sample would take the source
from all others (promise P11). A server that has reached a limit throttles other samples, too, and accepts none that are
sent later. So a 429 counts for the source if another sample was throttled since the source last accepted a request. It
does not count if the source has throttled this sample before and has since accepted a later request
(`ThrottledSamples`). A sample that an idle source throttles again and again is refused: the source will never accept
it. A source that has not answered what it accepted last is not idle. It may still work on a request that was cancelled
here.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ..quotas.pauses import SAMPLES_TO_OPEN, SHORTEST_PACE_S, Culprits
from .jobs import ThrottledAt

if TYPE_CHECKING:
    from .attempts import Attempt
    from .jobs import Job
    from .latency import Tail
    from .upstream import Upstream

_log = logging.getLogger("qreward_plugins.scheduling")

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

_ACCEPTED_AFTER_S = 0.1
"""Least age, in seconds, from which a request under way counts as accepted: servers reject at once."""
_MOST_THROTTLED = 4
"""Number of throttled samples that are remembered."""
_REFUSED_AFTER = 7
"""429s to a sample alone, in a row, that are a refusal. A server that throttles half of all requests by chance does
this to one sample in 100."""

LONGEST_PACE_S = 10.0
"""Longest pace, and that while no sample needs the source: none waits, or it answers nonsense and others are well."""
ACCEPTED_AFTER_S = 1.0
"""Least age, in seconds, from which a request under way shows that a source that failed accepts requests again."""
LEAST_ACCEPTED = 1 / 3
"""Share of the requests sent since a source began to fail that it accepts, from which it is used although it fails the
others. With a lower one, most samples would use up their tries; with a higher one, a batch would wait for probes."""
FEW = 8
"""Most jobs that may be to blame for an outage, if no others wait."""
PROBE_GAP_S = 2.0
"""Shortest pace beside an overdue probe."""
LONGEST_FREE_PACE_S = 1.0
"""Longest pace while no sample can be to blame (nothing was sent, or several samples failed and none was answered). A
refused connection a second costs nothing, and a source that recovers shortly before a deadline must still be used."""
SHARE_OF_LIMIT = 0.2
"""Share of the source's request limit that probes may take. The rest is left for the moment when it recovers."""


class Health:
    """The health of one source. Times are seconds of the event loop's clock.

    A function on this machine is never silent: if it hangs, the sample is to blame.
    """

    def __init__(self, upstream: Upstream) -> None:
        self._upstream, self._name = upstream, upstream.name
        self._heard_at = -math.inf
        self._failed_from = -math.inf
        """When the latest of the attempts that failed here had started."""
        self._failing_from = -math.inf
        """When the first of those that failed in a row had started."""
        self._failure_s = 0.0
        """How long the last one that failed took, in seconds."""
        self._answered_from = -math.inf
        """When the latest of the attempts that it replied to had started."""
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

    def replied(self, attempt: Attempt, now: float, *, alternative: bool, waiting: Callable[[], Iterable[Job]]) -> None:
        """Note a reply, valid or not. The circuit of a degraded source opens if there is an `alternative`. `waiting`
        returns the jobs that could use the source if its circuit is closed.
        """
        self._refused = Culprits()
        self._refused_probes = 0
        self.answered_at = now
        self._answered_from = max(self._answered_from, attempt.started_at)
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
        up = self._upstream.breaker.closed or self._accepts(attempt, waiting(), now)
        if up and (valid or not (alternative and self.degraded)):
            self._upstream.breaker.succeeded()
        elif attempt.decides:
            self._upstream.breaker.failed(now, probe=True, in_flight=self._upstream.quota.in_flight)
        elif self._upstream.breaker.trip(now):
            _log.warning("source %s gives mostly invalid replies: circuit open, single requests probe it", self._name)

    def failed(self, attempt: Attempt, error: str, now: float) -> bool:
        """Note a transient failure; return whether the circuit opens because of it. That of a sample that fails again
        and again says nothing about the source.
        """
        self.last_error = error
        if self._upstream.breaker.closed and attempt.together == 1 and self.suspects(attempt.job):
            return False
        if not self._upstream.breaker.failures_in_row:
            self._failing_from = attempt.started_at
        self._failed_from = max(self._failed_from, attempt.started_at)
        self._failure_s = now - attempt.started_at
        return self._log_outage(
            self._upstream.breaker.failed(
                now, probe=attempt.decides, in_flight=self._upstream.quota.in_flight, samples=attempt.samples
            )
        )

    def _accepts(self, answered: Attempt, waiting: Iterable[Job], now: float) -> bool:
        """Whether an answer shows that it accepts requests again. One to a request from before the last failure does
        not, unless a newer request, or `LEAST_ACCEPTED` of those sent since it began to fail, have been under way for
        longer than failures take; or few wait, and all of them have failed since, so that they may be to blame.
        """
        since = now - max(ACCEPTED_AFTER_S, 2 * self._failure_s)
        accepted = [attempt for attempt in self._upstream.live if attempt.started_at <= since]
        newer = any(attempt.started_at > self._failed_from for attempt in accepted)
        if newer or answered.started_at >= self._failed_from:
            return True
        later = (attempt for attempt in (answered, *accepted) if attempt.started_at >= self._failing_from)
        count = sum(1 / attempt.together for attempt in later)
        if count >= LEAST_ACCEPTED * (count + self._upstream.breaker.failures_in_row):
            return True
        few = list(itertools.islice(waiting, FEW + 1))
        return len(few) <= FEW and all(job.past and job.past[-1].ended_at >= self._answered_from for job in few)

    def suspects(self, job: Job) -> bool:
        """Whether `job` is to blame for its failures here: two of them count, and others that were sent later were
        answered. One can be that of a short outage.
        """
        failed = (attempt for attempt in job.past if attempt.counts and attempt.upstream is self._upstream)
        return sum(attempt.ended_at < self._answered_from for attempt in failed) >= 2

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
        this attempt is an overdue probe. `tail`: the ages at which attempts end. `places`: how many requests the
        other sources that could serve its job can have in flight; only asked for if this one has never answered.
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
            requests = sum(1 / attempt.together for attempt in upstream.live)
            rounds = max(FIRST_SILENCE, FIRST_SILENCE_ALL * requests / places) if places else math.inf
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


class ThrottledSamples:
    """The samples that a source throttles. Times are seconds of the event loop's clock."""

    def __init__(self) -> None:
        self._samples: dict[int, tuple[int, float]] = {}
        """Throttled samples by number, no later request was accepted: order of the request, when it may go again."""
        self._at = -math.inf
        """Time of the last 429 that was not a repeated one to the same sample."""
        self._longest_s = 0.0
        """Longest time that a 429 took, in seconds."""
        self._accepted = 0
        """Order of the last request that was accepted."""
        self._answered = 0
        """Order of the last request that was answered."""
        self.accepted_at = -math.inf
        """When it began."""

    def accepted(self, attempt: Attempt) -> None:
        """Note that a request was accepted."""
        if attempt.order > self._accepted:
            self._accepted, self.accepted_at = attempt.order, attempt.started_at

    def answered(self, attempt: Attempt) -> None:
        """Note that a request was answered."""
        self.accepted(attempt)
        self._answered = max(self._answered, attempt.order)

    def note(self, attempt: Attempt, live: Iterable[Attempt], retry_after_s: float | None, now: float) -> int:
        """Note a 429 that asks for a pause; return how many other samples are throttled, too. If none is, it may be due
        to its own sample. One to several calls together never is. `live`: the attempts under way at the source.

        `ThrottledAt.alone` counts how often a sample was throttled again while no other one was.
        """
        job, samples, source = attempt.job, attempt.samples, attempt.upstream.name
        self._longest_s = max(self._longest_s, now - attempt.started_at)
        accepted_after_s = max(_ACCEPTED_AFTER_S, 2 * self._longest_s)
        for other in live:
            if other.sent and other.sent_at <= now - accepted_after_s:
                self.accepted(other)
        last = job.throttled_at.get(source)
        again = last is not None and len(samples) == 1 and (last.order < self._accepted or last.alone > 0)
        alone = last.alone + (last.ended_at >= self._at) if last is not None and again else 0
        job.throttled_at = {**job.throttled_at, source: ThrottledAt(attempt.order, now, alone)}
        if again:
            return 0
        self._samples = {number: one for number, one in self._samples.items() if one[0] > self._accepted}
        others = len(self._samples.keys() - samples)
        if others or last is None:
            self._at = now
        if others < _MOST_THROTTLED:
            self._samples[job.sequence] = attempt.order, now + (retry_after_s or 0.0)
        return others if attempt.together == 1 else max(1, others)

    def refuses(self, attempt: Attempt, live: Iterable[Attempt]) -> bool:
        """Whether the source will never accept the sample of `attempt`. While others are in flight, or were accepted
        last and never answered, they may have taken its place.
        """
        alone = attempt.job.throttled_alone(attempt.upstream.name)
        idle = self._answered >= self._accepted and all(other is attempt for other in live)
        return alone >= _REFUSED_AFTER and idle

    def shortest_s(self, retry_after_s: float, now: float) -> float:
        """The shortest pause that a sample was told and that is not over, in seconds. A longer one may be due to its
        own sample.
        """
        return min((until - now for _, until in self._samples.values() if until > now), default=retry_after_s)
