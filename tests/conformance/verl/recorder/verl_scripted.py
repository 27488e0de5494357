"""An agent loop of verl that writes what the script says, and a record of every row that the trainer trains, one JSON a
line in the file that VERL_RECORD names. If VERL_PHASES names a file, notes are made there when the trainer uses its
devices; the servers of the judges note there when they sleep and wake up, so the order of the lines is that of events.

verl imports this in each of its processes (`VERL_USE_EXTERNAL_MODULES`). Only the model is played: the prompts, rewards
and batches are verl's. The trainer's process is the one that starts a tracker.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections import Counter
from importlib.metadata import version

import verl_script
from torch.distributed.fsdp import CPUOffloadPolicy
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
    register,
)
from verl.utils.tracking import Tracking
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

_SEEN: Counter = Counter()
_COLUMNS = ("responses", "response_mask", "token_level_scores", "token_level_rewards", "advantages", "returns")


_offload = CPUOffloadPolicy.__init__


if version("verl") == "0.9.0":
    # Its padding needs flash-attn, which needs an accelerator. Its functions for NPUs do the same in plain torch.
    from verl.utils import attention_utils, npu_flash_attn_utils

    attention_utils._get_attention_functions = lambda: (
        npu_flash_attn_utils.index_first_axis,
        npu_flash_attn_utils.pad_input,
        npu_flash_attn_utils.rearrange,
        npu_flash_attn_utils.unpad_input,
    )


@functools.wraps(_offload)
def _without_pinning(self, pin_memory=True):
    # verl pins the memory of a reference policy, which needs an accelerator.
    _offload(self, pin_memory=False)


CPUOffloadPolicy.__init__ = _without_pinning


@register("scripted")
class ScriptedAgentLoop(AgentLoopBase):
    """Writes the script's outputs, in the tokens of verl's tokenizer."""

    async def run(self, sampling_params, **kwargs):
        info = kwargs["extra_info"]
        number = kwargs.get("session_id")
        if number is None:  # the legacy trainer: a batch comes in order
            number = _SEEN[kwargs["uid"]]
            _SEEN[kwargs["uid"]] += 1
        several = "session_id" in kwargs
        told = verl_script.outputs(os.environ["VERL_SCRIPT"], info, int(number), several=several)
        messages = list(kwargs["raw_prompt"])
        prompt_ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        outputs = [self._output(prompt_ids, parts, info["index"], kwargs.get("global_steps", 0)) for parts in told]
        return outputs if several else outputs[0]

    def _output(self, prompt_ids, parts, index, step):
        ids, mask = [], []
        for place, part in enumerate(parts):
            tokens = list(self.tokenizer(part)["input_ids"])
            if place == len(parts) - 1:
                tokens.append(self.tokenizer.eos_token_id)
            ids += tokens
            mask += [1 - place % 2] * len(tokens)
        steps = dict.fromkeys(("global_steps", "min_global_steps", "max_global_steps"), int(step))
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=ids,
            response_mask=mask,
            response_logprobs=[-0.25 * (place % 3 + index % 2) for place in range(len(ids))],
            num_turns=2 if len(parts) == 1 else len(parts) + 1,
            metrics=AgentLoopMetrics(),
            extra_fields={"turn_scores": [], "tool_rewards": [], **steps},
        )


class Idle(RolloutReplica):
    """A reward model that shares the GPUs with the rollout, and that no judge asks: it stands nowhere."""

    async def init_colocated(self, resource_pool):
        await self.launch_servers()

    async def launch_servers(self):
        self._server_address = "127.0.0.1:9"

    async def sleep(self):
        pass

    async def wake_up(self):
        pass


RolloutReplicaRegistry.register("idle", lambda: Idle)


def _write(step, uids, infos, data, lengths):
    with open(os.environ["VERL_RECORD"], "a") as file:
        for row, uid in enumerate(uids):
            length = int(lengths[row])
            columns = {name: values[row][:length].tolist() for name, values in data.items()}
            record = {"step": step, "uid": str(uid), "info": infos[row], **columns}
            file.write(json.dumps(record, default=lambda value: value.item()) + "\n")


def _recording_v1(compute):
    @functools.wraps(compute)
    def recorded(self, batch, metrics):
        import transfer_queue

        result = compute(self, batch, metrics)
        keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")]
        fields = ["uid", "rm_scores", "extra_fields", *_COLUMNS]
        data = transfer_queue.kv_batch_get(keys=keys, partition_id="train", select_fields=fields)
        infos = [extra["reward_extra_info"] for extra in data.pop("extra_fields").tolist()]
        uids = data.pop("uid").tolist()
        tensors = {name: list(data[name].unbind()) for name in data.keys()}  # noqa: SIM118 (a TensorDict)
        tensors["token_level_scores"] = tensors.pop("rm_scores")
        tensors.setdefault("token_level_rewards", tensors["token_level_scores"])
        _write(self.global_steps, uids, infos, tensors, [len(each) for each in tensors["responses"]])
        return result

    return recorded


def _recording_legacy(update):
    @functools.wraps(update)
    def recorded(self, batch):
        columns = batch.non_tensor_batch
        keys = batch.meta_info.get("reward_extra_keys") or [name for name in columns if name.startswith("qreward/")]
        infos = [{key: columns[key][row] for key in keys} for row in range(len(batch))]
        tensors = {name: batch.batch[name] for name in _COLUMNS if name in batch.batch}
        lengths = batch.batch["attention_mask"][:, batch.batch["prompts"].shape[1] :].sum(-1)
        _write(self.global_steps, columns["uid"].tolist(), infos, tensors, lengths)
        return update(self, batch)

    return recorded


def _noting(use):
    @functools.wraps(use)
    def noted(*args, **kwargs):
        with open(os.environ["VERL_PHASES"], "a") as file:
            file.write(f"trainer /{use.__name__}\n")
        return use(*args, **kwargs)

    return noted


def _record():
    v1 = ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer")
    legacy = ("verl.trainer.ppo.ray_trainer", "RayPPOTrainer")
    wrappers = [(*v1, "_compute_advantage", _recording_v1), (*legacy, "_update_actor", _recording_legacy)]
    if "VERL_PHASES" in os.environ:
        uses = ("_compute_old_log_prob", "_update_actor")
        wrappers = [(*trainer, use, _noting) for trainer in (v1, legacy) for use in uses]
    for module, name, method, recording in wrappers:
        # Ray gives each class of actors inherited methods of its own, so wrapping the base class does not reach those.
        classes = [each] if (each := getattr(sys.modules.get(module), name, None)) else []
        while classes:
            cls = classes.pop()
            classes += type.__subclasses__(cls)
            if method in vars(cls):
                setattr(cls, method, recording(vars(cls)[method]))


_start = Tracking.__init__


@functools.wraps(_start)
def _start_and_record(self, *args, **kwargs):
    _start(self, *args, **kwargs)
    _record()


Tracking.__init__ = _start_and_record
