"""A batch's report in words and numbers."""

from __future__ import annotations

import pytest

from qreward_plugins.observers.batch_report import PART_KINDS, BatchReport, Part


def report(*parts, samples=512, failed=0):
    parts = tuple(Part(*part) for part in parts)
    makespan_s = sum(part.seconds for part in parts)
    return BatchReport(samples, samples - failed, failed, samples, 0, makespan_s, parts)


PARTS = (
    ("queue", "a", 2.0),
    ("service", "a", 1.0),
    ("quota", "b", 9.1),
    ("straggler", "b", 4.0),
    ("retry", "b", 0.6),
    ("retry", "b", 0.5),
)


def test_seconds_by_kind_have_every_kind():
    seconds = report(*PARTS).seconds()
    assert tuple(seconds) == PART_KINDS
    assert seconds == pytest.approx(
        {"arrival": 0, "queue": 2.0, "quota": 9.1, "pause": 0, "service": 1.0, "straggler": 4.0, "retry": 1.1}
    )


def test_the_source_that_was_waited_for_longest_comes_first():
    by_source = report(*PARTS).by_source()
    assert list(by_source) == ["b", "a"]
    assert by_source["b"] == pytest.approx({"quota": 9.1, "straggler": 4.0, "retry": 1.1})


def test_one_line_says_who_is_to_blame_for_what():
    assert report(*PARTS).describe() == (
        "512 samples in 17.2 s; waited 14.2 s on b: 9.1 quota, 4.0 straggler, 1.1 retry; "
        "3.0 s on a: 2.0 queue, 1.0 service"
    )


def test_metrics_name_source_and_part():
    assert report(("arrival", "", 3.0), *PARTS).metrics() == pytest.approx(
        {
            "blame_s/none/arrival": 3.0,
            "blame_s/a/queue": 2.0,
            "blame_s/a/service": 1.0,
            "blame_s/b/quota": 9.1,
            "blame_s/b/straggler": 4.0,
            "blame_s/b/retry": 1.1,
        }
    )


def test_what_is_nobodys_fault_names_nobody():
    assert report(("arrival", "", 3.0), ("service", "a", 1.0), failed=2).describe() == (
        "512 samples in 4.0 s, 2 failed; waited 3.0 s: 3.0 arrival; 1.0 s on a: 1.0 service"
    )


def test_trifles_are_left_out():
    assert report(("queue", "a", 0.01), ("service", "b", 0.04)).describe() == "512 samples in 0.1 s"
    assert report(("queue", "a", 0.01), ("service", "a", 2.0)).describe() == (
        "512 samples in 2.0 s; waited 2.0 s on a: 2.0 service"
    )
