"""Bars, their rows, and the picture."""

from __future__ import annotations

import importlib.util

import pytest

from qreward_plugins import InputError
from qreward_plugins.planning.picture import draw_timeline, rows


def test_the_timeline_holds_every_attempt_of_the_step_and_no_other(tree, exact_plan):
    found = exact_plan(tree(a={"concurrency": 4}, b={"concurrency": 4}), 64, errors=0.2)
    timeline = found.timeline
    assert len(timeline.bars) == round(found.attempts * 64)
    assert sum(bar.end == "answered" for bar in timeline.bars) == 64
    assert any(bar.end == "failed" for bar in timeline.bars)
    assert all(0 <= bar.start_s <= bar.end_s <= timeline.makespan_s for bar in timeline.bars)
    assert max(rows(timeline.of("a"))) == 3


@pytest.fixture
def timeline(tree, exact_plan):
    limits = {"requests_per_minute": 30, "tokens_per_minute": 100_000, "concurrency": 8}
    return exact_plan(tree(a=limits, **{"$odd_name$": {}}), 90, errors=0.1).timeline


def test_a_picture_is_drawn(timeline, tmp_path):
    """As text, which SVG keeps: one band for each source that was asked, the makespan, and what the colours mean."""
    import matplotlib

    path = tmp_path / "plan.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw_timeline(timeline, path, title="90 samples", subtitle="most of it: quota")
    text = path.read_text()
    for words in ("90 samples", "most of it: quota", ">a<", "odd_name", "failed", "rewards in"):
        assert words in text
    assert f"{timeline.makespan_s:.1f} s" in text
    # Every bar is a box of its own, in the colour of its end.
    assert text.count("fill: #3d7ea6") >= 1
    assert text.count("<use ") + text.count("<path ") > len(timeline.bars)


def test_a_picture_that_cannot_be_drawn_is_refused(timeline, tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"plan\.bmp2: a picture ends with \.pdf, \.png, \.svg"):
        draw_timeline(timeline, tmp_path / "plan.bmp2")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r'pip install "qreward-plugins\[plot\]"'):
        draw_timeline(timeline, tmp_path / "plan.png")
