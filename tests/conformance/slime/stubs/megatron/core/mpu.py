"""Megatron's place in the cluster: the one rank of one group."""

from __future__ import annotations


def is_pipeline_last_stage() -> bool:
    return True


def get_context_parallel_world_size() -> int:
    return 1


def get_context_parallel_rank() -> int:
    return 0


def get_data_parallel_group(with_context_parallel: bool = False) -> None:
    """None is torch's default group, which the tests make."""
