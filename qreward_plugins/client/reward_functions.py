"""Reward functions that ask a reward server (`qreward serve`), in the calling conventions of TRL and ms-swift.

They need no configuration here. A missing reward is None, which these trainers leave out of the reward.

Sources of the conventions: TRL f2cd577 `GRPOTrainer._calculate_rewards`; ms-swift 3602360 `swift/rewards/orm.py` and
`rl_core/grpo_algorithm.py`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from ..errors import InputError
from ..samples import Failed, Outcome, Sample
from .client import BlockingRewardClient, RewardClient

DEADLINE_S = 300.0
SERVER = "QREWARD_SERVER"
"""The environment variable with the server's URL, where a trainer takes no arguments for a reward."""
TOKEN = "QREWARD_SERVER_TOKEN"
"""The environment variable with the server's token; unset if it needs none."""


@dataclass(frozen=True)
class Columns:
    """The columns of a data set that a sample is made of. `extras` are further ones that the judge gets; they must be
    there, and so must those in `required`.
    """

    ground_truth: str = "ground_truth"
    data_source: str = "data_source"
    extras: Sequence[str] = ()
    required: Sequence[str] = ()


def trl_reward(
    server: str | None = None,
    *,
    token_env: str = TOKEN,
    deadline_s: float = DEADLINE_S,
    ground_truth: str = "ground_truth",
    data_source: str = "data_source",
    extras: Sequence[str] = (),
    name: str = "qreward",
) -> Callable[..., Awaitable[list[float | None]]]:
    """Return a function for `GRPOTrainer(reward_funcs=[...])` of TRL.

    `ground_truth`, `data_source` and `extras` name columns of the data set. TRL awaits it together with its other async
    functions, and logs it as `rewards/NAME`. A sample without a reward gets None; their share is logged as
    `NAME/failed_rate`. Columns that are named here must be in the data set. The function raises `RewardServerError` if
    the server cannot be reached, and `InputError` for a missing column.
    """
    named = [name for name, usual in ((ground_truth, "ground_truth"), (data_source, "data_source")) if name != usual]
    url, columns = (
        _url(server),
        Columns(ground_truth, data_source, (extras,) if isinstance(extras, str) else tuple(extras), named),
    )

    async def reward(
        prompts: Sequence[Any],
        completions: Sequence[Any],
        log_metric: Any = None,
        trainer_state: Any = None,
        **rest: Any,
    ) -> list[float | None]:
        samples = _samples(prompts, completions, rest, columns, step=getattr(trainer_state, "global_step", None))
        async with RewardClient(url, token=_token(token_env)) as client:
            outcomes = await client.score_all(samples, deadline_s=deadline_s)
        if callable(log_metric) and outcomes:
            failed = sum(isinstance(outcome, Failed) and not outcome.screened for outcome in outcomes)
            log_metric(f"{name}/failed_rate", failed / len(outcomes))
        return _rewards(outcomes)

    reward.__name__ = reward.__qualname__ = name
    return reward


class SwiftReward:
    """An ORM of ms-swift: `orms["qreward"] = SwiftReward` in a file of `--external_plugins`, `--reward_funcs qreward`.

    The server is that of the environment (`QREWARD_SERVER`, `QREWARD_SERVER_TOKEN`). A subclass sets other columns and
    another deadline.
    """

    columns = Columns(ground_truth="solution")
    deadline_s = DEADLINE_S

    def __init__(self, args: Any = None, **_: Any) -> None:
        self.args = args
        self._url = _url(None)

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Return the rewards; None for a sample without one. Raises `RewardServerError`."""
        # The last message of a row is the completion.
        messages = columns.get("messages") or [[] for _ in completions]
        prompts = [
            [turn for number, turn in enumerate(row) if number + 1 < len(row) or turn.get("role") != "assistant"]
            for row in messages
        ]
        step = getattr(columns.get("trainer_state"), "global_step", None)
        samples = _samples(prompts, completions, columns, self.columns, step=step)
        with BlockingRewardClient(self._url, token=os.environ.get(TOKEN) or None) as client:
            return _rewards(client.score_all(samples, deadline_s=self.deadline_s))


def _url(server: str | None) -> str:
    url = server or os.environ.get(SERVER)
    if not url:
        raise InputError(f"no reward server: name its URL, or set the environment variable {SERVER}")
    return RewardClient(url).url


def _token(variable: str) -> str | None:
    """Return the server's token. Only the usual variable may be unset."""
    token = os.environ.get(variable, "").strip()
    if not token and variable != TOKEN:
        raise InputError(f"token_env: the environment variable {variable} is not set; set it to the server's token")
    return token or None


def _rewards(outcomes: Sequence[Outcome]) -> list[float | None]:
    return [outcome.reward for outcome in outcomes]


def _samples(
    prompts: Sequence[Any], completions: Sequence[Any], given: Mapping[str, Any], columns: Columns, *, step: Any
) -> list[Sample]:
    for what, values in (("prompts", prompts), ("completions", completions)):
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise InputError(f"{what} must be a list, not {type(values).__name__}")
    if len(prompts) != len(completions):
        raise InputError(f"there are {len(prompts)} prompts and {len(completions)} completions")
    missing = [name for name in (*columns.required, *columns.extras) if name not in given]
    if missing:
        raise InputError(f"the data set has no column {missing[0]!r}; it has {', '.join(sorted(given)) or 'none'}")

    def column(name: str) -> Sequence[Any]:
        values = given.get(name)
        whole = isinstance(values, Sequence) and not isinstance(values, str) and len(values) == len(completions)
        return values if whole and values is not None else [None] * len(completions)

    extras = {name: column(name) for name in columns.extras}
    truths, sources = column(columns.ground_truth), column(columns.data_source)
    return [
        Sample(
            messages=_messages(prompt),
            response=_text(completion, f"completions[{number}]"),
            ground_truth=truths[number],
            data_source="" if sources[number] is None else str(sources[number]),
            group_id=_group_of(prompt),
            step=step if isinstance(step, int) else None,
            extras={name: values[number] for name, values in extras.items()},
            id=str(number),
        )
        for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
    ]


def _messages(prompt: Any) -> list[Any]:
    return list(prompt) if isinstance(prompt, (list, tuple)) else [{"role": "user", "content": str(prompt)}]


def _text(completion: Any, where: str) -> str:
    """Return a completion as text: the contents of its messages, if it is conversational."""
    if isinstance(completion, str):
        return completion
    if not isinstance(completion, Sequence) or not all(isinstance(turn, Mapping) for turn in completion):
        raise InputError(f"{where} must be a text or a list of messages, not {type(completion).__name__}")
    return "\n\n".join(str(turn.get("content") or "") for turn in completion)


def _group_of(prompt: Any) -> str:
    """Name the samples of one prompt. The trainers pass no identifier."""
    return hashlib.sha256(orjson.dumps(prompt, default=repr)).hexdigest()[:16]
