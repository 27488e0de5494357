from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qreward_plugins.sources.values import MAX_NESTING, strict_decoder, too_deep

JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(JSON.filter(lambda value: not has_infinity(value)))
def test_json_is_read_as_it_is(value: Any) -> None:
    flaws: list[str] = []
    assert strict_decoder(flaws).decode(json.dumps(value)) == value
    assert flaws == []


def has_infinity(value: Any) -> bool:
    return "Infinity" in json.dumps(value)


@pytest.mark.parametrize(
    ("text", "flaw"),
    [
        ("NaN", "holds NaN, which is not JSON"),
        ('{"a": [-Infinity]}', "holds -Infinity, which is not JSON"),
        ('{"a": 1, "a": 1}', "has a duplicate key"),
        ('[{"b": {"a": 1, "b": 2, "a": 3}}]', "has a duplicate key"),
    ],
)
def test_what_python_would_let_pass_is_noted(text: str, flaw: str) -> None:
    flaws: list[str] = []
    strict_decoder(flaws).decode(text)
    assert flaws == [flaw]


def test_numbers_of_any_length_are_read_in_no_time() -> None:
    assert strict_decoder([]).decode("9" * 64) == int("9" * 64)
    assert strict_decoder([]).decode("9" * 100_000) == math.inf


def test_nesting_has_an_end() -> None:
    for opened, closed in ("[]", ("{", "}")):
        assert not too_deep(opened * MAX_NESTING + closed * MAX_NESTING)
        assert too_deep(opened * (MAX_NESTING + 1))
    assert not too_deep("[]" * 1000)
