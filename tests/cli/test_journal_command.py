"""The commands that read a journal: `qreward journal`, `why`, `diff`, `sources` and `ui`."""

from __future__ import annotations

import math
import re
import shutil
import socket
import sqlite3
import urllib.request
from contextlib import closing
from functools import partial

import pytest

from qreward_plugins import RewardEngine, Sample
from qreward_plugins.journal.comparison import kappa, rank_correlation
from qreward_plugins.samples import SCREENED, Cause, Failed, Scored, Verdict
from qreward_plugins.samples.spent import Spent, Usage
from qreward_plugins.testing import Faults, JudgeServer

from ..kit import each_of, record, sql, wait_until, write_live
from .conftest import exited, reached, refusal


def sample(number, **fields):
    return Sample([], f"It is {number}.", **{"split": "train", "id": f"s{number}", **fields})


def scored(score, latency_s=1.0, service_s=0.5, **fields):
    spent = Spent(fields.pop("attempts", 1), Usage(700, 50), latency_s, 0.01)
    return Scored(Verdict(score, judge="quality", source="a", service_s=service_s, spent=spent, **fields))


FAILED = Failed(Cause.VERDICT, "invalid", judge="quality")
MASKED = Failed(*(Cause(SCREENED.split("/")[0]), SCREENED.split("/")[1]), judge="quality")
FLOOR = Scored(Verdict(0.0, judge="quality", basis="floor", failure=FAILED))


@pytest.fixture
def journal(tmp_path):
    """A journal of a validation and two steps: one with a failure, a floor and an answer that was used again."""
    path = tmp_path / "verdicts.sqlite"
    first = [(sample(number, step=0, split="val"), scored(1.0)) for number in range(2)]
    second = [(sample(2, step=1), scored(0.25)), (sample(3, step=1), scored(0.75, 9.0, attempts=3))]
    third = [(sample(number, step=2), each) for number, each in enumerate((FAILED, MASKED, FLOOR, scored(1.0)), 4)]
    again = [(sample(8, step=2), scored(1.0, 0.0, 0.0, attempts=0, cached=True))]
    record(path, [*first, *second, *third, *again])
    return path


def test_it_shows_the_steps_their_slowest_samples_and_the_sources(run_cli, journal):
    before = sorted(path.name for path in journal.parent.iterdir())
    result = exited(run_cli("journal", journal))
    lines = result.stdout.splitlines()
    assert lines[0] == f"{journal}: 9 outcomes, 1 of them failed, 1 got a floor"
    assert [line.split() for line in lines[3:7]] == [
        ["step", "judge", "n", "failed", "score", "slowest", "waited", "tries", "source", "sample"],
        ["0", "val", "quality", "2", "0", "1", "1.00s", "0.50s", "1", "a", "s0"],
        ["1", "quality", "2", "0", "0.5", "9.00s", "8.50s", "3", "a", "s3"],
        ["2", "quality", "5", "1", "0.6667", "1.00s", "0.50s", "1", "a", "s7"],
    ]
    assert lines[-4].split() == ["a", "6", "1", "2", "0.50s", "4500", "0.0600"]
    assert sorted(path.name for path in journal.parent.iterdir()) == before, "looking changes nothing"
    limited = run_cli("journal", journal, "--last", "2").stdout
    assert f"the whole story of a sample: qreward why {journal} --sample ID" in limited
    assert ("the last 2 of 3" in limited, "0 val" in limited) == (True, False)


def test_what_is_no_journal_is_one_message(run_cli, journal, tmp_path):
    other, text = (tmp_path / name for name in ("other.sqlite", "text.sqlite"))
    sql(other, "CREATE TABLE outcomes (id)")
    text.write_text("hello" * 400)
    empty = shutil.copy(journal, tmp_path / "empty.sqlite")
    sql(empty, "DELETE FROM outcomes")
    scored = shutil.copy(text, tmp_path / "scored.jsonl")
    shutil.copy(journal, tmp_path / "scored.jsonl.journal")
    for path, said in (
        (scored, f"is not a journal; that of `qreward score` is {scored}.journal"),
        (tmp_path / "none.sqlite", "there is no journal at"),
        (other, "is no journal of qreward"),
        (empty, "has no outcomes"),
    ):
        assert said in refusal(run_cli("journal", path)), path


def test_it_is_read_while_a_run_writes(run_cli, journal):
    with closing(sqlite3.connect(journal, isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("DELETE FROM outcomes WHERE step = 2")
        assert "9 outcomes" in run_cli("journal", journal).stdout
        writer.execute("ROLLBACK")


def test_names_do_not_command_the_terminal(run_cli, journal):
    sql(journal, "UPDATE outcomes SET split = ?, source = ?, judge = ?", "[/b]\x1b[2J", "\x1b]8;;x", "[/x]\x1b[1m")
    result = run_cli("journal", journal)
    assert (result.exit_code, "[/b]" in result.stdout) == (0, True)
    assert all(letter.isprintable() for letter in result.stdout.replace("\n", ""))


def test_runs_are_told_apart_and_steps_of_several_files_are_in_their_order(run_cli, tmp_path):
    def write(name, run, *steps, took_s=1.0):
        record(tmp_path / name, [(sample(step, step=step), scored(0.5, took_s)) for step in steps], run_id=run)

    write("a.sqlite", "first", 2, 1)
    write("b.sqlite", "first", 10, 1, took_s=9.0)
    write("b.sqlite", "second", 1)
    lines = run_cli("journal", tmp_path / "a.sqlite", tmp_path / "b.sqlite").stdout.splitlines()
    assert "5 outcomes of 2 runs, 0 of them failed" in lines[0]
    rows = [line.split() for line in lines if " quality " in line]
    assert [(row[0], row[1], row[3], row[6]) for row in rows] == [
        ("first", "1", "2", "9.00s"), ("first", "2", "1", "1.00s"), ("first", "10", "1", "9.00s"),
        ("second", "1", "1", "1.00s"),
    ]  # fmt: skip


# `qreward why`: the story of a sample in a terminal, and what it says of a sample that is not there


HOSTILE = "It is \x1b[2J[bold]four\u202e</script>\nsecond line"


@pytest.fixture
def judged(tmp_path, write_config):
    """A journal of two steps: a good answer, a hostile one that was judged at the second try, and one that failed."""
    path = tmp_path / "verdicts.sqlite"

    def score(call):
        response = call.blocks["response"]
        if "BAD" in response:
            return "I would rather not."
        return {"score": 0.25 if "four" in response else 1.0, "rationale": f"it says {response}"}

    question = [{"role": "user", "content": "What is 2 + 2?"}]
    with JudgeServer(score, faults=Faults(script={2: "error_500"}.get)) as server:
        config = write_config({"a": server}, engine={"journal": {"path": str(path), "reuse": False}, "seed": 1})
        with RewardEngine(config).portal() as engine:
            for step, number, text in ((1, 0, "4"), (2, 0, "4"), (2, 1, HOSTILE), (2, 2, "BAD")):
                engine.score(Sample(question, text, "4", "sums", "g", step, "train", id=f"s{number}"))
    return path


def lines(result):
    return exited(result).stdout.splitlines()


def test_a_sample_is_told_of_from_its_prompt_to_its_reward(run_cli, judged):
    told = lines(run_cli("why", judged, "--sample", "s1"))
    text = "\n".join(told)
    assert told[0].startswith("step 2 · train · sums · sample s1 · run ")
    assert "  quality: 0.25 1 failed  mean 0.625" in told
    assert text.count("  │ user: What is 2 + 2?") == 1
    assert "  │ 4" in told
    assert "quality: reward 0.25" in told
    assert "  a (judge); 2 attempts, " in text
    first, second = (line for line in told if line.startswith(("  1  a", "  2  a")))
    assert ("failed" in first, "valid" in second) == (True, True)
    assert "█" in second
    assert "sent (attempt 2)" in told
    assert "<<<response" in text
    assert "replied (attempt 2, valid)" in told
    assert "the judge's words" in told
    assert not any(character in text for character in "\x1b\u202e")
    assert "  │ It is \\x1b[2J[bold]four\\u202e</script>" in told
    assert "  │ second line" in told


def test_who_failed_and_who_was_worst(run_cli, judged):
    told = "\n".join(lines(run_cli("why", judged, "--failed")))
    assert "quality: no reward, verdict/invalid: " in told
    assert "replied (attempt 1, invalid)\n  │ I would rather not." in told
    assert "shown: " not in told
    told = "\n".join(lines(run_cli("why", judged, "--worst", "--most", "1")))
    assert "sample s1" in told
    assert "shown: 1 of 2 samples;" in told
    told = [line for line in lines(run_cli("why", judged, "--most", "9")) if line.startswith("step ")]
    assert [line.split(" · ")[3] for line in told] == ["sample s2", "sample s1", "sample s0", "sample s0"]


def test_a_row_of_the_journal_and_a_step(run_cli, judged):
    assert "sample s0" in lines(run_cli("why", judged, "--row", "2"))[0]
    assert lines(run_cli("why", judged, "--step", "1"))[0].startswith("step 1 ")


@each_of(
    ("arguments", "said"),
    [
        (["--sample", "nobody"], "matches --sample nobody; `qreward journal`"),
        (["--step", "7", "--failed"], "matches --step 7 --failed; `qreward journal`"),
        (["--row", "77"], "matches --row 77; `qreward journal`"),
    ],
)
def test_a_sample_that_is_not_there(run_cli, judged, arguments, said):
    assert said in refusal(run_cli("why", judged, *arguments))


# `qreward diff`: two judges on the same samples, and figures that are those of the textbooks


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


def test_two_judges_on_the_same_samples_of_the_latest_run(run_cli, tmp_path):
    first = [0.0, 0.2, 0.6, 1.0, 0.4, 0.4, 0.8, None, 0.1]
    second = [0.1, 0.6, 0.5, 1.0, 0.2, 0.8, 0.3, 0.9, 0.1]
    path = write(tmp_path / "journal.sqlite", [1.0] * 4, run_id="old")
    write(path, first)
    write(path, second, judge="strict", said="\x1b[2Jno")
    result = exited(run_cli("diff", path, path, "--judge", "quality", "--other-judge", "strict"))
    lines = [re.split(r"  +", line.strip(), maxsplit=1) for line in result.stdout.splitlines()]
    rows = {line[0]: line[1].split() for line in lines if len(line) == 2}
    assert f"A: {path}, run run, judge quality: 9 samples, 1 without a reward" in result.stdout
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


# `qreward sources`: the sources of a run that goes on, and what is said where there is none


@pytest.fixture
def live(tmp_path):
    """A journal that two processes of a run write to, over one source."""
    path = tmp_path / "verdicts.sqlite"
    record(path, [])
    write_live(path, "job", 1, "fast", waiting=0)
    write_live(path, "job", 2, "fast", waiting=0, state="down", problem="fast is down\x1b[2J (refused)")
    return path


def test_processes_are_added_up_and_the_worst_state_is_shown(run_cli, live):
    shown = run_cli("sources", live)
    lines = shown.stdout.splitlines()
    assert shown.exit_code == 0
    assert lines[1].split() == ["job", "fast", "down", "2", "0", "6", "16", "-", "6", "18", "1.50s", "-"]
    assert lines[2] == "  fast: fast is down\\x1b[2J (refused)"


def test_a_source_is_held_and_released(run_cli, live):
    assert "down, to be held" in run_cli("sources", live, "--hold", "fast").stdout
    assert sql(live, "SELECT * FROM holds") == [("job", "fast")]
    assert "held" not in run_cli("sources", live, "--release", "fast").stdout
    assert "no source 'slow'; sources: fast" in refusal(run_cli("sources", live, "--hold", "slow", "--hold", "fast"))


def test_without_a_run_there_is_nothing_to_hold(run_cli, tmp_path):
    path = tmp_path / "verdicts.sqlite"
    record(path, [])
    assert "no run is under way that writes to" in run_cli("sources", path).stdout
    assert "there is nothing to hold" in refusal(run_cli("sources", path, "--hold", "fast"))


def test_what_the_program_holds_only_the_program_releases(run_cli, live):
    sql(live, "UPDATE live SET state = json_set(state, '$.by_program', json('true')) WHERE engine = 1")
    assert "the program itself holds 'fast'" in refusal(run_cli("sources", live, "--release", "fast"))


# `qreward ui`: it starts, says where, and says what is wrong


@pytest.fixture
def empty(tmp_path):
    record(tmp_path / "journal.sqlite", [])
    return tmp_path / "journal.sqlite"


def test_it_says_where_the_page_is_and_ends_with_a_signal(stop_cli, empty, port):
    def look():
        wait_until(lambda: reached(port))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/") as answer:
            assert b"No entries yet" in answer.read()

    result = stop_cli(look, "ui", empty, "--port", port)
    assert (result.exit_code, f"0 entries at http://127.0.0.1:{port}/" in result.stdout) == (130, True)


def test_a_report_is_one_file_that_loads_nothing(run_cli, tmp_path):
    evil = "</style><script>alert(1)</script>\x1b"
    samples = [Sample([], "r", step=number // 2, id=f"s{number}", data_source=evil) for number in range(6)]
    verdicts = [Verdict(number / 10, judge=evil, source=evil, rationale=evil) for number in range(6)]
    record(tmp_path / "journal.sqlite", zip(samples, map(Scored, verdicts), strict=True), run_id=evil)
    out = tmp_path / "report.html"
    report = partial(run_cli, "ui", tmp_path / "journal.sqlite", "--report")
    exited(report(out))
    text = out.read_text()
    assert '<td>2</td><td class="num">2</td><td class="num">0.45</td>' in text
    assert "default-src 'none'; style-src 'unsafe-inline'" in text
    assert text.count("<svg") == 4
    assert "<script" not in text
    assert "\x1b" not in text
    assert not re.search(r"(src|href)=[\"'](?!#)", text)
    assert "must end in .html" in refusal(report(tmp_path / "journal.sqlite", "--overwrite"))
    assert "exists; name another file" in refusal(report(out))
    assert report(out, "--overwrite").exit_code == 0


def test_what_cannot_be_opened(run_cli, empty, tmp_path):
    assert "there is no journal at" in refusal(run_cli("ui", tmp_path / "none.sqlite"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        told = refusal(run_cli("ui", empty, "--port", taken.getsockname()[1]))
    assert "choose another one with --port" in told
