"""Checks verl's configuration before training starts (verl 0.9.1).

Some settings make verl ask no reward manager, end the run in its first step, or ignore what would change rewards. The
V1 trainer reads scores, log probabilities and the critic's values from its transfer queue, and of the other columns
only `uid` (trainer/ppo/v1/trainer_base.py: `PPOTrainer._compute_advantage`). An estimator that needs more raises there,
after a whole batch was generated and scored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from difflib import get_close_matches
from itertools import chain

from omegaconf import DictConfig, OmegaConf

from qreward_plugins import Config, ConfigurationError, Mistake
from qreward_plugins.adapters import (
    KEEPS_OUT,
    LOGITS,
    colocated_sources,
    compares_siblings,
    judge_kind_of,
    judges_in_charge,
    parts_of,
    refuse_comparing,
    refuse_parts,
    without_colocated,
)

from .metrics import warn_once
from .trainers import OWN_DEVICES, Name, estimator_of, is_scored_at_once, problem_of_phases

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
    *("reward.reward_model", "reward.custom_reward_function"),
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


def _no_hooks(what: str) -> str:
    return (
        f"what {what} is not in place. It is in the trainers of verl.trainer.main_ppo (V1 and legacy), one_step_off "
        "and fully_async of verl 0.9, and this program is none of them, or an unknown version."
    )


def refuse_impossible(config: DictConfig, trainer: Name | None) -> None:
    """Raise `ConfigurationError` with all settings with which `trainer` cannot run on a reward manager's rewards."""
    found = (_misspelt(config), _misplaced(config), _overlong(config), _bypass(config), _estimator(config, trainer))
    _refuse(*chain.from_iterable(found))


def refuse_old_key(config: DictConfig) -> None:
    """Raise `ConfigurationError` if a run asks for `qreward` by a key that verl reads no more (from 0.9.0 on)."""
    if OmegaConf.select(config, "reward_model.reward_manager") == "qreward":
        _refuse(
            Mistake("reward_model.reward_manager", "verl ignores this key.", "Set reward.reward_manager.name=qreward.")
        )


def _refuse(*mistakes: Mistake) -> None:
    if mistakes:
        raise ConfigurationError(mistakes, origin="verl's configuration")


def refuse_unserved(settings: Config, config: DictConfig, trainer: Name | None) -> None:
    """Raise `ConfigurationError` for what `settings` ask for and this run cannot serve: failed and screened samples
    that are kept out of training, siblings that are compared, turns, rewards in parts, and judges on the trainer's
    GPUs. `trainer`: None if its process has no hooks.
    """
    colocated = colocated_sources(settings)
    if colocated and (problem := problem_of_phases(config, trainer)):
        without_colocated(settings, problem, remedy=OWN_DEVICES)
    estimator, at_once = estimator_of(config), is_scored_at_once(config)
    unknown = "`remax` subtracts the reward of a greedy response. While reward model and rollout share the GPUs, "
    draws_anew = estimator == "gae" and bool(OmegaConf.select(config, "algorithm.use_pf_ppo"))
    problem = _first(
        (trainer is None, _no_hooks("keeps failed samples out of training")),
        (draws_anew, "algorithm.use_pf_ppo draws the rows of a batch anew, failed ones among them."),
        (estimator == "remax" and at_once, f"{unknown}nothing tells whether it failed."),
    )
    mistakes = [
        Mistake(f"judges.{name}.on", f"`mask` is impossible here: {problem}", "Choose `floor`.")
        for name, judge in settings.judges.items()
        if judge_kind_of(judge).takes_out(judge)
    ]
    if settings.on_failure in KEEPS_OUT:
        remedy = "Choose `{constant: x}`, or `raise` to end the run at a failed sample."
        mistakes.append(Mistake("on_failure", f"`{settings.on_failure}` is impossible here: {problem}", remedy))
    if problem and mistakes:
        raise ConfigurationError(mistakes, origin="qreward")
    filters = trainer == "v1" and bool(OmegaConf.select(config, "algorithm.filter_groups.enable"))
    late = "needs rewards before the siblings of a sample are there."
    problem = _first(
        (trainer is None, _no_hooks("collects the rewards of a group")),
        (at_once, "reward model and rollout share the GPUs, and verl then does not tell training from validation."),
        (estimator in ("gdpo", "remax"), f"`{estimator}` {late}"),
        (filters, f"algorithm.filter_groups {late}"),
        (bool(colocated), "a judge that sleeps while verl trains is asked by reward workers only."),
    )
    if problem:
        refuse_comparing(settings, problem, remedy="Route samples to a judge that scores them one by one.")
    turns = _first(
        (trainer is None, _no_hooks("tells the turns of a response")),
        (
            trainer == "v1" and at_once,
            "verl's V1 trainer does not pass them while reward model and rollout share the GPUs.",
        ),
    )
    dense = _first(
        (estimator == "gdpo", "`gdpo` reads the single rewards of a sample, and not those of its tokens."),
        (estimator == "remax", "`remax` subtracts a whole reward from what is left of one at each token."),
        (trainer is None, _no_hooks("adds rewards to tokens")),
        (compares_siblings(settings), "a judge of kind `rank` is asked where the tokens are not known."),
    )
    refuse_parts(settings, turns=turns, dense=dense)


def _first(*cases: tuple[bool, str]) -> str:
    """The problem of the first case that holds; "" if none does."""
    return next((problem for holds, problem in cases if holds), "")


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


def _overlong(config: DictConfig) -> Iterator[Mistake]:
    """A penalty of verl's manager `dapo`, which would change rewards, but has no effect here."""
    for path in ("reward.reward_kwargs", "reward_model.reward_kwargs"):
        if OmegaConf.select(config, f"{path}.overlong_buffer_cfg.enable"):
            remedy = "Set its enable=False, and use a reward function that penalises long responses."
            yield Mistake(f"{path}.overlong_buffer_cfg", "only verl's reward manager `dapo` reads this.", remedy)


def _misspelt(config: DictConfig) -> Iterator[Mistake]:
    """Keys that were meant to be `qreward`. Hydra adds any key after a `+`, and the tree below it would be ignored."""
    for key in map(str, config):
        if key != "qreward" and key.startswith("q") and get_close_matches("qreward", [key], cutoff=0.75):
            yield Mistake(key, "unknown key.", "Did you mean `qreward`?")


def _misplaced(config: DictConfig) -> Iterator[Mistake]:
    """Trees of qreward at places where nobody reads them. verl's reward function would score without a message,
    or the tree at the top would count alone.
    """
    remedy = "The tree is at the top of verl's configuration: +qreward.config=FILE."
    for place in _NOT_HERE:
        node = OmegaConf.select(config, place)
        if not isinstance(node, DictConfig):
            continue
        # A class of one's own may read any key.
        is_managers = place == "reward.reward_manager" and str(node.get("_target_", "verl.")).startswith("verl.")
        for key in map(str, node):
            is_tree = key in ("qreward", "qreward_config") and isinstance(node.get(key), (str, DictConfig))
            if is_tree or (is_managers and key in _TREE_KEYS):
                yield Mistake(f"{place}.{key}", "qreward is not configured here.", remedy)


def _bypass(config: DictConfig) -> Iterator[Mistake]:
    """Settings with which verl asks its own reward model and no manager (experimental/reward_loop/reward_loop.py:
    `RewardLoopWorker.compute_score`).
    """
    asked = OmegaConf.select(config, "reward.custom_reward_function.path") is not None
    if OmegaConf.select(config, "reward.reward_model.enable") and not asked:
        yield Mistake(
            "reward.reward_model.enable",
            "verl scores every sample with its own reward model and asks no reward manager, qreward included.",
            "Set reward.custom_reward_function.path to any function; verl then asks the manager, and qreward reaches "
            "the model at `base_url: framework://reward`. Or set reward.reward_model.enable=False, serve the model "
            "yourself, and make it a source of qreward (kind: reward_model, openai or http).",
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
