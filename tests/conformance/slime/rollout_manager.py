"""slime's rollout manager without Ray, and the job around it: arguments, tokenizer, tracking.

`Manager` is slime's own class. It leaves out what needs a cluster: the actors that `__init__` starts, and packing the
train data for the ranks of a trainer.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from slime.ray import rollout as slime_rollout
from slime.utils import async_utils, http_utils
from slime.utils.arguments import parse_args
from slime.utils.misc import SingletonMeta, load_function

from ..judges import WORDS

_RolloutManager = slime_rollout.RolloutManager.__ray_metadata__.modified_class


def make_tokenizer(folder: Path) -> Path:
    """Write a tokenizer with one token a word to `folder`, and return it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(folder)
    return folder


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
