"""The ready-made checks: what they find in a response, and what they make of it."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from qreward_plugins import checks
from qreward_plugins.engine import RewardEngine
from qreward_plugins.errors import ConfigurationError
from qreward_plugins.samples import Failed, Sample

from ..kit import each_of


@each_of(
    ("extract", "response", "answer"),
    [
        ("all", "<think>5?</think>4", "4"),
        ("boxed", r"\boxed{3} so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("boxed", r"\boxed{\{1\}}", r"\{1\}"),
        ("boxed", r"\boxed{1} and \boxed{2", "1"),
        ("tag", "<answer>3</answer> <ANSWER> 4 </ANSWER>", "4"),
        ("marked", "1 + 1\n#### 2\n", "2"),
        ({"regex": r"answer is (\w+)"}, "The answer is 3. No, the answer is 4.", "4"),
    ],
)
def test_the_answer_in_a_response(extract: Any, response: str, answer: str) -> None:
    assert checks.extracted(response, extract) == answer


@each_of(
    ("response", "truth", "keys", "score"),
    [
        ("It is  4.", "It is 4.", {}, 1), ("it is 4.", "It is 4.", {}, 0), ("a", "A", {"ignore_case": True}, 1),
        ("a  b", "a b", {"ignore_space": False}, 0), ("x", ["y", "x"], {}, 1), ("4", 4, {}, 1), ("", "x", {}, 0),
    ],
)  # fmt: skip
def test_exact(response: str, truth: Any, keys: Any, score: Any) -> None:
    assert checks.exact(response, truth, **keys) == score


@each_of(
    ("check", "truth", "said"),
    [
        *((checks.exact, truth, "no ground truth") for truth in (None, "", " ", [], ["4", ""])),
        *((checks.number, truth, "is no number") for truth in ("four", "4 or 5", ["4", "x"])),
        (checks.choice, "E", "'e' is none of the choices A, B, C, D"),
    ],
)
def test_a_ground_truth_that_is_none_is_a_mistake_of_the_data(check: Any, truth: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check("4", truth)


@each_of(
    ("answer", "score"), [("B", 1), ("(b)", 1), ("**B.**", 1), ("$B$", 1), ("A", 0), ("B or C", 0), ("", 0), ("AB", 0)]
)
def test_choice(answer: str, score: int) -> None:
    assert checks.choice(f"<answer>{answer}</answer>", "(B)", data_source="x") == score
    assert checks.choice("yes", "Yes", choices=["yes", "no"], extract="all") == 1


@each_of(
    ("answer", "truth", "keys", "score"),
    [
        ("4", "4", {}, 1), ("4.0", 4, {}, 1), ("+4", "4", {}, 1), ("-4", "4", {}, 0), ("1,234", "1234", {}, 1),
        ("$1,234.50", 1234.5, {}, 1), (r"\$5", 5, {}, 1), ("3/4", "0.75", {}, 1), (r"\frac{3}{4}", 0.75, {}, 1),
        ("50%", "0.5", {}, 1), ("50\\%", "50%", {}, 1), ("x = 4", "4", {}, 1), ("4 apples", "4", {}, 1),
        ("4 or 5", "4", {}, 0), ("four", "4", {}, 0), ("", "4", {}, 0), ("1/0", "4", {}, 0), (".5", "0.5", {}, 1),
        ("3.14", "3.14159", {}, 0), ("3.14", "3.14159", {"tolerance": 0.01}, 1), ("102", 100, {"relative": 0.02}, 1),
        ("0.3", 0.3, {}, 1), ("1e3", 1000, {}, 1), ("9" * 500, "4", {}, 0), ("1e9999", "4", {}, 0),
        ("4", ["3", "4"], {}, 1), ("\u22124", "-4", {}, 1),
    ],
)  # fmt: skip
def test_number(answer: str, truth: Any, keys: Any, score: int) -> None:
    assert checks.number(rf"So it is \boxed{{{answer}}}.", truth, **keys) == score


@each_of(
    ("pattern", "truth", "keys", "response", "score"),
    [
        (r"\d+", "4", {}, "It is 4.", 1),
        (r"\d+", "4", {"whole": True}, "It is 4.", 0),
        (r"is {ground_truth}\.", ["4*", "5"], {}, "It is 4*.", 1),
    ],
)
def test_regex(pattern: str, truth: Any, keys: Any, response: str, score: int) -> None:
    assert checks.regex(response, truth, pattern=pattern, **keys) == score


@each_of(
    ("response", "score"),
    [
        ('{"a": 1}', 1),
        ('```json\n{"a": 1}\n```', 1),
        ('{"a": "x"}', 0),
        ("[" * 100_000, 0),
    ],
)
def test_json_schema(response: str, score: int) -> None:
    pytest.importorskip("jsonschema")
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
    assert checks.json_schema(response, schema=schema) == score


@each_of(
    ("response", "score"),
    [
        ("<think>a</think>\n<answer>b</answer>", 1),
        ("<think>a</think> so <answer>b</answer>", 0),
        ("<think>a</think><answer>b</answer>!", 0),
    ],
)
def test_tags(response: str, score: int) -> None:
    assert checks.tags(response) == score


def test_length_and_repetition() -> None:
    assert [checks.length("x" * count, most=100, soft=20) for count in (0, 80, 85, 90, 100, 500)] == [
        0.0, 0.0, -0.25, -0.5, -1.0, -1.0
    ]  # fmt: skip
    assert [checks.length("a b c", most=3, unit="words"), checks.length("a b c d", most=3, unit="words")] == [0.0, -1.0]
    assert [checks.repetition(text, words=2) for text in ("a b c", "a", "", "a b a b a b")] == [0, 0, 0, 2 / 5 - 1]
    for keys in ({"most": 1, "soft": 2}, {"most": 1, "unit": "tokens"}):
        with pytest.raises(ValueError, match="must be"):
            checks.length("x", **keys)


def engine(name: str, **kwargs: Any) -> RewardEngine:
    source = {"kind": "function", "function": f"qreward_plugins.checks:{name}", "kwargs": kwargs, "workers": 1}
    judge = {"kind": "function", "reward_range": [-1, 1], "correct_at": 1}
    return RewardEngine({"sources": {"check": source}, "judges": {"check": judge}})


def test_they_are_functions_of_a_source() -> None:
    sample = Sample([{"role": "user", "content": "?"}], r"\boxed{4.2}", "4", "math", extras={"any": "column"})
    with engine("number", tolerance=0.5).portal() as ask:
        assert ask.score(sample).reward == 1.0
        failed = ask.score(Sample(sample.messages, "4"))
    assert isinstance(failed, Failed)
    assert "no ground truth" in failed.detail


@each_of(
    ("response", "truth", "score"),
    [
        (r"\boxed{\frac{1}{2}}", "0.5", 1),
        (r"It is $x^2 + 2x + 1$.", "(x+1)^2", 1),
        (r"<think>\boxed{4}</think>\boxed{5}", "4", 0),
        # A tower that sympy would compute for ever.
        (r"\boxed{9^9^9^9}", "1", 0),
        (r"The last digit of $7^{7^{7^7}}$ is \boxed{3}", "3", 1),
    ],
)
def test_math(response: str, truth: str, score: int) -> None:
    pytest.importorskip("math_verify")
    assert checks.math(response, truth) == checks.math(response, ["17", truth]) == score
    with pytest.raises(ValueError, match="no ground truth"):
        checks.math(response, None)


@each_of(("check", "package"), [("math", "math-verify"), ("json_schema", "jsonschema")])
def test_without_its_package_the_engine_does_not_start(
    monkeypatch: pytest.MonkeyPatch, check: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package.replace("-", "_"), None)
    with pytest.raises(ConfigurationError, match=rf"{package}.*qreward-plugins\[math\]"):
        engine(check)
