"""Computes advantages as if failed samples had never been sampled.

verl computes them in the trainer's process, from a batch of rows. The failed ones are taken out, and get zeros. With
`gae`, their returns are the critic's own values, so that it learns nothing from them. Where the estimator compares
siblings, a sample whose siblings all failed is zero, too: verl would train it on its raw reward. A batch in which
nothing has failed is left to verl.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from qreward_plugins import BudgetSpent, Config, InputError, JudgeUnavailable
from qreward_plugins.adapters import ENDS_RUN, KEEPS_OUT, SCREENED, Trained, TrainingLog

from .batches import ColumnRows, QueuedRows, Rows
from .metrics import RewardLog
from .rewards import CAUSE, MISSING, SAMPLE
from .siblings import PENDING, collected

NOT_GROUPED = frozenset({"gae", "reinforce_plus_plus", "remax"})
"""Estimators that do not compare the samples of a prompt (trainer/ppo/core_algos.py)."""
LEAST_STEPS = 3
"""Steps in a row that train on nothing before a run ends: a judge that is down may be well again."""

Compute = Callable[[Any, Sequence[int]], Any]
"""Computes the advantages of a part of a batch. The second argument is the rows of this part in the batch."""


class Advantages:
    """Wraps verl's functions that compute advantages. `log` gets the extra info of each sample."""

    def __init__(self, settings: Config, log: RewardLog) -> None:
        self._settings = settings
        self._log = log
        self._unbased: set[str] = set()
        """The prompts whose greedy response failed (remax), by uid."""
        self._in_vain: list[int] = []
        """The groups of each of the last steps that trained on nothing."""
        journal = settings.engine.journal
        self._training = None if journal is None else TrainingLog(journal.path)

    def by_columns(self, compute: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> Any:
        """Wraps `compute_advantage`."""

        def among(part: Any, _: Sequence[int]) -> Any:
            return compute(part, *args, **kwargs)

        return self._computed(among, ColumnRows(data), _estimator(args, kwargs))

    def by_keys(
        self, compute: Callable[..., Any], data: Any, batch_keys: Sequence[str], *args: Any, **kwargs: Any
    ) -> Any:
        """Wraps `compute_advantage_for_multi_trajectories`."""
        rows, estimator = QueuedRows(data, batch_keys), _estimator(args, kwargs)

        def among(part: Any, kept: Sequence[int]) -> Any:
            if estimator == "gdpo":
                _give_rewards(part, [rows.infos[row] for row in kept], kwargs["config"].get("gdpo_reward_keys") or ())
            return compute(part, [batch_keys[row] for row in kept], *args, **kwargs)

        return self._computed(among, rows, estimator)

    def of_greedy(self, generate: Callable[..., Any], loops: Any, prompts: Any, *args: Any, **kwargs: Any) -> Any:
        """Wraps `generate_sequences`, and notes the prompts whose greedy response failed: verl subtracts its reward
        from those of the others (remax), and drops its extra info.
        """
        sampled = prompts.non_tensor_batch.get("__do_sample__")
        output = generate(loops, prompts, *args, **kwargs)
        # An experimental trainer may get an awaitable.
        columns = getattr(output, "non_tensor_batch", {})
        if sampled is not None and MISSING in columns:
            rows = zip(prompts.non_tensor_batch["uid"], sampled, columns[MISSING], columns[CAUSE], strict=True)
            self._unbased |= {
                str(uid)
                for uid, is_sampled, missing, cause in rows
                if not is_sampled and self.has_none({MISSING: missing, CAUSE: cause})
            }
        return output

    def _computed(self, compute: Compute, rows: Rows, estimator: str) -> Any:
        self._compare_siblings(rows)
        rows.add_parts()
        judged = [(rows.uids[row], rows.infos[row]) for row in rows.judged if not rows.is_padding(row)]
        self._log.add("train", judged)
        every = range(len(rows.infos))
        if any(info.get(CAUSE) == f"infra/{ENDS_RUN}" for info in rows.infos):
            raise BudgetSpent("a budget with `on_spent: raise` is spent; the log of the reward workers says which")
        out = self._left_out(rows, estimator)
        kept = [row for row in every if row not in out]
        self._give_up_if_in_vain([row for row in kept if not rows.is_padding(row)], judged)
        data = compute(rows.data, every) if not out else _among(kept, compute, rows.data, estimator)
        if self._training is not None:
            self._training.add(list(_trained(data, rows, out)))
        return data

    def _compare_siblings(self, rows: Rows) -> None:
        """Have samples compared with their siblings, if their judge does that, and write their rewards."""
        ids = {row: info[SAMPLE] for row, info in enumerate(rows.infos) if info.get(CAUSE) == PENDING.label}
        if not ids:
            return
        told = collected(list(ids.values()), deadline_s=self._settings.engine.deadline_s)
        if told:
            rows.put({row: told[sample] for row, sample in ids.items() if sample in told})

    def _left_out(self, rows: Rows, estimator: str) -> set[int]:
        """The rows that get zeros: those without a number, and those that have nothing left to be compared with."""
        out = {row for row, info in enumerate(rows.infos) if self.has_none(info) or rows.uids[row] in self._unbased}
        self._unbased.difference_update(rows.uids)
        return out if estimator in NOT_GROUPED else out | _lone(rows, out)

    def has_none(self, info: Mapping[str, Any]) -> bool:
        """Whether a sample has no number to train on: no `on_failure` gives a screened one any, or one that was handed
        over and never came back.
        """
        keeps_out = self._settings.on_failure in KEEPS_OUT or info.get(CAUSE) in (SCREENED, PENDING.label)
        return bool(info.get(MISSING)) and keeps_out

    def _give_up_if_in_vain(self, kept: Sequence[int], judged: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Raise `JudgeUnavailable` after `groups.give_up_after` groups in a row of steps that train on nothing."""
        causes = Counter(str(info[CAUSE]) for _, info in judged if info.get(CAUSE))
        not_in_vain = kept or {*causes} == {SCREENED}
        self._in_vain = [] if not_in_vain else [*self._in_vain, len({uid for uid, _ in judged})]
        if len(self._in_vain) >= LEAST_STEPS and sum(self._in_vain) >= self._settings.groups.give_up_after:
            reasons = ", ".join(f"{cause} {count} times" for cause, count in causes.most_common(3))
            raise JudgeUnavailable(
                f"{len(self._in_vain)} steps in a row trained on nothing, because no sample had a reward to compare "
                f"(the last one: {reasons}). `qreward check` tests every source; groups.give_up_after sets the number."
            )


def _among(kept: Sequence[int], compute: Compute, data: Any, estimator: str) -> Any:
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


def _trained(data: Any, rows: Rows, out: Iterable[int]) -> Iterator[Trained]:
    """What became of the samples that reward managers have judged. The rows of a session are one sample."""
    mask = data.batch["response_mask"]
    sums = (data.batch["advantages"] * mask).sum(-1).tolist()
    tokens, rewards = mask.sum(-1).tolist(), data.batch["token_level_rewards"].sum(-1).tolist()
    of_session: dict[str, list[int]] = {}
    for row, session in enumerate(rows.sessions):
        of_session.setdefault(session, []).append(row)
    for row in rows.judged:
        sample, every = rows.infos[row].get(SAMPLE), of_session[rows.sessions[row]]
        if sample and not rows.is_padding(row):
            count = sum(tokens[each] for each in every)
            advantage = sum(sums[each] for each in every) / count if count else None
            yield Trained(str(sample), rows.uids[row], None, rewards[row], advantage, row in out)


def _give_rewards(part: Any, infos: Sequence[Mapping[str, Any]], names: Iterable[str]) -> None:
    """Give rows what `gdpo` reads (trainer/ppo/core_algos.py: `compute_gdpo_outcome_advantage`) and V1 does not pass:
    the single rewards, and where responses end. It adds up the tokens of a row, so any end will do. Nothing else reads
    these columns. Raises `InputError` for a row without a reward, such as one that an agent loop has rewarded itself.
    """
    mask = part.batch["response_mask"]
    part.batch["prompts"], part.batch["attention_mask"] = mask[:, :0], mask * 0 + 1
    for name in names:
        if any(name not in info for info in infos):
            raise InputError(f"algorithm.gdpo_reward_keys: a sample has no {name!r}, which its reward manager tells")
        part.non_tensor_batch[name] = np.array([float(info[name]) for info in infos])


def _lone(rows: Rows, out: set[int]) -> set[int]:
    """The rows of groups that lost samples, and have only one left."""
    left: dict[str, set[str]] = {rows.uids[row]: set() for row in out}
    for row, uid in enumerate(rows.uids):
        if uid in left and row not in out:
            left[uid].add(rows.sessions[row])
    return {row for row, uid in enumerate(rows.uids) if uid in left and len(left[uid]) < 2}


def _estimator(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    chosen = kwargs.get("adv_estimator", args[0] if args else "")
    return str(getattr(chosen, "value", chosen))
