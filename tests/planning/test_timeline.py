"""Bars, their rows, and the picture."""

from __future__ import annotations

import importlib.util
import struct

import pytest

from qreward_plugins import InputError
from qreward_plugins.planning import Bar, draw_timeline, setting
from qreward_plugins.planning.picture import most_in_window, rows

from ..kit import each_of


def bar(start_s: float, end_s: float, kind="first", end="answered") -> Bar:
    return Bar("a", kind, end, start_s, end_s)


def test_no_two_bars_of_a_row_overlap():
    bars = [bar(0, 4), bar(0, 1), bar(1, 2), bar(1.5, 3), bar(4, 5)]
    assert rows(bars) == [0, 1, 1, 2, 0]


@each_of(
    ("kind", "end", "colour"),
    [
        ("first", "answered", "first"),
        ("hedge", "answered", "hedge"),
        ("retry", "failed", "failed"),
        ("first", "throttled", "failed"),
        ("hedge", "cancelled", "cancelled"),
    ],
)
def test_a_bar_in_vain_has_the_colour_of_its_end(kind, end, colour):
    assert bar(0, 1, kind, end).colour == colour


def test_the_fullest_window():
    assert most_in_window([0, 1, 2, 60, 61], 60) == 3
    assert most_in_window([0, 59.9, 60], 60) == 2
    assert most_in_window([0, 10, 70], 60, [5, 7, 1]) == 12
    assert most_in_window([], 60) == 0


def test_the_timeline_holds_every_attempt_of_the_step_and_no_other(tree, exact_plan, monkeypatch):
    monkeypatch.setattr(setting, "ERRORS", 0.2)
    found = exact_plan(tree(a={"concurrency": 4}, b={"concurrency": 4}), 64, assumed={"exact": False})
    timeline = found.timeline
    assert len(timeline.bars) == round(found.attempts * 64)
    assert sum(bar.end == "answered" for bar in timeline.bars) == 64
    failed = sum(bar.end == "failed" for bar in timeline.bars)
    assert failed > 0
    assert sum(bar.kind != "first" for bar in timeline.bars) >= failed
    assert all(0 <= bar.start_s <= bar.end_s <= timeline.makespan_s for bar in timeline.bars)
    assert max(rows(timeline.of("a"))) == 3


@pytest.fixture
def timeline(tree, exact_plan, monkeypatch):
    monkeypatch.setattr(setting, "ERRORS", 0.1)
    limits = {"requests_per_minute": 30, "tokens_per_minute": 100_000, "concurrency": 8}
    found = exact_plan(tree(a=limits, **{"$odd_name$": {}}), 90, assumed={"exact": False})
    return found.timeline


def test_a_picture_is_drawn(timeline, tmp_path):
    path = tmp_path / "plan.png"
    draw_timeline(timeline, path, title="90 samples", subtitle="most of it: quota")
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > 1500
    assert height > 500
    assert len(data) > 20_000


def test_a_picture_shows_the_step(timeline, tmp_path):
    """As text, which SVG keeps: one band for each source that was asked, the makespan, and what the colours mean."""
    import matplotlib

    path = tmp_path / "plan.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw_timeline(timeline, path, title="90 samples", subtitle="most of it: quota")
    text = path.read_text()
    for words in (
        "90 samples",
        "most of it: quota",
        ">a<",
        "odd_name",
        "first try",
        "another try",
        "failed",
        f"{timeline.makespan_s:.1f} s",
        "rewards in",
    ):
        assert words in text
    # Every bar is a box of its own, in the colour of its kind.
    assert text.count("fill: #3d7ea6") >= 1
    assert text.count("<use ") + text.count("<path ") > len(timeline.bars)


def test_a_picture_of_an_unknown_kind(timeline, tmp_path):
    with pytest.raises(InputError, match=r"plan\.bmp2: a picture ends with \.pdf, \.png, \.svg"):
        draw_timeline(timeline, tmp_path / "plan.bmp2")


def test_without_matplotlib_the_remedy_is_told(timeline, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r'pip install "qreward-plugins\[plot\]"'):
        draw_timeline(timeline, tmp_path / "plan.png")
