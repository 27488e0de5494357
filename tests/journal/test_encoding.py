"""Values as bytes: equal values alike in every process, different ones never alike, nothing where there is doubt."""

from __future__ import annotations

import datetime
import decimal
import enum
import hashlib
import math
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from qreward_plugins.journal.keys import encoded
from qreward_plugins.samples import Sample

from ..kit import each_of

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")


class Colour(enum.Enum):
    RED = 1


class Loud:
    def __repr__(self) -> str:
        raise RuntimeError


def image(colour: Any, mode: str = "RGB", size: tuple[int, int] = (2, 3)) -> Any:
    return Image.new(mode, size, colour)


@each_of(
    ("one", "other"),
    [
        ({1, 2, 3}, {3, 2, 1}),
        (math.nan, float("-nan")),
        (np.array([1, 2]), np.array([1, 9, 2])[::2]),
        (np.array([[1, 2], [3, 4]]), np.asfortranarray([[1, 2], [3, 4]])),
        (np.array([{"a": 1}, "x", None], dtype=object), np.array([{"a": 1}, "x", None], dtype=object)),
        (OmegaConf.create({"a": [1, 2]}), OmegaConf.create({"a": [1, 2]})),
        (image("red"), image("red")),
        (Sample([], "x", extras={"a": 1}), Sample([], "x", extras={"a": 1})),
        # A judge is sent JSON, where these are alike.
        ((1, 2), [1, 2]),
    ],
)
def test_equal_values(one: Any, other: Any) -> None:
    assert encoded(one) == encoded(other)


DIFFERENT: list[Any] = [
    None, False, True, 0, 1, -1, 1.0, -0.0, math.nan, math.inf, 2**63, 2**64, "", "1", "None", "\ud800", "\udfff", "?",
    b"", b"1", bytearray(b"1"), [], {}, set(), frozenset(), [None], [[]], ["a", "b"], ["ab"], ["ab", ""], [["a"], "b"],
    {"a": 1}, {"a": "1"}, {"a": True}, {"a": 1.0}, {"1": "a"}, {1: "a"}, {True: "a"}, {"\0builtins.bytes": "31"},
    np.array([{1: "a"}], dtype=object), np.array([{"1": "a"}], dtype=object), "\U0001f600", "\ud83d\ude00",
    {"a": {"b": 1}}, {"a": 1, "b": 2}, {"b": 2, "a": 1}, {1},
    np.array([1, 2]), np.array([[1, 2]]), np.array([1.0, 2.0]), np.array([1, 2], dtype=object), np.array(["1", "2"]),
    np.array([1, 2], dtype="M8[s]"), np.array([1, 2], dtype="<i4"), np.array(1), np.datetime64(1, "s"),
    np.datetime64("NaT", "s"), np.timedelta64(1, "s"), np.int32(1), np.int64(1), np.float32(1), np.bool_(True),
    decimal.Decimal("1"), datetime.date(2024, 1, 1), datetime.datetime(2024, 1, 1), datetime.timedelta(1),
    datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone.utc),
    datetime.datetime(2024, 10, 27, 2), datetime.datetime(2024, 10, 27, 2, fold=1),
    OmegaConf.create({"a": 1}), OmegaConf.create([]),
    image("red"), image("blue"), image("red", size=(3, 2)), image(1, mode="L"),
    Sample([], "x"), Sample([], "x", id="1"), Sample([], "x", step=1), Sample([], "x", prompt="1"),
]  # fmt: skip


def test_different_values() -> None:
    assert len({encoded(value) for value in DIFFERENT}) == len(DIFFERENT)


def cyclic() -> list[Any]:
    cycle: list[Any] = []
    cycle.extend([cycle, cycle])
    return cycle


@each_of(
    "value",
    [
        object(),
        Loud(),
        Sample,
        image(1, mode="P"),
        Colour.RED,
        cyclic(),
        print,
        complex(1, 2),
        np.array([object()]),
        np.array([1 + 2j]),
        np.longdouble(1),
        np.ma.masked_array([1, 2], mask=[True, False]),
        iter([]),
        {("a", object()): 1},
    ],
)
def test_a_value_that_cannot_be_told_from_others_is_refused(value: Any) -> None:
    for each in (value, [value]):
        with pytest.raises((TypeError, ValueError)):
            encoded(each)


def test_the_bytes_are_the_same_in_every_process() -> None:
    program = (
        "from qreward_plugins.journal.keys import encoded\n"
        "print(encoded({'set': {'a', 'b', 'c', 'd', 1, None}, 'bad': '\\ud800'}))\n"
    )
    found = set()
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        found.add(subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, check=True).stdout)
    assert len(found) == 1


def test_known_bytes() -> None:
    """Another encoding would make every journal forget; change the `person` of the keys' hash when it has to be."""
    value = {"b": [1, -2.5, None, True], "a": ({"x": {3}, "1": b"\0"},), "\u00fc": math.nan}
    assert hashlib.blake2b(encoded(value), digest_size=8).hexdigest() == "e6fb3f6bfef55d1f"


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.decimals()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    max_leaves=10,
)


@settings(deadline=None)
@given(VALUES, VALUES)
def test_equal_bytes_mean_equal_values(one: Any, other: Any) -> None:
    # A repr tells apart what == does not (1, 1.0 and True), and NaN equals itself.
    assert (encoded(one) == encoded(other)) == (repr(one) == repr(other))
