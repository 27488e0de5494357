"""The part of a quota that one attempt holds, from before it is sent until it ends.

Tokens are reserved as an upper bound (prompt plus longest possible completion) and settled with the real usage when it
is known. So the limit is never exceeded, and unused tokens are free after one latency, not after one window.

A request and its prompt count from when they are written, a completion from when it has arrived. Servers count the
completion somewhere in between, and a long answer may outlast the window of its request.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .discovery import Probe

if TYPE_CHECKING:
    from .quota import Quota


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
        self._quota.raised(more)

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
            quota.withdraw(self._request_entry, self._prompt_entry, self._prompt)
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
