"""Resolves `on_failure` for a verl run: what happens to a failed sample, given verl's configuration.

`neutral` needs an advantage estimator that compares the samples of a group. `exclude` needs verl's V1 trainer. In the
legacy trainer and those derived from it, and where a colocated reward model scores a whole batch at once, an exception
of a reward manager ends the run (see the table in `trainers`). A policy that would end the run at the first failed
sample is refused before the first rollout.
"""

from __future__ import annotations

import logging

from omegaconf import DictConfig, OmegaConf

from qreward_plugins import Config, ConfigurationError, Mistake
from qreward_plugins.adapters import MAX_WAITING, Constant, FailurePolicy

from .trainers import trainer_of

_log = logging.getLogger("verl_adapter")

MEAN_BASED = frozenset(
    {"grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "gpg", "reinforce_plus_plus_baseline"}
)
"""Estimators for which the mean of the scored siblings is neutral (trainer/ppo/core_algos.py).

The baseline of a sample is the mean of its group, which an imputed mean leaves unchanged. `grpo_passk` has no such
baseline: an imputed sample is never the rewarded one, but the best sample's lead is measured from the mean where the
runner-up is below it. `reinforce_plus_plus_baseline` whitens over the batch afterwards.
"""

_NOT_GROUPED = frozenset({"gae", "reinforce_plus_plus", "remax"})
_BY_COMPONENT = frozenset({"gdpo"})


def failure_policy(config: Config, trainer: DictConfig) -> FailurePolicy:
    """`on_failure` with `auto` resolved.

    `auto` is `neutral` if the estimator is in `MEAN_BASED`, else `exclude`. The legacy trainer and those derived from
    it cannot exclude; there it is `neutral` for every estimator that compares the samples of a group. Raises
    `ConfigurationError` for a policy that cannot work.
    """
    chosen = config.on_failure
    if isinstance(chosen, Constant) or chosen == "raise":
        return chosen
    neutral_problem, exclude_problem = _neutral_problem(trainer), _exclude_problem(trainer)
    if chosen == "neutral":
        if neutral_problem:
            raise _refused("neutral", neutral_problem, "" if exclude_problem else "exclude")
        return "neutral"
    if chosen == "exclude":
        if exclude_problem:
            raise _refused("exclude", exclude_problem, "" if neutral_problem else "neutral")
        return "exclude"
    if not neutral_problem and (estimator_of(trainer) in MEAN_BASED or exclude_problem):
        return "neutral"
    if exclude_problem:
        raise _refused("auto", f"{exclude_problem} And `neutral` is impossible, because {neutral_problem}", "")
    return "exclude"


def samples_per_prompt(trainer: DictConfig) -> int:
    """The size of a group in training."""
    return int(OmegaConf.select(trainer, "actor_rollout_ref.rollout.n") or 1)


def warn_of_short_waiting(trainer: DictConfig, processes: int) -> None:
    """Warn if more samples of a step could wait for their siblings than the reward workers can let wait.

    A reward worker is an async Ray actor and carries 1,000 calls at once; a waiting sample takes one of them. It delays
    nothing else in verl: an agent loop worker awaits the reward in a task of its own, after generation.
    """
    samples = _prompts_at_once(trainer) * samples_per_prompt(trainer)
    if samples > MAX_WAITING * processes:
        _log.warning(
            "At most %d failed samples can wait for their siblings in each of %d reward workers; one more closes the "
            "group that waits longest, at the mean of its samples scored so far. In an outage the %d samples that verl "
            "scores at once may exceed that. Set reward.num_workers=%d to let all of them wait.",
            MAX_WAITING,
            processes,
            samples,
            -(-samples // MAX_WAITING),
        )


def _prompts_at_once(trainer: DictConfig) -> int:
    """The prompts whose samples are scored at the same time: a batch, or as many as the fully asynchronous trainer
    begins before it waits (fully_async_rollouter.py: `set_max_required_samples`; its `data.train_batch_size` is 0).
    """
    if trainer_of(trainer).name != "fully_async":
        return int(OmegaConf.select(trainer, "data.train_batch_size") or 0)

    def number(path: str, default: float) -> float:
        value = OmegaConf.select(trainer, path)
        return default if value is None else float(value)

    rollout = "actor_rollout_ref.rollout"
    devices = number("rollout.nnodes", 1) * number("rollout.n_gpus_per_node", 1)
    for name in ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size"):
        devices //= number(f"{rollout}.{name}", 1)
    begun = devices * number("async_training.concurrent_samples_per_replica", 16)
    ahead = number("actor_rollout_ref.actor.ppo_mini_batch_size", 1) * number("async_training.require_batches", 1)
    ahead *= 1 + number("async_training.staleness_threshold", 1)
    return int(min(begun, ahead * number("async_training.trigger_parameter_sync_step", 1)))


def takes_any_keys(trainer: DictConfig) -> bool:
    """Whether verl accepts samples whose extra info has different keys."""
    return trainer_of(trainer).leaves_out and not _is_scored_at_once(trainer)


def _is_scored_at_once(trainer: DictConfig) -> bool:
    """Whether a whole batch is scored after the rollout, because reward model and rollout share the GPUs."""
    return bool(OmegaConf.select(trainer, "reward.reward_model.enable")) and not OmegaConf.select(
        trainer, "reward.reward_model.enable_resource_pool"
    )


def _trains_what_is_left(trainer: DictConfig) -> bool:
    """Whether V1 trains a group without its excluded samples; its asynchronous modes replace the group instead."""
    return str(OmegaConf.select(trainer, "trainer.v1.trainer_mode") or "sync") == "sync"


def estimator_of(trainer: DictConfig) -> str:
    """The name of the advantage estimator."""
    return str(OmegaConf.select(trainer, "algorithm.adv_estimator") or "gae")


def _neutral_problem(trainer: DictConfig) -> str:
    estimator = estimator_of(trainer)
    if estimator in _NOT_GROUPED:
        return f"the advantage estimator `{estimator}` does not compare the samples of a group."
    if estimator in _BY_COMPONENT:
        return f"the advantage estimator `{estimator}` uses the components of a reward, and a failed sample has none."
    if samples_per_prompt(trainer) < 2:
        return "a group has one sample (actor_rollout_ref.rollout.n)."
    if trainer_of(trainer).leaves_out and _is_scored_at_once(trainer):
        return "verl tells a reward manager no groups while reward model and rollout share the GPUs."
    return ""


def _exclude_problem(trainer: DictConfig) -> str:
    kind = trainer_of(trainer)
    if kind.name == "legacy":
        return "the legacy trainer ends the run when a sample has no reward; leaving it out needs trainer.use_v1=True."
    if not kind.leaves_out:
        return (
            f"verl's {kind.name} trainer, which derives from the legacy one, ends the run when a sample has no reward; "
            "leaving it out needs verl.trainer.main_ppo with trainer.use_v1=True, which has asynchronous modes, too "
            "(trainer.v1.trainer_mode)."
        )
    if estimator_of(trainer) == "grpo_passk" and _trains_what_is_left(trainer):
        return (
            "`grpo_passk` ends the run at a group of one sample, and verl fills up the batch with such a single row in "
            "place of a sample that was left out."
        )
    if _is_scored_at_once(trainer):
        return (
            "verl ends the run when a sample has no reward while reward model and rollout share the GPUs; "
            "leaving it out needs reward.reward_model.enable_resource_pool=True."
        )
    return ""


def _refused(policy: str, why: str, instead: str) -> ConfigurationError:
    others = "".join(f"`{other}`, " for other in (instead,) if other)
    remedy = f"Or choose {others}`{{constant: x}}`, or `raise` to end the run at a failed sample."
    return ConfigurationError(
        [Mistake("on_failure", f"`{policy}` is impossible here: {why}", remedy)], origin="qreward"
    )
