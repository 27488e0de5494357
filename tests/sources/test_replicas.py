"""The replicas of a source: which one gets a request, what is under way at each, and how each is.

What becomes of calls at replicas that die, hang, refuse or answer nonsense is in `engine/test_replicas.py`.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from random import Random
from typing import Any

import pytest
from aiohttp import web
from pydantic import TypeAdapter, ValidationError

from qreward_plugins.config.source_models import PREFIX_AWARE, EndpointConfig, RoutingStrategy
from qreward_plugins.errors import TransientError
from qreward_plugins.samples import Sample
from qreward_plugins.samples.spent import Usage
from qreward_plugins.sources.base import Request, ServedWeights
from qreward_plugins.sources.passed_requests import PassedRequest
from qreward_plugins.sources.replica import FIRST_BACKOFF_S, LONGEST_BACKOFF_S, Replica
from qreward_plugins.sources.replicas import Lease, Replicas, RoutingHints
from qreward_plugins.sources.routing import (
    MOST_BYTES,
    OVERLOAD,
    SLACK,
    STALE_S,
    CacheUse,
    cache_use_in,
    metrics_url,
    shared_prefix,
    waiting_in,
)

from ..kit import each_of
from .wire import asked, completion, outcome_of, request_of, serving

# Over real connections


@pytest.mark.anyio
async def test_a_replica_that_is_down_or_broken_is_avoided(open_source: Any) -> None:
    def bad(exchange: Any) -> None:
        exchange.reply(b"{}", "500 Oops")

    async with serving("") as down:
        pass
    async with serving(completion()) as up, serving(bad) as broken:
        source = open_source(down.base_url, broken.base_url, up.base_url)
        outcomes = await asked(source, *[request_of() for _ in range(8)])
    assert [getattr(outcome, "text", "failed") for outcome in outcomes] == ["failed", "failed", *["fine"] * 6]
    assert len(broken.exchanges) == 1


@pytest.mark.anyio
async def test_replicas_share_the_load(open_source: Any) -> None:
    all_there, go = asyncio.Event(), asyncio.Event()

    async def script(exchange: Any) -> None:
        if len(first.exchanges) + len(second.exchanges) == 6:
            all_there.set()
        await go.wait()
        exchange.reply(completion())

    async with serving(script) as first, serving(script) as second:
        source = open_source(first.base_url, second.base_url)
        tasks = [asyncio.create_task(outcome_of(source, request_of())) for _ in range(6)]
        await all_there.wait()
        assert len(first.exchanges) == len(second.exchanges) == 3
        go.set()
        await asyncio.gather(*tasks)
        await source.aclose()


# The choice and the counts


def of(*urls: str) -> Replicas:
    return Replicas(urls, ("least_requests",), name="s")


def used(replicas: Replicas, now: float = 0.0) -> str:
    with replicas.acquire(now) as lease:
        return lease.base_url


def fail(replicas: Replicas, now: float = 0.0) -> str:
    with replicas.acquire(now) as lease:
        lease.failed(now)
        return lease.base_url


def test_the_fewest_in_flight_is_next_and_ties_go_round() -> None:
    assert [used(replicas) for replicas in [of("a", "b", "c")] for _ in range(6)] == ["a", "b", "c"] * 2
    replicas = of("a", "b")
    with replicas.acquire(0.0):
        assert [used(replicas) for _ in range(3)] == ["b", "b", "b"]


def test_a_replica_that_failed_is_avoided_for_a_while_unless_all_did() -> None:
    replicas = of("a", "b")
    assert fail(replicas) == "a"
    assert {used(replicas, 0.9 * FIRST_BACKOFF_S) for _ in range(4)} == {"b"}
    assert {used(replicas, FIRST_BACKOFF_S) for _ in range(2)} == {"a", "b"}
    replicas = of("a", "b")
    assert {fail(replicas), fail(replicas)} == {"a", "b"}
    assert {used(replicas, 0.5) for _ in range(2)} == {"a", "b"}


def test_a_reply_of_a_replica_whose_weights_were_changed_meanwhile_is_known() -> None:
    replicas = of("a")
    replicas.serves("a", ServedWeights())
    lease = replicas.acquire(0.0)
    replicas.serves("a", ServedWeights("step-1", "1f"))
    lease.release()
    assert lease.mixed


def test_a_replica_that_answers_again_is_used_again() -> None:
    replicas = of("a", "b")
    with replicas.acquire(0.0) as lease, replicas.acquire(0.0), replicas.acquire(0.0) as other:
        assert lease.replica is other.replica
        lease.failed(0.0)
        other.answered(0.1)
        lease.answered(0.1)  # the first of both counts
    assert other.replica.statistics(0.2, 5.0).failures == 1
    assert {used(replicas, 0.2) for _ in range(2)} == {"a", "b"}


def test_a_failure_in_an_earlier_event_loop_does_not_count() -> None:
    replicas = of("a", "b")
    fail(replicas, 1000.0)
    assert {used(replicas, 1.0) for _ in range(2)} == {"a", "b"}


def test_the_backoff_doubles_with_every_failure_in_a_row() -> None:
    replicas = of("a", "b")
    now, waits = 0.0, []
    for _ in range(9):
        failed_at = now
        while replicas.all[0].health(now) != "half_open" and replicas.all[0].health(now) != "up":
            now += 0.5
        waits.append(now - failed_at)
        lease = replicas.acquire(now)
        while lease.base_url != "a":
            lease.release()
            lease = replicas.acquire(now)
        lease.failed(now)
        lease.release()
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert waits[-1] == LONGEST_BACKOFF_S


def test_a_half_open_replica_gets_one_call_at_a_time() -> None:
    replicas = of("a", "b")
    fail(replicas)
    now = FIRST_BACKOFF_S
    with ExitStack() as stack:
        leases = [stack.enter_context(replicas.acquire(now)) for _ in range(6)]
        assert [lease.base_url for lease in leases].count("a") == 1
        assert replicas.all[0].health(now) == "half_open"
        next(lease for lease in leases if lease.base_url == "a").answered(now)
        assert replicas.all[0].health(now) == "up"


def test_a_trial_that_is_cancelled_makes_room_for_the_next() -> None:
    replicas = of("a", "b")
    fail(replicas)
    for now in (1.0, 1.1):
        leases = [replicas.acquire(now) for _ in range(3)]
        assert "a" in [lease.base_url for lease in leases]
        for lease in leases:
            lease.release()


def test_calls_that_fail_together_count_as_one_failure() -> None:
    replicas = of("a", "b")
    leases = [replicas.acquire(0.0) for _ in range(40)]
    for lease in leases:
        if lease.base_url == "a":
            lease.failed(2.0)
        lease.release()
    assert replicas.all[0].health(2.0 + 0.9 * FIRST_BACKOFF_S) == "backing_off"
    assert replicas.all[0].health(2.0 + FIRST_BACKOFF_S) == "half_open"
    assert replicas.statistics(2.0)[0].failures == 20


@each_of(("given_up_at", "health"), [(20.0, "up"), (45.0, "up"), (51.0, "backing_off")])
def test_a_cancelled_call_counts_as_a_failure_after_a_long_wait_without_an_answer(
    given_up_at: float, health: str
) -> None:
    """One that is given up early says nothing: a hedge was faster."""
    replicas = of("a", "b")
    for _ in range(2):
        lease = replicas.acquire(0.0)
        lease.answered(10.0)
        lease.release()
    with replicas.acquire(20.0) as hung, replicas.acquire(20.0) as other:
        other.replica.answered(given_up_at)
        hung.cancelled(given_up_at)
        other.cancelled(given_up_at)
    assert (hung.replica.health(given_up_at), other.replica.health(given_up_at)) == (health, "up")


@pytest.mark.parametrize("mark", ["down", "draining"])
def test_a_replica_that_is_marked_gets_no_calls(mark: str) -> None:
    replicas = of("a", "b")
    replicas.mark("a", mark)  # type: ignore[arg-type]
    assert {used(replicas) for _ in range(4)} == {"b"}
    assert replicas.all[0].health(0.0) == mark
    replicas.mark("b", "down")
    with pytest.raises(TransientError, match=r"source 's': no replica is up"):
        replicas.acquire(0.0)
    back = replicas.all[0]
    back.failed(0.0, began_at=0.0)
    replicas.mark("a", "up")
    assert used(replicas) == "a"
    assert back.health(0.0) == "up", "it begins anew"


def test_replicas_come_and_go_while_calls_are_under_way() -> None:
    replicas = of("a")
    lease = replicas.acquire(0.0)
    replicas.add("b")
    replicas.remove("a")
    assert used(replicas) == "b"
    lease.release()
    assert lease.replica.in_flight == 0
    replicas.add("b")
    assert len(replicas.all) == 1
    with pytest.raises(LookupError, match="'s' has no replica 'a'"):
        replicas.remove("a")
    replicas.remove("b")
    with pytest.raises(TransientError):
        replicas.acquire(0.0)


def test_tokens_are_the_prompt_and_the_completion_that_is_to_be_expected() -> None:
    replicas = of("a", "b")
    hints = RoutingHints(prompt_tokens=100, completion_tokens=8192)
    with replicas.acquire(0.0, hints) as lease:
        assert lease.replica.pending_tokens == 8292
        replicas.used(lease.replica, Usage(90, 50))
    with replicas.acquire(0.0, hints) as lease:
        assert lease.replica.pending_tokens == 150
    with replicas.acquire(0.0, RoutingHints(100, 20)) as lease:
        assert lease.replica.pending_tokens == 120


@pytest.mark.parametrize("seed", range(5))
def test_what_is_under_way_is_counted_once_and_given_back_once(seed: int) -> None:
    """In any course of events, also at replicas that go meanwhile."""
    rng, replicas, now = Random(seed), Replicas(["r0", "r1"], name="s"), 0.0
    leases: list[Lease] = []
    seen: list[Replica] = []
    for _ in range(500):
        now += rng.random() * 10
        url, lease = f"r{rng.randrange(4)}", rng.choice(leases) if leases else None
        match rng.randrange(8):
            case 0:
                replicas.add(url)
            case 1 if any(replica.base_url == url for replica in replicas.all):
                rng.choice([replicas.remove, lambda url: replicas.mark(url, "down")])(url)
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


@pytest.mark.parametrize("strategy", RoutingStrategy.__args__)  # type: ignore[attr-defined]
def test_every_strategy_alone_decides(strategy: RoutingStrategy) -> None:
    replicas = Replicas(["a", "b", "c"], (strategy,))
    leases = [replicas.acquire(0.0, RoutingHints(10, 10, number)) for number in range(9)]
    assert {lease.base_url for lease in leases} == {"a", "b", "c"}


# Strategies


def judges(count: int, *strategies: RoutingStrategy) -> Replicas:
    names = [f"http://judge-{number}:8000/v1" for number in range(count)]
    return Replicas(names, strategies or PREFIX_AWARE, name="s")


def hints(key: int, prompt: int = 1000) -> RoutingHints:
    return RoutingHints(prompt, 100, Random(key).getrandbits(64))


def homes(replicas: Replicas, keys: range) -> dict[int, str]:
    """Return where each prefix goes while nothing is under way."""
    found = {}
    for key in keys:
        with replicas.acquire(0.0, hints(key)) as lease:
            found[key] = lease.base_url
    return found


KEYS = range(400)


@pytest.mark.parametrize("count", [1, 2, 7, 24])
def test_a_replica_that_comes_or_goes_moves_only_its_own_share(count: int) -> None:
    before, changed = homes(judges(count), KEYS), judges(count)
    changed.add("http://new:8000/v1")
    after = homes(changed, KEYS)
    moved = [key for key in KEYS if after[key] != before[key]]
    assert {after[key] for key in moved} <= {"http://new:8000/v1"}
    share = len(KEYS) / (count + 1)
    assert len(moved) <= share + 5 * share**0.5
    changed.remove("http://new:8000/v1")
    for replica in changed.all:
        replica.reset()
    assert homes(changed, KEYS) == before


def test_a_failed_replica_gives_its_prefixes_to_others_and_gets_them_back() -> None:
    replicas = judges(4)
    before = homes(replicas, KEYS)
    bad = replicas.all[0].base_url
    key = next(key for key in KEYS if before[key] == bad)
    with replicas.acquire(0.0, hints(key)) as lease:
        assert lease.base_url == bad
        lease.failed(0.0)
    during = homes(replicas, KEYS)
    assert bad not in during.values()
    assert all(during[key] == before[key] for key in KEYS if before[key] != bad)
    with replicas.acquire(1.0, hints(key)) as lease:
        assert lease.base_url == bad
        lease.answered(1.0)
    assert homes(replicas, KEYS) == before


@pytest.mark.parametrize("seed", range(10))
def test_no_replica_gets_more_than_so_many_above_the_mean(seed: int) -> None:
    rng = Random(seed)
    count = rng.randint(2, 9)
    replicas, under_way = judges(count), []
    for _ in range(150):
        wanted = hints(rng.randint(0, 5), prompt=rng.randint(1, 4000))
        mean = (1 + sum(replica.in_flight for replica in replicas.all)) / count
        before = {replica.base_url: replica.in_flight for replica in replicas.all}
        under_way.append(replicas.acquire(0.0, wanted))
        assert before[under_way[-1].base_url] < mean + OVERLOAD
        for _ in range(min(rng.randint(0, 2), len(under_way))):
            under_way.pop(0).release()


def test_new_prefixes_are_spread_as_evenly_as_requests_would_be() -> None:
    """64 groups of 8 on 32 replicas: two groups each. All are sent at once, so nothing is corrected later."""
    for seed in range(5):
        replicas = judges(32)
        leases = [replicas.acquire(0.0, hints(1000 * seed + group)) for group in range(64) for _ in range(8)]
        counts = Counter(lease.base_url for lease in leases)
        assert len(counts) == 32
        assert max(counts.values()) <= 1.25 * 16


def test_processes_that_see_only_their_own_load_balance_the_sum() -> None:
    """256 groups of 8 on 64 replicas, 32 requests each. Eight processes get answers that are drawn at random."""
    for seed in range(3):
        rng = Random(seed)
        processes = [judges(64) for _ in range(8)]
        answers = [1000 * seed + group for group in range(256) for _ in range(8)]
        rng.shuffle(answers)
        leases, places = [], defaultdict(set)
        for group in answers:
            leases.append(rng.choice(processes).acquire(0.0, hints(group)))
            places[group].add(leases[-1].base_url)
        counts = Counter(lease.base_url for lease in leases)
        assert len(counts) == 64
        assert max(counts.values()) <= 1.4 * 32
        assert sum(map(len, places.values())) <= 2.25 * 256


def test_of_two_busy_homes_none_is_taken() -> None:
    replicas = judges(8)
    with replicas.acquire(0.0, hints(1)) as lease:
        first = lease.replica
    for replica in replicas.all:
        replica.reset()
    first.in_flight = SLACK
    with replicas.acquire(0.0, hints(1)) as lease:
        second = lease.replica
    assert second is not first
    second.reset()
    second.in_flight = SLACK - 1
    with replicas.acquire(0.0, hints(1)) as lease:
        assert lease.replica is second
    second.reset()
    second.in_flight = SLACK
    with replicas.acquire(0.0, hints(1)) as lease:
        assert lease.replica.in_flight == 1


def test_of_several_replicas_that_know_a_prefix_the_least_loaded_one_gets_it() -> None:
    replicas = judges(8)
    with replicas.acquire(0.0, hints(1)) as lease:
        first = lease.replica
    first.in_flight = 8
    with replicas.acquire(0.0, hints(1)) as lease:
        second = lease.replica
    assert second is not first
    first.in_flight, second.in_flight = 1, 2
    with replicas.acquire(0.0, hints(1)) as lease:
        assert lease.replica is first
    first.in_flight = 3
    with replicas.acquire(0.0, hints(1)) as lease:
        assert lease.replica is second


def test_a_prefix_that_all_share_is_spread_over_all() -> None:
    for count, most in ((100, 1.6), (400, 1.3)):
        replicas, rng = judges(8), Random(1)
        leases = [replicas.acquire(0.0, hints(0, prompt=rng.choice((600, 20_000)))) for _ in range(count)]
        counts = Counter(lease.base_url for lease in leases)
        assert len(counts) == 8
        assert max(counts.values()) <= most * count / 8


def test_a_tie_goes_to_the_next_strategy() -> None:
    replicas = judges(3, "least_requests", "least_pending_tokens")
    big, small, middle = (replicas.acquire(0.0, RoutingHints(size, 1)) for size in (900, 100, 500))
    assert {big.base_url, small.base_url, middle.base_url} == {replica.base_url for replica in replicas.all}
    assert replicas.acquire(0.0, RoutingHints(1, 1)).base_url == small.base_url
    assert replicas.acquire(0.0, RoutingHints(1, 1)).base_url == middle.base_url


def test_the_fullest_cache_is_avoided_while_all_are_known() -> None:
    replicas = judges(3, "kv_cache", "round_robin")
    a, b, c = replicas.all
    for replica, use, waiting in ((a, 0.9, 0.0), (b, 0.2, 4.0), (c, 0.5, 1.0)):
        replica.cache_read(use, waiting, 5.0)
    assert {replicas.acquire(5.0).base_url for _ in range(3)} == {a.base_url}, "the others have a queue"
    for replica, use in ((a, 0.9), (b, 0.2), (c, 0.5)):
        replica.cache_read(use, 0.0, 10.0)
    assert {replicas.acquire(10.0).base_url for _ in range(3)} == {b.base_url}
    assert {replicas.acquire(10.1 + STALE_S).base_url for _ in range(3)} == {a.base_url, b.base_url, c.base_url}
    for replica, known in ((a, 0.9), (b, None), (c, 0.5)):
        replica.cache_read(known, 0.0, 20.0)
    assert {replicas.acquire(20.0).base_url for _ in range(3)} == {a.base_url, b.base_url, c.base_url}


READ = TypeAdapter(EndpointConfig.model_fields["routing"].rebuild_annotation())


def test_the_key_is_a_list_or_a_name() -> None:
    assert EndpointConfig.model_fields["routing"].default == ("least_requests",)
    assert READ.validate_python("kv_cache") == ("kv_cache",)
    assert READ.validate_python(["round_robin", "kv_cache"]) == ("round_robin", "kv_cache")
    for wrong in ([], "random", ["least_requests", "least_requests"], {"strategies": ["kv_cache"]}, 7):
        with pytest.raises(ValidationError):
            READ.validate_python(wrong)


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


@pytest.mark.parametrize(
    ("metrics", "use", "waiting"),
    [
        (VLLM, 0.5, 5.0),
        (b'vllm:gpu_cache_usage_perc{engine="0"} 0.125', 0.125, 0.0),
        (b'sglang:token_usage{model_name="m"} 3.0e-1 1700000000\nsglang:num_queue_reqs 7\n', 0.3, 7.0),
        (b"llamacpp:kv_cache_usage_ratio 0\r\nllamacpp:requests_deferred 1\n", 0.0, 1.0),
        (b"sglang:token_usage NaN\nsglang:num_queue_reqs Inf\n", None, 0.0),
        (b"sglang:token_usage 1.5\nsglang:num_queue_reqs -1\n", None, 0.0),
        (b"sglang:token_usage{}\nsglang:num_queue_reqs\n", None, 0.0),
        (b"sglang:token_usage{a\n<html>", None, 0.0),
    ],
)
def test_metrics_are_read(metrics: bytes, use: float | None, waiting: float) -> None:
    assert (cache_use_in(metrics), waiting_in(metrics)) == (use, waiting)


@pytest.mark.parametrize(
    ("base_url", "address"),
    [
        ("http://h:8000/v1", "http://h:8000/metrics"),
        ("http://h:8000", "http://h:8000/metrics"),
        ("https://h/judge/v1", "https://h/judge/metrics"),
    ],
)
def test_metrics_are_beside_the_api(base_url: str, address: str) -> None:
    assert str(metrics_url(base_url)) == address


@asynccontextmanager
async def served(answer: Callable[[web.Request], web.StreamResponse]) -> AsyncIterator[str]:
    async def handle(request: web.Request) -> web.StreamResponse:
        return answer(request)

    app = web.Application()
    app.router.add_get("/metrics", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


@pytest.mark.anyio
async def test_a_reading_is_taken_in_the_background_and_kept_for_a_second() -> None:
    asked = []

    def answer(request: web.Request) -> web.Response:
        asked.append(dict(request.headers))
        return web.Response(body=VLLM)

    async with served(answer) as url:
        loop, replica, cache_use = asyncio.get_running_loop(), Replica(url), CacheUse(verify_tls=True)
        now = loop.time()
        for _ in range(3):
            cache_use.refresh([replica], now)
        assert replica.cache_use(now, 60.0) is None
        assert cache_use._task is not None
        await cache_use._task
        assert replica.cache_use(loop.time(), 60.0) == 0.5
        cache_use.refresh([replica], now + 0.9)
        assert len(asked) == 1
        cache_use.refresh([replica], now + 1.0)
        await cache_use._task
        assert len(asked) == 2
        assert "Authorization" not in asked[0]
        await cache_use.aclose()


@pytest.mark.parametrize(
    "answer",
    [
        lambda request: web.Response(status=404),
        lambda request: web.Response(status=302, headers={"Location": "http://127.0.0.1:1/"}),
        lambda request: web.Response(text="no such metric"),
        lambda request: web.Response(body=b"x" * MOST_BYTES + b"\nsglang:token_usage 0.5\n"),
    ],
)
@pytest.mark.anyio
async def test_a_server_that_does_not_say_it_has_no_reading(
    answer: Callable[[web.Request], web.StreamResponse],
) -> None:
    async with served(answer) as url:
        loop, replica, cache_use = asyncio.get_running_loop(), Replica(url), CacheUse(verify_tls=True)
        gone = Replica("http://127.0.0.1:1/v1")
        cache_use.refresh([replica, gone], loop.time())
        assert cache_use._task is not None
        await cache_use._task
        assert replica.cache_use(loop.time(), 60.0) is gone.cache_use(loop.time(), 60.0) is None
        await cache_use.aclose()


@pytest.mark.anyio
async def test_closing_ends_a_reading_that_hangs() -> None:
    hung = asyncio.Event()

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hung.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(never, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    cache_use = CacheUse(verify_tls=True)
    cache_use.refresh([Replica(f"http://127.0.0.1:{port}")], asyncio.get_running_loop().time())
    await hung.wait()
    task = cache_use._task
    assert task is not None
    await cache_use.aclose()
    await cache_use.aclose()
    assert task.cancelled()
    cache_use.refresh([Replica(f"http://127.0.0.1:{port}")], 1e9)
    assert cache_use._task is None
    server.close()
    await server.wait_closed()


# The part of a request that siblings share


LONG = "a response of some length"


def request(*texts: Any, nonce: str = "", response: str = LONG) -> Request:
    messages = tuple({"role": "user", "content": text} for text in texts)
    return Request(Sample([{"role": "user", "content": "What?"}], response), messages, nonce=nonce)


def test_what_comes_before_the_nonce_is_shared() -> None:
    one = shared_prefix(request("system", "Judge. Question. <n1> 4 </n1> rules", nonce="n1"))
    two = shared_prefix(request("system", "Judge. Question. <n2> 5 and more </n2> rules", nonce="n2"))
    assert one == two is not None
    assert shared_prefix(request("system", "Judge. Questions. <n2> 5 </n2>", nonce="n2")) != one
    assert shared_prefix(request("other", "Judge. Question. <n2> 5 </n2>", nonce="n2")) != one


def test_without_a_nonce_what_comes_before_the_response_is_shared() -> None:
    one = shared_prefix(request(f"Judge this: {LONG}"))
    assert one == shared_prefix(request(f"Judge this: {LONG[::-1]}, please", response=LONG[::-1]))


def test_without_a_response_in_it_the_beginning_is_shared() -> None:
    head = "x" * 4096
    assert shared_prefix(request(head + "one")) == shared_prefix(request(head + "two")) == shared_prefix(request(head))


def test_a_service_shares_the_question() -> None:
    def of(question: Any, response: str) -> int | None:
        return shared_prefix(Request(Sample([{"role": "user", "content": question}], response)))

    assert of("What?", "4") == of("What?", "5")
    assert of("Why?", "4") != of("What?", "4")
    assert of("", "4") is of(None, "4") is of(7, "4") is None


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "Hello"}]},
        {"input": "Hello", "instructions": ["no text"]},
        {"contents": [{"parts": [{"text": "Hello"}]}], "messages": 7},
    ],
)
def test_the_beginning_of_a_clients_own_request_is_shared(body: dict[str, Any]) -> None:
    found = shared_prefix(Request(Sample([], ""), passed=PassedRequest(body)))
    assert found == shared_prefix(request("Hello"))
    long = {"messages": [{"role": "user", "content": 8192 * "x"}]}
    assert shared_prefix(Request(Sample([], ""), passed=PassedRequest(long))) == shared_prefix(request(4096 * "x"))


def test_parts_and_strange_contents_are_read() -> None:
    parts = [{"type": "text", "text": "Judge. "}, {"type": "image_url", "image_url": {"url": "http://x"}}, "n1", 7]
    assert shared_prefix(request(parts, nonce="n1")) == shared_prefix(request("Judge. ", "n1", nonce="n1"))
    assert shared_prefix(request("\ud800 é", nonce="n")) is not None


def test_it_is_the_same_in_every_process() -> None:
    assert shared_prefix(request("Judge. n1", nonce="n1")) == 5069825471389650243
