"""Simulated servers: exact times, strict limits, every fault, and luck that is the same for everybody."""

from __future__ import annotations

import asyncio
import random
import statistics

import pytest

from qreward_plugins.errors import Throttled
from qreward_plugins.samples import Sample
from qreward_plugins.simulation import Fault, Luck, Server, SimulatedServer, Trace, run, score_of
from qreward_plugins.sources.base import Request


def whats(answers):
    return [answer.what for answer in answers]


def times(answers):
    return [round(answer.at_s, 6) for answer in answers]


def test_an_answer_takes_the_work_times_the_speed_and_the_overhead(exact, ask, play):
    server = exact(seconds_per_unit=3.0, overhead_s=0.05, network_s=(0.02, 0.02))
    answers, simulated = play(server, [ask(work=2.0), ask(at_s=1.0, work=0.5)])
    assert whats(answers) == ["ok", "ok"]
    assert times(answers) == [6.05, 2.55]
    assert simulated.arrivals == [0.02, 1.02]
    assert (simulated.sent, simulated.answered, simulated.in_flight, simulated.peak_in_flight) == (2, 2, 0, 2)


def test_noise_has_mean_one_and_stragglers_errors_and_nonsense_their_shares(exact, ask, play):
    server = Server("a", noise=0.25, straggler_share=0.1, straggler_factor=100.0, seconds_per_unit=1.0, overhead_s=0)
    answers, _ = play(server, [ask() for _ in range(3000)])
    usual = [answer.at_s for answer in answers if answer.at_s < 10]
    assert abs(statistics.mean(usual) - 1) < 0.02
    assert abs(statistics.stdev(usual) - 0.254) < 0.02
    assert abs(1 - len(usual) / 3000 - 0.1) < 0.02
    server = exact(error_share=0.25, invalid_share=0.25, overhead_s=0.1)
    answers, simulated = play(server, [ask(work=10.0) for _ in range(2000)])
    failed = [answer for answer in answers if answer.what == "error"]
    assert abs(len(failed) / 2000 - 0.25) < 0.03
    assert set(times(failed)) == {3.1}  # they come early
    assert (simulated.failed, simulated.answered) == (len(failed), 2000 - len(failed))
    assert abs(whats(answers).count("nonsense") / simulated.answered - 0.25) < 0.03


# Limits


def test_a_429_is_a_short_round_trip_and_says_nothing_if_told_so_and_never_to_come_back_at_once(exact, ask, play):
    answers, _ = play(exact(requests_per_minute=1, retry_after="none"), [ask(0.0), ask(1.0)])
    assert (answers[1].what, answers[1].retry_after_s, round(answers[1].at_s, 6)) == ("throttled", None, 1.1)
    answers, _ = play(exact(requests_per_minute=1), [ask(0.0), ask(59.9999)])
    assert answers[1].retry_after_s == 0.01


def test_what_is_larger_than_the_whole_window_is_refused_and_is_no_violation(exact, ask, play):
    answers, simulated = play(exact(tokens_per_minute=100), [ask(0.0, tokens=101), ask(1.0, tokens=100)])
    assert whats(answers) == ["throttled", "ok"]
    assert simulated.violations == []


@pytest.mark.parametrize("seed", range(4))
def test_the_books_agree_with_a_recount(seed, exact, ask, play):
    """Every limit at once, with cancelled requests among them: each arrival is judged as a recount judges it."""
    rng = random.Random(seed)
    server = exact(requests_per_minute=rng.randint(5, 40), tokens_per_minute=2000, concurrency=rng.randint(2, 6))
    asks = [
        ask(
            at_s=rng.uniform(0, 150),
            work=rng.uniform(0.1, 12),
            tokens=rng.randint(1, 200),
            cancel_after_s=rng.choice((500.0, 500.0, rng.uniform(0.1, 5))),
        )
        for _ in range(150)
    ]
    answers, simulated = play(server, asks)
    refused = dict(simulated.violations)
    taken = []
    for one, answer in sorted(zip(asks, answers, strict=True), key=lambda pair: pair[0].at_s):
        now = one.at_s
        recent = [tokens for at_s, tokens, _ in taken if at_s > now - 60]
        expected = None
        if sum(at_s <= now < end_s for at_s, _, end_s in taken) >= server.concurrency:
            expected = "concurrency"
            assert answer.retry_after_s == 1.0
        elif len(recent) >= server.requests_per_minute:
            expected = "requests"
        elif sum(recent) + one.tokens > 2000:
            expected = "tokens"
        assert refused.get(now) == expected
        if expected is None:
            taken.append((now, one.tokens, answer.at_s))
    assert len(set(refused.values())) >= 2


# Cancelling


def test_a_cancelled_request_frees_its_place_but_stays_counted(exact, ask, play):
    server = exact(requests_per_minute=2, concurrency=1, seconds_per_unit=10.0)
    answers, simulated = play(server, [ask(0.0, cancel_after_s=3.0), ask(3.5), ask(20.0)])
    assert whats(answers) == ["cancelled", "ok", "throttled"]
    assert simulated.violations == [(20.0, "requests")]
    assert (simulated.cancelled, simulated.in_flight) == (1, 0)


def test_some_servers_work_on_for_nobody(exact, ask, play):
    server = exact(concurrency=1, seconds_per_unit=10.0, cancel_frees=False)
    answers, simulated = play(server, [ask(0.0, cancel_after_s=3.0), ask(9.0), ask(10.0)])
    assert whats(answers) == ["cancelled", "throttled", "ok"]
    assert simulated.in_flight == 0


# Faults


def test_refusing_breaks_what_is_open_and_turns_away_what_comes(exact, ask, play):
    server = exact(requests_per_minute=2, seconds_per_unit=4.0, faults=(Fault(5.0, 8.0, "refuse"),))
    answers, simulated = play(server, [ask(0.5), ask(2.0), ask(6.0), ask(7.99), ask(65.0)])
    assert whats(answers) == ["ok", "broken", "broken", "broken", "ok"]
    assert times(answers) == [4.5, 5.01, 6.1, 8.09, 69.0]
    # Refused connections reach no limiter.
    assert simulated.violations == []
    assert simulated.in_flight == 0


def test_hanging_answers_nobody_and_holds_the_place(exact, ask, play):
    server = exact(concurrency=2, faults=(Fault(5.0, 8.0, "hang"),))
    answers, simulated = play(server, [ask(4.5), ask(5.0, cancel_after_s=20.0), ask(6.0), ask(26.0)])
    assert whats(answers) == ["hung", "cancelled", "throttled", "ok"]
    assert simulated.in_flight == 0


def test_a_brownout_slows_the_work_that_falls_into_it(exact, ask, play):
    server = exact(seconds_per_unit=4.0, faults=(Fault(10.0, 18.0, "slow", 4.0),))
    answers, _ = play(server, [ask(0.0), ask(8.0), ask(10.0), ask(16.0), ask(18.0)])
    # The second has done 2 s of its work when the brownout begins, and needs 8 s for the other two.
    assert times(answers) == [4.0, 18.0, 20.0, 21.5, 22.0]


def test_a_storm_of_429s_is_nobodys_violation(exact, ask, play):
    server = exact(faults=(Fault(10.0, 20.0, "throttle", 7.0),))
    answers, simulated = play(server, [ask(9.9, work=5.0), ask(10.0), ask(19.9), ask(20.0)])
    assert whats(answers) == ["ok", "throttled", "throttled", "ok"]
    assert [answer.retry_after_s for answer in answers] == [None, 7.0, 7.0, None]
    assert simulated.violations == []
    assert simulated.throttled == 2


def test_announcements_are_the_books_or_wrong_by_what_they_say(exact, ask, play):
    server = exact(requests_per_minute=5, tokens_per_minute=100, announces="right")
    answers, _ = play(server, [ask(0.0, tokens=30), ask(10.0, tokens=30)])
    assert answers[0].announced == {
        "requests_per_window": 5,
        "requests_remaining": 4,
        "requests_reset_s": 59.0,
        "tokens_per_window": 100,
        "tokens_remaining": 70,
        "tokens_reset_s": 59.0,
    }
    assert answers[1].announced["requests_remaining"] == 3
    answers, _ = play(exact(requests_per_minute=5, announces="wrong", wrong_by=3.0), [ask(0.0)])
    assert answers[0].announced["requests_per_window"] == 15
    assert answers[0].announced["requests_remaining"] == 12
    assert play(exact(requests_per_minute=5), [ask(0.0)])[0][0].announced == {}


# As a source


@pytest.mark.parametrize(("work", "completion"), [(2.0, 300), (9.0, 512)])
def test_as_a_source_it_gives_the_verdict_and_the_usage(exact, work, completion):
    source = SimulatedServer(exact(), Luck(0))
    sent_at = []

    async def main():
        loop = asyncio.get_running_loop()
        sample = Sample([], "r", extras={"work": work}, id="s1")
        message = {"role": "user", "content": "x" * 400}
        request = Request(sample, messages=(message,), nonce="0123456789ab", max_completion_tokens=512)
        return await source.send(request, on_sent=lambda: sent_at.append(loop.time())), loop.time()

    reply, took_s = run(main())
    assert sent_at == [0.0]
    assert took_s == work
    assert reply.text == f'{{"id": "0123456789ab", "rationale": "simulated", "score": {score_of("s1")}}}'
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (100, completion)


def test_as_a_source_it_throttles_and_answers_nonsense_and_a_sample_without_work_has_some_by_its_size(exact):
    source = SimulatedServer(exact(requests_per_minute=1, invalid_share=1.0), Luck(0))
    request = Request(Sample([], "r", id="s"), messages=({"role": "user", "content": "x" * 6000},), nonce="0123456789")

    async def main():
        reply = await source.send(request, on_sent=lambda: None)
        assert "0123456789" not in reply.text
        assert asyncio.get_running_loop().time() == pytest.approx(2.0)
        await source.send(request, on_sent=lambda: None)

    with pytest.raises(Throttled, match="a is over its requests") as caught:
        run(main())
    assert caught.value.status == 429
    assert caught.value.retry_after_s is not None


# Luck


def test_the_same_seed_gives_the_same_trace_byte_for_byte(exact, ask, play):
    server = Server("a", requests_per_minute=100, concurrency=20, error_share=0.1, straggler_share=0.1)
    asks = [ask(number / 10, cancel_after_s=20.0) for number in range(300)]
    texts = []
    for seed in (1, 1, 2):
        trace = Trace()
        play(server, asks, seed=seed, trace=trace)
        texts.append(str(trace))
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]
    for words in ("sent", "answered", "failed", "throttled", "cancelled"):
        assert words in texts[0]
    trace = Trace()
    play(exact("fast"), [ask(1.5, sample="s7")], trace=trace)
    assert str(trace) == "1.500000 fast s7 sent\n2.500000 fast s7 answered\n"


def test_luck_follows_the_sample_not_the_schedule(ask, play):
    """Common random numbers: another policy, server or order changes no sample's luck; another request of it does."""
    server = Server("a", error_share=0.3, straggler_share=0.2, network_s=(0.0, 0.0), overhead_s=0.0)
    names = [str(number) for number in range(200)]

    def took(names, gap_s):
        answers, _ = play(server, [ask(number * gap_s, sample=name) for number, name in enumerate(names)], seed=4)
        return {
            name: (answer.what, round(answer.at_s - gap_s * number, 6))
            for number, (name, answer) in enumerate(zip(names, answers, strict=True))
        }

    assert took(names, 0.5) == took(names[::-1], 2.0)
    answers, _ = play(
        Server("a", noise=1.0, network_s=(0.0, 0.0)), [ask(100.0 * number, sample="s") for number in range(10)]
    )
    assert len({round(answer.at_s % 100, 6) for answer in answers}) == 10


PINNED = [0.26959576, 0.253743822, 0.064234532, 0.722820175, 0.524559962]


def test_luck_is_the_same_on_every_machine():
    assert [round(value, 9) for value in Luck(0).draw("sample")] == PINNED
