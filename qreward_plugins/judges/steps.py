"""Makes one score of the scores of a response's steps, and tells what each step adds to it.

A trainer with a critic can learn from a reward that comes at the end of the step that earned it. So the score is split
over the steps (`Verdict.dense`) in such a way that the parts add up to it: an estimator that only looks at their sum
trains as before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field, FiniteFloat

from ..config.nodes import no_bool

Reduction: TypeAlias = Literal["last", "min", "mean", "sum", "prod"]

Discount = Annotated[FiniteFloat, Field(gt=0, le=1), BeforeValidator(no_bool)]

_REDUCE: Mapping[str, Callable[[Sequence[float]], float]] = {
    "last": lambda scores: scores[-1],
    "min": min,
    "prod": math.prod,
}


def reduced(scores: Sequence[float], reduction: Reduction, discount: float = 1.0) -> float:
    """Return the score of a response from those of its steps. With `mean` and `sum`, the n-th step counts `discount` to
    the power of n, from 0.
    """
    if reduction in _REDUCE:
        return _REDUCE[reduction](scores)
    return math.fsum(
        score * weight for score, weight in zip(scores, _weights(scores, reduction, discount), strict=True)
    )


def parts_of_score(scores: Sequence[float], reduction: Reduction, discount: float = 1.0) -> Sequence[float]:
    """Return what each step adds to the score; empty for `prod`, which is no sum.

    `last`: each step adds by how much it is better than the one before (potential-based shaping; Ng, Harada and
    Russell, ICML 1999). `min`: the worst step adds all (min-form credit assignment; PURE, arXiv 2504.15275).
    """
    if reduction == "prod":
        return ()
    if reduction == "last":
        return [scores[0], *(after - before for before, after in pairwise(scores))]
    if reduction == "min":
        worst = scores.index(min(scores))
        return [score if place == worst else 0.0 for place, score in enumerate(scores)]
    return [score * weight for score, weight in zip(scores, _weights(scores, reduction, discount), strict=True)]


def _weights(scores: Sequence[float], reduction: Reduction, discount: float) -> Sequence[float]:
    weights = [discount**place for place in range(len(scores))]
    total = math.fsum(weights) if reduction == "mean" else 1.0
    return [weight / total for weight in weights]
