"""The replicas of a source: which one gets a request, what is under way at each, and how each is.

What becomes of calls at replicas that die, hang, refuse or answer nonsense is in `engine/test_engine.py`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import ExitStack, asynccontextmanager
from random import Random

import pytest

from qreward_plugins.config.source_models import PREFIX_AWARE
from qreward_plugins.errors import TransientError
from qreward_plugins.replicas.control import MOST_BYTES
from qreward_plugins.samples import Sample
from qreward_plugins.samples.spent import Usage
from qreward_plugins.sources.base import Request
from qreward_plugins.sources.passed_requests import PassedRequest
from qreward_plugins.sources.replica import FIRST_BACKOFF_S, LONGEST_BACKOFF_S, Replica
from qreward_plugins.sources.replicas import Lease, Replicas, RoutingHints
from qreward_plugins.sources.routing import STALE_S, CacheUse, cache_use_in, metrics_url, shared_prefix, waiting_in

from ..kit import each_of
from .wire import serving

# The choice and the counts


def of(*urls):
    return Replicas(urls, ("least_requests",), name="s")


def used(replicas, now=0.0):
    with replicas.acquire(now) as lease:
        return lease.replica.base_url


def fail(replicas, now=0.0):
    with replicas.acquire(now) as lease:
        lease.failed(now)
        return lease.replica.base_url


def test_the_fewest_in_flight_is_next_and_ties_go_round():
    assert [used(replicas) for replicas in [of("a", "b", "c")] for _ in range(6)] == ["a", "b", "c"] * 2
    replicas = of("a", "b")
    with replicas.acquire(0.0):
        assert [used(replicas) for _ in range(3)] == ["b", "b", "b"]


def test_the_backoff_doubles_with_every_failure_in_a_row():
    replicas = of("a", "b")
    now, waits = 0.0, []
    for _ in range(9):
        failed_at = now
        while replicas.all[0].health(now) != "half_open" and replicas.all[0].health(now) != "up":
            now += 0.5
        waits.append(now - failed_at)
        lease = replicas.acquire(now)
        while lease.replica.base_url != "a":
            lease.release()
            lease = replicas.acquire(now)
        lease.failed(now)
        lease.release()
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert waits[-1] == LONGEST_BACKOFF_S


def test_a_half_open_replica_gets_one_call_at_a_time():
    replicas = of("a", "b")
    fail(replicas)
    now = FIRST_BACKOFF_S
    with ExitStack() as stack:
        leases = [stack.enter_context(replicas.acquire(now)) for _ in range(6)]
        assert [lease.replica.base_url for lease in leases].count("a") == 1
        assert replicas.all[0].health(now) == "half_open"
        next(lease for lease in leases if lease.replica.base_url == "a").answered(now)
        assert replicas.all[0].health(now) == "up"


def test_calls_that_fail_together_count_as_one_failure():
    replicas = of("a", "b")
    for lease in [replicas.acquire(0.0) for _ in range(40)]:
        if lease.replica.base_url == "a":
            lease.failed(2.0)
        lease.release()
    health = [replicas.all[0].health(2.0 + part * FIRST_BACKOFF_S) for part in (0.9, 1.0)]
    assert (health, replicas.statistics(2.0)[0].failures) == (["backing_off", "half_open"], 20)


@each_of(("given_up_at", "health"), [(20.0, "up"), (45.0, "up"), (51.0, "backing_off")])
def test_a_cancelled_call_is_a_failure_only_after_a_long_wait_without_an_answer(given_up_at, health):
    """One that is given up early says nothing: a hedge was faster."""
    replicas = of("a", "b")
    for _ in range(2):
        with replicas.acquire(0.0) as lease:
            lease.answered(10.0)
    with replicas.acquire(20.0) as hung, replicas.acquire(20.0) as other:
        other.replica.answered(given_up_at)
        hung.cancelled(given_up_at)
        other.cancelled(given_up_at)
    assert (hung.replica.health(given_up_at), other.replica.health(given_up_at)) == (health, "up")


@pytest.mark.parametrize("mark", ["down", "draining"])
def test_a_replica_that_is_marked_gets_no_calls(mark):
    replicas = of("a", "b")
    replicas.mark(replicas.all[0], mark)  # type: ignore[arg-type]
    assert {used(replicas) for _ in range(4)} == {"b"}
    assert replicas.all[0].health(0.0) == mark
    replicas.mark(replicas.all[1], "down")
    with pytest.raises(TransientError, match=r"source 's': no replica is up"):
        replicas.acquire(0.0)
    back = replicas.all[0]
    back.failed(0.0, began_at=0.0)
    replicas.mark(back, "up")
    assert used(replicas) == "a"
    assert back.health(0.0) == "up", "it begins anew"


@pytest.mark.parametrize("seed", range(5))
def test_what_is_under_way_is_counted_once_and_given_back_once(seed):
    """In any course of events, also at replicas that go meanwhile."""
    rng, replicas, now = Random(seed), Replicas(["r0", "r1"], name="s"), 0.0
    leases: list[Lease] = []
    seen: list[Replica] = []
    for _ in range(500):
        now += rng.random() * 10
        lease = rng.choice(leases) if leases else None
        match rng.randrange(8):
            case 0:
                replicas.move(rng.sample(["r0", "r1", "r2", "r3"], rng.randrange(4)))
            case 1 if replicas.all:
                replicas.mark(rng.choice(replicas.all), rng.choice(["up", "down"]))
            case 2 | 3 if lease is not None:
                rng.choice([lease.failed, lease.answered, lease.cancelled])(now)
            case 4 | 5 if lease is not None:
                lease.release()
                lease.release()
                leases.remove(lease)
            case _ if replicas.up:
                leases.append(replicas.acquire(now, RoutingHints(rng.randrange(9), 9, rng.choice([None, 1, 2]))))
                seen.append(leases[-1].replica)
        for replica in seen:
            assert replica.in_flight == sum(lease.replica is replica for lease in leases)
            assert (replica.pending_tokens > 0) == (replica.in_flight > 0)
    for lease in leases:
        lease.release()
    assert not replicas.same_prefix


# Strategies


def judges(count, *strategies):
    names = [f"http://judge-{number}:8000/v1" for number in range(count)]
    return Replicas(names, strategies or PREFIX_AWARE, name="s")


def hints(key, prompt=1000):
    return RoutingHints(prompt, 100, Random(key).getrandbits(64))


def homes(replicas, keys):
    """Return where each prefix goes while nothing is under way."""
    found = {}
    for key in keys:
        with replicas.acquire(0.0, hints(key)) as lease:
            found[key] = lease.replica.base_url
    return found


KEYS = range(400)


@pytest.mark.parametrize("count", [1, 2, 7, 24])
def test_a_replica_that_comes_or_goes_moves_only_its_own_share(count):
    before, changed = homes(judges(count), KEYS), judges(count)
    kept = changed.all
    old = [replica.base_url for replica in kept]
    changed.move([*old, "http://new:8000/v1"])
    assert changed.all[:-1] == kept
    after = homes(changed, KEYS)
    moved = [key for key in KEYS if after[key] != before[key]]
    assert {after[key] for key in moved} <= {"http://new:8000/v1"}
    share = len(KEYS) / (count + 1)
    assert len(moved) <= share + 5 * share**0.5
    changed.move(old)
    for replica in changed.all:
        replica.reset()
    assert homes(changed, KEYS) == before


def test_a_tie_goes_to_the_next_strategy_and_tokens_are_those_to_be_expected():
    replicas = judges(3, "least_requests", "least_pending_tokens")
    big, small, middle = (replicas.acquire(0.0, RoutingHints(size, 8192)) for size in (900, 100, 500))
    assert [replicas.acquire(0.0).replica for _ in range(3)] == [small.replica, middle.replica, big.replica]
    replicas = of("a", "b")
    for usage, pending in ((Usage(90, 50), 8292), (None, 150)):
        with replicas.acquire(0.0, RoutingHints(100, 8192)) as lease:
            assert lease.replica.pending_tokens == pending
            replicas.used(lease.replica, usage)


def test_of_several_replicas_that_know_a_prefix_the_least_loaded_one_gets_it():
    def goes_to():
        with replicas.acquire(0.0, hints(1)) as lease:
            return lease.replica

    replicas = judges(8)
    first = goes_to()
    first.in_flight = 8
    second = goes_to()
    assert second is not first
    for loads, expected in (((1, 2), first), ((3, 2), second)):
        first.in_flight, second.in_flight = loads
        assert goes_to() is expected


def test_processes_that_see_only_their_own_load_balance_the_sum():
    """256 groups of 8 on 64 replicas, 32 requests each. Eight processes get answers that are drawn at random."""
    rng, processes, answers = Random(0), [judges(64) for _ in range(8)], list(range(256)) * 8
    rng.shuffle(answers)
    leases = [(group, rng.choice(processes).acquire(0.0, hints(group))) for group in answers]
    assert max(Counter(lease.replica.base_url for _, lease in leases).values()) <= 1.3 * 32
    assert len({(group, lease.replica.base_url) for group, lease in leases}) <= 2.25 * 256


def test_the_fullest_cache_is_avoided_while_all_are_known():
    replicas = judges(3, "kv_cache", "round_robin")
    a, b, c = replicas.all
    for replica, use, waiting in ((a, 0.9, 0.0), (b, 0.2, 4.0), (c, 0.5, 1.0)):
        replica.cache_read(use, waiting, 5.0)
    assert {replicas.acquire(5.0).replica.base_url for _ in range(3)} == {a.base_url}, "the others have a queue"
    for replica, use in ((a, 0.9), (b, 0.2), (c, 0.5)):
        replica.cache_read(use, 0.0, 10.0)
    assert {replicas.acquire(10.0).replica.base_url for _ in range(3)} == {b.base_url}
    assert {replicas.acquire(10.1 + STALE_S).replica.base_url for _ in range(3)} == {a.base_url, b.base_url, c.base_url}
    for replica, known in ((a, 0.9), (b, None), (c, 0.5)):
        replica.cache_read(known, 0.0, 20.0)
    assert {replicas.acquire(20.0).replica.base_url for _ in range(3)} == {a.base_url, b.base_url, c.base_url}


# Readings of the KV caches of servers


VLLM = b"""\
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="judge"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="a } b"} 0.5
vllm:kv_cache_usage_perc_total{engine="0"} 0.9
vllm:num_requests_waiting{engine="0"} 3.0
vllm:num_requests_waiting{engine="1"} 2.0
vllm:num_requests_waiting_by_reason{engine="0"} 9.0
"""


@each_of(
    ("metrics", "use", "waiting"),
    [
        (VLLM, 0.5, 5.0),
        (b'vllm:gpu_cache_usage_perc{engine="0"} 0.125', 0.125, 0.0),
        (b'sglang:token_usage{model_name="m"} 3.0e-1 1700000000\nsglang:num_queue_reqs 7\n', 0.3, 7.0),
        (b"llamacpp:kv_cache_usage_ratio 0\r\nllamacpp:requests_deferred 1\n", 0.0, 1.0),
        (b"sglang:token_usage NaN\nsglang:num_queue_reqs Inf\n", None, 0.0),
        (b"sglang:token_usage 1.5\nsglang:num_queue_reqs -1\n", None, 0.0),
        (b"sglang:token_usage{a\n<html>", None, 0.0),
    ],
)
def test_metrics_are_read(metrics, use, waiting):
    assert (cache_use_in(metrics), waiting_in(metrics)) == (use, waiting)


@asynccontextmanager
async def reading(answer):
    """A server that is asked for its metrics."""
    cache_use = CacheUse(verify_tls=True)
    async with serving(answer) as server:
        yield server, Replica(server.base_url), cache_use
        await cache_use.aclose()
        await cache_use.aclose()


@pytest.mark.anyio
async def test_a_reading_is_taken_in_the_background_and_kept_for_a_second():
    for base, path in (("http://h:8000", ""), ("https://h/judge/v1", "/judge")):
        assert metrics_url(base).path == f"{path}/metrics"
    async with reading(VLLM) as (server, replica, cache_use):
        now = asyncio.get_running_loop().time()
        for _ in range(3):
            cache_use.refresh([replica], now)
        assert replica.cache_use(now, 60.0) is None
        for at, asked in ((now, 1), (now + 0.9, 1), (now + 1.0, 2)):
            cache_use.refresh([replica], at)
            assert cache_use._task is not None
            await cache_use._task
            assert replica.cache_use(asyncio.get_running_loop().time(), 60.0) == 0.5
            assert len(server.exchanges) == asked
        assert "authorization" not in server.exchanges[0].headers


@pytest.mark.parametrize(
    "answer",
    [lambda exchange: exchange.reply("", "404 Not Found"), b"x" * MOST_BYTES + b"\nsglang:token_usage 0.5\n"],
    ids=["404", "huge"],
)
@pytest.mark.anyio
async def test_a_server_that_does_not_say_it_has_no_reading(answer):
    async with reading(answer) as (_, replica, cache_use):
        gone, loop = Replica("http://127.0.0.1:1/v1"), asyncio.get_running_loop()
        cache_use.refresh([replica, gone], loop.time())
        assert cache_use._task is not None
        await cache_use._task
        assert replica.cache_use(loop.time(), 60.0) is gone.cache_use(loop.time(), 60.0) is None


@pytest.mark.anyio
async def test_closing_ends_a_reading_that_hangs():
    hung = asyncio.Event()

    async def never(exchange):
        hung.set()
        await exchange.hung_up()

    async with reading(never) as (_, replica, cache_use):
        cache_use.refresh([replica], asyncio.get_running_loop().time())
        await hung.wait()
        task = cache_use._task
        assert task is not None
        await cache_use.aclose()
        assert task.cancelled()
        cache_use.refresh([replica], 1e9)
        assert cache_use._task is None


# The part of a request that siblings share

LONG = "a response of some length"
HEAD = "x" * 4096


def prompt(*texts, nonce="", response=LONG):
    messages = tuple({"role": "user", "content": text} for text in texts)
    return Request(Sample([{"role": "user", "content": "What?"}], response), messages, nonce=nonce)


def question(content, response="4"):
    return Request(Sample([{"role": "user", "content": content}], response))


def passed(**body):
    return Request(Sample([], ""), passed=PassedRequest(body))


JUDGED = prompt("system", "Judge. Question. <n1> 4 </n1> rules", nonce="n1")
PARTS = [{"type": "text", "text": "Judge. "}, {"type": "image_url", "image_url": {"url": "http://x"}}, "n1", 7]


@each_of(
    ("one", "other"),
    [
        (JUDGED, prompt("system", "Judge. Question. <n2> 5 and more </n2> rules", nonce="n2")),
        (prompt(f"Judge this: {LONG}"), prompt(f"Judge this: {LONG[::-1]}, please", response=LONG[::-1])),
        (prompt(HEAD + "one"), prompt(HEAD + "two")),
        (prompt(HEAD), passed(messages=[{"role": "user", "content": 2 * HEAD}])),
        (question("What?"), question("What?", "5")),
        (prompt("Hello"), passed(messages=[{"role": "user", "content": "Hello"}])),
        (prompt("Hello"), passed(input="Hello", instructions=["no text"])),
        (prompt("Hello"), passed(contents=[{"parts": [{"text": "Hello"}]}], messages=7)),
        (prompt(PARTS, nonce="n1"), prompt("Judge. ", "n1", nonce="n1")),
    ],
)
def test_siblings_share_what_comes_before_the_nonce_or_the_response_or_the_beginning(one, other):
    assert shared_prefix(one) == shared_prefix(other) is not None


def test_others_share_nothing():
    others = [
        JUDGED,
        prompt("system", "Judge. Questions. <n2> 5 </n2>", nonce="n2"),
        prompt("other", "Judge. Question. <n2> 5 </n2>", nonce="n2"),
        question("What?"),
        question("Why?"),
        prompt("\ud800 é", nonce="n"),
    ]
    assert len(set(map(shared_prefix, others)) - {None}) == len(others)
    assert {shared_prefix(question(content)) for content in ("", None, 7)} == {None}
    # It is the same in every process.
    assert shared_prefix(prompt("Judge. n1", nonce="n1")) == 5069825471389650243
