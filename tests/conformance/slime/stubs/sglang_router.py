"""The flags of SGLang's router; the router itself never starts, since the tests give its address."""

from __future__ import annotations

import argparse
import sys

sys.modules["sglang_router.launch_router"] = sys.modules[__name__]


class RouterArgs:
    @staticmethod
    def add_cli_args(
        parser: argparse.ArgumentParser, use_router_prefix: bool = False, exclude_host_port: bool = False
    ) -> None:
        parser.add_argument("--router-policy", default=None)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace, use_router_prefix: bool = False) -> RouterArgs:
        raise RuntimeError("give slime --sglang-router-ip and --sglang-router-port: there is no router to start")


def launch_router(args: object) -> None:
    raise RuntimeError("there is no router to start")
