"""The flags of an SGLang server that slime reads by name; slime prefixes each with `--sglang-`."""

from __future__ import annotations

import argparse


class ServerArgs:
    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        for flag in ("--dp-size", "--pp-size", "--ep-size", "--moe-dp-size"):
            parser.add_argument(flag, type=int, default=1)
        parser.add_argument("--speculative-algorithm", default=None)
        parser.add_argument("--enable-deterministic-inference", action="store_true")
