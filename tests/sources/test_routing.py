"""The strategies by which requests are routed to replicas."""

from __future__ import annotations

from collections import Counter, defaultdict
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from qreward_plugins.config.source_models import EndpointConfig, Routing, RoutingStrategy
from qreward_plugins.sources.replicas import Replicas, RoutingHints
from qreward_plugins.sources.routing import SLACK, STALE_S, Prefix


def of(count: int, *strategies: RoutingStrategy) -> Replicas:
    names = [f"http://judge-{number}:8000/v1" for number in range(count)]
    return Replicas(names, Routing(strategies=strategies) if strategies else Routing(), name="s")


def hints(key: int, tokens: int = 500, prompt: int = 1000) -> RoutingHints:
    return RoutingHints(prompt, 100, Prefix(Random(key).getrandbits(64), tokens))


def homes(replicas: Replicas, keys: range) -> dict[int, str]:
    """Return where each prefix goes while nothing is under way."""
    found = {}
    for key in keys:
        with replicas.acquire(0.0, hints(key)) as lease:
            found[key] = lease.base_url
    return found


KEYS = range(400)


@given(count=st.integers(2, 24))
@settings(max_examples=20, deadline=None)
def test_a_replica_that_goes_moves_only_its_own_prefixes(count: int) -> None:
    before = homes(of(count), KEYS)
    fewer = of(count)
    gone = fewer.all[count // 2].base_url
    fewer.remove(gone)
    after = homes(fewer, KEYS)
    assert all(after[key] == before[key] for key in KEYS if before[key] != gone)
    assert gone not in after.values()


@given(count=st.integers(1, 24))
@settings(max_examples=20, deadline=None)
def test_a_replica_that_comes_takes_only_its_share(count: int) -> None:
    before, more = homes(of(count), KEYS), of(count)
    more.add("http://new:8000/v1")
    after = homes(more, KEYS)
    moved = [key for key in KEYS if after[key] != before[key]]
    assert {after[key] for key in moved} <= {"http://new:8000/v1"}
    share = len(KEYS) / (count + 1)
    assert len(moved) <= share + 5 * share**0.5


def test_prefixes_are_spread_evenly() -> None:
    counts = Counter(homes(of(8), range(4000)).values())
    assert len(counts) == 8
    assert max(counts.values()) < 1.2 * 500


def test_separate_processes_agree() -> None:
    mine, theirs = of(8), of(8)
    order = list(KEYS)
    Random(1).shuffle(order)
    first = homes(mine, KEYS)
    assert all(first[key] == homes(theirs, range(key, key + 1))[key] for key in order)


def test_a_failed_replica_gives_its_prefixes_to_others_and_gets_them_back() -> None:
    replicas = of(4)
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


def test_the_siblings_of_a_group_land_together() -> None:
    replicas = of(8)
    places = defaultdict(set)
    leases = []
    for group in range(64):
        for _ in range(8):
            lease = replicas.acquire(0.0, hints(group))
            leases.append(lease)
            places[group].add(lease.base_url)
    assert sum(map(len, places.values())) <= 1.25 * 64


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4000), st.integers(0, 3)), min_size=1, max_size=120),
    st.integers(2, 9),
    st.sampled_from([1, 6, 30]),
)
@settings(max_examples=60, deadline=None)
def test_no_replica_gets_more_than_so_many_above_the_mean(
    calls: list[tuple[int, int, int]], count: int, above: int
) -> None:
    replicas = Replicas(map(str, range(count)), Routing(overload_requests=above))
    under_way = []
    for key, prompt, ends in calls:
        wanted = hints(key, tokens=prompt // 2 + 1, prompt=prompt)
        mean = (1 + sum(replica.in_flight for replica in replicas.all)) / count
        before = {replica.base_url: replica.in_flight for replica in replicas.all}
        lease = replicas.acquire(0.0, wanted)
        assert before[lease.base_url] < mean + above
        under_way.append(lease)
        for _ in range(min(ends, len(under_way))):
            under_way.pop(0).release()


def test_new_prefixes_are_spread_as_evenly_as_requests_would_be() -> None:
    """64 groups of 8 on 32 replicas: two groups each. All are sent at once, so nothing is corrected later."""
    for seed in range(5):
        replicas = of(32)
        leases = [replicas.acquire(0.0, hints(1000 * seed + group)) for group in range(64) for _ in range(8)]
        counts = Counter(lease.base_url for lease in leases)
        assert len(counts) == 32
        assert max(counts.values()) <= 1.25 * 16


def test_processes_that_see_only_their_own_load_balance_the_sum() -> None:
    """256 groups of 8 on 64 replicas, 32 requests each. Eight processes get answers that are drawn at random."""
    for seed in range(3):
        rng = Random(seed)
        processes = [of(64) for _ in range(8)]
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
    replicas = of(8)
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
    replicas = of(8)
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
    replicas = of(8)
    leases = [replicas.acquire(0.0, hints(0)) for _ in range(400)]
    counts = Counter(lease.base_url for lease in leases)
    assert len(counts) == 8
    assert max(counts.values()) <= 1.1 * 50


def test_without_a_prefix_the_next_strategy_decides() -> None:
    replicas = of(3)
    first = replicas.acquire(0.0, RoutingHints(1000, 10))
    second = replicas.acquire(0.0, RoutingHints(10, 10))
    third = replicas.acquire(0.0, RoutingHints(10, 10))
    assert len({lease.base_url for lease in (first, second, third)}) == 3
    assert replicas.acquire(0.0, RoutingHints(10, 10)).base_url == second.base_url


def test_a_tie_goes_to_the_next_strategy() -> None:
    replicas = of(3, "least_requests", "least_pending_tokens")
    big, small, middle = (replicas.acquire(0.0, RoutingHints(size, 1)) for size in (900, 100, 500))
    assert {big.base_url, small.base_url, middle.base_url} == {replica.base_url for replica in replicas.all}
    assert replicas.acquire(0.0, RoutingHints(1, 1)).base_url == small.base_url
    assert replicas.acquire(0.0, RoutingHints(1, 1)).base_url == middle.base_url


def test_the_fullest_cache_is_avoided_while_all_are_known() -> None:
    replicas = of(3, "kv_cache", "round_robin")
    a, b, c = replicas.all
    for replica, use in ((a, 0.9), (b, 0.2), (c, 0.5)):
        replica.cache_read(use, 0.0, 10.0)
    assert {replicas.acquire(10.0).base_url for _ in range(3)} == {b.base_url}
    assert {replicas.acquire(10.1 + STALE_S).base_url for _ in range(3)} == {a.base_url, b.base_url, c.base_url}
    for replica, known in ((a, 0.9), (b, None), (c, 0.5)):
        replica.cache_read(known, 0.0, 20.0)
    assert {replicas.acquire(20.0).base_url for _ in range(3)} == {a.base_url, b.base_url, c.base_url}


def test_a_server_with_a_queue_is_avoided_before_the_fullest_cache() -> None:
    replicas = of(3, "kv_cache", "round_robin")
    a, b, c = replicas.all
    for replica, use, waiting in ((a, 0.9, 0.0), (b, 0.2, 4.0), (c, 0.5, 1.0)):
        replica.cache_read(use, waiting, 10.0)
    assert {replicas.acquire(10.0).base_url for _ in range(3)} == {a.base_url}


def test_round_robin_looks_at_nothing_else() -> None:
    replicas = of(3, "round_robin")
    assert [replicas.acquire(0.0, hints(1)).base_url[13] for _ in range(6)] == ["0", "1", "2"] * 2


READ = TypeAdapter(EndpointConfig.model_fields["routing"].rebuild_annotation())


def test_the_key_is_a_list_a_name_or_a_mapping() -> None:
    assert EndpointConfig.model_fields["routing"].default == Routing(strategies=("least_requests",))
    assert READ.validate_python("kv_cache") == Routing(strategies=("kv_cache",))
    assert READ.validate_python(["round_robin", "kv_cache"]).strategies == ("round_robin", "kv_cache")
    given = READ.validate_python({"prefix_tokens": 100, "overload_requests": 2})
    assert given.strategies == ("prefix_aware", "least_pending_tokens")
    assert READ.validate_python(given.model_dump()) == given


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        "random",
        ["least_requests", "least_requests"],
        {"overload_requests": 0},
        {"overload_requests": 1.5},
        {"prefix_tokens": 0},
        {"overload_requests": True},
        7,
        {"strategies": None},
    ],
)
def test_what_is_wrong_is_refused(wrong: object) -> None:
    with pytest.raises(ValidationError):
        READ.validate_python(wrong)
