"""The reward function: scores a sample, a group, or the several samples that one rollout became.

slime trains on the returned rewards as they are. It ends the job at an exception, breaks at None, and one NaN makes a
whole group NaN. So every sample gets a finite number. A failed sample gets a stand-in, `remove_sample`, and a mark for
the post-process hook, which leaves it out of the group's statistics.

When its batch is full, slime sets `GenerateState.aborted` and then waits for every pending reward
(slime/rollout/sglang_rollout.py, `abort`). It does not notify the reward function. So one timer in each event loop
polls that flag for all pending calls, and the step does not wait for rewards that it no longer needs. A custom rollout
function or trainer may provide a callable `args.qreward_aborted` instead.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, ref

from qreward_plugins import Cause, Failed, Outcome
from qreward_plugins.adapters import number_of

from .samples import (
    ROLLOUT_SAMPLE,
    data_source_of,
    exclude,
    group_of,
    include,
    is_aborted,
    key_of,
    metadata_of,
    record_of,
    to_sample,
)
from .settings import Adapter, adapter_of

Reward: TypeAlias = float | dict[str, Any]

POLL_S = 0.1
"""Seconds between two reads of slime's flag."""

_ABORTED = Failed(Cause.INFRA, "aborted", "slime aborted the rollout before there was a verdict")

_late: dict[int, tuple[ref[ROLLOUT_SAMPLE], Future[Any], int]] = {}
"""By the ids of samples: what still scores them after an abort, and their places in it."""


async def reward(args: Any, sample: ROLLOUT_SAMPLE | Sequence[ROLLOUT_SAMPLE], **_: Any) -> Any:
    """The reward of a sample, or the rewards of several in order: of a group with `--group-rm`, else of the samples
    that a custom generate function made of one rollout.

    A reward is a float; with `--reward-key`, in an evaluation with `--eval-reward-key`, a dict that has this key and
    `score`, `failed`, `cause` and every component. A failed sample gets the mean of its scored siblings,
    `remove_sample = True` and `metadata["qreward"]["excluded"]`, unless `on_failure` says otherwise. Returns within the
    configuration's `engine.deadline_s`; cancelling the call cancels its attempts. Raises `ConfigurationError`, and
    `RewardMissing` with `on_failure: raise`.
    """
    if isinstance(sample, (list, tuple)):
        samples = list(sample)
        return await _score(args, samples, size=len(samples) if getattr(args, "group_rm", False) else None)
    return (await _score(args, [sample], size=getattr(args, "n_samples_per_prompt", None)))[0]


def give_stand_ins(args: Any, samples: Sequence[ROLLOUT_SAMPLE]) -> None:
    """Treat samples that slime never asked to score as failed: it asks for no reward if the server aborted a
    generation, and then breaks at the sample's reward of None.
    """
    rewards = _write(args, adapter_of(args), samples, [_ABORTED] * len(samples), size=None)
    for sample, reward in zip(samples, rewards, strict=True):
        sample.reward = reward


def settle(args: Any, samples: Iterable[ROLLOUT_SAMPLE]) -> None:
    """Give samples that were aborted the verdicts that have come since; later ones no longer count.

    With `--partial-rollout` slime keeps complete samples for a later rollout without asking again, so scoring goes on
    after an abort. The hooks that read samples call this first.
    """
    for sample in samples:
        _, work, place = _late.pop(id(sample), (None, None, 0))
        if work is None or not work.done() or work.cancelled() or work.exception() is not None:
            continue
        outcome = _outcomes(work)[place]
        if outcome.reward is not None:
            facts = adapter_of(args).facts.of(outcome, data_source_of(sample))
            include(sample, facts)
            sample.reward = _as_reward(args, sample, facts, outcome.reward)


async def _score(args: Any, samples: Sequence[ROLLOUT_SAMPLE], *, size: int | None) -> list[Reward]:
    adapter = adapter_of(args)
    loop = asyncio.get_running_loop()
    began = loop.time()
    for sample in samples:
        _late.pop(id(sample), None)  # whoever asks again wants the newer verdict
    judged = [sample for sample in samples if not is_aborted(sample)]
    outcomes: Sequence[Outcome] = [_ABORTED] * len(judged)
    late: Future[Any] | None = None
    kept, over = bool(getattr(args, "partial_rollout", False)), aborted(args)
    if judged and (kept or not over):
        await adapter.phases.begin()
        asked = list(map(to_sample, judged))
        # One alone belongs to the batch of all that are under way.
        work: Future[Any] = adapter.portal.submit(asked[0]) if len(asked) == 1 else adapter.portal.submit_all(asked)
        try:
            if not over and await finished(args, work):
                outcomes = _outcomes(work)
            elif kept:
                late = work
        finally:
            if late is None:
                work.cancel()
    scored = iter(outcomes)
    by_sample = [_ABORTED if is_aborted(sample) else next(scored) for sample in samples]
    rewards = _write(args, adapter, samples, by_sample, size=size)
    for sample in samples:
        sample.non_generation_time = getattr(sample, "non_generation_time", 0.0) + (loop.time() - began)
    if late is not None:
        for place, sample in enumerate(judged):
            _late[id(sample)] = (ref(sample, partial(_forget, id(sample))), late, place)
    return rewards


def _forget(key: int, _: object) -> None:
    _late.pop(key, None)


def _outcomes(work: Future[Any]) -> Sequence[Outcome]:
    result = work.result()
    return result if isinstance(result, list) else [result]


def _write(
    args: Any,
    adapter: Adapter,
    samples: Sequence[ROLLOUT_SAMPLE],
    outcomes: Sequence[Outcome],
    *,
    size: int | None,
) -> list[Reward]:
    """Write the outcomes into the samples, and return their rewards. `size` is the size of a whole group, if known."""
    rewards: dict[int, Reward] = {}
    failed: list[tuple[int, dict[str, Any]]] = []
    for place, (sample, outcome) in enumerate(zip(samples, outcomes, strict=True)):
        facts = adapter.facts.of(outcome, data_source_of(sample))
        number = None if outcome is _ABORTED else number_of(outcome, adapter.config.on_failure)
        if number is None:
            failed.append((place, facts))
            if isinstance(outcome, Failed) and not outcome.screened and outcome is not _ABORTED:
                adapter.last_failure = outcome.detail
            continue
        include(sample, facts)
        reward = rewards[place] = _as_reward(args, sample, facts, number)
        trained = float(reward[key_of(args, sample)]) if isinstance(reward, dict) else reward
        known = None if group_of(sample) is None else size  # the samples of an evaluation's data source are not counted
        adapter.means.add(_siblings_of(sample), trained, size=known)
    for place, facts in failed:
        sample = samples[place]
        adapter.warn_of_missing_hook(args)
        exclude(args, sample, facts)
        follow = partial(_follow, args, ref(sample), facts)
        if group_of(sample) is None:
            follow(adapter.means.mean(_siblings_of(sample)))
        else:
            adapter.means.follow(_siblings_of(sample), follow, size=size)
        rewards[place] = sample.reward
    return [rewards[place] for place in range(len(samples))]


def _follow(args: Any, sample_ref: ref[ROLLOUT_SAMPLE], facts: Mapping[str, Any], mean: float) -> None:
    """Give a failed sample the mean of its siblings, unless it was scored since."""
    sample = sample_ref()
    if sample is not None and record_of(sample).get("excluded"):
        sample.reward = _as_reward(args, sample, facts, mean)


class _Rewards(dict[str, Any]):
    """The rewards of a sample by key."""

    def __round__(self, digits: int | None = None) -> float:
        # slime rounds the rewards of an evaluation in which all are equal, whatever they are.
        return round(float(self["score"]), digits)


def _as_reward(args: Any, sample: ROLLOUT_SAMPLE, facts: Mapping[str, Any], number: float) -> Reward:
    """A number in slime's form: a float, or a dict if slime reads a key of it."""
    key = key_of(args, sample)
    if not key:
        return number
    components = {name.removeprefix("score/"): value for name, value in facts.items() if name.startswith("score/")}
    reward = _Rewards({**components, "score": number, "failed": facts["failed"], "cause": facts["cause"]})
    if reward.get(key) is None or facts["reward"] is None:
        reward[key] = number
    return reward


def _siblings_of(sample: ROLLOUT_SAMPLE) -> tuple[str, Any]:
    """Whose mean a failed sample gets: its group's, or its data source's in an evaluation, which has no groups."""
    group = group_of(sample)
    return ("eval", str(metadata_of(sample).get("data_source", ""))) if group is None else ("group", group)


def aborted(args: Any) -> bool:
    """Whether the rollout that `args` belongs to has been aborted."""
    custom: Callable[[], bool] | None = getattr(args, "qreward_aborted", None)
    if callable(custom):
        return bool(custom())
    rollout, misc = sys.modules.get("slime.rollout.sglang_rollout"), sys.modules.get("slime.utils.misc")
    if rollout is None or misc is None:
        return False
    state = misc.SingletonMeta._instances.get(rollout.GenerateState)
    return bool(getattr(state, "aborted", False))


async def finished(args: Any, work: Future[Any]) -> bool:
    """Wait until `work`, which runs in another thread, is done (True) or the rollout is aborted (False).

    Cancelling this call does not cancel `work`.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[bool] = loop.create_future()

    def resolve(_: Future[Any]) -> None:
        with suppress(RuntimeError):  # the loop was closed in the meantime
            loop.call_soon_threadsafe(_resolve, result, True)

    work.add_done_callback(resolve)
    if loop not in _pending:
        _pending[loop] = {}
        loop.call_soon(_poll, loop)
    _pending[loop][result] = args
    try:
        return await result
    finally:
        del _pending[loop][result]


_pending: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[asyncio.Future[bool], Any]] = WeakKeyDictionary()
"""The pending calls of each event loop that polls, with slime's arguments."""


def _poll(loop: asyncio.AbstractEventLoop) -> None:
    """Look at the flag for all pending calls, again and again until there is none."""
    for result, args in _pending[loop].items():
        if aborted(args):
            _resolve(result, False)
    if _pending[loop]:
        loop.call_later(POLL_S, _poll, loop)
    else:
        del _pending[loop]


def _resolve(future: asyncio.Future[bool], value: bool) -> None:
    if not future.done():
        future.set_result(value)
