"""Connections of engines (`engine.server`): one WebSocket each, over which samples come and outcomes go.

The first frame of the server holds its facts (`remote.facts`); it is repeated when the configuration changes. A frame
of the engine submits samples (`ids`, `samples`, `deadline_s` or null for none, `priority`, `together`), cancels some
(`cancel`), or asks how many may come (`room`: `samples`, `deadline_s`). Frames of the server hold outcomes, put samples
off, or say how many may come (`room`). The samples of a connection that ends are cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import orjson
from aiohttp import WSCloseCode, WSMsgType, web

from ..client.facts import ServerFacts
from ..engine import RewardEngine
from ..errors import EngineError, InputError
from ..samples import Cause, Failed, Outcome, Sample
from .admission import CLOSED_RETRY_S, Admission
from .fingerprint import fingerprint_of
from .forms import ScoreForm, result_of
from .replies import Refused

_log = logging.getLogger("qreward_plugins.server")

HEARTBEAT_S = 20.0
FULL_RETRY_S = 1.0
"""Most seconds until an engine whose samples a full server did not take asks for room."""
BYTES_A_FRAME = 4 * 2**20
"""Size of a frame of outcomes, beyond which the next one begins."""
_FORM = ScoreForm()
_NO_SAMPLE = Sample((), "")


class Engines:
    """All connections of engines to one server. `max_bytes`: size of the largest frame."""

    def __init__(self, engine: RewardEngine, admission: Admission, *, max_bytes: int) -> None:
        self.engine = engine
        self.admission = admission
        self.max_bytes = max_bytes
        self._facts: tuple[object, ServerFacts] | None = None
        self._open: dict[_Connection, None] = {}

    def facts(self) -> ServerFacts:
        """Return the facts of the server as it is now."""
        config = self.engine.config
        if self._facts is None or self._facts[0] is not config:
            known = self.engine.facts()
            facts = ServerFacts(
                fingerprint_of(config),
                known.components,
                known.defines_correct,
                config.engine.deadline_s,
                self.engine.stream_window,
                self.max_bytes,
            )
            self._facts = config, facts
        return self._facts[1]

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        """Serve one connection until it ends."""
        socket = web.WebSocketResponse(heartbeat=HEARTBEAT_S, max_msg_size=self.max_bytes, compress=False)
        await socket.prepare(request)
        connection = _Connection(self, socket)
        self._open[connection] = None
        try:
            await connection.serve()
        finally:
            del self._open[connection]
        return socket

    async def aclose(self) -> None:
        """Send what is left to send, and end all connections."""
        await asyncio.gather(*(connection.aclose() for connection in list(self._open)))


class _Connection:
    def __init__(self, engines: Engines, socket: web.WebSocketResponse) -> None:
        self._engines = engines
        self._engine = engines.engine
        self._admission = engines.admission
        self._socket = socket
        self._futures: dict[int, asyncio.Future[Outcome]] = {}
        self._submitting: dict[int, bool] = {}
        """Samples that have no future yet, and whether their engine has cancelled them."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: list[bytes] = []
        self._some = asyncio.Event()
        self._sent_facts: ServerFacts | None = None

    async def serve(self) -> None:
        sending = asyncio.get_running_loop().create_task(self._send_outcomes())
        try:
            await self._send_facts()
            async for message in self._socket:
                if message.type is WSMsgType.TEXT:
                    await self._take(message.data)
        except ConnectionError:
            _log.debug("an engine broke its connection")
        finally:
            sending.cancel()
            for future in list(self._futures.values()):
                future.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(sending, *self._tasks, return_exceptions=True)

    async def aclose(self) -> None:
        try:
            await self._flush()
        except ConnectionError:
            return
        await self._socket.close(code=WSCloseCode.GOING_AWAY, message=b"the server stops")

    async def _take(self, text: str) -> None:
        try:
            frame = orjson.loads(text)
            if "cancel" in frame:
                for number in frame["cancel"]:
                    if number in self._submitting:
                        self._submitting[number] = True
                    elif (future := self._futures.get(number)) is not None:
                        future.cancel()
                return
            if "room" in frame:
                await self._tell_room(frame["room"])
                return
            ids, rows = frame["ids"], frame["samples"]
            if not (isinstance(ids, list) and isinstance(rows, list) and len(ids) == len(rows)):
                raise TypeError("ids and samples")
            if not all(type(number) is int for number in ids):
                raise TypeError("ids")
            deadline_s, priority, together = frame["deadline_s"], frame["priority"], bool(frame["together"])
        except (orjson.JSONDecodeError, LookupError, TypeError, InputError):
            await self._socket.close(code=WSCloseCode.UNSUPPORTED_DATA, message=b"a frame cannot be read")
            return
        await self._send_facts()
        try:
            terms = _FORM.read({"samples": [], "deadline_s": deadline_s, "priority": priority})
        except InputError as error:
            await self._put_off(ids, 422, str(error), 0.0)
            return
        deadline_s = math.inf if terms.deadline_s is None else terms.deadline_s
        read = self._read(ids, rows)
        if not read:
            return
        try:
            # Several frames may be one batch, so what is too much waits, and not the whole frame.
            room = self._admission.admit_some(len(read), deadline_s)
        except Refused as refused:
            # Callers of the forms get an estimate: half a minute until there are outcomes.
            after_s = min(refused.retry_after_s or FULL_RETRY_S, FULL_RETRY_S)
            await self._put_off(list(read), refused.status, refused.detail, after_s)
            return
        numbers = list(read)
        if room < len(numbers):
            full = f"{self._admission.under_way:,} samples are under way"
            await self._put_off(numbers[room:], 429, full, FULL_RETRY_S)
        taken = {number: read[number] for number in numbers[:room]}
        self._submitting.update(dict.fromkeys(taken, False))
        task = asyncio.get_running_loop().create_task(self._submit(taken, deadline_s, terms.priority, together))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell_room(self, asked: Mapping[str, Any]) -> None:
        """Say how many of the samples that were put off may come. Raises TypeError, LookupError and InputError."""
        samples = asked["samples"]
        if type(samples) is not int or samples < 1:
            raise TypeError("samples")
        terms = _FORM.read({"samples": [], "deadline_s": asked["deadline_s"]})
        deadline_s = math.inf if terms.deadline_s is None else terms.deadline_s
        await self._send({"room": self._admission.room(samples, deadline_s)})

    def _read(self, ids: Sequence[int], rows: Sequence[Any]) -> dict[int, Sample]:
        """Return the samples of rows. A row that cannot be read is a failure of its own."""
        read: dict[int, Sample] = {}
        for number, row in zip(ids, rows, strict=True):
            try:
                sample = _FORM.sample(row, "the sample", "")
                # A service may be sent the id, so no other one may take the place of none.
                read[number] = sample if row.get("id") is not None else replace(sample, id=None)
            except InputError as error:
                self._tell(number, result_of(_NO_SAMPLE, Failed(Cause.INFRA, "input", str(error))))
        return read

    async def _submit(
        self, given: Mapping[int, Sample], deadline_s: float, priority: int | None, together: bool
    ) -> None:
        ids, samples = list(given), list(given.values())
        futures: Sequence[asyncio.Future[Outcome]] = []
        problem = ""
        try:
            if together:
                futures = await self._engine.score_each(samples, deadline_s=deadline_s, priority=priority)
            else:
                score = partial(self._engine.score, deadline_s=deadline_s, priority=priority)
                futures = [asyncio.ensure_future(score(sample)) for sample in samples]
        except EngineError as error:
            problem = str(error)
        except Exception as error:
            _log.exception("samples could not be submitted")
            problem = f"unexpected {type(error).__name__}; see the server's log"
        finally:
            if len(futures) != len(ids):
                self._admission.left(len(ids))
                for number in ids:
                    self._submitting.pop(number, None)
        if problem:
            await self._put_off(ids, 503, problem, CLOSED_RETRY_S)
            return
        for number, sample, future in zip(ids, samples, futures, strict=True):
            self._futures[number] = future
            future.add_done_callback(partial(self._done, number, sample))
            if self._submitting.pop(number, False):
                future.cancel()

    def _done(self, number: int, sample: Sample, future: asyncio.Future[Outcome]) -> None:
        if self._futures.get(number) is future:
            del self._futures[number]
        if future.cancelled():
            self._admission.left(1)
            return
        error = future.exception()
        if error is not None:
            self._admission.left(1)
            _log.error("a sample could not be scored", exc_info=error)
            # Without a word its engine would wait until the deadline.
            row = _failed_row(sample, error)
        else:
            self._admission.ended(1)
            row = result_of(sample, future.result())
        self._tell(number, row)

    def _tell(self, number: int, row: Mapping[str, Any]) -> None:
        self._ended.append(orjson.dumps({**row, "id": number}))
        self._some.set()

    async def _send_outcomes(self) -> None:
        try:
            while True:
                await self._some.wait()
                await self._flush()
        except ConnectionError:
            await self._socket.close()

    async def _flush(self) -> None:
        self._some.clear()
        rows, self._ended = self._ended, []
        for part in _frames(rows):
            await self._send({"outcomes": [orjson.Fragment(row) for row in part]})

    async def _put_off(self, ids: Sequence[int], status: int, detail: str, after_s: float) -> None:
        await self._send({"put_off": {"ids": ids, "status": status, "detail": detail, "after_s": after_s}})

    async def _send_facts(self) -> None:
        facts = self._engines.facts()
        if facts is not self._sent_facts:
            self._sent_facts = facts
            await self._send({"facts": facts.as_row()})

    async def _send(self, frame: Mapping[str, Any]) -> None:
        await self._socket.send_frame(orjson.dumps(frame), WSMsgType.TEXT)


def _frames(rows: Sequence[bytes]) -> Iterator[list[bytes]]:
    """Split rows, because the engine reads no frame without a limit."""
    part: list[bytes] = []
    size = 0
    for row in rows:
        if part and size + len(row) > BYTES_A_FRAME:
            yield part
            part, size = [], 0
        part.append(row)
        size += len(row)
    if part:
        yield part


def _failed_row(sample: Sample, error: BaseException) -> dict[str, Any]:
    reason = "closed" if isinstance(error, EngineError) else "bug"
    return result_of(sample, Failed(Cause.INFRA, reason, f"the server's engine raised {type(error).__name__}"))
