"""`run_single` on real DataProto, through verl's own loader, against judge servers."""

from __future__ import annotations

import asyncio

import pytest

from qreward_plugins import ConfigurationError, RewardMissing
from qreward_plugins.testing import Faults, JudgeServer

FUNCTIONS = """
import asyncio, os, time

def rule(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
    right = ground_truth in solution_str
    return {"score": float(right) + bonus, "turns": extra_info["num_turns"], "acc": right}

async def rule_async(data_source, solution_str, ground_truth, extra_info, **kwargs):
    await asyncio.sleep(0)
    return float(ground_truth in solution_str)

def hanging(data_source, solution_str, ground_truth, extra_info):
    if "hang" in solution_str:
        time.sleep(3600)
    if "die" in solution_str:
        os._exit(1)
    if "raise" in solution_str:
        raise ValueError("no such answer")
    if "nan" in solution_str:
        return float("nan")
    return 1.0
"""


ONE_WORKER = "+qreward.sources.compute_score.workers=1"
"""Each worker process imports verl, which takes seconds."""


@pytest.fixture
def functions(tmp_path):
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
def run(compose, tokenizer):
    """Load the manager as verl does, run each DataProto once, and return its results or exceptions."""
    from verl.trainer.ppo.reward import load_reward_manager

    def run(batches, *overrides):
        async def main():
            manager = load_reward_manager(compose(*overrides), tokenizer)
            try:
                return await asyncio.gather(*(manager.run_single(data) for data in batches), return_exceptions=True)
            finally:
                await manager.aclose()

        return asyncio.run(main())

    return run


def right(call):
    return 10.0 if call.blocks["reference"] in call.blocks["response"] else 0.0


def test_a_rollout_is_judged(run, make_data, judge_overrides):
    seen = []

    def score(call):
        seen.append(dict(call.blocks))
        return right(call)

    with JudgeServer(score) as server:
        overrides = [*judge_overrides(a=server), "+qreward.judges.quality.correct_at=0.5"]
        good, bad = run([make_data(["It is 42."]), make_data(["It is 7."])], *overrides)
    assert (good["reward_score"], bad["reward_score"]) == (1.0, 0.0)
    assert type(good["reward_score"]) is float
    assert good["reward_extra_info"].keys() == bad["reward_extra_info"].keys()
    assert (good["reward_extra_info"]["acc"], bad["reward_extra_info"]["acc"]) == (1.0, 0.0)
    assert good["reward_extra_info"]["qreward/source"] == "a"
    assert {"question": "What is 17 plus 25?", "response": "It is 42.", "reference": "42"} in seen


def test_of_several_outputs_the_last_is_judged_without_its_padding(run, make_data, judge_overrides):
    seen = []
    with JudgeServer(lambda call: seen.append(call.blocks["response"]) or 5.0) as server:
        run([make_data(["a much longer first output", "It is 42."])], *judge_overrides(a=server))
    assert seen == ["It is 42."]


def test_older_verl_without_response_len(run, make_data, judge_overrides):
    seen = []
    with JudgeServer(lambda call: seen.append(call.blocks["response"]) or 5.0) as server:
        run([make_data(["It is 42."], response_len=False)], *judge_overrides(a=server))
    assert seen == ["It is 42."]


def test_a_failed_sample_is_left_out_by_one_clear_exception(run, make_data, judge_overrides):
    with JudgeServer(right, faults=Faults(rates={"error_400": 1.0})) as server:
        (failure,) = run([make_data(["It is 42."])], *judge_overrides(a=server))
    assert isinstance(failure, RewardMissing)
    assert "leave it out of training" in str(failure)
    assert "400" in str(failure)


def test_a_failed_sample_with_a_constant_has_the_same_keys(run, make_data, judge_overrides):
    with JudgeServer(right, faults=Faults(script=["error_400"])) as server:
        overrides = [
            *judge_overrides(a=server),
            "+qreward.on_failure.constant=-0.5",
            "+qreward.judges.quality.correct_at=0.5",
            "+qreward.judges.quality.criteria.style='is it well written?'",
        ]
        failed, other = run([make_data(["It is 42."]), make_data(["It is 42."])], *overrides)
    failed, other = sorted((failed, other), key=lambda result: -result["reward_extra_info"]["qreward/failed"])
    assert (failed["reward_score"], failed["reward_extra_info"]["qreward/failed"]) == (-0.5, 1.0)
    assert failed["reward_extra_info"]["qreward/cause"] == "infra/no_source"
    assert failed["reward_extra_info"].keys() >= {"acc", "qreward/score/style", "qreward/latency_s"}


def test_the_limits_are_shared_by_the_reward_workers(compose, tokenizer, judge_overrides):
    from verl.trainer.ppo.reward import load_reward_manager

    with JudgeServer(right) as server:
        limits = ["+qreward.sources.a.limits.requests_per_minute=600", "+qreward.sources.a.limits.concurrency=9"]
        manager = load_reward_manager(compose(*judge_overrides(a=server), *limits, "reward.num_workers=4"), tokenizer)
        quota = manager.engine.upstreams["a"].quota
        asyncio.run(manager.aclose())
        assert (quota.burst, quota.concurrency) == (150, 2)
        with pytest.raises(ConfigurationError, match="at most 9 processes"):
            load_reward_manager(compose(*judge_overrides(a=server), *limits, "reward.num_workers=10"), tokenizer)


def test_the_default_reward_function_needs_no_configuration(run, make_data):
    data = [make_data([text], data_source="openai/gsm8k") for text in ("so it is #### 42", "so it is #### 41")]
    good, bad = run(data, "reward.reward_manager.name=qreward", "reward.num_workers=1", ONE_WORKER)
    assert (good["reward_score"], bad["reward_score"]) == (1.0, 0.0)
    assert good["reward_extra_info"]["qreward/source"] == "compute_score"


@pytest.mark.parametrize("name", ["rule", "rule_async"])
def test_a_custom_reward_function_needs_no_configuration(run, make_data, functions, name):
    overrides = [
        "reward.reward_manager.name=qreward",
        f"reward.custom_reward_function.path={functions}",
        f"reward.custom_reward_function.name={name}",
        "reward.num_workers=1",
        ONE_WORKER,
    ]
    if name == "rule":
        overrides.append("+reward.custom_reward_function.reward_kwargs.bonus=0.25")
    good, bad = run([make_data(["It is 42."]), make_data(["It is 7."])], *overrides)
    bonus = 0.25 if name == "rule" else 0.0
    assert (good["reward_score"], bad["reward_score"]) == (1.0 + bonus, bonus)
    if name == "rule":
        assert (good["reward_extra_info"]["acc"], bad["reward_extra_info"]["acc"]) == (1.0, 0.0)
        assert good["reward_extra_info"]["qreward/score/turns"] == 2.0


def test_a_reward_function_that_hangs_dies_or_lies_costs_its_own_samples_only(run, make_data, functions):
    texts = ["hang", "die", "raise", "nan", *["fine"] * 6]
    results = run(
        [make_data([text]) for text in texts],
        "reward.reward_manager.name=qreward",
        f"reward.custom_reward_function.path={functions}",
        "reward.custom_reward_function.name=hanging",
        "reward.num_workers=1",
        ONE_WORKER,
        "+qreward.sources.compute_score.timeouts.total_s=1",
        "+qreward.engine.deadline_s=120",
        # Every other try of what hangs or dies starts another worker process.
        "+qreward.engine.max_attempts=1",
    )
    for text, result in zip(texts, results, strict=True):
        if text == "fine":
            assert result["reward_score"] == 1.0
        else:
            assert isinstance(result, RewardMissing), (text, result)


def test_the_tree_may_stand_in_a_file_with_inline_keys_over_it(run, make_data, tmp_path, monkeypatch):
    with JudgeServer(right) as server:
        path = tmp_path / "judges.yaml"
        path.write_text(
            f"sources: {{a: {{kind: openai, base_url: '{server.base_url}', model: judge}}}}\n"
            "judges: {quality: {kind: llm, reward_range: [0, 1]}}\n"
        )
        choose = "reward.reward_manager.name=qreward"
        (by_key,) = run([make_data(["It is 42."])], choose, f"+qreward.config={path}")
        (laid_over,) = run(
            [make_data(["It is 42."])],
            choose,
            f"+qreward.config={path}",
            "+qreward.judges.quality.reward_range=[0,5]",
        )
        monkeypatch.setenv("QREWARD_CONFIG", str(path))
        (by_environment,) = run([make_data(["It is 42."])], choose)
    assert [by_key["reward_score"], laid_over["reward_score"], by_environment["reward_score"]] == [1.0, 5.0, 1.0]


def test_mistakes_are_reported_when_the_manager_is_made(compose, tokenizer, judge_overrides):
    from verl.trainer.ppo.reward import load_reward_manager

    with JudgeServer(right) as server:
        overrides = [*judge_overrides(a=server), "+qreward.judges.quality.temprature=0", "+qreward.routes.x=qualty"]
        with pytest.raises(ConfigurationError) as caught:
            load_reward_manager(compose(*overrides), tokenizer)
    message = str(caught.value)
    assert "judges.quality.temprature" in message
    assert "`temperature`" in message
    assert "qualty" in message


def test_the_legacy_trainer_cannot_leave_samples_out_and_is_told_so(compose, tokenizer):
    from verl.trainer.ppo.reward import load_reward_manager

    choose = ("reward.reward_manager.name=qreward", "trainer.use_v1=False")
    with pytest.raises(ConfigurationError, match=r"trainer\.use_v1=True"):
        load_reward_manager(compose(*choose), tokenizer)
    manager = load_reward_manager(compose(*choose, "+qreward.on_failure.constant=0"), tokenizer)
    asyncio.run(manager.aclose())


def test_a_key_that_verl_would_print_is_warned_of(compose, tokenizer, judge_overrides, caplog):
    from verl.trainer.ppo.reward import load_reward_manager

    with JudgeServer(right) as server:
        config = compose(*judge_overrides(a=server), "+qreward.sources.a.api_key=sk-0123456789abcdef")
        manager = load_reward_manager(config, tokenizer)
        asyncio.run(manager.aclose())
    assert "api_key_env" in caplog.text
    assert "sk-0123456789abcdef" not in caplog.text


def test_scores_are_assembled_by_verl(compose, run, make_data, judge_overrides):
    from verl.trainer.ppo.reward import resolve_reward_manager_cls

    data = make_data(["It is 42.", "No."])
    manager = resolve_reward_manager_cls(compose("reward.reward_manager.name=qreward"))
    rewards = manager.assemble_rm_scores(data, [0.75, 0.25])
    assert rewards.shape == data.batch["responses"].shape
    assert rewards[0].nonzero().tolist() == [[len("It is 42.") - 1]]
    assert rewards[1].nonzero().tolist() == [[len("No.") - 1]]
