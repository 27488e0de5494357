"""Checks a run of slime when it starts.

slime loads a reward function, a filter and a log hook when it first calls them, after the model is loaded and the first
rollout is generated. It does not check flags that contradict each other. So a mistake would end the run minutes after
its start. The data source is what slime makes first, in the process that scores, and with all its arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from qreward_plugins import ConfigurationError, Mistake
from qreward_plugins.adapters import KEEPS_OUT

from .samples import keeps_a_token
from .settings import POST_PROCESS_FLAG, adapter_of

_HOOKS = (
    "custom_rm_path",
    "custom_reward_post_process_path",
    "dynamic_sampling_filter_path",
    "custom_rollout_log_function_path",
    "custom_eval_rollout_log_function_path",
    "eval_function_path",
)
_NO_GROUPS = "slime.rollout.sglang_rollout.generate_rollout"
"""slime's default evaluation, which refuses `--group-rm`."""
_MAY_ASK = ("custom_generate_function_path", "rollout_sample_hook_path", "eval_custom_rm_path")
"""Flags of functions that may give samples a reward of qreward without `--custom-rm-path`."""
_FULLY_ASYNC = "slime.rollout.fully_async_rollout."
"""The module of rollouts that have no evaluation."""


class DataSource:
    """slime's `--data-source-path`: slime's own data source (`RolloutDataSourceWithBuffer`), after `check`. A trainer
    that has another one, such as `FakeSlimeTrainer`, provides a callable `args.qreward_data_source`.
    """

    def __new__(cls, args: Any) -> Any:
        check(args)
        own = getattr(args, "qreward_data_source", None)
        return own(args) if own else import_module("slime.rollout.data_source").RolloutDataSourceWithBuffer(args)

    def __init__(self, args: Any) -> None:
        """Not called, because `__new__` returns slime's object. slime's contract tests read its parameters."""


def check(args: Any) -> None:
    """Check the configuration and the flags of a run; a data source of your own calls it first. Sends nothing.

    Raises `ConfigurationError` with all mistakes.
    """
    mistakes = [*_unloadable(args), *contradictions(args)]
    try:
        keeps_out = adapter_of(args).config.on_failure in KEEPS_OUT
        if keeps_out and keeps_a_token(args) and not getattr(args, "custom_reward_post_process_path", 1):
            problem = "REINFORCE++ trains a token of every sample, also of one without a reward."
            mistakes.append(
                Mistake("--advantage-estimator", problem, f"Add {POST_PROCESS_FLAG}, which makes it neutral.")
            )
    except ConfigurationError as error:
        mistakes.extend(error.mistakes)
    if mistakes:
        raise ConfigurationError(mistakes, origin="slime's flags and configuration")


def _unloadable(args: Any) -> Iterator[Mistake]:
    """Hooks that slime could not load, which it does in `load_function` (slime/utils/misc.py). Its own are taken as
    they are.
    """
    for name in _HOOKS:
        path = getattr(args, name, None)
        if not path or str(path).startswith("slime."):
            continue
        module, _, attribute = str(path).rpartition(".")
        try:
            getattr(import_module(module), attribute)
        # An import may raise anything.
        except Exception as error:
            problem = f"slime cannot load {path!r} ({type(error).__name__}: {error})."
            remedy = "Write package.module.function, with dots. Its package must be installed where Ray runs the job."
            yield Mistake(f"--{name.replace('_', '-')}", problem, remedy)


def contradictions(args: Any) -> Iterator[Mistake]:
    """Flags with which no rewards of qreward would be trained, or with which slime would end later."""
    if getattr(args, "debug_train_only", False):
        return  # slime reads saved rollouts with their rewards, and evaluates nothing
    if getattr(args, "custom_rm_path", "") is None and not _scored_elsewhere(args):
        problem = "is not set, so slime takes its rewards from --rm-type, and not from qreward."
        yield Mistake("--custom-rm-path", problem, "Add --custom-rm-path slime_adapter.reward.")
    if getattr(args, "eval_interval", None) is None:
        return
    evaluation = str(getattr(args, "eval_function_path", None) or getattr(args, "rollout_function_path", ""))
    if evaluation.startswith(_FULLY_ASYNC):
        remedy = f"Add --eval-function-path {_NO_GROUPS}, or slime_adapter.eval_rollout."
        yield Mistake("--eval-interval", "slime's fully-async rollout cannot evaluate.", remedy)
    elif getattr(args, "group_rm", False) and evaluation == _NO_GROUPS:
        problem = "slime refuses to evaluate with it, and --eval-interval is set."
        yield Mistake("--group-rm", problem, "Add --eval-function-path slime_adapter.eval_rollout.")


def _scored_elsewhere(args: Any) -> bool:
    """Whether code of the user's may ask qreward: a rollout or generate function, a sample hook, or the reward function
    of an evaluation. slime asks for no reward of a sample that has one (rollout/sglang_rollout.py: `generate_and_rm`).
    """
    rollout = str(getattr(args, "rollout_function_path", None) or "slime.")
    evaluations = (getattr(one, "custom_rm_path", None) for one in getattr(args, "eval_datasets", None) or ())
    return not rollout.startswith("slime.") or any(getattr(args, name, None) for name in _MAY_ASK) or any(evaluations)
