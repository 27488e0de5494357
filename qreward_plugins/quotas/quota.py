"""The quota of one source: requests and tokens per window, and concurrency.

The scheduler calls `wait_s` and then `reserve` in one step of the event loop, so that no other call comes in between.
A declared limit is never raised by what a server announces or does. A limit that is not declared is learned from
announcements and 429s (discovery.py, concurrency.py) and kept as long as the quota lives.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Literal, TypeAlias

from ..config.models import Limits
from .announcements import Announcements, Ceiling
from .concurrency import ConcurrencyWindow
from .discovery import WINDOW_S, Discovery
from .ledger import Ledger
from .pace import BucketEvidence, Pace
from .reservation import Reservation
from .shares import shares
from .use import QuotaUse

Unit: TypeAlias = Literal["requests", "tokens"]

_CLEARLY_BELOW = 0.9
_FAR_BELOW = 0.25
_PAUSE_OF_A_WINDOW_S = 1.5
_WITHDRAWN = 4096


class Quota:
    """The quota of one source, kept in this process.

    `processes` is the number of processes that share the source's limits; this one takes an equal part. `slots` is the
    number of requests that the source can process at once in this process, None if unbounded. Raises
    `ConfigurationError` if the part is less than one request or one unit of concurrency.
    """

    def __init__(self, limits: Limits, *, source: str, processes: int = 1, slots: int | None = None) -> None:
        self._source = source
        self._processes = processes
        self._slots = slots
        self._limits = limits
        self._shares = shares(limits, source=source, processes=processes, slots=slots)
        self.valid_until = math.inf
        """When this process's quota expires, in seconds of the clock of `now`; infinity if never."""
        self.in_flight = 0
        self.epoch = 0
        """Number of event loops closed with requests in flight. Reservations of an earlier epoch are ignored."""
        self.requests = Ledger(self._shares.requests, self._shares.window_s)
        self.tokens = Ledger(self._shares.tokens, self._shares.tokens_window_s)
        self.found_requests: Discovery | None = None
        self.found_tokens: Discovery | None = None
        self.concurrency = 1
        """Largest number of requests in flight: declared, the source's slots, or learned."""
        self._window: ConcurrencyWindow | None = None
        self._tokens_in_flight = 0.0
        self._pace: Pace | None = None
        self._paced_until = -math.inf
        self._evidence = BucketEvidence()
        self._throttled = 0
        self._throttled_at = -math.inf
        self._nothing_accepted_since: float | None = None
        self._withdrawn: deque[tuple[int, int, float]] = deque(maxlen=_WITHDRAWN)
        self._announced: dict[str, float] = {}
        self._announcements = {"requests": Announcements(), "tokens": Announcements()}
        self._ceilings = {"requests": Ceiling(), "tokens": Ceiling()}
        self._message: str | None = None
        self._learn_what_is_undeclared()
        if limits.window == "bucket":
            self._pace_until(math.inf)

    # Queries and reservations

    @property
    def rate_per_s(self) -> float:
        """Requests per second that the declared or learned limit allows this process; infinity if there is none."""
        requests, window_s = self.per_window()
        return requests / window_s

    @property
    def burst(self) -> float:
        """Number of requests that may be sent at once when the window is empty."""
        return self.requests.limit

    def per_window(self) -> tuple[float, float]:
        """Return the declared or learned requests per window, and the length of the window in seconds."""
        found = self.found_requests
        return self.requests.limit, self._shares.window_s if found is None else found.window_s

    def tokens_per_window(self) -> float:
        """Return the declared or learned tokens per window; infinity if there is no limit."""
        return self.tokens.limit

    @property
    def most_tokens(self) -> float:
        """The whole window of the declared token limit; infinity if none is declared.

        Learned limits do not count, because they may be wrong.
        """
        return self._shares.tokens

    def fits_ever(self, tokens: float) -> bool:
        """Return whether a request that needs at least `tokens` can ever be sent under the declared limit."""
        return tokens <= self.most_tokens

    def wait_s(self, tokens: float, now: float) -> float:
        """Return the seconds until a request of `tokens` may be sent.

        0 if it may be sent now. Infinity if the time is unknown, because it must wait for a request in flight to end,
        or if it never fits.
        """
        if self.in_flight >= self.concurrency:
            return math.inf
        wait = 0.0
        if self.requests.limit != math.inf:
            found = self.found_requests
            wait = self._declared_wait_s("requests", 1.0, now) if found is None else found.wait_s(1.0, now)
        if self.tokens.limit != math.inf:
            found = self.found_tokens
            wait = max(
                wait, self._declared_wait_s("tokens", tokens, now) if found is None else found.wait_s(tokens, now)
            )
        if self._pace is not None and now < self._paced_until:
            wait = max(wait, min(self._pace.wait_s(now), self._paced_until - now))
        return wait

    def _declared_wait_s(self, unit: Unit, amount: float, now: float) -> float:
        """Return the seconds until `amount` fits the declared limit, or a lower one that the server announces."""
        ledger, ceiling = (self.requests if unit == "requests" else self.tokens), self._ceilings[unit]
        if ceiling.limit == math.inf:
            return ledger.wait_s(amount, now)
        wait = ledger.wait_s(min(amount, ledger.limit) if ledger.limit >= 1 else amount, now)
        if wait <= 0 or ceiling.probe_in_s(now) == math.inf:
            return wait
        kept, ledger.limit = ledger.limit, self._part(unit)
        try:
            return min(wait, max(ledger.wait_s(amount, now), ceiling.probe_in_s(now)))
        finally:
            ledger.limit = kept

    def _part(self, unit: Unit) -> float:
        """Return this process's part of the declared limit."""
        return self._shares.requests if unit == "requests" else self._shares.tokens

    def _keep_to_ceilings(self, now: float) -> None:
        """Scale this process's parts of the declared limits down to lower limits that the server announces."""
        units: tuple[tuple[Unit, Ledger], ...] = (("requests", self.requests), ("tokens", self.tokens))
        for unit, ledger in units:
            part, whole = self._part(unit), self._declared(unit)
            if part == math.inf:
                continue
            factor = min(1.0, self._ceilings[unit].limit / whole) if whole else 1.0
            scaled = part * factor
            if unit == "requests":
                scaled = max(min(part, 1.0), math.floor(scaled + 1e-9))
                if self._pace is not None and self._shares.pace_per_s > 0:
                    self._pace.change(self._shares.pace_per_s * factor, self._shares.burst, now)
            ledger.limit = scaled

    def capacity(self, until: float, tokens: float, now: float) -> float:
        """Return how many requests of `tokens` each may be sent in [now, until] by windows and pacing; infinity if
        there is no limit. Ignores concurrency. Takes O(log n).
        """
        most = math.inf
        if self.requests.limit != math.inf:
            most = self.requests.capacity(until, 1.0, now)
        if self.tokens.limit != math.inf and tokens > 0:
            amount = tokens if self.found_tokens is None else min(tokens, self.tokens.limit)
            most = min(most, self.tokens.capacity(until, amount, now))
        if self._pace is not None and now < self._paced_until:
            most = min(most, self._pace.capacity(until, now))
        return most if until >= now else 0.0

    def reserve(
        self, prompt_tokens: float, completion_tokens: float, now: float, *, beside: bool = False
    ) -> Reservation:
        """Reserve the most that one attempt can need. `beside` exempts it from the concurrency limit."""
        reservation = Reservation(self, prompt_tokens, completion_tokens, beside=beside)
        tokens = prompt_tokens + completion_tokens
        found = self.found_requests
        if found is not None and found.origin:
            reservation.request_probe = found.reserved(1.0, now)
        elif found is None and self._beyond("requests", 1.0, now):
            reservation.request_probe = "probe"
        found = self.found_tokens
        if found is not None and found.origin:
            reservation.token_probe = found.reserved(tokens, now)
        elif found is None and self._beyond("tokens", tokens, now):
            reservation.token_probe = "probe"
        self.requests.held += 1.0
        self.tokens.held += tokens
        self._tokens_in_flight += tokens
        if self._pace is not None:
            self._pace.spend(now)
        self.in_flight += not beside
        if self._window is not None and self.in_flight >= self.concurrency:
            self._window.filled()
        return reservation

    def _beyond(self, unit: Unit, amount: float, now: float) -> bool:
        """Return whether `amount` exceeds the announced limit, and if so record its request as the probe of it."""
        ledger, ceiling = (self.requests if unit == "requests" else self.tokens), self._ceilings[unit]
        if ceiling.limit == math.inf or ledger.wait_s(min(amount, ledger.limit), now) <= 0:
            return False
        ceiling.probe_sent()
        return True

    # Results, 429s and announcements

    def withdraw(self, request_entry: int, prompt_entry: int, prompt_tokens: float) -> None:
        """Remove a rejected request from the ledgers of undeclared limits. Called by `Reservation.release`."""
        requests = request_entry if self.found_requests is not None else -1
        tokens = prompt_entry if self.found_tokens is not None else -1
        self.requests.amend(requests, -1.0)
        self.tokens.amend(tokens, -prompt_tokens)
        if requests >= 0 or tokens >= 0:
            self._withdrawn.append((requests, tokens, prompt_tokens))

    def raised(self, tokens: float) -> None:
        """Record that the reservation of a request in flight was raised by `tokens`."""
        self._tokens_in_flight += tokens

    def ended(self, reservation: Reservation, now: float, rejected: bool) -> None:
        """Record the end of an attempt. Called by `Reservation.release`."""
        self._tokens_in_flight -= reservation.tokens
        sent_at, message = reservation.sent_at, None
        if self.found_requests is not None and self.found_requests.origin:
            message = self.found_requests.ended(
                now, sent_at=sent_at, rejected=rejected, probe=reservation.request_probe
            )
        if self.found_tokens is not None and self.found_tokens.origin:
            message = (
                self.found_tokens.ended(now, sent_at=sent_at, rejected=rejected, probe=reservation.token_probe)
                or message
            )
        probes: tuple[tuple[Unit, str, Discovery | None], ...] = (
            ("requests", reservation.request_probe, self.found_requests),
            ("tokens", reservation.token_probe, self.found_tokens),
        )
        for unit, probe, found in probes:
            if probe and found is None:
                ceiling, before = self._ceilings[unit], self._ceilings[unit].limit
                window_s = self._shares.window_s if unit == "requests" else self._shares.tokens_window_s
                sent = sent_at > -math.inf
                if ceiling.probe_ended(now, sent=sent, rejected=rejected, window_s=window_s):
                    self._keep_to_ceilings(now)
                    message = f"accepted more than the announced {before:g} {unit}: back to the declared limit"
        self._message = message or self._message

    def answered(self, now: float, *, sent_at: float | None = None) -> None:
        """Record a success. It raises a learned concurrency that is fully used.

        `sent_at` is when its request was sent; None counts as `now`. An answer to a request from before the last cut
        does not show that the server accepts requests again.
        """
        sent_at = now if sent_at is None else sent_at
        if self._nothing_accepted_since is not None and sent_at >= self._nothing_accepted_since:
            self._nothing_accepted_since = None
        if self._window is not None:
            self._window.answered(sent_at)
            self.concurrency = int(self._window.size)

    def timed_out(self, now: float, *, sent_at: float) -> None:
        """Record that a request timed out. Cuts a learned concurrency as a 429 does, because an overloaded source may
        queue requests without a 429.
        """
        window = self._window
        if window is not None and window.throttled(now, sent_at, self.in_flight):
            self.concurrency = int(window.size)

    def throttled(self, now: float, *, sent_at: float, retry_after_s: float | None) -> str | None:
        """Learn from a 429, after its reservation was released with `rejected=True`. Return a log message if a limit
        changed.

        The 429 is attributed to a window if it asks for a pause of 1.5 s or more, or if no request was accepted for
        that long and none is in flight. Otherwise it is attributed to concurrency.
        """
        self._throttled += 1
        if self._nothing_accepted_since is None or now - self._throttled_at > WINDOW_S:
            self._nothing_accepted_since = now
        self._throttled_at = now
        since = self._nothing_accepted_since
        silent_s = now - since
        pause_s = retry_after_s if retry_after_s is not None else max(_PAUSE_OF_A_WINDOW_S, silent_s)
        for found in (self.found_requests, self.found_tokens):
            if found is not None and found.probe_rejected:
                return found.throttled(now, sent_at=sent_at, pause_s=pause_s, since=since)
        message, self._message = self._message, None
        long_pause = retry_after_s is not None and retry_after_s >= _PAUSE_OF_A_WINDOW_S
        silent = silent_s >= _PAUSE_OF_A_WINDOW_S and self.in_flight == 0
        found = self.found_requests
        if found is not None and long_pause and self.in_flight > 0 and now - found.refuted_at < found.window_s:
            long_pause = False  # an earlier pause of this source proved not to come from a window
        if found is not None and (long_pause or silent):
            return found.throttled(now, sent_at=sent_at, pause_s=pause_s, since=since) or message
        message = self._bucket_found(now) or message
        window = self._window
        if window is not None and not long_pause and window.throttled(now, sent_at, self.in_flight):
            self.concurrency = int(window.size)
            many = "1 request" if self.concurrency == 1 else f"{self.concurrency} requests"
            message = message or f"throttled: at most {many} in flight from now on"
        return message

    def announced(self, announced: Mapping[str, float], now: float) -> str | None:
        """Apply the limits that a reply announced (`Reply.announced`). Return a log message if a limit changed.

        An undeclared limit is learned from them. A declared limit is replaced by a lower announced one. Both need
        several replies that announce the same.
        """
        message, self._message = self._message, None
        units: tuple[tuple[Unit, Discovery | None, float], ...] = (
            ("requests", self.found_requests, float(self.in_flight)),
            ("tokens", self.found_tokens, self._tokens_in_flight),
        )
        for unit, found, under_way in units:
            limit = announced.get(f"{unit}_per_window")
            remaining, news = announced.get(f"{unit}_remaining"), None
            if limit is None or limit < 1 or (remaining is not None and remaining > limit):
                limit = remaining = None  # none, or inconsistent
            else:
                self._announced[unit] = limit
            if found is not None:
                believed = self._announcements[unit].note(limit)
                if believed is not None and believed == limit:
                    reset_s = announced.get(f"{unit}_reset_s")
                    news = found.announced(
                        limit, remaining, reset_s, in_flight=under_way, share=self._processes, now=now
                    )
            else:
                news = self._lower(unit, limit, remaining, under_way, now)
            message = "; ".join(filter(None, (message, news))) or None
        return message

    def _lower(
        self,
        unit: Unit,
        limit: float | None,
        remaining: float | None,
        under_way: float,
        now: float,
    ) -> str | None:
        """Record what a reply announces of a declared limit; return a log message if that changes the ceiling."""
        ledger, declared = (self.requests if unit == "requests" else self.tokens), self._declared(unit)
        if limit is not None and remaining is not None and limit < declared:
            ours, theirs = ledger.spent(now) - under_way, limit - remaining
            if ours > theirs + max(2.0, 0.1 * theirs):
                limit = None  # the server counts over a shorter window
            elif remaining > limit / 2:
                return None  # too little is used to tell which window it counts
        window_s = self._shares.window_s if unit == "requests" else self._shares.tokens_window_s
        ceiling = self._ceilings[unit]
        if not ceiling.set(self._announcements[unit].note(limit), declared=declared, window_s=window_s, now=now):
            return None
        self._keep_to_ceilings(now)
        if ceiling.limit == math.inf:
            return f"no lower limit of {unit} announced any more: back to the declared {declared:g}"
        return f"announced limit of {ceiling.limit:g} {unit} is below the declared {declared:g}: the lower one applies"

    def retune(self, limits: Limits, now: float) -> None:
        """Change the declared limits while requests are in flight. What was spent stays spent.

        Raises `ConfigurationError` and changes nothing if this process's part would be less than one.
        """
        new = shares(limits, source=self._source, processes=self._processes, slots=self._slots)
        self._limits, self._shares = limits, new
        self._count_rejected(requests=new.requests < math.inf, tokens=new.tokens < math.inf)
        for ledger, found, limit, window_s in (
            (self.requests, self.found_requests, new.requests, new.window_s),
            (self.tokens, self.found_tokens, new.tokens, new.tokens_window_s),
        ):
            if limit < math.inf or found is None:
                ledger.limit = limit
                ledger.change_window(window_s, now)
        self._learn_what_is_undeclared()
        if limits.window == "sliding" or new.requests == math.inf:
            self._pace, self._evidence = None, BucketEvidence()
        elif limits.window == "bucket":
            self._pace_until(math.inf)
        elif self._paced_until == math.inf:
            self._pace = None
        if self._pace is not None:
            self._pace.change(new.pace_per_s, new.burst, now)
        self._keep_to_ceilings(now)

    def forget_in_flight(self, now: float) -> None:
        """Count all requests in flight as ended, after their event loop was closed."""
        self.in_flight = 0
        self._tokens_in_flight = 0.0
        self.epoch += 1
        self.requests.stamp_all(now)
        self.tokens.stamp_all(now)
        for found in (self.found_requests, self.found_tokens):
            if found is not None:
                found.abandon(now)
        for ceiling in self._ceilings.values():
            ceiling.abandon(now)

    def use(self, now: float) -> QuotaUse:
        """Return a snapshot of the usage."""
        found, tokens, window = self.found_requests, self.found_tokens, self._window
        return QuotaUse(
            in_flight=self.in_flight,
            concurrency=self.concurrency,
            requests_share=self.requests.share(now),
            tokens_share=self.tokens.share(now),
            paced=self._pace is not None and now < self._paced_until,
            learned_requests_per_minute=found.per_minute if found is not None else None,
            learned_tokens_per_minute=tokens.per_minute if tokens is not None else None,
            learned_concurrency=float(self.concurrency) if window is not None and window.cut else None,
            learned_from=found.origin if found is not None else "",
            announced_requests_per_window=self._announced.get("requests"),
            announced_tokens_per_window=self._announced.get("tokens"),
            throttled=self._throttled,
        )

    def _declared(self, unit: Unit) -> float:
        """Return the whole declared limit, of all processes."""
        return self._part(unit) * self._processes

    def _learn_what_is_undeclared(self) -> None:
        """Start learning of each limit that is not declared, stop it for each that is, and keep what was learned."""
        declared = self._shares
        if declared.requests < math.inf:
            self.found_requests = None
        elif self.found_requests is None:
            self.found_requests = Discovery(self.requests, "requests", declared.window_s)
        if declared.tokens < math.inf:
            self.found_tokens = None
        elif self.found_tokens is None:
            self.found_tokens = Discovery(self.tokens, "tokens", declared.tokens_window_s)
        if declared.concurrency is not None:
            self._window = None
            self.concurrency = declared.concurrency
        else:
            self._window = self._window or ConcurrencyWindow()
            self.concurrency = int(self._window.size)

    def _count_rejected(self, *, requests: bool, tokens: bool) -> None:
        """Count rejected requests again at limits that are declared from now on."""
        still_off = deque[tuple[int, int, float]](maxlen=_WITHDRAWN)
        for request, prompt, prompt_tokens in self._withdrawn:
            if requests:
                self.requests.amend(request, 1.0)
                request = -1
            if tokens:
                self.tokens.amend(prompt, prompt_tokens)
                prompt = -1
            if request >= 0 or prompt >= 0:
                still_off.append((request, prompt, prompt_tokens))
        self._withdrawn = still_off

    def _pace_until(self, until: float) -> None:
        if self._shares.requests < math.inf:
            if self._pace is None:
                self._pace = Pace(self._shares.pace_per_s, self._shares.burst)
            self._paced_until = until

    def _bucket_found(self, now: float) -> str | None:
        """Record a 429 that no other limit explains; return a log message if pacing starts."""
        if self._limits.window != "auto" or self._shares.requests == math.inf or now < self._paced_until:
            return None
        for ledger in (self.requests, self.tokens):
            if ledger.spent(now) >= _CLEARLY_BELOW * ledger.limit:
                return None
        if self._window is None:
            crowded = self.in_flight + 1 >= _CLEARLY_BELOW * self.concurrency
        else:
            crowded = self.in_flight >= _FAR_BELOW * self._window.size
        if (crowded and self.in_flight > 0) or not self._evidence.throttled(now, self._shares.window_s):
            return None
        self._pace = None
        self._pace_until(self._evidence.paced_until)
        return (
            "throttled below its declared limits, as by a token bucket: requests are paced for"
            f" {self._paced_until - now:.0f} s (set `window: bucket` to pace from the start)"
        )
