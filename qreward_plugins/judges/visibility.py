"""Decides which characters are invisible.

Invisible are white space, controls, the code points that fonts do not draw (`Default_Ignorable_Code_Point` of
DerivedCoreProperties.txt, Unicode 17, with unassigned ones), and a few that are drawn as blanks. All others are
visible: a font may have a glyph for a private-use character, and a later version of Unicode may assign a code point
that this Python does not know.
"""

from __future__ import annotations

import re

_IGNORABLE = (
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)

# Interlinear annotation marks, the blank of braille, the null note head and the Khitan filler.
_BLANK = "\ufff9-\ufffb\u2800\U0001d159\U00016fe4"

# All controls except white space such as tab and line feed, which is part of the layout of a text.
_CONTROLS = "\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f"

INVISIBLE = re.compile(f"[{_IGNORABLE}{_BLANK}{_CONTROLS}]+")
"""Matches one or more invisible characters that are not white space."""


_NOTHING_VISIBLE = re.compile(rf"[{_IGNORABLE}{_BLANK}{_CONTROLS}\s]*")


def is_blank(text: str) -> bool:
    """Whether `text` holds only white space and invisible characters, or nothing."""
    return _NOTHING_VISIBLE.fullmatch(text) is not None
