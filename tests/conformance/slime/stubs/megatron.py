"""Megatron as far as slime imports it, each of its modules this one: nothing of it runs without a GPU."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

mpu = sys.modules[__name__]
"""Its place in the cluster: the one rank of one group."""
for _name in ("core", "core.mpu", "core.tokenizers", "core.tokenizers.utils", "core.tokenizers.utils.build_tokenizer"):
    sys.modules[f"megatron.{_name}"] = mpu
# slime v0.3.1 falls back to the name of the last.
for _name in ("training", "training.arguments", "training.tokenizer", "training.tokenizer.tokenizer"):
    sys.modules[f"megatron.{_name}"] = mpu

_TEXTS = ("--load", "--save", "--tokenizer-model", "--tokenizer-type")
_NUMBERS = (
    "--ckpt-step",
    "--max-position-embeddings",
    "--num-layers",
    "--save-interval",
    "--seq-length",
    "--vocab-size",
)
_SWITCHES = ("--finetune", "--fp16", "--no-load-optim", "--no-load-rng")
_TOLD_IN = ("scripts", "docs", "examples", "tests", "README.md")
"""Where slime shows how its flags, Megatron's and SGLang's are used."""


def parse_args(
    extra_args_provider: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None = None,
    ignore_unknown_args: bool = False,
) -> argparse.Namespace:
    """The flags that slime's own checks read. What it does not know it passes over, as slime asks."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for flag in _TEXTS:
        parser.add_argument(flag, default=None)
    for flag in _NUMBERS:
        parser.add_argument(flag, type=int, default=None)
    for flag in _SWITCHES:
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--micro-batch-size", type=int, default=1)
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    return parser.parse_known_args()[0]


def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags that slime's own scripts and documents use: what Megatron has is not known here."""
    flags: set[str] = set()
    for place in map(Path(find_spec("slime").submodule_search_locations[0]).parent.joinpath, _TOLD_IN):
        for file in [place] if place.is_file() else place.rglob("*"):
            if file.suffix in (".sh", ".md", ".py"):
                flags.update(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", file.read_text(errors="replace")))
    for flag in flags - set(parser._option_string_actions):
        parser.add_argument(flag)
    return parser


def validate_args(args: argparse.Namespace, defaults: object = None) -> argparse.Namespace:
    return args


def vocab_size_with_padding(vocab_size: int, args: object) -> int:
    """A vocabulary of the tests needs no padding."""
    return vocab_size


_vocab_size_with_padding = vocab_size_with_padding


def is_pipeline_last_stage() -> bool:
    return True


def get_context_parallel_world_size() -> int:
    return 1


def get_context_parallel_rank() -> int:
    return 0


def get_data_parallel_group(with_context_parallel: bool = False) -> None:
    """None is torch's default group, which the tests make."""
