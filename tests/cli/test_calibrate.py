"""`qreward calibrate`: reference scores are measured once, and only the judge that they describe takes them."""

from __future__ import annotations

import json
import math
import statistics

import pytest
import yaml

from qreward_plugins import RewardEngine, Sample, Scored
from qreward_plugins.errors import ConfigurationError
from qreward_plugins.testing import JudgeServer

from ..kit import mistakes_of
from .conftest import refusal

FILE = "rm.calibration.json"


def score(call):
    """A model with two labels; that of a response that says "long" is no number."""
    return {"0": math.nan if "long" in call.response else float(len(call.response)), "1": -2.0 * len(call.response)}


@pytest.fixture
def url():
    with JudgeServer(score, models=["m", "n"]) as server:
        yield server.root_url


@pytest.fixture
def config(url, tmp_path, monkeypatch):
    """A configuration whose judge takes the z-score of the first label, and whose file is not there yet."""
    monkeypatch.chdir(tmp_path)
    return {
        "sources": {"rm": {"kind": "reward_model", "base_url": url, "model": "m"}},
        "judges": {
            "quality": {
                "kind": "reward_model",
                "label": 0,
                "transform": [{"zscore": FILE}, {"clip": [-1, 1]}],
                "reward_range": [-1, 1],
            }
        },
    }


@pytest.fixture
def calibrate(run_cli, config, tmp_path):
    def run(responses=range(1, 41), *options):
        rows = [{"response": "x" * one} if isinstance(one, int) else one for one in responses]
        (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": "?", **row}) + "\n" for row in rows))
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        return run_cli("calibrate", "config.yaml", "in.jsonl", *options)

    return run


def test_the_file_holds_the_scores_before_the_transform(calibrate, tmp_path):
    result = calibrate()
    assert result.exit_code == 0, result.output
    said = json.loads((tmp_path / FILE).read_text())
    scores = range(1, 41)
    assert (said["n"], said["mean"], said["model"]) == (40, 20.5, "m")
    assert said["std"] == pytest.approx(statistics.pstdev(scores))
    assert "40 scores, mean 20.5, standard deviation 11.54\n" in result.output
    assert result.output.endswith("written to rm.calibration.json\n")


def test_the_judge_gives_z_scores(calibrate, config):
    calibrate()
    with RewardEngine(config).portal() as engine:
        outcomes = engine.score_all([Sample([{"role": "user", "content": "?"}], "x" * n) for n in (20, 21, 40)])
    deviation = statistics.pstdev(range(1, 41))
    rewards = [outcome.verdict.score for outcome in outcomes if isinstance(outcome, Scored)]
    assert rewards == pytest.approx([-0.5 / deviation, 0.5 / deviation, 1.0])


def test_another_model_is_refused(calibrate, config):
    with pytest.raises(
        ConfigurationError, match=r"'rm.calibration.json' cannot be read .* Measure with: qreward calibrate"
    ):
        RewardEngine(config)
    calibrate()
    RewardEngine(config)
    for room, name, change, said in (
        ("sources", "rm", {"model": "n"}, "measured with 'm' (label 0, activation raw"),
        ("judges", "quality", {"label": 1}, "and this is 'm' (label 1"),
        ("sources", "rm", {"protocol": "vllm_score"}, "requests "),
        ("sources", "rm", {"parameters": {"truncate_prompt_tokens": 9}}, "requests "),
    ):
        changed = {**config, room: {**config[room], name: {**config[room][name], **change}}}
        [(path, told)] = mistakes_of(RewardEngine, changed).items()
        for part in ("does not suit the source 'rm'", said, "Measure with: qreward calibrate"):
            assert (path, part in told) == ("judges.quality.transform", True), part


def test_a_file_of_another_kind_is_refused_and_kept(calibrate, config, tmp_path):
    for text in ("[]", "not json"):
        (tmp_path / FILE).write_text(text)
        with pytest.raises(ConfigurationError, match="cannot be read as a calibration"):
            RewardEngine(config)
    result = calibrate()
    assert result.exit_code == 2
    assert "exists and is no calibration; name another file" in result.stderr
    assert (tmp_path / FILE).read_text() == text


def test_rows_without_a_score_are_told_and_the_file_is_replaced(calibrate, tmp_path):
    calibrate()
    result = calibrate([1, 2, {"response": "too long"}, 0])
    assert result.exit_code == 3
    assert "1 without a score (policy/empty)" in result.stderr
    assert "NaN" in result.stderr
    assert json.loads((tmp_path / FILE).read_text())["n"] == 2
    assert [path.name for path in tmp_path.iterdir() if "calibration" in path.name] == [FILE]


def test_two_models_need_two_judges_and_without_zscore_there_is_nothing_to_measure(calibrate, config):
    config["sources"]["other"] = {**config["sources"]["rm"], "model": "n"}
    assert "asks different models (rm, other), and their scores have" in refusal(calibrate())
    config["judges"]["quality"]["transform"][0]["zscore"] = "nowhere/b.json"
    assert "there is no directory 'nowhere'" in refusal(calibrate())
    config["judges"]["quality"]["transform"][0]["zscore"] = FILE
    del config["sources"]["other"]
    assert "all 3 scores are 4" in refusal(calibrate([4, 4, 4]))
    del config["judges"]["quality"]["transform"]
    assert "no judge has a transform with zscore: FILE" in refusal(calibrate())


def test_only_rows_of_the_judge_count(calibrate, config, tmp_path):
    config["judges"]["rules"] = {"kind": "reward_model", "label": 1}
    config["judges"]["both"] = {"kind": "sum", "weights": {"quality": 1, "rules": 1}}
    config["routes"] = {"a": "both", "*": "rules"}
    # Rows of even length go to the other judge alone.
    result = calibrate([{"response": "x" * n, "data_source": "ab"[n % 2 == 0]} for n in range(1, 41)])
    assert result.exit_code == 0, result.output
    said = json.loads((tmp_path / FILE).read_text())
    assert (said["n"], said["mean"]) == (20, 20.0)
