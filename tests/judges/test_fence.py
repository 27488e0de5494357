"""The fence itself: ids that cannot be guessed or repeated, control tokens that mean nothing any more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qreward_plugins.judges.fence import NONCE_LENGTH, cap, draw_nonce

KEY = b"a key that no policy can see"


def test_a_nonce_depends_on_key_texts_and_attempt() -> None:
    nonces = [
        draw_nonce(KEY, "a", "b"),
        draw_nonce(KEY, "ab", ""),
        draw_nonce(KEY, "", "ab"),
        draw_nonce(KEY, "b", "a"),
        draw_nonce(KEY, "a", "b", attempt=1),
        draw_nonce(b"other", "a", "b"),
    ]
    assert len(set(nonces)) == len(nonces)
    assert all(len(nonce) == NONCE_LENGTH for nonce in nonces)
    assert draw_nonce(KEY, "a", "\ud800") == draw_nonce(KEY, "a", "\ud800")


def test_a_nonce_that_a_text_contains_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qreward_plugins.judges.fence.NONCE_LENGTH", 2)
    for free in ("00", "7f", "ff"):
        texts = [f"{byte:02x}" for byte in range(256) if f"{byte:02x}" != free]
        assert draw_nonce(KEY, *texts) == free


@given(st.text(max_size=60), st.integers(1, 40))
def test_a_capped_text_keeps_both_ends_and_says_so(text: str, size: int) -> None:
    kept = cap(text, size)
    if len(text) <= size:
        assert kept == text
        return
    head, _, rest = kept.partition("\n[... ")
    assert text.startswith(head) or "\n[... " in text
    assert kept.startswith(text[: size // 2])
    assert kept.endswith(text[len(text) - (size - size // 2) :])
    assert f"{len(text) - size} characters left out" in rest or "\n[... " in text
