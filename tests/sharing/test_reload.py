"""Reloads of processes that share limits: each reads the file at a time of its own, and the limits hold meanwhile."""

from __future__ import annotations

import asyncio

import pytest
from office import WINDOW_S, Office, a_source, all_scored, an_engine, limits, now, samples, until

from qreward_plugins.simulation import run


def play(reloads, *, per_window, declared, count=60):
    """Two engines over one source that allows `per_window`; `reloads` are (time, engine, keys of the source)."""

    async def main():
        office, source = Office(), a_source(requests_per_window=per_window)
        async with (
            an_engine(office, source, limits(declared)) as one,
            an_engine(office, source, limits(declared)) as two,
        ):
            scoring = asyncio.gather(one.score_all(samples(count)), two.score_all(samples(count, 1_000)))
            for moment, number, node in reloads:
                await until(moment)
                engine = (one, two)[number]
                tree = engine.config.model_dump(mode="json", exclude_defaults=True)
                tree["sources"]["a"] |= {"kind": "openai", **node}
                tree["judges"]["quality"]["kind"] = "llm"
                await engine.reload(tree)
            assert all(map(all_scored, await scoring))
        assert source.violations == []
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return now()

    return run(main())


def test_a_limit_that_rises_in_one_process_after_the_other():
    reloads = [(4.0, 0, {"limits": limits(20)}), (9.0, 1, {"limits": limits(20)})]
    # The server allows the higher limit only from then on, which is when both have confirmed it.
    assert play(reloads, per_window=20, declared=10) < 120 / 10 * WINDOW_S


def test_while_one_process_has_the_old_limit_the_lower_one_holds():
    # One process raises the limit to what the server does not allow together with the other's.
    play([(4.0, 0, {"limits": limits(40)})], per_window=10, declared=10)


def test_frequent_reloads_do_not_silence_the_keeper(caplog):
    """Each change of the sources is reported, and a new report voids the answer that the keeper still holds."""
    prices = [(4.0 + 2 * n, 0, {"price": {"per_request": n}}) for n in range(12)]
    play(prices, per_window=20, declared=20, count=120)
    assert "has not answered" not in caplog.text


@pytest.mark.parametrize("workers", [1, 2])
def test_a_source_that_is_opened_anew_keeps_its_window(workers):
    reloads = [(4.0 + worker / 2, worker, {"timeouts": {"connect_s": 3}}) for worker in range(workers)]
    play(reloads, per_window=20, declared=20)
