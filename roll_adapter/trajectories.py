"""`QRewardTrajectoryMixin`: the reward of a finished trajectory, for ROLL's agentic pipelines.

Agentic pipelines know no reward workers: rewards come from `env.step`, and each environment runs in a thread of its
own. The mixin goes before an env manager and scores a trajectory when ROLL is about to make a rollout of it. All env
managers of a process share one engine, in a thread beside theirs, and so its limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from qreward_plugins import ConfigurationError, Message, Outcome, Sample, process_portal
from qreward_plugins.config import Config, load_layers
from qreward_plugins.groups import RunningMeans, number_of
from qreward_plugins.samples import fits_float32
from qreward_plugins.sharing import may_share

_means = RunningMeans()


class QRewardTrajectoryMixin:
    """Adds a judge's reward to the trajectories of an env manager:

        class JudgedEnvManager(QRewardTrajectoryMixin, TrajEnvManager): ...

    The configuration is the environment's own (`custom_envs.<tag>.qreward`: the tree, or the path of a file), or the
    file that `QREWARD_CONFIG` names; it is read once. The judge's reward is multiplied with
    `custom_envs.<tag>.qreward_weight` (default 1.0) and added to that of the last step. A failed trajectory adds the
    mean of what its group's scored trajectories in this process got, and is masked out of the loss (`on_failure:
    auto`, `neutral` and `exclude`).
    """

    env_config: Any
    rollout_cache: Any

    def formulate_rollouts(self, rollout_cache: Any) -> Any:
        """Score the trajectory, then make ROLL's rollout of it. Blocks this thread until the outcome is there; raises
        `ConfigurationError`, and `RewardMissing` with `on_failure: raise`.
        """
        turns = _acted(rollout_cache.history)
        if not turns:
            return super().formulate_rollouts(rollout_cache)  # type: ignore[misc]
        settings = self._qreward_settings
        portal = process_portal(settings, processes=self._qreward_processes())
        outcome = portal.score(self.trajectory_sample(rollout_cache))
        number, excluded = self._number(settings, outcome, rollout_cache)
        own = float(turns[-1].get("reward") or 0.0)
        reward = own + self._weight() * number
        if fits_float32(own) and not fits_float32(reward):
            # ROLL would hold it as infinity, which spoils the advantages of the whole group.
            reward, excluded = own, True
        turns[-1]["reward"] = reward
        turns[-1]["metrics"] = {
            **turns[-1].get("metrics", {}),
            "qreward_failed": float(excluded),
            "qreward_reward": number,
            "qreward_latency_s": portal.facts().of(outcome)["latency_s"],
        }
        rollout = super().formulate_rollouts(rollout_cache)  # type: ignore[misc]
        if excluded:
            rollout.batch["response_mask"] = rollout.batch["response_mask"].zero_()
        return rollout

    def trajectory_sample(self, rollout_cache: Any) -> Sample:
        """The sample that a judge sees: the first turn's messages as the prompt, all that came after them as the
        response. Override it to show a judge something else.
        """
        turns = _acted(rollout_cache.history)
        messages = [message for turn in turns for message in turn.get("messages") or []]
        first = next((n for n, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
        group = f"{rollout_cache.tag}/{rollout_cache.group_id}/{getattr(self, 'episode_id', None)}"
        return Sample(
            messages=messages[:first],
            response=_written(messages[first:]),
            data_source=str(rollout_cache.tag),
            group_id=group,
            extras={"steps": len(turns), "env_rewards": [turn.get("reward") for turn in turns]},
            id=f"{group}/{rollout_cache.env_id}",
        )

    @cached_property
    def _qreward_settings(self) -> Config:
        return _settings_of(self.env_config.get("qreward"), self.env_config.get("tag"))

    def _qreward_processes(self) -> int:
        """How many engines share the limits: one for each environment worker of training and of validation, and there
        one for each configuration with a source of this one's.
        """
        pipeline = getattr(self, "pipeline_config", None)
        workers = [getattr(pipeline, name, None) for name in ("train_env_manager", "val_env_manager")]
        processes = max(1, sum(int(getattr(config, "world_size", None) or 0) for config in workers))
        return processes * (1 + self._qreward_others)

    @cached_property
    def _qreward_others(self) -> int:
        """How many other configurations of environments have a source of this one's."""
        mine = self._qreward_settings
        others: list[Config] = []
        for tag, node in (getattr(getattr(self, "pipeline_config", None), "custom_envs", None) or {}).items():
            tree = node.get("qreward")
            if tree is None or tag == self.env_config.get("tag"):
                continue
            try:
                settings = _settings_of(tree, tag)
            except ConfigurationError:
                continue  # its own environments report the mistake and do not start
            if settings not in (mine, *others) and may_share(mine, settings):
                others.append(settings)
        return len(others)

    def _weight(self) -> float:
        weight = self.env_config.get("qreward_weight")
        return 1.0 if weight is None else float(weight)

    def _number(self, settings: Config, outcome: Outcome, rollout_cache: Any) -> tuple[float, bool]:
        """The judge's number, and whether it is only a stand-in."""
        key = (rollout_cache.tag, rollout_cache.group_id, getattr(self, "episode_id", None))
        number = number_of(outcome, settings.on_failure)
        if number is not None:
            _means.add(key, number)
            return number, False
        return _means.mean(key), True


def _settings_of(tree: Any, tag: Any) -> Config:
    return load_layers(tree, origin=f"custom_envs.{tag}.qreward")


def _acted(history: Sequence[Any]) -> list[Any]:
    """The turns in which the policy has said something; the last entry may be a turn that was only opened."""
    return [turn for turn in history if turn.get("llm_response") is not None]


def _written(messages: Sequence[Message]) -> str:
    """A dialogue as text; what the policy says alone needs no names."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
