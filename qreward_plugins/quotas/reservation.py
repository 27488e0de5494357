"""What one attempt holds of a quota, from before it is sent until the source is done with it.

Tokens are reserved as an upper bound (prompt plus the longest completion asked for) and settled with the real usage as
soon as it is known: what a limit forbids never happens, and what was reserved in vain is free again after one latency
rather than one window. A request and its prompt count from when they are written, a completion from when it has come:
servers count it somewhere in between, and a long answer may well outlast the window in which it was asked for.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .discovery import Probe

if TYPE_CHECKING:
    from .quota import Quota


class Reservation:
    """The part of a quota that one attempt holds. Release it exactly once, whatever became of the attempt."""

    __slots__ = (
        "_completion",
        "_epoch",
        "_prompt",
        "_prompt_entry",
        "_quota",
        "_request_entry",
        "beside",
        "held",
        "request_probe",
        "sent_at",
        "token_probe",
    )

    def __init__(self, quota: Quota, prompt_tokens: float, completion_tokens: float, *, beside: bool = False) -> None:
        self._quota = quota
        self.beside = beside
        """Whether it holds no concurrency."""
        self._epoch = quota.epoch
        self._prompt = prompt_tokens
        self._completion = completion_tokens
        self._request_entry = -1
        self._prompt_entry = -1
        self.held = True
        self.sent_at = -math.inf
        """When the request was written; minus infinity: it was not, as far as anybody said."""
        self.request_probe: Probe = ""
        self.token_probe: Probe = ""
        """Whether it went although a learned limit forbade it, to find out whether that limit is right."""

    def sent(self, now: float) -> None:
        """Note that the request was really written at `now`."""
        if self.sent_at > -math.inf or not self.held or self._epoch != self._quota.epoch:
            return
        self.sent_at = now
        self._stamp(now)

    def raise_prompt(self, prompt_tokens: float) -> None:
        """Hold more for the prompt, because it turned out that texts like it take more; never less."""
        more = prompt_tokens - self._prompt
        if more <= 0 or not self.held or self._epoch != self._quota.epoch:
            return
        self._prompt = prompt_tokens
        if self._prompt_entry >= 0:
            self._quota.tokens.amend(self._prompt_entry, more)
        elif self.sent_at == -math.inf:
            self._quota.tokens.hold(more)
        self._quota.raised(more)

    def release(
        self,
        now: float,
        *,
        prompt_tokens: float | None = None,
        completion_tokens: float | None = None,
        rejected: bool = False,
    ) -> None:
        """Give the concurrency back and settle the tokens; None: unknown, the reserved amount stays spent.

        `rejected`: the server throttled it. Then there is no completion. Under a declared limit the request and its
        prompt stay spent, because providers count what they reject; under a learned one they do not, because what
        was rejected says nothing of what is accepted.
        """
        if not self.held:
            return
        quota = self._quota
        if self._epoch != quota.epoch:
            self.held = False
            return
        if self.sent_at == -math.inf:
            self._stamp(now)  # it may have been sent, whatever the source said
        self.held = False
        quota.in_flight -= not self.beside
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
                tokens.hold(prompt_tokens)
                tokens.stamp(prompt_tokens, now)
        if rejected:
            quota.withdraw(self._request_entry, self._prompt_entry, self._prompt)
        quota.ended(self, now, rejected)

    @property
    def tokens(self) -> float:
        """Tokens reserved."""
        return self._prompt + self._completion

    def _stamp(self, now: float) -> None:
        self._request_entry = self._quota.requests.stamp(1.0, now)
        if self._prompt:
            self._prompt_entry = self._quota.tokens.stamp(self._prompt, now)
