"""verl's legacy trainer (trainer/ppo/ray_trainer.py): a whole batch is generated and scored; one error ends the run.

The experimental trainers are made of it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .base import Setup, TrainerBase
from .metrics import named
from .protocol import TensorColumns, VerlDataProto
from .results import VerlStep

MODULE = "verl.trainer.ppo.ray_trainer"


class LegacyTrainer(TrainerBase):
    """`RayPPOTrainer`."""

    advantages_of = MODULE
    """The module by whose name advantages are computed: the experimental trainers have one of their own."""

    def __init__(self, config: Any, setup: Setup, queue: Any = None) -> None:
        super().__init__(config, setup)

    def step(self) -> VerlStep:
        """One step of the training loop."""
        self.global_steps += 1
        calls = self.agent_loops.reward_calls
        batch = _from_columns(self._next_columns())
        batch.non_tensor_batch["uid"] = np.array([self._new_uid() for _ in range(len(batch))], dtype=object)
        count = int(self.config.actor_rollout_ref.rollout.n)
        wanted = VerlDataProto(None, dict(batch.non_tensor_batch), {"global_steps": self.global_steps})
        prompts = wanted.repeat(count)
        if self._estimator == "remax":
            prompts.non_tensor_batch["__do_sample__"] = np.ones(len(prompts), dtype=bool)
            greedy = wanted.slice(0, None)
            greedy.non_tensor_batch["__do_sample__"] = np.zeros(len(greedy), dtype=bool)
            asked = VerlDataProto.concat([prompts, greedy])
        else:
            asked = prompts
        output = self.setup.run(self.agent_loops.generate_sequences(asked))
        self.checkpoint_manager.sleep_replicas()
        sampled = output.slice(0, len(prompts))
        if self._estimator == "remax":
            baseline = self._scored(output.slice(len(prompts), None))
            batch.batch["reward_baselines"] = np.asarray(_scores_of(baseline)).sum(axis=-1)
        batch = self._rewarded(self._scored(batch.repeat(count).union(sampled)), validates=False)
        batch, metrics = self._trained(batch)
        self.checkpoint_manager.update_weights(self.global_steps)
        return self._step_of(batch, self._log(metrics), calls)

    def _trained(self, batch: VerlDataProto) -> tuple[VerlDataProto, dict[str, Any]]:
        """The batch with all that is computed before it trains, and its metrics."""
        batch.batch["token_level_scores"] = _scores_of(batch)
        batch = self._advance(batch, sys.modules[self.advantages_of].compute_advantage)
        return batch, self._metrics(batch)

    def _step_of(self, batch: VerlDataProto, logged: dict[str, Any], calls: int) -> VerlStep:
        """The step that trains `batch`. `logged`: what the tracker got; `calls`: the reward calls before it."""
        keys = batch.meta_info.get("reward_extra_keys", [])
        uids = [str(uid) for uid in batch.non_tensor_batch["uid"]]
        return VerlStep(
            global_step=self.global_steps,
            batch=batch,
            responses=[self._text(ids) for ids in batch.batch["responses"]],
            uids=uids,
            sessions=[uids[:row].count(uid) for row, uid in enumerate(uids)],
            extra_info=[{key: batch.non_tensor_batch[key][row] for key in keys} for row in range(len(batch))],
            metrics=logged,
            reward_calls=self.agent_loops.reward_calls - calls,
            padding=[False] * len(batch),
        )

    def _validate(self) -> dict[str, Any]:
        sources: list[str] = []
        uids: list[str] = []
        texts: list[str] = []
        turns: list[Any] = []
        infos: dict[str, list[Any]] = {"reward": []}
        rollout = self.config.actor_rollout_ref.rollout
        for columns in self.val_dataloader:
            batch = _from_columns(columns)
            batch.non_tensor_batch["uid"] = np.array([self._new_uid() for _ in range(len(batch))], dtype=object)
            batch = batch.repeat(int(rollout.val_kwargs.n))
            meta = {"validate": True, "global_steps": self.global_steps}
            # Looked up by its name in verl, because hooks may have wrapped it there.
            asked, missing = sys.modules[MODULE].pad_dataproto_to_divisor(
                VerlDataProto(None, dict(batch.non_tensor_batch), meta), rollout.agent.num_workers
            )
            output = self._scored_apart(self.setup.run(self.agent_loops.generate_sequences(asked)))
            output = output.slice(0, len(asked) - missing)
            texts += [self._text(ids) for ids in output.batch["responses"]]
            batch = self._rewarded(batch.union(output), validates=True)
            uids += list(batch.non_tensor_batch["uid"])
            scores = [float(value) for value in np.asarray(_scores_of(batch)).sum(axis=-1)]
            infos["reward"] += scores
            for key in batch.meta_info.get("reward_extra_keys", []):
                infos.setdefault(key, []).extend(batch.non_tensor_batch[key].tolist())
            turns += list(batch.non_tensor_batch["__num_turns__"])
            sources += list(batch.non_tensor_batch["data_source"])
        for key, values in infos.items():
            assert len(values) in (0, len(uids)), f"{key}: len(lst)={len(values)}, len(sample_scores)={len(uids)}"
        self._seen = {"responses": texts, "scores": infos["reward"], "uids": uids, "extra_info": infos}
        return self._val_metrics_update(sources, uids, infos, turns)

    def _val_metrics_update(
        self,
        data_sources: Sequence[str],
        sample_uids: Sequence[str],
        reward_extra_infos_dict: Mapping[str, Sequence[Any]],
        sample_turns: Sequence[Any],
    ) -> dict[str, Any]:
        process = sys.modules[MODULE].process_validation_metrics
        return named(process(data_sources, sample_uids, reward_extra_infos_dict), sample_turns)

    def _scored(self, batch: VerlDataProto) -> VerlDataProto:
        """With the scores of a colocated reward model, if there is one."""
        if self.use_rm and "rm_scores" not in batch.batch:
            return batch.union(self.reward_loop_manager.compute_rm_score(batch))
        return batch

    def _scored_apart(self, batch: VerlDataProto) -> VerlDataProto:
        """`_scored` in a validation, for which the inference engines make room."""
        if not self.use_rm or "rm_scores" in batch.batch:
            return batch
        self.checkpoint_manager.sleep_replicas()
        batch = self._scored(batch)
        self.checkpoint_manager.update_weights(self.global_steps)
        return batch

    def _rewarded(self, batch: VerlDataProto, *, validates: bool) -> VerlDataProto:
        """With its scores, where a whole batch is scored in the trainer's process."""
        return batch

    def _metrics(self, batch: VerlDataProto) -> dict[str, Any]:
        wide = batch.batch["prompts"].shape[1]
        attention = np.asarray(batch.batch["attention_mask"])
        return {
            "training/global_step": self.global_steps,
            "training/epoch": (self.global_steps - 1) // max(len(self.train_dataloader), 1),
            **self._data_metrics(batch, attention[:, :wide].sum(axis=1), attention[:, wide:].sum(axis=1)),
        }


def _from_columns(columns: Mapping[str, Any]) -> VerlDataProto:
    tensors = {name: values for name, values in columns.items() if name == "dummy_tensor"}
    rest = {name: values for name, values in columns.items() if name not in tensors}
    return VerlDataProto(TensorColumns(tensors), rest)


def _scores_of(batch: VerlDataProto) -> Any:
    if "rm_scores" not in batch.batch:
        raise KeyError(f'key "rm_scores" not found in TensorDict with keys {sorted(batch.batch)}')
    return batch.batch["rm_scores"]
