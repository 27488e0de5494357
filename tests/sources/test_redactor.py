"""What a redactor does beyond what whole engines show (`engine/test_secrets`): codes, short secrets, excerpts."""

from __future__ import annotations

import json

import pytest

from qreward_plugins.secrets import Redactor

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
