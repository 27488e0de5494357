"""`qreward diff`: two judges on the same samples, and figures that are those of the textbooks."""

from __future__ import annotations

import math
import re

import pytest

from qreward_plugins.journal.comparison import kappa, rank_correlation
from qreward_plugins.samples import Cause, Failed, Sample, Scored, Verdict

from ..kit import record
from .conftest import refusal

QUESTION = [{"role": "user", "content": "?"}]


def write(path, rewards, *, judge="quality", run_id="run", group=4, said="said", responses="!", keep="interesting"):
    """Record rewards (None: failed) of samples 0, 1, 2 ..., four to a group."""

    def outcomes():
        failed = Failed(Cause.INFRA, "deadline", judge=judge)
        for number, reward in enumerate(rewards):
            response = responses[number % len(responses)]
            sample = Sample(QUESTION, response, step=1, group_id=f"g{number // group}", id=f"s{number}")
            scored = reward is not None and Scored(Verdict(reward, judge=judge, source="a", rationale=said))
            yield sample, scored or failed

    record(path, outcomes(), run_id=run_id, keep=keep)
    return path


def rows_of(result):
    """The figures, by their names."""
    assert result.exit_code == 0, result.output
    lines = [re.split(r"  +", line.strip(), maxsplit=1) for line in result.stdout.splitlines()]
    return {line[0]: line[1].split() for line in lines if len(line) == 2}


def test_two_journals_on_the_same_samples(run_cli, tmp_path):
    first = [0.0, 0.2, 0.6, 1.0, 0.4, 0.4, 0.8, None, 0.1]
    second = [0.1, 0.6, 0.5, 1.0, 0.2, 0.8, 0.3, 0.9, 0.1]
    a, b = write(tmp_path / "a.sqlite", first), write(tmp_path / "b.sqlite", second, judge="strict", said="\x1b[2Jno")
    result = run_cli("diff", a, b, "--judge", "quality", "--other-judge", "strict")
    rows = rows_of(result)
    assert f"A: {a}, run run, judge quality: 9 samples, 1 without a reward" in result.stdout
    assert "8 samples with a reward in both" in result.stdout
    assert [rows[name][0] for name in ("mean of A", "mean of B", "mean of B - A")] == ["0.4375", "0.45", "0.0125"]
    # Of 8, 2 are good for both and 3 for neither; 3/8 and 4/8 are good: (5/8 - 1/2) / (1 - 1/2).
    assert rows["kappa at 0.5"][0] == "0.25"
    # 0.8 in the first group, and 0 in the second; the third has one sample.
    assert rows["rank correlation within 2 groups"][0] == "0.4"
    low, _, high = rows["mean of B - A"][1:]
    assert float(low) < 0.0125 < float(high)
    assert "3 change sides at 0.5 (37.5%): 1 fall below it, 2 rise to it" in result.stdout
    change, *_ = result.stdout.partition("largest changes")[2].splitlines()[2:]
    assert change.split() == ["0.8", "0.3", "s6", "said", "\\x1b[2Jno"]
    assert "\x1b" not in result.stdout


def test_two_judges_of_one_journal_and_the_latest_run(run_cli, tmp_path):
    path = tmp_path / "journal.sqlite"
    write(path, [1.0] * 4, run_id="old")
    write(path, [0.0, 0.5, 0.5, 1.0])
    write(path, [1.0, 0.5, 0.5, 0.0], judge="strict")
    rows = rows_of(run_cli("diff", path, path, "--judge", "quality", "--other-judge", "strict"))
    assert rows["rank correlation within 1 group"] == ["-1"]
    assert (rows["mean of A"], rows["kappa at 0.5"]) == (["0.5"], ["-0.3333"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a", "none"], "there is no journal at"),
        (["a", "a"], "A and B are both quality of"),
        (["a", "b", "--other-judge", "x"], "has no judge 'x'; name one with --judge or --other-judge: quality"),
        (["a", "later"], "no sample has a reward in both"),
        (["a", "."], "is a directory; name one journal in it"),
        (["a", "unlike"], "have other responses under the same ids; they are not the same samples"),
    ],
)
def test_what_cannot_be_compared(run_cli, tmp_path, arguments, said):
    write(tmp_path / "a", [0.5] * 4)
    write(tmp_path / "b", [0.5] * 4)
    write(tmp_path / "later", [None] * 4)
    write(tmp_path / "unlike", [0.5] * 4, responses="?")
    paths = [tmp_path / arguments[0], tmp_path / arguments[1]]
    assert said in refusal(run_cli("diff", *paths, *arguments[2:]))


def test_other_responses_under_the_same_id_are_counted(run_cli, tmp_path):
    a, b = write(tmp_path / "a", [0.5] * 4, responses="abcd"), write(tmp_path / "b", [0.6] * 4, responses="abxy")
    assert "2 of them are other responses under the same id" in run_cli("diff", a, b).stdout


def test_figures_are_those_of_the_textbooks():
    # scipy.stats.spearmanr of the same numbers.
    assert rank_correlation([(0.1, 5), (0.1, 7), (0.4, 7), (0.9, 9), (0.4, 1)]) == pytest.approx(0.43259045634870014)
    assert math.isnan(rank_correlation([(1, 1), (1, 2)]))
    assert math.isnan(kappa([(True, True)] * 3))
    # 30 of 50 agree, and 22 would by chance: one says yes to 10, the other to 30.
    assert kappa([(True, True)] * 10 + [(False, True)] * 20 + [(False, False)] * 20) == pytest.approx(8 / 28)
