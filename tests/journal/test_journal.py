"""What goes into the journal comes out of it, whatever happens to callers, event loops and processes."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qreward_plugins.errors import JournalError
from qreward_plugins.journal import Journal, journal, writer
from qreward_plugins.journal.database import reading
from qreward_plugins.samples import Cause, Failed, RawScore, Sample, Scored, Verdict
from qreward_plugins.samples.spent import Spent, Usage

pytestmark = pytest.mark.anyio

SAMPLE = Sample(
    messages=[{"role": "user", "content": "the prompt"}],
    response="the response",
    data_source="math",
    group_id="g1",
    step=3,
    split="train",
    id="s1",
)
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
FAILED = Failed(Cause.INFRA, "deadline", "took too long", judge="quality", source="slow", spent=Spent(2, latency_s=9.0))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


def rows(path: Path, what: str = "*") -> list[dict[str, Any]]:
    with closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        return [dict(row) for row in connection.execute(f"SELECT {what} FROM outcomes ORDER BY id")]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """No process can write while this lasts."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


def until(done: Callable[[], bool]) -> None:
    """Block until the journal's threads have brought something about."""
    while not done():
        threading.Event().wait(0.005)


def test_a_floor_is_a_row_of_its_own_failure_and_never_an_answer(path: Path) -> None:
    failure = Failed(Cause.VERDICT, "invalid", "no score", judge="quality", source="fast")
    verdict = Verdict(0.5, basis="floor", failure=failure, judge="quality", spent=Spent(2))

    async def main() -> Verdict | None:
        journal = Journal(path)
        await journal.put("k", SAMPLE, Scored(verdict))
        found = await journal.get("k")
        await journal.aclose()
        return found

    assert asyncio.run(main()) is None
    (row,) = rows(path)
    assert (row["outcome"], row["cause"], row["reason"], row["floor"], row["attempts"]) == (
        "failed",
        "verdict",
        "invalid",
        0.5,
        2,
    )


@pytest.fixture(autouse=True)
def _before() -> Iterator[None]:
    """The threads of journals that another test of this process has left open: an engine need not be closed."""
    OPEN.update(thread for thread in threading.enumerate() if "qreward-journal" in thread.name)
    yield
    OPEN.clear()


OPEN: set[threading.Thread] = set()


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if "qreward-journal" in thread.name} - OPEN


def test_a_verdict_comes_back_now_and_in_the_next_run(path: Path) -> None:
    expected = replace(VERDICT, spent=Spent(), cached=True)

    async def first() -> None:
        journal = Journal(path)
        assert await journal.get("k") is None
        await journal.put("k", SAMPLE, Scored(VERDICT))
        assert await journal.get("k") == expected
        await journal.flush()
        assert await journal.get("k") == expected
        assert await journal.get("other") is None
        await journal.aclose()

    async def second() -> None:
        journal = Journal(path)
        found = await journal.get("k")
        assert found == expected
        assert (found.raw, found.service_s) == (VERDICT.raw, 0.0)
        await journal.aclose()

    asyncio.run(first())
    asyncio.run(second())
    assert not threads()


async def test_the_latest_verdict_wins_and_nothing_else_is_an_answer(path: Path) -> None:
    journal = Journal(path)
    await journal.put("k", SAMPLE, Scored(VERDICT))
    await journal.put("k", SAMPLE, Scored(replace(VERDICT, score=0.75)))
    await journal.put("k", SAMPLE, Failed(Cause.INFRA, "deadline"))
    await journal.put("k", SAMPLE, Scored(replace(VERDICT, score=0.1, cached=True)))
    await journal.put("f", SAMPLE, FAILED)
    await journal.put(None, SAMPLE, Scored(VERDICT))
    for _ in range(2):
        verdict = await journal.get("k")
        assert verdict is not None
        assert verdict.score == 0.75
        assert await journal.get("f") is None
        await journal.flush()
    await journal.aclose()
    assert len(rows(path)) == 6


async def test_an_answer_that_is_used_again_waits_for_no_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "ROOM", 1)
    again = Scored(replace(VERDICT, cached=True, spent=Spent()))

    opened = Journal(path)
    await opened.put("k", SAMPLE, again)
    with locked(path):
        for _ in range(2):
            opened.note("k", SAMPLE, Scored(VERDICT))
        waiting = asyncio.ensure_future(opened.put("k", SAMPLE, again))
        for _ in range(5):
            await asyncio.sleep(0)
        assert waiting.done()
    await opened.flush()
    await opened.aclose()
    with pytest.raises(JournalError, match="closed"):
        await opened.put("k", SAMPLE, again)
    assert len(rows(path)) == 3


async def test_every_outcome_is_a_row_of_the_audit(path: Path) -> None:
    times = iter([1_700_000_000.5, 1_700_000_001.0])
    journal = Journal(path, clock=lambda: next(times), run_id="run-1", keep="none")
    await journal.put("k", SAMPLE, Scored(VERDICT))
    await journal.put(None, SAMPLE, FAILED)
    await journal.aclose()
    scored, failed = rows(path)
    common = {"process_id": os.getpid(), "run_id": "run-1", "sample_id": "s1", "data_source": "math", "group_id": "g1"}
    common |= {"step": 3, "split": "train", "judge": "quality", "cached": 0, "response_chars": 12}
    assert json.loads(scored.pop("components")) == VERDICT.components
    of_scored = {"id": 1, "key": "k", "recorded_at": 1_700_000_000.5, "outcome": "scored", "source": "fast"}
    of_scored |= {"model": "m-1", "score": 0.25, "rationale": "good", "correct": 1, "weight_version": "step-1"}
    of_scored |= {"raw_score": 2.5, "raw_components": '{"style": 5.0, "form": 10.0}', "service_s": 0.75}
    of_scored |= {"attempts": 3, "prompt_tokens": 100, "completion_tokens": 20, "latency_s": 1.5, "cost_usd": 0.01}
    of_scored |= {"cached_tokens": 64, "thinking_tokens": 8}
    assert scored == dict.fromkeys(scored) | common | of_scored
    of_failed = {"id": 2, "recorded_at": 1_700_000_001.0, "outcome": "failed", "source": "slow", "cause": "infra"}
    of_failed |= {"reason": "deadline", "detail": "took too long", "attempts": 2, "latency_s": 9.0, "cost_usd": 0.0}
    of_failed |= dict.fromkeys(("prompt_tokens", "completion_tokens", "cached_tokens", "thinking_tokens"), 0)
    assert failed == dict.fromkeys(failed) | common | of_failed
    content = await asyncio.to_thread(path.read_bytes)
    assert b"the prompt" not in content
    assert b"the response" not in content


async def test_odd_values_are_kept_in_a_form_that_sqlite_takes(path: Path) -> None:
    sample = replace(SAMPLE, id="\ud800", step=np.int64(4), group_id=7)  # type: ignore[arg-type]
    verdict = replace(
        VERDICT, rationale="x\ud800\0" + "y" * 10_000, score=np.float64(0.5), components={"\udfff": 1}, correct=None
    )

    journal = Journal(path)
    await journal.put("k\ud800", sample, Scored(verdict))
    await journal.put("k", replace(sample, step=2**70), Scored(verdict))
    for _ in range(2):
        found = await journal.get("k")
        assert found is not None
        assert found.rationale == "x?\0" + "y" * 3997
        assert found.score == 0.5
        assert found.correct is None
        await journal.flush()
    assert await journal.get("\ud800") is None
    assert journal.write_errors == 0
    await journal.aclose()
    assert [(row["sample_id"], row["step"], row["group_id"]) for row in rows(path)] == [
        ("?", 4, "7"),
        ("?", 2**63 - 1, "7"),
    ]


async def test_a_row_that_cannot_be_written_costs_only_itself(path: Path) -> None:
    journal = Journal(path)
    await journal.put("a", SAMPLE, Scored(VERDICT))
    await journal.put("b", replace(SAMPLE, step="three"), Scored(VERDICT))  # type: ignore[arg-type]
    # The column refuses NULL.
    await journal.put("n", replace(SAMPLE, data_source=None), Scored(VERDICT))  # type: ignore[arg-type]
    await journal.put("c", SAMPLE, Scored(VERDICT))
    with pytest.raises(JournalError, match="2 outcomes were not recorded"):
        await journal.aclose()
    assert journal.write_errors == 2
    assert [row["key"] for row in rows(path)] == ["a", "c"]


async def test_a_caller_waits_when_the_file_cannot_keep_up_and_its_cancellation_loses_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "ROOM", 8)

    book = Journal(path)
    with locked(path):
        for n in range(8):
            await book.put(str(n), SAMPLE, Scored(VERDICT))
        waiting = [asyncio.ensure_future(book.put(str(n), SAMPLE, Scored(VERDICT))) for n in range(8, 12)]
        flushing = asyncio.ensure_future(book.flush())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        # Readers do not wait for writers, nor does the event loop.
        assert await book.get("none") is None
        waiting[0].cancel()
        flushing.cancel()
        await asyncio.gather(waiting[0], flushing, return_exceptions=True)
        assert not waiting[1].done()
    await asyncio.gather(*waiting[1:])
    with locked(path):
        # There is room again: nobody waits for the lock.
        for n in range(12, 20):
            await book.put(str(n), SAMPLE, Scored(VERDICT))
    await book.aclose()
    assert [row["key"] for row in rows(path)] == [str(n) for n in range(20)]


def test_a_closed_event_loop_does_not_matter(path: Path) -> None:
    book = Journal(path)

    async def leave() -> None:
        for n in range(5):
            await book.put(str(n), SAMPLE, Scored(VERDICT))
        asyncio.ensure_future(book.flush())  # noqa: RUF006
        asyncio.ensure_future(book.get("nothing"))  # noqa: RUF006
        await asyncio.sleep(0)

    with locked(path):
        asyncio.run(leave())

    async def come_back() -> None:
        assert await book.get("4") is not None
        await book.put("5", SAMPLE, Scored(VERDICT))
        await book.flush()
        await book.aclose()

    asyncio.run(come_back())
    assert len(rows(path)) == 6


async def test_closing_is_idempotent_and_survives_cancellation(path: Path) -> None:
    book = Journal(path)
    await book.put("k", SAMPLE, Scored(VERDICT))
    with locked(path):
        closing_ = asyncio.ensure_future(book.aclose())
        await asyncio.sleep(0)
        closing_.cancel()
        await asyncio.gather(closing_, return_exceptions=True)
        assert closing_.cancelled()
    await asyncio.gather(book.aclose(), book.aclose())
    await book.aclose()
    book.close()
    for refused in (book.get("k"), book.put("k", SAMPLE, FAILED), book.flush()):
        with pytest.raises(JournalError, match="is closed"):
            await refused
    assert len(rows(path)) == 1
    assert not threads()
    assert {file.name for file in path.parent.iterdir()} == {path.name}


async def test_memory_does_not_grow(path: Path) -> None:
    book = Journal(path)

    async def burst() -> None:
        for n in range(3000):
            await book.put(str(n), SAMPLE, Scored(replace(VERDICT, rationale="r" * 1000)))
        await book.flush()

    await burst()
    tracemalloc.start()
    await burst()
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(3):
        await burst()
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 300_000
    assert not book._writer._verdicts
    await book.aclose()


PRELUDE = """
import asyncio, os, resource, sys, warnings
from qreward_plugins.errors import JournalError
from qreward_plugins.journal import Journal
from qreward_plugins.samples import Sample, Scored, Verdict
path = sys.argv[1]
sample = Sample(messages=[], response="")
"""


def start(program: str, path: Path) -> subprocess.Popen[str]:
    """A process that runs `program` after `PRELUDE`."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PRELUDE + textwrap.dedent(program), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def written(path: Path, count: int) -> None:
    """Make a journal with `count` verdicts."""

    async def main() -> None:
        book = Journal(path)
        for n in range(count):
            await book.put(str(n), SAMPLE, Scored(VERDICT))
        await book.aclose()

    asyncio.run(main())


def test_several_processes_share_a_journal_from_its_first_moment_on(path: Path) -> None:
    program = """
    async def main():
        journal = Journal(path)
        name = os.getpid()
        await asyncio.gather(*(journal.put(f"{name}-{n}", sample, Scored(Verdict(score=n))) for n in range(500)))
        await journal.aclose()
    print("ready", flush=True)
    sys.stdin.readline()
    asyncio.run(main())
    """
    processes = [start(program, path) for _ in range(4)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate()
        assert process.returncode == 0
    keys = [row["key"] for row in rows(path, "key")]
    assert sorted(keys) == sorted(f"{process.pid}-{n}" for process in processes for n in range(500))


def test_a_killed_writer_leaves_a_valid_journal(path: Path) -> None:
    program = """
    async def main():
        journal = Journal(path)
        for n in range(10**9):
            await journal.put(str(n), sample, Scored(Verdict(score=n, rationale="r" * 500)))
            if n % 500 == 0:
                await journal.flush()
                print(n, flush=True)
    asyncio.run(main())
    """
    with start(program, path) as process:
        assert process.stdout is not None
        flushed = 0
        while flushed < 3000:
            flushed = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        for line in process.stdout:
            flushed = int(line)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    kept = [row["key"] for row in rows(path, "key")]
    assert kept == [str(n) for n in range(len(kept))]
    assert len(kept) > flushed

    async def read() -> None:
        book = Journal(path)
        verdict = await book.get(str(flushed))
        assert verdict is not None
        assert verdict.score == flushed
        await book.put("next", SAMPLE, Scored(VERDICT))
        await book.aclose()

    asyncio.run(read())
    assert rows(path, "key")[-1]["key"] == "next"


def test_a_process_that_ends_without_closing_loses_nothing(path: Path) -> None:
    program = """
    from qreward_plugins.journal import writer as module
    module.COMMIT_AFTER_S = 1000
    async def main():
        journal = Journal(path)
        for n in range(200):
            await journal.put(str(n), sample, Scored(Verdict(score=n)))
    asyncio.run(main())
    """
    with start(program, path) as process:
        assert process.wait() == 0
    assert len(rows(path)) == 200


def test_a_full_disk_does_not_stop_scoring(path: Path) -> None:
    program = """
    import logging
    logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
    async def main():
        journal = Journal(path)
        await journal.put("first", sample, Scored(Verdict(score=1)))
        await journal.flush()
        # From here on no file can become longer than the journal's is.
        resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(path + "-wal"), resource.RLIM_INFINITY))
        for n in range(3):
            for m in range(300):
                await journal.put(f"{n}-{m}", sample, Scored(Verdict(score=m, rationale="r" * 3000)))
            try:
                await journal.flush()
            except JournalError as error:
                print("raised", error)
        assert journal.write_errors == 0, journal.write_errors
        assert (await journal.get("first")).score == 1
        assert (await journal.get("2-1")).score == 1
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        await journal.put("last", sample, Scored(Verdict(score=1)))
        await journal.aclose()
    asyncio.run(main())
    """
    with start(program, path) as process:
        output = process.communicate()[0]
        assert process.returncode == 0, output
    lines = output.splitlines()
    assert [line.split()[0] for line in lines].count("ERROR") == 1
    assert [line.split()[0] for line in lines].count("raised") == 3
    assert "outcomes are kept in memory" in lines[0]
    assert str(path) in lines[0]
    assert "free some space" in lines[0]
    expected = ["first", *(f"{n}-{m}" for n in range(3) for m in range(300)), "last"]
    assert [row["key"] for row in rows(path, "key")] == expected


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal that neither waits long for other processes nor tries for long."""
    monkeypatch.setattr("qreward_plugins.journal.database.BUSY_TIMEOUT_S", 0.01)
    monkeypatch.setattr(writer, "FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(writer, "LONGEST_RETRY_S", 0.02)
    monkeypatch.setattr(writer, "CLOSE_WITHIN_S", 0.1)


@pytest.mark.usefixtures("impatient")
async def test_what_cannot_be_written_is_kept_and_written_when_it_can(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        book = Journal(path)
        with locked(path):
            for n in range(3):
                await book.put(f"{n}", SAMPLE, Scored(VERDICT))
                with pytest.raises(
                    JournalError, match=f"{n + 1} outcomes are not recorded yet: another process has locked"
                ):
                    await book.flush()
            assert await book.get("0") is not None
        # Nobody asks for it: it is tried again by itself.
        await asyncio.to_thread(until, lambda: len(rows(path)) == 3)
        await book.flush()
        assert not book._writer._verdicts
        await book.put("3", SAMPLE, Scored(VERDICT))
        await book.aclose()
        assert book.write_errors == 0
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert "outcomes are kept in memory and retried" in caplog.messages[0]
    assert "can be written again" in caplog.messages[1]
    assert [row["key"] for row in rows(path)] == ["0", "1", "2", "3"]


@pytest.mark.usefixtures("impatient")
async def test_what_is_lost_when_a_journal_closes_is_counted_and_said(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        book = Journal(path)
        with locked(path):
            await book.put("a", SAMPLE, Scored(VERDICT))
            await book.put("b", SAMPLE, Scored(VERDICT))
            lost = "2 outcomes were not recorded: another process has locked .* asks and pays for their verdicts again"
            with pytest.raises(JournalError, match=lost):
                await book.aclose()
        await book.aclose()
        assert book.write_errors == 2
    assert [message.startswith("2 outcomes were not recorded") for message in caplog.messages] == [False, True]
    assert not threads()


@pytest.mark.usefixtures("impatient")
async def test_memory_is_bounded_and_nobody_waits_while_the_file_cannot_be_written(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(journal, "ROOM", 4)
    monkeypatch.setattr(writer, "KEPT_CHARS", 20_000)

    with caplog.at_level(logging.ERROR):
        book = Journal(path)
        with locked(path):
            await book.put("first", SAMPLE, Scored(VERDICT))
            with pytest.raises(JournalError, match="not recorded yet"):
                await book.flush()
            for n in range(200):
                await book.put(f"{n}", SAMPLE, Scored(VERDICT))
            kept = len(book._writer._rows)
            assert 10 < kept < 40
            assert book.write_errors == 201 - kept
        with pytest.raises(JournalError, match=f"{201 - kept} outcomes were not recorded"):
            await book.aclose()
        assert len(rows(path)) == kept
    assert len(caplog.records) == 2


def refusal(path: Path | str) -> str:
    before = threads()
    with pytest.raises(JournalError) as caught:
        Journal(path)
    assert threads() == before
    assert str(path) in str(caught.value)
    assert caught.value.__cause__ is None
    return str(caught.value)


def test_files_that_are_no_journal(path: Path, tmp_path: Path) -> None:
    path.write_bytes(b"sources:\n" * 500)
    assert "is not a journal; name another file" in refusal(path)
    assert path.read_bytes() == b"sources:\n" * 500

    other = tmp_path / "other.sqlite"
    with closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE things (id)")
    before = other.read_bytes()
    assert "database of another program" in refusal(other)
    assert other.read_bytes() == before

    assert "check that its directory exists" in refusal(tmp_path / "absent" / "journal.sqlite")
    assert "check that its directory exists" in refusal(tmp_path)
    assert "local disk" in refusal(":memory:")
    assert "failed" in refusal("a\0b")


def test_a_damaged_journal(path: Path) -> None:
    written(path, 2000)
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * len(content[4096:])
    path.write_bytes(content)
    assert "is damaged; move it away" in refusal(path)


@pytest.mark.parametrize("version", [1, 7, 9])
def test_a_journal_of_another_version_is_refused_and_left_as_it_is(path: Path, version: int) -> None:
    written(path, 1)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    before = path.read_bytes()
    said = refusal(path)
    assert f"has schema version {version}, and this version of qreward-plugins uses version 8; move the file" in said
    with pytest.raises(JournalError, match=f"has schema version {version}"), reading(str(path)):
        pass
    assert path.read_bytes() == before


def test_a_journal_that_may_not_be_written() -> None:
    program = """
    if os.geteuid() == 0:
        os.seteuid(65534)
    try:
        Journal(path)
    except JournalError as error:
        print(error)
    """
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "journal.sqlite")
        written(path, 1)
        path.chmod(0o444)
        Path(directory).chmod(0o555)
        for target in (path, Path(directory, "new.sqlite")):
            with start(program, target) as process:
                output = process.communicate()[0]
            assert str(target) in output
            assert "check" in output
        Path(directory).chmod(0o755)


def test_a_locked_journal_is_refused_in_words(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qreward_plugins.journal.database.BUSY_TIMEOUT_S", 0.01)
    written(path, 1)
    with locked(path):
        assert "another process has locked the journal" in refusal(path)
