"""The whole of slime's rollout side: the manager as a Ray actor, the configuration from the runtime environment, a
tracker, and samples that are pickled into a dump.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from ..judges import GROUP_SIZE, Judge, dying, read_response, uneven
from ..played import PlayedStep
from ..scenarios import MINUTE, Scenario
from .checks import check_samples, check_train_data
from .real import environment, job_flags, played_sample
from .scenarios import EVAL_DRAFTS, EVAL_ITEMS
from .servers import GenerateServer

UNEVEN = Scenario(
    "uneven", Judge(spoils=uneven), "unspoilt", steps=2, engine={"deadline_s": 50.0, "max_attempts": 20}, evaluate=True
)
LIMIT_S = 400
LONG_S = 40.0
"""More than a step takes whose judge is there, on a busy machine."""


@pytest.fixture(scope="module", params=[UNEVEN, MINUTE], ids=str)
def job(request, slime_source, tmp_path_factory):
    """Some steps, each after an evaluation: the scenario, what came of it, the folder of the dumps and the board."""
    scenario = request.param
    folder = tmp_path_factory.mktemp("ray")
    with scenario.judge.start() as judge, GenerateServer() as generator, dying(judge):
        config = folder / "qreward.yaml"
        config.write_text(json.dumps(scenario.config(judge.base_url)))
        told = {
            "flags": [
                *job_flags(scenario, folder, generator.port, {}),
                *("--custom-rm-path", "slime_adapter.reward"),
                *("--save-debug-rollout-data", str(folder / "rollout_{rollout_id}.pt")),
                *("--use-tensorboard", "--tb-project-name", "conformance", "--micro-batch-size", "2"),
            ],
            "environment": {"QREWARD_CONFIG": str(config), "TENSORBOARD_DIR": str(folder / "board")},
            "steps": scenario.steps,
            "folder": str(folder),
        }
        path = folder / "job.json"
        path.write_text(json.dumps(told))
        done = subprocess.run(
            [sys.executable, "-m", "conformance.parents", "conformance.slime.ray_player", str(path)],
            cwd=folder,
            env=environment(slime_source),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-6000:]
    outcome = json.loads(done.stdout.strip().splitlines()[-1])
    assert outcome["error"] is None, f"{outcome['error']}: {outcome['text']}\n{done.stderr[-3000:]}"
    return scenario, outcome, folder


def dumped(folder, name):
    torch = pytest.importorskip("torch")
    return torch.load(folder / f"rollout_{name}.pt", weights_only=False)["samples"]


def logged(folder):
    """The scalars of slime's tracker: for each name its values by step."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (path,) = (folder / "board").iterdir()
    events = accumulator.EventAccumulator(str(path), size_guidance={"scalars": 0})
    events.Reload()
    return {name: [scalar.value for scalar in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_every_rank_trains_finite_rewards_and_no_failed_sample(job):
    scenario, outcome, folder = job
    assert len(outcome["steps"]) == scenario.steps
    for number, ranks in enumerate(outcome["steps"]):
        by_index = {}
        for rank in ranks:
            told = zip(rank["samples"], rank["rewards"], rank["masks"], strict=True)
            by_index.update((index, (reward, mask)) for index, reward, mask in told)
        samples = dumped(folder, number)
        assert len(samples) == len(by_index) == scenario.prompts * GROUP_SIZE
        raw = dict(zip((sample["index"] for sample in samples), ranks[0]["raw_reward"], strict=True))
        played = tuple(
            played_sample(
                {
                    **{name: sample[name] for name in ("response", "reward", "status")},
                    "group": sample["group_index"],
                    "record": sample["metadata"]["qreward"],
                    "removed": sample["remove_sample"],
                    "seconds": sample["non_generation_time"],
                },
                (raw[sample["index"]], by_index[sample["index"]][0], (), by_index[sample["index"]][1]),
            )
            for sample in samples
        )
        step = PlayedStep(played, {})
        check_samples(scenario, step)
        check_train_data(scenario, step)


def test_no_step_is_longer_than_its_judge_is_away(job):
    scenario, outcome, _ = job
    away_s = scenario.judge.away_s or 0.0
    *others, longest = sorted(outcome["seconds"])
    assert away_s < longest < away_s + LONG_S, "the judge was used as soon as it was back"
    assert max(others) < LONG_S, "it is waited for once"


def test_the_tracker_gets_the_metrics_of_rewards(job):
    scenario, _, folder = job
    board = logged(folder)
    failures = [
        [sample["metadata"]["qreward"]["failed"] for sample in dumped(folder, number)]
        for number in range(scenario.steps)
    ]
    assert board["rollout/qreward/failed"] == [sum(failed) for failed in failures]
    assert board["rollout/qreward/samples"] == [len(failed) for failed in failures]
    assert board["rollout/qreward/failed_rate"] == pytest.approx([sum(failed) / len(failed) for failed in failures])
    assert board["eval/sums/qreward/samples"] == [EVAL_ITEMS * EVAL_DRAFTS] * scenario.steps
    evaluated = dumped(folder, "eval_0")
    scored = [sample["reward"] for sample in evaluated if not sample["metadata"]["qreward"]["failed"]]
    assert scored
    assert len(scored) == len(evaluated) - sum(scenario.loses(read_response(each["response"])) for each in evaluated)
    assert board["eval/sums"][0] == pytest.approx(math.fsum(scored) / len(scored))
