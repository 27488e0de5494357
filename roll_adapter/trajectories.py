"""`QRewardTrajectoryMixin`: rewards finished trajectories in ROLL's agentic pipelines.

Agentic pipelines have no reward workers. Rewards come from `env.step`, and each environment runs in its own thread. The
mixin precedes an env manager and scores a trajectory just before ROLL turns it into a rollout. All env managers of a
process share one engine, and so its limits; the engine has its own thread.

ROLL spreads the trajectories of a group over environment workers (`max_env_num_per_worker`). They meet in its queue
(rollout_scheduler.py, `GroupQueue.put`), but by then their rewards are final. So a failed trajectory waits for its
group on the job's barrier. This blocks only its own environment; its siblings have others.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from qreward_plugins import Config, ConfigurationError, Mistake, Outcome, Sample, Scored, process_portal
from qreward_plugins.adapters import (
    KEEPS_OUT,
    Image,
    Unreadable,
    attach,
    dialogue,
    fits_float32,
    is_image_part,
    load_layers,
    number_of,
    read_or_unreadable,
    refuse_comparing,
    refuse_parts,
    without_colocated,
)

from .barrier import means, settle

_NO_PHASES = "ROLL does not tell its environments when it trains, so the judge would not sleep."

_ONE_ROW = (
    "this environment manager makes one row of a trajectory, with one reward. Those with a row for each step "
    "(StepEnvManager, AgentNativeStepEnvManager) take them."
)

_OTHER_TURNS = "the messages of this environment manager hold another number of answers than it took steps."

_NO_GROUPS = "ROLL spreads the trajectories of a group over processes."

_NO_PARTS = "ROLL does not tell its environments how many processes they are, so none knows its part of a limit."

_numbers = itertools.count()


class QRewardTrajectoryMixin:
    """Adds a judge's reward to each trajectory of an env manager:

        class JudgedEnvManager(QRewardTrajectoryMixin, TrajEnvManager): ...

    The configuration is `custom_envs.<tag>.qreward` (the tree, or the path of a file), or the file that
    `QREWARD_CONFIG` names; it is read once. The judge's reward is multiplied with `custom_envs.<tag>.qreward_weight`
    (default 1.0) and added to the reward of the last step; with `dense`, each turn's part of it to the reward of its
    step.

    With `on_failure: auto`, `neutral` and `exclude`, a failed trajectory adds the mean of its group's scored
    trajectories, and is masked out of the loss. In training it waits for them, at most `groups.wait_s`. Then the group
    closes at the mean of its scored trajectories; a trajectory that comes later adds that mean and is masked, too.
    """

    env_config: Any

    def formulate_rollouts(self, rollout_cache: Any) -> Any:
        """Score the trajectory, then make ROLL's rollout of it.

        Blocks this thread until the outcome is there; if it is a failure, until its group is closed. Raises
        `ConfigurationError`, and `RewardMissing` with `on_failure: raise`.
        """
        turns = _acted(rollout_cache.history)
        if not turns:
            return super().formulate_rollouts(rollout_cache)  # type: ignore[misc]
        settings = self._qreward_settings
        portal = process_portal(settings)
        sample = self.trajectory_sample(rollout_cache)
        outcome = portal.score(sample)
        number, excluded = self._number(settings, outcome, rollout_cache)
        failed = excluded and outcome.reward is None
        added = [0.0] * len(turns)
        if settings.dense and not excluded and isinstance(outcome, Scored):
            policy = [turn["end"] for turn in sample.turns if turn["role"] == "assistant"]
            if len(policy) not in (0, len(turns)):
                refuse_parts(settings, dense=_OTHER_TURNS)
            added = _by_turn(policy, outcome.verdict.dense, len(turns))
        added[-1] += number - math.fsum(added)
        own = [float(turn.get("reward") or 0.0) for turn in turns]
        weight = float(self.env_config.get("qreward_weight", 1.0))
        rewards = [before + weight * each for before, each in zip(own, added, strict=True)]
        if all(map(fits_float32, own)) and not all(map(fits_float32, rewards)):
            # It would be infinite in ROLL, which spoils the advantages of the whole group.
            rewards, excluded, failed = own, True, True
        for turn, reward in zip(turns, rewards, strict=True):
            turn["reward"] = reward
        turns[-1]["metrics"] = {
            **turns[-1].get("metrics", {}),
            "qreward_failed": float(failed),
            "qreward_reward": number,
            "qreward_latency_s": portal.facts().of(outcome)["latency_s"],
        }
        rollout = super().formulate_rollouts(rollout_cache)  # type: ignore[misc]
        if settings.dense and len(rollout) == 1 < len(turns):
            refuse_parts(settings, dense=_ONE_ROW)
        if excluded:
            rollout.batch["response_mask"] = rollout.batch["response_mask"].zero_()
        return rollout

    def trajectory_sample(self, rollout_cache: Any) -> Sample:
        """The sample that a judge sees: the first turn's messages as the prompt, and everything after them as the
        response. Images of later turns are images of the response. Override it to show a judge something else.
        """
        turns = _acted(rollout_cache.history)
        messages = _joined(list(map(_messages_of, turns)))
        # Examples of answers are part of the prompt.
        first = len(_messages_of(turns[0]))
        first -= messages[first - 1]["role"] == "assistant"
        group = f"{rollout_cache.tag}/{rollout_cache.group_id}/{getattr(self, 'episode_id', None)}"
        whole = read_or_unreadable(lambda: dialogue(messages[first:]))
        response, said = (whole, ()) if isinstance(whole, Unreadable) else whole
        return Sample(
            messages=messages[:first],
            response=response,
            turns=said,
            response_images=[Image.of(part) for message in messages[first:] for part in _images(message)],
            data_source=str(rollout_cache.tag),
            group_id=group,
            split="val" if getattr(self, "mode", "train") == "val" else "train",
            extras={"steps": len(turns), "env_rewards": [turn.get("reward") for turn in turns]},
            id=f"{group}/{rollout_cache.env_id}",
        )

    @cached_property
    def _qreward_settings(self) -> Config:
        return _settings_of(self.env_config.get("qreward"), self.env_config.get("tag"))

    def _number(self, settings: Config, outcome: Outcome, rollout_cache: Any) -> tuple[float, bool]:
        """The number to add, and whether it is only the mean of the group."""
        number = number_of(outcome, settings.on_failure)
        if settings.on_failure not in KEEPS_OUT:
            assert number is not None
            return number, False
        cache, mode, seed = rollout_cache, getattr(self, "mode", None), getattr(self, "group_seed", None)
        # ROLL's own name of the group of trajectories that it compares (`traj_group_id`).
        group = (cache.tag, cache.group_id, getattr(self, "episode_id", None), seed)
        size = getattr(getattr(self, "worker_config", None), "group_size", 1)
        if mode == "train" and size > 1 and None not in group:
            mean = settle(
                "_".join(map(str, group)),
                # An environment may play two trajectories of one group if its siblings fall behind.
                f"{cache.env_id}/{next(_numbers)}",
                number,
                size=size,
                wait_s=settings.groups.wait_s,
                # ROLL's `stop` comes before it shuts down: no sibling will finish any more.
                running=lambda: getattr(self, "running", True),
            )
            return (number, False) if mean is None and number is not None else (mean or 0.0, True)
        # A validation does not wait, and a trajectory without a group name cannot find its siblings.
        key = (mode, *group)
        if number is None:
            return means.mean(key), True
        means.add(key, number)
        return number, False


def _settings_of(tree: Any, tag: Any) -> Config:
    settings = load_layers(tree, origin=f"custom_envs.{tag}.qreward")
    refuse_comparing(settings, _NO_GROUPS, remedy="Route samples to a judge that scores them one by one.")
    if settings.engine.shared == "local":
        raise ConfigurationError([Mistake("engine.shared", _NO_PARTS, "Leave it at auto: Ray counts for all.")])
    return without_colocated(settings, _NO_PHASES, remedy="Give the judge devices of its own, and remove the key.")


def _joined(messages: Sequence[Sequence[Any]]) -> list[Any]:
    """The messages of all steps. Some env managers show the whole conversation in each step, others what is new.

    A whole conversation grows with each step. One as long as before is a step that repeats the last one.
    """
    joined: list[Any] = []
    for step in messages:
        begins_so = len(step) > len(joined) and all(map(_is_same, joined, step))
        joined = list(step) if begins_so else [*joined, *step]
    return joined


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two messages are the same text of the same role."""
    texts = (one["content"], other["content"])
    return one is other or (
        one["role"] == other["role"] and all(isinstance(each, str) for each in texts) and texts[0] == texts[1]
    )


def _by_turn(ends: Sequence[int], dense: Iterable[tuple[int, float]], count: int) -> list[float]:
    """What each of the `count` turns of the policy, which end at `ends`, adds to the reward. A step that ends before a
    turn does is of it; of turns that end at the same place, each has its own.
    """
    added = [0.0] * count
    seen: Counter[int] = Counter()
    for end, reward in dense:
        turn, alike = bisect_left(ends, end), ends.count(end)
        added[min(turn + (seen[end] % alike if alike else 0), count - 1)] += reward
        seen[end] += 1
    return added


def _acted(history: Sequence[Any]) -> list[Any]:
    """The turns in which the policy has responded; the last entry may be a turn without a response yet."""
    return [turn for turn in history if turn.get("llm_response") is not None]


def _messages_of(turn: Mapping[str, Any]) -> list[Any]:
    """The messages of a turn. Env managers for vision models keep none, but the observation: a text, the pixels of an
    image, or a mapping with a prompt and images (vl_traj_env_manager.py: `format_messages`).
    """
    if turn.get("messages"):
        return list(turn["messages"])
    seen = turn.get("observation")
    if seen is None:
        return []
    shown = seen if isinstance(seen, Mapping) else {"prompt" if isinstance(seen, str) else "image": seen}
    prompt, images = shown.get("prompt", ""), shown.get("image", ())
    asked = list(prompt) if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    if asked and "role" not in asked[0]:
        asked = [{"role": "user", "content": asked}]
    messages, rest = attach(asked, list(images) if isinstance(images, (list, tuple)) else [images])
    messages += [{"role": "user", "content": [{"type": "image", "image": image} for image in rest]}] if rest else []
    return [*messages, {"role": "assistant", "content": turn["llm_response"]}]


def _images(message: Mapping[str, Any]) -> list[Any]:
    content = message["content"]
    return [part for part in content if is_image_part(part)] if isinstance(content, list) else []
