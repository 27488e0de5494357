"""A resources server of NeMo-Gym whose `verify` scores with a configuration.

NeMo-Gym has a value for a judge that failed: `JudgeError` (nemo_gym/judge.py). Its verify endpoint answers with
`mask_sample: true` and `failure_kind: judge_failed`, keeps the row out of the aggregate metrics, and a resumed
collection tries it again.
"""

from __future__ import annotations

from typing import Any

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.judge import JudgeError
from pydantic import ConfigDict, PrivateAttr

from ..adapters import messages_of, read_or_unreadable
from ..errors import RewardMissing
from .scorer import Scorer, sample_of


class QRewardServerConfig(BaseResourcesServerConfig):  # type: ignore[misc]
    """The keys of the server beside those of NeMo-Gym."""

    judges: str
    """The file of sources and judges: an absolute path, because NeMo-Gym starts servers in folders of their own."""
    ground_truth: str = "expected_answer"
    """The key of a row that holds the ground truth. A row without it has none."""


class QRewardVerifyRequest(BaseVerifyRequest):  # type: ignore[misc]
    """A rollout, with all keys of its row."""

    model_config = ConfigDict(extra="allow")


class QRewardVerifyResponse(BaseVerifyResponse):  # type: ignore[misc]
    """A rollout with its reward. NeMo-Gym makes metrics of its components, the numbers `score/NAME`."""

    model_config = ConfigDict(extra="allow")


class QRewardResourcesServer(SimpleResourcesServer):  # type: ignore[misc]
    """Start it with `QRewardResourcesServer.run_webserver()`. Raises `ConfigurationError` when it is made."""

    config: QRewardServerConfig
    _scorer: Scorer = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        self._scorer = Scorer(self.config.judges, "NeMo-Gym")

    async def verify(self, body: QRewardVerifyRequest) -> QRewardVerifyResponse:
        """Score a rollout. Raises `JudgeError` for one without a reward. Cancelling the call cancels its attempts."""
        row = dict(body.model_extra or {})
        given = body.responses_create_params.model_dump(exclude_none=True)
        response = read_or_unreadable(lambda: _text_of(body.response.model_dump()))
        sample = sample_of(row, lambda: _messages_of(given), response, ground_truth=self.config.ground_truth)
        try:
            number, components = await self._scorer.score(sample)
        except RewardMissing as error:
            raise JudgeError(str(error)) from None
        named = {f"score/{name}": value for name, value in components.items()}
        return QRewardVerifyResponse(**{**body.model_dump(), **named, "reward": number})


def _messages_of(given: dict[str, Any]) -> list[Any]:
    """The messages of a request to the Responses API; calls of tools and their results are none."""
    system = [{"role": "system", "content": given["instructions"]}] if given.get("instructions") else []
    prompt = given["input"]
    turns = prompt if isinstance(prompt, str) else [item for item in prompt if item.get("role")]
    return [*system, *messages_of(turns)]


def _text_of(response: dict[str, Any]) -> str:
    """The texts of the policy, without thoughts and calls of tools."""
    turns = [item for item in response["output"] if item.get("role") == "assistant"]
    parts = [part for turn in turns for part in turn.get("content") or () if part.get("text")]
    return "\n\n".join(part["text"] for part in parts)
