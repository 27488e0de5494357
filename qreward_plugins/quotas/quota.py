"""The quota of one source: requests and tokens per window, and concurrency.

The scheduler calls `wait_s` and then `reserve` in one step of the event loop, so that no other call comes in between.
A declared limit is never raised by what a server announces or does. A limit that is not declared is learned from
announcements and 429s (concurrency.py): here while this process is alone (discovery.py), by the keeper as soon as
others share the source (learned_limit.py).

Tokens are reserved as an upper bound (prompt plus longest possible completion) and settled with the real usage when it
is known. So the limit is never exceeded, and unused tokens are free after one latency, not after one window.

A request and its prompt count from when they are written, a completion from when it has arrived. Servers count the
completion somewhere in between, and a long answer may outlast the window of its request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..config.source_models import Limits
from .concurrency import LARGEST, ConcurrencyWindow
from .discovery import WINDOW_S, Probe
from .pace import JITTER_S, Pacing
from .shares import QuotaUse, shares
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
        self._most_learned = most_learned
        self._source = source
        self._processes, self._slots = processes, slots
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
        self._pacing = Pacing(jitter_s=jitter_s)
        self._throttled_at = -math.inf
        self._nothing_accepted_since: float | None = None
        self._message: str | None = None
        self._declare(-math.inf)

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
        return self.per_window()[0]

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
        pace = self._pacing.pace
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
        pace = self._pacing.pace
        if pace is not None and now < pace.until:
            most = min(most, pace.capacity(until, now, self.requests.held))
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

    def sent(self, now: float) -> int:
        """Record that a request is written. Return its entry in the ledger."""
        if self._pacing.pace is not None:
            self._pacing.pace.spend(now)
        return self.requests.stamp(1.0, now)

    def ended(self, reservation: Reservation, now: float, rejected: bool) -> None:
        """Record the end of an attempt."""
        tokens = reservation.tokens
        if rejected and not self.in_flight:
            self._pacing.rejects_all = True
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
        self._pacing.rejects_all = False
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
        if not self._explained(now):
            message = self._pacing.throttled(now, sent_at, self._shares) or message
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
        self._shares = shares(limits, source=self._source, processes=self._processes, slots=self._slots)
        self._limits = limits
        self._declare(now)

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
        if self._pacing.pace is not None:
            self._pacing.pace.spend(now, self.requests.held)
        for window in self._windows:
            window.forget_in_flight(now)

    def use(self, now: float) -> QuotaUse:
        """Return a snapshot of the usage."""
        window = self._window
        return QuotaUse(
            requests_share=self.requests.share(now),
            tokens_share=self.tokens.share(now),
            paced=self._pacing.active(now),
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
        self._pacing.declare(self._limits, new, now)
        self._requests.declare(new.requests, new.requests * processes, new.window_s, now)
        self._tokens.declare(new.tokens, new.tokens * processes, new.tokens_window_s, now)
        if new.concurrency is not None and self._most_learned is None:
            self._window = None
            self.concurrency = new.concurrency
        else:
            self._window = self._window or ConcurrencyWindow(self._most_learned or LARGEST)
            self.concurrency = int(self._window.size)

    def _explained(self, now: float) -> bool:
        """Whether a limit of this quota explains a 429, so that it is no sign of a token bucket."""
        if self._limits.window != "auto" or self._shares.requests == math.inf or self._pacing.active(now):
            return True
        if any(ledger.spent(now) >= _CLEARLY_BELOW * ledger.limit for ledger in (self.requests, self.tokens)):
            return True
        if self._window is None:
            crowded = self.in_flight + 1 >= _CLEARLY_BELOW * self.concurrency
        else:
            crowded = self.in_flight >= _FAR_BELOW * self._window.size
        return crowded and self.in_flight > 0


class Reservation:
    """The part of a quota that one attempt holds. Release it once, however the attempt ends."""

    __slots__ = (
        "_completion",
        "_epoch",
        "_prompt",
        "_prompt_entry",
        "_quota",
        "_request_entry",
        "held",
        "request_probe",
        "sent_at",
        "shares_request",
        "token_probe",
    )

    def __init__(
        self,
        quota: Quota,
        prompt_tokens: float,
        completion_tokens: float,
        *,
        shares_request: bool = False,
    ) -> None:
        self._quota = quota
        self.shares_request = shares_request
        """Whether the attempt shares a request that has a reservation of its own: it holds tokens only."""
        self._epoch = quota.epoch
        self._prompt = prompt_tokens
        self._completion = completion_tokens
        self._request_entry = -1
        self._prompt_entry = -1
        self.held = True
        self.sent_at = -math.inf
        """When the request was written; minus infinity if the source did not report that it was."""
        self.request_probe: Probe = ""
        self.token_probe: Probe = ""
        """How the request relates to a learned limit: a probe exceeds it on purpose, to test it."""

    def sent(self, now: float) -> None:
        """Record that the request was written at `now`."""
        if self.sent_at > -math.inf or not self.held or self._epoch != self._quota.epoch:
            return
        self.sent_at = now
        self._stamp(now)

    def raise_prompt(self, prompt_tokens: float) -> None:
        """Raise the tokens of the prompt, after similar texts took more than estimated. Never lowers them."""
        more = prompt_tokens - self._prompt
        if more <= 0 or not self.held or self._epoch != self._quota.epoch:
            return
        self._prompt = prompt_tokens
        if self._prompt_entry >= 0:
            self._quota.tokens.amend(self._prompt_entry, more)
        elif self.sent_at == -math.inf:
            self._quota.tokens.held += more
        self._quota._tokens_in_flight += more

    def release(
        self,
        now: float,
        *,
        prompt_tokens: float | None = None,
        completion_tokens: float | None = None,
        rejected: bool = False,
    ) -> None:
        """Give the concurrency back and settle the tokens. Tokens that are None are unknown: the reserved amount stays
        spent.

        `rejected` says that the server answered 429, so that there is no completion. Under a declared limit the request
        and its prompt stay spent, because providers count rejected requests. Under a learned limit they do not, because
        the limit is measured by what the server accepted.
        """
        if not self.held:
            return
        quota = self._quota
        if self._epoch != quota.epoch:
            self.held = False
            return
        if self.sent_at == -math.inf:
            self._stamp(now)  # it may have been sent, although the source did not report it
        self.held = False
        quota.in_flight -= not self.shares_request
        tokens = quota.tokens
        if rejected:
            completion_tokens = 0.0
        if self._completion or completion_tokens:
            completion = self._completion if completion_tokens is None else completion_tokens
            tokens.held += completion - self._completion
            tokens.stamp(completion, now)
        if prompt_tokens is not None and prompt_tokens != self._prompt:
            if self._prompt_entry >= 0:
                tokens.amend(self._prompt_entry, prompt_tokens - self._prompt)
            else:
                tokens.held += prompt_tokens
                tokens.stamp(prompt_tokens, now)
        if rejected:
            # Only from the ledgers of limits that are not declared.
            quota._requests.withdraw(self._request_entry, 1.0)
            quota._tokens.withdraw(self._prompt_entry, self._prompt)
        quota.ended(self, now, rejected)

    @property
    def tokens(self) -> float:
        """Number of tokens reserved."""
        return self._prompt + self._completion

    def _stamp(self, now: float) -> None:
        if not self.shares_request:
            self._request_entry = self._quota.sent(now)
        if self._prompt:
            self._prompt_entry = self._quota.tokens.stamp(self._prompt, now)
