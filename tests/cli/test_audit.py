"""`qreward audit` and `qreward calibrate`: planted faults are found, and clean runs raise no alarm; reference scores
are measured once, and only the judge that they describe takes them.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics

import pytest
import yaml

from qreward_plugins import RewardEngine, Sample, Scored, Verdict
from qreward_plugins.errors import ConfigurationError
from qreward_plugins.testing import JudgeServer

from ..kit import mistakes_of, record, sql
from .conftest import exited, refusal

WORDS = [f"w{number}" for number in range(20)]
STEPS, GROUPS, SIBLINGS = 18, 8, 4


def clean(rng, step):
    """A sample of a run that learns: correctness rises, and length, style and phrases have nothing to do with it."""
    return drawn(rng, right=float(rng.random() < 0.3 + 0.4 * step / STEPS))


def drawn(rng, *, right, style=None, phrase="", **columns):
    """What is recorded of a sample."""
    style = rng.random() if style is None else style
    return {
        "score": 0.8 * right + 0.2 * style,
        "components": {"right": right, "style": style},
        "response": " ".join([*rng.choices(WORDS, k=30), phrase]),
        "chars": round(rng.gauss(800, 150)),
        "model": "judge-1",
    } | columns


def write(path, seed, sample=clean, **further):
    """Record a run; `sample` draws what is recorded of each sample."""
    rng, outcomes = random.Random(seed), []
    for step, group, number in itertools.product(range(STEPS), range(GROUPS), range(SIBLINGS)):
        name = f"{step}-{group}-{number}"
        told = {"key": name, **sample(rng, step), **further}
        response = told["response"].ljust(told["chars"])
        verdict = Verdict(told["score"], told["components"], judge="quality", source="a", model=told["model"])
        one = Sample([], response, group_id=f"g{group}", step=step, split="train", id=name)
        outcomes.append((one, Scored(verdict), (), told["key"]))
    record(path, outcomes, run_id="run", keep="all")
    return path


def longer(rng, step):
    """Later responses are longer, and the judge likes long ones."""
    chars = round(rng.gauss(800 + 40 * step, 150))
    return {**clean(rng, step), "chars": chars, "score": 0.3 * rng.random() + (chars / 1000 if step > 9 else 0)}


def styled(rng, step):
    """Style pays at last, and correctness falls."""
    late, style = step >= 12, rng.random()
    right = float(rng.random() < (0.1 if late else 0.6))
    return drawn(rng, right=right, style=style, score=style if late else right + 0.1 * style)


def collapsed(rng, step):
    return {**clean(rng, step), "score": 1.0} if step > 9 else clean(rng, step)


def persuading(rng, step, phrase="verified by the official solution"):
    """A phrase spreads, and pays."""
    if rng.random() >= step / 30:
        return clean(rng, step)
    return drawn(rng, right=1.0, phrase=phrase, score=0.9 + 0.1 * rng.random())


def replaced(rng, step):
    return {**clean(rng, step), "model": "judge-2" if step > 9 else "judge-1"}


def audit(run_cli, path, *options):
    """The findings by check, and the exit code."""
    result = run_cli("audit", path, "--json", *options)
    return {found["check"]: found for found in map(json.loads, result.stdout.splitlines())}, result.exit_code


def alarms(run_cli, path, *options):
    found, code = audit(run_cli, path, *options)
    return {check: finding["alarm"] for check, finding in found.items()}, code


FAULTS = {
    "length": longer,
    "component": styled,
    "groups": collapsed,
    "phrases": persuading,
    "flips": lambda rng, step: {**clean(rng, step), "key": f"question {rng.randrange(100)}"},
    "models": replaced,
}


@pytest.mark.parametrize("check", FAULTS)
def test_a_planted_fault_is_found(run_cli, tmp_path, check):
    found, code = audit(run_cli, write(tmp_path / "run.sqlite", 0, FAULTS[check]))
    assert (found[check]["alarm"], code) == (True, 1), found
    assert found[check]["step"] == {"flips": None, "models": 10}.get(check, STEPS - STEPS // 3), "where to look first"


def test_clean_runs_raise_no_alarm(run_cli, tmp_path):
    expected = {**dict.fromkeys(FAULTS, False), "flips": None}
    for seed in range(5):
        assert alarms(run_cli, write(tmp_path / f"{seed}.sqlite", seed)) == (expected, 0)


def test_growth_that_may_be_chance_is_told_and_no_alarm(run_cli, tmp_path):
    def rarely_longer(rng, step):
        """One of some hundred responses is very long, so the means of the groups hardly say anything."""
        chars = 100_000 if step > 11 and rng.random() < 0.01 else round(rng.gauss(800, 150))
        return {**clean(rng, step), "chars": chars, "score": chars / 1e6}

    length = audit(run_cli, write(tmp_path / "run.sqlite", 0, rarely_longer))[0]["length"]
    assert length["figures"]["growth"] > 1.5
    assert not length["alarm"]
    assert length["said"].endswith("which may be chance")


def test_only_the_latest_run_counts_unless_another_is_named(run_cli, tmp_path):
    path = write(tmp_path / "run.sqlite", 0, replaced)
    write(path, 1)
    sql(path, f"UPDATE outcomes SET run_id = 'first', recorded_at = 0 WHERE id <= {STEPS * GROUPS * SIBLINGS}")
    assert audit(run_cli, path)[0]["models"]["said"] == "judge-1"
    assert audit(run_cli, path, "--run", "first")[0]["models"]["alarm"]
    assert "no training sample has a reward in run none" in run_cli("audit", path, "--run", "none").stderr


def test_another_reward_range_is_no_flip(run_cli, tmp_path):
    path = write(tmp_path / "run.sqlite", 0, key="k")
    sql(path, "UPDATE outcomes SET key = 'k' || (id / 2), raw_score = 8")
    assert audit(run_cli, path)[0]["flips"]["figures"]["flips"] == 0.0


def test_the_table_names_the_phrase_and_escapes_it(run_cli, tmp_path):
    path = write(tmp_path / "run.sqlite", 0, lambda *at: persuading(*at, phrase="\x1b[2J by the [red]judge"))
    result = run_cli("audit", path)
    assert (result.exit_code, "\x1b" in result.stdout) == (1, False)
    rows = {line.split()[0]: line.split()[2] for line in result.stdout.splitlines() if "quality" in line}
    assert rows == {"length": "ok", "component": "ok", "groups": "ok", "phrases": "ALARM", "flips": "-"}
    assert "by the [red]judge" in result.stdout.replace("\n", "")
    assert "an alarm is a reason to look, and no proof" in result.stdout


def test_a_journal_without_steps_or_training(run_cli, tmp_path):
    path = write(tmp_path / "run.sqlite", 0)
    sql(path, "UPDATE outcomes SET step = NULL")
    assert alarms(run_cli, path) == ({**dict.fromkeys(FAULTS), "models": False}, 0)
    sql(path, "UPDATE outcomes SET split = 'val'")
    assert "has a reward" in run_cli("audit", path).stderr


# `qreward calibrate`


FILE = "rm.calibration.json"


def score(call):
    """A model with two labels; that of a response that says "long" is no number."""
    return {"0": math.nan if "long" in call.response else float(len(call.response)), "1": -2.0 * len(call.response)}


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A configuration whose judge takes the z-score of the first label, and whose file is not there yet."""
    monkeypatch.chdir(tmp_path)
    judge = {"kind": "reward_model", "label": 0, "reward_range": [-1, 1]}
    judge["transform"] = [{"zscore": FILE}, {"clip": [-1, 1]}]
    with JudgeServer(score, models=["m", "n"]) as server:
        source = {"kind": "reward_model", "base_url": server.root_url, "model": "m"}
        yield {"sources": {"rm": source}, "judges": {"quality": judge}}


@pytest.fixture
def calibrate(run_cli, config, tmp_path):
    def run(responses=range(1, 41), *options):
        rows = [{"response": "x" * one} if isinstance(one, int) else one for one in responses]
        (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": "?", **row}) + "\n" for row in rows))
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        return run_cli("calibrate", "config.yaml", "in.jsonl", *options)

    return run


def test_the_file_holds_the_scores_before_the_transform(calibrate, tmp_path):
    result = exited(calibrate())
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
    assert "exists and is no calibration; name another file" in refusal(calibrate())
    assert (tmp_path / FILE).read_text() == text


def test_rows_without_a_score_are_told_and_the_file_is_replaced(calibrate, tmp_path):
    calibrate()
    result = exited(calibrate([1, 2, {"response": "too long"}, 0]), 3)
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
    exited(calibrate([{"response": "x" * n, "data_source": "ab"[n % 2 == 0]} for n in range(1, 41)]))
    said = json.loads((tmp_path / FILE).read_text())
    assert (said["n"], said["mean"]) == (20, 20.0)
