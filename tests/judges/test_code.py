"""A judge of kind `code`: which program and which tests it finds, what it asks a sandbox, and what it makes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import yarl

from qreward_plugins import ConfigurationError, RewardEngine, Sample
from qreward_plugins.errors import InputError, TransientError
from qreward_plugins.judges import CodeJudge
from qreward_plugins.judges.code import ENDS, program_of, read_tests
from qreward_plugins.sources import Reply
from qreward_plugins.sources.http import HTTPReply
from qreward_plugins.sources.sandbox import SandboxSource
from qreward_plugins.testing import JudgeServer, ran

from ..kit import Stage, each_of

ADD = {"inputs": ["1 2\n", "3 4\n", "5 6\n"], "outputs": ["3\n", "7\n", "11\n"]}
URL = "http://box.invalid/run_code"


def sample(program="right", tests=ADD, **fields):
    response = fields.pop("response", f"So:\n```python\n{program}\n```")
    return Sample([{"role": "user", "content": "Add."}], response, tests, **fields)


def config(url=URL, *, source=None, engine=None, **keys):
    source = {"kind": "sandbox", "url": url, **(source or {})}
    return {"sources": {"box": source}, "judges": {"code": {"kind": "code", **keys}}, "engine": engine or {}}


@each_of(
    ("response", "program"),
    [
        *((f"```{name}\na\n```", "a") for name in ("python", "", "cpp")),
        ("```python\na\n```\nor\n```Python3\nb\n```\nprints\n```\n3\n```", "b"),
        ("````py\n```\na\n````", "```\na"),
        ("<think>```py\na\n```</think>```py\nb\n```", "b"),
        *((text, None) for text in ("<think>```py\na\n```", "```py\na", "a ```py\nb\n```", "none")),
        ("```a\n" * 200_000, None),  # it is read in one pass
    ],
)
def test_the_program_of_a_response(response, program):
    assert program_of(response, "python") == program


def read(tests, **keys):
    extras = keys.pop("extras", {})
    return read_tests(sample(tests=tests, extras=extras), CodeJudge.Config(kind="code", **keys))


@each_of(
    ("tests", "stdin", "right", "wrong"),
    [
        (ADD, "1 2\n", ["3", " 3 \n", "\n3\r\n\n"], ["", "4", "3\n3", "3.0"]),
        ({"inputs": np.array(["1"]), "outputs": np.array(["a \nb"])}, "1", ["a\n  b"], ["a b", "a\n\nb"]),
        ({"inputs": np.array([1]), "outputs": np.array([2])}, "1", ["2"], ["1"]),
    ],
)
def test_a_program_that_reads_and_prints(tests, stdin, right, wrong):
    test = read(tests)[0]
    assert (test.stdin, test.source("p", "n")) == (stdin, "p")
    assert [test.passes(text, "") for text in [*right, *wrong]] == [True] * len(right) + [False] * len(wrong)


def of_f(inputs, outputs):
    return {"fn_name": "f", "inputs": inputs, "outputs": outputs}


SUM = "def f(a, b=0):\n    return a + b\nif __name__ == '__main__':\n    raise SystemExit(input())"
SOLUTION = "class Solution:\n    def f(self, x: List[int]) -> int:\n        print(1)\n        return sum(x)"


@each_of(
    ("program", "tests", "passes"),
    [
        (SUM, of_f(["1\n2", "3"], ["3", "4"]), [True, False]),
        (SUM, of_f([[1, 2], [[1], [2]]], [[3], [1, 2]]), [True, True]),
        (SOLUTION, of_f(["[1, 2]", "[]"], ["3", "1"]), [True, False]),
        ("from __future__ import annotations\n" + SUM, ["assert f(1) == 1", "assert f(1) == 2"], [True, False]),
        # Values are compared as JSON: true is not 1, a tuple is a list.
        (
            "def f(x): return x or {1}",
            of_f([[[True]], [{"a": 1}], [{"a": 1}]], [[[1]], {"a": True}, {"a": 1}]),
            [False, False, True],
        ),
        # To end early or to print is not to return.
        ("import os\nprint('true')\nos._exit(0)", ["assert f(1) == 2"], [False]),
    ],
)
def test_a_program_with_a_function(program, tests, passes):
    """The programs are those of this table, so they may run here."""
    for test, expected in zip(read(tests), passes, strict=True):
        source = test.source(program, "0123456789abcdef")
        done = subprocess.run([sys.executable, "-I", "-S", "-c", source], input="", capture_output=True, text=True)
        assert test.passes(done.stdout, "0123456789abcdef") == expected, done


@each_of(
    ("tests", "keys", "said"),
    [
        *((tests, {}, "the ground truth holds no tests") for tests in (None, [], {"inputs": ["1"], "outputs": []})),
        ("{", {}, "the ground truth is a text that is no JSON"),
        (of_f(["x"], ["1"]), {}, "a test that cannot be read"),
        (of_f([[1]], [1]), {"language": "cpp"}, "in python only, not cpp"),
        (ADD, {"column": "tests"}, "the sample has no column tests; it has a"),
    ],
)
def test_tests_that_cannot_be_read_are_a_mistake_of_the_data(tests, keys, said):
    with pytest.raises(InputError, match=said):
        read(tests, extras={"a": {"b": 1}}, **keys)
    # A good column, and the first of its tests.
    found = read(None, extras={"a": {"b": json.dumps(ADD)}}, column="a.b", max_tests=2)
    assert [test.stdin for test in found] == ["1 2\n", "3 4\n"]


SOURCE = SandboxSource("box", SandboxSource.Config(kind="sandbox", url=URL))


def answered(reply, status=200):
    """What the source makes of the body of a reply."""
    body = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
    return SOURCE.answer(yarl.URL(URL), HTTPReply(status, {"Content-Type": "application/json"}, body)).reply()


@each_of(
    ("reply", "ended"),
    [
        (ran("3\n"), "finished"),
        (ran(ended="timeout"), "timeout"),
        ({**ran(ended="compile_error"), "compile_result": {"status": "TimeLimitExceeded"}}, "compile_error"),
        (ran(ended="sandbox_error", stderr="exception on running code"), None),
        ({**ran("3"), "status": "Failed"}, None),
        *((reply, None) for reply in (b"", b"<html>", b"3", [], {}, {**ran("3"), "run_result": []})),
    ],
)
def test_how_a_program_ended(reply, ended):
    if ended is None:
        with pytest.raises(TransientError):
            answered(reply)
    else:
        assert answered(reply).finish_reason == ended


def box(request):
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
        ("right", {"max_tests": 2}, 1.0, True, "passed", 2),
        ("wrong", {"all": True}, 0.0, False, "wrong_output", 1),
        ("broken", {"language": "cpp"}, 0.0, False, "compile_error", 1),
    ],
)
def test_what_a_program_gets(program, keys, reward, correct, end, calls):
    stage = Stage({"box": 1.0}, answer=box, tree=config(**keys))
    verdict, none = (each.verdict for each in stage.play([sample(program), sample(response="I cannot.")]).outcomes)
    assert (none.score, none.basis, none.correct) == (keys.get("reward_range", [0])[0], "floor", False)
    assert (verdict.score, verdict.correct, len(stage.sent)) == (pytest.approx(reward), correct, calls)
    assert tuple(verdict.components) == ENDS
    assert max(verdict.components, key=verdict.components.__getitem__) == end
    assert sum(verdict.components.values()) == pytest.approx(1)
    assert (verdict.judge, verdict.source, verdict.basis) == ("code", "box", "judged")


def test_a_fault_of_the_sandbox_fails_the_sample_and_ends_its_other_tests():
    def behaviour(number, request, now):
        return TransientError("box: no") if request.parameters["stdin"] == "3 4\n" else 100.0

    stage = Stage({"box": behaviour}, answer=box, tree=config(engine={"deadline_s": 60}))
    (failed,) = stage.play([sample()]).outcomes
    assert (failed.cause, failed.judge, failed.detail[:8]) == ("infra", "code", "test 2: ")
    assert stage.simulated["box"].cancelled == 2
    (unread,) = Stage({"box": 1.0}, tree=config()).play([sample(tests="{")]).outcomes
    assert unread.label == "infra/input"


def test_a_recorded_test_is_not_run_again(tmp_path):
    batch = [sample("half"), sample("f", of_f([[1], [2]], [1, 2]))]

    def score(call):
        if not call.stdin:  # a call of a function
            return ran(ended="run_error")
        return box(SimpleNamespace(parameters=call.parameters)).text

    def play(*samples, **keys):
        with JudgeServer(score, port=0) as server:
            engine = {"journal": {"path": str(tmp_path / "j.sqlite")}}
            tree = config(f"{server.root_url}/run_code", source={"version": "1"}, engine=engine, **keys)
            with RewardEngine(tree).portal() as engine:
                verdicts = [outcome.verdict for outcome in engine.score_all(samples)]
        return [(verdict.score, verdict.rationale) for verdict in verdicts], server.report().requests

    said, calls = play(*batch)
    assert calls == 5
    assert said[0][1] == "test 2: wrong_output: '0\\n'"
    assert play(*batch) == (said, 0)
    # Another range needs no call; another time limit, or another output, does.
    assert play(batch[0], reward_range=[0, 3])[0][0][0] == pytest.approx(2)
    assert play(batch[0], run_timeout_s=5)[1] == 3
    assert play(sample("half", {**ADD, "outputs": ["3\n", "0", "11\n"]}))[1] == 1


@each_of(
    ("source", "keys", "said"),
    [
        ({"timeouts": {"total_s": 20}}, {}, "sources.box.timeouts.total_s: a program may take 20 s"),
        ({"kind": "http"}, {}, "judges.code"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(source, keys, said):
    with pytest.raises(ConfigurationError, match=said):
        RewardEngine(config(source=source, **keys))
