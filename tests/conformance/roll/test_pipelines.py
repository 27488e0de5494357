"""Whole runs of ROLL's RLVR pipeline: they train to their end, or end in one error before or while they run."""

from __future__ import annotations

import math
import statistics
from itertools import groupby

import pytest

from qreward_plugins.journal.stories import Stories
from qreward_plugins.testing import Faults
from tests.kit import wait_until
from tests.replicas.conftest import StandIns

from ..judges import GROUP_SIZE, GROUPS, Draft, Judge, dying, read_response, uneven
from ..played import PlayedStep, by_item, check_failures, close
from ..scenarios import CORRECT_AT, GIVES_UP, HASTY, PATIENT, Scenario
from .scenarios import (
    DOMAIN,
    NOTES,
    PIPELINE_S,
    TAG,
    TRAIN_ITEMS,
    VAL_ITEMS,
    check_group,
    keys_of,
    played_sample,
)
from .trainers import scenario_keys

RULED = {
    "worker_cls": (
        "roll.pipeline.rlvr.rewards.multiple_choice_boxed_rule_reward_worker.MultipleChoiceBoxedRuleRewardWorker"
    ),
    "model_args": {"model_name_or_path": "${pretrain}"},
    "tag_included": ["ruled_tag"],
    "world_size": 1,
}
"""A rule worker of ROLL's own as a second domain."""


@pytest.fixture
def pipeline(player):
    """Run the pipeline with these keys. Returns what the player tells."""

    def run(keys, tags=None, val_tags=None):
        domains = {"tags": tags or {TAG: DOMAIN}, "val_tags": val_tags or {}}
        return player.must("pipeline", keys=keys, **domains, timeout_s=PIPELINE_S)

    return run


@pytest.fixture
def run(pipeline):
    """Run the pipeline with a scenario's judge and these further keys."""

    def run(scenario, tags=None, val_tags=None, **more):
        with scenario.judge.start() as judge, dying(judge):
            keys = {**scenario_keys(scenario, judge.base_url), "max_steps": scenario.steps}
            for name, value in more.items():
                keys[name] = {**keys.get(name, {}), **value} if isinstance(value, dict) else value
            return pipeline(keys, tags, val_tags)

    return run


def steps_of(told, scenario):
    return [[played_sample(sample, scenario) for sample in step["samples"]] for step in told["trained"]]


def recorded_of(journal):
    """(draft, whether it is trained on, reward, advantage) that the journal has of each sample."""
    with Stories([str(journal)]) as stories:
        return [
            (read_response(story.sample.response), not made.masked, close_to(made.reward), close_to(made.advantage))
            for story in stories.every("1")
            for made in story.trained.values()
        ]


def close_to(number):
    return number if number is None else pytest.approx(number, abs=1e-5)


def check_step(samples, scenario):
    """Those have failed that had to; masks, and advantages that they have not moved."""
    check_failures(scenario, PlayedStep(tuple(samples), {}))
    for group in by_item(samples):
        assert sorted(sample.draft.draft for sample in group) == list(range(GROUP_SIZE))
        check_group(scenario, group)


def test_asynchronous_grpo_trains_and_validates_two_domains(run, tmp_path):
    """Rewards come in while the model is updated. Ours are of a judge that fails for some and has to be asked again for
    others; beside it there is a rule worker of ROLL's own.
    """
    judge = Judge(spoils=uneven, faults=Faults(rates={"error_500": 0.3}))
    journal = tmp_path / "verdicts.sqlite"
    engine = {**PATIENT, "journal": {"path": str(journal), "keep": "all"}}
    scenario = Scenario("domains", judge, "unspoilt", engine=engine, steps=3, asynchronous=True)
    told = run(
        scenario,
        tags={TAG: DOMAIN, "ruled_tag": "ruled"},
        val_tags={TAG: DOMAIN, "ruled_tag": "ruled"},
        rewards={"ruled": RULED},
        rollout_batch_size=4,
        actor_train={"data_args": {"domain_interleave_probs": {DOMAIN: 0.5, "ruled": 0.5}}},
        validation={"generating_args": {"max_new_tokens": 16, "num_return_sequences": 1}},
    )
    assert told["stage"] == "done", (told["error"], told["text"])
    assert len(told["trained"]) == len(told["logged"]) == scenario.steps
    for samples, metrics in zip(steps_of(told, scenario), told["logged"], strict=True):
        judged = [sample for sample in samples if sample.group == DOMAIN]
        assert len(judged) == len(samples) / 2 == 2 * GROUP_SIZE
        check_step(judged, scenario)
        assert all(sample.mask for sample in samples if sample.group == "ruled")
        assert metrics["judged/qreward/samples_sum"] == len(judged)
        assert close(metrics["judged/qreward/failed_sum"], sum(not sample.mask for sample in judged))
        assert not any("ruled" in name and "qreward" in name for name in metrics)
        numbers = [value for name, value in metrics.items() if "qreward" in name or "val_correct" in name]
        assert all(isinstance(value, (int, float)) and math.isfinite(value) for value in numbers)
        assert not any("qreward_failed" in name for step in told["trained"] for name in step["columns"])
    recorded = recorded_of(journal)
    judged = [sample for samples in steps_of(told, scenario) for sample in samples if sample.group == DOMAIN]
    assert len(recorded) == len(judged)
    for sample in judged:
        trained = bool(sample.mask)
        assert (sample.draft, trained, sample.trained, sample.advantages[0] if trained else None) in recorded
    first = [Draft(TRAIN_ITEMS + item, 0) for item in range(VAL_ITEMS)]
    scored = [draft.reward >= CORRECT_AT for draft in first if not uneven(draft)]
    assert close(told["logged"][0][f"val_correct/{TAG}/mean"], statistics.fmean(scored))
    # ROLL takes the mean over all of as many responses as it asked for.
    assert close(told["logged"][0]["val_correct/all/mean"], sum(scored) / (2 * VAL_ITEMS))
    failed = VAL_ITEMS - len(scored)
    assert failed
    assert told["logged"][0][f"val_correct/{TAG}/qreward_failed/mean"] == 0.0
    rates = [metrics["judged/qreward/val/failed_rate"] for metrics in told["logged"]]
    # Rewards that were given ahead tell of the validation before.
    assert all(0.0 <= rate <= 1.0 for rate in rates)
    assert close(rates[0], failed / VAL_ITEMS)
    assert told["logged"][0]["val_correct/ruled_tag/mean"] == 0.0


def test_ppo_over_a_judge_that_dies_ends_with_one_error(run):
    """The first step trains; then there are no rewards any more, and prompts are not replaced for ever."""
    judge = Judge(answers=GROUPS * GROUP_SIZE)
    scenario = Scenario("dying", judge, "some", engine=HASTY, steps=50, **GIVES_UP)
    critic = {
        "worker_cls": "conformance.roll.workers.TrainWorker",
        "training_args": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
        "strategy_args": {"strategy_name": "hf_infer", "strategy_config": {}},
        "world_size": 1,
    }
    told = run(scenario, adv_estimator="gae", critic=critic)
    assert (told["stage"], told["error"]) == ("run", "JudgeUnavailable"), told["text"]
    assert "3 groups in a row had fewer than 1 samples with a reward" in told["text"]
    (samples,) = steps_of(told, scenario)
    assert all(sample.mask and math.isfinite(sample.advantages[0]) for sample in samples)
    assert all(sample.reward == float(sample.draft.reward >= CORRECT_AT) for sample in samples)
    assert told["logged"][0]["judged/qreward/failed_sum"] == 0
    assert any(name.startswith("judged/qreward/blame_s/judge/") for name in told["logged"][0])


def test_a_mistake_in_the_configuration_ends_the_run_before_it_begins(run):
    scenario = Scenario("wrong", Judge(), "all", engine={"deadline_sec": 5})
    told = run(scenario)
    assert (told["stage"], told["error"]) == ("set-up", "ConfigurationError")
    assert f"rewards.{DOMAIN}.reward_manager_config[0]" in told["text"]
    assert "engine.deadline_sec" in told["text"]
    assert told["trained"] == []


@pytest.mark.parametrize("more", [{}, {"generate_opt_level": 0}], ids=["each response", "whole batches"])
def test_the_judge_sleeps_while_roll_trains(more, pipeline, tmp_path):
    """A judge on the GPUs of a pipeline sleeps whenever ROLL trains, and is awake for every reward."""
    stand_ins, steps = StandIns(tmp_path), 3
    own = {"colocated": True, "sleep_mode": True, "data_parallel": 1, "start_within_s": 300}
    tree = stand_ins.tree("questions", "delay=0.05", engine={"deadline_s": 120.0}, **own)
    tree["judges"]["quality"]["correct_at"] = CORRECT_AT
    keys = keys_of(Scenario("colocated", Judge(), "all", workers=2), "")
    keys["rewards"][DOMAIN] |= {"reward_manager_config": [tree], "model_args": {"model_name_or_path": "${pretrain}"}}
    noting = {"system_envs": {NOTES: str(tmp_path / "notes")}}
    keys |= {
        "actor_train": noting,
        "reference": noting,
        "enable_reference": True,
        "enable_old_logprobs_recompute": True,
        "validation": {"generating_args": {"max_new_tokens": 16, "num_return_sequences": 1}},
        "max_steps": steps,
        **more,
    }
    told = pipeline(keys, val_tags={TAG: DOMAIN})
    assert told["stage"] == "done", (told["error"], told["text"])
    assert len(told["trained"]) == len(told["logged"]) == steps
    for step, metrics in zip(told["trained"], told["logged"], strict=True):
        assert [bool(sample["mask"]) for sample in step["samples"]] == [True] * GROUPS * GROUP_SIZE
        assert metrics["val_correct/all/mean"] == 1.0, "so has every sample of the validation"
    events = [event for event, _ in groupby(stand_ins.events())]
    begins = ["/start", *["/wake_up"] * (steps - 1)]
    trains = ["/compute_log_probs", "/train_step"]
    # ROLL's actor keeps the GPUs until the next step begins.
    assert events == [event for begin in begins for event in ("/offload_states", begin, "/ask", "/sleep", *trains)]
    wait_until(lambda: not stand_ins.living())  # the servers end with the training
