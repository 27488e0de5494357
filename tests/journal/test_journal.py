"""What goes into the journal comes out of it, whatever happens to callers, event loops and processes."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import sqlite3
import textwrap
import threading
import tracemalloc
from contextlib import closing, contextmanager
from dataclasses import replace

import numpy as np
import pytest

from qreward_plugins.errors import JournalError
from qreward_plugins.journal import Journal, journal, writer
from qreward_plugins.journal.database import check_place, reading
from qreward_plugins.samples import Cause, Failed, RawScore, Sample, Scored, Verdict
from qreward_plugins.samples.spent import Spent, Usage

from ..kit import Program, sql, wait_until

pytestmark = pytest.mark.anyio

QUESTION = [{"role": "user", "content": "the prompt"}]
SAMPLE = Sample(QUESTION, "the response", data_source="math", group_id="g1", step=3, split="train", id="s1")
VERDICT = Verdict(
    score=0.25,
    components={"style": 0.5, "form": 1},
    rationale="good",
    correct=True,
    judge="quality",
    source="fast",
    model="m-1",
    spent=Spent(3, Usage(100, 20, cached_tokens=64, thinking_tokens=8), 1.5, 0.01),
    service_s=0.75,
    weight_version="step-1",
    raw=RawScore(2.5, {"style": 5.0, "form": 10.0}),
)
SCORED = Scored(VERDICT)
FAILED = Failed(Cause.INFRA, "deadline", "took too long", judge="quality", source="slow", spent=Spent(2, latency_s=9.0))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal.sqlite"


@pytest.fixture(autouse=True)
def threads():
    """The threads of journals that this test has left open: an engine of another test need not be closed."""

    def alive():
        return {thread for thread in threading.enumerate() if "qreward-journal" in thread.name}

    before = alive()
    return lambda: alive() - before


@pytest.fixture
def impatient(monkeypatch):
    """A journal that neither waits long for other processes nor tries for long."""
    monkeypatch.setattr("qreward_plugins.journal.database.BUSY_TIMEOUT_S", 0.01)
    monkeypatch.setattr(writer, "FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(writer, "LONGEST_RETRY_S", 0.02)
    monkeypatch.setattr(writer, "CLOSE_WITHIN_S", 0.1)


def rows(path):
    with closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        return [dict(row) for row in connection.execute("SELECT * FROM outcomes ORDER BY id")]


def keys(path):
    return [row["key"] for row in rows(path)]


@contextmanager
def locked(path):
    """No process can write while this lasts."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


async def put(book, *names, outcome=SCORED):
    for name in names:
        await book.put(str(name), SAMPLE, outcome)


async def test_the_latest_verdict_comes_back_now_and_in_the_next_run_and_no_failure_and_no_floor_does(path):
    failure = Failed(Cause.VERDICT, "invalid", "no score", judge="quality", source="fast")
    floor = Verdict(0.5, basis="floor", failure=failure, judge="quality", spent=Spent(2))
    book = Journal(path)
    for verdict in (VERDICT, replace(VERDICT, score=0.75)):
        await put(book, "k", outcome=Scored(verdict))
    await put(book, "k", outcome=Failed(Cause.INFRA, "deadline"))
    await put(book, "k", outcome=Scored(replace(VERDICT, score=0.1, cached=True)))
    await put(book, "f", outcome=FAILED)
    await put(book, "floor", outcome=Scored(floor))
    await book.put(None, SAMPLE, SCORED)
    expected = replace(VERDICT, score=0.75, spent=Spent(), cached=True)
    for _ in range(2):
        assert await book.get("k") == expected
        assert await book.get("f") is await book.get("floor") is await book.get("other") is None
        await book.flush()
    await book.aclose()
    again = Journal(path)
    found = await again.get("k")
    await again.aclose()
    assert (found, found.raw, found.service_s) == (expected, VERDICT.raw, 0.0)
    assert len(rows(path)) == 7
    columns = ("outcome", "cause", "reason", "floor", "attempts")
    assert [rows(path)[5][column] for column in columns] == ["failed", "verdict", "invalid", 0.5, 2]


async def test_every_outcome_is_a_row_of_the_audit(path):
    times = iter([1_700_000_000.5, 1_700_000_001.0])
    book = Journal(path, clock=lambda: next(times), run_id="run-1", keep="none")
    await put(book, "k")
    await book.put(None, SAMPLE, FAILED)
    await book.aclose()
    common = {"process_id": os.getpid(), "run_id": "run-1", "sample_id": "s1", "data_source": "math", "group_id": "g1"}
    common |= {"step": 3, "split": "train", "judge": "quality", "cached": 0, "response_chars": 12}
    scored = {"id": 1, "key": "k", "recorded_at": 1_700_000_000.5, "outcome": "scored", "source": "fast"}
    scored |= {"model": "m-1", "score": 0.25, "rationale": "good", "correct": 1, "weight_version": "step-1"}
    scored |= {"raw_score": 2.5, "raw_components": '{"style": 5.0, "form": 10.0}', "service_s": 0.75}
    scored |= {"attempts": 3, "prompt_tokens": 100, "completion_tokens": 20, "latency_s": 1.5, "cost_usd": 0.01}
    scored |= {"cached_tokens": 64, "thinking_tokens": 8, "components": '{"style": 0.5, "form": 1.0}'}
    failed = {"id": 2, "recorded_at": 1_700_000_001.0, "outcome": "failed", "source": "slow", "cause": "infra"}
    failed |= {"reason": "deadline", "detail": "took too long", "attempts": 2, "latency_s": 9.0, "cost_usd": 0.0}
    failed |= dict.fromkeys(("prompt_tokens", "completion_tokens", "cached_tokens", "thinking_tokens"), 0)
    assert rows(path) == [
        dict.fromkeys(row) | common | told for row, told in zip(rows(path), (scored, failed), strict=True)
    ]


async def test_odd_values_are_kept_and_a_row_that_cannot_be_written_costs_only_itself(path):
    sample = replace(SAMPLE, id="\ud800", step=np.int64(4), group_id=7)
    verdict = replace(VERDICT, rationale="x\ud800\0" + "y" * 10_000, score=np.float64(0.5), components={"\udfff": 1})
    book = Journal(path)
    await book.put("k\ud800", sample, Scored(verdict))
    await book.put("b", replace(SAMPLE, step="three"), SCORED)
    await book.put("n", replace(SAMPLE, data_source=None), SCORED)
    await book.put("k", replace(sample, step=2**70), Scored(verdict))
    found = await book.get("k")
    assert (found.rationale, found.score) == ("x?\0" + "y" * 3997, 0.5)
    with pytest.raises(JournalError, match="1 outcomes were not recorded"):
        await book.aclose()
    assert book.write_errors == 1
    written = [(row["sample_id"], row["step"], row["group_id"]) for row in rows(path)]
    assert written == [("?", 4, "7"), ("s1", 3, "g1"), ("?", 2**63 - 1, "7")]


async def test_a_caller_waits_when_the_file_cannot_keep_up_and_its_cancellation_loses_nothing(path, monkeypatch):
    monkeypatch.setattr(journal, "ROOM", 8)
    book = Journal(path)
    with locked(path):
        await put(book, *range(8))
        waiting = [asyncio.ensure_future(put(book, n)) for n in range(8, 12)]
        flushing = asyncio.ensure_future(book.flush())
        # An answer that is used again waits for no disk, and is left out while others wait.
        again = asyncio.ensure_future(put(book, "again", outcome=Scored(replace(VERDICT, cached=True))))
        for _ in range(5):
            await asyncio.sleep(0)
        assert [task.done() for task in (*waiting, again)] == [False] * 4 + [True]
        # Readers do not wait for writers, nor does the event loop.
        assert await book.get("none") is None
        waiting[0].cancel()
        flushing.cancel()
        await asyncio.gather(waiting[0], flushing, return_exceptions=True)
        assert not waiting[1].done()
    await asyncio.gather(*waiting[1:])
    with locked(path):
        await put(book, *range(12, 20))  # there is room again: nobody waits for the lock
    await book.aclose()
    assert keys(path) == [str(n) for n in range(20)]


def test_a_closed_event_loop_does_not_matter(path):
    book = Journal(path)

    async def leave():
        await put(book, *range(5))
        asyncio.ensure_future(book.flush())  # noqa: RUF006
        asyncio.ensure_future(book.get("nothing"))  # noqa: RUF006
        await asyncio.sleep(0)

    async def come_back():
        assert await book.get("4") is not None
        await put(book, 5)
        await book.flush()
        await book.aclose()

    with locked(path):
        asyncio.run(leave())
    asyncio.run(come_back())
    assert len(rows(path)) == 6


async def test_closing_is_idempotent_and_survives_cancellation(path, threads):
    book = Journal(path)
    await put(book, "k")
    with locked(path):
        closing_ = asyncio.ensure_future(book.aclose())
        await asyncio.sleep(0)
        closing_.cancel()
        await asyncio.gather(closing_, return_exceptions=True)
        assert closing_.cancelled()
    await asyncio.gather(book.aclose(), book.aclose())
    for refused in (book.get("k"), put(book, "k"), book.flush()):
        with pytest.raises(JournalError, match="is closed"):
            await refused
    assert len(rows(path)) == 1
    assert not threads()
    assert {file.name for file in path.parent.iterdir()} == {path.name}


async def test_memory_does_not_grow(path):
    book = Journal(path)

    async def burst(number):
        await put(book, *(f"{number} {n}" for n in range(300)), outcome=Scored(replace(VERDICT, rationale="r" * 1000)))
        await book.flush()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    before, *_, after = [await burst(number) for number in range(4)]
    tracemalloc.stop()
    await book.aclose()
    assert after - before < 200_000


PRELUDE = """
import asyncio, os, resource, sys
from qreward_plugins.errors import JournalError
from qreward_plugins.journal import Journal, writer
from qreward_plugins.samples import Sample, Scored, Verdict
path = sys.argv[1]

async def put(journal, key, rationale=""):
    await journal.put(str(key), Sample([], ""), Scored(Verdict(1, rationale=rationale)))

"""


def started(path, program, **options):
    return Program("-W", "error", "-c", f"{PRELUDE}{textwrap.dedent(program)}\nasyncio.run(main())", path, **options)


def test_several_processes_share_a_journal_from_its_first_moment_on_and_lose_nothing_without_closing_it(path):
    program = """
    writer.COMMIT_AFTER_S = 1000
    async def main():
        sys.stdin.readline()
        journal = Journal(path)
        await asyncio.gather(*(put(journal, f"{os.getpid()}-{n}") for n in range(500)))
    """
    go, goes = os.pipe()
    processes = [started(path, program, stdin=go) for _ in range(2)]
    os.close(go)
    os.close(goes)  # the end of their input starts them all at once
    for process in processes:
        assert process.end(0)[0] == 0
    assert sorted(keys(path)) == sorted(f"{process.pid}-{n}" for process in processes for n in range(500))


def test_a_killed_writer_leaves_a_valid_journal(path):
    program = """
    async def main():
        journal = Journal(path)
        for n in range(10**9):
            await put(journal, n, "r" * 500)
            if n % 500 == 0:
                await journal.flush()
                print(f"flushed {n}.", flush=True)
    """
    with started(path, program) as process:
        process.line("flushed 3000.")
        process.end()
    assert sql(path, "PRAGMA integrity_check") == [("ok",)]
    kept = keys(path)
    assert kept == [str(n) for n in range(len(kept))]
    assert len(kept) > 3000


def test_a_full_disk_does_not_stop_scoring(path):
    program = """
    import logging
    logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
    async def main():
        journal = Journal(path)
        await put(journal, "first")
        await journal.flush()
        # From here on no file can become longer than the journal's is.
        resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(path + "-wal"), resource.RLIM_INFINITY))
        for n in range(3):
            for m in range(300):
                await put(journal, f"{n}-{m}", "r" * 3000)
            try:
                await journal.flush()
            except JournalError as error:
                print("raised", error)
        assert journal.write_errors == 0, journal.write_errors
        assert await journal.get("first") and await journal.get("2-1")
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        await put(journal, "last")
        await journal.aclose()
    """
    with started(path, program) as process:
        code, output, errors = process.end(0)
    assert code == 0, errors
    lines = output.splitlines()
    assert [line.split()[0] for line in lines].count("ERROR") == 1
    assert [line.split()[0] for line in lines].count("raised") == 3
    for part in ("outcomes are kept in memory", str(path), "free some space"):
        assert part in lines[0]
    assert keys(path) == ["first", *(f"{n}-{m}" for n in range(3) for m in range(300)), "last"]


async def test_what_cannot_be_written_is_kept_and_written_when_it_can(path, caplog, impatient):
    caplog.set_level(logging.WARNING)
    book = Journal(path)
    with locked(path):
        for n in range(3):
            await put(book, n)
            with pytest.raises(JournalError, match=f"{n + 1} outcomes are not recorded yet: another process has lock"):
                await book.flush()
        assert await book.get("0") is not None
    # Nobody asks for it: it is tried again by itself.
    await asyncio.to_thread(wait_until, lambda: len(rows(path)) == 3)
    await book.flush()
    await put(book, 3)
    await book.aclose()
    assert (book.write_errors, keys(path)) == (0, ["0", "1", "2", "3"])
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert "outcomes are kept in memory and retried" in caplog.messages[0]
    assert "can be written again" in caplog.messages[1]


async def test_memory_is_bounded_while_the_file_cannot_be_written_and_what_is_lost_is_counted_and_said(
    path, monkeypatch, caplog, impatient, threads
):
    monkeypatch.setattr(journal, "ROOM", 4)
    monkeypatch.setattr(writer, "KEPT_ROWS", 30)
    book = Journal(path)
    with locked(path):
        await put(book, "first")
        with pytest.raises(JournalError, match="not recorded yet"):
            await book.flush()
        await put(book, *range(200))
        assert book.write_errors == 171
        said = "201 outcomes were not recorded: another process has locked .* asks and pays for their verdicts again"
        with pytest.raises(JournalError, match=said):
            await book.aclose()
    await book.aclose()
    assert book.write_errors == 201
    told = zip(("are kept in memory", "memory .* is full", "^201 outcomes"), caplog.messages, strict=True)
    assert all(re.search(part, message) for part, message in told)
    assert not threads()


async def test_texts_are_lost_before_numbers_while_the_file_cannot_be_written(path, monkeypatch, impatient):
    monkeypatch.setattr(writer, "KEPT_BYTES", 1000)
    book = Journal(path, keep="all")
    with locked(path):
        for number in range(20):
            await book.put(None, replace(SAMPLE, response=f"{number} " * 600), SCORED)
    await book.aclose()
    assert len(rows(path)) == 20
    assert sql(path, "SELECT count(*) FROM texts") == [(2,)], "prompt and response of the first"


@pytest.fixture
def refusal(threads):
    def refusal(path):
        with pytest.raises(JournalError) as caught:
            Journal(path)
        assert not threads()
        assert str(path) in str(caught.value)
        assert caught.value.__cause__ is None
        return str(caught.value)

    return refusal


@pytest.fixture
def written(path):
    """A journal of 200 verdicts."""

    async def main():
        book = Journal(path)
        await put(book, *range(200))
        await book.aclose()

    asyncio.run(main())
    return path


def test_files_that_are_no_journal(path, tmp_path, refusal):
    path.write_bytes(b"sources:\n" * 500)
    other = tmp_path / "other.sqlite"
    sql(other, "CREATE TABLE things (id)")
    before = path.read_bytes(), other.read_bytes()
    for place, said in {
        path: "is not a journal; name another file",
        other: "database of another program",
        tmp_path / "absent" / "journal.sqlite": "check that its directory exists",
        ":memory:": "local disk",
    }.items():
        assert said in refusal(place)
    assert (path.read_bytes(), other.read_bytes()) == before


def test_a_journal_of_another_version_is_refused_and_left_as_it_is(written, refusal):
    for version in (1, 9):
        sql(written, f"PRAGMA user_version = {version}")
        before = written.read_bytes()
        said = f"has schema version {version}, and this version of qreward-plugins uses version 8; move the file"
        assert said in refusal(written)
        with pytest.raises(JournalError, match=f"has schema version {version}"), reading(str(written)):
            pass
        assert written.read_bytes() == before


def test_a_journal_that_may_not_be_written_is_found_before_a_run(written, tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    for place in (written, tmp_path / "new.sqlite"):
        with pytest.raises(JournalError, match=f"{place} cannot be written; check the permissions of the file"):
            check_place(str(place))
    assert not (tmp_path / "new.sqlite").exists()


def test_a_locked_journal_and_a_damaged_one_are_refused_in_words(written, refusal, impatient):
    with locked(written):
        assert "another process has locked the journal" in refusal(written)
    content = written.read_bytes()
    written.write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))
    assert "is damaged; move it away" in refusal(written)
