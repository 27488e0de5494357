"""What a call or a verdict took: attempts, tokens, time and money, as one value that can be added."""

from __future__ import annotations

from dataclasses import dataclass

# These values are made several times for every sample. A frozen dataclass takes three times as long to make, so none is
# frozen; nobody changes one.


@dataclass(slots=True, unsafe_hash=True)
class Usage:
    """Tokens, as counted by the source."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """The part of the prompt tokens that the server read from its cache; 0 if it does not say."""
    thinking_tokens: int = 0
    """The part of the completion tokens that the model spent on its thoughts; 0 if the server does not say."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
            self.thinking_tokens + other.thinking_tokens,
        )


NO_USAGE = Usage()


@dataclass(slots=True, unsafe_hash=True)
class Spent:
    """What a call, or a verdict made of several calls, took.

    `usage` and `cost_usd` (US dollars) count every attempt whose usage the source reported. `latency_s` is the time
    from submission to the end in seconds, with waiting and retries.
    """

    attempts: int = 0
    usage: Usage = NO_USAGE
    latency_s: float = 0.0
    cost_usd: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        """The sum; its latency is the longer one, because both run at the same time."""
        return Spent(
            self.attempts + other.attempts,
            self.usage + other.usage,
            max(self.latency_s, other.latency_s),
            self.cost_usd + other.cost_usd,
        )


NOTHING = Spent()
