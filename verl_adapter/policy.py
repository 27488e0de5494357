"""What becomes of a failed sample in this verl run: `on_failure`, resolved by the trainer's configuration.

Being neutral takes an advantage estimator that compares the samples of a group, and leaving a sample out takes verl's
V1 trainer: in the legacy one and those made of it, and where a batch is scored at once by a colocated reward model, an
exception of a reward manager ends the run (`trainers` has the table). Whatever would end the run at the first failed
sample is refused before the first rollout.
"""

from __future__ import annotations

import logging

from omegaconf import DictConfig, OmegaConf

from qreward_plugins.config import Config, Constant
from qreward_plugins.config.models import FailurePolicy
from qreward_plugins.errors import ConfigurationError, Mistake
from qreward_plugins.groups import MAX_WAITING

from .trainers import trainer_of

_log = logging.getLogger("verl_adapter")

MEAN_BASED = frozenset(
    {"grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "gpg", "reinforce_plus_plus_baseline"}
)
"""Estimators to which the mean of the scored siblings is neutral (trainer/ppo/core_algos.py).

The baseline of a sample is the mean of its group, which an imputed mean leaves as it is. `grpo_passk` has none: an
imputed sample is never the one that is rewarded, but the best one's lead is taken from the mean where the runner-up is
below it. `reinforce_plus_plus_baseline` whitens over the batch afterwards.
"""

_NOT_GROUPED = frozenset({"gae", "reinforce_plus_plus", "remax"})
_BY_COMPONENT = frozenset({"gdpo"})


def failure_policy(config: Config, trainer: DictConfig) -> FailurePolicy:
    """`on_failure` without its `auto`.

    `auto` is `neutral` where the estimator is in `MEAN_BASED`, and else `exclude`; in the legacy trainer, which cannot
    exclude, and in those made of it, it is `neutral` for every estimator that compares the samples of a group. Raises
    `ConfigurationError`.
    """
    chosen = config.on_failure
    if isinstance(chosen, Constant) or chosen == "raise":
        return chosen
    not_neutral, not_excluded = _why_not_neutral(trainer), _why_not_excluded(trainer)
    if chosen == "neutral":
        if not_neutral:
            raise _refused("neutral", not_neutral, "" if not_excluded else "exclude")
        return "neutral"
    if chosen == "exclude":
        if not_excluded:
            raise _refused("exclude", not_excluded, "" if not_neutral else "neutral")
        return "exclude"
    if not not_neutral and (estimator_of(trainer) in MEAN_BASED or not_excluded):
        return "neutral"
    if not_excluded:
        raise _refused("auto", f"{not_excluded} And it cannot be made neutral to its group, because {not_neutral}", "")
    return "exclude"


def samples_per_prompt(trainer: DictConfig) -> int:
    """The size of a group in training."""
    return int(OmegaConf.select(trainer, "actor_rollout_ref.rollout.n") or 1)


def warn_of_short_waiting(trainer: DictConfig, processes: int) -> None:
    """Say once where more samples of a step could wait for their siblings than the reward workers let wait.

    A reward worker is an async Ray actor and carries 1,000 calls at once; a waiting sample holds one of them. Nothing
    else in verl is held up by it: an agent loop worker awaits the reward in a task of its own, after generation.
    """
    samples = _prompts_at_once(trainer) * samples_per_prompt(trainer)
    if samples > MAX_WAITING * processes:
        _log.warning(
            "Up to %d failed samples wait for their siblings in each of %d reward workers; one more closes the group "
            "that waits longest, at the mean of what is scored by then. In an outage, the %d samples that verl scores "
            "at once could have more of them; with reward.num_workers=%d none would be cut short.",
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
    """Whether rewards are computed for a whole batch, after the rollout: the reward model takes turns on its GPUs."""
    return bool(OmegaConf.select(trainer, "reward.reward_model.enable")) and not OmegaConf.select(
        trainer, "reward.reward_model.enable_resource_pool"
    )


def _trains_what_is_left(trainer: DictConfig) -> bool:
    """Whether V1 trains a group without the samples that are left out; its asynchronous modes replace the group."""
    return str(OmegaConf.select(trainer, "trainer.v1.trainer_mode") or "sync") == "sync"


def estimator_of(trainer: DictConfig) -> str:
    """The name of the advantage estimator."""
    return str(OmegaConf.select(trainer, "algorithm.adv_estimator") or "gae")


def _why_not_neutral(trainer: DictConfig) -> str:
    estimator = estimator_of(trainer)
    if estimator in _NOT_GROUPED:
        return f"the advantage estimator `{estimator}` does not compare the samples of a group."
    if estimator in _BY_COMPONENT:
        return f"the advantage estimator `{estimator}` takes the components of a reward, and a failed sample has none."
    if samples_per_prompt(trainer) < 2:
        return "a group has one sample (actor_rollout_ref.rollout.n)."
    if trainer_of(trainer).leaves_out and _is_scored_at_once(trainer):
        return "verl does not tell a reward manager the groups while its reward model takes turns with the rollout."
    return ""


def _why_not_excluded(trainer: DictConfig) -> str:
    kind = trainer_of(trainer)
    if kind.name == "legacy":
        return "the legacy trainer ends the run when a sample has no reward; leaving it out needs trainer.use_v1=True."
    if not kind.leaves_out:
        return (
            f"verl's {kind.name} trainer, which is made of the legacy one, ends the run when a sample has no reward; "
            "leaving it out needs verl.trainer.main_ppo with trainer.use_v1=True, which has asynchronous modes, too "
            "(trainer.v1.trainer_mode)."
        )
    if estimator_of(trainer) == "grpo_passk" and _trains_what_is_left(trainer):
        return (
            "`grpo_passk` ends the run at a group of one sample, and so does a single row with which verl fills up the "
            "batch in place of a sample that was left out."
        )
    if _is_scored_at_once(trainer):
        return (
            "verl ends the run when a sample has no reward while its reward model takes turns with the rollout; "
            "leaving it out needs reward.reward_model.enable_resource_pool=True."
        )
    return ""


def _refused(policy: str, why: str, instead: str) -> ConfigurationError:
    others = "".join(f"`{other}`, " for other in (instead,) if other)
    remedy = f"Or choose {others}`{{constant: x}}`, or `raise` to end it knowingly."
    return ConfigurationError(
        [Mistake("on_failure", f"`{policy}` is impossible here: {why}", remedy)], origin="qreward"
    )
