"""The script that makes the frameworks' data sets, and its check."""

from __future__ import annotations

import json

import pytest

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
