"""The log hooks: what the rewards of a step took, and evaluation means without failed samples."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType

import pytest

import slime_adapter


@pytest.fixture
def scored(make_args, make_group):
    """Samples with rewards, scored by the real adapter; "break" fails."""

    def make(*responses, group=0, **arguments):
        args, samples = make_args(**arguments), make_group(*responses, group=group)
        for sample, reward in zip(samples, asyncio.run(slime_adapter.reward(args, samples)), strict=True):
            sample.reward = reward
        return args, samples

    return make


@pytest.fixture(params=["observability", "utils"])
def tracker(request, monkeypatch):
    """slime's log function, where v0.3.1 has it and where it went since."""
    logged = []
    package = ModuleType("slime")
    package.__path__ = []
    home = ModuleType(f"slime.{request.param}")
    home.__path__ = []
    logging_utils, metric_utils = (ModuleType(f"{home.__name__}.{name}") for name in ("logging_utils", "metric_utils"))
    logging_utils.log = lambda args, metrics, step_key: logged.append((metrics, step_key))
    metric_utils.compute_rollout_step = lambda args, rollout_id: 10 * rollout_id
    for module in (package, home, logging_utils, metric_utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return logged


def test_the_step_is_summed_up_in_slimes_own_dict(scored):
    args, samples = scored("2", "4", "break", "6")
    metrics = {"rollout/other": 1}
    assert slime_adapter.log_rollout(3, args, samples, metrics, 0.5) is False
    told = {name.removeprefix("rollout/qreward/"): value for name, value in metrics.items() if "qreward" in name}
    assert metrics["rollout/other"] == 1
    assert (told["samples"], told["failed"], told["failed_rate"]) == (4.0, 1.0, 0.25)
    assert (told["failed/infra"], told["failed/verdict"], told["failed/policy"]) == (1.0, 0.0, 0.0)
    assert told["attempts_mean"] == 1.0
    assert told["source_share/judge"] == 1.0
    assert 0 < told["latency_s/p50"] <= told["latency_s/p95"] <= told["latency_s/p99"] <= told["latency_s/max"]
    assert told["tokens"] > 0
    assert sum(value for name, value in told.items() if name.startswith("blame_s/")) > 0


def test_what_the_server_cut_short_gets_a_stand_in_before_slime_reads_it(scored, make_group):
    args, samples = scored("2", "4", reward_key="score")
    (aborted,) = make_group("unfinished")
    metrics = {}
    slime_adapter.log_rollout(3, args, [*samples, aborted], metrics, 0.5)
    assert aborted.reward["score"] == pytest.approx(0.3)
    assert aborted.remove_sample
    assert metrics["rollout/qreward/failed"] == 1.0
    raw, _ = slime_adapter.post_process(args, [*samples, aborted])
    assert raw == pytest.approx([0.2, 0.4, 0.3])


def test_where_slime_has_no_dict_the_hook_logs_by_itself(scored, tracker):
    args, samples = scored("2", "break")
    assert slime_adapter.log_rollout(3, args, samples, None, 0.5) is False
    ((metrics, step_key),) = tracker
    assert (step_key, metrics["rollout/step"], metrics["rollout/qreward/failed_rate"]) == ("rollout/step", 30, 0.5)


def test_failed_samples_are_left_out_of_an_evaluation_and_counted(scored, tracker):
    args, samples = scored("2", "break", "4", group=None)
    data = {"held-out": {"rewards": [s.reward for s in samples], "truncated": [False, True, False], "samples": samples}}
    assert slime_adapter.log_eval(2, args, data, None) is False
    assert data["held-out"] == {"rewards": [0.2, 0.4], "truncated": [False, False], "samples": samples[::2]}
    ((metrics, step_key),) = tracker
    assert (step_key, metrics["eval/step"]) == ("eval/step", 20)
    assert metrics["eval/held-out/qreward/failed_rate"] == pytest.approx(1 / 3)


def test_evaluation_metrics_go_into_slimes_dict_even_if_it_is_empty(scored):
    args, samples = scored("2", "4", group=None)
    metrics = {}
    slime_adapter.log_eval(2, args, {"a": {"rewards": [0.2, 0.4], "samples": samples}}, metrics)
    assert metrics["eval/a/qreward/failed"] == 0.0


def test_pass_rates_want_whole_groups(scored):
    args, samples = scored("2", "4", "break", "6", group=None, log_passrate=True, n_samples_per_eval_prompt=2)
    data = {"a": {"rewards": [s.reward for s in samples], "truncated": [False] * 4, "samples": samples}}
    slime_adapter.log_eval(2, args, data, {})
    assert data["a"]["rewards"] == [0.2, 0.4]


def test_a_data_set_without_any_reward_is_not_averaged(scored):
    args, samples = scored("break", "break", group=None)
    data, metrics = {"a": {"rewards": [0.0, 0.0], "truncated": [False] * 2, "samples": samples}}, {}
    slime_adapter.log_eval(2, args, data, metrics)
    assert data == {}
    assert metrics["eval/a/qreward/failed_rate"] == 1.0


def test_samples_of_another_reward_function_are_left_alone(make_args, make_group):
    samples = make_group("a", "b", group=None)
    data = {"a": {"rewards": [0.1, 0.2], "truncated": [False] * 2, "samples": samples}, "b": {"rewards": [1.0]}}
    before, metrics = dict(data), {}
    assert slime_adapter.log_eval(2, make_args(), data, metrics) is False
    assert slime_adapter.log_rollout(2, make_args(), samples, metrics, 1.0) is False
    assert (data, metrics) == (before, {})
