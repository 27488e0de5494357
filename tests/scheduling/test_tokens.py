"""Token limits hold whatever the texts are, and what a server says of its tokens is believed within reason.

In virtual time, against a source that counts every token that it takes in any window. Tokenizers here make at most one
token a byte, as byte-level BPE does.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qreward_plugins.errors import Throttled
from qreward_plugins.quotas.tokens import ENOUGH
from qreward_plugins.samples import Cause, Failed, Sample, Scored
from qreward_plugins.samples.spent import Usage
from qreward_plugins.scheduling import Upstream
from qreward_plugins.simulation import run
from qreward_plugins.sources import Reply

WORDS = ["the", "response", "is", "mostly", "right", "but", "skips", "a", "step", "that", "readers", "would", "need"]


def english(size, rng):
    return " ".join(rng.choice(WORDS) for _ in range(size // 5 + 1))[:size]


def chinese(size, rng):
    return "".join(chr(rng.randrange(0x4E00, 0x9FA5)) for _ in range(size // 3))


def emoji(size, rng):
    return "".join(chr(rng.randrange(0x1F300, 0x1F640)) for _ in range(size // 4))


def digits(size, rng):
    return "".join(rng.choice("0123456789") for _ in range(size))


def encoded(size, rng):
    return base64.b64encode(rng.randbytes(size)).decode()[:size]


def russian(size, rng):
    return "".join(rng.choice("абвгдежзиклмнопрст ") for _ in range(size // 2))


def mixed(size, rng):
    return "".join(rng.choice(KINDS[:-1])(max(8, size // 6), rng) for _ in range(6))


KINDS = [english, chinese, emoji, digits, encoded, russian, mixed]
# Tokens a byte of tokenizers with large vocabularies, on the high side.
USUAL = {english: 0.28, chinese: 0.4, emoji: 0.8, digits: 1.0, encoded: 0.75, russian: 0.35, mixed: 0.6}


def score(stage, texts, *, deadline_s=100_000.0, batches=1, **options):
    """Hand the texts in as so many batches, one after the other."""

    async def main():
        dispatcher = stage.dispatcher(**options)
        outcomes = []
        for number in range(batches):
            part = texts[number * len(texts) // batches : (number + 1) * len(texts) // batches]
            samples = [Sample([{"role": "user", "content": "?"}], text) for text in part]
            futures = [dispatcher.score(each, stage.judge, deadline_s=deadline_s) for each in samples]
            outcomes += await asyncio.gather(*futures)
        finished_at = dispatcher.now()
        await dispatcher.aclose()
        return outcomes, finished_at

    return run(main())


def counting(tokens_of, completion=0):
    """An answer that states what `tokens_of` says of the text that was asked."""

    def answer(request):
        text = request.messages[0]["content"]
        return Reply(text="1", usage=Usage(tokens_of(text), completion))

    return answer


def size_of(text):
    return len(text.encode())


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_burst_keeps_the_limit_whatever_the_text_is(stage, kind):
    rng = random.Random(1)
    texts = [kind(rng.randrange(500, 3000), rng) for _ in range(120)]
    answer = counting(lambda text: min(size_of(text), math.ceil(USUAL[kind] * size_of(text))), 90)
    source = stage.add(
        "a", limits={"tokens_per_minute": 20_000, "concurrency": 200}, tokens_per_window=20_000, answer=answer
    )
    stage.judge.completion_tokens = 100
    outcomes, _ = score(stage, texts)
    assert all(isinstance(outcome, Scored) for outcome in outcomes)
    assert source.violations == []


def test_a_policy_that_turns_to_another_language_does_not_break_the_limit(stage):
    rng = random.Random(2)
    texts = [english(2000, rng) for _ in range(200)] + [kind(2000, rng) for kind in KINDS for _ in range(40)]
    english_ones = set(texts[:200])
    source = stage.add(
        "a",
        limits={"tokens_per_minute": 60_000, "concurrency": 200},
        tokens_per_window=60_000,
        answer=counting(lambda text: size_of(text) // 4 if text in english_ones else size_of(text)),
    )
    outcomes, _ = score(stage, [*texts[:200], *texts[240:]], batches=2)
    assert all(isinstance(outcome, Scored) for outcome in outcomes)
    assert source.violations == []


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    ratios=st.lists(st.floats(0.02, 1.0), min_size=len(KINDS), max_size=len(KINDS)),
    limit=st.sampled_from([8000, 20_000, 100_000]),
    answer_s=st.sampled_from([0.3, 3.0, 40.0]),
    concurrency=st.sampled_from([4, 64, 500]),
)
def test_no_window_is_over_its_tokens_for_any_texts_and_any_tokenizer_of_at_most_a_token_a_byte(
    new_stage, seed, ratios, limit, answer_s, concurrency
):
    """Each kind of text takes its own number of tokens a byte, each text up to a tenth less."""
    stage, rng = new_stage(), random.Random(seed)
    kinds = [rng.choice(KINDS) for _ in range(150)]
    texts = [kind(rng.randrange(40, 2000), rng) for kind in kinds]
    ratio_of = dict(zip(KINDS, ratios, strict=True))
    tokens = {
        text: max(1, int(size_of(text) * ratio_of[kind] / rng.uniform(1.0, 1.1)))
        for kind, text in zip(kinds, texts, strict=True)
    }
    source = stage.add(
        "a",
        limits={"tokens_per_minute": limit, "concurrency": concurrency},
        tokens_per_window=limit,
        answer=counting(lambda text: tokens[text], 60),
        behaviour=lambda *_: answer_s,
    )
    stage.judge.completion_tokens = 60
    # `mixed` ones are left out: they are of several kinds to the estimate and would be of one to the tokenizer.
    outcomes, _ = score(stage, [text for kind, text in zip(kinds, texts, strict=True) if kind is not mixed])
    assert all(isinstance(outcome, Scored) for outcome in outcomes)
    assert source.violations == []


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), limit=st.sampled_from([8000, 30_000]))
def test_tokens_that_follow_no_rule_at_all_do_not_break_the_limit_while_a_kind_is_new(new_stage, seed, limit):
    stage, rng = new_stage(), random.Random(seed)
    texts = [kind(rng.randrange(40, 2000), rng) for kind in KINDS for _ in range(ENOUGH // 2)]

    def tokens_of(text):
        draw = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") / 2**32
        return max(1, int(draw * size_of(text)))

    source = stage.add("a", limits={"tokens_per_minute": limit}, tokens_per_window=limit, answer=counting(tokens_of))
    score(stage, texts)
    assert source.violations == []


def test_what_was_answered_is_learned_so_that_english_uses_the_limit(stage):
    rng = random.Random(3)
    limit = 60_000
    stage.add(
        "a",
        limits={"tokens_per_minute": limit, "concurrency": 300},
        tokens_per_window=limit,
        answer=counting(lambda text: size_of(text) // 4, 50),
    )
    stage.judge.completion_tokens = 60
    texts = [english(2000, rng) for _ in range(600)]
    _, finished = score(stage, texts)
    total = sum(size_of(text) // 4 + 50 for text in texts)
    assert finished <= 60 * math.ceil(total / limit) + 20


def test_estimates_of_what_is_under_way_rise_with_an_answer_that_shows_more(stage):
    async def main():
        stage.add("a", limits={"tokens_per_minute": 1_000_000})
        upstream = stage.upstreams["a"]
        text = english(2000, random.Random(4))
        for _ in range(40):
            request = stage.judge.request(Sample([{"role": "user", "content": "?"}], text), attempt=0)
            upstream._estimates.learn(upstream._demand(request), request.size, Usage(500, 10))
        waiting = stage.attempt(stage.job(2000), "a", started_at=0.0, expected_s=1.0)
        job = stage.job(1)
        job.asks(request)
        same = stage.attempt(job, "a", started_at=0.0, expected_s=1.0)
        assert same.reservation.tokens < 700
        upstream.answered(same, Reply(text="1", usage=Usage(1900, 10)), 1.0)
        assert same.reservation.tokens >= 1900
        assert waiting.reservation.tokens == 2040
        assert upstream.quota.tokens.spent(1.0) == same.reservation.tokens + waiting.reservation.tokens

    run(main())


# What a reply says of its tokens

ABSURD = [
    Usage(10**9, 10),
    Usage(10, 10**9),
    Usage(10**9, 10**9),
    Usage(0, 0),
    Usage(0, 10**9),
]


@pytest.mark.parametrize("usage", ABSURD)
def test_one_absurd_usage_costs_no_other_sample_anything(stage, usage, caplog):
    texts = [english(120, random.Random(n)) for n in range(100)]

    def answer(request):
        return Reply(text="1", usage=usage if request.messages[0]["content"] == texts[2] else Usage(30, 10))

    stage.add("a", limits={"tokens_per_minute": 20_000, "concurrency": 4}, answer=answer)
    stage.judge.completion_tokens = 50
    outcomes, finished = score(stage, texts, deadline_s=60)
    assert all(isinstance(outcome, Scored) for outcome in outcomes)
    assert finished < 30
    assert (stage.counted("a").prompt_tokens + stage.counted("a").completion_tokens) < 100 * 400
    assert sum("cannot be" in record.message for record in caplog.records) <= 1


@settings(max_examples=60, deadline=None)
@given(
    absurd=st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)), min_size=1, max_size=2),
    where=st.integers(0, 30),
)
def test_what_single_replies_state_never_bars_later_samples(new_stage, absurd, where):
    """P11, for usage."""
    stage = new_stage()
    texts = [english(160, random.Random(n)) for n in range(60)]
    stated = {text: Usage(*usage) for text, usage in zip(texts[where:], absurd, strict=False)}

    def answer(request):
        return Reply(text="1", usage=stated.get(request.messages[0]["content"], Usage(40, 10)))

    stage.add("a", limits={"tokens_per_minute": 20_000, "concurrency": 4}, answer=answer)
    stage.judge.completion_tokens = 50
    outcomes, _ = score(stage, texts, deadline_s=100)
    assert all(isinstance(outcome, Scored) for outcome in outcomes)


def test_a_provider_that_adds_a_long_prompt_of_its_own_is_believed_once_several_replies_say_so(stage):
    stage.add("a", limits={"tokens_per_minute": 50_000}, answer=lambda request: Reply("1", usage=Usage(3000, 10)))
    score(stage, [english(200, random.Random(n)) for n in range(20)])
    assert stage.upstreams["a"].tokens(stage.judge.request(stage.sample(200), attempt=0)) >= 3000


def test_reasoning_that_is_counted_beyond_max_tokens_is_believed_once_several_replies_say_so(stage):
    stage.add("a", limits={"tokens_per_minute": 90_000}, answer=lambda request: Reply("1", usage=Usage(50, 2000)))
    stage.judge.completion_tokens = 100
    score(stage, [english(200, random.Random(n)) for n in range(20)])
    assert stage.upstreams["a"].tokens(stage.judge.request(stage.sample(200), attempt=0)) >= 2000


# Estimates beyond the limit


def test_what_may_be_more_than_a_whole_window_goes_alone_and_last(stage):
    source = stage.add(
        "a",
        limits={"tokens_per_minute": 2000},
        tokens_per_window=2000,
        answer=counting(lambda text: size_of(text) // 4),
    )
    rng = random.Random(5)
    outcomes, _ = score(stage, [english(7900, rng), *(english(100, rng) for _ in range(30))], deadline_s=900)
    assert all(isinstance(outcome, Scored) for outcome in outcomes)
    assert stage.sent[-1].size == 7900
    assert source.violations == []


def test_what_turns_out_to_fit_a_window_goes_as_any_other(stage):
    """Once answers have told the tokens of a byte, the long sample goes as the next one, because it is the longest."""
    source = stage.add(
        "a",
        limits={"tokens_per_minute": 2000, "concurrency": 1},
        tokens_per_window=2000,
        answer=counting(lambda text: size_of(text) // 4),
    )
    rng = random.Random(5)
    score(stage, [english(5000, rng), *(english(100, rng) for _ in range(30))], deadline_s=900)
    assert [sent.size for sent in stage.sent].index(5000) < 15
    assert source.violations == []


def test_what_was_too_large_alone_is_not_tried_again(stage):
    def behaviour(number, request, now):
        return Throttled("429: too large", status=429, retry_after_s=1) if request.size > 1000 else 1.0

    stage.add("a", limits={"tokens_per_minute": 2000}, behaviour=behaviour)
    outcomes, _ = score(stage, ["x" * 5000, *("y" * 50 for _ in range(10))], deadline_s=900)
    assert [type(outcome) for outcome in outcomes] == [Failed] + [Scored] * 10
    assert (outcomes[0].cause, outcomes[0].reason) == (Cause.INFRA, "no_source")
    assert "5,040 tokens" in outcomes[0].detail
    assert sum(sent.size == 5000 for sent in stage.sent) == 1


def test_many_that_are_oversize_are_not_estimated_again_while_nothing_changes(stage, monkeypatch):
    """Each pump asked for each of them: a batch with a small token limit took quadratic time."""
    stage.add("a", limits={"concurrency": 1, "tokens_per_minute": 1000})
    stage.add("b", limits={"concurrency": 1})
    asked = 0
    oversize = Upstream.oversize

    def counted(upstream, request):
        nonlocal asked
        asked += 1
        return oversize(upstream, request)

    monkeypatch.setattr(Upstream, "oversize", counted)
    large, small = replace(stage.judge, sources=("a",)), replace(stage.judge, sources=("b",))

    async def main():
        dispatcher = stage.dispatcher()
        waiting = [dispatcher.score(stage.sample(2000), large, deadline_s=600) for _ in range(100)]
        await asyncio.gather(*(dispatcher.score(stage.sample(10), small, deadline_s=600) for _ in range(100)))
        for outcome in waiting:
            outcome.cancel()
        await dispatcher.aclose()

    run(main())
    assert asked < 1000  # 100 for each change of an estimate or limit; with 100 for each pump it would be 10,000
