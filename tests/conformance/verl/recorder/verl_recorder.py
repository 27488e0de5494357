"""Writes down every sample that a real verl trainer trains, one JSON a line in the file that VERL_RECORD names.

verl imports this in each of its processes (`VERL_USE_EXTERNAL_MODULES`), before it loads plugins. The trainer's process
is the one that starts a tracker, and only then are the trainer's modules there to be looked into.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import os
import sys
from collections import Counter

import numpy as np
from verl.utils.tracking import Tracking

_STEP = [0]


def _write(rows):
    with open(os.environ["VERL_RECORD"], "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def _rows(uids, infos, data, raw):
    import torch

    scores = data["scores"].sum(-1) if data["scores"].dim() > 1 else data["scores"]
    _STEP[0] += 1
    for row, (uid, info) in enumerate(zip(uids, infos, strict=True)):
        mask = data["mask"][row].bool()
        yield {
            "step": _STEP[0],
            "uid": str(uid),
            "score": float(scores[row]),
            "advantages": torch.masked_select(data["advantages"][row], mask).tolist(),
            "raw": torch.masked_select(raw[row], mask).tolist(),
            **{key.removeprefix("qreward/"): info[key] for key in info if key.startswith("qreward/")},
        }


_raw = {}


def _keeping_raw(compute):
    """Note what verl's own function makes of the batch without the failed rows, and without those that are left alone
    of their group; whoever has wrapped it by now.
    """

    @functools.wraps(compute)
    def kept(data, *args, **kwargs):
        missing = _missing(data, kwargs.get("batch_keys", args[0] if args else None))
        whole = copy.deepcopy(data)
        uids = list(data.non_tensor_batch["uid"])
        left = Counter(uid for uid, is_missing in zip(uids, missing, strict=True) if not is_missing)
        lone = {uid for uid in _lost(uids, missing) if left[uid] < 2}
        rows = [row for row, uid in enumerate(uids) if not missing[row] and uid not in lone]
        whole.batch["advantages"] = whole.batch["token_level_rewards"] * 0.0
        if rows:
            keys = [[args[0][row] for row in rows]] if args else []
            part = inspect.unwrap(compute)(whole.select_idxs(np.array(rows)), *keys, *args[1:], **_keys(kwargs, rows))
            whole.batch["advantages"][rows] = part.batch["advantages"]
        _raw["advantages"] = whole.batch["advantages"]
        return compute(data, *args, **kwargs)

    return kept


def _lost(uids, missing):
    return {uid for uid, is_missing in zip(uids, missing, strict=True) if is_missing}


def _keys(kwargs, rows):
    if "batch_keys" not in kwargs:
        return kwargs
    return {**kwargs, "batch_keys": [kwargs["batch_keys"][row] for row in rows]}


def _missing(data, keys):
    if "qreward/missing" in data.non_tensor_batch:
        return [bool(value) for value in data.non_tensor_batch["qreward/missing"]]
    import transfer_queue

    fields = transfer_queue.kv_batch_get(keys=list(keys), partition_id="train", select_fields=["extra_fields"])
    rows = [getattr(extra, "data", extra) for extra in list(fields["extra_fields"])]
    return [bool(extra["reward_extra_info"]["qreward/missing"]) for extra in rows]


def _recording_v1(compute):
    @functools.wraps(compute)
    def recorded(self, batch, metrics):
        import torch
        import transfer_queue

        keys = list(batch.keys)
        result = compute(self, batch, metrics)
        fields = ["uid", "response_mask", "rm_scores", "advantages", "extra_fields"]
        data = transfer_queue.kv_batch_get(keys=keys, partition_id="train", select_fields=fields)
        infos = [extra["reward_extra_info"] for extra in data.pop("extra_fields").tolist()]
        uids = data.pop("uid").tolist()
        padded = {name: data[name].to_padded_tensor(0.0) for name in ("rm_scores", "advantages")}
        mask = data["response_mask"].to_padded_tensor(0)
        table = {"scores": padded["rm_scores"], "advantages": padded["advantages"], "mask": mask}
        _write(_rows(uids, infos, table, _raw["advantages"][:, : mask.shape[1]].to(torch.float32)))
        return result

    return recorded


def _recording_legacy(update):
    @functools.wraps(update)
    def recorded(self, batch):
        columns = batch.non_tensor_batch
        names = [name for name in columns if name.startswith("qreward/")]
        infos = [
            {
                name: getattr(columns[name][row], "item", lambda row=row, name=name: columns[name][row])()
                for name in names
            }
            for row in range(len(batch))
        ]
        table = {
            "scores": batch.batch["token_level_scores"],
            "advantages": batch.batch["advantages"],
            "mask": batch.batch["response_mask"],
        }
        _write(_rows(columns["uid"].tolist(), infos, table, _raw["advantages"]))
        return update(self, batch)

    return recorded


def _look_into(module, owner, name, wrapper):
    holder = sys.modules.get(module)
    holder = getattr(holder, owner, None) if owner else holder
    if holder is None:
        return
    # Ray gives each class of actors inherited methods of its own, so wrapping the base class does not reach those.
    derived = type.__subclasses__(holder) if isinstance(holder, type) else []
    while derived:
        cls = derived.pop()
        derived += type.__subclasses__(cls)
        if name in vars(cls):
            setattr(cls, name, wrapper(vars(cls)[name]))
    setattr(holder, name, wrapper(getattr(holder, name)))


def _record():
    legacy, v1 = "verl.trainer.ppo.ray_trainer", "verl.trainer.ppo.v1.trainer_base"
    for module in (legacy, "verl.experimental.separation.ray_trainer"):
        _look_into(module, "", "compute_advantage", _keeping_raw)
    _look_into(v1, "", "compute_advantage_for_multi_trajectories", _keeping_raw)
    _look_into(v1, "PPOTrainer", "_compute_advantage", _recording_v1)
    _look_into(legacy, "RayPPOTrainer", "_update_actor", _recording_legacy)


_start = Tracking.__init__


@functools.wraps(_start)
def _start_and_record(self, *args, **kwargs):
    _start(self, *args, **kwargs)
    _record()


Tracking.__init__ = _start_and_record
