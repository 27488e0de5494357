"""Tests whether a model can judge, on pairs of a right answer and obvious nonsense.

A valid verdict only shows that a model follows the output format. Very small models do that, too, but copy the words of
the prompt or give random scores, and the policy would train on noise. So `qreward check` lets every LLM judge score
these pairs, and reports a judge that does not score every right answer higher. The start of an engine asks reward
models about the same pairs (`starts`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from ..errors import InvalidReply
from ..samples import Message, Sample


@dataclass(frozen=True)
class Pair:
    """A question, a good answer to it, and a bad one."""

    question: str
    good: str
    bad: str
    reference: str

    def sample(self, response: str, *, like: Sample) -> Sample:
        """Return a sample with this question and `response`; its data source and extra columns are those of `like`."""
        messages: list[Message] = [{"role": "user", "content": self.question}]
        return replace(like, messages=messages, prompt=None, response=response, ground_truth=self.reference)


PAIRS = (
    Pair(
        "What is 17 plus 25? Answer with the number.",
        "17 plus 25 is 42.",
        "Purple ladders hum because soup is a Tuesday.",
        "42",
    ),
    Pair(
        "Which planet is closest to the Sun?",
        "The planet closest to the Sun is Mercury.",
        "Who cares, go away. Maybe bananas, or the Moon.",
        "Mercury",
    ),
    Pair(
        "Name the opposite of the word 'cold'.",
        "The opposite of 'cold' is 'hot'.",
        "asdf qwer zxcv asdf qwer zxcv asdf",
        "hot",
    ),
)


@dataclass(frozen=True)
class Trial:
    """The rewards of the pairs as (good, bad).

    A reward is None if the verdict was invalid; `flaws` holds the reason of each invalid verdict. `cause` is why a
    reward model may have given all texts the same numbers; "" if it did not.
    """

    pairs: tuple[tuple[float | None, float | None], ...]
    flaws: tuple[str, ...]
    cause: str = ""

    @property
    def problem(self) -> str:
        """Why this judge cannot judge, or "" if it can. One invalid verdict is tolerated."""
        rewards = [reward for pair in self.pairs for reward in pair]
        valid = [reward for reward in rewards if reward is not None]
        if len(self.flaws) > 1 or not valid:
            return f"{len(self.flaws)} of {len(rewards)} test answers got no valid verdict; the last: {self.flaws[-1]}"
        if len(set(valid)) == 1:
            because = f": {self.cause}" if self.cause else ""
            return f"it gives right answers and nonsense the same reward, {valid[0]:.3g}{because}"
        won = sum(good > bad for good, bad in self.pairs if good is not None and bad is not None)
        counted = sum(good is not None and bad is not None for good, bad in self.pairs)
        if won < counted:
            shown = ", ".join(f"{_shown(good)} and {_shown(bad)}" for good, bad in self.pairs)
            return (
                f"it cannot tell a right answer from nonsense: the right one scored higher in {won} of {counted} pairs "
                f"(right and nonsense: {shown})"
            )
        return ""


CAUSE_OF_EQUAL = (
    "the server may apply a softmax or another activation (a softmax over one logit is 1 for every text; ask for raw "
    "numbers), cut every text to the same few tokens (truncate_prompt_tokens), or serve a model whose last layer was "
    "not trained"
)
"""Why a reward model may give all texts the same numbers."""


async def try_out(judge: Callable[[Sample], Awaitable[float]], like: Sample) -> Trial:
    """Let `judge` score both answers of every pair, one after the other.

    The samples take the data source and extra columns of `like`, because instructions may use them. InvalidReply
    becomes a flaw; other exceptions of `judge` are raised.
    """
    pairs: list[tuple[float | None, float | None]] = []
    flaws: list[str] = []

    async def reward(pair: Pair, response: str) -> float | None:
        try:
            return await judge(pair.sample(response, like=like))
        except InvalidReply as error:
            flaws.append(str(error))
            return None

    for pair in PAIRS:
        pairs.append((await reward(pair, pair.good), await reward(pair, pair.bad)))
    return Trial(tuple(pairs), tuple(flaws))


def _shown(reward: float | None) -> str:
    return "none" if reward is None else f"{reward:.3g}"
