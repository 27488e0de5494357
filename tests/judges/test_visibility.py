"""What is empty, and what only this Python does not know."""

from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from qreward_plugins.judges.control_tokens import is_blank

from ..kit import each_of


@each_of(
    "text",
    [
        *("", " \n\t\r\x0b\x0c", "\u00a0\u2003\u3000", "\u2028\u2029", "\u200b\ufeff\u2060", "\x00\x07\x1b\x7f\x85"),
        *("\u00ad", "\u034f", "\u061c", "\u115f\u1160\u3164\uffa0", "\u180e", "\ufe0f", "\U000e0100", "\U000e0041"),
        *("\u2800\u2800", "\u2066x"[:1], "\u206f", "\ufff9", "\u202e\u200f", "\U0001d173"),
    ],
)
def test_white_space_and_invisible_characters_are_empty(text: str) -> None:
    assert is_blank(text)


@each_of(
    "text",
    [
        *("\ue000", "\uf8ff", "\U000f0000", "\U0010fffd"),  # private use: a font may show it
        *("\u0378", "\U0001faff", "\U0003fffd", "\u20c1", "\U0001cccc"),  # unassigned here, or was until lately
        *("<s>", "</s>", "[INST]", "<|im_end|>", "<|endoftext|>", "<think></think>", "<turn|>", "]~b]"),
        *("\ufffd", "\ud800", "\u0301", "\u0600", "\u06dd", "0", ".", "∅", "😀", "\u4e00", "\u200b.\u200b"),
    ],
)
def test_what_somebody_may_see_is_not_empty(text: str) -> None:
    assert not is_blank(text)


@given(st.characters())
def test_only_what_unicode_lets_be_invisible_is_empty(character: str) -> None:
    if is_blank(character):
        assert unicodedata.category(character) in ("Zs", "Zl", "Zp", "Cc", "Cf", "Mn", "Lo", "So", "Cn")
        assert unicodedata.category(character) not in ("Co", "Cs")
