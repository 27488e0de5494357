"""Judges: what a sample is asked, and what the reply is worth. Pure functions, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..config import models as configuration
from .base import Judge
from .function import FunctionJudge
from .llm import LLMJudge

__all__ = ["FunctionJudge", "Judge", "LLMJudge", "build_judge"]


def build_judge(
    name: str, config: configuration.Judge, *, sources: Sequence[str], models: Iterable[str], key: bytes
) -> Judge:
    """Build the judge that `config` describes.

    `sources` names the sources that may answer it, `models` is what answers there, in any order, and `key` the secret
    that the identifiers of its fences are drawn with (at least 16 bytes that the policy cannot know; 64 are used).
    Raises `ConfigurationError` with every mistake of the templates and numbers, by its path `judges.<name>.<key>`.
    """
    if isinstance(config, configuration.LLMJudge):
        return LLMJudge(name, config, sources=sources, models=models, key=key)
    return FunctionJudge(name, config, sources=sources, models=models)
