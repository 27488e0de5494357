"""The ready configurations of judges, each played against a judge server, and the dry run of the recipes, without a
framework: machines, data, judges and the table.

`test_verl_recipes.py` runs it on verl; on slime and ROLL it runs in tests/conformance.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qreward_plugins import RewardEngine, Sample, load_config
from qreward_plugins.testing import JudgeServer

from ..kit import each_of

JUDGES = Path(__file__).parents[2] / "recipes" / "judges"

pytestmark = pytest.mark.anyio


def sample(number: int, response: str, **fields: Any) -> Sample:
    given = {"ground_truth": "42", "group_id": "g", "id": str(number), **fields}
    return Sample([{"role": "user", "content": "What is 17 plus 25?"}], response, **given)


def says(call: Any) -> Any:
    """A judge whose answer stands in the response, after `worth`; of a reference, whether the answer is forty-two."""
    response = call.blocks["response"]
    return float(response.split("worth ")[-1]) if "worth" in response else float(response in ("42", "forty-two"))


async def scored(
    recipe: str, server: JudgeServer, samples: list[Sample], monkeypatch: Any, tmp_path: Path
) -> list[Any]:
    monkeypatch.setenv("QREWARD_JOURNAL", str(tmp_path / "journal.sqlite"))
    for name in ("JUDGE_BASE_URL", "JUDGE_A_URL", "JUDGE_B_URL", "JUDGE_C_URL"):
        monkeypatch.setenv(name, server.base_url)
    for name in ("JUDGE_MODEL", "JUDGE_A_MODEL", "JUDGE_B_MODEL", "JUDGE_C_MODEL"):
        monkeypatch.setenv(name, "judge")
    async with RewardEngine(load_config(JUDGES / recipe)) as engine:
        return await engine.score_all(samples)


async def test_a_model_looks_again_at_what_a_program_calls_wrong(monkeypatch, tmp_path):
    samples = [sample(0, r"\boxed{42}"), sample(1, r"\boxed{forty-two}"), sample(2, r"\boxed{43}"), sample(3, "none")]
    with JudgeServer(says) as server:
        outcomes = await scored("math_then_judge.yaml", server, samples, monkeypatch, tmp_path)
        assert server.report().requests == 2
    assert [outcome.reward for outcome in outcomes] == [1, 1, 0, 0]
    assert [outcome.verdict.correct for outcome in outcomes] == [True, True, False, False]


async def test_right_answers_are_ranked(monkeypatch, tmp_path):
    samples = [sample(number, rf"\boxed{{{number % 2 + 41}}} worth {number}") for number in range(6)]
    with JudgeServer(says) as server:
        outcomes = await scored("rank.yaml", server, samples, monkeypatch, tmp_path)
        assert server.report().requests == 1
    assert [outcome.reward for outcome in outcomes] == [0, 0.5, 0, 0.75, 0, 1]
    assert [outcome.verdict.correct for outcome in outcomes] == [False, True] * 3


# The dry run


KEY = "sk-never-shown-4711"
VARIABLES = {
    "HOSTED_BASE_URL": "https://hosted.example/v1",
    "HOSTED_MODEL": "judge-large",
    "HOSTED_API_KEY": KEY,
    "JUDGE_BASE_URL": "http://judge.example/v1",
    "QREWARD_RULES": str(JUDGES / "rules.py"),
}


@pytest.fixture
def variables(monkeypatch):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    for name in ("JUDGE_MODEL", "RAY_API_SERVER_ADDRESS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def by_name(lines):
    return {line.what: line for line in lines}


def step(recipe_tools, **more):
    return recipe_tools.judging.Step(**{"samples": 16, "steps": 100, "most_response_tokens": 512, **more})


def task(recipe_tools):
    return recipe_tools.formats.Task(({"role": "user", "content": "What is 40+2?"},), "42", "gsm8k", "40+2 = 42")


@pytest.mark.parametrize("name", sorted(path.stem for path in JUDGES.glob("*.yaml")))
def test_every_judges_file_is_valid_and_can_be_planned(recipe_tools, variables, name):
    config = load_config(JUDGES / f"{name}.yaml")
    lines = recipe_tools.judging.judge_lines(config, JUDGES / f"{name}.yaml", None, step(recipe_tools), ask=False)
    found = by_name(lines)
    assert [line for line in lines if line.status in ("FAIL", "note")] == []
    assert found["judged sample"].status == "skipped"
    if name in ("code", "math_then_judge", "rubric"):  # a made-up row has no tests, no right answer and no criteria
        assert (found["plan"].status, "--tokens" in found["plan"].remedy) == ("skipped", True)
        return
    assert "16 samples of a step need about" in found["plan"].found
    assert ("$" in found["plan"].found) is (name == "hosted")
    assert KEY not in repr(lines)
    assert ("thinking" in found) is (name == "thinking")


def test_a_row_is_judged_and_the_plan_takes_the_time_that_it_took(recipe_tools, variables):
    file = JUDGES / "thinking.yaml"
    with JudgeServer(lambda call: 10.0 if "42" in call.blocks["response"] else 0.0) as server:
        variables.setenv("JUDGE_BASE_URL", server.base_url)
        variables.setenv("JUDGE_MODEL", "judge")
        lines = recipe_tools.judging.judge_lines(
            load_config(file), file, task(recipe_tools), step(recipe_tools), ask=True
        )
        requests = server.report().requests
    found = by_name(lines)
    assert found["qreward check"].status == "ok", found["qreward check"]
    assert found["judged sample"].status == "ok", found["judged sample"]
    assert found["judged sample"].found.startswith("a right answer got 1, in ")
    assert found["plan"].found.endswith("latencies measured just now")
    # One for the sample; the check asks one for its row, and six for its pairs.
    assert requests == 8


@each_of(
    ("have", "asked", "judges", "variable", "status"),
    [
        (8, (1, 8), (), None, "ok"),
        (4, (1, 8), (), None, "FAIL"),
        (8, (1, 4), (4, 5), "0,1,2,3", "ok"),
        (8, (1, 8), (6, 7), None, "FAIL"),
        (8, (2, 8), (), None, "FAIL"),
    ],
)
def test_gpus_that_a_training_asks_for_exist_and_are_its_own(recipe_tools, have, asked, judges, variable, status):
    environment = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    line = recipe_tools.machine.gpu_line(
        *asked, judge_devices=judges, environment=environment, count=lambda: min(have, 4 if variable else 8)
    )
    assert line.status == status, line
    assert bool(line.remedy) is (status == "FAIL")


def test_data_that_is_missing_or_shared_is_told(recipe_tools, tmp_path):
    row = {"prompt": "What is 2+3?", "label": "5", "metadata": {"data_source": "s"}}
    for name in ("train", "val"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    train, val = tmp_path / "train.jsonl", tmp_path / "val.jsonl"
    lines, reports = recipe_tools.data_lines.data_lines("slime", [train], [val, tmp_path / "no.jsonl"])
    assert [line.status for line in lines] == ["ok", "ok", "FAIL", "note"]
    assert "prepare_data.py slime" in lines[2].remedy
    assert lines[3].found.startswith("1 prompts of the validation")
    assert len(reports) == 1


def test_the_script_ends_with_a_verdict_and_an_exit_code(recipe_tools, monkeypatch, capsys):
    script = recipe_tools.dry_run
    monkeypatch.setattr(script, "_lines", lambda asked: [script.Line("judges", "ok", "fine")])
    assert script.main(["slime", "judges.yaml", "--", "--lr", "1e-6"]) == 0
    assert "all 1 checks passed; nothing was started" in capsys.readouterr().out
    assert script.main(["--missing", "SAVE: not set", "slime", "judges.yaml", "--"]) == 1
    said = capsys.readouterr().out
    assert "SAVE: not set" in said
    assert "1 of 2 checks failed" in said


def test_the_domains_of_roll_have_shares_and_rows(recipe_tools):
    def tree(**shares):
        return {"actor_train": {"data_args": {"domain_interleave_probs": shares}}}

    recipe = recipe_tools.roll_recipe
    assert [line.status for line in recipe.share_lines(tree(judged=0.5, rule=0.5), ["judged", "rule"])] == ["ok"]
    wrong, _ = recipe.share_lines(tree(my_domain=1.0, rule=1.0), ["judged", "rule"])
    assert (wrong.status, "my_domain is no domain of rewards" in wrong.found) == ("FAIL", True)
    tags = {"judged": {"sums"}, "rule": {"math"}}
    (line,) = recipe.rowless_lines(tree(judged=0.5, rule=0.5), tags, {"sums", "trivia"})
    assert line.found == "rule: no training row has one of its tags (math); the data has sums, trivia"


def sleeping(server="vllm", **arguments):
    own = {"kind": "replicas", "server": server, "model": "m", "devices": [0, 1], "colocated": True}
    return {"sources": {"own": {**own, "arguments": arguments}}, "judges": {"quality": {"kind": "llm"}}}


@each_of(
    ("config", "engine", "problem", "status"),
    [
        (sleeping(gpu_memory_utilization=0.35), 0.5, "", "ok"),
        (sleeping(gpu_memory_utilization=0.35), 0.8, "", "FAIL"),
        (sleeping(), 0.5, "", "FAIL"),
        (sleeping("sglang", mem_fraction_static=0.5), 0.5, "", "FAIL"),
        (sleeping(gpu_memory_utilization=0.35), 0.5, "it asks while it trains.", "FAIL"),
    ],
)
def test_a_sleeping_judge_fits_beside_the_inference_engine(recipe_tools, config, engine, problem, status):
    config = load_config(config)
    (line,) = recipe_tools.judging.sleeping_lines(config, problem, engine_share=engine, key="the engine's share")
    assert (line.status, bool(line.remedy)) == (status, status == "FAIL"), line
    assert (problem in line.found) or line.found.startswith("own sleeps while the trainer trains")
