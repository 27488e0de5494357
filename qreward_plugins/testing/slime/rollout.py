"""slime's rollout: generate, reward and filter until a batch is full; then abort the rest and wait for its rewards.

Its data source buffers unfinished groups, and its inference engine is a fake.

The order of calls is that of slime's `sglang_rollout.py`. A reward starts when its generation ends, any number run at
once, a group is filtered after its last reward, and an abort does not stop rewards. Only one thing is stricter: groups
that finish together are handled in the order of submission; slime's order is that of a set.

The engine writes responses at once unless the test holds them. So a test chooses which generations are slow, and every
run is the same.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import itertools
import random
import zlib
from argparse import Namespace
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ...system.threads import cancel_futures
from ..fake_trainer import load
from ..generation import DEFAULT_ROWS, Engine
from .samples import DynamicFilterOutput, Group, Row, SlimeSample, flat, prompt_of

Respond: TypeAlias = Callable[[SlimeSample, random.Random], "str | Awaitable[str | None] | None"]
Hold: TypeAlias = Callable[[SlimeSample], bool]

DEFAULT_PROMPTS = tuple({"prompt": row["prompt"], "label": row["ground_truth"]} for row in DEFAULT_ROWS)
END_TOKEN = 0


class SlimeDataSource:
    """Groups of `n_samples_per_prompt` samples: first those put back, then new ones from the prompts, round and round.

    `buffer` holds the groups that were put back. It is what slime's hooks get as `data_source`.
    """

    def __init__(self, args: Namespace, rows: Iterable[Row]) -> None:
        self.args = args
        self.buffer: list[Group] = []
        self._prompts = [prompt_of(row) for row in rows]
        if not self._prompts:
            raise ValueError("prompts is empty: slime would wait for ever for a batch")
        self._new = enumerate(itertools.cycle(self._prompts))
        self._index = itertools.count()

    def get_samples(self, num_samples: int) -> list[Group]:
        """`num_samples` groups."""
        taken, self.buffer = self.buffer[:num_samples], self.buffer[num_samples:]
        return taken + [self._group() for _ in range(num_samples - len(taken))]

    def add_samples(self, samples: list[Group]) -> None:
        """Put groups back. Raises `AssertionError` for one that is not whole."""
        size = self.args.n_samples_per_prompt
        for group in samples:
            assert len(group) == size, f"a group must have n_samples_per_prompt = {size} samples, not {len(group)}"
            self.buffer.append(group)

    def _group(self) -> Group:
        number, prompt = next(self._new)
        group = [copy.deepcopy(prompt) for _ in range(self.args.n_samples_per_prompt)]
        for sample in group:
            sample.group_index, sample.index = number, next(self._index)
        return group


def tokens_of(text: str) -> list[int]:
    """One token a word, stable between processes; never `END_TOKEN`."""
    return [1 + zlib.crc32(word.encode()) % 50_000 for word in text.split()]


class SlimeEngine(Engine[SlimeSample]):
    """Plays `/generate` with seeded responses, and aborts.

    `respond` returns the text of a generation, or None if the engine aborted it; it may be async. A generation for
    which `hold` is true is held after its text is written.
    """

    def __init__(self, respond: Respond, hold: Hold | None, seed: int) -> None:
        super().__init__(respond, hold, seed)
        self.aborted = False
        """Set when the batch is full: held generations keep the first half of their words."""

    async def generate(self, sample: SlimeSample, rollout_id: int) -> SlimeSample:
        """Append to the response of `sample`. Raises `AssertionError` if it is finished."""
        assert sample.status in (SlimeSample.Status.PENDING, SlimeSample.Status.ABORTED), f"status {sample.status}"
        text = await self.written(sample, rollout_id, sample.group_index, sample.index, sample.prompt)
        sample.tokens = sample.tokens or tokens_of(str(sample.prompt)) or [END_TOKEN]
        reason, text = ("abort", "") if text is None else ("stop", text)
        held = reason == "stop" and self.holds(sample)
        if held and (self.aborted or not await self.held.wait(sample)):
            words = text.split()
            reason, text = "abort", " ".join(words[: len(words) // 2])
        tokens = tokens_of(text) + [END_TOKEN] * (reason == "stop")
        sample.append_response_tokens(
            tokens=tokens,
            log_probs=[0.0] * len(tokens),
            text=" " * bool(sample.response and text) + text,
            meta_info={"finish_reason": {"type": reason}},
        )
        return sample

    def abort(self) -> None:
        """End held generations, and hold no further one."""
        self.aborted = True
        self.held.abort()


Hook: TypeAlias = Callable[..., Any]

_FINISHED = (SlimeSample.Status.COMPLETED, SlimeSample.Status.TRUNCATED)


def ask_filter(hook: Hook | None, args: Namespace, group: Group) -> Any:
    """The filter's result for one group. Anything but slime's class counts by its truth value."""
    answer = True if hook is None else hook(args, group)
    return answer if hasattr(answer, "keep") else DynamicFilterOutput(keep=bool(answer))


@dataclass
class RolloutRecord:
    """The results of one rollout; `SlimeStep` says what they are."""

    groups: list[Group] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    dropped: list[Group] = field(default_factory=list)
    aborted: list[Group] = field(default_factory=list)
    lost_errors: list[BaseException] = field(default_factory=list)


class SlimeRollout:
    """The state of generation (slime's `GenerateState`) and the loops that use it. Lives on one event loop."""

    def __init__(self, args: Namespace, engine: SlimeEngine) -> None:
        self.args = args
        self.engine = engine
        self.rollout_id = -1
        self.reward_calls = 0
        self._pending: dict[asyncio.Task[Group], None] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def rollout(self, get_samples: Callable[[int], list[Group]]) -> RolloutRecord:
        """Fill one batch. An error of a reward function or a filter cancels the rest and is raised."""
        try:
            return await self._rollout(get_samples)
        finally:
            await self._cancel_all()
            self._pending = {}
            self.engine.aborted = False

    async def evaluate(self, data_sets: dict[str, list[SlimeSample]]) -> dict[str, dict[str, Any]]:
        """Generate and reward all data sets. Raises `AssertionError` with `group_rm`, as slime does."""
        assert not self.args.group_rm, "slime does not evaluate with group_rm: set an eval_function_path"
        try:
            data = await asyncio.gather(*(self._spawn(self._evaluate_one(prompts)) for prompts in data_sets.values()))
        finally:
            await self._cancel_all()
        return dict(zip(data_sets, data, strict=True))

    async def _rollout(self, get_samples: Callable[[int], list[Group]]) -> RolloutRecord:
        args = self.args
        path = args.dynamic_sampling_filter_path
        dynamic_filter = None if path is None else load(path)
        record = RolloutRecord()
        reasons: Counter[str] = Counter()
        remaining, wanted = 0, args.rollout_batch_size
        while len(record.groups) < wanted:
            while remaining < wanted:
                groups = get_samples(args.over_sampling_batch_size)
                remaining += len(groups)
                self._pending.update(dict.fromkeys(self._spawn(self._generate_group(group)) for group in groups))
            for task in await self._next_done():
                group = task.result()
                assert len(group) == args.n_samples_per_prompt, f"{len(group)} samples in a group"
                answer = ask_filter(dynamic_filter, args, group)
                if not answer.keep and not (answer.keep_when_insufficient and remaining <= wanted):
                    record.dropped.append(group)
                    reasons.update([answer.reason] if answer.reason else [])
                    remaining -= 1
                elif len(record.groups) < wanted:
                    record.groups.append(group)
        await self._abort(record)
        record.metrics = {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in reasons.items()}
        record.groups.sort(key=lambda group: flat(group)[0].index or 0)
        return record

    async def _next_done(self) -> list[asyncio.Task[Group]]:
        done, _ = await asyncio.wait(self._pending, return_when=asyncio.FIRST_COMPLETED)
        ordered = [task for task in self._pending if task in done]
        for task in ordered:
            del self._pending[task]
        return ordered

    async def _abort(self, record: RolloutRecord) -> None:
        self.engine.abort()
        while self._pending:
            for task in await self._next_done():
                error = task.exception()
                if error is not None and not self.args.partial_rollout:
                    record.lost_errors.append(error)
                    continue
                record.aborted.append(task.result())

    async def _generate_group(self, group: Group) -> Group:
        if self.engine.aborted:
            return group
        tasks = [self._spawn(self._generate_one(sample, False)) for sample in group]
        group = list(await asyncio.gather(*tasks))
        if not self.engine.aborted and self.args.group_rm:
            await self._reward(group)
        return group

    async def _generate_one(self, sample: SlimeSample, evaluation: bool) -> Any:
        args = self.args
        if sample.status in _FINISHED:
            assert args.group_rm or sample.reward is not None, f"sample {sample.index} is finished and has no reward"
            return sample
        if self.engine.aborted:
            sample.status = SlimeSample.Status.ABORTED
            return sample
        made: Any = await self._generate(sample, evaluation)
        if args.group_rm or any(part.status is SlimeSample.Status.ABORTED for part in flat(made)):
            return made
        missing = [part for part in flat(made) if part.reward is None]
        if missing:
            await self._reward(missing if isinstance(made, list) else made)
        return made

    async def _generate(self, sample: SlimeSample, evaluation: bool) -> Any:
        args = self.args
        if args.custom_generate_function_path is None:
            return await self.engine.generate(sample, self.rollout_id)
        custom = load(args.custom_generate_function_path)
        told = {"evaluation": evaluation} if "evaluation" in inspect.signature(custom).parameters else {}
        sampling = {"temperature": args.rollout_temperature, "top_p": args.rollout_top_p, "top_k": args.rollout_top_k}
        return await custom(args, sample, sampling, **told)

    async def _evaluate_one(self, prompts: list[SlimeSample]) -> dict[str, Any]:
        tasks: list[asyncio.Task[Any]] = []
        for prompt in prompts:
            for _ in range(self.args.n_samples_per_eval_prompt):
                sample = copy.deepcopy(prompt)
                sample.index = len(tasks)
                tasks.append(self._spawn(self._generate_one(sample, True)))
        samples = flat(list(await asyncio.gather(*tasks)))
        key = self.args.eval_reward_key
        return {
            "rewards": [sample.reward[key] if key else sample.reward for sample in samples],
            "truncated": [sample.status is SlimeSample.Status.TRUNCATED for sample in samples],
            "samples": samples,
        }

    async def _reward(self, samples: Any) -> None:
        """Ask for the reward of one sample, or by one call for those of a list, and store them. A list is a group, or
        that into which one generation fanned out.
        """
        if not self.args.custom_rm_path:
            raise NotImplementedError("no reward is specified: set custom_rm_path")
        self.reward_calls += 1
        rewards = await load(self.args.custom_rm_path)(self.args, samples)
        pairs = zip(samples, rewards, strict=False) if isinstance(samples, list) else [(samples, rewards)]
        for sample, number in pairs:
            sample.reward = number

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # After the error of one task, those of the others are not asked for.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def _cancel_all(self) -> None:
        """Cancel all running tasks, and wait for their end."""
        while tasks := list(self._tasks):
            await cancel_futures(tasks)
