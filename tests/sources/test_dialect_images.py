"""Images in every dialect of chat judges: the form of the official APIs, encoded only when the body is written."""

from __future__ import annotations

import base64
import io
from typing import Any

import orjson
import pytest

from qreward_plugins.samples import Sample
from qreward_plugins.samples.images import EncodedImage, Image
from qreward_plugins.samples.json_values import encoded
from qreward_plugins.sources import OpenAISource, Request

Pillow = pytest.importorskip("PIL.Image", reason="Pillow is not installed")

TARGET = io.BytesIO()
Pillow.new("RGB", (8, 6), "red").save(TARGET, format="PNG")
DATA = base64.b64encode(TARGET.getvalue()).decode()
URL = f"data:image/png;base64,{DATA}"
REMOTE = "https://h/a.png"

PARTS = {
    "openai": lambda body: body["messages"][-1]["content"],
    "openai_reasoning": lambda body: body["messages"][-1]["content"],
    "responses": lambda body: body["input"][-1]["content"],
    "anthropic": lambda body: body["messages"][-1]["content"],
    "gemini": lambda body: body["contents"][-1]["parts"],
}
IMAGES: dict[str, Any] = {
    "openai": {"type": "image_url", "image_url": {"url": URL}},
    "openai_reasoning": {"type": "image_url", "image_url": {"url": URL}},
    "responses": {"type": "input_image", "image_url": URL},
    "anthropic": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}},
    "gemini": {"inlineData": {"mimeType": "image/png", "data": DATA}},
}


def source(dialect: str) -> OpenAISource:
    node = {"kind": "openai", "base_url": "http://h/v1", "model": "judge", "dialect": dialect}
    return OpenAISource("a", OpenAISource.Config.model_validate(node))


def request(url: Any) -> Request:
    parts = [{"type": "text", "text": "Look."}, {"type": "image_url", "image_url": {"url": url}}]
    messages: Any = ({"role": "system", "content": "s"}, {"role": "user", "content": parts})
    return Request(Sample([], "4"), messages=messages, parameters={"max_tokens": 9}, max_completion_tokens=9)


@pytest.mark.parametrize("dialect", PARTS)
def test_an_image_has_the_form_of_the_dialect(dialect: str) -> None:
    image = EncodedImage(Image.of(TARGET.getvalue()), max_side=64, max_bytes=10_000)
    body = orjson.loads(encoded(source(dialect).body(request(image))))
    found = [part for part in PARTS[dialect](body) if "Look." not in part.values()]
    assert len(found) == 1
    assert {key: value for key, value in found[0].items() if key in IMAGES[dialect]} == IMAGES[dialect]


@pytest.mark.parametrize("dialect", PARTS)
def test_an_image_counts_as_tokens_and_another_one_is_another_question(dialect: str) -> None:
    images = [
        EncodedImage(Image.of(Pillow.new("RGB", (8, 6), c)), max_side=64, max_bytes=10_000) for c in ("red", "blue")
    ]
    a = source(dialect)
    demand = a.demand(request(images[0]))
    assert demand is not None
    assert demand.prompt >= 2048
    questions = {str(a.question(request(image))) for image in images}
    assert len(questions) == 2
    assert not any("base64," in question or DATA in question for question in questions)


@pytest.mark.parametrize("dialect", [name for name in PARTS if name != "gemini"])
def test_a_url_that_the_user_allows_is_passed_on(dialect: str) -> None:
    assert REMOTE.encode() in encoded(source(dialect).body(request(REMOTE)))
