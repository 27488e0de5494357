"""Simulated servers: exact times, strict limits, and every fault."""

from __future__ import annotations

import asyncio
import math
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


def test_noise_has_mean_one_and_stragglers_their_share(ask, play):
    server = Server("a", noise=0.25, straggler_share=0.1, straggler_factor=100.0, seconds_per_unit=1.0, overhead_s=0)
    answers, _ = play(server, [ask() for _ in range(3000)])
    usual = [answer.at_s for answer in answers if answer.at_s < 10]
    assert abs(statistics.mean(usual) - 1) < 0.02
    assert abs(statistics.stdev(usual) - 0.254) < 0.02
    assert abs(1 - len(usual) / 3000 - 0.1) < 0.02


def test_errors_come_early_and_by_their_share(exact, ask, play):
    answers, simulated = play(exact(error_share=0.25, overhead_s=0.1), [ask(work=10.0) for _ in range(2000)])
    failed = [answer for answer in answers if answer.what == "error"]
    assert abs(len(failed) / 2000 - 0.25) < 0.03
    assert set(times(failed)) == {3.1}
    assert simulated.failed == len(failed)
    assert simulated.answered == 2000 - len(failed)


def test_nonsense_comes_by_its_share(exact, ask, play):
    answers, _ = play(exact(invalid_share=0.25), [ask() for _ in range(2000)])
    assert abs(whats(answers).count("nonsense") / 2000 - 0.25) < 0.03


# Limits


def test_the_window_recycles_to_the_moment(exact, ask, play):
    server = exact(requests_per_minute=2)
    answers, simulated = play(server, [ask(0.0), ask(10.0), ask(20.0), ask(59.9), ask(60.0), ask(60.1), ask(70.0)])
    assert whats(answers) == ["ok", "ok", "throttled", "throttled", "ok", "throttled", "ok"]
    assert [answer.retry_after_s for answer in answers if answer.retry_after_s] == pytest.approx([40.0, 0.1, 9.9])
    assert simulated.violations == [(20.0, "requests"), (59.9, "requests"), (60.1, "requests")]
    assert simulated.throttled == 3


def test_a_429_is_a_short_round_trip_and_says_nothing_if_told_so(exact, ask, play):
    answers, _ = play(exact(requests_per_minute=1, retry_after="none"), [ask(0.0), ask(1.0)])
    assert (answers[1].what, answers[1].retry_after_s, round(answers[1].at_s, 6)) == ("throttled", None, 1.1)


def test_tokens_are_counted_when_a_request_arrives(exact, ask, play):
    server = exact(tokens_per_minute=100)
    answers, simulated = play(
        server, [ask(0.0, tokens=60), ask(1.0, tokens=50), ask(2.0, tokens=40), ask(60, tokens=60)]
    )
    assert whats(answers) == ["ok", "throttled", "ok", "ok"]
    assert answers[1].retry_after_s == pytest.approx(59.0)
    assert simulated.violations == [(1.0, "tokens")]


def test_what_is_larger_than_the_whole_window_is_refused_and_is_no_violation(exact, ask, play):
    answers, simulated = play(exact(tokens_per_minute=100), [ask(0.0, tokens=101), ask(1.0, tokens=100)])
    assert whats(answers) == ["throttled", "ok"]
    assert simulated.violations == []


def test_places_are_taken_until_the_answer(exact, ask, play):
    server = exact(concurrency=2, seconds_per_unit=5.0)
    answers, simulated = play(server, [ask(0.0), ask(1.0), ask(4.9), ask(5.0), ask(5.5)])
    assert whats(answers) == ["ok", "ok", "throttled", "ok", "throttled"]
    assert {answer.retry_after_s for answer in answers if answer.what == "throttled"} == {1.0}
    assert simulated.violations == [(4.9, "concurrency"), (5.5, "concurrency")]
    assert simulated.peak_in_flight == 2


def test_a_bucket_refills(exact, ask, play):
    server = exact(requests_per_minute=60, window="bucket", burst=2)
    answers, simulated = play(server, [ask(0.0), ask(0.1), ask(0.2), ask(1.0), ask(1.5), ask(9.0), ask(9.1), ask(9.2)])
    assert whats(answers) == ["ok", "ok", "throttled", "ok", "throttled", "ok", "ok", "throttled"]
    assert answers[2].retry_after_s == pytest.approx(0.8)
    assert {limit for _, limit in simulated.violations} == {"requests"}


@pytest.mark.parametrize("seed", range(8))
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


def test_what_is_cancelled_on_the_way_arrives_all_the_same(exact, ask, play):
    server = exact(requests_per_minute=1, network_s=(0.5, 0.5))
    answers, simulated = play(server, [ask(0.0, cancel_after_s=0.1), ask(1.0)])
    assert whats(answers) == ["cancelled", "throttled"]
    assert simulated.arrivals == [0.5, 1.5]
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


def test_a_hung_server_that_keeps_places_gives_them_back_when_it_recovers(exact, ask, play):
    server = exact(concurrency=1, cancel_frees=False, faults=(Fault(5.0, 8.0, "hang"),))
    answers, _ = play(server, [ask(6.0, cancel_after_s=0.5), ask(7.0), ask(8.0)])
    assert whats(answers) == ["cancelled", "throttled", "ok"]


def test_a_brownout_slows_the_work_that_falls_into_it(exact, ask, play):
    server = exact(seconds_per_unit=4.0, faults=(Fault(10.0, 18.0, "slow", 4.0),))
    answers, _ = play(server, [ask(0.0), ask(8.0), ask(10.0), ask(16.0), ask(18.0)])
    # The second has done 2 s of its work when the brownout begins, and needs 8 s for the other two.
    assert times(answers) == [4.0, 18.0, 20.0, 21.5, 22.0]


def test_a_share_of_errors_for_a_while(exact, ask, play):
    server = exact(seconds_per_unit=1.0, faults=(Fault(10.0, 20.0, "errors", 0.5),))
    answers, _ = play(server, [ask(number / 50) for number in range(1500)])
    within = whats(answers)[500:1000]
    assert abs(within.count("error") / 500 - 0.5) < 0.06
    assert set(whats(answers)[:500] + whats(answers)[1000:]) == {"ok"}


def test_a_storm_of_429s_is_nobodys_violation(exact, ask, play):
    server = exact(faults=(Fault(10.0, 20.0, "throttle", 7.0),))
    answers, simulated = play(server, [ask(9.9, work=5.0), ask(10.0), ask(19.9), ask(20.0)])
    assert whats(answers) == ["ok", "throttled", "throttled", "ok"]
    assert [answer.retry_after_s for answer in answers] == [None, 7.0, 7.0, None]
    assert simulated.violations == []
    assert simulated.throttled == 2


def test_a_server_can_flap(exact, ask, play):
    faults = tuple(Fault(start_s, start_s + 1.0, "refuse") for start_s in (1.0, 3.0, 5.0))
    answers, _ = play(exact(seconds_per_unit=0.1, faults=faults), [ask(0.5 + number) for number in range(6)])
    assert whats(answers) == ["ok", "broken"] * 3


# Announcements


def test_right_announcements_are_the_books(exact, ask, play):
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


def test_wrong_announcements_are_wrong_by_what_they_say(exact, ask, play):
    answers, _ = play(exact(requests_per_minute=5, announces="wrong", wrong_by=3.0), [ask(0.0)])
    assert answers[0].announced["requests_per_window"] == 15
    assert answers[0].announced["requests_remaining"] == 12
    assert play(exact(requests_per_minute=5), [ask(0.0)])[0][0].announced == {}


# As a source


def request_of(sample, **further):
    return Request(sample, messages=({"role": "user", "content": "x" * 400},), nonce="0123456789ab", **further)


def test_as_a_source_it_gives_the_verdict_and_the_usage(exact):
    source = SimulatedServer(exact(), Luck(0))
    sent_at = []

    async def main():
        loop = asyncio.get_running_loop()
        request = request_of(Sample([], "r", extras={"work": 2.0}, id="s1"), max_completion_tokens=512)
        reply = await source.send(request, on_sent=lambda: sent_at.append(loop.time()))
        return reply, loop.time()

    reply, took_s = run(main())
    assert sent_at == [0.0]
    assert took_s == 2.0
    assert reply.text == f'{{"id": "0123456789ab", "rationale": "simulated", "score": {score_of("s1")}}}'
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (100, 300)


def test_completions_end_where_the_request_says(exact):
    source = SimulatedServer(exact(), Luck(0))
    request = request_of(Sample([], "r", extras={"work": 9.0}, id="s1"), max_completion_tokens=512)
    assert run(source.send(request, on_sent=lambda: None)).usage.completion_tokens == 512


def test_the_work_of_a_sample_that_says_none_follows_from_its_size(exact):
    source = SimulatedServer(exact(), Luck(0))

    async def main():
        message = {"role": "user", "content": "x" * 6000}
        await source.send(Request(Sample([], "r", id="s"), messages=(message,)), on_sent=lambda: None)
        return asyncio.get_running_loop().time()

    assert run(main()) == pytest.approx(2.0)


def test_nonsense_is_no_verdict(exact):
    source = SimulatedServer(exact(invalid_share=1.0), Luck(0))
    reply = run(source.send(request_of(Sample([], "r", id="s")), on_sent=lambda: None))
    assert "0123456789ab" not in reply.text


def test_a_source_throttles_as_sources_do(exact):
    source = SimulatedServer(exact(requests_per_minute=1), Luck(0))

    async def main():
        await source.send(request_of(Sample([], "r", id="s")), on_sent=lambda: None)
        await source.send(request_of(Sample([], "r", id="s")), on_sent=lambda: None)

    with pytest.raises(Throttled, match="a is over its requests") as caught:
        run(main())
    assert caught.value.status == 429
    assert caught.value.retry_after_s is not None


def test_scores_are_in_range_and_spread():
    scores = [score_of(str(number)) for number in range(1000)]
    assert all(0 <= score <= 10 for score in scores)
    assert len(set(scores)) > 900
    assert abs(statistics.mean(scores) - 5) < 0.5


# Sameness


def test_the_same_seed_gives_the_same_trace_byte_for_byte(ask, play):
    server = Server("a", requests_per_minute=100, concurrency=20, error_share=0.1, straggler_share=0.1)
    asks = [ask(number / 10, cancel_after_s=20.0) for number in range(300)]
    texts = []
    for seed in (1, 1, 2):
        trace = Trace()
        play(server, asks, seed=seed, trace=trace)
        texts.append(str(trace).encode())
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]
    for words in (b"sent", b"answered", b"failed", b"throttled", b"cancelled"):
        assert words in texts[0]


def test_a_trace_says_when_where_who_and_what(exact, ask, play):
    trace = Trace()
    play(exact("fast"), [ask(1.5, sample="s7")], trace=trace)
    assert str(trace) == "1.500000 fast s7 sent\n2.500000 fast s7 answered\n"
    assert len(trace) == 2


def test_luck_follows_the_sample_not_the_schedule(ask, play):
    """Common random numbers: another policy, another server and another order change no sample's luck."""
    server = Server("a", error_share=0.3, straggler_share=0.2, network_s=(0.0, 0.0), overhead_s=0.0)
    names = [str(number) for number in range(200)]
    early, _ = play(server, [ask(number * 0.5, sample=name) for number, name in enumerate(names)], seed=4)
    late, _ = play(server, [ask(number * 2.0, sample=name) for number, name in enumerate(reversed(names))], seed=4)
    took_early = {
        name: (a.what, round(a.at_s - 0.5 * n, 6)) for n, (name, a) in enumerate(zip(names, early, strict=True))
    }
    took_late = {
        name: (a.what, round(a.at_s - 2.0 * n, 6))
        for n, (name, a) in enumerate(zip(reversed(names), late, strict=True))
    }
    assert took_early == took_late


def test_the_next_request_of_a_sample_has_new_luck(ask, play):
    server = Server("a", noise=1.0, network_s=(0.0, 0.0))
    answers, _ = play(server, [ask(100.0 * number, sample="s") for number in range(10)])
    assert len({round(answer.at_s % 100, 6) for answer in answers}) == 10


def test_a_finished_run_leaves_nothing_behind(ask, play):
    faults = (Fault(1.0, math.inf, "hang"),)
    _, simulated = play(Server("a", faults=faults), [ask(0.0, cancel_after_s=50.0) for _ in range(20)])
    assert simulated.in_flight == 0
    assert simulated.cancelled == 20
