"""A judge of kind `code`: which program and which tests it finds, what it asks a sandbox, and what it makes of it."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
import yarl

from qreward_plugins import ConfigurationError, Failed, RewardEngine, Sample, Scored
from qreward_plugins.errors import InputError, TransientError
from qreward_plugins.judges import CodeJudge
from qreward_plugins.judges.code import ENDS, program_of, read_tests
from qreward_plugins.simulation import SimulatedSource
from qreward_plugins.sources import Reply, SandboxSource
from qreward_plugins.sources.http_reading import HTTPReply
from qreward_plugins.testing import Faults, JudgeServer, PlayFault, ran

from ..kit import Stage, each_of, tasks_left

ADD = {"inputs": ["1 2\n", "3 4\n", "5 6\n"], "outputs": ["3\n", "7\n", "11\n"]}
URL = "http://box.invalid/run_code"


def sample(program: str = "right", tests: Any = ADD, **fields: Any) -> Sample:
    response = fields.pop("response", f"So:\n```python\n{program}\n```")
    return Sample([{"role": "user", "content": "Add."}], response, tests, **fields)


def config(url: str = URL, *, source: Any = None, **keys: Any) -> dict[str, Any]:
    return {
        "sources": {"box": {"kind": "sandbox", "url": url, **(source or {})}},
        "judges": {"code": {"kind": "code", **keys}},
    }


@each_of(
    ("response", "program"),
    [
        ("```python\na\n```", "a"),
        ("```\na\n```", "a"),
        ("```python\na\n```\nor\n```Python3\nb\n```\nprints\n```\n3\n```", "b"),
        ("```\na\n```\n```\nb\n```", "b"),
        ("```cpp\na\n```", "a"),
        ("~~~py\na\n```\n~~~", "a\n```"),
        ("````py\n```\na\n````", "```\na"),
        ("  ```py\r\n  a\r\n  ```\r\n", "  a"),
        ("<think>```py\na\n```</think>```py\nb\n```", "b"),
        ("<think>```py\na\n```", None),
        ("```py\na", None),
        ("a ```py\nb\n```", None),
        ("none", None),
    ],
)
def test_the_program_of_a_response(response: str, program: str | None) -> None:
    assert program_of(response, "python") == program


def test_a_response_of_many_fences_is_read_in_one_pass() -> None:
    assert program_of("```a\n" * 200_000, "python") is None


def read(tests: Any, **keys: Any) -> Any:
    extras = keys.pop("extras", {})
    return read_tests(sample(tests=tests, extras=extras), CodeJudge.Config(kind="code", **keys))


@each_of(
    ("tests", "stdin", "right", "wrong"),
    [
        (ADD, "1 2\n", ["3", " 3 \n", "\n3\r\n\n"], ["", "4", "3\n3", "3.0"]),
        (json.dumps(ADD), "1 2\n", ["3"], ["4"]),
        ({"inputs": np.array(["1"]), "outputs": np.array(["a \nb"])}, "1", ["a\n  b"], ["a b", "a\n\nb"]),
        ({"inputs": [["1", "2"]], "outputs": [["a", "b"]], "fn_name": None}, "1\n2", ["a\nb"], ["a"]),
        ({"inputs": [1], "outputs": [2]}, "1", ["2"], ["1"]),
    ],
)
def test_a_program_that_reads_and_prints(tests: Any, stdin: str, right: list[str], wrong: list[str]) -> None:
    test = read(tests)[0]
    assert (test.stdin, test.source("p", "n")) == (stdin, "p")
    assert [test.passes(text, "") for text in [*right, *wrong]] == [True] * len(right) + [False] * len(wrong)


SUM = "def f(a, b=0):\n    return a + b\nif __name__ == '__main__':\n    raise SystemExit(input())"
SOLUTION = "class Solution:\n    def f(self, x: List[int]) -> int:\n        print(1)\n        return sum(x)"


@each_of(
    ("program", "tests", "passes"),
    [
        (SUM, {"fn_name": "f", "inputs": ["1\n2", "3"], "outputs": ["3", "4"]}, [True, False]),
        (SUM, {"fn_name": "f", "inputs": ['"a"\n"b"', "2"], "outputs": ['"ab"', "2"]}, [True, True]),
        (SUM, {"fn_name": "f", "inputs": [[1, 2], [[1], [2]]], "outputs": [[3], [1, 2]]}, [True, True]),
        (SOLUTION, {"fn_name": "f", "inputs": ["[1, 2]", "[]"], "outputs": ["3", "1"]}, [True, False]),
        ("from __future__ import annotations\n" + SUM, ["assert f(1) == 1", "assert f(1) == 2"], [True, False]),
        ("def f(): return {1}", {"fn_name": "f", "inputs": [[]], "outputs": [[1]]}, [False]),
        ("def f(): return [True]", {"fn_name": "f", "inputs": [[]], "outputs": [[[1]]]}, [False]),
        (
            "def f(): return {'a': 1}",
            {"fn_name": "f", "inputs": [[], []], "outputs": [{"a": True}, {"a": 1}]},
            [False, True],
        ),
        ("def f(): return 1.0", {"fn_name": "f", "inputs": [[]], "outputs": [1]}, [True]),
        ("def g(): return 1", {"fn_name": "f", "inputs": [[]], "outputs": [1]}, [False]),
        ("def f(): return (1, 2)", {"fn_name": "f", "inputs": [[]], "outputs": [[1, 2]]}, [True]),
        # To end early, to print, or to be right once is not to return.
        ("import os\nprint('true')\nos._exit(0)", ["assert f(1) == 2"], [False]),
        ("raise SystemExit", {"fn_name": "f", "inputs": [[]], "outputs": [None]}, [False]),
        ("def f(): return [[" * 1, ["assert True"], [False]),
    ],
)
def test_a_program_with_a_function(program: str, tests: Any, passes: list[bool]) -> None:
    """The programs are those of this table, so they may run here."""
    for test, expected in zip(read(tests), passes, strict=True):
        source = test.source(program, "0123456789abcdef")
        done = subprocess.run([sys.executable, "-I", "-c", source], input="", capture_output=True, text=True)
        assert test.passes(done.stdout, "0123456789abcdef") == expected, done


@each_of(
    ("tests", "keys", "said"),
    [
        (None, {}, "the ground truth holds no tests"),
        ("{", {}, "the ground truth is a text that is no JSON"),
        ([], {}, "the ground truth holds no tests"),
        ({"inputs": ["1"], "outputs": []}, {}, "the ground truth holds no tests"),
        ({"inputs": [{}], "outputs": ["1"]}, {}, "a test that cannot be read"),
        ({"inputs": ["x"], "outputs": ["1"], "fn_name": "f"}, {}, "a test that cannot be read"),
        ({"inputs": [[1]], "outputs": [1], "fn_name": "f"}, {"language": "cpp"}, "in python only, not cpp"),
        (["assert f"], {"language": "go"}, "in python only, not go"),
        (ADD, {"column": "tests"}, "the sample has no column tests; it has a"),
        (ADD, {"column": "a.b"}, "the column a.b holds no tests"),
    ],
)
def test_tests_that_cannot_be_read_are_a_mistake_of_the_data(tests: Any, keys: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read(tests, extras={"a": {"b": 1}}, **keys)


def test_the_first_tests_of_a_column() -> None:
    assert [test.stdin for test in read(None, extras={"a": {"b": json.dumps(ADD)}}, column="a.b", max_tests=2)] == [
        "1 2\n",
        "3 4\n",
    ]


SOURCE = SandboxSource("box", SandboxSource.Config(kind="sandbox", url=URL))


def answered(reply: Any, status: int = 200) -> Reply:
    """What the source makes of the body of a reply."""
    body = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
    return SOURCE.answer(yarl.URL(URL), HTTPReply(status, {"Content-Type": "application/json"}, body)).reply()


@each_of(
    ("reply", "ended"),
    [
        (ran("3\n"), "finished"),
        (ran("[" * 500 + "\u0000"), "finished"),
        (ran(ended="run_error", stderr="no"), "run_error"),
        (ran(ended="timeout"), "timeout"),
        (ran(ended="compile_error"), "compile_error"),
        ({**ran(ended="compile_error"), "compile_result": {"status": "TimeLimitExceeded"}}, "compile_error"),
        ({**ran("3"), "compile_result": ran()["run_result"]}, "finished"),
        (ran(ended="sandbox_error", stderr="exception on running code"), None),
        ({**ran(ended="compile_error"), "compile_result": {"status": "Error"}}, None),
        ({**ran(ended="run_error"), "status": "Success"}, None),
        ({**ran("3"), "status": "Failed"}, None),
        ({**ran("3"), "run_result": None}, None),
        ({"detail": "Not Found"}, None),
        ([], None),
        (b"<html>", None),
        (b"", None),
    ],
)
def test_how_a_program_ended(reply: Any, ended: str | None) -> None:
    if ended is None:
        with pytest.raises(TransientError):
            answered(reply)
    else:
        assert answered(reply).finish_reason == ended


def box(request: Any) -> Reply:
    """A sandbox that adds. A program may say `wrong`, `crash`, `hang`, `broken`, or `half` (of the tests)."""
    code, stdin = request.parameters["code"], request.parameters["stdin"]
    ended = {"crash": "run_error", "hang": "timeout", "broken": "compile_error"}.get(code, "finished")
    right = code == "right" or (code == "half" and stdin != "3 4\n")
    return Reply(text=f"{sum(map(int, stdin.split())) if right else 0}\n", finish_reason=ended, value="the end")


@each_of(
    ("program", "keys", "reward", "correct", "end", "calls"),
    [
        ("right", {}, 1.0, True, "passed", 3),
        ("half", {}, 2 / 3, False, "passed", 3),
        ("half", {"reward_range": [-1, 1], "correct_at": 0.3}, 1 / 3, True, "passed", 3),
        ("half", {"all": True}, 0.0, False, "passed", 3),
        ("right", {"all": True}, 1.0, True, "passed", 3),
        ("right", {"max_tests": 2}, 1.0, True, "passed", 2),
        ("wrong", {}, 0.0, False, "wrong_output", 3),
        ("wrong", {"all": True}, 0.0, False, "wrong_output", 1),
        ("crash", {}, 0.0, False, "run_error", 3),
        ("hang", {}, 0.0, False, "timeout", 3),
        ("broken", {"language": "cpp"}, 0.0, False, "compile_error", 1),
        ("right", {"language": "cpp"}, 1.0, True, "passed", 3),
    ],
)
def test_what_a_program_gets(program: str, keys: Any, reward: float, correct: bool, end: str, calls: int) -> None:
    stage = Stage({"box": 1.0}, answer=box, tree=config(**keys))
    (outcome,) = stage.play([sample(program)]).outcomes
    assert isinstance(outcome, Scored)
    verdict = outcome.verdict
    assert (verdict.score, verdict.correct, len(stage.sent)) == (pytest.approx(reward), correct, calls)
    assert tuple(verdict.components) == ENDS
    assert max(verdict.components, key=verdict.components.__getitem__) == end
    assert sum(verdict.components.values()) == pytest.approx(1)
    assert (verdict.judge, verdict.source, verdict.basis) == ("code", "box", "judged")


def test_a_response_without_a_program_gets_the_floor_without_a_call() -> None:
    stage = Stage({"box": 1.0}, answer=box, tree=config(reward_range=[-1, 1]))
    (outcome,) = stage.play([sample(response="I cannot.")]).outcomes
    assert isinstance(outcome, Scored)
    assert (outcome.reward, outcome.verdict.basis, outcome.verdict.correct, stage.sent) == (-1.0, "floor", False, [])


def test_a_fault_of_the_sandbox_fails_the_sample_and_ends_its_other_tests() -> None:
    def behaviour(number: int, request: Any, now: float) -> Any:
        return TransientError("box: no") if request.parameters["stdin"] == "3 4\n" else 100.0

    stage = Stage({"box": behaviour}, answer=box, tree={**config(), "engine": {"deadline_s": 60}})
    (failed,) = stage.play([sample()]).outcomes
    assert isinstance(failed, Failed)
    assert (failed.cause, failed.judge) == ("infra", "code")
    assert failed.detail.startswith("test 2: ")
    assert stage.simulated["box"].cancelled == 2
    (unread,) = Stage({"box": 1.0}, tree=config()).play([sample(tests="{")]).outcomes
    assert isinstance(unread, Failed)
    assert unread.label == "infra/input"


def test_tests_keep_the_limits_of_their_sandbox() -> None:
    limits = {"requests_per_minute": 60, "concurrency": 4}
    simulated = SimulatedSource("box", answer=box, requests_per_window=60, concurrency=4)
    stage = Stage({"box": simulated}, tree=config(source={"limits": limits}))
    played = stage.play([sample() for _ in range(40)], deadline_s=600)
    assert (played.rewards, len(stage.sent), simulated.violations) == ([1.0] * 40, 120, [])
    assert played.finished_s > 60


def test_a_recorded_test_is_not_run_again(tmp_path: Any) -> None:
    functions = {"fn_name": "f", "inputs": [[1], [2]], "outputs": [1, 2]}
    batch = [sample("half"), sample("f", functions)]

    def score(call: Any) -> Any:
        if not call.stdin:  # a call of a function
            return ran(ended="run_error")
        return box(type("", (), {"parameters": call.parameters})).text

    def play(*samples: Sample, **keys: Any) -> tuple[list[Any], int]:
        with JudgeServer(score, port=0) as server:
            source = {"version": "1"}
            tree = config(f"{server.root_url}/run_code", source=source, **keys)
            tree["engine"] = {"journal": {"path": str(tmp_path / "j.sqlite")}}

            async def main() -> list[Any]:
                async with RewardEngine(tree) as engine:
                    return [outcome.verdict for outcome in await engine.score_all(samples)]

            verdicts = asyncio.run(main())
            return [(verdict.score, verdict.rationale) for verdict in verdicts], server.report().requests

    said, calls = play(*batch)
    assert calls == 5
    with sqlite3.connect(tmp_path / "j.sqlite") as journal:
        rows = Counter(journal.execute("SELECT judge, outcome FROM outcomes").fetchall())
    journal.close()
    # What is read as the reward of a sample is the entry of the judge, not those of its tests.
    assert rows == {("code", "scored"): 2, ("code/test", "scored"): 5}
    assert said[0][1] == "test 2: wrong_output: '0\\n'"
    assert play(*batch) == (said, 0)
    # Another range, and all of them, need no call; another time limit, another output or another input does.
    assert play(batch[0], reward_range=[0, 3])[0][0][0] == pytest.approx(2)
    assert play(batch[0], all=True) == ([(0.0, said[0][1])], 0)
    assert play(batch[0], run_timeout_s=5)[1] == 3
    assert play(sample("half", {**ADD, "outputs": ["3\n", "0", "11\n"]}))[1] == 1
    assert play(sample("half", {**ADD, "inputs": ["1 2", "3 4\n", "5 6\n"]}))[1] == 1


FAULTS = (
    "error_429 error_500 error_502 error_503 error_504 error_408 reset close mid_body_reset truncated_body "
    "truncated_json html empty no_content invalid_utf8 wrong_json_type no_choices error_in_200 bad_gzip null_content "
    "cut_off score_string score_bool score_null two_verdicts prose refusal"
)


def test_no_fault_of_a_server_becomes_a_number() -> None:
    script = [each for kind in FAULTS.split() for each in (kind, None, None)]
    with JudgeServer(lambda call: "3", faults=Faults(script=script)) as server:
        tree = {**config(f"{server.root_url}/run_code", floor=0), "engine": {"deadline_s": 30, "seed": 1}}

        async def main() -> Any:
            async with RewardEngine(tree) as engine:
                outcomes = await engine.score_all([sample(tests={"inputs": ["1"], "outputs": ["3"]})] * 60)
            assert tasks_left() == []
            return outcomes

        outcomes = asyncio.run(main())
        report = server.report()
    assert [outcome.reward for outcome in outcomes] == [1.0] * 60
    assert set(report.faults) == set(FAULTS.split())


@each_of(
    ("source", "keys", "said"),
    [
        ({"timeouts": {"total_s": 20}}, {}, "sources.box.timeouts.total_s: a program may take 20 s"),
        ({}, {"language": "pyhton"}, "judges.code.language"),
        ({}, {"on_invalid": "floor"}, "judges.code.on_invalid"),
        ({}, {"floor": 2}, "judges.code.floor: 2 is outside the reward range"),
        ({}, {"max_tests": 0}, "judges.code.max_tests"),
        ({"kind": "http"}, {}, "judges.code"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(source: Any, keys: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        RewardEngine(config(source=source, **keys))


def test_a_program_that_a_sandbox_refuses_is_no_verdict() -> None:
    def score(call: Any) -> str:
        if call.code == "refused":
            raise PlayFault("error_422")
        return "3"

    one = {"inputs": ["1 2"], "outputs": ["3"]}
    with JudgeServer(score) as server:

        async def main(source: Any, *samples: Sample) -> Any:
            async with RewardEngine(config(f"{server.root_url}/run_code", source=source)) as engine:
                return await engine.score_all(samples, deadline_s=5)

        *good, refused = asyncio.run(main({}, *[sample(tests=one)] * 8, sample("refused", one)))
        (unread,) = asyncio.run(main({"parameters": {"language": None}}, sample(tests=one)))
    assert [outcome.reward for outcome in good] == [1.0] * 8
    assert (refused.cause, "422" in refused.detail) == ("infra", True)
    assert (unread.cause, "'language' must be a string" in unread.detail) == ("infra", True)
