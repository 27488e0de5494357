"""verl, slime, ROLL and `qreward score` with a reward server as their engine: no other setting changes."""

from __future__ import annotations

import json

import pytest
import yaml
from typer.testing import CliRunner

from qreward_plugins.cli.app import app

from ..kit import FRAMEWORKS, play

WORDS = ["so: 0.25", "so: 0.5", "so: break", "so: 0.75"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_trainer(serving, framework):
    with serving(judge={"correct_at": 0.5}) as there:
        step = play(framework, WORDS, there.remote())
        assert sorted(sample.response for sample in there.source.samples) == sorted(WORDS)
    assert [reward for number, reward in enumerate(step.rewards) if number != 2] == [0.25, 0.5, 0.75]
    assert [number for number, advantage in enumerate(step.advantages) if not advantage] == [1, 2]
    assert not step.poisoned


def test_a_file_of_rollouts(serving, tmp_path):
    rollouts, config, out = tmp_path / "rollouts.jsonl", tmp_path / "judges.yaml", tmp_path / "scored.jsonl"
    rollouts.write_text("\n".join(json.dumps({"prompt": "?", "response": word}) for word in WORDS))
    with serving() as there:
        config.write_text(yaml.safe_dump(there.remote()))
        result = CliRunner().invoke(app, ["score", str(config), str(rollouts), "--out", str(out)])
        assert result.exit_code == 3, result.output
        checked = CliRunner().invoke(app, ["check", str(config)])
        assert (checked.exit_code, "components: clarity" in checked.output) == (0, True), checked.output
    rows = [json.loads(line)["qreward"] for line in out.read_text().splitlines()]
    assert [row["reward"] for row in rows] == [0.25, 0.5, None, 0.75]
    assert list(tmp_path.glob("*.journal")) == []
