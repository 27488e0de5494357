"""Turns the answers of `qreward init` into a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..config.commented_yaml import Suggestion, commented_yaml
from ..judges.prompt import DEFAULT_INSTRUCTIONS
from .training_lines import Framework

Score = Literal["judge", "reward-model", "function", "mixture"]
SCORES: Mapping[str, str] = {
    "judge": "a language model grades each response",
    "reward-model": "a reward model (a sequence classifier) behind vLLM, SGLang, TEI or OpenRLHF",
    "function": "a Python function of yours",
    "mixture": "the weighted sum of a Python function and a language model",
}
"""The choices for the question what scores a response, with their descriptions."""
_DEADLINE_S = 300
_CORRECT_AT = 0.6


@dataclass(frozen=True)
class Endpoint:
    """A server that scores. `dialect` and `protocol` are the values of these keys; "" for their defaults."""

    url: str
    model: str
    key_variable: str = ""
    dialect: str = ""
    protocol: str = ""
    chat_template: str = ""


@dataclass(frozen=True)
class RateLimits:
    """The declared limits; None for one that is learned."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    concurrency: int | None = None


@dataclass(frozen=True)
class Function:
    """A reward function: its path, and the value of its key `arguments`."""

    path: str
    arguments: str


@dataclass(frozen=True)
class Answers:
    """All answers. `rubric` is "" for the default one. `endpoint` is None without a server, `function` without one."""

    framework: Framework
    score: Score
    endpoint: Endpoint | None
    limits: RateLimits
    rubric: str = ""
    function: Function | None = None

    def text(self) -> str:
        """Return the text of the configuration file, with comments."""
        title = {"verl": "verl", "slime": "slime", "roll": "ROLL", "none": "files and Python"}[self.framework]
        heading = (
            f"Rewards for {title}, written by `qreward init`.\n"
            "Each comment documents the key below it. Remove the # before a key to set it."
        )
        return commented_yaml(self.tree(), heading=heading, below="qreward" if self.framework == "slime" else "")

    def tree(self) -> dict[str, Any]:
        """Return the configuration as a tree, with `Suggestion`s for keys that are written as comments."""
        sources: dict[str, Any] = {}
        judges: dict[str, Any] = {}
        if self.endpoint is not None:
            name = "rm" if self.score == "reward-model" else "judge"
            sources[name] = self._endpoint(self.endpoint)
            judges["preference" if name == "rm" else "quality"] = self._judge()
        if self.function is not None:
            sources["rules"] = {
                "kind": "function",
                "function": self.function.path,
                "arguments": self.function.arguments,
            }
            sources["rules"]["timeouts"] = {"total_s": Suggestion(30)}
            judges["correct"] = {"kind": "function"}
        if self.score == "mixture":
            judges["total"] = {"kind": "sum", "weights": {"correct": 0.5, "quality": 0.5}, **self._correct_at()}
        engine = {"deadline_s": _DEADLINE_S, "journal": Suggestion({"path": "verdicts.sqlite"})}
        tree = {"sources": sources, "judges": judges, "engine": engine}
        # verl cannot replace a group.
        replaces = self.framework in ("slime", "roll")
        return {**tree, "groups": {"min_scored": Suggestion(6)}} if replaces else tree

    def _endpoint(self, endpoint: Endpoint) -> dict[str, Any]:
        of_rewards = self.score == "reward-model"
        entry: dict[str, Any] = {
            "kind": "reward_model" if of_rewards else "openai",
            "base_url": endpoint.url,
            "model": endpoint.model,
        }
        for key in ("dialect", "protocol", "chat_template"):
            if value := getattr(endpoint, key):
                entry[key] = value
        entry["api_key_env"] = endpoint.key_variable or Suggestion("JUDGE_API_KEY")
        entry["limits"] = {
            "requests_per_minute": self.limits.requests_per_minute or Suggestion(600),
            "tokens_per_minute": self.limits.tokens_per_minute or Suggestion(400_000),
            "concurrency": self.limits.concurrency or Suggestion(64),
        }
        return entry

    def _judge(self) -> dict[str, Any]:
        if self.score == "reward-model":
            return {
                "kind": "reward_model",
                "label": Suggestion(1),
                "transform": Suggestion([{"zscore": "rm.json"}, {"clip": [-3, 3]}]),
            }
        # OmegaConf reads ${...} as an interpolation.
        rubric = self.rubric.replace("${", "\\${")
        return {
            "kind": "llm",
            "instructions": rubric or Suggestion(DEFAULT_INSTRUCTIONS.strip()),
            "score_range": [0, 10],
            "reward_range": [0, 1],
            "max_tokens": Suggestion(8192),
            **(self._correct_at() or {"correct_at": Suggestion(_CORRECT_AT)}),
        }

    def _correct_at(self) -> dict[str, Any]:
        """ROLL's val_correct counts scores of exactly 1, so without a threshold the scores of a model read as 0."""
        return {"correct_at": _CORRECT_AT} if self.framework == "roll" else {}
