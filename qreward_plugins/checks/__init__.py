"""Ready-made reward functions: exact answers, choices, numbers, patterns, JSON, tags, length, repetition; and `math`,
by math-verify.

Each is a reward function like a user's own, so it runs in the worker processes of a source of kind `function`: a
pattern that takes for ever is killed, and costs its own sample.

    sources:
      right: {kind: function, function: "qreward_plugins.checks:number", kwargs: {extract: boxed}}
    judges:
      right: {kind: function, reward_range: [0, 1], correct_at: 1}

A fault of the response gives 0. One of the data set (no ground truth, an option that does not exist) raises, so that
the sample fails and the log says why.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from .comparisons import choice, exact, extracted, mathematics, number, regex
from .forms import json_schema, length, repetition, tags

__all__ = ["choice", "exact", "extracted", "json_schema", "length", "number", "regex", "repetition", "tags"]


def __getattr__(name: str) -> Any:
    # An engine with `math` or `json_schema` must not start without the package that it needs.
    if name != "math":
        raise AttributeError(name)
    if find_spec("math_verify") is None:
        raise ImportError('the check `math` needs math-verify: pip install "qreward-plugins[math]"')
    return mathematics
