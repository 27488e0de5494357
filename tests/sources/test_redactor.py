from __future__ import annotations

import json
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qreward_plugins.secrets import Redactor

KEY = "sk-proj-A1b2C3d4E5f6G7h8"


@pytest.mark.parametrize(
    "text",
    [
        f"Incorrect API key provided: {KEY}.",
        f"Incorrect API key provided: {KEY[:12]}********.",
        f"... ending in {KEY[-9:]}",
        f"{KEY}{KEY}x{KEY}",
        f"{'x' * 180}{KEY}",
    ],
)
def test_no_telling_part_of_a_secret_is_shown(text: str) -> None:
    shown = Redactor([KEY]).of(text)
    assert not any(KEY[i : i + 8] in shown for i in (0, len(KEY) - 8))
    assert "***" in shown


def test_escaped_forms_and_the_secret_within_a_header_are_struck_out() -> None:
    secret = 'pa"ss/wo rd+long'
    shown = Redactor([f"Token {secret}"])
    for form in (secret, json.dumps(secret), quote(secret, safe="")):
        assert "wo rd" not in shown.of(form)
        assert "ss%2Fwo" not in shown.of(form)
    assert "0123456789" not in Redactor(["Bearer 0123456789"]).of("key 0123456789")


@pytest.mark.parametrize("secret", [KEY, "pa/ss & wörd\\long <1>"])
def test_a_secret_is_struck_out_whatever_a_server_escapes(secret: str) -> None:
    coded = "".join(f"\\u{ord(each):04x}" if place % 3 else each for place, each in enumerate(secret))
    for text in (coded, json.dumps(coded)[1:-1], "".join(f"\\u{ord(each):04X}" for each in secret)):
        assert Redactor([secret]).strike_out(f'["\\u0041", "{text}"] \\n') == '["\\u0041", "***"] \\n'


def test_a_short_secret_is_struck_out_as_a_word_only() -> None:
    assert Redactor(["v1"]).of("v1 of v10, xv1") == "*** of v10, xv1"


def test_excerpts_are_short_and_printable() -> None:
    shown = Redactor().of("a\nb\x1b[31m\u202e\ud800" + "x" * 500)
    assert len(shown) == 200
    assert shown.isprintable()
    assert shown.startswith("a\\nb\\x1b[31m\\u202e\\ud800xx")
    assert Redactor().of(b"\xff\xfe ok") == "\ufffd\ufffd ok"
    assert KEY not in repr(Redactor([KEY]))


@given(st.text(min_size=8, max_size=40), st.text(max_size=60), st.text(max_size=60))
def test_a_whole_secret_never_survives(secret: str, before: str, after: str) -> None:
    shown = Redactor([secret]).strike_out(before + secret + after)
    words = [form for form in (secret.strip(),) if len(form) >= 8]
    assert not any(word in shown for word in words)
