"""Checks verl's configuration before training starts (verl 0.9.1).

Some settings make verl ask no reward manager, end the run in its first step, or ignore what would change rewards. The
V1 trainer reads scores, log probabilities and the critic's values from its transfer queue, and of the other columns
only `uid` (trainer/ppo/v1/trainer_base.py: `PPOTrainer._compute_advantage`). An estimator that needs more raises there,
after a whole batch was generated and scored.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from difflib import get_close_matches

from omegaconf import DictConfig, OmegaConf

from qreward_plugins import Config, ConfigurationError, Mistake
from qreward_plugins.adapters import (
    LOGITS,
    colocated_sources,
    compares_siblings,
    judge_kind_of,
    judges_in_charge,
    parts_of,
    refuse_comparing,
    refuse_parts,
)

from .advantages import KEEPS_OUT
from .metrics import warn_once
from .settings import estimator_of, is_scored_at_once
from .trainers import Name, Trainer

_log = logging.getLogger("verl_adapter")

_BEYOND_V1 = {
    "remax": "the reward of a greedy response (reward_baselines)",
    "optimal_token_baseline": "the actor's sum_pi_squared",
    "tir_optimal_token_baseline": "the actor's sum_pi_squared",
}
"""What an estimator needs and only the legacy trainer and those derived from it provide (trainer/ppo/ray_trainer.py:
`compute_advantage`).
"""

_NOT_HERE = (
    *("reward", "reward.reward_manager", "reward.reward_kwargs", "reward_model", "reward_model.reward_kwargs"),
    *("trainer", "algorithm", "data", "actor_rollout_ref", "actor_rollout_ref.rollout", "critic"),
)
"""Nodes of verl to which a tree of qreward is added by mistake. Others are not searched: keyword arguments of a reward
function, variables, tags and data sources may have any name.
"""
_TREE_KEYS = {"config", *Config.model_fields}

_NOT_PASSED = (
    "verl's V1 trainer passes no ground truth (reward_model) and no data source with a sample while reward model and "
    "rollout share the GPUs."
)
_PASSES = "Set reward.reward_model.enable_resource_pool=True, or trainer.use_v1=False; with either, verl passes them."


_COMPARED = "Route samples to a judge that scores them one by one, or change that."


def _no_hooks(what: str) -> str:
    return (
        f"what {what} is not in place. It is in the trainers of verl.trainer.main_ppo (V1 and legacy), one_step_off "
        "and fully_async of verl 0.9, and this program is none of them, or an unknown version."
    )


def refuse_impossible(config: DictConfig, trainer: Name | None) -> None:
    """Raise `ConfigurationError` with all settings with which `trainer` cannot run on a reward manager's rewards."""
    mistakes = [*_misspelt(config), *_misplaced(config), *_bypass(config), *_estimator(config, trainer)]
    if mistakes:
        raise ConfigurationError(mistakes, origin="verl's configuration")


def refuse_unserved(settings: Config, config: DictConfig, trainer: Trainer | None) -> None:
    """Raise `ConfigurationError` for what `settings` ask for and this run cannot serve. `trainer`: None if its process
    has no hooks.
    """
    refuse_failures(settings, config, trainer)
    _refuse_comparisons(settings, config, trainer)
    _refuse_unknown_parts(settings, config, trainer)


def refuse_failures(settings: Config, config: DictConfig, trainer: Trainer | None) -> None:
    """Raise `ConfigurationError` if `on_failure` or a screen keeps samples out of training, and this run cannot.
    `trainer`: None if its process has no hooks.
    """
    policy = settings.on_failure
    screens = [name for name, judge in settings.judges.items() if judge_kind_of(judge).takes_out(judge)]
    if policy not in KEEPS_OUT and not screens:
        return
    if trainer is None:
        problem = _no_hooks("keeps failed samples out of training")
    elif estimator_of(config) == "gae" and OmegaConf.select(config, "algorithm.use_pf_ppo"):
        problem = "algorithm.use_pf_ppo draws the rows of a batch anew, failed ones among them."
    elif estimator_of(config) == "remax" and is_scored_at_once(config):
        problem = (
            "`remax` subtracts the reward of a greedy response. While reward model and rollout share the GPUs, nothing "
            "tells whether it failed."
        )
    else:
        return
    mistakes = [
        Mistake(f"judges.{name}.on", f"`mask` is impossible here: {problem}", "Choose `floor`.") for name in screens
    ]
    if policy in KEEPS_OUT:
        remedy = "Choose `{constant: x}`, or `raise` to end the run at a failed sample."
        mistakes.append(Mistake("on_failure", f"`{policy}` is impossible here: {problem}", remedy))
    raise ConfigurationError(mistakes, origin="qreward")


def _refuse_comparisons(settings: Config, config: DictConfig, trainer: Trainer | None) -> None:
    """Raise `ConfigurationError` if a judge compares siblings (kind `rank`), and this run cannot."""
    estimator = estimator_of(config)
    problem = ""
    if trainer is None:
        problem = _no_hooks("collects the rewards of a group")
    elif is_scored_at_once(config):
        problem = "reward model and rollout share the GPUs, and verl then does not tell training from validation."
    elif estimator in ("gdpo", "remax"):
        problem = f"`{estimator}` needs rewards before the siblings of a sample are there."
    elif trainer.name == "v1" and OmegaConf.select(config, "algorithm.filter_groups.enable"):
        problem = "algorithm.filter_groups needs rewards before the siblings of a sample are there."
    elif colocated_sources(settings):
        problem = "a judge that sleeps while verl trains cannot be asked by another process than the reward workers."
    if problem:
        refuse_comparing(settings, problem, remedy=_COMPARED)


def _refuse_unknown_parts(settings: Config, config: DictConfig, trainer: Trainer | None) -> None:
    """Raise `ConfigurationError` for judges of turns, and for `dense`, where this run cannot serve them."""
    turns = dense = ""
    if trainer is None:
        turns, dense = _no_hooks("tells the turns of a response"), _no_hooks("adds rewards to tokens")
    elif trainer.name == "v1" and is_scored_at_once(config):
        turns = "verl's V1 trainer does not pass them while reward model and rollout share the GPUs."
    if estimator_of(config) == "gdpo":
        dense = "`gdpo` reads the single rewards of a sample, and not those of its tokens."
    elif estimator_of(config) == "remax":
        dense = "`remax` subtracts the whole reward of a greedy response from what is left of it at each token."
    elif compares_siblings(settings):
        dense = dense or "a judge of kind `rank` is asked where the tokens of a response are not known."
    refuse_parts(settings, turns=turns, dense=dense)


def check_columns(config: Config, functions: Collection[str], columns: Collection[str]) -> None:
    """Check a row of a colocated reward model: the V1 trainer passes only prompts, responses and `raw_prompt`
    (trainer/ppo/v1/trainer_base.py: `_compute_reward_colocate`).

    Raises `ConfigurationError` for judges that ask `functions`, and for routes. Warns once for the others.
    """
    if "reward_model" in columns:
        return
    asking = [part for judge in judges_in_charge(config) for part in parts_of(config, judge)]
    places = [f"judges.{name}" for name in dict.fromkeys(asking) if name in functions]
    places += [f"routes.{pattern}" for pattern in config.routes if pattern != "*"]
    if places:
        raise ConfigurationError([Mistake(place, _NOT_PASSED, _PASSES) for place in places], origin="qreward")
    if not all(judge_kind_of(config.judges[name]).asks == LOGITS for name in asking):
        warn_once(f"no judge sees a reference answer: {_NOT_PASSED} {_PASSES}")


def warn_of_ignored_settings(config: DictConfig) -> None:
    """Warn of settings that would change rewards, but have no effect in this run."""
    for path in ("reward.reward_kwargs", "reward_model.reward_kwargs"):
        overlong = OmegaConf.select(config, f"{path}.overlong_buffer_cfg")
        if overlong is not None and overlong.get("enable"):
            _log.warning(
                "%s.overlong_buffer_cfg works only with verl's `dapo` reward manager; qreward does not penalise long "
                "responses. Use a reward function that does, or add a judge for it to a sum.",
                path,
            )


def _misspelt(config: DictConfig) -> Iterator[Mistake]:
    """Keys that were meant to be `qreward`. Hydra adds any key after a `+`, and the tree below it would be ignored."""
    for key in map(str, config):
        if key != "qreward" and key.startswith("q") and get_close_matches("qreward", [key], cutoff=0.75):
            yield Mistake(key, "unknown key.", "Did you mean `qreward`?")


def _misplaced(config: DictConfig) -> Iterator[Mistake]:
    """Trees of qreward at places where nobody reads them. verl's reward function would score without a message."""
    remedy = "The tree is at the top of verl's configuration: +qreward.config=FILE."
    tree = config.get("qreward")
    for place in _NOT_HERE:
        node = OmegaConf.select(config, place)
        for key in ("qreward", "qreward_config"):
            # What `qreward` refers to by interpolation is its home.
            if isinstance(node, DictConfig) and isinstance(node.get(key), (str, DictConfig)) and node[key] != tree:
                yield Mistake(f"{place}.{key}", "qreward is not configured here.", remedy)
    manager = OmegaConf.select(config, "reward.reward_manager")
    # A class of one's own may read any key.
    if isinstance(manager, DictConfig) and str(manager.get("_target_", "verl.")).startswith("verl."):
        for key in map(str, manager):
            if key in _TREE_KEYS:
                yield Mistake(f"reward.reward_manager.{key}", "verl reads no such key.", remedy)


def _bypass(config: DictConfig) -> Iterator[Mistake]:
    """Settings with which verl asks its own reward model and no manager (experimental/reward_loop/reward_loop.py:
    `RewardLoopWorker.compute_score`).
    """
    if not OmegaConf.select(config, "reward.reward_model.enable"):
        return
    if OmegaConf.select(config, "reward.custom_reward_function.path") is not None:
        return
    yield Mistake(
        "reward.reward_model.enable",
        "verl scores every sample with its own reward model and asks no reward manager, qreward included.",
        "Set reward.custom_reward_function.path to any function; verl then asks the manager, and qreward reaches the "
        "model at `base_url: framework://reward`. Or set reward.reward_model.enable=False, serve the model yourself, "
        "and make it a source of qreward (kind: reward_model, openai or http).",
    )


def _estimator(config: DictConfig, trainer: Name | None) -> Iterator[Mistake]:
    estimator = estimator_of(config)
    needed = _BEYOND_V1.get(estimator)
    if trainer == "v1" and needed is not None:
        yield Mistake(
            "algorithm.adv_estimator",
            f"`{estimator}` needs {needed}, which verl's V1 trainer does not pass to an estimator. The first step "
            "would end the run.",
            "Choose another estimator, or set trainer.use_v1=False.",
        )
