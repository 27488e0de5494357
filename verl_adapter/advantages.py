"""Computes advantages as if failed samples had never been sampled.

verl computes them in the trainer's process, from a batch of rows. The failed ones are taken out, and get zeros. With
`gae`, their returns are the critic's own values, so that it learns nothing from them. Where the estimator compares
siblings, a sample whose siblings all failed is zero, too: verl would train it on its raw reward. A batch in which
nothing has failed is left to verl.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from qreward_plugins import BudgetSpent, Config, InputError, JudgeUnavailable
from qreward_plugins.adapters import ENDS_RUN, SCREENED, Trained, TrainingLog

from .metrics import RewardLog
from .queue import extra_info, put_rewards
from .response_tokens import add_parts
from .rewards import CAUSE, DENSE, MISSING, PREFIX, SAMPLE
from .siblings import PENDING, Told, collected

NOT_GROUPED = frozenset({"gae", "reinforce_plus_plus", "remax"})
"""Estimators that do not compare the samples of a prompt (trainer/ppo/core_algos.py)."""

KEEPS_OUT = ("auto", "neutral", "exclude")
"""The values of `on_failure` that keep failed samples out of training. In verl they are the same."""

_PADDING = "pad"
"""How the uid of a row begins that only fills up a batch (trainer/ppo/padding_utils.py). Other uids are uuid4."""


class Advantages:
    """Wraps verl's functions that compute advantages. `log` gets the extra info of each sample."""

    def __init__(self, settings: Config, log: RewardLog) -> None:
        self._settings = settings
        self._log = log
        self._unbased: set[str] = set()
        """The prompts whose greedy response failed (remax), by uid."""
        self._in_vain = 0
        journal = settings.engine.journal
        self._training = None if journal is None else TrainingLog(journal.path)

    def by_columns(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `compute_advantage`, whose batch has the extra info as columns. Each row is a sample."""

        @functools.wraps(compute)
        def computed(data: Any, *args: Any, **kwargs: Any) -> Any:
            columns = data.non_tensor_batch
            names = [name for name in columns if name.startswith(PREFIX) or name == "acc"]
            infos = [{name: columns[name][row] for name in names} for row in range(len(data))]
            found = self._compared(infos)
            if found:
                mask = data.batch["attention_mask"][:, -data.batch["responses"].shape[-1] :]
                ends = {row: int(mask[row].sum()) - 1 for row in found}
                add_parts(data, {row: [(ends[row], told["reward_score"])] for row, told in found.items()})
                for row, told in found.items():
                    infos[row] = {name: told["reward_extra_info"].get(name) for name in names}
                for name in names:
                    columns[name] = np.array([info[name] for info in infos])
            add_parts(data, {row: json.loads(info.get(DENSE) or "[]") for row, info in enumerate(infos)})

            def among(part: Any, _: Sequence[int]) -> Any:
                return compute(part, *args, **kwargs)

            return self._computed(among, data, infos, list(map(str, range(len(data)))), _estimator(args, kwargs))

        return computed

    def by_keys(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `compute_advantage_for_multi_trajectories`, whose rows have their extra info in V1's queue. A session is
        a sample, and may have several rows.
        """

        @functools.wraps(compute)
        def computed(data: Any, batch_keys: Sequence[str], *args: Any, **kwargs: Any) -> Any:
            infos = extra_info(batch_keys, "train")
            found = self._compared(infos)
            if found:
                lengths = put_rewards({batch_keys[row]: told for row, told in found.items()}, "train")
                ends = {row: lengths[batch_keys[row]] - 1 for row in found}
                add_parts(data, {row: [(ends[row], told["reward_score"])] for row, told in found.items()})
                for row, told in found.items():
                    infos[row] = told["reward_extra_info"]
            sessions = [key.rsplit("_", 1)[0] for key in batch_keys]
            # The steps are those of the last row of a session, which was judged.
            rows = sorted(range(len(sessions)), key=lambda row: int(batch_keys[row].rsplit("_", 1)[1]))
            last = {sessions[row]: row for row in rows}
            add_parts(data, {row: json.loads(infos[row].get(DENSE) or "[]") for row in last.values()})

            estimator = _estimator(args, kwargs)
            names = (kwargs["config"].get("gdpo_reward_keys") or ()) if estimator == "gdpo" else None

            def among(part: Any, rows: Sequence[int]) -> Any:
                keys = [batch_keys[row] for row in rows]
                if names is None:
                    return compute(part, keys, *args, **kwargs)
                with _rewards_of(part, [infos[row] for row in rows], names):
                    return compute(part, keys, *args, **kwargs)

            return self._computed(among, data, infos, sessions, estimator)

        return computed

    def of_greedy(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `generate_sequences`, and note the prompts whose greedy response failed: verl subtracts its reward from
        those of the others (remax), and drops its extra info.
        """

        @functools.wraps(generate)
        def generated(loops: Any, prompts: Any, *args: Any, **kwargs: Any) -> Any:
            sampled = prompts.non_tensor_batch.get("__do_sample__")
            output = generate(loops, prompts, *args, **kwargs)
            # An experimental trainer may get an awaitable.
            columns = getattr(output, "non_tensor_batch", {})
            if sampled is not None and MISSING in columns:
                rows = zip(prompts.non_tensor_batch["uid"], sampled, columns[MISSING], columns[CAUSE], strict=True)
                self._unbased |= {
                    str(uid)
                    for uid, is_sampled, missing, cause in rows
                    if not is_sampled and self._has_none({MISSING: missing, CAUSE: cause})
                }
            return output

        return generated

    def _computed(
        self,
        compute: Callable[[Any, Sequence[int]], Any],
        data: Any,
        infos: Sequence[Mapping[str, Any]],
        sessions: Sequence[str],
        estimator: str,
    ) -> Any:
        uids = list(map(str, data.non_tensor_batch.get("uid", sessions)))
        # All rows of a session have the same extra info.
        judged = {
            session: (uid, info)
            for session, uid, info in zip(sessions, uids, infos, strict=True)
            if not uid.startswith(_PADDING)
        }
        self._log.add("train", judged.values())
        every = range(len(infos))
        if any(info.get(CAUSE) == f"infra/{ENDS_RUN}" for info in infos):
            raise BudgetSpent("a budget with `on_spent: raise` is spent; the log of the reward workers says which")
        out = self._left_out(infos, uids, sessions, estimator)
        kept = [row for row in every if row not in out]
        self._give_up_if_in_vain([row for row in kept if not uids[row].startswith(_PADDING)], judged.values())
        data = compute(data, every) if not out else _among(kept, compute, data, estimator)
        if self._training is not None:
            self._training.add(list(_trained(data, infos, uids, sessions, out)))
        return data

    def _compared(self, infos: Sequence[Mapping[str, Any]]) -> Mapping[int, Told]:
        """The rewards of rows that were compared with their siblings, by row."""
        pending = [row for row, info in enumerate(infos) if info.get(CAUSE) == PENDING.label]
        if not pending:
            return {}
        told = collected([infos[row][SAMPLE] for row in pending], deadline_s=self._settings.engine.deadline_s)
        return {row: told[infos[row][SAMPLE]] for row in pending if infos[row][SAMPLE] in told}

    def _left_out(
        self, infos: Sequence[Mapping[str, Any]], uids: Sequence[str], sessions: Sequence[str], estimator: str
    ) -> set[int]:
        """The rows that get zeros: those without a number, and those that have nothing left to be compared with."""
        out = {row for row, info in enumerate(infos) if self._has_none(info) or uids[row] in self._unbased}
        self._unbased.difference_update(uids)
        if estimator not in NOT_GROUPED:
            out |= _lone(uids, sessions, out)
        return out

    def _has_none(self, info: Mapping[str, Any]) -> bool:
        """Whether a sample has no number to train on: no `on_failure` gives a screened one any, or one that was handed
        over and never came back.
        """
        keeps_out = self._settings.on_failure in KEEPS_OUT or info.get(CAUSE) in (SCREENED, PENDING.label)
        return bool(info.get(MISSING)) and keeps_out

    def _give_up_if_in_vain(self, kept: Sequence[int], judged: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Raise `JudgeUnavailable` after `groups.give_up_after` steps in a row that train on nothing."""
        causes = Counter(str(info[CAUSE]) for _, info in judged if info.get(CAUSE))
        self._in_vain = 0 if kept or {*causes} == {SCREENED} else self._in_vain + 1
        if self._in_vain >= self._settings.groups.give_up_after:
            reasons = ", ".join(f"{cause} {count} times" for cause, count in causes.most_common(3))
            raise JudgeUnavailable(
                f"{self._in_vain} steps in a row trained on nothing, because no sample had a reward to compare "
                f"(the last one: {reasons}). `qreward check` tests every source; groups.give_up_after sets the number."
            )


def _among(kept: Sequence[int], compute: Callable[[Any, Sequence[int]], Any], data: Any, estimator: str) -> Any:
    """The batch with the advantages of the rows in `kept`, computed among these, and zeros for the others."""
    part = compute(data.select_idxs(np.array(kept)), kept) if kept else None
    for name in ("advantages", "returns"):
        if name == "returns" and estimator == "gae":
            whole = data.batch["values"].clone()
        else:
            whole = data.batch["token_level_rewards"].clone()
            whole[:] = 0.0
        if part is not None:
            whole[kept] = part.batch[name]
        data.batch[name] = whole
    return data


def _trained(
    data: Any, infos: Sequence[Mapping[str, Any]], uids: Sequence[str], sessions: Sequence[str], out: Iterable[int]
) -> Iterator[Trained]:
    """What became of the samples that reward managers have judged. The rows of a session are one sample."""
    mask = data.batch["response_mask"]
    sums = (data.batch["advantages"] * mask).sum(-1).tolist()
    tokens, rewards = mask.sum(-1).tolist(), data.batch["token_level_rewards"].sum(-1).tolist()
    left_out = set(out)
    of_session: dict[str, list[int]] = {}
    for row, session in enumerate(sessions):
        of_session.setdefault(session, []).append(row)
    for rows in of_session.values():
        info, count = infos[rows[-1]], sum(tokens[row] for row in rows)
        if info.get(SAMPLE) and not uids[rows[-1]].startswith(_PADDING):
            advantage = sum(sums[row] for row in rows) / count if count else None
            masked = left_out.issuperset(rows)
            yield Trained(str(info[SAMPLE]), uids[rows[-1]], None, rewards[rows[-1]], advantage, masked)


@contextmanager
def _rewards_of(part: Any, infos: Sequence[Mapping[str, Any]], names: Iterable[str]) -> Iterator[None]:
    """Give rows what `gdpo` reads (trainer/ppo/core_algos.py: `compute_gdpo_outcome_advantage`) and V1 does not pass:
    the single rewards, and where responses end. It adds up the tokens of a row, so any end will do. Raises
    `InputError` for a row without a reward, such as one that an agent loop has rewarded itself.
    """
    mask = part.batch["response_mask"]
    part.batch["prompts"], part.batch["attention_mask"] = mask[:, :0], mask * 0 + 1
    for name in names:
        if any(name not in info for info in infos):
            raise InputError(f"algorithm.gdpo_reward_keys: a sample has no {name!r}, which its reward manager tells")
        part.non_tensor_batch[name] = np.array([float(info[name]) for info in infos])
    try:
        yield
    finally:
        for name in ("prompts", "attention_mask"):
            del part.batch[name]
        for name in names:
            del part.non_tensor_batch[name]


def _lone(uids: Sequence[str], sessions: Sequence[str], out: set[int]) -> set[int]:
    """The rows of groups that lost samples, and have only one left."""
    left: dict[str, set[str]] = {uids[row]: set() for row in out}
    for row, uid in enumerate(uids):
        if uid in left and row not in out:
            left[uid].add(sessions[row])
    return {row for row, uid in enumerate(uids) if uid in left and len(left[uid]) < 2}


def _estimator(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    chosen = kwargs.get("adv_estimator", args[0] if args else "")
    return str(getattr(chosen, "value", chosen))
