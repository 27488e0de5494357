"""The extra info of samples: the same keys where verl wants the same keys, and what verl's `naive` manager gives."""

from __future__ import annotations

import asyncio
import logging
import math
from functools import partial

import pytest
from omegaconf import OmegaConf

from qreward_plugins import ConfigurationError
from qreward_plugins.testing import FakeVerlTrainer, JudgeServer
from verl_adapter.rewards import unpacked
from verl_adapter.settings import reward_secrets

LEGACY = "trainer.use_v1=False"
BOTH = pytest.mark.parametrize("trainer", ["trainer.use_v1=True", LEGACY], ids=["v1", "legacy"])
GRPO = "algorithm.adv_estimator=grpo"
STYLE = "+qreward.judges.quality.criteria.style='is it well written?'"
TEXTS = ["raise", "It is 42, more", "It is 7", "number", "raise"]
FUNCTIONS = """
def rule(data_source, solution_str, ground_truth, extra_info):
    if "raise" in solution_str:
        raise ValueError("no such answer")
    if "number" in solution_str:
        return 0.25
    result = {"score": 0.5, "acc": "42" in solution_str, "turns": 3, "pred": solution_str[:4], "none": None}
    if "more" in solution_str:
        result |= {"bonus": 0.5, "broken": float("nan"), "huge": 1e39, "reward": 9.0, "gts": "?", "step": 7}
    return result
"""


def filtered(metric):
    return ["algorithm.filter_groups.enable=true", f"algorithm.filter_groups.metric={metric}"]


@pytest.fixture
def rule(tmp_path):
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    node = "reward.custom_reward_function"
    return [GRPO, f"{node}.path={path}", f"{node}.name=rule", "+qreward.sources.compute_score.mode=thread"]


@pytest.fixture
def infos(run):
    """The extra info of each of the responses to one question."""
    return lambda texts, *overrides, **named: [
        result["reward_extra_info"] for result in run(texts, *overrides, **named)
    ]


def test_what_a_function_returns_has_its_own_names_and_values(infos, rule):
    told = infos(TEXTS, *rule)
    values = unpacked({key: [info[key] for info in told] for key in told[0]})
    _, more, seven, number, failed = ({key: each[row] for key, each in values.items()} for row in range(5))
    naive = {"acc": True, "turns": 3, "pred": "It i", "bonus": 0.5}
    assert {key: more[key] for key in naive} == naive
    assert more["acc"] is True
    assert not {"reward", "score", "gts", "step"} & values.keys(), "verl's own columns have these names"
    assert (more["none"], more["broken"], more["huge"], more["qreward/score/step"]) == (None, None, None, 7)
    assert (seven["acc"], number["acc"]) == (False, 0.25), "of a number, verl's naive manager makes `acc`"
    assert math.isnan(failed["acc"])
    for info in told:
        assert info.keys() == told[0].keys()
        assert all(isinstance(value, (float, str, bool)) for value in info.values()), "no None, whatever it returns"


@BOTH
def test_validation_takes_them(rule, trainer):
    rows = [{"prompt": text, "ground_truth": "42", "data_source": "s"} for text in TEXTS]
    respond = lambda draft, rng: draft.columns["prompt"][0]["content"]  # noqa: E731
    with FakeVerlTrainer(["+reward_manager=qreward", *rule, trainer], val_rows=rows, respond=respond) as fake:
        metrics = fake.validate().metrics
    assert metrics["val-aux/s/turns/mean@1"] == 3.0
    assert metrics["val-core/s/acc/mean@1"] == pytest.approx((1 + 0 + 0.25) / 3)


@pytest.mark.parametrize(("metric", "values"), [("acc", [1, 0, 0.25]), ("turns", [3, 3]), ("score", None)])
def test_a_filter_of_groups_finds_a_number_or_nan(run, rule, metric, values):
    """verl 0.9.0 reads `reward`, too, from the extra info. A validation has the score's columns already."""
    results = run(TEXTS, *rule, *filtered(metric))
    told = [result["reward_extra_info"][metric] for result in results]
    if values is None:
        assert told == pytest.approx([result["reward_score"] for result in results])
    else:
        assert math.isnan(told[0]), "verl does not replace a group for it"
        assert [value for value in told if not math.isnan(value)] == values
    named = {"val_rows": ["?"], "respond": lambda draft, rng: "raise"}
    with FakeVerlTrainer(["+reward_manager=qreward", *rule, *filtered(metric)], **named) as fake:
        validation = fake.validate()
    assert not any(f"/{metric}/" in name for name in validation.metrics)
    assert metric != "score" or metric not in validation.extra_info
    assert len(validation.extra_info["reward"]) == 1


def test_a_filter_that_no_judge_feeds_is_an_error_at_the_start(infos, judge_overrides):
    with JudgeServer(lambda call: float(call.blocks["response"])) as server:
        ours = [GRPO, *judge_overrides(a=server)]
        with pytest.raises(ConfigurationError, match=r"no judge provides 'acc'.*`correct_at`"):
            infos(["7", "1"], *ours, *filtered("acc"))
        assert infos(["7", "1"], *ours, *filtered("acc"), "+qreward.judges.quality.correct_at=0.5")[0]["acc"] == 1.0
        told = infos(["7", "1"], *ours, *filtered("qreward/score/style"), STYLE)
        assert told[0]["qreward/score/style"] == pytest.approx(0.7)


def test_gdpo_never_adds_up_nothing(compose, tokenizer, make_data, rule):
    """In the real verl: its stand-in does not play it."""
    from verl.trainer.ppo.reward import load_reward_manager

    gdpo = ["algorithm.adv_estimator=gdpo", "+algorithm.gdpo_reward_keys=[turns,bonus]"]
    ours = ["reward.reward_manager.name=qreward", "+qreward.on_failure.constant=-1"]
    ours += ["+qreward_trainer={name: legacy, tells_phases: false}"]

    async def main():
        manager = load_reward_manager(compose(*ours, *(each for each in rule if each != GRPO), *gdpo), tokenizer)
        try:
            return [await manager.run_single(make_data([text])) for text in TEXTS]
        finally:
            await manager.aclose()

    told = [result["reward_extra_info"] for result in asyncio.run(main())]
    parts = [(info["turns"], info["bonus"], info["qreward/failed"]) for info in told]
    assert parts == [(-1, -1, 1.0), (3, 0.5, 0.0), (-1, -1, 1.0), (-1, -1, 1.0), (-1, -1, 1.0)]


# No key that verl hands to a reward function comes out of qreward, however the function echoes it

KEY, PASSWORD, FROM_ENV, NESTED = (
    "sk-live-4f7a90bb21c3",
    "hunter2-very-long",
    "tok_0123456789abcdef",
    "nested-9e8d7c6b5a",
)
ECHO = """
def compute_score(data_source, solution_str, ground_truth, extra_info, **given):
    everything = f"{given}"
    if solution_str == "raise":
        raise RuntimeError(everything)
    return {"score": 1.0, "note": everything, "list": [everything], given["api_key"]: 2.0}
"""


def test_what_a_function_echoes_of_its_keys_is_redacted(run, tmp_path, monkeypatch, caplog, capfd):
    monkeypatch.setenv("MY_SERVICE_TOKEN", FROM_ENV)
    path = tmp_path / "mine.py"
    path.write_text(ECHO)
    caplog.set_level(logging.DEBUG)
    node = "reward.custom_reward_function"
    failed, fine = run(
        ["raise", "fine"],
        f"{node}.path={path}",
        f"+{node}.reward_kwargs.api_key={KEY}",
        f"+{node}.reward_kwargs.url='https://me:{PASSWORD}@service.example/v1'",
        f"+{node}.reward_kwargs.header='X-Mine: ${{oc.env:MY_SERVICE_TOKEN}}'",
        f"+{node}.reward_kwargs.services=[{{name: one, token: {NESTED}}}]",
        "+qreward.sources.compute_score={kind: function, function: 'verl_adapter:compute_score', version: '1'}",
        "+qreward.judges.compute_score={kind: function, sources: [compute_score]}",
        f"+qreward.engine={{max_attempts: 1, journal: {{path: {tmp_path}/journal}}}}",
    )
    assert [result["reward_extra_info"]["qreward/failed"] for result in (failed, fine)] == [1.0, 0.0]
    assert "***" in repr(fine), "the note is still there"
    recorded = b"".join(file.read_bytes() for file in tmp_path.rglob("journal*") if file.is_file())
    assert recorded
    for secret in (KEY, PASSWORD, FROM_ENV, NESTED):
        for text in (repr(failed), repr(fine), *capfd.readouterr(), caplog.text):
            assert secret not in text
        assert secret.encode() not in recorded


def test_the_secrets_of_older_versions_are_in_what_they_hand_over():
    """verl up to 0.7 binds `reward_kwargs` in a closure or a partial, and tells its manager no configuration."""
    given = {"api_key": KEY, "scale": 2.0, "mode": "plain words"}

    def wrapped(**row):
        return 1.0 if row else given

    assert set(reward_secrets(None, partial(wrapped, token=NESTED))) == {KEY, NESTED}
    assert set(reward_secrets(None, partial(len, OmegaConf.create({"a": {"hf_token": NESTED}})))) == {NESTED}
    sandbox = f"https://x:{PASSWORD}@sandbox.example"
    trainer = OmegaConf.create({"reward": {"sandbox_fusion": {"url": sandbox}}})
    assert set(reward_secrets(trainer)) == {sandbox}
