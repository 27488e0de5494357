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

from importlib import import_module
from typing import Any

from ..judges.extraction import extracted
from . import comparisons, forms
from .comparisons import choice, exact, number, regex
from .forms import length, repetition, tags

__all__ = ["choice", "exact", "extracted", "length", "number", "regex", "repetition", "tags"]

_NEEDS = {
    "math": ("math_verify", "math-verify", comparisons.mathematics),
    "json_schema": ("jsonschema", "jsonschema", forms.json_schema),
}


def __getattr__(name: str) -> Any:
    # An engine with a check whose package is missing must not start: each sample would fail.
    if name not in _NEEDS:
        raise AttributeError(name)
    module, package, check = _NEEDS[name]
    try:
        # Here and not in the first call: a worker gets no call before it has loaded its function, so no sample waits
        # for the import, which takes a second on a busy machine.
        import_module(module)
    except ImportError:
        raise ImportError(f'the check `{name}` needs {package}: pip install "qreward-plugins[math]"') from None
    return check
