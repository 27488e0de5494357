"""Defines `EmbeddingsSource`: a model that turns texts into vectors, behind a server with OpenAI's `/embeddings`.

It is asked as a chat server is, so keys, limits, replicas and clients' own requests work in the same way. Its dialect
stands here and is no choice of a chat server, because what it answers is no text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..config.nodes import PositiveInt
from ..config.source_models import BaseURLs, EndpointConfig, ModelName
from ..errors import InvalidReply, QRewardError
from .base import Reply, Request
from .dialects.base import Dialect, text_of
from .kind import VECTORS
from .openai import OpenAISource
from .values import StrictAnswer, is_number

_MARKS = 4
"""Tokens that the limits allow for the marks which a model adds to each text."""


class EmbeddingsAnswer(StrictAnswer):
    """One HTTP reply with vectors: `Reply.value` is a list of lists of floats, in the order of the texts."""

    __slots__ = ()

    def read_content(self, body: Mapping[str, Any]) -> Reply | QRewardError:
        items = body.get("data") if isinstance(body, Mapping) else None
        if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
            return self.unreadable("no list of embeddings in `data`", self.http.body)
        by_index = {
            index if type(index := item.get("index")) is int else place: item.get("embedding")
            for place, item in enumerate(items)
        }
        vectors = [by_index.get(place) for place in range(len(items))]
        if not all(isinstance(vector, list) and vector and all(map(is_number, vector)) for vector in vectors):
            return InvalidReply(f"source {self.name!r} gave an embedding that is no list of finite numbers")
        if len({len(vector) for vector in vectors if vector}) > 1:
            return InvalidReply(f"source {self.name!r} gave embeddings of different lengths")
        count, length = len(vectors), len(vectors[0] or ())
        return self.replied(
            body,
            # For the journal: the numbers say nothing to people, and are as long as many responses.
            text=f"{count} embedding{'s' if count > 1 else ''} of {length:,} numbers",
            value=[[float(number) for number in vector] for vector in vectors if vector],
        )


class Embeddings(Dialect):
    """OpenAI's embeddings. The texts are the contents of the messages."""

    name = "embeddings"
    title = "embeddings"
    path = "/embeddings"
    answer = EmbeddingsAnswer
    bound: ClassVar[tuple[str, ...]] = ("max_tokens",)
    """Nothing is generated, so the key is never sent."""
    prompt_keys: ClassVar[tuple[str, ...]] = ("input", "stream")
    answers_in = "data"

    def body(self, model: str, request: Request, parameters: dict[str, Any]) -> dict[str, Any]:
        return {"model": model, "input": [text_of(message["content"]) for message in request.messages]}

    def prompt(self, body: dict[str, Any]) -> tuple[list[str], int, int]:
        texts = body.pop("input")
        return texts, 0, _MARKS * len(texts)

    def thinks(self, parameters: Mapping[str, Any]) -> bool:
        return False


_DIALECT = Embeddings()


class EmbeddingsSource(OpenAISource):
    """A model of embeddings behind an OpenAI-compatible server (OpenAI, vLLM, SGLang, text-embeddings-inference)."""

    class Config(EndpointConfig):
        """A model of embeddings behind a server with OpenAI's `/embeddings`."""

        URL_KEY: ClassVar[str] = "base_url"
        dialect: ClassVar[str] = _DIALECT.name
        stream: ClassVar[bool] = False

        base_url: BaseURLs
        """URL up to and including the version, e.g. `https://api.example.com/v1`; or a list of replicas that share the
        limits of this source."""

        model: ModelName
        """Name of the model on the server."""

        max_reply_bytes: PositiveInt = 33_554_432
        """Largest body of a reply in bytes; a larger one fails the attempt. 32 embeddings of 4,096
        numbers take 3 MB. Default: 32 MiB."""

    answers = (VECTORS,)
    usual_latency_s = 0.2

    @classmethod
    def dialect_of(cls, config: Any) -> Dialect:
        return _DIALECT
