"""Simulated servers: what a client is told of them, exact times, strict limits, every fault, and luck that is the same
for everybody.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from qreward_plugins.config import Limits, Price
from qreward_plugins.errors import Throttled, TransientError
from qreward_plugins.simulation import Fault, Luck, Server, SimulatedServer, run
from qreward_plugins.simulation.strict_limits import TokenBucket

from ..kit import each_of

GIVEN_UP_S = 500.0


@dataclass
class Ask:
    """One request: of which sample, when, how much work, how many tokens, and when it is cancelled."""

    at_s: float = 0.0
    work: float = 1.0
    tokens: int = 0
    sample: str = ""
    cancel_after_s: float = GIVEN_UP_S


@dataclass
class Answer:
    """What became of it: `ok`, `nonsense`, `throttled`, `error`, `broken`, `hung` or `cancelled`, and when."""

    what: str
    at_s: float
    retry_after_s: float | None = None
    announced: dict | None = None


async def send(server, ask, number):
    loop = asyncio.get_running_loop()
    await asyncio.sleep(ask.at_s)
    prompt = ask.tokens // 2
    serving = server.serve(ask.sample or str(number), ask.work, prompt, ask.tokens - prompt)
    try:
        served = await asyncio.wait_for(serving, ask.cancel_after_s)
    except Throttled as error:
        return Answer("throttled", loop.time(), error.retry_after_s)
    except TransientError as error:
        return Answer("broken" if error.status is None else "error", loop.time())
    except asyncio.TimeoutError:
        return Answer("hung" if ask.cancel_after_s == GIVEN_UP_S else "cancelled", loop.time())
    return Answer("ok" if served.valid else "nonsense", loop.time(), announced=dict(served.announced))


def play(server, asks, seed=0):
    """Send `asks` to one server in virtual time; return their answers in order, and the server as it is then."""
    simulated = SimulatedServer(server, Luck(seed))

    async def main():
        return await asyncio.gather(*(send(simulated, ask, number) for number, ask in enumerate(asks)))

    return run(main()), simulated


BOTH = (Fault(5.0, 8.0, "hang"), Fault(5.0, 7.0, "refuse"))

# The server (which serves a unit of work in a second), what it is asked, what becomes of each and when, and violations.
CASES = {
    "the work times the speed, and the overhead": (
        {"seconds_per_unit": 3.0, "overhead_s": 0.05, "network_s": (0.02, 0.02)},
        [Ask(work=2.0), Ask(1.0, work=0.5)],
        [("ok", 6.05), ("ok", 2.55)],
        [],
    ),
    "a 429 is a short round trip": (
        {"requests_per_minute": 1, "retry_after": "none"},
        [Ask(), Ask(1.0), Ask(60.0)],
        [("ok", 1.0), ("throttled", 1.1), ("ok", 61.0)],
        [(1.0, "requests")],
    ),
    "larger than the whole window is refused, and no violation": (
        {"tokens_per_minute": 100},
        [Ask(tokens=101), Ask(1.0, tokens=100)],
        [("throttled", 0.1), ("ok", 2.0)],
        [],
    ),
    "a cancelled request frees its place but stays counted": (
        {"requests_per_minute": 2, "concurrency": 1, "seconds_per_unit": 10.0},
        [Ask(cancel_after_s=3.0), Ask(3.5), Ask(20.0)],
        [("cancelled", 3.0), ("ok", 13.5), ("throttled", 20.1)],
        [(20.0, "requests")],
    ),
    "some servers work on for nobody": (
        {"concurrency": 1, "seconds_per_unit": 10.0, "cancel_frees": False},
        [Ask(cancel_after_s=3.0), Ask(9.0), Ask(10.0)],
        [("cancelled", 3.0), ("throttled", 9.1), ("ok", 20.0)],
        [(9.0, "concurrency")],
    ),
    "refusing breaks what is open, and what comes reaches no limiter": (
        {"requests_per_minute": 2, "seconds_per_unit": 4.0, "faults": (Fault(5.0, 8.0, "refuse"),)},
        [Ask(0.5), Ask(2.0), Ask(6.0), Ask(7.99), Ask(65.0)],
        [("ok", 4.5), ("broken", 5.01), ("broken", 6.1), ("broken", 8.09), ("ok", 69.0)],
        [],
    ),
    "hanging answers nobody and holds the place": (
        {"concurrency": 2, "faults": (Fault(5.0, 8.0, "hang"),)},
        [Ask(4.5), Ask(5.0, cancel_after_s=20.0), Ask(6.0), Ask(26.0)],
        [("hung", 504.5), ("cancelled", 25.0), ("throttled", 6.1), ("ok", 27.0)],
        [(6.0, "concurrency")],
    ),
    # The second has done 2 s of its work when the brownout begins, and needs 8 s for the other two.
    "a brownout slows the work that falls into it": (
        {"seconds_per_unit": 4.0, "faults": (Fault(10.0, 18.0, "slow", 4.0),)},
        [Ask(), Ask(8.0), Ask(10.0), Ask(16.0), Ask(18.0)],
        [("ok", 4.0), ("ok", 18.0), ("ok", 20.0), ("ok", 21.5), ("ok", 22.0)],
        [],
    ),
    "a storm of 429s is nobody's violation": (
        {"faults": (Fault(10.0, 20.0, "throttle", 7.0),)},
        [Ask(9.9, work=5.0), Ask(10.0), Ask(19.9), Ask(20.0)],
        [("ok", 14.9), ("throttled", 10.1), ("throttled", 20.0), ("ok", 21.0)],
        [],
    ),
    "a bucket admits its burst and what it has refilled": (
        {"requests_per_minute": 60, "window": "bucket", "burst": 2},
        [Ask(), Ask(), Ask(0.25), Ask(1.0), Ask(10.0), Ask(10.0), Ask(10.0)],
        [("ok", 1.0), ("ok", 1.0), ("throttled", 0.35), ("ok", 2.0), ("ok", 11.0), ("ok", 11.0), ("throttled", 10.1)],
        [(0.25, "requests"), (10.0, "requests")],
    ),
    # The last does two units of its work until the second brownout, and the third in four seconds.
    "faults that overlap add up, and refusing comes before hanging": (
        {"faults": (*(Fault(start_s, 30.0, "slow", 2.0) for start_s in (20.0, 24.0)), *BOTH)},
        [Ask(4.5), Ask(6.5), Ask(20.0, work=3.0)],
        [("broken", 5.01), ("broken", 6.6), ("ok", 28.0)],
        [],
    ),
}


@each_of(("server", "asks", "expected", "violations"), CASES.values())
def test_a_server_does_exactly_this(exact, server, asks, expected, violations):
    answers, simulated = play(exact(**server), asks)
    assert [(answer.what, round(answer.at_s, 6)) for answer in answers] == expected
    assert (simulated.violations, simulated.in_flight) == (violations, 0)


@each_of(
    ("server", "asks", "retry_after_s"),
    [
        ({"requests_per_minute": 1}, [Ask(), Ask(59.9999)], 0.01),  # never at once
        ({"requests_per_minute": 1, "retry_after": "none"}, [Ask(), Ask(59.9999)], None),
        ({"tokens_per_minute": 100}, [Ask(tokens=30), Ask(10.0, tokens=30), Ask(20.0, tokens=90)], 50.0),
        ({"tokens_per_minute": 100}, [Ask(tokens=30), Ask(10.0, tokens=101)], 60.0),  # it never fits
        ({"requests_per_minute": 60, "window": "bucket"}, [Ask(), Ask(0.25)], 0.75),
    ],
)
def test_a_429_says_when_to_come_back(exact, server, asks, retry_after_s):
    answers, _ = play(exact(**server), asks)
    assert answers[-1].retry_after_s == retry_after_s


def test_errors_and_nonsense_have_their_shares(exact):
    server = exact(error_share=0.25, invalid_share=0.25, overhead_s=0.1)
    answers, _ = play(server, [Ask(work=10.0) for _ in range(1000)])
    failed = [answer for answer in answers if answer.what == "error"]
    assert abs(len(failed) / 1000 - 0.25) < 0.05
    assert {round(answer.at_s, 6) for answer in failed} == {3.1}  # they come early
    assert abs(sum(answer.what == "nonsense" for answer in answers) / (1000 - len(failed)) - 0.25) < 0.05


def test_announcements_are_the_books_or_wrong_by_what_they_say(exact):
    server = exact(requests_per_minute=5, tokens_per_minute=100, announces="right")
    answers, _ = play(server, [Ask(0.0, tokens=30)])
    assert answers[0].announced == {
        "requests_per_window": 5,
        "requests_remaining": 4,
        "requests_reset_s": 59.0,
        "tokens_per_window": 100,
        "tokens_remaining": 70,
        "tokens_reset_s": 59.0,
    }
    answers, _ = play(exact(requests_per_minute=5, announces="wrong", wrong_by=3.0), [Ask(0.0)])
    assert (answers[0].announced["requests_per_window"], answers[0].announced["requests_remaining"]) == (15, 12)


def test_luck_follows_the_sample_not_the_schedule():
    """Common random numbers: another policy, server or order changes no sample's luck; another request of it does."""
    server = Server("a", error_share=0.3, straggler_share=0.2, network_s=(0.0, 0.0), overhead_s=0.0)
    names = [str(number) for number in range(200)]

    def took(names, gap_s):
        answers, _ = play(server, [Ask(number * gap_s, sample=name) for number, name in enumerate(names)], seed=4)
        return {
            name: (answer.what, round(answer.at_s - gap_s * number, 6))
            for number, (name, answer) in enumerate(zip(names, answers, strict=True))
        }

    assert took(names, 0.5) == took(names[::-1], 2.0)


def test_luck_is_the_same_on_every_machine():
    pinned = [0.26959576, 0.253743822, 0.064234532, 0.722820175, 0.524559962]
    assert [round(value, 9) for value in Luck(0).draw("sample")] == pinned


# What a client is told


def test_limits_and_prices_are_what_the_configuration_takes():
    server = Server("a", requests_per_minute=300, tokens_per_minute=9e5, concurrency=8, window_s=10.0)
    limits = Limits.model_validate(server.limits())
    assert (limits.requests_per_minute, limits.tokens_per_minute, limits.concurrency) == (300, 9e5, 8)
    assert (limits.window_s, limits.window) == (10.0, "auto")
    bucket = {"requests_per_minute": 300, "window": "bucket", "burst": 5}
    limits = Limits.model_validate(Server("a", **bucket, declares_window=True).limits())
    assert (limits.window, limits.burst) == ("bucket", 5)
    assert Server("a", requests_per_minute=300, concurrency=8, declared=False).limits() == {}
    price = Price.model_validate(Server("a", price_per_request=0.1, price_per_million_tokens=2).source()["price"])
    assert (price.per_request, price.input_per_million, price.output_per_million) == (0.1, 2, 2)


def test_what_cannot_be_enforced_is_refused():
    with pytest.raises(ValueError, match="less than one request"):
        Server("a", requests_per_minute=30, window_s=1.0)
    with pytest.raises(ValueError, match="start_s < end_s"):
        Fault(5, 5, "hang")


def test_what_is_larger_than_a_bucket_passes_when_it_is_full_and_is_owed():
    bucket = TokenBucket(2.0, 10.0)
    assert bucket.take(30.0, 0.0) is None
    assert bucket.take(1.0, 0.0).retry_after_s == pytest.approx(10.5)
