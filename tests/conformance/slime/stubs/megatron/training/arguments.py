"""The flags of Megatron that slime's own checks read. What it does not know it passes over, as slime asks."""

from __future__ import annotations

import argparse
from collections.abc import Callable

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


def parse_args(
    extra_args_provider: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None = None,
    ignore_unknown_args: bool = False,
) -> argparse.Namespace:
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


def validate_args(args: argparse.Namespace, defaults: object = None) -> argparse.Namespace:
    return args
