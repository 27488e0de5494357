"""Judge servers, configurations and rollouts for the commands, which run in this process or in one of their own."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from qreward_plugins.cli.app import app
from qreward_plugins.testing import JudgeServer

from ..kit import Program, no_thread_left  # noqa: F401 -- holds for each test


def score_of(call: Any) -> float | str:
    """1 for a response with the reference in it, else 0; no verdict at all for one that says BAD."""
    response = call.blocks["response"]
    return "I would rather not." if "BAD" in response else float(call.blocks.get("reference", "?") in response)


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with JudgeServer(score_of) as judge:
        yield judge


@pytest.fixture
def run_cli():
    """Run a command in this process. No command may end with a traceback, or with an exception of its own."""

    def run(*arguments: object):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="qreward")
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert "Traceback" not in result.output
        return result

    return run


def exited(result: Any, code: int = 0) -> Any:
    """The result of a command, which must end with this exit code."""
    assert result.exit_code == code, result.output
    return result


def refusal(result: Any) -> str:
    """What a command says that refuses something, on one line."""
    return " ".join(exited(result, 2).stderr.split())


@pytest.fixture
def stop_cli(run_cli):
    """Run a command in this process, and send it a signal once `ready` has returned."""

    def run(ready, *arguments: object, number: int = signal.SIGINT):
        def stop() -> None:
            try:
                ready()
            finally:
                # A command that has ended has put these back, and the signal would end the tests.
                if signal.getsignal(number) not in (signal.SIG_DFL, signal.default_int_handler):
                    os.kill(os.getpid(), number)

        with ThreadPoolExecutor(1) as pool:
            stopping = pool.submit(stop)
            result = run_cli(*arguments)
            stopping.result(timeout=30)
        return result

    return run


@pytest.fixture
def port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        return unused.getsockname()[1]


def reached(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=30):
        return True
    return False


@pytest.fixture
def start_cli(tmp_path):
    """Start a command in a process of its own."""
    started: list[Program] = []

    def start(*arguments: object, **options: Any) -> Program:
        started.append(Program("-m", "qreward_plugins.cli", *arguments, cwd=tmp_path, **options))
        return started[-1]

    yield start
    for process in started:
        process.clean_up()


@pytest.fixture
def write_config(tmp_path):
    """Write a configuration with one LLM judge over the servers given by name, and return its path."""

    def write(servers=None, *, judge=None, name="config.yaml", source=None, **top: Any) -> Path:
        sources = {
            source_name: {"kind": "openai", "base_url": url(judge_server), "model": "judge", **(source or {})}
            for source_name, judge_server in (servers or {}).items()
        }
        judges = {"quality": {"kind": "llm", "score_range": [0, 1], "invalid_retries": 0, **(judge or {})}}
        path = tmp_path / name
        path.write_text(yaml.safe_dump({"sources": sources, "judges": judges, **top}, sort_keys=False))
        return path

    def url(judge_server: Any) -> str:
        return judge_server if isinstance(judge_server, str) else judge_server.base_url

    return write


@pytest.fixture
def row():
    """Make a row. All are of one length: the scheduler takes long ones first."""

    def make(number: int, **columns: Any) -> dict[str, Any]:
        message = {"role": "user", "content": f"What is {number:03} plus 1?"}
        said = {"response": f"It is {number + 1:03}.", "ground_truth": f"{number + 1:03}"}
        return {"messages": [message], **said, "data_source": "test/add", "number": number, **columns}

    return make


@pytest.fixture
def write_rows(tmp_path):
    """Write rows to a JSONL file, `in.jsonl` by default, and return its path."""

    def write(rows, name: str = "in.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in rows))
        return path

    return write


@pytest.fixture
def read_rows():
    def read(path: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in path.read_bytes().splitlines()]

    return read


def verdicts_in(journal: Path) -> int:
    """How many verdicts a journal holds that were paid for."""
    query = "SELECT count(*) FROM outcomes WHERE outcome = 'scored' AND cached = 0 AND attempts"
    with suppress(sqlite3.OperationalError), closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as book:
        return book.execute(query).fetchone()[0]
    return 0  # it is being made
