"""What the demo tells, with rules and with a language model as judge."""

from __future__ import annotations

import sqlite3
from contextlib import contextmanager

import pytest

from qreward_plugins import load_config
from qreward_plugins.testing import JudgeServer


@pytest.mark.parametrize("judge", ["rules", "llm"])
def test_the_demo_says_its_phases_and_ends_with_what_to_look_at(cpu_recipe, tmp_path, monkeypatch, capsys, judge):
    demo, training = cpu_recipe.demo, cpu_recipe.training
    used = {}

    def train(assets, out, algorithm, steps, environment, console):
        used.update(environment)
        with sqlite3.connect(environment["QREWARD_JOURNAL"]) as connection:
            connection.execute(
                "CREATE TABLE outcomes (sample_id, judge, source, outcome, cause, score, service_s, cached)"
            )
        connection.close()
        return training.Training([training.Step(1, 0.2, 1.0), training.Step(2, 0.6, 1.0)], 0.0, 0.5)

    @contextmanager
    def served(log):
        yield "http://127.0.0.1:9"

    monkeypatch.setattr(demo, "prepare", lambda folder, sizes: None)
    monkeypatch.setattr(demo, "_train", train)
    monkeypatch.setattr(demo, "served", served)
    monkeypatch.setattr(demo, "servers", lambda: {name: JudgeServer() for name in ("fast", "slow")})
    monkeypatch.setattr(demo.signal, "signal", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["demo.py", "--judge", judge, "--out", str(tmp_path)])
    assert demo.main() == 0
    told = capsys.readouterr().out
    for part in ("1/4 making", "2/4 starting", "3/4 starting", "4/4 done", "What to look at", "reward.png"):
        assert part in told
    assert f"qreward journal {tmp_path}" in told
    assert ("llama.cpp" in told) == (judge == "llm")
    assert ("qreward plan" in told, "qreward diff" in told) == (judge == "rules", judge == "llm")
    monkeypatch.delenv("FAST_JUDGE_URL", raising=False)
    config = load_config(used["QREWARD_CONFIG"])
    assert config.sources["fast"].urls == (used["FAST_JUDGE_URL"],)
    assert ("gemma" in config.sources) == (judge == "llm")
