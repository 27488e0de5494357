"""The quota of one source: requests and tokens per window, and concurrency.

The scheduler calls `wait_s` and then `reserve` in one step of the event loop, so that no other call comes in between.
A declared limit is never raised by what a server announces or does. A limit that is not declared is learned from
announcements and 429s (concurrency.py): here while this process is alone (discovery.py), by the keeper as soon as
others share the source (learned_limit.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..config.source_models import Limits
from .concurrency import LARGEST, ConcurrencyWindow
from .discovery import WINDOW_S
from .pace import JITTER_S, BucketEvidence, Pace
from .reservation import Reservation
from .shares import shares
from .window_limit import WindowLimit

_CLEARLY_BELOW = 0.9
"""Part of a declared limit below which it does not explain a 429."""
_FAR_BELOW = 0.25
"""The same for a learned concurrency, which is less certain."""
_PAUSE_OF_A_WINDOW_S = 1.5
"""Shortest pause, in seconds, that a window explains; concurrency is free again sooner."""
_PER_OTHER, _OTHERS_TO_CUT = 8, 4
"""A learned concurrency is cut if one other sample for each 8 in flight is throttled, too, or 4 are: fewer may be
rejected for what they are."""


class Quota:
    """The quota of one source, kept in this process.

    `processes` is the number of processes that share the source's limits; this one takes an equal part. `slots` is the
    number of requests that the source can process at once in this process, None if unbounded. Raises
    `ConfigurationError` if the part is less than one request or one unit of concurrency. `jitter_s` is how much the
    network delays of two requests may differ, in seconds. With `most_learned` the concurrency is learned up to that
    number, whatever is declared.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        source: str,
        processes: int = 1,
        slots: int | None = None,
        jitter_s: float = JITTER_S,
        most_learned: int | None = None,
    ) -> None:
        self._jitter_s = jitter_s
        self._most_learned = most_learned
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
        self._requests, self._tokens = WindowLimit("requests"), WindowLimit("tokens")
        self._windows = (self._requests, self._tokens)
        self.requests, self.tokens = self._requests.ledger, self._tokens.ledger
        self.concurrency = 1
        """Largest number of requests in flight: declared, the source's slots, or learned."""
        self._window: ConcurrencyWindow | None = None
        self._tokens_in_flight = 0.0
        self._pace: Pace | None = None
        self._evidence = BucketEvidence()
        self._throttled_at = -math.inf
        self._nothing_accepted_since: float | None = None
        self._message: str | None = None
        self._declare(-math.inf)
        if limits.window == "bucket":
            self._pace_until(math.inf)

    # Queries and reservations

    @property
    def declares_concurrency(self) -> bool:
        """Whether `concurrency` is declared, or the number of the source's slots; otherwise it is learned."""
        return self._window is None

    @property
    def most_at_once(self) -> int:
        """Most requests in flight that the source takes from all processes that share its quota."""
        return self._limits.concurrency or self.concurrency

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
        discovery = self._requests.discovery
        return self.requests.limit, self._requests.window_s if discovery is None else discovery.window_s

    def tokens_per_window(self) -> float:
        """Return the declared or learned tokens per window; infinity if there is no limit."""
        return self.tokens.limit

    def wait_s(self, tokens: float, now: float, *, shares_request: bool = False) -> float:
        """Return the seconds until a request of `tokens` may be sent. With `shares_request`, until an attempt
        of `tokens` may share a request that has a reservation of its own.

        0 if it may be sent now. Infinity if the time is unknown, because it must wait for a request in flight to end,
        or if it never fits.
        """
        if now >= self.valid_until:
            return math.inf
        if shares_request:
            return self._tokens.wait_s(tokens, now)
        if self.in_flight >= self.concurrency:
            return math.inf
        wait = 0.0 if self.requests.limit == math.inf else self._requests.wait_s(1.0, now)
        if self.tokens.limit != math.inf:
            wait = max(wait, self._tokens.wait_s(tokens, now))
        pace = self._pace
        if pace is not None and now < pace.until:
            paced_s = pace.wait_s(now, self.requests.held)
            if paced_s > wait:
                wait = max(wait, min(paced_s, pace.until - now))
        return wait

    def left(self, now: float) -> float:
        """Return the tokens of the window that are not spent; those that are held are left."""
        return self.tokens.limit - (self.tokens.spent(now) - self.tokens.held)

    def capacity(self, until: float, tokens: float, now: float) -> float:
        """Return how many requests of `tokens` each may be sent in [now, until] by windows and pacing; infinity if
        there is no limit. Ignores concurrency. Takes O(log n).
        """
        most = self._requests.capacity(until, 1.0, now)
        if self.tokens.limit != math.inf:
            most = min(most, self._tokens.capacity(until, tokens, now))
        if self._pace is not None and now < self._pace.until:
            most = min(most, self._pace.capacity(until, now, self.requests.held))
        return most

    def reserve(
        self,
        prompt_tokens: float,
        completion_tokens: float,
        now: float,
        *,
        shares_request: bool = False,
    ) -> Reservation:
        """Reserve the most that one attempt can need.

        `shares_request`: the attempt shares a request that has a reservation of its own, so it needs tokens only.
        """
        reservation = Reservation(self, prompt_tokens, completion_tokens, shares_request=shares_request)
        tokens = prompt_tokens + completion_tokens
        if tokens:
            reservation.token_probe = self._tokens.reserve(tokens, now)
            self._tokens_in_flight += tokens
        if shares_request:
            return reservation
        reservation.request_probe = self._requests.reserve(1.0, now)
        self.in_flight += 1
        if self._window is not None and self.in_flight >= self.concurrency:
            self._window.filled()
        return reservation

    # Results, 429s and announcements

    def withdraw(self, request_entry: int, prompt_entry: int, prompt_tokens: float) -> None:
        """Remove a rejected request from the ledgers of undeclared limits. Called by `Reservation.release`."""
        self._requests.withdraw(request_entry, 1.0)
        self._tokens.withdraw(prompt_entry, prompt_tokens)

    def sent(self, now: float) -> int:
        """Record that a request is written. Return its entry in the ledger. Called by `Reservation`."""
        if self._pace is not None:
            self._pace.spend(now)
        return self.requests.stamp(1.0, now)

    def raised(self, tokens: float) -> None:
        """Record that the reservation of a request in flight was raised by `tokens`."""
        self._tokens_in_flight += tokens

    def ended(self, reservation: Reservation, now: float, rejected: bool) -> None:
        """Record the end of an attempt. Called by `Reservation.release`."""
        tokens = reservation.tokens
        if rejected and not self.in_flight:
            self._evidence.rejects_all = True
        message = self._requests.ended(now, reservation.sent_at, rejected, reservation.request_probe)
        if tokens:
            self._tokens_in_flight -= tokens
            message = self._tokens.ended(now, reservation.sent_at, rejected, reservation.token_probe) or message
        if message is not None:
            self._message = message

    def answered(self, now: float, *, sent_at: float | None = None) -> None:
        """Record a success. It raises a learned concurrency that is fully used.

        `sent_at` is when its request was sent; None counts as `now`. An answer to a request from before the last cut
        does not show that the server accepts requests again.
        """
        sent_at = now if sent_at is None else sent_at
        if self._nothing_accepted_since is not None and sent_at >= self._nothing_accepted_since:
            self._nothing_accepted_since = None
        self._evidence.rejects_all = False
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

    def throttled(
        self,
        now: float,
        *,
        sent_at: float,
        retry_after_s: float | None,
        in_pause: bool = False,
        others: float = math.inf,
    ) -> str | None:
        """Learn from a 429, after its reservation was released with `rejected=True`. Return a log message if a limit
        changed. One `in_pause` says only that the pause goes on. `others`: how many other samples are throttled, too.

        The 429 is attributed to a window if it asks for a pause of 1.5 s or more, otherwise to a token bucket or to
        concurrency.
        """
        if self._nothing_accepted_since is None or now - self._throttled_at > WINDOW_S:
            self._nothing_accepted_since = now
        self._throttled_at = now
        since = self._nothing_accepted_since
        silent_s = now - since
        pause_s = retry_after_s if retry_after_s is not None else max(_PAUSE_OF_A_WINDOW_S, silent_s)
        for window in self._windows:
            if window.discovery is not None and window.discovery.probe_rejected:
                return window.discovery.throttled(now, sent_at=sent_at, pause_s=pause_s, since=since)
        message, self._message = self._message, None
        if in_pause and not self.in_flight:
            return message
        long_pause = retry_after_s is not None and retry_after_s >= _PAUSE_OF_A_WINDOW_S
        discovery = self._requests.discovery
        refuted = discovery is not None and now - discovery.refuted_at < discovery.window_s
        if refuted and long_pause and self.in_flight > 0:
            long_pause = False  # an earlier pause of this source proved not to come from a window
        if discovery is not None and long_pause:
            return discovery.throttled(now, sent_at=sent_at, pause_s=pause_s, since=since) or message
        message = self._note_bucket(now, sent_at) or message
        learned = self._window
        few = others < min(_OTHERS_TO_CUT, self.in_flight // _PER_OTHER)
        if learned is not None and not (long_pause or few) and learned.throttled(now, sent_at, self.in_flight):
            self.concurrency = int(learned.size)
            message = message or f"throttled: at most {self.concurrency} in flight from now on"
        return message

    def announced(self, announced: Mapping[str, float], now: float) -> str | None:
        """Apply the limits that a reply announced (`Reply.announced`). Return a log message if a limit changed.

        An undeclared limit is learned from them, if several replies announce the same.
        """
        messages, self._message = [self._message], None
        for window, in_flight in zip(self._windows, (float(self.in_flight), self._tokens_in_flight), strict=True):
            messages.append(window.announced(announced, in_flight=in_flight, processes=self._processes, now=now))
        return "; ".join(filter(None, messages)) or None

    def retune(self, limits: Limits, now: float) -> None:
        """Change the declared limits while requests are in flight. What was spent stays spent.

        Raises `ConfigurationError` and changes nothing if this process's part would be less than one.
        """
        new = shares(limits, source=self._source, processes=self._processes, slots=self._slots)
        self._limits, self._shares = limits, new
        self._declare(now)
        if limits.window == "sliding" or new.requests == math.inf:
            self._pace, self._evidence = None, BucketEvidence()
        elif limits.window == "bucket":
            self._pace_until(math.inf)
        elif self._pace is not None and self._pace.until == math.inf:
            self._pace = None
        if self._pace is not None:
            self._pace.change(new.pace_per_s, new.burst, now)

    def serve(self, source: str, *, slots: int | None) -> None:
        """Count for the source of this name, which has this many slots, in place of the one so far. `retune` follows,
        which applies both.
        """
        self._source, self._slots = source, slots

    def forget_in_flight(self, now: float) -> None:
        """Count all requests in flight as ended, after their event loop was closed."""
        self.in_flight = 0
        self._tokens_in_flight = 0.0
        self.epoch += 1
        if self._pace is not None:
            self._pace.spend(now, self.requests.held)
        for window in self._windows:
            window.forget_in_flight(now)

    def use(self, now: float) -> QuotaUse:
        """Return a snapshot of the usage."""
        window = self._window
        return QuotaUse(
            requests_share=self.requests.share(now),
            tokens_share=self.tokens.share(now),
            paced=self._pace is not None and now < self._pace.until,
            learned_requests_per_minute=self._requests.learned_per_minute,
            learned_tokens_per_minute=self._tokens.learned_per_minute,
            learned_concurrency=float(self.concurrency) if window is not None and window.cut else None,
        )

    def _declare(self, now: float) -> None:
        """Take the declared limits over. Those that are not declared are learned; what was learned of them is kept."""
        new, processes = self._shares, self._processes
        self.most_tokens = new.tokens
        """The whole window of the declared token limit; infinity if none is declared. Learned limits do not count: they
        may be wrong."""
        self._requests.declare(new.requests, new.requests * processes, new.window_s, now)
        self._tokens.declare(new.tokens, new.tokens * processes, new.tokens_window_s, now)
        if new.concurrency is not None and self._most_learned is None:
            self._window = None
            self.concurrency = new.concurrency
        else:
            self._window = self._window or ConcurrencyWindow(self._most_learned or LARGEST)
            self.concurrency = int(self._window.size)

    def _pace_until(self, until: float) -> None:
        if self._shares.requests < math.inf:
            if self._pace is None:
                self._pace = Pace(self._shares.pace_per_s, self._shares.burst, jitter_s=self._jitter_s)
            self._pace.until = until

    def _note_bucket(self, now: float, sent_at: float) -> str | None:
        """Record a 429 that no other limit explains; return a log message if pacing starts."""
        if self._limits.window != "auto" or self._shares.requests == math.inf:
            return None
        if self._pace is not None and now < self._pace.until:
            return None
        for ledger in (self.requests, self.tokens):
            if ledger.spent(now) >= _CLEARLY_BELOW * ledger.limit:
                return None
        if self._window is None:
            crowded = self.in_flight + 1 >= _CLEARLY_BELOW * self.concurrency
        else:
            crowded = self.in_flight >= _FAR_BELOW * self._window.size
        if (crowded and self.in_flight > 0) or not self._evidence.throttled(now, sent_at, self._shares.window_s):
            return None
        self._pace = None
        self._pace_until(self._evidence.paced_until)
        return (
            "throttled below its declared limits, as by a token bucket: requests are paced for"
            f" {self._evidence.paced_until - now:.0f} s (set `window: bucket` to pace from the start)"
        )


@dataclass(frozen=True)
class QuotaUse:
    """A snapshot of the usage and the learned limits of one quota.

    `requests_share` and `tokens_share` are used fractions (0..1) of this process's part of the limit. A field is None
    if there is no such limit, or none was learned.
    """

    requests_share: float | None
    tokens_share: float | None
    paced: bool
    learned_requests_per_minute: float | None
    learned_tokens_per_minute: float | None
    learned_concurrency: float | None
    """None until the source throttled for it: before that the concurrency is a guess."""

    @property
    def learned(self) -> str:
        """The learned limits, for people; "" if there are none."""
        found = []
        if self.learned_requests_per_minute is not None:
            found.append(f"really about {_shown(self.learned_requests_per_minute)} requests a minute")
        if self.learned_tokens_per_minute is not None:
            found.append(f"really about {_shown(self.learned_tokens_per_minute)} tokens a minute")
        if self.learned_concurrency is not None:
            found.append(f"really about {self.learned_concurrency:,.0f} at once")
        if self.paced:
            found.append("counts like a token bucket")
        return ", ".join(found)


def _shown(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"
