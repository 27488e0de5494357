"""The process in which slime plays: it reads one JSON request a line, and answers each with one JSON line.

slime's state (its event loop, its HTTP client, its singletons) is made anew for each scenario, as a new job would have
it. All else is slime's: the arguments, the data source, the rollout, and `generate` and `eval` of its rollout manager
without Ray: `Manager` leaves out the actors that `__init__` starts, and packing the train data for the ranks of a
trainer.

    python -m conformance.slime.player FOLDER   (with the stubs, slime and this project on PYTHONPATH)
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import inspect
import logging
import os
import sys
import tempfile
import threading
import warnings
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed
from slime.ray import rollout as slime_rollout
from slime.utils import async_utils, http_utils
from slime.utils.arguments import parse_args
from slime.utils.misc import SingletonMeta, load_function

import slime_adapter

from ..judges import make_tokenizer
from ..processes import serve
from .trainers import describe

_RolloutManager = slime_rollout.RolloutManager.__ray_metadata__.modified_class


class Ears:
    """Hears what Python and the adapter say beside the protocol."""

    def __init__(self) -> None:
        self.complaints: list[str] = []
        self.said: list[str] = []
        self._listen("asyncio", logging.ERROR, self.complaints)
        self._listen("slime_adapter", logging.WARNING, self.said)
        sys.unraisablehook = lambda raised: self.complaints.append(f"unraisable: {raised.exc_value!r}")
        threading.excepthook = lambda raised: self.complaints.append(f"thread: {raised.exc_value!r}")
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", category=ResourceWarning)
        warnings.filterwarnings("always", message="coroutine .* was never awaited")
        warnings.showwarning = lambda message, *_, **__: self.complaints.append(f"warning: {message}")

    @staticmethod
    def _listen(name: str, level: int, texts: list[str]) -> None:
        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                texts.append(record.getMessage() + (f": {record.exc_info[1]!r}" if record.exc_info else ""))

        logging.getLogger(name).addHandler(Handler(level))

    def take(self) -> dict[str, list[str]]:
        gc.collect()
        heard = {"complaints": list(self.complaints), "said": list(self.said)}
        self.complaints.clear()
        self.said.clear()
        return heard


def make_args(flags: list[str]) -> Namespace:
    """What slime's own parser makes of `flags`, checks included."""
    with mock.patch.object(sys, "argv", ["train.py", *flags]):
        args = parse_args()
    # Set by slime once its servers run; there is one, and the tests have started it.
    args.rollout_num_engines = 1
    # Given so that the parser asks for no trainer; without it the manager goes on to the train data.
    args.debug_rollout_only = False
    if "--colocate" in flags:
        # What slime resolves it to where there is a trainer.
        args.colocate = args.offload_train = args.offload_rollout = True
    return args


@contextmanager
def tracking() -> Iterator[dict[str, Any]]:
    """Collect what slime sends to its trackers."""
    metrics: dict[str, Any] = {}

    def log(args: Namespace, values: dict[str, Any], step_key: str) -> None:
        metrics.update(values)

    with mock.patch.object(slime_rollout.logging_utils, "log", log):
        yield metrics


class Manager(_RolloutManager):
    """slime's rollout manager in this process. `samples` are the latest step's, `evaluated` the latest evaluation."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.servers: dict[str, Any] = {}
        self.rollout_id = -1
        self._health_monitors: list[Any] = []
        self.samples: list[Any] = []
        self.evaluated: dict[str, Any] = {}
        # What a new process would have.
        SingletonMeta.clear_instances(SingletonMeta)
        http_utils._http_client = None
        http_utils.init_http_client(args)
        _close_client_with_worker(args)
        self.data_source = load_function(args.data_source_path)(args)
        self.generate_rollout = load_function(args.rollout_function_path)
        self._eval_generate_rollout = load_function(args.eval_function_path)
        self.custom_convert_samples_to_train_data_func = None
        self.custom_reward_post_process_func = None
        if args.custom_reward_post_process_path is not None:
            self.custom_reward_post_process_func = load_function(args.custom_reward_post_process_path)

    def eval_generate_rollout(self, *arguments: Any, **keywords: Any) -> Any:
        output = self._eval_generate_rollout(*arguments, **keywords)
        # The log hook takes failed samples out of the data in place.
        self.evaluated = {name: dict(told) for name, told in output.data.items()}
        return output

    def default_rewards(self) -> list[float] | None:
        """What slime's own normalisation makes of the latest step's rewards; None where it has none of its own."""
        # With REINFORCE++ a failed sample keeps a token, so it is not removed.
        if any(sample.remove_sample or sample.metadata.get("qreward", {}).get("excluded") for sample in self.samples):
            return None
        with mock.patch.object(self, "custom_reward_post_process_func", None):
            return self._post_process_rewards(self.samples)[1]

    def close(self) -> None:
        fully_async = sys.modules.get("slime.rollout.fully_async_rollout")
        if fully_async is not None:
            fully_async._stop_global_worker()
        asyncio.run_coroutine_threadsafe(_leave(), async_utils.get_async_loop().loop).result()
        importlib.import_module("slime.rollout.sglang_rollout").EVAL_PROMPT_DATASET.clear()

    def _convert_samples_to_train_data(self, samples: list[Any]) -> dict[str, Any]:
        self.samples = samples
        return super()._convert_samples_to_train_data(samples)

    def _split_train_data_by_dp(self, data: dict[str, Any]) -> dict[str, Any]:
        return data


def _close_client_with_worker(args: Namespace) -> None:
    """Have fully-async rollout close slime's HTTP client on the loop that used it, which ends with its worker."""
    if "fully_async" not in args.rollout_function_path:
        return
    worker = importlib.import_module("slime.rollout.fully_async_rollout").AsyncRolloutWorker
    loop = getattr(worker, "_original_loop", worker._loop)

    async def run(self: Any) -> None:
        await loop(self)
        await _close_client()

    worker._original_loop, worker._loop = loop, run


async def _leave() -> None:
    """Close what a job leaves open on slime's loop, as its end would."""
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await _close_client()


async def _close_client() -> None:
    if http_utils._http_client is not None:
        await http_utils._http_client.aclose()
        http_utils._http_client = None


class Player:
    """One scenario after the other. Every method is a request; its result is JSON-able."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = make_tokenizer(folder / "tokenizer")
        self.manager: Any = None

    def open(self, flags: list[str]) -> None:
        self.manager = Manager(make_args([*flags, "--hf-checkpoint", str(self.tokenizer)]))

    def step(self, rollout_id: int) -> dict[str, Any]:
        """A training step: what slime would hand to the trainer."""
        manager = self.manager
        with tracking() as metrics:
            data = manager.generate(rollout_id)
        return {
            "samples": [describe(sample) for sample in manager.samples],
            "train": {key: data[key] for key in ("rewards", "raw_reward", "loss_masks")},
            "default": manager.default_rewards(),
            "advantages": token_advantages(self.manager.args, data),
            "metrics": metrics,
            "left": left_on_loop(),
        }

    def buffered(self) -> list[dict[str, Any]]:
        """The samples of aborted groups, which slime trains in a later step."""
        return [describe(sample) for group in self.manager.data_source.buffer for sample in group]

    def eval(self, rollout_id: int) -> dict[str, Any]:
        manager = self.manager
        with tracking() as metrics:
            manager.eval(rollout_id)
        samples = [describe(sample) for sample in manager.evaluated["sums"]["samples"]]
        return {"samples": samples, "metrics": metrics, "left": left_on_loop()}

    def parameters(self, path: str) -> list[str]:
        """Names of the parameters of a function that slime would load."""
        return list(inspect.signature(load_function(path)).parameters)

    def close(self) -> dict[str, Any]:
        """End the job: what is left of it then is a leak."""
        if self.manager is not None:
            self.manager.close()
            self.manager = None
        slime_adapter.close()
        threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
        return {"threads": threads}


def token_advantages(args: Namespace, data: Mapping[str, Any]) -> list[list[float]]:
    """What slime's trainer makes of a step's train data, on one rank: for each sample one number a token. The model is
    taken to be worth nothing, as by `FakeSlimeTrainer`: log-probabilities and the critic's values are zero. Raises what
    ends slime's training.
    """
    from slime.backends.megatron_utils.loss import compute_advantages_and_returns

    if not torch.distributed.is_initialized():
        store = torch.distributed.FileStore(str(Path(tempfile.mkdtemp()) / "store"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    zeros = [torch.zeros(length) for length in data["response_lengths"]]
    batch: dict[str, Any] = {
        "rewards": data["rewards"],
        "response_lengths": data["response_lengths"],
        "total_lengths": [len(tokens) for tokens in data["tokens"]],
        "loss_masks": [torch.tensor(mask, dtype=torch.int) for mask in data["loss_masks"]],
        "log_probs": zeros,
        "values": [zero.clone() for zero in zeros],
    }
    compute_advantages_and_returns(args, batch)
    return [advantages.tolist() for advantages in batch["advantages"]]


def left_on_loop() -> list[str]:
    """Tasks that still run on slime's event loop between two steps."""
    loop = async_utils.get_async_loop().loop

    async def look() -> list[str]:
        return [repr(task) for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    return asyncio.run_coroutine_threadsafe(look(), loop).result()


def main() -> None:
    # The protocol keeps the pipe for itself: whatever is printed goes to the log.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    ears, player = Ears(), Player(Path(sys.argv[1]))
    # What was imported stays: looking through it after every request would take longer than most requests.
    gc.freeze()
    serve(player, replies, ears.take)
    # Ray and torch leave threads that would hold the exit up; nothing is left to be written.
    os._exit(0)


if __name__ == "__main__":
    main()
