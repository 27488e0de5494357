"""Whose texts the journal keeps, and what a story tells of a sample: what the judge server got and said."""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
import zlib
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest

from qreward_plugins import RewardEngine, Sample
from qreward_plugins.errors import JournalError
from qreward_plugins.journal import Journal, Trained, TrainingLog, writer
from qreward_plugins.journal.database import open_database
from qreward_plugins.journal.history import PastAttempt
from qreward_plugins.journal.stories import NOT_KEPT, Stories, Wanted, judge_of
from qreward_plugins.journal.texts import EXTREME, MOST_CHARS, RANDOM
from qreward_plugins.samples import Cause, Failed, Scored, Verdict
from qreward_plugins.samples.images import EncodedImage, Image
from qreward_plugins.samples.spent import NO_USAGE
from qreward_plugins.sources.base import Reply, Request
from qreward_plugins.testing import Faults, JudgeServer
from qreward_plugins.testing.judge_handler import JudgeHandler

from ..kit import make_config, record, sql

pytestmark = pytest.mark.anyio

QUESTION = [{"role": "user", "content": "What is 2 + 2?"}]
FAILED = Failed(Cause.INFRA, "deadline", "took too long", judge="quality")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal.sqlite"


def written(path, outcomes, *, response="It is {number}.", **options):
    """Record outcomes of one step, the n-th with the id n."""
    samples = [of(number, response.format(number=number), group_id="g") for number in range(len(outcomes))]
    record(path, zip(samples, outcomes, strict=True), **options)


def of(number, response="THE RESPONSE " * 10, **fields):
    return Sample(QUESTION, response, **{"ground_truth": "4", "step": 1, "id": str(number), **fields})


def attempt(sample, content, *, reply="1", nonce="n0nce", result="valid", sent_s=0.1):
    request = Request(sample, ({"role": "user", "content": content},), {}, nonce)
    return PastAttempt("a", 0.0, sent_s, 1.0, result, False, "", NO_USAGE, 0.0, request, Reply(reply))


def scored_all(path, tree, samples, **journal):
    """Score samples with a journal, one after the other."""
    tree["engine"] = {"seed": 1, "journal": {"path": str(path), **journal}}
    with RewardEngine(tree).portal() as engine:
        return [engine.score(sample) for sample in samples]


def played(path, samples, score, *, faults=None, judge=None, whole=None, **journal):
    """Score samples over a judge server. `whole`: the judge around that of `make_config`."""
    with JudgeServer(score, faults=Faults(script=(faults or {}).get)) as server:
        tree = make_config({"a": server}, judge=judge)
        if whole:
            tree["judges"]["whole"] = whole
            tree["routes"] = {"*": "whole"}
        return scored_all(path, tree, samples, **journal)


def kept(path):
    """The ids of the samples whose texts are there."""
    return {int(name) for (name,) in sql(path, "SELECT sample_id FROM outcomes WHERE response NOT NULL")}


def texts_in(path):
    return [zlib.decompress(body).decode() for (body,) in sql(path, "SELECT body FROM texts")]


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
    assert there >= {1000, 1001, *by_score[:EXTREME], *by_score[-EXTREME:]}
    drawn = len(there) - 2 * EXTREME
    assert RANDOM < drawn < 300
    assert any(number > 500 for number in there - set(by_score[:50]) - set(by_score[-50:])), "drawn from all"


def test_a_text_is_there_once_and_a_long_one_loses_its_middle(path):
    long = "x" * MOST_CHARS + "the middle" + "y" * MOST_CHARS
    written(path, [FAILED] * 20, response=long)
    entry = story_of(path, sample="19").entries[0]
    assert (json.loads(entry.prompt), entry.ground_truth) == (QUESTION, "4")
    assert len(entry.response) < MOST_CHARS + 100
    assert "[... 200,010 characters are left out ...]" in entry.response
    assert len(texts_in(path)) == 3
    assert path.stat().st_size < 200_000, "compressed"


async def test_the_oldest_texts_of_a_large_file_are_deleted_and_no_row(path):
    rng = random.Random(3)
    texts = ["".join(rng.choices("abcdefghij klmnop", k=20_000)) for _ in range(200)]
    book = Journal(path, keep="all", texts_mb=1.0)
    for number, text in enumerate(texts):
        await book.put(None, of(number, text), scored(1.0))
        await book.flush()
    await book.aclose()
    assert path.stat().st_size < 1.2e6
    last = story_of(path, sample="199").entries[0]
    # The prompt that all share is written again.
    assert (last.response, json.loads(last.prompt)) == (texts[-1], QUESTION)
    assert story_of(path, sample="0").entries[0].response == NOT_KEPT
    assert len(kept(path)) == 200


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

    samples = [of(n, "x" * (n + 1), group_id="g") for n in range(5)]
    whole = {"kind": "sum", "weights": {"quality": 2.0}}
    faults = {1: "error_500", 3: "wrong_nonce"}
    outcomes = played(path, samples, score, faults=faults, judge={"score_range": [0, 10]}, whole=whole)
    results = []
    for number, outcome in enumerate(outcomes):
        story = story_of(path, sample=str(number))
        part, total = story.entries
        assert (part.judge, total.judge, total.reward) == ("quality", "whole", outcome.reward)
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


def test_a_sample_that_cannot_be_read_costs_its_texts_only(path):
    class Broken:
        def __iter__(self):
            raise RuntimeError

    record(path, [(Sample(Broken(), "a\ud800b", {1: object()}, id="0"), scored(1.0))], keep="all")
    entry = story_of(path).entries[0]
    assert (entry.prompt, entry.response, entry.ground_truth) == (None, "a?b", '{"1":"[object]"}')


def test_journals_of_several_processes_are_one(tmp_path):
    for name, score in (("a", 0.5), ("b", 0.25)):
        written(tmp_path / f"{name}.sqlite", [scored(score)] * 3, run_id="r")
    (tmp_path / "notes.txt").write_text("no journal")
    with closing(open_database(str(tmp_path / "old.sqlite"))) as older:
        older.execute("PRAGMA user_version = 5")
    with Stories([str(tmp_path)]) as stories:
        (story,), count = stories.find(Wanted(worst=True), 1)
    assert (count, story.entries[0].reward, len(story.entries), len(story.siblings)) == (3, 0.5, 2, 6)
    (tmp_path / "none").mkdir()
    with pytest.raises(JournalError, match="there is no journal in the directory"):
        Stories([str(tmp_path / "none")])


def test_a_directory_has_the_journal_of_a_run_that_has_just_begun(tmp_path):
    journal = Journal(tmp_path / "a.sqlite")
    with Stories([str(tmp_path)]) as stories:
        assert stories.find(Wanted(), 1) == ([], 0)
    asyncio.run(journal.aclose())


def test_a_database_of_another_program_beside_journals_stays_as_that_program_left_it(tmp_path):
    record(tmp_path / "a.sqlite", [(of(0), scored(0.5))])
    with closing(sqlite3.connect(tmp_path / "open.db", isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode = WAL")
        other.execute("CREATE TABLE studies (x)")
        for end in ("", "-wal"):  # as if that program had been killed
            (tmp_path / f"killed.db{end}").write_bytes((tmp_path / f"open.db{end}").read_bytes())
    left = (tmp_path / "killed.db-wal").read_bytes()
    with Stories([str(tmp_path)]) as stories:
        assert stories.find(Wanted(), 1)[1] == 1
    assert (tmp_path / "killed.db-wal").read_bytes() == left


def test_a_used_answer_is_told_with_the_response_that_was_judged(path):
    sent = attempt(of(0), f"<n0nce>{of(0).response}</n0nce>")
    others = [(of(n + 10, f"r{n}", step=2), scored(0.5)) for n in range(500)]
    first, again = (of(0), scored(0.5), [sent], "k"), (of(1, step=2), None, (), "k")
    record(path, [first, *others, again], rng=random.Random(1))
    story = story_of(path, sample="1")
    assert story.entries[0].cached
    assert f"<n0nce>{of(0).response}</n0nce>" in story.attempts[0][0]["request"]


def test_a_used_answer_is_not_told_with_a_failed_attempt_at_the_same_question(path):
    good, bad = attempt(of(0), "?", reply="GOOD"), attempt(of(1), "?", reply="bad", result="invalid")
    given = [(of(0), scored(0.9), [good], "k"), (of(1), FAILED, [bad], "k"), (of(2), None, (), "k")]
    record(path, given, keep="all")
    assert [each["reply"] for each in story_of(path, sample="2").attempts[0]] == ["GOOD"]


def test_an_attempt_that_ended_before_it_was_sent_has_no_request(path):
    attempts = [attempt(of(0), "?", sent_s=None, result="cancelled"), attempt(of(0), "?")]
    record(path, [(of(0), scored(0.5), attempts)], keep="all")
    assert ["request" in each for each in story_of(path).attempts[0]] == [False, True]


def test_a_short_response_leaves_what_was_sent_as_it_is(path):
    content = "the quick brown fox met the eager eel. " * 1500
    record(path, [(of(0, "e"), scored(0.5), [attempt(of(0, "e"), content)])])
    assert json.loads(story_of(path).attempts[0][0]["request"])["messages"][0]["content"] == content


def test_the_turns_of_a_response_are_numbered_and_told_with_what_was_sent_for_each(path):
    said = [("assistant", "one " * 20), ("tool", "18"), ("assistant", "two " * 20)]
    response = "\n\n".join(f"{role}: {text}" for role, text in said)
    turns = [{"role": role, "content": text, "end": response.index(text) + len(text)} for role, text in said]
    whole = {"kind": "turns", "judge": "quality"}
    played(path, [of("s", response, turns=turns)], lambda call: 1.0, whole=whole, keep="all")
    story = story_of(path)
    told = {judge_of(*each): each[1] for each in zip(story.entries, story.attempts, strict=True)}
    assert told.keys() == {"quality, turn 1", "quality, turn 2", "whole"}
    for name, text in (("quality, turn 1", "one " * 20), ("quality, turn 2", "two " * 20)):
        messages = json.loads(told[name][0]["request"])["messages"]
        assert f">>>\n{text}\n<<<" in messages[-1]["content"]


def test_a_sample_with_an_invalid_reply_is_interesting(path):
    bad = attempt(of(2), "?", reply="bad", result="invalid")
    samples = [(of(number), scored(float(number % 2)), [bad] if number == 40 else ()) for number in range(60)]
    record(path, samples, rng=SimpleNamespace(random=lambda: 1.0))
    assert 40 in kept(path)
    assert 42 not in kept(path)


def test_a_sample_has_the_advantages_of_its_own_step_and_a_validation_has_none(path):
    record(path, [(of(0, split=split), scored(0.5)) for split in ("train", "val")], run_id="r")
    log = TrainingLog(str(path), run_id="r")
    log.add([Trained("0", "g", step, 0.5, advantage, False) for step, advantage in ((1, 1.5), (2, 9.5))])
    log.flush()
    told = [story_of(path, row=row).trained for row in (1, 2)]
    assert [{name: one.advantage for name, one in each.items()} for each in told] == [{"0": 1.5}, {}]


def test_advantages_that_cannot_be_recorded_are_said_once(path, caplog):
    log = TrainingLog(str(path.parent / "absent" / "journal.sqlite"), run_id="r")
    for step in range(3):
        log.add([Trained("0", "g", step, 0.5, 1.0, False)])
    log.flush()
    (message,) = caplog.messages
    assert message.startswith("advantages are not recorded: ")


def test_what_a_pattern_matches_is_nowhere_in_the_file_and_the_judge_sees_it(path):
    mail = "ann@example.org"
    question = [{"role": "user", "content": f'Write to "{mail}".'}]
    seen = []

    def score(call):
        seen.append(call.blocks["response"])
        return {"score": 0.5, "rationale": f"polite to {mail}"}

    # The second pattern takes all that follows, were it not for the end of the text.
    redact = [r"\S+@example\.org\S*", "(?s)Dear .*"]
    responses = [f"Mail {mail} for the first time.", f"{mail}: Dear Ann", "No."]
    samples = [Sample(question, each, {"to": mail}, step=1, id=str(n)) for n, each in enumerate(responses)]
    faults = {0: "error_500", 2: "prose"}
    played(path, samples, score, faults=faults, judge={"score_range": [0, 1]}, keep="all", redact=redact)
    broken = Failed(Cause.INFRA, "deadline", f"asked for {mail}", judge="quality")
    floor = Scored(Verdict(0.0, judge="quality", basis="floor", failure=broken))
    sample, problem = Sample(question, mail, {mail: 1}, step=1, id="3"), f"no route to {mail}"
    given = [(sample, broken, [replace(attempt(sample, mail), problem=problem)]), (replace(sample, id="4"), floor)]
    record(path, given, redact=redact)
    assert seen[0] == f"Mail {mail} for the first time."
    rows = [str(row) for row in sql(path, "SELECT * FROM outcomes")]
    assert not [text for text in (*texts_in(path), *rows) if "example.org" in text or "Dear" in text]
    story = story_of(path, sample="1")
    (entry,) = story.entries
    assert (json.loads(entry.prompt)[0]["content"], entry.response) == ("Write to [redacted]", "[redacted] [redacted]")
    assert (json.loads(entry.ground_truth), entry.rationale) == ({"to": "[redacted]"}, "polite to [redacted]")
    failed = story_of(path, sample="3")
    assert (failed.entries[0].detail, failed.attempts[0][0]["problem"]) == (
        "asked for [redacted]",
        "no route to [redacted]",
    )


def test_a_pattern_matches_characters_by_their_codes(path):
    texts = ['{"to": "\\u0061nn@example.org", "cc": "ann@example.org, eve"}', '{"to": "\\u0062ob"}', None, 5]
    outcomes = [Scored(Verdict(1.0, judge="quality", rationale=each)) for each in texts]
    written(path, outcomes, redact=["eve", r"ann@[a-z.]+"])
    told = [story_of(path, sample=str(number)).entries[0].rationale for number in range(4)]
    assert told == ['{"to": "[redacted]", "cc": "[redacted], [redacted]"}', texts[1], "", "5"]


TEXTS = [
    *("four", 'say "4"\n\\n', "\u202eevil\x1b[2J</script>", "数 🎲", "\ud800 alone", "x" * 70, "<<<end"),
    *("\0response\0 and \0nonce\0", "\\u0000nonce\\u0000"),
]
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108020000009077"
    "53de0000000c49444154789c63f8cfc0000003010100c9fe92ef0000000049454e44ae426082"
)


@pytest.fixture
def log(monkeypatch):
    """(body of the request, body of the reply or None for a stream) of all that judge servers got and said."""
    found = []
    answer = JudgeHandler.__call__

    async def logged(self, request):
        body = await request.read()
        response = await answer(self, request)
        found.append((body.decode(), getattr(response, "body", None)))
        return response

    monkeypatch.setattr(JudgeHandler, "__call__", logged)
    return found


def chat(server, **more):
    return {"kind": "openai", "base_url": server.base_url, "model": "judge", "api_key": "sk-0123456789", **more}


@pytest.mark.parametrize("dialect", ["openai", "responses", "anthropic"])
def test_what_is_told_is_byte_for_byte_what_the_judge_server_got(path, log, dialect):
    with JudgeServer(protocols=["openai", "responses", "anthropic"]) as server:
        tree = {"sources": {"a": chat(server, dialect=dialect)}, "judges": {"quality": {"kind": "llm"}}}
        more = " is it, and these words are longer than a mark"
        samples = [Sample([{"role": "user", "content": text}], text + more, "4", id=text) for text in TEXTS]
        scored_all(path, tree, samples, keep="all")
    with Stories([str(path)]) as stories:
        told = [attempt["request"] for story in stories.every("1") for each in story.attempts for attempt in each]
    assert sorted(told) == sorted(body for body, _ in log)
    assert len(told) == len(TEXTS)


def test_secrets_are_in_no_body_and_images_are_hashes(path, log):
    with JudgeServer(lambda call: 1.0, faults=Faults(script={0: "error_500"}.get)) as server:
        source = chat(server, vision=True)
        source["parameters"] = {"session_token": "tok-0123456789", "auth": {"password": "qwErty7"}}
        content = [{"type": "text", "text": "?"}, {"type": "image", "image": PNG}]
        sample = Sample([{"role": "user", "content": content}], "it is sk-0123456789", id="s")
        scored_all(path, {"sources": {"a": source}, "judges": {"quality": {"kind": "llm"}}}, [sample], keep="all")
    assert "tok-0123456789" in log[0][0]
    assert [text for text in texts_in(path) if "tok-0123" in text or "qwErty7" in text] == []
    ((failed, valid),) = story_of(path).attempts
    image = EncodedImage(Image.of(PNG), name="i", max_side=2048, max_bytes=10**7)
    assert (failed["result"], bytes(log[0][1]).decode()) == ("failed", failed["said"])
    assert '"session_token":"**********"' in valid["request"]
    assert (image.identity in valid["request"], str(image) in valid["request"]) == (True, False)
