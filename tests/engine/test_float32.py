"""P2 as trainers have it: rewards are held in float32, so what is infinite there is no number of ours, either."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qreward_plugins import Cause, ConfigurationError, Failed, Verdict
from qreward_plugins.config import load_config
from qreward_plugins.samples import fits_float32


def in_float32(number):
    """What a trainer holds; infinite where struct refuses to round that far."""
    try:
        return struct.unpack(">f", struct.pack(">f", number))[0]
    except OverflowError:
        return math.copysign(math.inf, number)


@given(st.floats() | st.floats(min_value=3.4e38, max_value=3.5e38) | st.integers())
def test_a_verdict_holds_what_is_finite_in_float32_and_nothing_else(number):
    finite = not (isinstance(number, int) and abs(number) > 10**300) and math.isfinite(in_float32(number))
    assert fits_float32(number) is finite
    for build in (Verdict, _with_component, _with_floor):
        if finite:
            build(number)
        else:
            with pytest.raises(ValueError, match="finite in float32"):
                build(number)


def _with_component(value):
    return Verdict(0.5, {"tone": value})


def _with_floor(value):
    return Verdict(value, basis="floor", failure=Failed(Cause.POLICY, "empty"))


@pytest.mark.parametrize(
    "tree",
    [
        {"judges": {"j": {"kind": "llm", "reward_range": [0, 1e39]}}},
        {"judges": {"j": {"kind": "llm", "floor": -1e39}}},
        {"judges": {"j": {"kind": "llm"}, "s": {"kind": "sum", "weights": {"j": 1e39}}}, "routes": {"*": "s"}},
        {"judges": {"j": {"kind": "llm"}}, "on_failure": {"constant": -1e39}},
    ],
)
def test_the_configuration_holds_no_such_number_either(tree):
    source = {"kind": "openai", "base_url": "http://127.0.0.1:9/v1", "model": "judge"}
    with pytest.raises(ConfigurationError, match="infinite in float32"):
        load_config({"sources": {"a": source}, **tree})
