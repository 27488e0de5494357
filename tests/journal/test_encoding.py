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
from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from qreward_plugins.journal.keys import Unencodable, encoded
from qreward_plugins.samples import Sample

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")


class Colour(enum.Enum):
    RED = 1


class Loud:
    def __repr__(self) -> str:
        raise RuntimeError


def image(colour: Any, mode: str = "RGB", size: tuple[int, int] = (2, 3)) -> Any:
    return Image.new(mode, size, colour)


ALIKE: list[tuple[Any, Any]] = [
    ({1, 2, 3}, {3, 2, 1}),
    ({"b", "a"}, {"a", "b"}),
    (math.nan, float("-nan")),
    ([1, {"a": 2}], [1, {"a": 2}]),
    (np.array([1, 2]), np.array([1, 9, 2])[::2]),
    (np.array([[1, 2], [3, 4]]), np.asfortranarray([[1, 2], [3, 4]])),
    (np.array([{"a": 1}, "x", None], dtype=object), np.array([{"a": 1}, "x", None], dtype=object)),
    (OmegaConf.create({"a": [1, 2]}), OmegaConf.create({"a": [1, 2]})),
    (image("red"), image("red")),
    (Sample([], "x", extras={"a": 1}), Sample([], "x", extras={"a": 1})),
]


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_equal_values(one: Any, other: Any) -> None:
    assert encoded(one) == encoded(other)


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
    datetime.datetime(2024, 10, 27, 2),
    datetime.datetime(2024, 10, 27, 2, fold=1),
    (),
    (None,),
    bytearray(b"1"),
    frozenset(),
    {"b": 2, "a": 1},
    {"a": True},
    {"a": 1.0},
    OrderedDict(a=1),
    MappingProxyType({"a": 1}),
    OmegaConf.create({"a": 1}),
    OmegaConf.create([]),
    np.int32(1),
    np.int64(1),
    np.float32(1),
    np.float64(1),
    np.bool_(True),
    np.str_("1"),
    np.array(1),
    np.array([1, 2], dtype="<i4"),
    image("red"),
    image("blue"),
    image("red", size=(3, 2)),
    image(1, mode="L"),
    Sample([], "x"),
    Sample([], "x", id="1"),
    Sample([], "x", step=1),
    Sample([], "x", prompt="1"),
]


def test_different_values() -> None:
    assert len({encoded(value) for value in DIFFERENT}) == len(DIFFERENT)


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
        Sample,
        image(1, mode="P"),
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
def test_a_value_that_cannot_be_told_from_others_is_refused(value: Any) -> None:
    with pytest.raises(Unencodable):
        encoded(value)
    with pytest.raises(Unencodable):
        encoded([value])


def test_the_bytes_are_the_same_in_every_process() -> None:
    program = (
        "import numpy, decimal, datetime\n"
        "from qreward_plugins.journal.keys import encoded\n"
        "extras = {'set': {'a', 'b', 'c', 'd', 1, None}, 'array': numpy.arange(6).reshape(2, 3),\n"
        "          'x': {'b': 1, 'a': 2}, 'd': decimal.Decimal('1.50'), 'bad': '\\ud800',\n"
        "          'when': datetime.datetime(2024, 1, 1)}\n"
        "print(encoded(extras))\n"
    )
    found = set()
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        found.add(subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, check=True).stdout)
    assert len(found) == 1


def test_known_bytes() -> None:
    """Another encoding would make every journal forget; change the `person` of the keys' hash when it has to be."""
    value = {"b": [1, -2.5, None, True], "a": ({"x": {3}, 1: b"\0"},), "ü": math.nan}
    digest = hashlib.blake2b(encoded(value), digest_size=8).hexdigest()
    assert digest == "4ea38f2be844635a"


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.decimals()),
    lambda inner: st.one_of(
        st.lists(inner), st.tuples(inner), st.dictionaries(st.one_of(st.text(), st.integers()), inner)
    ),
    max_leaves=10,
)


@settings(deadline=None)
@given(VALUES, VALUES)
def test_equal_bytes_mean_equal_values(one: Any, other: Any) -> None:
    # A repr tells apart what == does not (1, 1.0 and True), and NaN equals itself.
    assert (encoded(one) == encoded(other)) == (repr(one) == repr(other))
