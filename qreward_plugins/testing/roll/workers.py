"""The base class of ROLL's reward workers and the decorator of their methods, for tests without ROLL.

In ROLL a worker is a Ray actor, which reads its rank from its environment; so does this one.
"""

from __future__ import annotations

import enum
import functools
import inspect
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

BINDING = "BIND_WORKER_METHOD_FLAG"

_log = logging.getLogger("qreward_plugins.testing.roll")


class Dispatch(enum.Enum):
    """How a cluster's call is distributed over its workers."""

    ONE_TO_ALL = enum.auto()
    ONE_TO_ALL_ONE = enum.auto()
    ALL_TO_ALL = enum.auto()
    DP_MP_COMPUTE = enum.auto()
    DP_MP_DISPATCH_FIRST = enum.auto()
    DP_MP_DISPATCH_FIRST_COLLECT_ALL = enum.auto()


class Execute(enum.Enum):
    """Which workers are called."""

    ALL = 0
    RANK_ZERO = 1


def register(
    dispatch_mode: Any = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    clear_cache: bool = True,
    trace: bool = False,
    prefetch: bool = False,
    to_remote: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Mark a method that a cluster calls, as ROLL's decorator does. An async method stays async."""
    assert isinstance(dispatch_mode, (Dispatch, dict)), f"dispatch_mode is not a Dispatch: {dispatch_mode!r}"
    assert isinstance(execute_mode, Execute), f"execute_mode is not an Execute: {execute_mode!r}"

    def mark(method: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(method):

            @functools.wraps(method)
            async def marked(*args: Any, **kwargs: Any) -> Any:
                return await method(*args, **kwargs)
        else:

            @functools.wraps(method)
            def marked(*args: Any, **kwargs: Any) -> Any:
                return method(*args, **kwargs)

        setattr(marked, BINDING, {"dispatch_mode": dispatch_mode, "execute_mode": execute_mode})
        return marked

    return mark


@dataclass
class RankInfo:
    """A worker's rank in its cluster."""

    world_size: int = 1
    tp_size: int = 1
    dp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    rank: int = 0
    tp_rank: int = 0
    dp_rank: int = 0
    pp_rank: int = 0
    cp_rank: int = 0

    @property
    def is_pipeline_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1


class Worker:
    """The part of ROLL's `Worker` that reward workers use. `FakeRollTrainer` makes and calls it."""

    def __init__(self, worker_config: Any) -> None:
        self.worker_config = worker_config
        self.pipeline_config: Any = None
        self.worker_name = os.environ.get("WORKER_NAME")
        self.cluster_name = os.environ.get("CLUSTER_NAME")
        self.rank = int(os.environ.get("RANK", 0))
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.rank_info = RankInfo(
            world_size=self.world_size, rank=self.rank, dp_rank=self.rank, dp_size=self.world_size
        )
        self.thread_executor = ThreadPoolExecutor(max_workers=5)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.worker_name})"

    @property
    def logger(self) -> logging.Logger:
        return _log

    def get_rank_info(self) -> RankInfo:
        return self.rank_info

    def initialize(self, pipeline_config: Any, *args: Any, **kwargs: Any) -> None:
        self.pipeline_config = pipeline_config

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_states(self, *args: Any, **kwargs: Any) -> None:
        """Called before the rollouts of a step; in asynchronous training once, at the start."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Called after the rollouts of a step; never in asynchronous training."""
