"""The check `math` beside math-verify itself, on pairs that are drawn from a seed."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from fractions import Fraction

import pytest

from qreward_plugins import checks

math_verify = pytest.importorskip("math_verify")

PAIRS = 2_000


def number(rng: random.Random) -> str:
    return str(rng.randint(-50, 50))


def pair(rng: random.Random, kind: str) -> tuple[str, str, bool]:
    """A ground truth, an answer in another form, and whether they are equal."""
    a, b, c = rng.randint(1, 40), rng.randint(2, 12), rng.randint(2, 9)
    off = 0 if rng.random() < 0.5 else rng.choice([-1, 1])
    if kind == "integer":
        return str(a * 100), rng.choice([f"{a * 100 + off}", f"{a * 100 + off}.0", f"{a * 100 + off:,}"]), not off
    if kind == "fraction":
        shown = Fraction(a + off, b)
        return rf"\frac{{{a}}}{{{b}}}", rf"\frac{{{shown.numerator * c}}}{{{shown.denominator * c}}}", not off
    if kind == "decimal":
        return rf"\frac{{{a}}}{{8}}", f"{(a + off) / 8}", not off
    if kind == "root":
        return rf"\sqrt{{{b * b * c}}}", rf"{b + off}\sqrt{{{c}}}", not off
    if kind == "interval":
        return f"({-a}, {b}]", f"({-a}, {b + off}]", not off
    if kind == "set":
        return rf"\{{{a}, {a + b}\}}", rf"\{{{a + b}, {a + off}\}}", not off
    if kind == "equation":
        return f"y = {b}x + {a}", f"y = {a + off} + {b}x", not off
    if kind == "polynomial":
        return f"(x+{b})^2", f"x^2 + {2 * b}x + {b * b + off}", not off
    return number(rng), rng.choice(["", "unknown", "x", r"\infty", "1 or 2", r"\frac{1}{", "(1, 2)"]), False


KINDS = ("integer", "fraction", "decimal", "root", "interval", "set", "equation", "polynomial", "other")


def test_the_check_agrees_with_math_verify_on_2000_pairs() -> None:
    rng, agreed, meant = random.Random(35), Counter[str](), Counter[str]()
    for place in range(PAIRS):
        kind = KINDS[place % len(KINDS)]
        truth, answer, equal = pair(rng, kind)
        response = rng.choice([rf"So \boxed{{{answer}}}.", f"The answer is ${answer}$."])
        gold = math_verify.parse(f"${truth}$", parsing_timeout=None)
        theirs = math_verify.verify(gold, math_verify.parse(response, parsing_timeout=None), timeout_seconds=None)
        agreed[kind] += checks.math(response, truth) == float(theirs)
        meant[kind] += theirs == equal
    assert agreed.total() == PAIRS, agreed
    # The pairs are what they are meant to be, in almost all cases: both sides always saying no would agree, too.
    assert meant.total() > 0.97 * PAIRS, meant


def test_math_verify_is_imported_before_the_first_call() -> None:
    """A worker that took over from one that hung would import it in a call, and its sample would wait."""
    lines = [
        "import sys",
        "from qreward_plugins import checks",
        "assert 'math_verify' not in sys.modules",
        "checks.math",
        "assert 'math_verify' in sys.modules",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [
        (r"\boxed{9^9^9^9}", "1", 0),
        (r"\boxed{9^{9^{9^{9}}}}", "1", 0),
        (r"\boxed{ 9 ** 9 ** 9 }", "1", 0),
        (r"The last digit of $7^{7^{7^7}}$ is \boxed{3}", "3", 1),
        (r"The last digit of $7^{7^{7^7}}$ is $3$.", "3", 1),
        (r"Therefore $2^{1000000} \bmod 7 = 2$.", "2", 1),
        (r"\boxed{2 \cdot 3^{250000}}", r"2\cdot3^{250000}", 1),
        (r"\boxed{2^{2^3}}", "256", 1),
        (r"\boxed{2 ** 3 ** 2}", "2 ** 3 ** 2", 1),
        (r"\boxed{10^{100}}", "10^{100}", 1),
        (r"\boxed{5!}", "120", 1),
    ],
)
def test_a_tower_that_sympy_would_compute_for_ever_gets_a_0_at_once(answer: str, truth: str, score: int) -> None:
    assert checks.math(answer, truth) == score
