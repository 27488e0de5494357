"""Promise P9: a secret of the configuration comes out nowhere, whatever servers and functions make of it."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
import os
import sqlite3
import tempfile
import zlib
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock
from urllib.parse import quote

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from qreward_plugins import InvalidReply, RewardEngine, Sample, TransientError, load_config
from qreward_plugins.secrets import Redactor, environment_secrets, names_secret
from qreward_plugins.sources import FunctionSource
from qreward_plugins.sources.http import HTTPClient, HTTPReply
from qreward_plugins.testing import JudgeServer

from ..kit import make_samples, wired

PLACES = ("api_key", "header", "parameter", "nested", "environment", "kwarg", "kwarg_list", "kwarg_environment")
FORMS = {
    "plain": str,
    "json": json.dumps,
    "url": lambda text: quote(text, safe=""),
    "base64": lambda text: base64.b64encode(text.encode()).decode(),
    "within base64": lambda text: base64.b64encode(f"user:{text}!".encode()).decode(),
    "repr": repr,
    "cut": lambda text: text[: len(text) // 2 + 4] + "...",
    "upper half": lambda text: "..." + text[len(text) // 2 - 4 :],
}
MIDDLE = st.text("abcXYZ0189+/=-_.\"'\\&<>%$ ", min_size=12, max_size=30)
SECRETS = st.fixed_dictionaries({place: MIDDLE.map(lambda middle: f"Zq9{middle.strip()}qZ7") for place in PLACES})


def tree(secrets, journal, *, deadline_s=0.3):
    return {
        "sources": {
            "model": {
                "kind": "openai",
                "base_url": "http://a.invalid/v1",
                "model": "m",
                "api_key": secrets["api_key"],
                "headers": {"X-Custom": secrets["header"]},
                "parameters": {"api_key": secrets["parameter"], "top_p": 0.5},
            },
            "service": {
                "kind": "http",
                "url": "http://b.invalid/score",
                "headers": {"X-Custom": secrets["header"]},
                "parameters": {"deep": [{"hfToken": secrets["nested"]}], "task": "${oc.env:PLANTED_TASK}"},
            },
            "rules": {
                "kind": "function",
                "function": "rewards:score",
                "kwargs": {
                    "api_key": secrets["kwarg"],
                    "credentials": [{"user": secrets["kwarg_list"]}],
                    "where": "at ${oc.env:PLANTED_WHERE}",
                    "top_k": 3,
                },
            },
        },
        "judges": {
            "words": {"kind": "llm", "score_range": [0, 1]},
            "posted": {"kind": "function", "sources": ["service"]},
            "called": {"kind": "function", "sources": ["rules"]},
        },
        "routes": {"words": "words", "posted": "posted", "called": "called"},
        "engine": {"seed": 7, "deadline_s": deadline_s, "max_attempts": 1, "journal": {"path": str(journal)}},
    }


def echoing(secrets, status, form):
    """A server that says all that it was sent, and a function that says all that it was called with."""

    def sent(*places):
        return [FORMS[form](secrets[place]) for place in places]

    async def post(self, url, body, *, on_sent, max_reply_bytes, streaming=None, headers=None):
        on_sent()
        model = url.host.startswith("a.")
        known = sent("api_key", "header", "parameter") if model else sent("header", "nested", "environment")
        everything = " ".join(known)
        assert json.loads(body)
        if status == 200 and model:
            asked = json.loads(body)["messages"][-1]["content"]
            verdict = {"id": asked.split('"id": "')[-1].split('"')[0], "rationale": everything, "score": 0.5}
            message = {"content": json.dumps(verdict)}
            said = {"model": everything, "choices": [{"message": message, "finish_reason": "stop"}]}
        elif status == 200:
            said = {"score": 0.5, "model": everything, **dict.fromkeys(known, 1)}
        else:
            said = {"error": {"message": everything, "code": everything, "type": everything}}
        return HTTPReply(status, {"Content-Type": everything, "Location": everything}, json.dumps(said).encode())

    async def score(*, api_key, credentials, where, top_k, **fields):
        assert type(api_key) is str
        assert type(credentials[0]["user"]) is str
        assert type(where) is str
        assert (api_key, top_k) == (secrets["kwarg"], 3)
        known = sent("kwarg", "kwarg_list", "kwarg_environment")
        if status == 200:
            return {"score": 0.5, **dict.fromkeys(known, 1)}
        raise {400: ValueError, 401: InvalidReply, 500: TransientError}.get(status, KeyError)(" ".join(known))

    return post, score


@settings(max_examples=20, deadline=None, phases=[Phase.generate])
@given(SECRETS, st.sampled_from([200, 301, 400, 401, 403, 404, 413, 429, 500, 503]), st.sampled_from(sorted(FORMS)))
def test_no_secret_comes_out_anywhere(secrets, status, form):
    post, score = echoing(secrets, status, form)
    log, streams = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger().addHandler(handler)
    planted = {"PLANTED_TASK": secrets["environment"], "PLANTED_WHERE": secrets["kwarg_environment"]}
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, planted),
        mock.patch.object(HTTPClient, "post", post),
        redirect_stdout(streams),
        redirect_stderr(streams),
    ):
        journal = Path(folder) / "journal.sqlite"
        # What is scored takes longer on a busy machine; a 429 is waited for.
        config = load_config(tree(secrets, journal, deadline_s=60.0 if status == 200 else 0.3))
        logging.getLogger().setLevel(logging.DEBUG)

        async def main():
            sources = {"rules": FunctionSource("rules", config.sources["rules"], loader=lambda: score)}
            async with RewardEngine(config, sources=sources) as engine:
                asked = [{"role": "user", "content": "2 + 2?"}]
                samples = [Sample(asked, "4", data_source=judge, id=judge) for judge in ("words", "posted", "called")]
                outcomes = await engine.score_all(samples)
                facts = [engine.facts().of(outcome) for outcome in outcomes]
                shown = [repr(engine), *(repr(upstream.source) for upstream in engine.upstreams.values())]
                return outcomes, facts, engine.statistics(), shown

        try:
            told = asyncio.run(main())
        finally:
            logging.getLogger().setLevel(logging.WARNING)
            logging.getLogger().removeHandler(handler)
        with sqlite3.connect(journal) as database:
            tables = [name for (name,) in database.execute("select name from sqlite_master where type = 'table'")]
            rows = [list(database.execute(f"select * from {name}")) for name in tables]
            texts = [zlib.decompress(body).decode() for (body,) in database.execute("select body from texts")]
        assert texts
        database.close()
    shown = "\n".join(
        [repr(told), str(told), repr(config), str(config), log.getvalue(), streams.getvalue(), repr(rows), *texts]
    )
    if status == 200:
        assert [outcome.reward for outcome in told[0]] == [0.5] * 3
    for secret in secrets.values():
        for make in FORMS.values():
            if len(coded := make(secret)) >= 8:
                assert coded not in shown
        assert secret[:8] not in shown
        assert secret[-8:] not in shown


def test_no_secret_comes_out_of_a_reply_that_is_no_verdict(caplog):
    key = "sk-live-0123456789abcdef"
    with JudgeServer(lambda call: f"It is {key}.", api_key=key) as server:
        played = wired({"a": server}, make_samples(1), source={"api_key": key}, engine={"max_attempts": 1})
    (outcome,) = played.outcomes
    assert outcome.label == "verdict/invalid"
    assert "It is" in outcome.detail
    assert key not in outcome.detail + outcome.describe() + caplog.text


@pytest.mark.parametrize("word", ["components", "correctness", '"score":', "12345678"])
def test_a_secret_that_is_a_word_of_the_verdict_changes_no_number(word):
    judge = {"criteria": {"correctness": "Is it correct?", "helpfulness": "Does it help?"}, "score_range": [0, 1]}
    said = {"components": {"correctness": 0.12345678, "helpfulness": 1}, "rationale": "All fine.", "score": 0.12345678}
    with JudgeServer(lambda call: said) as server:
        verdict = wired({"a": server}, make_samples(1), judge=judge, source={"api_key": word}).outcomes[0].verdict
    assert (verdict.score, verdict.rationale) == (0.12345678, "All fine.")
    assert verdict.components == {"correctness": 0.12345678, "helpfulness": 1.0}


SECRET_NAMES = (
    "api_key apiKey APIKEY OPENAI_API_KEY token hf_token accessToken X-Auth-Token password db_password DB_PASSWD "
    "secret clientSecret Authorization Set-Cookie credentials private_key key pwd"
)
SETTING_NAMES = (
    "max_tokens stop_token_ids tokenizer eos_token pad_token score_key keys monkey top_p chat_template_kwargs author "
    "keyword passing_score secretary temperature model"
)


def test_names_of_secrets():
    assert [name for name in SECRET_NAMES.split() if not names_secret(name)] == []
    assert [name for name in SETTING_NAMES.split() if names_secret(name)] == []


def test_the_folders_of_a_shell_are_no_secrets(monkeypatch):
    for name, value in {"PWD": "/data/run", "OLDPWD": "/data", "JUDGE_PASSWORD": "hunter2!", "EMPTY_TOKEN": ""}.items():
        monkeypatch.setenv(name, value)
    found = environment_secrets()
    assert "hunter2!" in found
    assert not {"/data/run", "/data", ""} & set(found)


def test_settings_are_shown_and_values_stay_what_they_are():
    kwargs = {"eos_token": "</s>", "max_tokens": 512, "api_key": "sk-0123456789", "auth": 12345678}
    function = {"kind": "function", "function": "m:f", "kwargs": kwargs}
    config = load_config({"sources": {"f": function}, "judges": {"j": {"kind": "function"}}})
    assert config.sources["f"].kwargs == kwargs
    assert [text in repr(config) for text in ("</s>", "512", "0123456789", "12345678")] == [True, True, False, False]
    assert load_config(config.model_dump()) == config


# What a redactor does beyond what whole engines show: codes, short secrets, excerpts

KEY = "sk-proj-A1b2C3d4E5f6G7h8"


@pytest.mark.parametrize("secret", [KEY, "pa/ss & wörd\\long <1>"])
def test_a_secret_is_struck_out_whatever_a_server_escapes(secret):
    coded = "".join(f"\\u{ord(each):04x}" if place % 3 else each for place, each in enumerate(secret))
    for text in (coded, json.dumps(coded)[1:-1], "".join(f"\\u{ord(each):04X}" for each in secret)):
        assert Redactor([secret]).strike_out(f'["\\u0041", "{text}"] \\n') == '["\\u0041", "***"] \\n'


def test_what_of_a_text_is_the_secret():
    assert Redactor(["v1"]).of("v1 of v10, xv1") == "*** of v10, xv1"
    for header in ("Bearer 0123456789", "Token 0123456789"):
        assert "0123456789" not in Redactor([header]).of("key 0123456789")
    assert Redactor([KEY]).of(f"{KEY}{KEY}x{'y' * 180}{KEY}") == f"***x{'y' * 180}***"


def test_excerpts_are_short_and_printable():
    shown = Redactor().of("a\nb\x1b[31m\u202e\ud800" + "x" * 500)
    assert len(shown) == 200
    assert shown.isprintable()
    assert shown.startswith("a\\nb\\x1b[31m\\u202e\\ud800xx")
    assert Redactor().of(b"\xff\xfe ok") == "\ufffd\ufffd ok"
    assert KEY not in repr(Redactor([KEY]))
