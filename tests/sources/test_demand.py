"""What a request takes at most is read from the body that is really sent, whoever configured it."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qreward_plugins.config import Limits, Price
from qreward_plugins.errors import ConfigurationError
from qreward_plugins.quotas.quota import Quota
from qreward_plugins.samples import Sample
from qreward_plugins.scheduling import Upstream
from qreward_plugins.sources import HTTPSource, OpenAISource, Request
from qreward_plugins.sources.passed_requests import PassedRequest

from ..kit import each_of

SAMPLE = Sample([{"role": "user", "content": "?"}], "An answer.")


def openai(parameters=None, dialect="openai", **limits):
    node = {"kind": "openai", "base_url": "http://judge.invalid/v1", "model": "m", "parameters": parameters or {}}
    node["dialect"] = dialect
    return OpenAISource("a", OpenAISource.Config.model_validate({**node, "limits": limits}))


def upstream(source):
    limits = Limits(tokens_per_minute=10_000_000)
    return Upstream(source, Quota(limits, source="a"), timeout_s=60, price=Price())


def ask(text="Grade it.", max_tokens=512, **parameters):
    return Request(
        SAMPLE,
        messages=({"role": "user", "content": text},),
        parameters={"temperature": 0.0, "max_tokens": max_tokens, **parameters},
        max_completion_tokens=max_tokens,
    )


BOUNDS = [
    ({}, 512),
    ({"max_tokens": 4096}, 4096),
    ({"max_tokens": 100}, 100),
    ({"max_tokens": "4096"}, 4096),
    ({"max_tokens": 4096.0}, 4096),
    ({"max_tokens": 4096, "n": 8}, 8 * 4096),
    ({"n": "4"}, 4 * 512),
    ({"n": None}, 512),
    ({"n": True}, 512),
    ({"best_of": 5, "n": 2}, 5 * 512),
    ({"max_completion_tokens": 2000}, 2000),
    ({"max_completion_tokens": 2000, "max_tokens": None}, 2000),
    ({"max_completion_tokens": 100}, 512),  # a server that knows max_tokens only
    ({"min_tokens": 3000}, 3000),
    ({"thinking": {"type": "enabled", "budget_tokens": 8000}}, 8512),
    ({"reasoning": {"max_tokens": 8000}}, 8512),
    ({"extra_body": {"thinking_budget": 1000}, "n": 2}, 2 * 1512),
    ({"options": {"num_predict": 900}}, 900),
    ({"chat_template_kwargs": {"thinking_budget": 1000}}, 1512),
]


@each_of(("parameters", "completion"), BOUNDS)
def test_the_reservation_is_made_from_the_parameters_that_are_sent(parameters, completion):
    source = openai(parameters)
    request = ask()
    assert upstream(source).tokens(request) == pytest.approx(completion + len("Grade it.") + 40, abs=130)
    # The very same parameters are in the body; None removes one.
    body = json.loads(source.written(request))
    assert {key: body.get(key) for key in parameters} == parameters


@given(
    source=st.dictionaries(
        st.sampled_from(["max_tokens", "max_completion_tokens", "n", "best_of"]), st.integers(1, 5000)
    ),
    judge=st.integers(1, 5000),
)
def test_what_a_server_may_generate_is_never_more_than_what_is_reserved(source, judge):
    asked = openai(source)
    body = json.loads(asked.written(ask(max_tokens=judge)))
    most = body.get("max_completion_tokens", body["max_tokens"]) * max(body.get("n", 1), body.get("best_of", 1))
    assert upstream(asked).tokens(ask(max_tokens=judge)) >= most


@pytest.mark.parametrize("value", [None, -1, 0, "many", True])
def test_parameters_that_take_the_bound_away_are_a_mistake_where_tokens_are_limited(value):
    with pytest.raises(ConfigurationError, match=r"sources\.a\.parameters\.max_tokens: .*tokens_per_minute"):
        openai({"max_tokens": value}, tokens_per_minute=1000)
    assert upstream(openai({"max_tokens": value})).tokens(ask()) >= 512
    openai({"max_tokens": value, "max_completion_tokens": 300}, tokens_per_minute=1000)


@pytest.mark.parametrize("removed", [{"max_completion_tokens": None}, {"max_completion_tokens": "all"}])
def test_the_bound_of_reasoning_models_cannot_be_taken_away_where_tokens_are_limited(removed):
    with pytest.raises(ConfigurationError, match=r"sources\.a\.parameters\.max_completion_tokens: .*tokens_per_minute"):
        openai(removed, dialect="openai_reasoning", tokens_per_minute=1000)
    reasoning = openai({"reasoning_effort": "low"}, dialect="openai_reasoning", tokens_per_minute=1000)
    assert upstream(reasoning).tokens(ask(max_tokens=700)) >= 700


def test_schemas_and_tools_of_the_parameters_are_part_of_the_prompt():
    plain, heavy = upstream(openai()).tokens(ask()), upstream(openai({"tools": [{"name": "x" * 5000}]})).tokens(ask())
    assert heavy >= plain + 5000


def test_images_count():
    parts = [{"type": "text", "text": "Look."}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]
    request = dataclasses.replace(ask(), messages=({"role": "user", "content": parts},))
    assert upstream(openai()).tokens(request) >= 4096 + 512


def test_what_a_service_is_sent_counts_whichever_part_of_the_sample_it_is():
    node = {"kind": "http", "url": "http://service.invalid/score", "body": {"r": "response", "e": "extras"}}
    source = HTTPSource("a", HTTPSource.Config.model_validate(node))
    request = Request(Sample([{"role": "user", "content": "?"}], "short", extras={"context": "z" * 9000}))
    assert upstream(source).tokens(request) >= 9000


def passed(**body):
    request = Request(SAMPLE, max_completion_tokens=4096, passed=PassedRequest({"model": "gpt-5", **body}))
    return openai().demand(request)


@pytest.mark.parametrize(
    ("part", "is_text"),
    [
        ({"type": "text", "text": "data: " + "1 " * 20_000}, True),
        ({"type": "text", "text": "data:image/png;base64," + "A" * 40_000}, True),
        ({"type": "document", "source": {"type": "text", "data": "some words of a document " * 2000}}, True),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 40_000}}, False),
        ({"type": "file", "file": {"file_data": "data:application/pdf;base64," + "A" * 40_000}}, False),
        ({"type": "input_audio", "input_audio": {"format": "wav", "data": "A" * 40_000}}, False),
        ({"inlineData": {"mimeType": "image/png", "data": "A" * 40_000 + "=="}}, False),
    ],
)
def test_of_a_clients_request_only_attachments_do_not_count_as_text(part, is_text):
    demand = passed(messages=[{"role": "user", "content": [part]}])
    assert demand.prompt > 40_000 if is_text else 4096 < demand.prompt < 5000


@pytest.mark.parametrize(
    ("body", "most"),
    [({}, 4096), ({"n": 8}, 8 * 4096), ({"max_tokens": None, "n": 2}, 2 * 4096), ({"max_tokens": 10, "n": 3}, 30)],
)
def test_of_a_clients_request_every_completion_counts(body, most):
    assert passed(messages=[], **body).completion == most
