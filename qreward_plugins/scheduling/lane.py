"""A lane: one source as the scheduler sees it, with its quota, its speed, its health, and what was learned of it."""

from __future__ import annotations

import bisect
import dataclasses
import logging
import math
from collections import deque
from typing import TYPE_CHECKING, Literal

from ..config.models import Price
from ..observers import SourceGauges
from ..quotas import Quota, QuotaUse, Reservation, RetryBudget
from ..sources.base import Reply, Request, Source
from .breaker import SAMPLES_TO_OPEN, Breaker
from .pauses import Pauses
from .speed import Speed
from .tail import Tail
from .tokens import TokenEstimates

if TYPE_CHECKING:
    from .attempts import Attempt

_log = logging.getLogger("qreward_plugins.scheduling")

Hold = Literal["", "queue", "quota", "pause"]
"""Why a source takes nothing now: it is busy, its quota is spent, or it asked (or needs) to be left alone."""

_GARBAGE_WINDOW = 50
_GARBAGE_AT_LEAST = 10
_JUDGED_MEMORY = 500
LEAST_VALID = 0.04
"""Share of valid verdicts among its replies from which on a source is taken to be able to judge."""
_FRESH_S = 0.05
_HISTORY = 8192
"""Changes of state that are remembered, for the blame of a batch."""
REFUSED_TO_DOUBT = 3
"""Different samples refused (401, 403, 404 ...), without an answer in between, from which on a source is probed."""
PROBES_TO_OUT = 12
"""Probes in a row, of different samples, that are refused before a source is out. They follow at once: it is quick."""
PROBES_OF_OUT = 3
"""The same for a source that is out already, before what has been handed in since then is failed, too."""
SILENT_AT = 9.0
"""Answers that are missing when a source is taken for silent: if it were well, the chance of that is exp(-9)."""
SLOWED = 2.0
"""How much slower than usual a source may be at any time without being taken for silent: what is sent together is
answered late together, so that the ages of attempts are no independent witnesses."""
DOUBTED_AT = 4.0
"""Missing answers from which on nothing is built upon a source."""
SHORTEST_SILENCE_S = 3.0
"""Silence that is forgiven to quick sources, too: a collection of garbage or a busy machine is no breakdown."""


class Lane:
    """One source as the scheduler sees it. Times are seconds of the event loop's clock."""

    def __init__(
        self,
        source: Source,
        quota: Quota,
        *,
        timeout_s: float,
        price: Price,
        weight: float = 1.0,
    ) -> None:
        self.source = source
        self.name = source.name
        self.local = bool(getattr(source, "local", False))
        """Whether a function of this machine answers: what hangs there is the sample, and the source never silent."""
        self.spare = int(getattr(source, "spare", 0))
        """How many last tries of samples that hung it can take beside its concurrency."""
        self.set_aside = 0
        """Calls in a row that were set aside for those that waited; anything that ends by itself ends the row."""
        self.quota = quota
        self.timeout_s = timeout_s
        self.price = price
        self.weight = weight
        self.breaker = Breaker()
        self.speed = Speed()
        self.tail = Tail()
        self.retries = RetryBudget()
        self.requests = 0
        """Attempts that started here."""
        self.answers = 0
        """Replies that it gave, valid or not."""
        self.live: dict[Attempt, None] = {}
        """Attempts under way here."""
        self.unusable = ""
        """Why this source is out: it refused so many different samples that no response can have provoked it. It is
        probed with what is handed in from then on, and one answer brings it back. Empty: it is not out."""
        self._refused: set[int] = set()
        self._refused_probes = 0
        self._last_error = ""
        self._silent_senders = 0
        self._told_down: str | None = None
        """The error that the log has of this outage; None: it has none, or the source has answered since."""
        self._told_throttled = ""
        """What the log has of a limit that 429s told: a source that only throttles would tell it again and again."""
        self.pauses = Pauses()
        self._estimates = TokenEstimates(source)
        self._validity: deque[bool] = deque(maxlen=_GARBAGE_WINDOW)
        self.valid_at = -math.inf
        """When it gave the last valid verdict."""
        self.answered_at = -math.inf
        """When it gave the last reply, whatever that was."""
        self.down_for_all = False
        """Whether its last failure can be no sample's fault."""
        self._valid = 0.0
        self._judged = 0.0
        self._heard_at = -math.inf
        self._silenced = False
        self._missing = 0.0
        self._missing_at = -math.inf
        self._holds: deque[tuple[float, Hold]] = deque(maxlen=_HISTORY)

    def abandon_attempts(self, now: float) -> None:
        """Forget the attempts of an event loop that was closed under them; the ledgers of what was sent stay."""
        self.live.clear()
        self.quota.forget_in_flight(now)
        self.breaker.abandoned(probe=True)

    # What may go, and when

    def tokens(self, request: Request) -> int:
        """An upper bound of the tokens that `request` takes, prompt and completion."""
        return 0 if self._uncounted else self._estimates.prompt(request) + self._estimates.completion(request)

    @property
    def _uncounted(self) -> bool:
        """Whether nobody counts tokens here: estimates for a local function would cost more than many of its calls."""
        return self.local and self.quota.most_tokens == math.inf

    def tokens_of(self, size: float) -> float:
        """The tokens that a request of `size` bytes is likely to take, prompt and completion."""
        return self._estimates.likely(size)

    def misfit(self, request: Request) -> str:
        """Why `request` can never be sent here; empty: it can. An estimate is no reason, only what is certain."""
        if self.quota.most_tokens == math.inf:
            return ""
        least, most = self._estimates.least(request), self.quota.most_tokens
        if self.quota.fits_ever(least):
            return ""
        return (
            f"larger than its tokens_per_minute: it takes {least:,} tokens at least (of these "
            f"{request.demand(self.source).completion:,} for the longest completion asked for), a window allows "
            f"{most:,.0f}"
        )

    def oversize(self, request: Request) -> bool:
        """Whether `request` is estimated to take more than a whole window allows, so that it can only go alone."""
        most = self.quota.most_tokens
        return most < math.inf and self.tokens(request) > most

    def reserve(self, request: Request, now: float, *, beside: bool = False) -> Reservation:
        """Take what an attempt of `request` needs from the quota; `beside`: without concurrency."""
        if self._uncounted:
            return self.quota.reserve(0, 0, now, beside=beside)
        prompt, completion = self._estimates.prompt(request), self._estimates.completion(request)
        return self.quota.reserve(prompt, completion, now, beside=beside)

    @property
    def room_beside(self) -> int:
        """How many more last tries it can take beside its concurrency; none under a limit of requests."""
        if not self.spare or not self.breaker.closed or self.unusable or self.quota.rate_per_s < math.inf:
            return 0
        return self.spare - sum(attempt.reservation.beside for attempt in self.live)

    def wait_s(self, tokens: float, now: float) -> float:
        """Seconds until a request of `tokens` may go; infinity: no time can be told.

        What is estimated to take more than a whole window may go once the window is empty.
        """
        tokens = min(tokens, self.quota.most_tokens)
        return max(self.pauses.left_s(now), self.breaker.wait_s(now), self.quota.wait_s(tokens, now))

    def up(self, now: float) -> bool:
        """Whether it takes part in what is being planned: not out, not resting for long, not silent."""
        breaker = self.breaker
        resting = not breaker.closed and (breaker.needed or breaker.wait_s(now) > 1)
        return not (self.unusable or resting or self.looks_dead(now))

    def looks_dead(self, now: float) -> bool:
        """Whether answers are missing that should have come by now, or the last ones were failures."""
        return self.breaker.failures_in_row >= 3 or self.missing(now) >= DOUBTED_AT

    def missing(self, now: float) -> float:
        """How many answers should have come since the last one, from the ages of the attempts under way."""
        if not self.live or not self.speed.known or self.local:
            return 0.0
        # A source that was asked nothing was not silent, however long ago it was heard.
        if now - max(self._heard_at, next(iter(self.live)).started_at) < SHORTEST_SILENCE_S:
            return 0.0
        if now - self._missing_at >= _FRESH_S:
            self._missing_at = now
            self._missing = sum(self._missing_of(attempt, now) for attempt in self.live)
        return self._missing

    def _missing_of(self, attempt: Attempt, now: float) -> float:
        longest_s = SLOWED * attempt.longest_s
        age_s, when_heard_s = now - attempt.started_at, self._heard_at - attempt.started_at
        return self.tail.hazard(age_s / longest_s) - self.tail.hazard(when_heard_s / longest_s)

    def hold(self, now: float, tokens: float = 0) -> Hold:
        """Why no request of `tokens` may go now; empty: one may. It is noted down for the blame of batches."""
        hold: Hold = ""
        if self.pauses.left_s(now) > 0 or self.breaker.wait_s(now) > 0:
            hold = "pause"
        elif self.quota.in_flight >= self.quota.concurrency:
            hold = "queue"
        elif self.quota.wait_s(min(tokens, self.quota.most_tokens), now) > 0:
            hold = "quota"
        if not self._holds or self._holds[-1][1] != hold:
            self._holds.append((now, hold))
        return hold

    def held(self, since: float, until: float) -> dict[Hold, float]:
        """Seconds of [since, until] by what held this source; what is no longer remembered counts as open."""
        holds = list(self._holds)
        first = max(0, bisect.bisect_right(holds, since, key=lambda change: change[0]) - 1)
        seconds: dict[Hold, float] = {}
        at, hold = since, holds[first][1] if holds and holds[first][0] <= since else ""
        for changed_at, new_hold in holds[first:]:
            if changed_at >= until:
                break
            if changed_at > at:
                seconds[hold] = seconds.get(hold, 0.0) + changed_at - at
                at = changed_at
            hold = new_hold
        seconds[hold] = seconds.get(hold, 0.0) + until - at
        return seconds

    # What attempts tell

    def started(self, attempt: Attempt) -> None:
        """Note that an attempt begins."""
        self.live[attempt] = None
        self.breaker.started()
        self.pauses.started(attempt.started_at)
        self.requests += 1

    def heard(self, now: float) -> None:
        """Note that an attempt ended by what the source did, whatever that was."""
        self._heard_at = now
        self._missing_at = -math.inf
        self._silenced = False
        self.set_aside = 0

    def excuse(self, *, since: float, now: float) -> None:
        """Do not hold it against the source, or against its attempts, that this process did not listen for a while."""
        self._missing_at = -math.inf
        if self._heard_at > -math.inf:
            self._heard_at = min(now, self._heard_at + now - since)
        for attempt in self.live:
            if attempt.started_at <= since:
                attempt.started_at += now - since
                attempt.sent_at += now - since

    def credible(self, request: Request, reply: Reply) -> Reply:
        """`reply` with as much of its usage as can be true."""
        if reply.usage is None:
            return reply
        usage, cut_down = self._estimates.credible(request, reply.usage)
        if cut_down and not self._estimates.doubted:
            self._estimates.doubted = True
            _log.warning(
                "source %s states a usage of %d prompt and %d completion tokens for a request of %d bytes, which "
                "cannot be; such figures are cut down to what the request allows",
                self.name,
                reply.usage.prompt_tokens,
                reply.usage.completion_tokens,
                request.size,
            )
        return reply if usage == reply.usage else dataclasses.replace(reply, usage=usage, usage_doubted=cut_down)

    def answered(self, attempt: Attempt, reply: Reply, now: float) -> float:
        """Learn from a reply; return its cost in dollars."""
        request, usage, latency_s = attempt.request, reply.usage, now - attempt.started_at
        self._refused.clear()
        self._refused_probes = 0
        self.answered_at = now
        self.down_for_all = False
        self._silent_senders += not attempt.sent
        if self.unusable or self._told_down is not None:
            self.unusable, self._told_down = "", None
            _log.warning("source %s answers again", self.name)
        self.pauses.answered(attempt.started_at)
        self.quota.answered(now, sent_at=attempt.started_at)
        if reply.announced:
            learned = self.quota.announced(reply.announced, now)
            if learned:
                _log.info("source %s: %s", self.name, learned)
        self.retries.earn(now)
        if self.name not in attempt.job.invalid_at:
            # Each sample teaches once: a sample whose answers are invalid is asked again and again.
            self.speed.learn(request.size, latency_s)
        self.answers += 1
        cost = self.price.per_request
        if usage is not None:
            cost += usage.prompt_tokens * self.price.input_per_million / 1e6
            cost += usage.completion_tokens * self.price.output_per_million / 1e6
            rose = self._estimates.learn(request, usage, cut_down=reply.usage_doubted)
            if rose and self.quota.most_tokens < math.inf:
                for other in self.live:
                    other.reservation.raise_prompt(self._estimates.prompt(other.request))
        return cost

    def expected_cost(self, request: Request) -> float:
        """What an answer to `request` costs at most, in dollars."""
        return (
            self.price.per_request
            + self._estimates.prompt(request) * self.price.input_per_million / 1e6
            + self._estimates.completion(request) * self.price.output_per_million / 1e6
        )

    def answers_garbage(self) -> bool:
        """Whether most of the last replies were no valid verdicts: then it is not the responses that provoke them."""
        invalid = self._validity.count(False)
        return len(self._validity) >= _GARBAGE_AT_LEAST and 2 * invalid > len(self._validity)

    def judges_since(self, at: float) -> bool:
        """Whether it gave valid verdicts after `at`, and not only by chance: then it can judge, and what it cannot
        judge was provoked. However many responses of a batch provoke it, they cannot keep the others from being judged.
        """
        return self.valid_at >= at and self._valid >= LEAST_VALID * self._judged

    def judged(self, valid: bool, now: float, *, probe: bool, alternative: bool) -> None:
        """Note whether a reply was a valid verdict. A source of garbage rests, if there is an `alternative` to it."""
        if valid and probe:
            self._validity.clear()
        self._validity.append(valid)
        self._valid += valid - self._valid / _JUDGED_MEMORY
        self._judged += 1 - self._judged / _JUDGED_MEMORY
        if valid:
            self.valid_at = now
        garbage = self.answers_garbage()
        if valid or not (garbage and alternative):
            self.breaker.succeeded()
        elif probe:
            self.breaker.failed(now, probe=True, in_flight=self.quota.in_flight)
        elif self.breaker.trip(now):
            _log.warning(
                "source %s answers mostly with invalid verdicts: it rests for %.0f s, then one request probes it",
                self.name,
                self.breaker.wait_s(now),
            )

    def throttled(self, retry_after_s: float | None, sent_at: float, now: float, *, error: str = "") -> None:
        """Pause the source as it asks for. `error`: what it said."""
        learned = self.quota.throttled(now, sent_at=sent_at, retry_after_s=retry_after_s)
        if learned:
            said = f"{learned} ({error})" if error else learned
            if said != self._told_throttled:
                self._told_throttled = said
                _log.warning("source %s: %s", self.name, said)
        pause_s = self.pauses.throttled(retry_after_s, sent_at, now)
        if pause_s is not None:
            _log.info("source %s asks for a pause of %.1f s", self.name, pause_s)

    def told(
        self, now: float, *, pause_s: float, rest_s: float, recovered: bool, typical: tuple[float, float] | None
    ) -> None:
        """Take in what other processes learned of the source: seconds that are left of a pause or of a rest, that it
        has answered after a rest, and size and latency of a typical answer.
        """
        if pause_s > 0:
            self.pauses.told(pause_s, now)
        if recovered:
            self.breaker.told_of_recovery(now)
        elif rest_s > 0:
            self.breaker.told(rest_s, now)
        if typical is not None and not self.speed.known:
            self.speed.learn(*typical)

    def failed(self, now: float, *, probe: bool, sample: int | None = None, error: str = "") -> bool:
        """Note a transient failure of a sample; return whether the source is given a rest because of it."""
        self._last_error = error
        return self._rests(self.breaker.failed(now, probe=probe, in_flight=self.quota.in_flight, sample=sample), now)

    def excuses(self, attempt: Attempt) -> bool:
        """Whether the failure of `attempt` can be no fault of its sample: nothing of it was sent, or several samples
        fail and none was answered since it came.
        """
        if self.local:
            return False
        # A source that answers what it never said it sent does not say when it sends.
        unsent = not attempt.sent and not self._silent_senders
        several = len(self.breaker.failing) >= SAMPLES_TO_OPEN and self.answered_at < attempt.job.submitted_at
        self.down_for_all = unsent or several
        return self.down_for_all

    @property
    def in_doubt(self) -> bool:
        """Whether it refused several samples, and a few more must show at once whether it is out."""
        return bool(self._refused_probes if self.unusable else self._refused)

    def refused(self, attempt: Attempt, reason: str, now: float, *, certain: bool) -> bool:
        """Note that the source refused a sample in a way that may concern all of them (a key, a URL); return whether it
        is out for that. `certain`: no sample can have provoked it.

        One response can provoke such a refusal, as of a firewall; many in a row, asked for one by one, hardly can.
        """
        self._last_error = reason
        self._refused.add(attempt.job.sequence)
        if attempt.decides:
            self._refused_probes += 1
            self.breaker.failed(now, probe=True, in_flight=self.quota.in_flight)
        elif len(self._refused) >= REFUSED_TO_DOUBT and self.breaker.trip(now):
            _log.error("source %s is taken out until it answers a probe: %s", self.name, reason)
        elif attempt.probe:
            self.breaker.abandoned(probe=attempt.decides)
        if certain or self._refused_probes >= (PROBES_OF_OUT if self.unusable else PROBES_TO_OUT):
            self._refused_probes = 0
            self.take_out(reason, now)
            return True
        return False

    def silent(self, attempt: Attempt, now: float) -> bool:
        """Whether the source is given a rest now because it fell silent, as `attempt` shows, which has grown older."""
        if attempt.probe and not self.breaker.closed:
            overdue = attempt.overdue and not attempt.superseded
            if overdue:
                attempt.superseded = True
                self.breaker.overdue(now)
            return overdue
        opened = self.missing(now) >= SILENT_AT and self.breaker.trip(now)
        if opened:
            self._silenced = True
            self._last_error = "it fell silent"
        return self._rests(opened, now)

    @property
    def resting_in_silence(self) -> bool:
        """Whether the source rests because it fell silent, and nothing has come from it since."""
        return self._silenced and not self.breaker.closed

    def take_out(self, reason: str, now: float = 0.0) -> None:
        """Note that the source is out, and say so loudly."""
        self.breaker.trip(now)
        if not self.unusable:
            _log.error("source %s is out, what no other source can take fails at once: %s", self.name, reason)
        self.unusable = reason

    # What people are told

    def state(self, now: float) -> str:
        """One word or two for people."""
        if self.unusable or (self.in_doubt and not self.breaker.closed):
            return "out"
        if self.pauses.left_s(now) > 0:
            return "paused"
        if not self.breaker.closed:
            return "resting"
        return "garbled" if self.answers_garbage() else "up"

    def trouble(self, now: float) -> str:
        """Why it takes no samples now, with the last error; empty where only its limits hold them back."""
        if self.unusable:
            return f"{self.name} is out ({self.unusable})"
        if not self.breaker.closed:
            return f"{self.name} is down ({self._last_error})" if self._last_error else f"{self.name} rests"
        return f"{self.name} throttles" if self.pauses.left_s(now) > 0 else ""

    def gauges(self, now: float) -> SourceGauges:
        """How it stands now."""
        use, retries = self.quota.use(now), self.retries.use(now)
        return SourceGauges(
            state=self.state(now),
            in_flight=use.in_flight,
            requests_share=use.requests_share,
            tokens_share=use.tokens_share,
            paced=use.paced,
            retries=retries.retries,
            retries_put_off=retries.put_off,
            learned=_learned(use),
        )

    def _rests(self, opened: bool, now: float) -> bool:
        # One line for a cause. A text that differs each time (a request's number in it) gets one for the 1st, 2nd, 4th,
        # 8th ... probe that failed: a source that is down may be probed every second.
        if opened and self._last_error != self._told_down and not self.breaker.probes & (self.breaker.probes - 1):
            self._told_down = self._last_error
            _log.warning(
                "source %s is down (%s); one request at a time probes it until it answers", self.name, self._last_error
            )
        return opened


def _learned(use: QuotaUse) -> str:
    """What a person wants to know of the limits that were found out."""
    found = []
    if use.learned_requests_per_minute is not None:
        found.append(f"really about {use.learned_requests_per_minute:,.0f} requests a minute")
    if use.learned_tokens_per_minute is not None:
        found.append(f"really about {use.learned_tokens_per_minute:,.0f} tokens a minute")
    if use.learned_concurrency is not None:
        found.append(f"about {use.learned_concurrency:,.0f} at once")
    if use.paced:
        found.append("counts like a token bucket")
    return ", ".join(found)
