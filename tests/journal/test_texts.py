"""Whose texts the journal keeps, and what a story tells of a sample."""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
import threading
import zlib
from contextlib import closing

import pytest

from qreward_plugins import RewardEngine, Sample
from qreward_plugins.errors import JournalError
from qreward_plugins.journal import Journal, Trained, TrainingLog, writer
from qreward_plugins.journal.stories import NOT_KEPT, Stories, Wanted, judge_of
from qreward_plugins.journal.texts import BEST, MOST_CHARS, RANDOM, WORST
from qreward_plugins.samples import Cause, Failed, Scored, Verdict
from qreward_plugins.samples.spent import NO_USAGE
from qreward_plugins.scheduling.history import PastAttempt
from qreward_plugins.sources.base import Reply, Request
from qreward_plugins.testing import Faults, JudgeServer

from ..kit import make_config

pytestmark = pytest.mark.anyio

QUESTION = [{"role": "user", "content": "What is 2 + 2?"}]
FAILED = Failed(Cause.INFRA, "deadline", "took too long", judge="quality")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal.sqlite"


def written(path, outcomes, *, response="It is {number}.", close=True, **options):
    """Record outcomes of one step, the n-th with the id n."""

    async def main():
        book = Journal(path, **options)
        for number, outcome in enumerate(outcomes):
            text = response.format(number=number)
            sample = Sample(QUESTION, text, "4", step=1, group_id="g", id=str(number))
            await book.put(None, sample, outcome)
        await book.aclose()

    asyncio.run(main())


def kept(path):
    """The ids of the samples whose texts are there."""
    with closing(sqlite3.connect(path)) as connection:
        return {int(name) for (name,) in connection.execute("SELECT sample_id FROM outcomes WHERE response NOT NULL")}


def story_of(path, **wanted):
    with Stories([str(path)]) as stories:
        (story,), count = stories.find(Wanted(**wanted), 1)
    assert count == 1
    return story


def scored(score):
    return Scored(Verdict(score, judge="quality"))


def test_interesting_are_failures_floors_the_best_the_worst_and_some_at_random(path):
    scores = random.Random(5).sample(range(1000), 1000)
    floor = Scored(Verdict(0.0, judge="quality", basis="floor", failure=FAILED))
    written(path, [*(scored(float(score)) for score in scores), FAILED, floor])
    by_score = sorted(range(1000), key=scores.__getitem__)
    there = kept(path)
    assert there >= {1000, 1001, *by_score[:WORST], *by_score[-BEST:]}
    drawn = len(there) - WORST - BEST
    assert RANDOM < drawn < 300
    assert any(number > 500 for number in there - set(by_score[:50]) - set(by_score[-50:])), "drawn from all"


def test_equal_scores_are_drawn_only(path):
    written(path, [scored(1.0)] * 2000)
    assert RANDOM <= len(kept(path)) < 250


@pytest.mark.parametrize(("keep", "expected"), [("all", {0, 1, 2}), ("none", set())])
def test_all_or_none(path, keep, expected):
    written(path, [scored(1.0), scored(0.5), FAILED], keep=keep)
    assert kept(path) == expected
    assert story_of(path, sample="2").entries[0].response == ("It is 2." if expected else None)


def test_a_text_is_there_once_and_a_long_one_loses_its_middle(path):
    long = "x" * MOST_CHARS + "the middle" + "y" * MOST_CHARS
    written(path, [FAILED] * 20, response=long)
    entry = story_of(path, sample="19").entries[0]
    assert (json.loads(entry.prompt), entry.ground_truth) == (QUESTION, "4")
    assert len(entry.response) < MOST_CHARS + 100
    assert "[... 200,010 characters are left out ...]" in entry.response
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM texts").fetchone() == (3,)
    assert path.stat().st_size < 200_000, "compressed"


async def test_the_oldest_texts_of_a_large_file_are_deleted_and_no_row(path):
    rng = random.Random(3)
    texts = ["".join(rng.choices("abcdefghij klmnop", k=20_000)) for _ in range(400)]

    book = Journal(path, keep="all", texts_mb=1.0)
    for number, text in enumerate(texts):
        await book.put(None, Sample(QUESTION, text, step=1, id=str(number)), scored(1.0))
        await book.flush()
    await book.aclose()
    assert path.stat().st_size < 1.2e6
    assert story_of(path, sample="399").entries[0].response == texts[-1]
    assert story_of(path, sample="0").entries[0].response == NOT_KEPT
    assert len(kept(path)) == 400


def test_a_disk_that_is_full_loses_texts_before_numbers(path, monkeypatch):
    monkeypatch.setattr(writer, "CLOSE_WITHIN_S", 0.0)
    insert = writer.Writer._write_texts
    seen = []

    def full(self, texts):
        seen.append(len(texts))
        insert(self, texts)
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(writer.Writer, "_write_texts", full)
    written(path, [scored(number / 10) for number in range(10)], keep="all")
    assert seen
    story = story_of(path, sample="9")
    assert (story.entries[0].reward, story.entries[0].response) == (0.9, NOT_KEPT)


def test_a_story_is_what_the_server_saw_and_said(path):
    seen, said = {}, {}

    def score(call):
        response = call.blocks["response"]
        seen[call.nonce] = list(call.messages)
        said[call.nonce] = {"score": len(response) / 10, "rationale": f"about {response}"}
        return said[call.nonce]

    faults = Faults(script=lambda number: {1: "error_500", 3: "wrong_nonce"}.get(number))
    with JudgeServer(score, faults=faults) as server:
        tree = make_config({"a": server}, judge={"score_range": [0, 10]}, engine={"journal": {"path": str(path)}})
        tree["judges"]["total"] = {"kind": "sum", "weights": {"quality": 2.0}}
        tree["routes"] = {"*": "total"}

        async def main():
            async with RewardEngine(tree) as engine:
                samples = [Sample(QUESTION, "x" * (n + 1), "4", step=1, group_id="g", id=str(n)) for n in range(5)]
                return [await engine.score(sample) for sample in samples]

        outcomes = asyncio.run(main())
    results = []
    for number, outcome in enumerate(outcomes):
        story = story_of(path, sample=str(number))
        part, total = story.entries
        assert (part.judge, total.judge, total.reward) == ("quality", "total", outcome.reward)
        assert {entry.sample_id for entry in story.siblings} == {"0", "1", "2", "3", "4"}
        results.append([attempt["result"] for attempt in story.attempts[0]])
        for attempt in story.attempts[0]:
            assert 0 <= attempt["started_s"] <= attempt["sent_s"] <= attempt["ended_s"] <= part.latency_s + 0.001
        last = story.attempts[0][-1]
        sent, reply = json.loads(last["request"]), json.loads(last["reply"])
        assert sent["messages"] == seen[reply["id"]]
        assert (reply["score"], part.raw_score) == (said[reply["id"]]["score"],) * 2
        assert (part.rationale, sent["temperature"]) == (f"about {'x' * (number + 1)}", 0.0)
    assert results == [["valid"], ["failed", "valid"], ["invalid", "valid"], ["valid"], ["valid"]]
    refused = story_of(path, sample="2").attempts[0][0]
    assert "id" in refused["problem"]
    assert json.loads(refused["reply"])["id"] not in refused["request"]


@pytest.mark.parametrize(
    "response", ["\0response\0 and \0nonce\0", 'say "four"\n\\u0000nonce\\u0000', "4" * 64, "\ud800 four", "2 + 2"]
)
def test_what_was_sent_is_told_exactly_whatever_the_response_is(path, response):
    sent = []

    def score(call):
        sent.append(list(call.messages))
        return 1.0

    with JudgeServer(score) as server:
        tree = make_config({"a": server}, engine={"journal": {"path": str(path), "keep": "all"}})

        async def main():
            async with RewardEngine(tree) as engine:
                await engine.score(Sample(QUESTION, response, id="s"))

        asyncio.run(main())
    (attempt,) = story_of(path).attempts[0]
    assert json.loads(attempt["request"])["messages"] == sent[0]


def test_the_turns_of_a_response_are_numbered_and_told_with_what_was_sent_for_each(path):
    sent = []

    def score(call):
        sent.append(list(call.messages))
        return 1.0

    said = [("assistant", "one " * 20), ("tool", "18"), ("assistant", "two " * 20)]
    response = "\n\n".join(f"{role}: {text}" for role, text in said)
    turns = [{"role": role, "content": text, "end": response.index(text) + len(text)} for role, text in said]
    with JudgeServer(score) as server:
        tree = make_config({"a": server}, engine={"journal": {"path": str(path), "keep": "all"}})
        tree["judges"]["whole"] = {"kind": "turns", "judge": "quality"}
        tree["routes"] = {"*": "whole"}

        async def main():
            async with RewardEngine(tree) as engine:
                await engine.score(Sample(QUESTION, response, id="s", turns=turns))

        asyncio.run(main())
    story = story_of(path)
    told = {judge_of(*each): each[1] for each in zip(story.entries, story.attempts, strict=True)}
    assert told.keys() == {"quality, turn 1", "quality, turn 2", "whole"}
    for name, text in (("quality, turn 1", "one " * 20), ("quality, turn 2", "two " * 20)):
        messages = json.loads(told[name][0]["request"])["messages"]
        assert messages in sent
        assert f">>>\n{text}\n<<<" in messages[-1]["content"]


def test_an_answer_of_the_journal_tells_how_it_was_given_at_first(path):
    with JudgeServer(lambda call: 1.0) as server:
        tree = make_config({"a": server}, engine={"journal": {"path": str(path), "keep": "all"}})

        async def main():
            async with RewardEngine(tree) as engine:
                for step in (1, 2):
                    await engine.score(Sample(QUESTION, "4", step=step, id="s"))

        asyncio.run(main())
    story = story_of(path, step=2)
    assert story.entries[0].cached
    assert [attempt["result"] for attempt in story.attempts[0]] == ["valid"]
    assert "What is 2 + 2?" in story.attempts[0][0]["request"]


async def test_a_sample_that_cannot_be_read_costs_its_texts_only(path):
    class Broken:
        def __iter__(self):
            raise RuntimeError

    book = Journal(path, keep="all")
    await book.put(None, Sample(Broken(), "a\ud800b", {1: object()}, id="0"), scored(1.0))
    await book.aclose()
    entry = story_of(path).entries[0]
    assert (entry.prompt, entry.response, entry.ground_truth) == (None, "a?b", '{"1":"[object]"}')


def test_journals_of_several_processes_are_one(tmp_path):
    for name, score in (("a", 0.5), ("b", 0.25)):
        (tmp_path / "runs").mkdir(exist_ok=True)
        written(tmp_path / "runs" / f"{name}.sqlite", [scored(score)] * 3, run_id="r")
    (tmp_path / "runs" / "notes.txt").write_text("no journal")
    with Stories([str(tmp_path / "runs")]) as stories:
        (story,), count = stories.find(Wanted(worst=True), 1)
    assert count == 3
    assert story.entries[0].reward == 0.5
    assert len(story.entries) == 2
    assert len(story.siblings) == 6


def test_where_no_journal_is(tmp_path):
    for place in (tmp_path, tmp_path / "none.sqlite"):
        with pytest.raises(JournalError, match="there is no journal"):
            Stories([str(place)])


def attempt(sample, content, *, reply="1", nonce="n0nce", result="valid", clean=None):
    request = Request(sample, ({"role": "user", "content": content},), {}, nonce)
    return PastAttempt("a", 0.0, 0.1, 1.0, result, False, "", NO_USAGE, 0.0, request, Reply(reply, clean=clean))


def put(path, *entries, **options):
    """Record (key, sample, outcome, attempts)."""

    async def main():
        book = Journal(path, **options)
        for key, sample, outcome, attempts in entries:
            given = await book.get(key) if outcome is None else None
            await book.put(key, sample, outcome or Scored(given), attempts)
            await book.flush()
        await book.aclose()

    asyncio.run(main())


def of(number, response="THE RESPONSE " * 10, **fields):
    return Sample(QUESTION, response, **{"step": 1, "id": str(number), **fields})


def test_a_used_answer_is_told_with_the_response_that_was_judged(path):
    sent = attempt(of(0), f"<n0nce>{of(0).response}</n0nce>")
    others = [(None, of(n + 10, f"r{n}", step=2), scored(0.5), ()) for n in range(500)]
    put(path, ("k", of(0), scored(0.5), [sent]), *others, ("k", of(1, step=2), None, ()), rng=random.Random(1))
    story = story_of(path, sample="1")
    assert story.entries[0].cached
    assert f"<n0nce>{of(0).response}</n0nce>" in story.attempts[0][0]["request"]


def test_a_used_answer_is_not_told_with_a_failed_attempt_at_the_same_question(path):
    good, bad = attempt(of(0), "?", reply="GOOD"), attempt(of(1), "?", reply="bad", result="invalid")
    put(path, ("k", of(0), scored(0.9), [good]), ("k", of(1), FAILED, [bad]), ("k", of(2), None, ()), keep="all")
    assert [each["reply"] for each in story_of(path, sample="2").attempts[0]] == ["GOOD"]


def test_a_shared_prompt_is_written_again_after_the_oldest_texts_are_deleted(path):
    rng = random.Random(3)
    samples = [of(n, "".join(rng.choices("abcdefghij klmnop", k=20_000))) for n in range(200)]
    put(path, *[(None, sample, FAILED, ()) for sample in samples], texts_mb=1.0)
    assert json.loads(story_of(path, sample="199").entries[0].prompt) == QUESTION


def test_a_short_response_leaves_what_was_sent_as_it_is(path):
    content = "the quick brown fox met the eager eel. " * 1500
    put(path, ("k", of(0, "e"), scored(0.5), [attempt(of(0, "e"), content)]))
    assert json.loads(story_of(path).attempts[0][0]["request"])["messages"][0]["content"] == content


def test_a_sample_has_its_texts_if_one_of_its_judges_keeps_them(path):
    part = Scored(Verdict(0.5, judge="other"))
    put(path, ("k", of(0), part, ()), ("l", of(0), FAILED, ()), keep="interesting", rng=AlwaysOne())
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE outcomes SET prompt = NULL, response = NULL WHERE judge = 'other'")
    assert story_of(path).sample.response == of(0).response


class AlwaysOne(random.Random):
    def random(self):
        return 1.0


def test_a_sample_with_an_invalid_reply_is_interesting(path):
    bad = attempt(of(2), "?", reply="bad", result="invalid")
    samples = [(None, of(number), scored(float(number % 2)), [bad] if number == 40 else ()) for number in range(60)]
    put(path, *samples, rng=AlwaysOne())
    assert 40 in kept(path)
    assert 42 not in kept(path)


async def test_a_file_that_is_locked_loses_no_texts_whatever_its_folder_is_called(tmp_path, monkeypatch):
    monkeypatch.setattr("qreward_plugins.journal.database.BUSY_TIMEOUT_S", 0.01)
    (tmp_path / "full-run").mkdir()
    path = tmp_path / "full-run" / "journal.sqlite"

    book = Journal(path, keep="all")
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        await book.put(None, of(0), scored(1.0))
        with pytest.raises(JournalError):
            await book.flush()
        connection.execute("ROLLBACK")
    await book.aclose()
    assert story_of(path).entries[0].response == of(0).response


def trained(number, advantage, step=1):
    return Trained(str(number), "g", step, 0.5, advantage, False)


def test_a_validation_gets_no_advantages_of_the_training(path):
    put(path, *[(None, of(0, split=split), scored(0.5), ()) for split in ("train", "val")])
    log = TrainingLog(str(path))
    log._run_id = sqlite3.connect(path).execute("SELECT run_id FROM outcomes").fetchone()[0]
    log.add([trained(0, 1.5)])
    log.flush()
    assert [story_of(path, row=row).trained.keys() for row in (1, 2)] == [{"0"}, set()]


def test_a_locked_journal_is_waited_for_once_for_all_steps(path, monkeypatch, caplog):
    put(path)
    opened = []

    def opening(path):
        opened.append(path)
        assert go.wait(10)
        raise JournalError("it is locked")

    go = threading.Event()
    monkeypatch.setattr("qreward_plugins.journal.training.open_database", opening)
    log = TrainingLog(str(path), run_id="r")
    for step in range(50):
        log.add([trained(0, 1.0, step)])
    go.set()
    log.flush()
    assert len(opened) <= 2
    assert [record.getMessage() for record in caplog.records] == ["advantages are not recorded: it is locked"]
    log.add([trained(0, 1.0, 2**70)])
    log.flush()


def test_what_a_pattern_matches_is_nowhere_in_the_file_and_the_judge_sees_it(path):
    mail = "ann@example.org"
    question = [{"role": "user", "content": f'Write to "{mail}".'}]
    seen = []

    def score(call):
        seen.append(call.blocks["response"])
        return {"score": 0.5, "rationale": f"polite to {mail}"}

    def fault(number):
        return {0: "error_500", 2: "prose"}.get(number)

    with JudgeServer(score, faults=Faults(script=fault)) as server:
        # The second pattern takes all that follows, were it not for the end of the text.
        journal = {"path": str(path), "keep": "all", "redact": [r"\S+@example\.org\S*", "(?s)Dear .*"]}
        tree = make_config({"a": server}, judge={"score_range": [0, 1]}, engine={"journal": journal})

        async def main():
            async with RewardEngine(tree) as engine:
                for number, response in enumerate([f"Mail {mail} for the first time.", f"{mail}: Dear Ann", "No."]):
                    await engine.score(Sample(question, response, {"to": mail}, step=1, id=str(number)))
            book = Journal(path, redact=journal["redact"])
            broken = Failed(Cause.INFRA, "deadline", f"asked for {mail}", judge="quality")
            await book.put(None, Sample(question, mail, step=1, id="3"), broken)
            await book.aclose()

        asyncio.run(main())
    assert seen[0] == f"Mail {mail} for the first time."
    with closing(sqlite3.connect(path)) as connection:
        texts = [zlib.decompress(body).decode() for (body,) in connection.execute("SELECT body FROM texts")]
        rows = [str(row) for row in connection.execute("SELECT * FROM outcomes")]
    assert not [text for text in (*texts, *rows) if "example.org" in text or "Dear" in text]
    story = story_of(path, sample="1")
    (entry,) = story.entries
    assert (json.loads(entry.prompt)[0]["content"], entry.response) == ("Write to [redacted]", "[redacted] [redacted]")
    assert json.loads(entry.ground_truth) == {"to": "[redacted]"}
    assert entry.rationale == "polite to [redacted]"
    sent = json.loads(story.attempts[0][-1]["request"])
    assert "[redacted] [redacted]" in sent["messages"][-1]["content"]
    assert story_of(path, sample="3").entries[0].detail == "asked for [redacted]"


def test_a_pattern_matches_characters_that_are_written_by_their_codes(path):
    texts = ['{"to": "\\u0061nn@example.org", "cc": "ann@example.org, eve"}', '{"to": "\\u0062ob"}']
    outcomes = [Scored(Verdict(1.0, judge="quality", rationale=text)) for text in texts]
    written(path, outcomes, redact=["eve", r"ann@[a-z.]+"])
    said = [story_of(path, sample=number).entries[0].rationale for number in "01"]
    assert said == ['{"to": "[redacted]", "cc": "[redacted], [redacted]"}', texts[1]]


@pytest.mark.parametrize("said", [None, 5, ValueError("ann@example.org")])
def test_what_is_no_text_is_redacted_and_costs_no_sample(path, said):
    failed = Failed(Cause.INFRA, "error", said, judge="quality")
    written(path, [failed, Scored(Verdict(1.0, judge="quality", rationale=said))], redact=["ann@[a-z.]+"])
    expected = {None: "", 5: "5"}.get(said, "[redacted]")
    assert story_of(path, sample="0").entries[0].detail == expected
    assert story_of(path, sample="1").entries[0].rationale == expected
