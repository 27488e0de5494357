"""The advantages that slime's trainer computes from the rewards, without a model.

The KL penalty is taken as zero, and with ppo the critic's values, too. Then grpo, gspo, cispo and
reinforce_plus_plus_baseline give every token the normalised reward, reinforce_plus_plus gives the reward at the last
trained token, discounted backwards, and ppo the same from the last token. Whitening (`normalize_advantages`) is over
all trained tokens of the batch, as with one data-parallel rank.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from .floats import round32, sum32


def token_advantages(args: Namespace, rewards: Sequence[Any], loss_masks: Sequence[Sequence[int]]) -> list[list[float]]:
    """One number for each token of each sample.

    Raises the errors of slime's trainer: `TypeError` for a reward that is no number; with ppo `IndexError` for an empty
    response; with reinforce_plus_plus `AssertionError` for a sample without a trained token, so that `remove_sample`
    ends the run there; with `normalize_advantages` `ValueError` if no token of the batch is trained.
    """
    advantages = [
        _of_sample(args, index, reward, mask)
        for index, (reward, mask) in enumerate(zip(rewards, loss_masks, strict=True))
    ]
    return _whiten(advantages, loss_masks) if args.normalize_advantages else advantages


def sample_advantages(tokens: Sequence[Sequence[float]], loss_masks: Sequence[Sequence[int]]) -> list[float | None]:
    """The mean over the trained tokens of each sample; None if none is trained."""
    trained = [
        [value for value, counts in zip(values, mask, strict=True) if counts]
        for values, mask in zip(tokens, loss_masks, strict=True)
    ]
    return [math.fsum(values) / len(values) if values else None for values in trained]


def _of_sample(args: Namespace, index: int, reward: Any, mask: Sequence[int]) -> list[float]:
    value = float(reward)
    if args.advantage_estimator == "ppo":
        if not mask:
            raise IndexError(f"sample {index} has an empty response: ppo has no last token to give the reward to")
        return _discounted(value, len(mask) - 1, len(mask), args.gamma * args.lambd)
    if args.advantage_estimator == "reinforce_plus_plus":
        trained = [position for position, counts in enumerate(mask) if counts]
        assert trained, (
            f"Sequence at index {index} is fully masked: slime's reinforce_plus_plus cannot train a batch with it. "
            "Drop its group with a dynamic sampling filter, or do not set remove_sample"
        )
        return _discounted(value, trained[-1], len(mask), args.gamma)
    return [value] * len(mask)


def _discounted(reward: float, last: int, length: int, discount: float) -> list[float]:
    return [reward * discount ** (last - position) if position <= last else 0.0 for position in range(length)]


def _whiten(advantages: list[list[float]], loss_masks: Sequence[Sequence[int]]) -> list[list[float]]:
    """Whiten as slime does. It multiplies with the mask, so a NaN reaches the whole batch even if it is not trained.

    The variance is the mean square minus the square of the mean. For equal numbers only rounding is left of it, and the
    result is NaN if that is negative. slime's trainer trains on NaN then.
    """
    count = sum(map(sum, loss_masks))
    if not count:
        raise ValueError("no token of the batch is trained: slime cannot normalise its advantages")
    weighed = [
        (round32(value), counts)
        for values, mask in zip(advantages, loss_masks, strict=True)
        for value, counts in zip(values, mask, strict=True)
    ]
    mean = round32(sum32([value * counts for value, counts in weighed]) / count)
    mean_square = round32(sum32([round32(value * value) * counts for value, counts in weighed]) / count)
    variance = round32(mean_square - round32(mean * mean))
    if count >= 2:
        variance = round32(variance * round32(count / (count - 1)))
    radicand = round32(variance + round32(1e-8))
    scale = round32(1 / math.sqrt(radicand)) if radicand > 0 else math.nan
    return [[round32(round32(round32(value) - mean) * scale) for value in values] for values in advantages]
