"""A stand-in for slime's rollout side, for unit tests of reward functions, filters, post-processing and log hooks.

A mistake in a reward hook shows hours into a run: a None is a `TypeError` in post-processing, a NaN makes its whole
group NaN, an exception ends the job. The stand-in makes the same calls in the same order and fails in the same way, in
milliseconds, without slime, torch, Ray, Megatron, SGLang or a GPU; it needs numpy.

    with FakeSlimeTrainer(custom_rm_path="my_rewards.score", n_samples_per_prompt=4) as trainer:
        step = trainer.rollout()
    assert all(advantage is not None for advantage in step.advantages)
"""

from __future__ import annotations

import itertools
import statistics
import time
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ..fake_trainer import FakeTrainer, load, refuse_unknown, stand_in_modules
from ..generation import answer_by_chance
from .rollout import DEFAULT_PROMPTS, Hold, Hook, Respond, RolloutRecord, SlimeDataSource, SlimeEngine, SlimeRollout
from .samples import (
    DynamicFilterOutput,
    Group,
    Row,
    SlimeSample,
    convert_samples,
    flat,
    post_process_rewards,
    prompt_of,
)

ESTIMATORS = ("grpo", "gspo", "cispo", "ppo")

DEFAULT_ROLLOUT_FUNCTION = "slime.rollout.sglang_rollout.generate_rollout"

DEFAULT_DATA_SOURCE = "slime.rollout.data_source.RolloutDataSourceWithBuffer"

DEFAULTS: dict[str, Any] = {
    # These two defaults differ from slime's: there the first is required, the second is 1.
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 4,
    "over_sampling_batch_size": None,
    "partial_rollout": False,
    "data_source_path": DEFAULT_DATA_SOURCE,
    "rollout_function_path": DEFAULT_ROLLOUT_FUNCTION,
    "eval_function_path": None,
    "custom_generate_function_path": None,
    "dynamic_sampling_filter_path": None,
    "custom_rm_path": None,
    "group_rm": False,
    "reward_key": None,
    "eval_reward_key": None,
    "custom_reward_post_process_path": None,
    "custom_rollout_log_function_path": None,
    "custom_eval_rollout_log_function_path": None,
    "advantage_estimator": "grpo",
    "rewards_normalization": True,
    "grpo_std_normalization": True,
    "n_samples_per_eval_prompt": 1,
    "colocate": False,
    "debug_rollout_only": False,
}

_READ_BY_HOOKS = (
    "num_rollout eval_interval hf_checkpoint rollout_temperature rollout_top_p rollout_top_k use_wandb rm_url "
    "eval_custom_rm_path offload_train"
)
INERT: dict[str, Any] = dict.fromkeys(_READ_BY_HOOKS.split())
"""Flags for hooks that read them. They change nothing in the fake."""

_NOT_PLAYED = " It does not play all of slime's flags."


def resolve_args(flags: Mapping[str, Any], extra: Mapping[str, Any]) -> Namespace:
    """The `args` of a slime process that was started with `flags`.

    `extra` is the content of a `--custom-config-path` file: every key becomes an attribute and overrides a flag. Raises
    `TypeError` for a flag that is unknown or not played, and `ValueError` if slime refuses to start.
    """
    refuse_unknown(flags, [*DEFAULTS, *INERT], "FakeSlimeTrainer", note=_NOT_PLAYED)
    args = Namespace(**{**INERT, **DEFAULTS, **flags})
    if args.advantage_estimator not in ESTIMATORS:
        played = f"plays the estimators {', '.join(ESTIMATORS)}"
        raise ValueError(f"FakeSlimeTrainer {played}, not {args.advantage_estimator!r}")
    for name in ("rollout_batch_size", "n_samples_per_prompt", "n_samples_per_eval_prompt"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name} must be 1 or more, not {getattr(args, name)}")
    args.eval_function_path = args.eval_function_path or args.rollout_function_path
    args.eval_reward_key = args.eval_reward_key or args.reward_key
    args.grpo_std_normalization = args.grpo_std_normalization and args.n_samples_per_prompt > 1
    args.over_sampling_batch_size = args.over_sampling_batch_size or args.rollout_batch_size
    if args.over_sampling_batch_size < args.rollout_batch_size:
        raise ValueError(f"over_sampling_batch_size {args.over_sampling_batch_size} is below rollout_batch_size")
    vars(args).update(extra)
    return args


@dataclass
class SlimeRolloutOutput:
    """The result of slime's rollout function: groups, and metrics to log."""

    samples: list[Group]
    metrics: dict[str, Any] | None = None


@dataclass
class SlimeEvalOutput:
    """The result of slime's rollout function for an evaluation, by data set."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


@dataclass(frozen=True)
class SlimeStep:
    """One rollout, from the samples to the trainer's batch. Lists for each sample are in the order of `samples`.

    `groups` is the batch that the rollout function returned, `samples` the same flattened. `train_data` is slime's
    batch for the trainer. `advantages` are those of each trained token of a sample, or None if none is trained. They
    assume a model that is worth nothing: the KL penalty is zero, and with ppo the critic's values, too. Then every
    token has the reward that trains.

    `metrics` are the logged metrics. `dropped` are the groups that the dynamic filter refused. `aborted` are the groups
    that were running when the batch was full; they are discarded, or put back into the data source with partial
    rollout. `lost_errors` are exceptions of rewards after the batch was full, which slime drops without a message.
    `reward_calls` counts the calls of the reward function.
    """

    rollout_id: int
    groups: list[Group]
    samples: list[SlimeSample]
    train_data: dict[str, Any]
    advantages: list[float | None]
    metrics: dict[str, Any]
    dropped: list[Group]
    aborted: list[Group]
    lost_errors: list[BaseException]
    reward_calls: int

    @property
    def raw_rewards(self) -> list[Any]:
        """The rewards logged as `rollout/raw_reward`."""
        return list(self.train_data["raw_reward"])

    @property
    def rewards(self) -> list[Any]:
        """The rewards that train: post-processed."""
        return list(self.train_data["rewards"])

    @property
    def loss_masks(self) -> list[list[int]]:
        """One 0 or 1 for each token of the response."""
        return list(self.train_data["loss_masks"])


@dataclass(frozen=True)
class SlimeEvaluation:
    """One evaluation. `data` is slime's, after the log hook: rewards, truncated and samples for each data set."""

    rollout_id: int
    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any]

    @property
    def rewards(self) -> dict[str, list[Any]]:
        """The rewards that are averaged, by data set."""
        return {name: list(results["rewards"]) for name, results in self.data.items()}


class FakeSlimeTrainer(FakeTrainer[SlimeSample]):
    """slime's `RolloutManager`, with a fake data source, inference engine and trainer.

    `flags` are slime's own, with slime's defaults, except for `rollout_batch_size` and `n_samples_per_prompt`, which
    are 4. Hook flags take a dotted path or the function itself. `qreward` sets what the file of
    `--custom-config-path` has below that key. The resulting `args` has four attributes more than slime's:
    `args.qreward_aborted()` says whether generation was aborted (in slime: `GenerateState.aborted`),
    `args.qreward_log(args, metrics, step_key)` replaces slime's `logging_utils.log`, and
    `args.qreward_generate_rollout` is `generate_rollout`, for an eval or rollout function that wraps slime's, and
    `args.qreward_data_source(args)` makes the data source, for one that wraps slime's.

    `prompts`: rows, each a prompt, a conversation, or `{"prompt": ..., "label": ..., "metadata": {...}}`.
    `eval_datasets`: for each name its rows.

    `respond(sample, rng)` returns a response, or None if the engine aborted it; it may be async. A word is a token, and
    an end token follows. If `hold(sample)` is true, the generation waits for `release()`, or for the abort when the
    batch is full, which keeps the first half of its words. `seed` fixes all random numbers. `timeout_s` bounds one
    rollout or evaluation; with None it may wait for ever, as slime does.

    Methods are for one thread, except `release` and `wait_until_held`. Leaving the context closes it. Raises
    `TypeError` for what is unknown or not played, `ValueError` if slime would refuse to start, and the errors of
    importing hooks that slime imports at startup.
    """

    def __init__(
        self,
        *,
        prompts: Iterable[Row] = DEFAULT_PROMPTS,
        respond: Respond = answer_by_chance,
        hold: Hold | None = None,
        eval_datasets: Mapping[str, Sequence[Row]] | None = None,
        qreward: Any = None,
        seed: int = 0,
        timeout_s: float | None = 60.0,
        **flags: Any,
    ) -> None:
        self.args: Namespace = resolve_args(flags, {} if qreward is None else {"qreward": qreward})
        self._engine = SlimeEngine(respond, hold, seed)
        self._state = SlimeRollout(self.args, self._engine)
        # slime awaits all rewards on one loop, of rollouts and of evaluations alike (slime/utils/async_utils.py).
        super().__init__("fake-slime-rollout", "fake-slime-manager", self._engine.held, timeout_s)
        self._logged: dict[str, Any] = {}
        self._steps = itertools.count()
        self.args.qreward_aborted = lambda: self._engine.aborted
        self.args.qreward_log = self._log
        self.args.qreward_generate_rollout = self.generate_rollout
        if any(isinstance(given, Mapping) for given in (eval_datasets or {}).values()):
            raise TypeError("eval_datasets have rows only: settings of one data set are not played")
        self._evaluated = {name: [prompt_of(row) for row in given] for name, given in (eval_datasets or {}).items()}
        self.args.qreward_data_source = lambda args: SlimeDataSource(args, prompts)
        # slime makes it before it loads other hooks.
        path = self.args.data_source_path
        self.data_source = (self.args.qreward_data_source if path == DEFAULT_DATA_SOURCE else load(path))(self.args)
        self._generate = self._startup(self.args.rollout_function_path)
        self._evaluate = self._startup(self.args.eval_function_path)
        self._post_process = self._startup(self.args.custom_reward_post_process_path) or post_process_rewards
        self._record = RolloutRecord()

    def rollout(self, rollout_id: int | None = None) -> SlimeStep:
        """One step: a batch of scored groups, logged, post-processed and made ready for training.

        `rollout_id` counts from 0 by default. Raises slime's errors, and `TimeoutError` after `timeout_s`. An error
        cancels all running tasks; the trainer may be used again.
        """
        number = next(self._steps) if rollout_id is None else rollout_id
        self._logged, self._state.rollout_id, self._record = {}, number, RolloutRecord()
        calls_before, started_s = self._state.reward_calls, time.monotonic()
        output: Any = self._generate(self.args, number, self.data_source, evaluation=False)
        groups = getattr(output, "samples", output)
        samples = flat(groups)
        metrics = getattr(output, "metrics", None)
        took_s = time.monotonic() - started_s
        logged = self._logged_by(self.args.custom_rollout_log_function_path, number, samples, metrics, took_s)
        if logged is not None:
            logged["rollout/step"] = number
        train_data = convert_samples(samples, *self._post_process(self.args, samples))
        # A reward that is no number is a `TypeError`, as in slime's trainer, whether it trains or not.
        trained = zip(map(float, train_data["rewards"]), train_data["loss_masks"], strict=True)
        return SlimeStep(
            rollout_id=number,
            groups=groups,
            samples=samples,
            train_data=train_data,
            advantages=[advantage if any(mask) else None for advantage, mask in trained],
            metrics={**(logged or {}), **self._logged},
            dropped=self._record.dropped,
            aborted=self._record.aborted,
            lost_errors=self._record.lost_errors,
            reward_calls=self._state.reward_calls - calls_before,
        )

    def start_rollout(self, rollout_id: int | None = None) -> Future[SlimeStep]:
        """`rollout` in a thread of its own, for tests that act while it runs."""
        return self._in_background(self.rollout, rollout_id)

    def evaluate(self, rollout_id: int = 0) -> SlimeEvaluation:
        """Score `eval_datasets`. Raises like `rollout`, and `AssertionError` with `group_rm`, as slime does."""
        self._logged, self._state.rollout_id = {}, rollout_id
        output: Any = self._evaluate(self.args, rollout_id, self.data_source, evaluation=True)
        data = getattr(output, "data", output)
        metrics = getattr(output, "metrics", None)
        logged = self._logged_by(self.args.custom_eval_rollout_log_function_path, rollout_id, data, metrics)
        if logged is not None:
            # The means are of the data as the log function leaves them.
            logged |= {f"eval/{name}": sum(told["rewards"]) / len(told["rewards"]) for name, told in data.items()}
            logged["eval/step"] = rollout_id
        return SlimeEvaluation(rollout_id=rollout_id, data=data, metrics={**(logged or {}), **self._logged})

    def generate_rollout(
        self, args: Namespace, rollout_id: int, data_source: SlimeDataSource, evaluation: bool = False
    ) -> SlimeRolloutOutput | SlimeEvalOutput:
        """slime's `generate_rollout`, for custom rollout and eval functions that wrap it. It uses the given `args`."""
        own, self._state.args = self._state.args, args
        try:
            if evaluation:
                return SlimeEvalOutput(self._run(self._state.evaluate(self._evaluated)))
            self._record = record = self._run(self._state.rollout(data_source.get_samples))
        finally:
            self._state.args = own
        if args.partial_rollout:
            data_source.add_samples(record.aborted)
        return SlimeRolloutOutput(record.groups, record.metrics)

    async def generate(self, args: Namespace, sample: SlimeSample, sampling_params: dict[str, Any]) -> SlimeSample:
        """Let the engine write one response, for custom generate functions. In slime this is `POST /generate`."""
        return await self._engine.generate(sample, self._state.rollout_id)

    def _logged_by(
        self, hook: str | Hook | None, number: int, told: Any, metrics: dict[str, Any] | None, *more: Any
    ) -> dict[str, Any] | None:
        """The metrics to log after a log function, which adds to them; None if it returns True: it has logged."""
        if hook is not None and load(hook)(number, self.args, told, metrics, *more):
            return None
        return dict(metrics or {})

    def _startup(self, path: str | Hook | None) -> Any:
        if path == DEFAULT_ROLLOUT_FUNCTION:
            return self.generate_rollout
        return None if path is None else load(path)

    def _log(self, args: Namespace, metrics: Mapping[str, Any], step_key: str) -> None:
        self._logged.update(metrics)


def _check_spread(args: Namespace, samples: list[SlimeSample], **_: Any) -> DynamicFilterOutput:
    rewards = [sample.get_reward_value(args) for sample in samples]
    keep = len(rewards) > 1 and statistics.stdev(map(float, rewards)) > 1e-6
    return DynamicFilterOutput(keep, reason=None if keep else f"zero_std_{round(rewards[0], 1)}")


def _names() -> dict[str, dict[str, Any]]:
    logging_utils = {"log": lambda args, metrics, step_key: args.qreward_log(args, metrics, step_key)}
    metric_utils = {"compute_rollout_step": lambda args, rollout_id: rollout_id}
    outputs = {"RolloutFnEvalOutput": SlimeEvalOutput, "RolloutFnTrainOutput": SlimeRolloutOutput}
    return {
        # The place on slime's main branch of what v0.3.1 has in slime.utils.
        "slime.observability.logging_utils": logging_utils,
        "slime.observability.metric_utils": metric_utils,
        "slime.rollout.base_types": outputs,
        "slime.rollout.data_source": {"RolloutDataSourceWithBuffer": lambda args: args.qreward_data_source(args)},
        "slime.rollout.filter_hub.base_types": {"DynamicFilterOutput": DynamicFilterOutput},
        "slime.rollout.filter_hub.dynamic_sampling_filters": {"check_reward_nonzero_std": _check_spread},
        "slime.rollout.sglang_rollout": {
            "generate_rollout": lambda args, *given, **named: args.qreward_generate_rollout(args, *given, **named)
        },
        "slime.utils.logging_utils": logging_utils,
        "slime.utils.metric_utils": metric_utils,
        "slime.utils.misc": {"load_function": load},
        "slime.utils.types": {"Sample": SlimeSample},
    }


def slime_stand_in() -> AbstractContextManager[bool]:
    """Let hooks import a few of slime's names, which a `FakeSlimeTrainer` backs.

    They are `Sample`, `DynamicFilterOutput`, `RolloutFnTrainOutput`, `RolloutFnEvalOutput`, `load_function`,
    `check_reward_nonzero_std`, `generate_rollout`, `RolloutDataSourceWithBuffer`, `compute_rollout_step`, and `log`,
    whose metrics are in the trainer's result. Anything else under `slime` stays a `ModuleNotFoundError`.

    It yields False if slime is installed, whose own names are used then. For a whole test suite, enter it in a session
    fixture or in `conftest.py`, before the first import of a hook. Leaving it removes the modules; hooks imported
    before keep their names. For one thread at a time.
    """
    return stand_in_modules(_names(), proof="slime.utils.types")
