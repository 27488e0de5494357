"""A rollout server on the CPU: a Hugging Face model behind verl's token-in, token-out contract.

It has two halves, as verl's own rollouts do (verl/workers/rollout): a server actor that generates in micro-batches, and
an adapter in the training worker that sends it the new weights after every step.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ray
import torch
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

NAME = "cpu_hf"
"""The value of `actor_rollout_ref.rollout.name` that selects this rollout."""

_GATHER_S = 0.02
"""Seconds that a request waits for others to share its micro-batch."""


@dataclass
class _Pending:
    prompt: list[int]
    sampling: dict[str, Any]
    future: asyncio.Future[TokenOutput]


class Server:
    """A Ray actor that generates. Generation and weight updates take turns on one thread."""

    def __init__(self, model_path: str, batch_size: int, response_length: int, seed: int) -> None:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(seed)
        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        # From the model, since its folder need not hold the tokenizer (`actor_rollout_ref.model.tokenizer_path`).
        self._end: int = self._model.config.eos_token_id
        self._padding: int = self._model.config.pad_token_id
        self._batch_size, self._response_length = batch_size, response_length
        self._step = self._weight_version = 0
        self._pending: list[_Pending] = []
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._worker: asyncio.Task[None] | None = None

    async def generate(
        self, request_id: str, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], **_: Any
    ) -> TokenOutput:
        """Continue one prompt."""
        future: asyncio.Future[TokenOutput] = asyncio.get_running_loop().create_future()
        self._pending.append(_Pending(list(prompt_ids), dict(sampling_params), future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._serve())
        return await future

    async def update_weights(self, state: Mapping[str, torch.Tensor], global_steps: int | None = None) -> None:
        """Load the trainer's weights. Raises KeyError if they do not fit this model."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._load, state)
        self._weight_version += 1
        if global_steps is not None:
            self._step = global_steps

    async def set_global_steps(self, global_steps: int) -> None:
        self._step = global_steps

    async def ready(self, *_: Any, **__: Any) -> None:
        """Do nothing for the control calls of verl's replicas: there is no memory to release and no cache to keep."""

    wake_up = sleep = abort_all_requests = resume_generation = clear_kv_cache = ready
    release_kv_cache = resume_kv_cache = start_profile = stop_profile = ready

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while self._pending:
            await asyncio.sleep(_GATHER_S)
            batch, self._pending = self._pending[: self._batch_size], self._pending[self._batch_size :]
            alike: dict[str, list[_Pending]] = defaultdict(list)
            for pending in batch:
                alike[repr(sorted(pending.sampling.items()))].append(pending)
            for group in alike.values():
                prompts = [pending.prompt for pending in group]
                try:
                    outputs = await loop.run_in_executor(self._thread, self._generate, prompts, group[0].sampling)
                except Exception as error:
                    outputs = [error] * len(group)
                for pending, output in zip(group, outputs, strict=True):
                    if pending.future.done():
                        continue
                    if isinstance(output, Exception):
                        pending.future.set_exception(output)
                    else:
                        pending.future.set_result(output)

    @torch.no_grad()
    def _generate(self, prompts: list[list[int]], sampling: Mapping[str, Any]) -> list[TokenOutput]:
        longest = int(sampling.get("max_tokens") or sampling.get("max_new_tokens") or self._response_length)
        temperature = float(sampling.get("temperature", 1.0))
        width = max(map(len, prompts))
        ids = torch.tensor([[self._padding] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        tokens: list[list[int]] = [[] for _ in prompts]
        log_probs: list[list[float]] = [[] for _ in prompts]
        alive = [True] * len(prompts)
        cache = None
        for _ in range(longest):
            out = self._model(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            )
            cache = out.past_key_values
            chances = (out.logits[:, -1].float() / (temperature or 1.0)).log_softmax(-1)
            drawn = chances.argmax(-1) if temperature <= 0 else torch.multinomial(chances.exp(), 1).squeeze(1)
            for row, token in enumerate(drawn.tolist()):
                if alive[row]:
                    tokens[row].append(token)
                    log_probs[row].append(float(chances[row, token]))
                    alive[row] = token != self._end
            if not any(alive):
                break
            ids = drawn[:, None]
            mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
            positions = positions[:, -1:] + 1
        fields = {"global_steps": self._step, "weight_version": self._weight_version}
        return [
            TokenOutput(
                token_ids=row,
                log_probs=chances if sampling.get("logprobs") else None,
                stop_reason="completed",
                extra_fields=dict(fields),
            )
            for row, chances in zip(tokens, log_probs, strict=True)
        ]

    def _load(self, state: Mapping[str, torch.Tensor]) -> None:
        result = self._model.load_state_dict(dict(state), strict=False)
        missing = [name for name in result.missing_keys if not name.startswith("lm_head")]
        if result.unexpected_keys or missing:
            raise KeyError(f"weights do not fit the rollout model: {result.unexpected_keys[:3]}, missing {missing[:3]}")


class Adapter(base.BaseRollout):  # type: ignore[misc]
    """The training worker's half: sends the weights to the server of its replica."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1, **_: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        rank = int(os.environ["RANK"])
        ranks_of_a_replica = self.config.tensor_model_parallel_size * self.config.data_parallel_size
        self._replica_rank = rank // ranks_of_a_replica if replica_rank == -1 else replica_rank
        self._leads = rank % ranks_of_a_replica == 0
        self._server: Any = None

    async def resume(self, tags: Any) -> None:
        pass

    async def release(self) -> None:
        pass

    @torch.no_grad()
    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        **_: Any,
    ) -> None:
        if wire_format != "named_tensors":
            raise ValueError(f"the CPU rollout takes named tensors, not {wire_format}")
        # Every rank reads the whole iterator: collecting a sharded tensor is a collective operation.
        state = {name: tensor.detach().to("cpu", torch.float32, copy=True) for name, tensor in weights}
        # Without weights, a checkpoint engine has sent them to the server.
        if not self._leads or not state:
            return
        if self._server is None:
            self._server = ray.get_actor(f"{NAME}_server_{self._replica_rank}")
        await self._server.update_weights.remote(state, global_steps)


class Replica(RolloutReplica):  # type: ignore[misc]
    """verl's view of one server."""

    async def launch_servers(self) -> None:
        path = self.model_config["path"] if isinstance(self.model_config, Mapping) else self.model_config.path
        name = f"{NAME}_server_{self.replica_rank}{self.name_suffix}"
        server = (
            ray.remote(Server)
            .options(name=name, num_cpus=0, max_concurrency=self.max_concurrency)
            .remote(
                model_path=path,
                batch_size=int(self.config.max_num_seqs),
                response_length=int(self.config.response_length),
                seed=int(getattr(self.config, "seed", 0) or 0) + self.replica_rank,
            )
        )
        await server.ready.remote()
        self.servers, self._server_handle, self._server_address = [server], server, f"{name}:0"

    def rollout_worker_use_gpu(self) -> bool:
        return False


def install() -> None:
    """Register the rollout under `NAME`."""
    RolloutReplicaRegistry.register(NAME, lambda: Replica)
    base._ROLLOUT_REGISTRY[(NAME, "async")] = f"{__name__}.Adapter"
