"""`QRewardBatchManager`: verl's reward manager of 0.4 to 0.7.0, with one sync call for a whole batch.

All samples of a group are in the batch. So a failed sample gets the mean of its group's scored samples: the mean of the
group stays the same, and the sample's advantage is zero. If all samples of a group fail, all get the same constant, and
every advantage is zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from qreward_plugins import Failed, Outcome, Sample, group_means, process_portal
from qreward_plugins.adapters import number_of, refuse_parts, without_colocated

from .rewards import ExtraInfo, is_absent, unpacked
from .rollouts import ResponseTokens, to_sample, unreadable
from .settings import ComputeScore, load_settings, open_reward_functions, with_reward_model
from .trainers import OWN_DEVICES

if TYPE_CHECKING:
    import torch

_MAY_OVERLAP = (
    "this version of verl may score a batch while it trains (reward_model.launch_reward_fn_async), and does not say "
    "whether it does."
)
_NO_PARTS = "the trainers of older versions of verl take one reward of a response."


class QRewardBatchManager:
    """verl's sync reward manager `qreward`.

    The arguments are verl's (trainer/ppo/reward.py of 0.4 to 0.7.0). `qreward` is the inline tree, which verl takes
    from `reward_model.reward_kwargs.qreward`; without it `QREWARD_CONFIG` names a file. `reward_fn_key` is the column
    that holds the data source. `num_examine`, how many samples to print, is ignored: use a journal to see every sample.
    verl makes one manager for training and one for validation, with the same reward function. With the same
    configuration they share one engine of this process, and so the limits. Raises `ConfigurationError`.
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int = 0,
        compute_score: ComputeScore | None = None,
        reward_fn_key: str = "data_source",
        *,
        qreward: Any = None,
        config: DictConfig | None = None,
        **_: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self._data_source_column = reward_fn_key
        settings = without_colocated(
            with_reward_model(load_settings(config, qreward), None), _MAY_OVERLAP, remedy=OWN_DEVICES
        )
        self._on_failure = settings.on_failure
        refuse_parts(settings, dense=_NO_PARTS)
        self._portal = process_portal(
            settings,
            sources=lambda: open_reward_functions(settings, trainer=config, compute_score=compute_score),
            key=_identity(compute_score),
        )
        self._extra_info = ExtraInfo(self._portal)

    def __call__(self, data: Any, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        """Score a `DataProto`: rewards of shape (batch, response length), each at its response's last token.

        With `return_dict` the result is `{"reward_tensor": ..., "reward_extra_info": {key: list}}`.
        """
        if "rm_scores" in data.batch.keys():  # noqa: SIM118 (a TensorDict refuses `in`)
            there: torch.Tensor = data.batch["rm_scores"]
            return {"reward_tensor": there, "reward_extra_info": {}} if return_dict else there
        read = [self._read(data[index]) for index in range(len(data))]
        scored = iter(self._portal.score_all(sample for sample, failed, _ in read if failed is None))
        outcomes: list[Outcome] = [next(scored) if failed is None else failed for _, failed, _ in read]
        samples = [sample for sample, _, _ in read]
        # Zeros of its shape and device without an import of torch, which takes seconds.
        rewards: torch.Tensor = data.batch["responses"].float() * 0.0
        numbers = [number_of(outcome, self._on_failure) for outcome in outcomes]
        means = group_means(numbers, [sample.group_id for sample in samples])
        for index, (number, mean, (_, _, tokens)) in enumerate(zip(numbers, means, read, strict=True)):
            # These versions of verl cannot leave a sample out; the mean of its group comes closest.
            rewards[index, 0 if tokens is None else tokens.last] = mean if number is None else number
        if not return_dict:
            return rewards
        infos = [self._extra_info.of(*each) for each in zip(outcomes, samples, strict=True)]
        return {"reward_tensor": rewards, "reward_extra_info": _columns(infos)}

    def _read(self, item: Any) -> tuple[Sample, Failed | None, ResponseTokens | None]:
        """The sample of a row, its failure if it cannot be read, and the tokens of its response."""
        try:
            tokens = ResponseTokens(item, self.tokenizer)
            return to_sample(item, tokens, data_source_column=self._data_source_column), None, tokens
        except Exception as error:
            return *unreadable(item, error), None


def _identity(function: ComputeScore | None) -> list[object]:
    """What tells reward functions apart. verl loads the file for each manager, so equal ones are different objects."""
    found: list[object] = []
    while isinstance(function, partial):
        found += [function.args, function.keywords]
        function = function.func
    code = getattr(function, "__code__", None)
    return [*found, function if code is None else (code.co_filename, code.co_firstlineno, code.co_name)]


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """One list for each key, as long as the batch. Missing values are NaN, or "" in a list of texts, because these
    versions of verl average everything that is not a text. A key without any value is left out.
    """
    columns: dict[str, list[Any]] = {}
    for key, values in unpacked({key: [row[key] for row in rows] for key in rows[0]} if rows else {}).items():
        present = [value for value in values if not is_absent(value)]
        if present:
            missing = "" if isinstance(present[0], str) else math.nan
            columns[key] = [missing if is_absent(value) else value for value in values]
    return columns
