"""Whole engines in virtual time, over sources that follow a script."""

from __future__ import annotations

import pytest

from ..kit import Recorder, Stage, scored_text


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def make_engine():
    """An engine whose sources, given with their behaviour, answer in virtual time."""

    def make(observers=(), *, answers=scored_text, price=None, deadline_s=300.0, top=None, engine=None, **behaviours):
        behaviours = behaviours or {"a": 1.0}
        options = {
            "limits": {name: {"concurrency": 8} for name in behaviours},
            "source": {"model": "m", "price": price or {}},
            "engine": {"seed": 1, "deadline_s": deadline_s, "scheduling": {"hedge": False}, **(engine or {})},
            **(top or {}),
        }
        return Stage(behaviours, answer=answers, options=options).engine(observers)

    return make
