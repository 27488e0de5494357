"""Defines `EmbeddingsSource`: a model that turns texts into vectors, behind a server with OpenAI's `/embeddings`.

It is asked as a chat server is, in a dialect of its own, so keys, limits, replicas and clients' own requests work in
the same way.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ..config.source_models import BaseURLs, EndpointConfig, ModelName, StreamTimeouts
from .dialects.base import Dialect
from .dialects.embeddings import Embeddings
from .kind import VECTORS
from .openai import OpenAISource

_DIALECT = Embeddings()


class EmbeddingsSource(OpenAISource):
    """A model of embeddings behind an OpenAI-compatible server (OpenAI, vLLM, SGLang, text-embeddings-inference)."""

    class Config(EndpointConfig):
        """A model of embeddings behind a server with OpenAI's `/embeddings`."""

        URL_KEY: ClassVar[str] = "base_url"
        dialect: ClassVar[str] = _DIALECT.name
        stream: ClassVar[bool] = False
        structured_output: ClassVar[str] = "native"

        base_url: BaseURLs
        """URL up to and including the version, e.g. `https://api.example.com/v1`; or a list of replicas that share the
        limits of this source."""

        model: ModelName
        """Name of the model on the server."""

        timeouts: StreamTimeouts = StreamTimeouts()

    answers = (VECTORS,)
    usual_latency_s = 0.2

    @classmethod
    def dialect_of(cls, config: Any) -> Dialect:
        return _DIALECT
