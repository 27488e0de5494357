"""One run: a policy on a scenario, in virtual time, and the numbers that come out of it."""

from __future__ import annotations

import asyncio
import gc
import importlib
import random

from . import POLICIES, clock
from .results import CAP_S, Run

REST_S = 120.0
"""The least rest between a warm-up and the measured batch."""


def run(policy: str, scenario: str, samples: int, seed: int) -> Run:
    """One run, in a virtual loop of its own. The same arguments give the same numbers.

    A policy that reads other clocks than the loop's wants `clock.install` before.
    """
    module = importlib.import_module(f".{POLICIES[policy].module}", __package__)
    from qreward_plugins.simulation import scenario as make_scenario

    from .stage import Stage

    starts_at_s = POLICIES[policy].starts_at_s
    rng = random.Random(f"{scenario}/{samples}/{seed}")
    random.seed(rng.random())
    loop = clock.TickingLoop()
    loop.set_default_executor(clock.InlineExecutor())
    done: dict[str, float] = {}

    async def main() -> Run:
        stage = Stage(make_scenario(scenario, samples=samples, seed=seed), starts_at_s=starts_at_s)
        peer = module.Peer(stage, POLICIES[policy].variant, lambda item: done.setdefault(item.id, loop.time()))
        if starts_at_s:
            await peer.warm_up()
            if loop.time() > starts_at_s - REST_S:
                raise RuntimeError(f"the warm-up took {loop.time():.0f} s, which leaves too little rest")
            await asyncio.sleep(starts_at_s - loop.time())
        before = stage.counts()
        timed_out = False
        try:
            await asyncio.wait_for(peer.run(), CAP_S)
        except asyncio.TimeoutError:
            timed_out = True
        calls, violations, surprises = (now - then for now, then in zip(stage.counts(), before, strict=True))
        await peer.close()
        return Run(
            policy=policy,
            scenario=scenario,
            samples=samples,
            seed=seed,
            makespan_s=CAP_S if timed_out else max(done.values()) - starts_at_s,
            bound_s=stage.scenario.bound_s(),
            given_up=len(peer.given_up),
            unscored=samples - len(done),
            calls=calls,
            violations=violations,
            surprises=surprises,
        )

    try:
        with clock.virtual(loop, into_minute_s=rng.uniform(0, 60)):
            result = loop.run_until_complete(main())
            loop.run_until_complete(_end_all())
        return result
    finally:
        loop.close()
        gc.collect()


async def _end_all() -> None:
    """End what the policy left running."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=1.0)


__all__ = ["REST_S", "run"]
