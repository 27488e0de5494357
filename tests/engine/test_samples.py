"""Promises P1 and P2 for samples that hold anything: a broken one is its own failure, by the name of the field, and
what is infinite in float32 is no number of ours.
"""

from __future__ import annotations

import asyncio
import json
import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qreward_plugins import Cause, Cutoff, Failed, RewardEngine, Sample, Scored, Verdict
from qreward_plugins.config import load_config
from qreward_plugins.samples import fits_float32
from qreward_plugins.samples.check import Rejected, read_sample
from qreward_plugins.simulation import SimulatedSource
from qreward_plugins.sources import FunctionSource
from qreward_plugins.sources.http import HTTPReply
from qreward_plugins.sources.service import HTTPSource

from ..kit import each_of, scored_text, takes

pytestmark = pytest.mark.anyio

TREE = {
    "sources": {
        "model": {"kind": "openai", "base_url": "http://a.invalid/v1", "model": "m"},
        "rules": {"kind": "function", "function": "rewards:score"},
        "service": {
            "kind": "http",
            "url": "http://b.invalid/score",
            "body": {"q": "prompt", "r": "response", "label": "ground_truth", "e": "extras", "g": "group_id"},
        },
    },
    "judges": {
        "words": {"kind": "llm", "score_range": [0, 1]},
        "called": {"kind": "function", "sources": ["rules"]},
        "posted": {"kind": "function", "sources": ["service"]},
        "all": {"kind": "sum", "weights": {"words": 1, "called": 1, "posted": 1}},
    },
    "routes": {"words": "words", "called": "called", "posted": "posted", "all": "all"},
    "engine": {"seed": 7, "deadline_s": 60},
}
JUDGES = ("words", "called", "posted", "all")


class Raises:
    """A lazy column whose file is gone."""

    def __str__(self):
        raise ValueError("never shown")

    __repr__ = __len__ = __iter__ = __getitem__ = tolist = item = keys = items = __str__


def cyclic():
    extras = {}
    extras["self"] = [extras]
    return extras


def opened():
    """The sources: a model that answers, a function that is awaited, and a service whose bodies are kept."""

    async def score(data_source, solution_str, ground_truth, extra_info):
        assert type(solution_str) is str
        assert type(data_source) is str
        return 0.5

    async def post(url, body, *, on_sent, max_reply_bytes, streaming=None, headers=None):
        on_sent()
        bodies.append(json.loads(body, parse_constant=pytest.fail))
        return HTTPReply(200, {}, b"0.5")

    bodies = []
    config = load_config(TREE)
    service = HTTPSource("service", config.sources["service"])
    service._http.post = post
    return bodies, {
        "model": SimulatedSource("model", behaviour=takes(0.0), answer=lambda request: scored_text(request, 0.5)),
        "rules": FunctionSource("rules", config.sources["rules"], loader=lambda: score),
        "service": service,
    }


def good(judge="called", **given):
    values = {"messages": [{"role": "user", "content": "2 + 2?"}], "response": "4", "ground_truth": "4"}
    return Sample(**{**values, "data_source": judge, **given})


async def scored_all(samples, **how):
    """The outcomes, and the bodies that the service got. In real time: bodies with images are written in threads."""
    bodies, sources = opened()
    async with RewardEngine(TREE, sources=sources) as engine:
        return await engine.score_all(samples, **how), bodies


BROKEN = {
    "response": [None, b"bytes", 4, ["4"], float("nan"), Raises()],
    "data_source": [None, 7, b"math", Raises(), ["math"]],
    "messages": [
        *(None, [], "2 + 2?", b"2 + 2?", 7, {"role": "user", "content": "2 + 2?"}),
        *([None], ["2 + 2?"], [{"from": "human", "value": "2 + 2?"}], [{"role": "user"}], [{"content": "2 + 2?"}]),
        *([{"role": "user", "content": content}] for content in (None, {"text": "2 + 2?"}, 7, [7], Raises())),
        *([{"role": None, "content": "2 + 2?"}], Raises(), [Raises()]),
    ],
    "step": [float("nan"), 1.5, "3", True, 2**70, Raises()],
    "split": ["test", 1, ["train"], Raises()],
    "group_id": [["unhashable"], {"a": 1}, Raises(), 10**5000, 1.5],
    "id": [["unhashable"], Raises(), 10**5000],
    "extras": [None, "level", [1], Raises()],
}


@pytest.mark.parametrize("judge", ["words", "all"])
@pytest.mark.parametrize("field", BROKEN)
async def test_a_field_that_holds_something_else_is_that_samples_failure(field, judge):
    broken = [good(**{"data_source": judge, field: value}) for value in BROKEN[field]]
    (first, *failed, last), _ = await scored_all([good(judge), *broken, good(judge)], cutoff=Cutoff(50, quorum=0.9))
    assert [type(outcome) for outcome in (first, last)] == [Scored, Scored]
    for outcome in failed:
        assert outcome.label == "infra/input"
        assert field in outcome.detail
        assert "never shown" not in outcome.detail


async def test_what_is_no_sample_is_a_failure_of_its_own_however_it_is_handed_in():
    values = [None, 7, "text", {"response": "4"}, [], object(), Raises()]
    samples = [good(), *values, good()]
    async with RewardEngine(TREE, sources=opened()[1]) as engine:
        together = await engine.score_all(samples, cutoff=Cutoff(50, quorum=0.5))
        alone = await asyncio.gather(*map(engine.score, samples))
        pairs = [pair async for pair in engine.score_stream(samples)]
        assert engine.statistics().submitted == 3 * len(samples)
    assert all(sample is before for (sample, _), before in zip(pairs, samples, strict=True))
    for first, *failed, last in (together, alone, [outcome for _, outcome in pairs]):
        assert [type(outcome) for outcome in (first, last)] == [Scored, Scored]
        assert {outcome.label for outcome in failed} == {"infra/input"}
        assert all("sample" in outcome.detail or "messages" in outcome.detail for outcome in failed)


UNWRITABLE = [
    *(float("nan"), [float("inf")], 10**5000, [2**64], b"bytes", memoryview(b"4")),
    *(object(), Raises(), cyclic(), {"a": Raises()}),
    *(np.datetime64("NaT"), np.timedelta64(3, "ns"), np.datetime64("2026-01-01T00:00:00.000000001")),
    np.array(["2026-01-01", "NaT"], dtype="datetime64[D]"),
]


@pytest.mark.parametrize("judge", ["words", "posted"])
async def test_a_ground_truth_that_cannot_be_written_is_named(judge):
    unwritable = [good(judge, ground_truth=value) for value in UNWRITABLE]
    (first, *failed), posted = await scored_all([good(judge), *unwritable])
    assert isinstance(first, Scored)
    assert {outcome.label for outcome in failed} == {"infra/input"}
    assert all("ground_truth" in outcome.detail for outcome in failed)
    assert len(posted) == (judge != "words")


PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9"
    "awAAAABJRU5ErkJggg=="
)


@pytest.mark.parametrize("judge", JUDGES)
async def test_unusual_samples_that_can_be_read_are_scored(judge):
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": PIXEL}}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    samples = [
        good(judge, response="half \ud800", ground_truth="\udfff", id="\ud800", group_id="\ud800"),
        good(judge, messages=({"role": "user", "content": parts}, call)),
        good(judge, group_id=7, id=7, step=2**40, split="val"),
        good(judge, extras={1: "one", "two": (2,)}),
    ]
    outcomes, _ = await scored_all(samples)
    assert [outcome for outcome in outcomes if not isinstance(outcome, Scored)] == []


@each_of(
    ("turns", "problem"),
    [
        ([{}], "turns[0] needs an `end`"),
        ([{"end": 1}, {"end": 0}], "turns[1] needs an `end`: where the turn ends in the response"),
        ([{"role": "tool", "end": 1}], "turns has no turn of the role assistant"),
    ],
)
def test_turns_that_do_not_fit_their_response_are_named(turns, problem):
    turns = [{"role": "assistant", "content": "r", **turn} for turn in turns]
    rejected = read_sample(good(response="r", turns=turns))
    assert isinstance(rejected, Rejected)
    assert rejected.problem.startswith(problem)


# Numbers as trainers have them: rewards are held in float32


def in_float32(number):
    """What a trainer holds; infinite where struct refuses to round that far."""
    try:
        return struct.unpack(">f", struct.pack(">f", number))[0]
    except OverflowError:
        return math.copysign(math.inf, number)


@given(st.floats() | st.floats(min_value=3.4e38, max_value=3.5e38) | st.integers())
def test_a_verdict_holds_what_is_finite_in_float32_and_nothing_else(number):
    finite = not (isinstance(number, int) and abs(number) > 10**300) and math.isfinite(in_float32(number))
    assert fits_float32(number) is finite
    for build in (
        Verdict,
        lambda value: Verdict(0.5, {"tone": value}),
        lambda value: Verdict(value, basis="floor", failure=Failed(Cause.POLICY, "empty")),
    ):
        if finite:
            build(number)
        else:
            with pytest.raises(ValueError, match="finite in float32"):
                build(number)
