"""What is ready before a run: configurations of judges, each played against a judge server; the dry run of the recipes,
without a framework: machines, data, judges and the table; and the script that makes the frameworks' data sets.

`test_verl_recipes.py` runs it on verl; on slime and ROLL it runs in tests/conformance.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from qreward_plugins import RewardEngine, Sample, load_config
from qreward_plugins.testing import JudgeServer

from ..kit import each_of
from .conftest import JUDGES, KEY, RECIPES

FILES = RECIPES / "judges"

pytestmark = pytest.mark.anyio


def sample(number: int, response: str, **fields: Any) -> Sample:
    given = {"ground_truth": "42", "group_id": "g", "id": str(number), **fields}
    return Sample([{"role": "user", "content": "What is 17 plus 25?"}], response, **given)


def says(call: Any) -> Any:
    """A judge whose answer stands in the response, after `worth`; of a reference, whether the answer is forty-two."""
    response = call.blocks["response"]
    return float(response.split("worth ")[-1]) if "worth" in response else float(response in ("42", "forty-two"))


async def scored(recipe: str, server: JudgeServer, samples: list[Sample], monkeypatch: Any) -> list[Any]:
    monkeypatch.setenv("JUDGE_BASE_URL", server.base_url)
    monkeypatch.setenv("JUDGE_MODEL", "judge")
    async with RewardEngine(load_config(FILES / recipe)) as engine:
        return await engine.score_all(samples)


async def test_a_model_looks_again_at_what_a_program_calls_wrong(monkeypatch):
    samples = [sample(0, r"\boxed{42}"), sample(1, r"\boxed{forty-two}"), sample(2, r"\boxed{43}"), sample(3, "none")]
    with JudgeServer(says) as server:
        outcomes = await scored("math_then_judge.yaml", server, samples, monkeypatch)
        assert server.report().requests == 2
    assert [outcome.reward for outcome in outcomes] == [1, 1, 0, 0]
    assert [outcome.verdict.correct for outcome in outcomes] == [True, True, False, False]


async def test_right_answers_are_ranked(monkeypatch):
    samples = [sample(number, rf"\boxed{{{number % 2 + 41}}} worth {number}") for number in range(6)]
    with JudgeServer(says) as server:
        outcomes = await scored("rank.yaml", server, samples, monkeypatch)
        assert server.report().requests == 1
    assert [outcome.reward for outcome in outcomes] == [0, 0.5, 0, 0.75, 0, 1]
    assert [outcome.verdict.correct for outcome in outcomes] == [False, True] * 3


# The dry run


@pytest.fixture
def variables(monkeypatch):
    for name, value in {**JUDGES, "QREWARD_RULES": str(FILES / "rules.py")}.items():
        monkeypatch.setenv(name, value)
    for name in ("JUDGE_MODEL", "RAY_API_SERVER_ADDRESS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.fixture
def judge_lines(recipe_tools, variables):
    """What the dry run says of a ready configuration, by name."""

    def lines_of(name, task=None, *, ask=False):
        file, step = FILES / f"{name}.yaml", recipe_tools.judging.Step(samples=16, steps=100, most_response_tokens=512)
        lines = recipe_tools.judging.judge_lines(load_config(file), file, task, step, ask=ask)
        return {line.what: line for line in lines}

    return lines_of


@pytest.mark.parametrize("name", sorted(path.stem for path in FILES.glob("*.yaml")))
def test_every_judges_file_is_valid_and_can_be_planned(judge_lines, name):
    found = judge_lines(name)
    assert [line for line in found.values() if line.status in ("FAIL", "note")] == []
    assert found["judged sample"].status == "skipped"
    if name in ("code", "math_then_judge", "rubric"):  # a made-up row has no tests, no right answer and no criteria
        assert (found["plan"].status, "--tokens" in found["plan"].remedy) == ("skipped", True)
        return
    assert "16 samples of a step need about" in found["plan"].found
    assert ("$" in found["plan"].found) is (name == "hosted")
    assert KEY not in repr(found)
    assert ("thinking" in found) is (name == "thinking")


def test_a_row_is_judged_and_the_plan_takes_the_time_that_it_took(recipe_tools, variables, judge_lines):
    asked = {"role": "user", "content": "What is 40+2?"}
    with JudgeServer(lambda call: 10.0 if "42" in call.blocks["response"] else 0.0) as server:
        variables.setenv("JUDGE_BASE_URL", server.base_url)
        variables.setenv("JUDGE_MODEL", "judge")
        found = judge_lines("thinking", recipe_tools.formats.Task((asked,), "42", "gsm8k", "40+2 = 42"), ask=True)
        requests = server.report().requests
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


# Data sets


ROWS = [
    {"question": "Nat sold 48 clips, then half as many. How many?", "answer": "48/2 = 24.\n48+24 = 72.\n#### 72"},
    {"question": "What is 2+3?", "answer": "5"},
]


class Tokenizer:
    """A token for each word; the template adds two."""

    def apply_chat_template(self, chat, *, tokenize, add_generation_prompt):
        assert not tokenize
        assert add_generation_prompt
        return " ".join(["<s>", *(message["content"] for message in chat), "<a>"])

    def __call__(self, texts, *, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [text.split() for text in texts]}


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "gsm8k" / "train.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def made(recipe_tools, questions, framework, *more):
    """The data set of a framework, and the exit code of the script that made it."""
    path = questions.with_name(f"{framework}.parquet" if framework == "verl" else f"{framework}.jsonl")
    arguments = [framework, "--from", str(questions), "--to", str(path), "--instruction", "", *more]
    return path, recipe_tools.prepare_data.main(arguments)


@pytest.mark.parametrize("framework", ["verl", "slime", "roll"])
def test_questions_become_a_data_set_that_passes_its_check(recipe_tools, questions, capsys, framework):
    path, code = made(recipe_tools, questions, framework)
    assert code == 0
    said = capsys.readouterr().out
    assert "2 usable rows" in said
    assert "its reference: 72" in said
    report = recipe_tools.checks.check(framework, path, tokenizer=Tokenizer(), max_tokens=20)
    assert (report.problems, report.notes) == ((), ())
    assert report.lengths == (5, 12)
    assert report.mean_tokens == 8
    assert [(task.messages[0]["content"], task.reference, task.source) for task in report.tasks] == [
        (ROWS[0]["question"], "72", "gsm8k"),
        (ROWS[1]["question"], "5", "gsm8k"),
    ]
    if framework != "roll":
        assert report.tasks[0].solution == "48/2 = 24.\n48+24 = 72."


def test_the_rows_are_those_that_the_frameworks_read(recipe_tools, questions):
    rows = {
        name: recipe_tools.files.read_rows(made(recipe_tools, questions, name, "--split", "test")[0])[1]
        for name in ("verl", "slime", "roll")
    }
    message = {"role": "user", "content": "What is 2+3?"}
    assert rows["verl"] == {
        "data_source": "gsm8k",
        "prompt": [message],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "5"},
        "extra_info": {"index": 1, "split": "test", "solution": ""},
    }
    assert (rows["slime"]["prompt"], rows["slime"]["label"]) == ([message], "5")
    assert rows["slime"]["metadata"]["data_source"] == "gsm8k"
    assert json.loads(rows["roll"]["messages"]) == [message]
    assert (rows["roll"]["tag"], rows["roll"]["ground_truth"], rows["roll"]["id"]) == ("gsm8k", "5", "1")
    # As in ROLL's own training files, with which it is concatenated.
    assert all(isinstance(value, str) for value in rows["roll"].values())


@pytest.mark.parametrize(
    ("framework", "row", "problem"),
    [
        ("slime", {"prompt": [{"role": "user", "content": None}], "label": "5"}, "the content of a message is no text"),
        ("slime", {"prompt": "2+3?", "label": True}, "no text, or empty"),
        ("roll", {"id": "1", "messages": "not JSON", "ground_truth": "5", "tag": "t"}, "Expecting value"),
        ("roll", {"messages": [{"role": "user", "content": "q"}], "ground_truth": "5", "tag": "t"}, "there is no id"),
    ],
)
def test_a_row_that_the_framework_cannot_train_on_is_a_problem(recipe_tools, tmp_path, capsys, framework, row, problem):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert recipe_tools.prepare_data.main([framework, "--check", str(path)]) == 1
    said = capsys.readouterr().out
    assert f"problem: row 1: {problem}" in said or problem in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no rows"),
        ('{"question": "q", "answer": ""}\n', "row 1: answer is empty"),
        ('{"question": "q", "answer": "5"}\n{\n', "line 2: every line must be one JSON object, and this is none"),
        (b'{"question": "caf\xe9", "answer": "5"}', "line 1: is not UTF-8 text"),
        ('{"question": "\\ud800", "answer": "5"}\n', "question has a broken character"),
        ('{"question": "q", "answer": NaN}\n', "answer must be a text or a number"),
        ('{"text": "q", "answer": "5"}\n', "no column 'question', only text, answer"),
        ('{"question": "q", "answer": "work ####"}\n', "nothing comes after ####"),
    ],
)
def test_a_mistake_is_one_message(recipe_tools, questions, capsys, text, said):
    questions.write_bytes(text if isinstance(text, bytes) else text.encode())
    path, code = made(recipe_tools, questions, "slime")
    assert code == 2
    assert said in capsys.readouterr().err
    assert not path.exists()
    left = [ROWS[1], {"question": "q", "answer": "####"}]
    questions.write_text("".join(json.dumps(row) + "\n" for row in left))
    assert made(recipe_tools, questions, "slime", "--skip-bad")[1] == 0
    assert f"note: 1 rows of {questions} were left out" in capsys.readouterr().out


def test_a_file_is_replaced_only_with_a_flag_and_never_by_half(recipe_tools, questions, capsys):
    path, _ = made(recipe_tools, questions, "slime")
    before = path.read_bytes()
    assert made(recipe_tools, questions, "slime", "--name", "other")[1] == 2
    assert f"{path}: exists; add --overwrite" in capsys.readouterr().err
    questions.write_text("")
    assert made(recipe_tools, questions, "slime", "--overwrite")[1] == 2
    assert path.read_bytes() == before
    questions.write_text(json.dumps(ROWS[0]) + "\n")
    assert made(recipe_tools, questions, "slime", "--overwrite")[1] == 0
    assert path.read_bytes() != before
