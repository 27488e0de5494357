"""The judge server in its own process, for benchmarks, so that its CPU time is not measured with the client's."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import TYPE_CHECKING, TypedDict

from .faults import Faults, Latency
from .judge_calls import overlap_score
from .judge_handler import Scorer
from .judge_server import JudgeServer, JudgeServerError
from .limits import ServerLimits
from .report import Report
from .routes import SCORE_PATH

if TYPE_CHECKING:
    from typing_extensions import Unpack

_START_TIMEOUT_S = 60.0
_JOIN_TIMEOUT_S = 10.0


class Settings(TypedDict, total=False):
    """The keyword arguments of `JudgeServer`."""

    limits: ServerLimits | None
    latency: Latency | None
    faults: Faults | None
    models: Sequence[str]
    api_key: str | None
    seed: int
    host: str
    port: int


class JudgeServerProcess:
    """A `JudgeServer` in a spawned process, with the same arguments. All must be picklable, so `score` must be a
    module-level function.

    `with` starts and stops it. Raises `JudgeServerError` if the server cannot start or its process has died. The
    process ends with its parent.
    """

    def __init__(self, score: Scorer = overlap_score, **settings: Unpack[Settings]) -> None:
        self._score = score
        self._settings = settings
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None
        self._base_url: str | None = None

    @property
    def base_url(self) -> str:
        """The address for OpenAI clients. Raises `JudgeServerError` before the first start."""
        if self._base_url is None:
            raise JudgeServerError("this judge server has no port yet: start() it first")
        return self._base_url

    @property
    def root_url(self) -> str:
        """The address for reward models. Raises like `base_url`."""
        return self.base_url.removesuffix("/v1")

    @property
    def score_url(self) -> str:
        """The address for scoring requests. Raises like `base_url`."""
        return self.root_url + SCORE_PATH

    @property
    def pid(self) -> int:
        """The process id, to stop or kill it. Raises `JudgeServerError` if it does not run."""
        if self._process is None or self._process.pid is None:
            raise JudgeServerError("the judge server's process is not running: start() it first")
        return self._process.pid

    def start(self) -> None:
        """Spawn the process and return once connections are accepted. Does nothing if it runs."""
        if self._process is not None:
            return
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(theirs, self._score, self._settings), daemon=True)
        try:
            self._process.start()
            theirs.close()
            self._base_url = str(self._receive(_START_TIMEOUT_S))
        except BaseException:
            theirs.close()
            self._end()
            raise

    def report(self) -> Report:
        """A snapshot of the server's counts."""
        if self._pipe is None:
            raise JudgeServerError("the judge server's process is not running: start() it first")
        self._send("report")
        report = self._receive(_START_TIMEOUT_S)
        assert isinstance(report, Report)
        return report

    def stop(self) -> None:
        """Stop the server and its process. Idempotent."""
        if self._process is not None:
            self._end()

    def __enter__(self) -> JudgeServerProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _send(self, command: str) -> None:
        assert self._pipe is not None
        try:
            self._pipe.send(command)
        except OSError as error:
            raise JudgeServerError("the process of the judge server has died") from error

    def _receive(self, timeout_s: float) -> object:
        assert self._pipe is not None
        try:
            if not self._pipe.poll(timeout_s):
                raise JudgeServerError(f"the process of the judge server did not answer within {timeout_s:g} s")
            answer: object = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise JudgeServerError("the process of the judge server has died") from error
        if isinstance(answer, JudgeServerError):
            raise answer
        return answer

    def _end(self) -> None:
        process, pipe = self._process, self._pipe
        self._process = self._pipe = None
        if pipe is not None:
            pipe.close()  # the process stops when its end of the pipe does
        if process is not None and process.pid is not None:
            process.join(_JOIN_TIMEOUT_S)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()


def _main(pipe: Connection, score: Scorer, settings: Settings) -> None:
    # Ctrl-C reaches the whole process group, but the parent decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = JudgeServer(score, **settings)
    try:
        server.start()
    except JudgeServerError as error:
        pipe.send(JudgeServerError(str(error)))
        return
    with server:
        pipe.send(server.base_url)
        while True:
            try:
                pipe.recv()
                pipe.send(server.report())
            except (EOFError, OSError):
                return
