"""An upstream: one source with its quota, health, speed and token estimates, as the scheduler sees it. `Upstreams` are
all of an engine, which a reload of the configuration changes while calls are under way.

The word is that of proxies, which call a server that they send requests to an upstream.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from ..observers import BugLog, SourceGauges
from ..quotas.budgets import DollarBudget, RetryBudget
from ..quotas.pauses import Breaker, Pauses
from ..quotas.quota import Quota, Reservation
from ..quotas.tokens import TokenEstimates
from ..sources import Source
from ..sources.base import Reply, Request
from .batches import WaitReason, WaitReasons
from .calls import Call
from .health import Health, ThrottledSamples
from .latency import Speed, Tail

if TYPE_CHECKING:
    from ..config.source_models import Price
    from .attempts import Attempt
    from .jobs import Job
    from .request_batches import RequestBatches

_log = logging.getLogger("qreward_plugins.scheduling")

Moves: TypeAlias = Mapping[tuple[str, tuple[str, ...]], tuple[str, ...]]
"""By the name of who calls and the sources that it names: the sources that may answer now."""


class Upstream:
    """One source as the scheduler sees it. Times are seconds of the event loop's clock."""

    def __init__(
        self, source: Source, quota: Quota, bugs: BugLog, *, timeout_s: float, price: Price, weight: float = 1.0
    ) -> None:
        self.source = source
        self.bugs = bugs
        self.name = source.name
        self.local = source.local
        """Whether it is a function on this machine. If that hangs, the sample is to blame, and the source is not
        silent."""
        self.preempted = 0
        """Number of calls in a row that were ended because others waited. A call that ends by itself resets it."""
        self.quota = quota
        self.retune(timeout_s=timeout_s, price=price, weight=weight)
        self.breaker = Breaker()
        self.speed = Speed()
        self.retries = RetryBudget()
        self.requests = 0
        """Attempts that started here."""
        self.answers = 0
        """Replies that it gave, valid or not."""
        self.live: dict[Attempt, None] = {}
        """Attempts under way here."""
        self.health = Health(self)
        self._logged_limit = ""
        """The last logged message about a limit learned from 429s, which is not logged again."""
        self._warned: set[str] = set()
        """The warnings about its usage that were logged; each is logged once."""
        self._announces = False
        """Whether a reply has announced a limit. From then on, those that announce none count against it."""
        self.pauses = Pauses()
        self._throttled = ThrottledSamples()
        self._estimates = TokenEstimates()
        self.wait_reasons = WaitReasons()
        self._source_held = None if type(source).held is Source.held else source.held
        """What says why the source takes no calls. None for one that always does: each attempt asks several times."""
        self._on_hold = ""
        """Why it is held by hand; "" if it is not."""
        self.budgets: Sequence[DollarBudget] = ()
        """What its attempts are paid from."""
        self.request_batches: RequestBatches | None = None
        """Its requests of several calls in the event loop that is served; None if each request carries one."""

    def retune(self, *, timeout_s: float, price: Price, weight: float) -> None:
        """Change what the configuration says of it, beside its limits."""
        self.timeout_s, self.price, self.weight = timeout_s, price, weight

    def take_over(self, other: Upstream, *, same_account: bool) -> None:
        """Take over the quota of `other`, in whose place it is used from now on, and what was learned of it.
        `same_account`: the provider does not tell them apart, so an open circuit and a pause hold on.

        `Quota.retune` has to follow.
        """
        self.quota, self.retries, self.answers = other.quota, other.retries, other.answers
        self.quota.serve(self.name, slots=self.source.slots)
        if self.source.model == other.source.model:
            self.speed = other.speed
        if same_account:
            self.breaker, self.pauses = other.breaker, other.pauses

    def hold(self, why: str) -> bool:
        """Take no further calls, because `why`, until this is called with "". Those under way go on. Returns whether
        that changes anything.
        """
        if why == self._on_hold:
            return False
        self._on_hold = why
        return True

    @property
    def _held(self) -> str:
        """Why it takes no calls, by hand or by itself; "" if it takes some."""
        return self._on_hold or (self._source_held() if self._source_held is not None else "")

    def abandon_attempts(self, now: float) -> None:
        """Forget the attempts of an event loop that was closed. What they sent still counts against the limits."""
        self.live.clear()
        self.request_batches = None
        self.quota.forget_in_flight(now)
        self.breaker.abandoned(probe=True)

    # What may go, and when

    def tokens(self, request: Request) -> int:
        """An upper bound of the tokens that `request` takes, prompt and completion."""
        return 0 if self._ignores_tokens else sum(self._most(request))

    def _most(self, request: Request) -> tuple[int, int]:
        return self._estimates.most(request.demand(self.source))

    @property
    def _ignores_tokens(self) -> bool:
        """Whether tokens are not estimated: for a local function, estimates cost more time than many of its calls."""
        return self.local and self.quota.most_tokens == math.inf

    def tokens_of(self, size: float) -> float:
        """The tokens that a request of `size` bytes is likely to take, prompt and completion."""
        return self._estimates.likely(size)

    def too_large(self, request: Request) -> str:
        """Why `request` can never be sent here; "" if it may. Only certain reasons count, not estimates."""
        most = self.quota.most_tokens
        if most == math.inf:
            return ""
        demand = request.demand(self.source)
        if demand.least <= most:
            return ""
        return (
            f"larger than its tokens_per_minute: it takes {demand.least:,} tokens at least (of these "
            f"{demand.completion:,} for the longest completion asked for), a window allows {most:,.0f}"
        )

    def over_budget(self, request: Request, now: float) -> DollarBudget | None:
        """The budget of which too much is spent for `request`; None if there is none."""
        if not self.budgets:
            return None
        usd = self.expected_cost(request)
        return next((budget for budget in self.budgets if budget.lacks(usd, now)), None)

    def oversize(self, request: Request) -> bool:
        """Whether `request` is estimated to take more than a whole window allows, so that it can only go alone."""
        most = self.quota.most_tokens
        return most < math.inf and self.tokens(request) > most

    def reserve(self, request: Request, now: float, *, shares_request: bool = False) -> Reservation:
        """Take what an attempt of `request` needs from the quota. `shares_request`: it shares a request that has a
        reservation, so it needs tokens only.
        """
        prompt, completion = (0, 0) if self._ignores_tokens else self._most(request)
        return self.quota.reserve(prompt, completion, now, shares_request=shares_request)

    def set_aside(self, request: Request, now: float) -> tuple[Reservation, ...]:
        """Set the most that an attempt of `request` can cost aside, in each of its budgets."""
        usd = self.expected_cost(request)
        return tuple(budget.reserve(usd, now) for budget in self.budgets)

    def wait_tokens_s(self, job: Job, now: float, *, joins: bool = False) -> float:
        """Seconds until the limits let `job` go, whatever the circuit breaker says; infinity if that depends on other
        requests. `joins`: in a request of others.

        A request that is estimated to take more than a whole window may go once the window is empty.
        """
        tokens = min(self.tokens(job.request), self.quota.most_tokens)
        return self.quota.wait_s(tokens, now, shares_request=joins)

    def _longest_wait_s(self, quota_s: float, now: float) -> float:
        """Seconds until the quota, a pause and the circuit breaker all let a request go; infinity while the source
        takes no calls at all (`Source.held`).
        """
        if self._held:
            return math.inf
        if self.breaker.closed:
            paused_s = self.pauses.left_s(now)
            return quota_s if quota_s > paused_s else paused_s
        return max(self.pauses.left_s(now), self.breaker.wait_s(now), quota_s)

    def wait_for_s(self, job: Job, now: float) -> float:
        """Seconds until `job` may go, alone or in the open request of others; infinity as in `wait_tokens_s`."""
        joins = self.request_batches is not None and self.request_batches.admitting(job) is not None
        wait_s = self._longest_wait_s(self.wait_tokens_s(job, now, joins=joins), now)
        if self.budgets:
            usd = self.expected_cost(job.request)
            wait_s = max(wait_s, *(budget.wait_s(usd, now) for budget in self.budgets))
        return wait_s

    @property
    def has_place(self) -> bool:
        """Whether its concurrency leaves a place, or an open request may; its windows are not asked."""
        return self.quota.in_flight < self.quota.concurrency or self.request_batches is not None

    def takes_calls(self, now: float) -> bool:
        """Whether some call may go now: it has a place, or an open request that others may join."""
        free = self.quota.wait_s(0, now) <= 0 and self._longest_wait_s(0.0, now) <= 0
        return free or bool(self.request_batches is not None and self.request_batches.open)

    def joined_size(self, job: Job) -> int:
        """Bytes of the calls with which `job` would share a request now; 0 if it would get a request of its own."""
        batch = self.request_batches.admitting(job) if self.request_batches is not None else None
        return batch.size if batch is not None else 0

    @property
    def most_calls(self) -> int:
        """Most calls that one request carries."""
        return 1 if self.source.batch is None else self.source.batch.max_size

    def calls_per_request(self, waiting: int, mean_size: float) -> int:
        """Number of calls that a request carries while `waiting` calls of this mean size wait."""
        if self.request_batches is None:
            return 1
        return self.request_batches.usual(waiting, 0.0 if self._ignores_tokens else self.tokens_of(mean_size))

    @property
    def up(self) -> bool:
        """Whether the planner counts on it: it is not unusable, and its circuit is closed."""
        return self.breaker.closed and not self.health.unusable and not self._held

    def wait_reason(self, now: float) -> WaitReason:
        """Why no request may go now, however small; "" if one may."""
        if self._longest_wait_s(0.0, now) > 0:
            return "pause"
        if self.quota.in_flight >= self.quota.concurrency:
            return "queue"
        return "quota" if self.quota.wait_s(0.0, now) > 0 else ""

    # Ends of attempts, and news of other processes

    def started(self, attempt: Attempt) -> None:
        """Note that an attempt begins."""
        self.live[attempt] = None
        self.breaker.started()
        self.pauses.started(attempt.started_at)
        self.requests += 1
        attempt.order = self.requests

    def excuse(self, *, since: float, now: float) -> None:
        """Leave the time from `since` to `now`, in which this process could not read answers, out of ages and
        silence.
        """
        self.health.excuse(since=since, now=now)
        for attempt in self.live:
            if attempt.started_at <= since:
                attempt.started_at += now - since
                attempt.sent_at += now - since

    def credible(self, request: Request, reply: Reply) -> Reply:
        """`reply` with its usage reduced to what is possible."""
        if reply.usage is None:
            return reply
        usage, cut_down = self._estimates.credible(request.demand(self.source), reply.usage)
        if cut_down:
            self._warn_of_usage("states more tokens than its texts can have; they count if several replies state them")
        return reply if usage is reply.usage else dataclasses.replace(reply, usage=usage, usage_doubted=cut_down)

    def answered(self, attempt: Attempt, reply: Reply, now: float) -> float:
        """Learn from a reply; return its cost in dollars."""
        request, usage = attempt.request, reply.usage
        self.answers += 1
        if attempt.speaks:
            self._request_answered(attempt, reply, now)
        if usage is not None:
            # Of the usage of a request with several calls, the part of each is known only if they are alike.
            alike = attempt.request_batch is None or attempt.request_batch.uniform
            demand = request.demand(self.source)
            rose = self._estimates.learn(demand, request.size, usage, cut_down=reply.usage_doubted or not alike)
            if rose and self.quota.most_tokens < math.inf:
                for other in self.live:
                    other.reservation.raise_prompt(self._most(other.request)[0])
        else:
            self._warn_of_usage("states no usage, so each answer counts as the most tokens that it can take")
        prompt, completion = (0, 0) if usage is None else (usage.prompt_tokens, usage.completion_tokens)
        return self._cost(prompt, completion, requests=1 if attempt.speaks else 0)

    def _warn_of_usage(self, problem: str) -> None:
        if problem not in self._warned and self.quota.most_tokens < math.inf:
            self._warned.add(problem)
            advice = "declare requests instead of tokens_per_minute if you can"
            _log.warning("source %s %s; %s", self.name, problem, advice)

    def _request_answered(self, attempt: Attempt, reply: Reply, now: float) -> None:
        """Learn from the answer to a request, whatever number of calls it carried."""
        self._throttled.answered(attempt)
        self.pauses.answered(attempt.started_at)
        self.quota.answered(now, sent_at=attempt.started_at)
        self._announces = self._announces or bool(reply.announced)
        if self._announces:
            learned = self.quota.announced(reply.announced, now)
            if learned:
                _log.info("source %s: %s", self.name, learned)
        if attempt.result == "valid":
            # A quick invalid one says nothing about valid ones; learned from, it makes all other calls look silent.
            self.speed.learn(attempt.size, now - attempt.started_at)

    def expected_cost(self, request: Request) -> float:
        """The most that an answer to `request` can cost, in dollars."""
        return self._cost(*self._most(request))

    def _cost(self, prompt: float, completion: float, *, requests: int = 1) -> float:
        price = self.price
        cost = requests * price.per_request + prompt * price.input_per_million / 1e6
        return cost + completion * price.output_per_million / 1e6

    def throttled(self, attempt: Attempt, retry_after_s: float | None, now: float, *, error: str) -> bool:
        """Note a 429: pause the source as it asks, and learn its limits, unless the 429 may be due to its own sample
        (`ThrottledSamples`). Return whether it may. `error`: its message, for the log.
        """
        others = self._throttled.note(attempt, self.live, retry_after_s, now)
        self.pauses.accepted(self._throttled.accepted_at)
        if not others:
            return True
        if retry_after_s is not None:
            retry_after_s = self._throttled.shortest_s(retry_after_s, now)
        sent_at = attempt.started_at
        in_pause = self.pauses.covers(sent_at)
        learned = self.quota.throttled(
            now, sent_at=sent_at, retry_after_s=retry_after_s, in_pause=in_pause, others=others
        )
        if learned:
            message = f"{learned} ({error})" if error else learned
            if message != self._logged_limit:
                self._logged_limit = message
                _log.warning("source %s: %s", self.name, message)
        pause_s = self.pauses.throttled(retry_after_s, sent_at, now)
        if pause_s is not None:
            _log.info("source %s asks for a pause of %.1f s", self.name, pause_s)
        return False

    def refuses(self, attempt: Attempt) -> bool:
        """Whether it throttles the sample of `attempt` for what it is, and so will never accept it."""
        return self._throttled.refuses(attempt, self.live)

    # State for people

    def state(self, now: float) -> str:
        """Its state in one or two words."""
        health, closed = self.health, self.breaker.closed
        if self._held:
            return "held"
        if health.unusable or (health.refusing and not closed):
            return "unusable"
        if self.pauses.left_s(now) > 0:
            return "paused"
        if not closed:
            return "down"
        return "degraded" if health.degraded else "up"

    def problem(self, now: float) -> str:
        """Why it takes no samples now, with its last error; "" if only its limits hold them back."""
        if self.health.unusable:
            return f"{self.name} is unusable ({self.health.unusable})"
        if held := self._held:
            return f"{self.name}: {held}"
        if not self.breaker.closed:
            error = self.health.last_error
            return f"{self.name} is down ({error})" if error else f"{self.name} has an open circuit"
        return f"{self.name} throttles" if self.pauses.left_s(now) > 0 else ""

    def gauges(self, now: float) -> SourceGauges:
        """Its state, use and learned limits, for observers."""
        use = self.quota.use(now)
        return SourceGauges(
            state=self.state(now),
            in_flight=self.quota.in_flight,
            requests_share=use.requests_share,
            tokens_share=use.tokens_share,
            paced=use.paced,
            retries=self.retries.retries,
            learned=use.learned,
            budget_left_usd=min(
                (left for budget in self.budgets if (left := budget.left_usd(now)) is not None), default=None
            ),
            replicas=tuple(self.source.replica_statistics(now)),
        )


class Upstreams(dict[str, Upstream]):
    """The upstreams that take calls, by name.

    A removed upstream is not among them, but `upstreams[name]` still finds it: jobs that it failed refer to it by name.
    `on_drained` is called with it when its last attempt has ended.
    """

    def __init__(self, upstreams: Mapping[str, Upstream], *, on_drained: Callable[[Upstream], None]) -> None:
        super().__init__(upstreams)
        self._on_drained = on_drained
        self.tail = Tail()
        """At which ages attempts end, as a multiple of their expected latency: the sources learn it together."""
        self.draining: Sequence[Upstream] = ()
        """Removed upstreams with attempts under way."""
        self.all: Sequence[Upstream] = tuple(self.values())
        """All upstreams that may have attempts under way."""
        self._removed: dict[str, Upstream] = {}
        self._moves: dict[tuple[str, tuple[str, ...]], tuple[str, ...]] = {}

    def __missing__(self, name: str) -> Upstream:
        return self._removed[name]

    def change(self, upstreams: Mapping[str, Upstream], moves: Moves) -> frozenset[str]:
        """Go on with `upstreams`. Those that are not among them drain. Return the names that mean nothing, or another
        upstream, from now on.
        """
        leaving = [upstream for name, upstream in self.items() if upstreams.get(name) is not upstream]
        self._removed.update((upstream.name, upstream) for upstream in leaving)
        self.clear()
        self.update(upstreams)
        self._moves = {origin: moves.get((origin[0], target), target) for origin, target in self._moves.items()}
        self._moves.update(moves)
        self._drain((*self.draining, *leaving))
        return frozenset(upstream.name for upstream in leaving)

    def let_drained_go(self) -> None:
        """Forget the removed upstreams whose last attempt has ended."""
        drained = [upstream for upstream in self.draining if not upstream.live]
        if drained:
            self._drain([upstream for upstream in self.draining if upstream.live])
        for upstream in drained:
            self._on_drained(upstream)

    def _drain(self, draining: Sequence[Upstream]) -> None:
        self.draining, self.all = draining, (*self.values(), *draining)

    def settle(self, call: Call[Any]) -> None:
        """Let `call` name the sources that may answer it now. There may be none left."""
        if self._removed or self._moves:
            sources = self._moves.get((call.name, call.sources), call.sources)
            call.sources = tuple([name for name in sources if name in self])
