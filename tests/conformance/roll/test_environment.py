"""Why these tests do not run, where they do not: one reason, with the remedy."""

from __future__ import annotations

from . import real


def test_the_reason_is_named_with_its_remedy(tmp_path, monkeypatch):
    assert "QREWARD_ROLL_SRC is not set" in real.why_not({})
    assert "is not a checkout of ROLL" in real.why_not({"QREWARD_ROLL_SRC": str(tmp_path)})
    path = tmp_path / "roll" / "pipeline" / "rlvr" / "rlvr_pipeline.py"
    path.parent.mkdir(parents=True)
    path.touch()
    monkeypatch.setattr(real.metadata, "version", lambda name: "0.1")
    reason = real.why_not({"QREWARD_ROLL_SRC": str(tmp_path)})
    assert "numpy<2,>=1.25 is 0.1" in reason
    assert "environment.sh" in reason
