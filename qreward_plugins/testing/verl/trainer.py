"""A stand-in for verl 0.9's trainers, for unit tests of reward functions, reward managers and their configuration.

Faults of rewards show hours into a run of verl: None is a KeyError, NaN trains, an exception ends one trainer and drops
a sample in the other. The stand-in makes the same calls in the same order and fails in the same way, within
milliseconds. It needs numpy, but no verl, torch, Ray or GPU.

    with FakeVerlTrainer(["algorithm.adv_estimator=grpo"], reward=my_function) as trainer:
        step = trainer.step()
        validation = trainer.validate()
    assert not step.poisoned
"""

from __future__ import annotations

import copy
import functools
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, TypeVar

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from ..fake_trainer import FakeTrainer
from ..generation import DEFAULT_ROWS, WordTokenizer, answer_by_chance
from .actors import FakeRay
from .generation import Hold, Respond, Row, VerlDraft, VerlEngine
from .modules import verl_stand_in
from .reward_loop import MODULE as REWARD_LOOP
from .trainers import LEGACY, Setup, Values, VerlStep, VerlValidation
from .v1 import MODULE as V1

T = TypeVar("T")

CONFIGURATION = "qreward_plugins.testing.verl"

_NOT_CHECKED = re.compile(
    r"(actor_rollout_ref|critic|custom_reward_function|data|distillation|global_profiler|model_engine|ray_kwargs"
    r"|reward_model|reward\.reward_model\.rollout|sandbox_fusion|skip|transfer_queue|trainer(?!\.v1\.(trainer_mode|sampl))"
    r"|algorithm\.(kl_.*|pf_ppo|rollout_correction))[.=]"
)
"""Nodes that do not concern rewards. Any key of them is taken, as if there were a `++` before it."""

_CLOSING_S = 60.0


class FakeVerlTrainer(FakeTrainer[VerlDraft]):
    """verl's trainers with stand-ins for inference and training.

    `config`: overrides as on verl's command line (`"reward.reward_manager.name=qreward"`, `"+reward_manager=qreward"`),
    or a mapping laid over verl's defaults. The defaults are verl's, but for `data.train_batch_size` and
    `actor_rollout_ref.rollout.n`, which are 4, and the lengths of prompts and responses, 64 tokens. `trainer.use_v1`
    chooses the trainer, V1 in its synchronous mode or the legacy one.

    `rows`: the data set, each row a question or a mapping as in verl's parquet files, with `ground_truth` for short;
    `val_rows`: that of the validation. `reward`: the reward function, in place of `reward.custom_reward_function.path`.
    `respond(draft, rng)` writes a response (it may be async): a text, or a `VerlOutput` for several turns, or a list of
    them for several outputs of one trajectory (V1). `hold(draft)` true: this response waits for `release()`.
    `seed` fixes all that is random, which reward worker gets a sample among it. `timeout_s` bounds a step and a
    validation, where verl would wait for ever; None: it does.

    Nothing trains: the critic's values are what `values(batch)` says, of shape (rows, response length), or 0 without
    it. What needs the numbers of a policy is refused with `NotImplementedError`, by its name in the configuration:
    `algorithm.use_kl_in_reward`, `algorithm.rollout_correction`, asynchronous modes, and reward managers and estimators
    that are not played.

    Reward workers are objects on one event loop, where verl has processes. A reward manager with an `aclose` is closed
    at the end. While the trainer is open, `import verl` and `import ray` give stand-ins (`verl_stand_in`).

    Raises what Hydra raises for overrides that verl would refuse, `ValueError` and `AssertionError` where verl does not
    start, and whatever making the reward managers raises. Leaving the context closes it. Methods are for one thread,
    except `release` and `wait_until_held`.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | Iterable[str] = (),
        *,
        rows: Sequence[Row] = DEFAULT_ROWS,
        val_rows: Sequence[Row] = (),
        reward: Callable[..., Any] | None = None,
        respond: Respond = answer_by_chance,
        hold: Hold | None = None,
        values: Values | None = None,
        tokenizer: Any = None,
        seed: int = 0,
        timeout_s: float | None = 60.0,
    ) -> None:
        self.config = compose_config(config)
        self._trainer: Any = None
        self._ended: BaseException | None = None
        self._engine = VerlEngine(respond, hold, tokenizer if tokenizer is not None else WordTokenizer(), seed)
        super().__init__("fake-verl-actors", "fake-verl-trainer", self._engine.held, timeout_s)
        self._ray = FakeRay(self._loop.loop)
        self._modules = ExitStack()
        try:
            queue = self._modules.enter_context(verl_stand_in(self._ray.modules()))
            loop = sys.modules[REWARD_LOOP]
            setup = Setup(self._engine, self._ray, reward, rows, val_rows, self._run, seed, values)
            loop.RewardLoopManager.played = loop.RewardLoopWorker.played = setup
            if self.config.trainer.use_v1:
                self._trainer = sys.modules[V1].PPOTrainer(self.config, setup, queue)
            else:
                self._trainer = sys.modules[LEGACY].RayPPOTrainer(self.config, setup)
            self._trainer.start()
            # In verl a worker that cannot be made shows with the first call to it, which ends the run just as well.
            _ = self.reward_managers
        except BaseException:
            self.close()
            raise

    def step(self) -> VerlStep:
        """One step: a batch generated, rewarded, and made ready for training; and what the tracker got.

        Raises what ends verl's run, after which any further step is a `RuntimeError`, and `TimeoutError`.
        """
        step: VerlStep = self._whole(self._trainer.step)
        return step

    def start_step(self) -> Future[VerlStep]:
        """`step` in a thread of its own, for tests that act while it runs."""
        return self._in_background(self.step)

    def validate(self) -> VerlValidation:
        """Generate and reward `val_rows`, `val_kwargs.n` times each. Raises like `step`."""
        if not len(self._trainer.val_dataloader.dataset):
            raise ValueError("there is nothing to validate on: set val_rows")
        validation: VerlValidation = self._whole(self._trainer.validate)
        return validation

    @property
    def reward_managers(self) -> list[Any]:
        """The reward managers, one for each worker. They belong to the trainer's event loop: look only."""
        workers = self._trainer.reward_loop_manager.reward_loop_workers
        return [self._loop.run(worker._made(), self._timeout_s).reward_manager for worker in workers]

    def close(self) -> None:
        """End what still runs, close the reward managers, stop the threads. May be called more than once."""
        try:
            super().close()
        finally:
            self._modules.close()

    def _end(self) -> None:
        self._loop.run(self._ray.aclose(), _CLOSING_S)

    def _whole(self, work: Callable[[], T]) -> T:
        if self._ended is not None:
            raise RuntimeError(f"the run has ended: {self._ended!r}") from self._ended
        try:
            return work()
        except BaseException as error:
            self._ended = error
            raise


def compose_config(given: Mapping[str, Any] | Iterable[str]) -> DictConfig:
    """The configuration of a run: overrides, or a mapping laid over verl's defaults, of which any key is taken.

    Raises what Hydra raises, such as `ConfigCompositionException` for a key that verl does not have.
    """
    if isinstance(given, str):
        raise TypeError(f"overrides are a list of texts, not {given!r}")
    if not isinstance(given, Mapping):
        return _composed(*(f"++{each}" if _NOT_CHECKED.match(each) else each for each in map(str, given)))
    config = _composed()
    OmegaConf.set_struct(config, False)
    merged = OmegaConf.merge(config, given)
    assert isinstance(merged, DictConfig)
    return merged


def _composed(*overrides: str) -> DictConfig:
    return copy.deepcopy(_composed_once(overrides))


@functools.lru_cache(maxsize=128)
def _composed_once(overrides: tuple[str, ...]) -> DictConfig:
    """Hydra takes 0.1 s to compose, which is most of a step."""
    hydra = GlobalHydra.instance()
    before = hydra.hydra
    hydra.clear()
    try:
        with initialize_config_module(CONFIGURATION, version_base=None):
            return compose("ppo_trainer", overrides=list(overrides))
    finally:
        hydra.hydra = before
