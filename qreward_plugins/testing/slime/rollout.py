"""slime's rollout: generate, reward and filter until a batch is full; then abort the rest and wait for its rewards.

The order of calls is that of slime's `sglang_rollout.py`. A reward starts when its generation ends, any number run at
once, a group is filtered after its last reward, and an abort does not stop rewards. Only one thing is stricter: groups
that finish together are handled in the order of submission; slime's order is that of a set.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import uuid
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from .arguments import EvalDataset
from .engine import SlimeEngine
from .hooks import HookLoader, apply_sample_hooks, ask_filter, is_dropped, reward_many, reward_one
from .samples import SlimeSample

Group: TypeAlias = "list[Any]"
"""The samples of one prompt; lists of samples if a custom generate function fans out."""

_FINISHED = (SlimeSample.Status.COMPLETED, SlimeSample.Status.TRUNCATED)


@dataclass(frozen=True)
class DroppedGroup:
    """A group that the dynamic filter refused, and the reason that it gave."""

    group: Group
    reason: str | None


@dataclass
class RolloutRecord:
    """The results of one rollout."""

    groups: list[Group] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    dropped: list[DroppedGroup] = field(default_factory=list)
    aborted: list[Group] = field(default_factory=list)
    surplus: list[Group] = field(default_factory=list)
    lost_errors: list[BaseException] = field(default_factory=list)


def first_of(group: Group) -> SlimeSample:
    """The first sample of a group, through a fan-out."""
    first: SlimeSample = group[0][0] if isinstance(group[0], list) else group[0]
    return first


class SlimeRollout:
    """The state of generation (slime's `GenerateState`) and the loops that use it. Lives on one event loop."""

    def __init__(self, args: Namespace, loader: HookLoader, engine: SlimeEngine) -> None:
        self.args = args
        self.engine = engine
        self.rollout_id = -1
        self.aborted = False
        self.rewards_pending = 0
        self.rewards_pending_max = 0
        self.reward_calls = 0
        self._loader = loader
        self._semaphore = asyncio.Semaphore(args.sglang_server_concurrency)
        self._remaining = 0
        self._pending: dict[asyncio.Task[Group], None] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def rollout(self, get_samples: Callable[[int], list[Group]]) -> RolloutRecord:
        """Fill one batch. An error of a reward function or a filter cancels the rest and is raised."""
        try:
            return await self._rollout(get_samples)
        except BaseException:
            await self.cancel_all()
            self._reset()
            raise

    async def evaluate(self, datasets: list[EvalDataset]) -> dict[str, dict[str, Any]]:
        """Generate and reward all data sets. Raises `AssertionError` with `group_rm`, as slime does."""
        assert not self.args.group_rm, "slime does not evaluate with group_rm: set an eval_function_path"
        try:
            found = await asyncio.gather(*(self._spawn(self._evaluate_one(dataset)) for dataset in datasets))
        except BaseException:
            await self.cancel_all()
            raise
        return {name: data for results in found for name, data in results.items()}

    async def _rollout(self, get_samples: Callable[[int], list[Group]]) -> RolloutRecord:
        args = self.args
        path = args.dynamic_sampling_filter_path
        dynamic_filter = None if path is None else self._loader.load(path)
        record = RolloutRecord()
        everything: list[Group] = []
        wanted = args.rollout_batch_size
        while len(record.groups) < wanted:
            while self._remaining < wanted:
                self._submit(get_samples(args.over_sampling_batch_size))
            for task in await self._next_done():
                group = task.result()
                assert len(group) == args.n_samples_per_prompt, f"{len(group)} samples in a group"
                everything.append(group)
                answer = ask_filter(dynamic_filter, args, group)
                if is_dropped(answer, remaining=self._remaining, wanted=wanted):
                    record.dropped.append(DroppedGroup(group, answer.reason))
                    self._remaining -= 1
                elif len(record.groups) < wanted:
                    record.groups.append(group)
                else:
                    record.surplus.append(group)
        await self._abort(record)
        reasons = Counter(dropped.reason for dropped in record.dropped if dropped.reason)
        record.metrics = {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in reasons.items()}
        record.groups.sort(key=lambda group: first_of(group).index or 0)
        everything.sort(key=lambda group: first_of(group).index or 0)
        self._reset()
        if args.rollout_sample_filter_path is not None:
            self._loader.load(args.rollout_sample_filter_path)(args, record.groups)
        if args.rollout_all_samples_process_path is not None:
            self._loader.load(args.rollout_all_samples_process_path)(args, everything, get_samples)
        return record

    def _submit(self, groups: list[Group]) -> None:
        for group in groups:
            params = self._sampling_params(self.args)
            task = self._spawn(self._generate_group(group, params))
            # After the error of one group, those of the others are not asked for.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._pending[task] = None
        self._remaining += len(groups)

    async def _next_done(self) -> list[asyncio.Task[Group]]:
        done, _ = await asyncio.wait(self._pending, return_when=asyncio.FIRST_COMPLETED)
        ordered = [task for task in self._pending if task in done]
        for task in ordered:
            del self._pending[task]
        return ordered

    async def _abort(self, record: RolloutRecord) -> None:
        self.aborted = True
        self.engine.abort()
        while self._pending:
            for task in await self._next_done():
                if not self.args.partial_rollout:
                    error = task.exception()
                    if error is None:
                        record.aborted.append(task.result())
                    else:
                        record.lost_errors.append(error)
                    continue
                group = task.result()
                for sample in group:
                    if sample.response and "start_rollout_id" not in sample.metadata:
                        sample.metadata["start_rollout_id"] = self.rollout_id
                record.aborted.append(group)

    async def _generate_group(self, group: Group, params: dict[str, Any]) -> Group:
        if self.aborted:
            return group
        for sample in group:
            if sample.session_id is None:
                rng = self.engine.rng("session", sample.group_index, sample.index)
                sample.session_id = str(uuid.UUID(int=rng.getrandbits(128), version=4))
        tasks = [self._spawn(self._generate_one(sample, dict(params), False)) for sample in group]
        group = list(await asyncio.gather(*tasks))
        if not self.aborted and self.args.group_rm:
            rewards = await self._counted(reward_many(self.args, self._loader, group))
            for sample, reward in zip(group, rewards, strict=False):
                sample.reward = reward
        return group

    async def _generate_one(
        self, sample: SlimeSample, params: dict[str, Any], evaluation: bool
    ) -> SlimeSample | list[SlimeSample]:
        args = self.args
        if args.partial_rollout and args.mask_offpolicy_in_partial_rollout and sample.response_length > 0:
            sample.loss_mask = [0] * sample.response_length
        if sample.status in _FINISHED:
            assert sample.response is not None
            if not args.group_rm:
                assert sample.reward is not None, f"sample {sample.index} is finished and has no reward"
            return sample
        async with self._semaphore:
            if self.aborted:
                sample.status = SlimeSample.Status.ABORTED
                return sample
            made: Any = await self._generate(sample, params, evaluation)
        made = await apply_sample_hooks(args, self._loader, made, evaluation=evaluation, rollout_id=self.rollout_id)
        if args.group_rm:
            return made  # type: ignore[no-any-return]
        if isinstance(made, list):
            if any(part.status is SlimeSample.Status.ABORTED for part in made):
                return made
            missing = [part for part in made if part.reward is None]
            rewards = await self._counted(reward_many(args, self._loader, missing))
            for part, reward in zip(missing, rewards, strict=False):
                part.reward = reward
        elif made.status is not SlimeSample.Status.ABORTED and made.reward is None:
            made.reward = await self._counted(reward_one(args, self._loader, made))
        return made  # type: ignore[no-any-return]

    async def _generate(self, sample: SlimeSample, params: dict[str, Any], evaluation: bool) -> Any:
        path = sample.generate_function_path or self.args.custom_generate_function_path
        if path is None:
            return await self.engine.generate(self.args, sample, params, self.rollout_id)
        custom = self._loader.load(path)
        if "evaluation" in inspect.signature(custom).parameters:
            return await custom(self.args, sample, params, evaluation=evaluation)
        return await custom(self.args, sample, params)

    async def _evaluate_one(self, dataset: EvalDataset) -> dict[str, dict[str, Any]]:
        args = self.args
        params = self._sampling_params(args) | {
            "temperature": dataset.temperature,
            "top_p": dataset.top_p,
            "top_k": dataset.top_k,
            "max_new_tokens": dataset.max_response_len,
        }
        tasks: list[asyncio.Task[Any]] = []
        for prompt in dataset.samples:
            for _ in range(dataset.n_samples_per_eval_prompt):
                sample = copy.deepcopy(prompt)
                sample.index = len(tasks)
                sample.metadata = dataset.metadata_of(sample)
                sample.custom_rm_path = dataset.custom_rm_path
                sample.generate_function_path = dataset.custom_generate_function_path
                tasks.append(self._spawn(self._generate_one(sample, dict(params), True)))
        samples: list[SlimeSample] = []
        for finished in asyncio.as_completed(tasks):
            made = await finished
            samples.extend(made if isinstance(made, list) else [made])
        samples.sort(key=lambda sample: sample.index or 0)
        key = args.eval_reward_key or args.reward_key
        return {
            dataset.name: {
                "rewards": [sample.reward[key] if key else sample.reward for sample in samples],
                "truncated": [sample.status is SlimeSample.Status.TRUNCATED for sample in samples],
                "samples": samples,
            }
        }

    async def _counted(self, rewarding: Coroutine[Any, Any, Any]) -> Any:
        self.reward_calls += 1
        self.rewards_pending += 1
        self.rewards_pending_max = max(self.rewards_pending_max, self.rewards_pending)
        try:
            return await rewarding
        finally:
            self.rewards_pending -= 1

    def _sampling_params(self, args: Namespace) -> dict[str, Any]:
        return {
            "temperature": args.rollout_temperature,
            "top_p": args.rollout_top_p,
            "top_k": args.rollout_top_k,
            "max_new_tokens": args.rollout_max_response_len,
            "stop": args.rollout_stop,
            "stop_token_ids": args.rollout_stop_token_ids,
            "skip_special_tokens": args.rollout_skip_special_tokens,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
        }

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def cancel_all(self) -> None:
        """Cancel all running tasks, and wait for their end."""
        while tasks := list(self._tasks):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _reset(self) -> None:
        self._remaining = 0
        self._pending = {}
        self.aborted = False
        self.engine.reset()
