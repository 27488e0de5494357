"""The quick constructor of frozen dataclasses does what that of `dataclasses` does."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import FrozenInstanceError, dataclass, field, replace
from typing import Any

import pytest

from qreward_plugins.samples import RawScore, Sample, Verdict
from qreward_plugins.samples.frozen import quick
from qreward_plugins.samples.spent import Spent, Usage
from qreward_plugins.sources.base import Reply, Request

MADE: dict[type, dict[str, Any]] = {
    Usage: {"prompt_tokens": 3},
    Spent: {"usage": Usage(1, 2)},
    RawScore: {"score": 7.0},
    Verdict: {"score": 0.5, "components": {"help": 1.0}, "steps": ((3, 0.25),)},
    Request: {"messages": [{"role": "user", "content": "q"}], "sample": Sample([], "r")},
    Reply: {"text": "a"},
}


@pytest.mark.parametrize("cls", MADE)
def test_the_values_that_each_sample_makes_are_as_by_the_slow_constructor(cls: type) -> None:
    slowly = cls.__init__.__wrapped__  # type: ignore[misc]
    quickly, other = cls(**MADE[cls]), object.__new__(cls)
    slowly(other, **MADE[cls])
    assert quickly == other
    assert type(quickly) is cls
    assert repr(quickly) == repr(other)
    for same in (pickle.loads(pickle.dumps(quickly)), copy.copy(quickly), copy.deepcopy(quickly), replace(quickly)):
        assert same == quickly
        assert type(same) is cls
    assert inspect.signature(cls.__init__, follow_wrapped=False) == inspect.signature(slowly)
    with pytest.raises(FrozenInstanceError):
        setattr(quickly, next(iter(MADE[cls])), 1)


def test_a_subclass_has_its_own_fields_and_the_check_of_its_parent() -> None:
    @dataclass(frozen=True, slots=True)
    class Longer(Verdict):
        more: int = 7

    longer = Longer(0.5, more=8)
    assert (longer.score, longer.more, type(longer)) == (0.5, 8, Longer)
    with pytest.raises(ValueError, match="finite"):
        Longer(float("nan"))


def test_defaults_are_made_for_each_object_and_what_no_parameter_sets_has_its_default() -> None:
    @quick
    @dataclass(frozen=True, slots=True)
    class Made:
        first: int
        each: list[int] = field(default_factory=list)
        named: int = field(default=3, kw_only=True)
        kept: int = field(default=5, init=False)

    made, other = Made(1), Made(1, named=4)
    assert made.each is not other.each
    assert (made.named, other.named, made.kept) == (3, 4, 5)
    for wrong in (lambda: Made(), lambda: Made(1, [], 4), lambda: Made(1, kept=4)):  # type: ignore[call-arg,misc]
        with pytest.raises(TypeError, match="__init__"):
            wrong()
