"""Texts. Streams: pieces as they come, failover before the first piece, an error after it, and nothing left behind.
Whole texts: retried as any call. Verdicts that are streamed.
"""

from __future__ import annotations

import asyncio
import functools
import math
import pickle
from dataclasses import replace

import pytest

from qreward_plugins import EngineError, RewardEngine, Sample, TextAnswer, TextFailed, TransientError, Usage, Verdict
from qreward_plugins.errors import PermanentError, Throttled
from qreward_plugins.judges import AskingConfig, Judge, text_call
from qreward_plugins.simulation import SimulatedSource
from qreward_plugins.sources import TEXT as A_TEXT
from qreward_plugins.sources import Reply
from qreward_plugins.testing import Faults, JudgeServer

from ..kit import Stage, each_of, make_config, make_samples, now

pytestmark = pytest.mark.anyio

ASKED = [{"role": "user", "content": "Why?"}]
WORDS = ["one ", "two ", "three ", "four ", "five"]
TEXT = "".join(WORDS)


class StreamingSource(SimulatedSource):
    """Sends `WORDS`, one in each second. `fails` has the error of each attempt by its number, with the pieces before
    it; "hang" instead of an error never ends.
    """

    def __init__(self, name, *, fails=None, streams=True, gap_s=1.0, **settings):
        usage = Usage(7, 5)
        super().__init__(name, answer=lambda request: Reply(text=TEXT, usage=usage, finish_reason="stop"), **settings)
        self.fails = fails or {}
        self.streams = streams
        self.gap_s = gap_s
        self.requests = []

    async def send(self, request, *, on_sent):
        number = len(self.requests)
        self.requests.append(replace(request, on_text=None))
        on_sent()
        after, error = self.fails.get(number, (len(WORDS), None))
        self.in_flight += 1
        try:
            for place, piece in enumerate(WORDS[:after]):
                await asyncio.sleep(self.gap_s if place else min(1.0, self.gap_s))
                if self.streams:
                    request.on_text(piece)
            if error == "hang":
                await asyncio.sleep(1e5)
            elif error is not None:
                await asyncio.sleep(0)
                raise error
            return self.answer(request)
        finally:
            self.in_flight -= 1


quiet = functools.partial(StreamingSource, streams=False)


def in_engine(main, *sources, judge=None, **limits):
    """Run `main(engine)` in virtual time, and check that it leaves nothing."""

    async def whole(engine):
        result = await main(engine)
        await asyncio.sleep(0.001)
        assert engine.statistics().waiting == 0
        assert all(upstream.quota.in_flight == 0 for upstream in engine.upstreams.values())
        assert all(source.in_flight == 0 for source in sources)
        return result

    names = [source.name for source in sources]
    tree = make_config(names, total_s=60, judge=judge, limits=dict.fromkeys(names, limits))
    return Stage(dict(zip(names, sources, strict=True)), tree=tree).run(whole)


async def read(stream):
    """The pieces, and the error that ended them."""
    pieces = []
    try:
        async for piece in stream:
            pieces.append(piece)
    except TextFailed as error:
        return pieces, error
    return pieces, None


def test_pieces_come_when_the_source_sends_them():
    async def main(engine):
        began_at, came = now(), []
        async for piece in engine.stream_text("a", ASKED):
            came.append((piece, now() - began_at))
        assert [piece for piece, _ in came] == WORDS
        assert [at for _, at in came] == pytest.approx([1, 2, 3, 4, 5], abs=0.1)

    source = StreamingSource("a")
    in_engine(main, source)
    [request] = source.requests
    assert (request.messages, request.parameters) == (tuple(ASKED), {"max_tokens": 1024})


@pytest.mark.parametrize(
    "error", [TransientError("broken"), Throttled("wait", retry_after_s=3.0), PermanentError("no", status=400)]
)
def test_before_the_first_piece_another_source_is_asked(error):
    a, b = StreamingSource("a", fails={0: (0, error), 1: (0, error)}), StreamingSource("b")

    async def main(engine):
        *pieces, (_, answer) = [item async for item in engine.stream_texts(["a", "b"], [ASKED])]
        assert [piece for _, piece in pieces] == WORDS
        return answer

    answer = in_engine(main, a, b)
    assert answer.source == "b" if a.requests else answer.spent.attempts == 1
    assert answer.spent.attempts == len(a.requests) + len(b.requests)


@pytest.mark.parametrize("error", [TransientError("reset"), ZeroDivisionError("a bug")], ids=str)
def test_after_the_first_piece_an_error_ends_the_stream_and_nothing_is_sent_again(error):
    a, b = StreamingSource("a", fails={0: (2, error)}), StreamingSource("b")

    async def main(engine):
        # The first attempt goes to a.
        engine.upstreams["b"].breaker.trip(0.0)
        found = await read(engine.stream_text(["a", "b"], ASKED))
        await asyncio.sleep(600)
        return found

    pieces, failed = in_engine(main, a, b)
    assert pieces == WORDS[:2]
    assert (failed.reason, failed.text, failed.source, failed.spent.attempts) == ("broken", "one two ", "a", 1)
    assert failed.text not in str(failed) + repr(failed)
    assert (len(a.requests), len(b.requests)) == (1, 0)
    copy = pickle.loads(pickle.dumps(failed))
    assert (str(copy), copy.text, copy.spent) == (str(failed), failed.text, failed.spent)


@pytest.mark.parametrize("fails", [{}, {0: (2, "hang")}])
def test_the_deadline_ends_the_stream_with_the_text_so_far(fails):
    async def main(engine):
        pieces, failed = await read(engine.stream_text("a", ASKED, deadline_s=2.5))
        assert now() == pytest.approx(2.5, abs=0.1)
        return pieces, failed

    pieces, failed = in_engine(main, StreamingSource("a", fails=fails))
    assert (pieces, failed.reason, failed.text) == (WORDS[:2], "deadline", "one two ")


@pytest.mark.parametrize("way", ["aclose", "break", "cancel"])
@pytest.mark.parametrize("after", [0, 2])
def test_leaving_early_frees_everything_at_once(way, after):
    source = StreamingSource("a")

    async def main(engine):
        stream = engine.stream_text("a", ASKED)
        for _ in range(after):
            await anext(stream)
        if way == "aclose":
            await stream.aclose()
            await stream.aclose()
            assert await read(stream) == ([], None)
        elif way == "break":
            async for _ in stream:
                break
            del stream  # nobody holds it any more
        else:
            task = asyncio.ensure_future(read(stream))
            await asyncio.sleep(0.5)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await asyncio.sleep(0.001)
        assert source.in_flight == engine.upstreams["a"].quota.in_flight == 0

    in_engine(main, source)


def test_closing_the_engine_ends_streams():
    async def main(engine):
        reading = asyncio.ensure_future(read(engine.stream_text("a", ASKED)))
        await asyncio.sleep(2.5)
        await engine.aclose()
        return await reading

    pieces, failed = in_engine(main, StreamingSource("a"))
    assert (pieces, failed.reason) == (WORDS[:2], "closed")


def test_long_streams_are_neither_hedged_nor_given_up_nor_silence():
    """Also where all earlier answers were quick."""
    a, b = StreamingSource("a", gap_s=0.01), StreamingSource("b", gap_s=0.01)

    async def main(engine):
        for _ in range(30):
            await read(engine.stream_text(["a", "b"], ASKED))
        sent = len(a.requests) + len(b.requests)
        a.gap_s = b.gap_s = 8.0
        found = await asyncio.gather(*(read(engine.stream_text(["a", "b"], ASKED, deadline_s=1000)) for _ in range(30)))
        assert found == [(WORDS, None)] * 30
        assert len(a.requests) + len(b.requests) == sent + 30
        assert all(upstream.breaker.closed for upstream in engine.upstreams.values())

    in_engine(main, a, b)


def test_a_source_that_does_not_stream_gives_its_text_as_one_piece_and_what_is_not_read_is_joined():
    async def main(engine):
        assert await read(engine.stream_text("a", ASKED)) == ([TEXT], None)
        stream = engine.stream_text("b", ASKED)
        assert await anext(stream) == "one "
        await asyncio.sleep(60)
        assert await read(stream) == (["two three four five"], None)

    in_engine(main, quiet("a"), StreamingSource("b"))


# Several streams at once


def test_several_streams_come_interleaved_and_an_error_touches_only_its_own():
    source = StreamingSource("a", fails={1: (2, TransientError("reset"))})

    async def main(engine):
        items, order = {0: [], 1: [], 2: [], 3: []}, []
        conversations = [ASKED, ASKED, ASKED, [{"role": "user"}]]
        async for number, item in engine.stream_texts("a", conversations):
            items[number].append(item)
            order.append(number)
        return items, order

    items, order = in_engine(main, source)
    for number in (0, 2):
        *pieces, answer = items[number]
        assert pieces == WORDS
        assert isinstance(answer, TextAnswer)
        assert answer.text == TEXT
    *pieces, failed = items[1]
    assert (pieces, failed.reason, failed.text) == (WORDS[:2], "broken", "one two ")
    [unread] = items[3]
    assert (unread.reason, "messages[0]" in str(unread)) == ("input", True)
    assert (order[0], sorted(order[1:4])) == (3, [0, 1, 2])


# Whole texts


def test_a_whole_text_is_asked_for_again_whenever_it_breaks_off():
    a = quiet("a", fails={0: (3, TransientError("reset")), 1: (4, Throttled("wait", retry_after_s=3.0))})
    answer = in_engine(lambda engine: engine.complete("a", ASKED, parameters={"max_tokens": 7}), a)
    assert (answer.text, answer.source, answer.finish_reason) == (TEXT, "a", "stop")
    assert answer.spent.attempts == len(a.requests) == 3
    assert [request.parameters for request in a.requests] == [{"max_tokens": 7}] * 3


def test_whole_texts_are_in_order_and_an_error_touches_only_its_own():
    async def main(engine):
        texts = await engine.complete_all("a", [ASKED, [], ASKED, "Why?"])
        assert await engine.complete_all("a", []) == []
        with pytest.raises(TextFailed, match="at least one message"):
            await engine.complete("a", [])
        return texts

    a = quiet("a")
    texts = in_engine(main, a, concurrency=1)
    assert [getattr(text, "reason", text.text) for text in texts] == [TEXT, "input", TEXT, "input"]
    assert len(a.requests) == 2


class Second(Judge):
    """The length of a second text, whose question is the first one."""

    Config = AskingConfig
    asks = A_TEXT

    def __init__(self, name, config, opening):
        super().__init__(name)
        self._sources = opening.sources

    async def judge(self, sample, ask):
        first = await ask(text_call(self._sources, ASKED, name=self.name, sample=sample))
        second = [{"role": "user", "content": first.value.text}]
        answer = await ask(text_call(self._sources, second, {"max_tokens": 3}, name=self.name, sample=sample))
        return Verdict(len(answer.value.text) / 100, judge=self.name, source=answer.source)


def test_a_judge_of_ones_own_asks_for_texts():
    a = quiet("a", fails={0: (3, TransientError("reset"))})
    outcome = in_engine(lambda engine: engine.score(Sample(ASKED, "r")), a, judge={"kind": f"{__name__}:Second"})
    assert (outcome.reward, outcome.verdict.attempts) == (len(TEXT) / 100, 3)
    assert [request.messages[0]["content"] for request in a.requests] == ["Why?", "Why?", TEXT]
    assert [request.parameters["max_tokens"] for request in a.requests] == [1024, 1024, 3]


# Wrong input


@each_of(
    ("given", "error", "says"),
    [
        ({"sources": "b"}, EngineError, "unknown source 'b'; sources: a"),
        ({"sources": []}, ValueError, "at least one source"),
        ({"parameters": {"stream": True}}, ValueError, "parameters.stream"),
        ({"parameters": {"temperature": float("nan")}}, ValueError, "parameters.temperature: it is NaN"),
        ({"deadline_s": -1}, ValueError, "deadline_s"),
    ],
)
def test_wrong_arguments_are_refused(given, error, says):
    async def main(engine):
        with pytest.raises(error, match=says):
            await anext(engine.stream_text(**{"sources": "a", "messages": ASKED, **given}))

    in_engine(main, StreamingSource("a"))


async def test_a_closed_engine_and_a_function_are_refused():
    source = {"kind": "function", "function": "builtins:dict"}
    async with RewardEngine({"sources": {"f": source}, "judges": {"q": {"kind": "function"}}}) as engine:
        with pytest.raises(EngineError, match="'f' gives no text"):
            await anext(engine.stream_text("f", ASKED))
    with pytest.raises(EngineError, match="closed"):
        await anext(engine.stream_text("f", ASKED))


# Over real connections


@pytest.mark.parametrize(
    ("dialect", "client"),
    [("openai", "aiohttp"), ("anthropic", "httpx"), ("gemini", "aiohttp"), ("responses", "httpx")],
)
async def test_over_http_the_pieces_are_the_text(client, dialect):
    text = '{"rationale": "fine", "score": 5}' + " and on" * 20
    node = {"client": client, "dialect": dialect, "stream": True, "api_key": "sk-test-0123456789abcdefghij"}
    with JudgeServer(lambda call: text, stream_interval_s=0.005) as server:
        async with RewardEngine(make_config({"a": server}, source=node)) as engine:
            pieces, answers = [], []
            async for _, item in engine.stream_texts("a", [ASKED] * 3, parameters={"max_tokens": 900}):
                (answers if isinstance(item, TextAnswer) else pieces).append(item)
    assert len(pieces) > 15
    assert [answer.text for answer in answers] == [text] * 3
    assert all(answer.spent.usage.completion_tokens > 5 for answer in answers)
    assert all(answer.first_token_s is not None for answer in answers)


async def test_over_http_a_text_without_end_is_passed_on_up_to_the_bound():
    node = {"stream": True, "max_reply_bytes": 20_000}
    faults = Faults(script=["stream_endless"])
    with JudgeServer(lambda call: "word " * 40, faults=faults, stream_interval_s=0.005) as server:
        async with RewardEngine(make_config({"a": server}, source=node)) as engine:
            pieces, failed = await read(engine.stream_text("a", ASKED))
    assert "text larger than" in str(failed)
    assert failed.text == "".join(pieces) != ""
    assert len(failed.text) <= 20_000


# Judges over sources that stream


async def judged(server, count=20, **source):
    async with RewardEngine(make_config({"a": server}, source={"stream": True, **source})) as engine:
        return await engine.score_all(make_samples(count)), engine.statistics().sources["a"]


async def test_verdicts_are_those_without_a_stream():
    with JudgeServer() as server:
        streamed, source = await judged(server)
        plain, whole = await judged(server, stream=False)
    assert [outcome.reward for outcome in streamed] == [outcome.reward for outcome in plain]
    assert [outcome.verdict.spent.usage for outcome in streamed] == [outcome.verdict.spent.usage for outcome in plain]
    assert 0 < source.first_token_p50_s <= source.latency_p95_s
    assert math.isnan(whole.first_token_p50_s)
