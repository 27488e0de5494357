"""Messages as JSON: what is written is read again, and what anybody else sends changes nothing and crashes nothing."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qreward_plugins.sharing.keeper import Keeper
from qreward_plugins.sharing.messages import (
    Answer,
    Charged,
    Grant,
    Part,
    Report,
    Revision,
    SourceAnswer,
    SourceNews,
    SourceReport,
)
from qreward_plugins.sharing.wire import (
    MOST_BYTES,
    Unreadable,
    dump,
    load,
    read_answer,
    read_charged,
    read_report,
    write_answer,
    write_charged,
    write_report,
)

amounts = st.floats(0, 1e9)
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=80)
resources = st.sampled_from(["requests", "tokens", "concurrency", "burst"])
spent = st.lists(st.tuples(amounts | st.just(math.inf), amounts), max_size=5).map(tuple)
parts = st.builds(Part, amounts, spent, amounts, amounts)
news = st.builds(SourceNews, amounts, amounts, st.booleans(), st.none() | st.tuples(amounts, amounts))
limits = st.tuples(st.floats(1e-6, 1e9), amounts)


@st.composite
def source_reports(draw):
    shared = draw(st.dictionaries(resources, st.tuples(limits, parts)))
    return SourceReport(
        {name: both[0] for name, both in shared.items()}, {name: both[1] for name, both in shared.items()}, draw(news)
    )


counts = st.integers(0, 10**9)
revisions = st.none() | st.builds(
    Revision, names, counts, st.lists(names, max_size=3).map(tuple), counts, st.none() | names, names | st.just("")
)
reports = st.builds(
    Report, names, st.integers(0, 10**9), st.dictionaries(names, source_reports(), max_size=3), st.booleans(),
    st.integers(0, 10**9), revisions,
)  # fmt: skip
grants = st.builds(Grant, amounts, amounts, st.booleans(), st.booleans())
answers = st.builds(
    Answer, names, st.integers(0, 10**9),
    st.dictionaries(
        names, st.builds(SourceAnswer, st.integers(0, 99), st.dictionaries(resources, grants), news), max_size=3
    ),
    revisions,
)  # fmt: skip
held = st.tuples(amounts, amounts)
charged = st.dictionaries(
    names,
    st.dictionaries(resources, st.builds(Charged, st.floats(1e-6, 1e9), amounts, st.dictionaries(names, held), held)),
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=40)
@given(reports)
def test_a_report_is_read_as_it_was_written(report):
    assert read_report(load(dump(write_report(report)))) == report


@settings(max_examples=40)
@given(answers)
def test_an_answer_is_read_as_it_was_written(answer):
    assert read_answer(load(dump(write_answer(answer)))) == answer


@settings(max_examples=40)
@given(charged)
def test_the_state_of_a_keeper_is_read_as_it_was_written(charged):
    assert read_charged(load(dump(write_charged(charged)))) == charged


@settings(max_examples=40)
@given(reports, st.data())
def test_a_report_with_anything_in_it_is_read_or_refused_and_never_stops_the_keeper(report, data):
    written = json.loads(dump(write_report(report)))
    node = written
    while isinstance(node, dict) and node:
        key = data.draw(st.sampled_from(sorted(node)))
        if not isinstance(node[key], dict) or data.draw(st.booleans()):
            node[key] = data.draw(values)
            break
        node = node[key]
    try:
        read = read_report(load(json.dumps(written).encode()))
    except Unreadable:
        return
    keeper = Keeper(0.0, boot="k", first=True)
    keeper.report(read, 0.0)
    for due in keeper.due(0.0):
        if due.answer is not None:
            dump(write_answer(due.answer))
    keeper.due(keeper.wake_at(0.0))
    read_charged(load(dump(write_charged(keeper.charged(5.0)))))


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"\x80\x81", b"[" * 100_000, b" " * (MOST_BYTES + 1)],
    ids=["empty", "cut", "list", "no-utf8", "deep", "long"],
)
def test_bytes_that_are_no_message_are_refused(data):
    with pytest.raises(Unreadable):
        load(data)


@pytest.mark.parametrize("number", [True, "1", None, -1, 1e300, [1]])
def test_numbers_out_of_range_are_refused(number):
    report = Report("w", 1, {"s": SourceReport({"requests": (10.0, 60.0)}, {"requests": Part(1.0)})})
    written = json.loads(dump(write_report(report)))
    written["sources"]["s"]["parts"]["requests"]["share"] = number
    with pytest.raises(Unreadable):
        read_report(written)


def test_no_message_names_a_source():
    """Keys of sources are hashes. What a configuration file may hold to be in a report: test_relay.py."""
    report = Report("w", 1, {"0123456789abcdef": SourceReport({}, {})})
    assert set(write_report(report)) == {"worker", "number", "leaves", "accepted", "sources"}
