"""The dry run of the recipes, without a framework: machines, data, judges and the table.

`test_verl_recipes.py` runs it on verl; on slime and ROLL it runs in tests/conformance.
"""

from __future__ import annotations

import importlib
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from qreward_plugins import load_config
from qreward_plugins.testing import JudgeServer

from ..kit import each_of

JUDGES = Path(__file__).parents[2] / "recipes" / "judges"
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


def test_what_a_configuration_lacks_fails_it(recipe_tools, variables):
    variables.delenv("HOSTED_API_KEY")
    config = load_config(JUDGES / "hosted.yaml")
    found = by_name(recipe_tools.judging.judge_lines(config, None, None, step(recipe_tools), ask=False))
    assert (found["keys"].status, found["keys"].found) == ("FAIL", "not set: HOSTED_API_KEY")
    tree = {
        "sources": {"a": {"kind": "openai", "base_url": "http://a/v1", "model": "m",
                          "parameters": {"reasoning_effort": "high"}, "timeouts": {"total_s": 400}}},
        "judges": {"j": {"kind": "llm", "max_tokens": 1024}},
    }  # fmt: skip
    found = by_name(recipe_tools.judging.judge_lines(load_config(tree), None, None, step(recipe_tools), ask=False))
    assert found["thinking"].status == "FAIL"
    assert found["time limits"].status == "FAIL"
    assert "a 400 s" in found["time limits"].found
    assert found["journal"].status == "note"


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


def test_the_table_has_a_line_for_each_check_and_the_remedies(recipe_tools):
    def broken():
        raise SystemExit("2 mistakes")

    Line, check = recipe_tools.lines.Line, recipe_tools.lines.check
    lines = [Line("data", "ok", "12 rows"), check("flags", broken, "correct them"), check("plan", lambda: "3 s", "")]
    assert [line.status for line in lines] == ["ok", "FAIL", "ok"]
    assert recipe_tools.lines.failed(lines) == 1
    out = io.StringIO()
    recipe_tools.lines.show("dry run", lines, Console(file=out, width=100))
    for text in ("data", "12 rows", "SystemExit: 2 mistakes", "-> correct them", "3 s"):
        assert text in out.getvalue()


def test_the_script_ends_with_a_verdict_and_an_exit_code(recipe_tools, monkeypatch, capsys):
    script = recipe_tools.dry_run
    monkeypatch.setattr(script, "_lines", lambda asked: [script.Line("judges", "ok", "fine")])
    assert script.main(["slime", "judges.yaml", "--", "--lr", "1e-6"]) == 0
    assert "all 1 checks passed; nothing was started" in capsys.readouterr().out
    assert script.main(["--missing", "SAVE: not set", "slime", "judges.yaml", "--"]) == 1
    said = capsys.readouterr().out
    assert "SAVE: not set" in said
    assert "1 of 2 checks failed" in said


def test_the_recipes_own_folders_are_not_taken_for_the_frameworks(recipe_tools, monkeypatch, tmp_path):
    for name in ("roll", "slime"):
        # Set first, so that monkeypatch removes what the search for a submodule imports.
        monkeypatch.setitem(sys.modules, name, sys)
        del sys.modules[name]
        (tmp_path / name).mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert not recipe_tools.machine.has_module("roll.pipeline")
    assert not recipe_tools.machine.has_module("slime.utils")
    assert recipe_tools.machine.has_module("json.decoder")
    (line,) = importlib.import_module("dryrun.slime_recipe").slime_lines(tmp_path / "judges.yaml", [], ask=False)
    assert (line.status, line.found) == ("FAIL", "the package slime is not importable here")


@each_of(
    ("response", "reference", "reward"),
    [
        ("40+2 = 42. The answer is 42.", "42", 1.0),
        ("The answer is 1,042.0", "1042", 1.0),
        ("42 or 43", "42", 0.0),
        ("It is blotting.\nThe answer is Western blot.", "western blot", 1.0),
        ("Western blot, or not", "western blot", 0.0),
    ],
)
def test_the_rule_compares_the_final_answer(recipe_tools, response, reference, reward):
    space = SimpleNamespace()
    exec((JUDGES / "rules.py").read_text(), space.__dict__)
    assert space.right_answer("gsm8k", response, reference) == reward


@each_of(
    ("shares", "status", "words"),
    [
        ({"judged": 0.5, "rule": 0.5}, ["ok"], "judged 0.5, rule 0.5"),
        ({"my_domain": 1.0, "rule": 1.0}, ["FAIL", "note"], "my_domain is no domain of rewards"),
        ({"judged": 1.0}, ["note"], "rule: not in actor_train.data_args.domain_interleave_probs"),
    ],
)
def test_the_shares_of_rolls_domains_name_the_domains(recipe_tools, shares, status, words):
    tree = {"actor_train": {"data_args": {"domain_interleave_probs": shares}}}
    lines = recipe_tools.roll_recipe.share_lines(tree, ["judged", "rule"])
    assert [line.status for line in lines] == status
    assert words in lines[0].found
    assert status[0] != "FAIL" or "{judged: 0.5, rule: 0.5}" in lines[0].remedy


def test_a_domain_of_roll_without_rows_is_named(recipe_tools):
    tree = {"actor_train": {"data_args": {"domain_interleave_probs": {"judged": 0.5, "rule": 0.5}}}}
    tags = {"judged": {"sums"}, "rule": {"deepmath", "math"}, "validation_only": {"gpqa"}}
    (line,) = recipe_tools.roll_recipe.rowless_lines(tree, tags, {"sums", "trivia"})
    assert line.status == "FAIL"
    assert line.found == "rule: no training row has one of its tags (deepmath, math); the data has sums, trivia"
    assert "rewards.rule.tag_included" in line.remedy
    assert recipe_tools.roll_recipe.rowless_lines(tree, tags, {"sums", "math"}) == []


def test_gpus_of_a_cluster_are_counted_by_node(recipe_tools):
    def line(nodes, found):
        environment = {"RAY_API_SERVER_ADDRESS": "http://head:8265"}
        return recipe_tools.machine.gpu_line(nodes, 8, environment=environment, of_cluster=found)

    def down(address):
        raise ConnectionError("refused")

    assert line(2, lambda address: [8, 0, 8]).status == "ok"
    assert line(2, lambda address: [8, 4]).status == "FAIL"
    assert line(1, down).found == "asks for 1 x 8; the cluster at http://head:8265 does not answer: ConnectionError"
