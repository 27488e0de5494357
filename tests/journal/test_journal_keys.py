"""The key of a sample: equal for equal samples in every process, different otherwise, absent when in doubt."""

from __future__ import annotations

import datetime
import decimal
import enum
import math
import os
import subprocess
import sys
from collections import OrderedDict
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from qreward_plugins.journal import sample_key
from qreward_plugins.samples import Message, Sample

SAMPLE = Sample(messages=[Message(role="user", content="2+2?")], response="4", ground_truth="4", data_source="math")


def key(value: Any) -> str | None:
    return sample_key(replace(SAMPLE, extras={"value": value}), "judge")


def test_the_key_depends_on_what_the_verdict_depends_on_and_nothing_else() -> None:
    first = sample_key(SAMPLE, "judge")
    assert first is not None
    assert len(first) == 40
    same = replace(SAMPLE, id="7", step=3, split="val", group_id="g", messages=tuple(SAMPLE.messages))
    assert sample_key(same, "judge") == first
    others = [
        replace(SAMPLE, messages=[Message(role="user", content="2+3?")]),
        replace(SAMPLE, messages=[Message(role="system", content="2+2?")]),
        replace(SAMPLE, messages=[*SAMPLE.messages, *SAMPLE.messages]),
        replace(SAMPLE, response="5"),
        replace(SAMPLE, ground_truth=4),
        replace(SAMPLE, ground_truth=None),
        replace(SAMPLE, data_source="maths"),
        replace(SAMPLE, response="", data_source="math4"),
        replace(SAMPLE, extras={"a": 1}),
    ]
    keys = {first, sample_key(SAMPLE, "other"), *(sample_key(other, "judge") for other in others)}
    assert None not in keys
    assert len(keys) == len(others) + 2


def test_a_known_key() -> None:
    """A changed encoding would make every journal forget; change the hash's `person` when it has to."""
    sample = replace(SAMPLE, extras={"b": [1, -2.5, None, True], "a": {"x": {3}, 1: b"\0"}, "ü": math.nan})
    assert sample_key(sample, "judge") == "8e437c99a81a39daf0e4e8eca1debfea5d676bb9"


class Colour(enum.Enum):
    RED = 1


class Loud:
    def __repr__(self) -> str:
        raise RuntimeError


ALIKE: list[tuple[Any, Any]] = [
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ({"a": {"x": 1, "y": 2}}, OrderedDict(a=MappingProxyType({"y": 2, "x": 1}))),
    ({1, 2, 3}, {3, 2, 1}),
    ({"b", "a"}, frozenset(["a", "b"])),
    ([1, 2], (1, 2)),
    ([1, {"a": 2}], OmegaConf.create([1, {"a": 2}])),
    (math.nan, float("-nan")),
    (math.nan, np.float64("nan")),
    (3, np.int32(3)),
    (0.5, np.float32(0.5)),
    (True, np.bool_(True)),
    ("a", np.str_("a")),
    (b"a", np.bytes_(b"a")),
    (3, np.array(3)),
    (b"a", bytearray(b"a")),
    (np.array([1, 2]), np.array([1, 9, 2])[::2]),
    (np.array([1.5, 2.0]), np.array([1.5, 2.0], dtype=">f8")),
    (np.array([[1, 2], [3, 4]]), np.asfortranarray([[1, 2], [3, 4]])),
    (np.array([{"a": 1}, "x", None], dtype=object), np.array([{"a": 1}, "x", None], dtype=object)),
    (np.array(["a", "bc"]), np.array(["a", "bc"], dtype="<U9")),
]


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_equal_values(one: Any, other: Any) -> None:
    assert key(one) is not None
    assert key(one) == key(other)


DIFFERENT: list[Any] = [
    None,
    False,
    True,
    0,
    1,
    -1,
    1.0,
    -0.0,
    math.nan,
    math.inf,
    "",
    "1",
    "None",
    b"",
    b"1",
    [],
    {},
    set(),
    [None],
    [[]],
    ["a", "b"],
    ["ab"],
    ["ab", ""],
    [["a"], "b"],
    {"a": 1},
    {"a": "1"},
    {1: "a"},
    {"1": "a"},
    {1.0: "a"},
    {"a": {"b": 1}},
    {"a": 1, "b": 2},
    {"a": 2, "b": 1},
    {1},
    2**63,
    2**64,
    -(2**63),
    "\ud800",
    "\udfff",
    "?",
    np.array([1, 2]),
    np.array([[1, 2]]),
    np.array([1.0, 2.0]),
    np.array([1, 2], dtype=object),
    np.array(["1", "2"]),
    np.array([1, 2], dtype="M8[s]"),
    np.array([1, 2], dtype="M8[D]"),
    np.datetime64(1, "s"),
    np.datetime64("NaT", "s"),
    np.timedelta64(1, "s"),
    decimal.Decimal("1"),
    datetime.date(2024, 1, 1),
    datetime.datetime(2024, 1, 1),
    datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone.utc),
    datetime.timedelta(1),
]


def test_different_values() -> None:
    keys = [key(value) for value in DIFFERENT]
    assert None not in keys
    assert len(set(keys)) == len(DIFFERENT)


def cyclic() -> list[Any]:
    cycle: list[Any] = []
    cycle.extend([cycle, cycle])
    return cycle


def doubled() -> list[Any]:
    """A small object that would be large when written out."""
    value: list[Any] = []
    for _ in range(60):
        value = [value, value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        object(),
        Loud(),
        Colour.RED,
        cyclic(),
        doubled(),
        print,
        complex(1, 2),
        np.array([object()]),
        np.array([1 + 2j]),
        np.longdouble(1),
        np.ma.masked_array([1, 2], mask=[True, False]),
        iter([]),
        {("a", object()): 1},
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_cannot_be_told_from_others_has_no_key(value: Any) -> None:
    assert key(value) is None
    assert sample_key(replace(SAMPLE, ground_truth=[value]), "judge") is None


def test_the_key_is_the_same_in_every_process() -> None:
    program = (
        "import numpy, decimal, datetime\n"
        "from qreward_plugins.journal import sample_key\n"
        "from qreward_plugins.samples import Sample\n"
        "extras = {'set': {'a', 'b', 'c', 'd', 1, None}, 'array': numpy.arange(6).reshape(2, 3),\n"
        "          'x': {'b': 1, 'a': 2}, 'd': decimal.Decimal('1.50'), 'bad': '\\ud800',\n"
        "          'when': datetime.datetime(2024, 1, 1)}\n"
        "print(sample_key(Sample(messages=[], response='', extras=extras), 'judge'))\n"
    )
    keys = set()
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        keys.add(subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, check=True).stdout)
    assert len(keys) == 1
    assert len(keys.pop().strip()) == 40


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.decimals()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.one_of(st.text(), st.integers()), inner)),
    max_leaves=10,
)


@settings(deadline=None)
@given(VALUES, VALUES)
def test_equal_keys_mean_equal_values(one: Any, other: Any) -> None:
    assert key(one) is not None
    # A repr tells apart what == does not (1, 1.0 and True), and NaN equals itself.
    assert (key(one) == key(other)) == (canonical(one) == canonical(other))


def canonical(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(sorted(f"{key!r}:{canonical(item)}" for key, item in value.items())) + "}"
    if isinstance(value, list):
        return "[" + ",".join(canonical(item) for item in value) + "]"
    return repr(value)
