"""SGLang as far as slime imports it, each of its modules this one: nothing of it runs without a GPU."""

from __future__ import annotations

import argparse
import sys

for _name in ("srt", "srt.constants", "srt.server_args", "srt.utils"):
    sys.modules[f"sglang.{_name}"] = sys.modules[__name__]

GPU_MEMORY_TYPE_CUDA_GRAPH = "cuda_graph"
GPU_MEMORY_TYPE_KV_CACHE = "kv_cache"
GPU_MEMORY_TYPE_WEIGHTS = "weights"


class ServerArgs:
    """The flags of a server that slime reads by name; slime prefixes each with `--sglang-`."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        for flag in ("--dp-size", "--pp-size", "--ep-size", "--moe-dp-size"):
            parser.add_argument(flag, type=int, default=1)
        parser.add_argument("--speculative-algorithm", default=None)
        parser.add_argument("--enable-deterministic-inference", action="store_true")


def kill_process_tree(*_: object, **__: object) -> None:
    raise RuntimeError("no SGLang server runs here: rollouts ask the generate server of the tests")
