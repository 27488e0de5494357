"""Which characters show nothing.

Only what the Unicode standard lets be invisible counts: white space, controls, and the code points that it tells fonts
not to draw (`Default_Ignorable_Code_Point` of DerivedCoreProperties.txt, Unicode 17, unassigned ones included), and the
few besides that are drawn as blanks. Everything else may be seen: a private-use character has a glyph in somebody's
font, and a code point that this Python's tables do not know may be assigned by now.
"""

from __future__ import annotations

import re

_IGNORABLE = (
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)

# Interlinear annotation marks, the blank of braille, the null note head and the Khitan filler.
_BLANK = "\ufff9-\ufffb\u2800\U0001d159\U00016fe4"

# Of the controls, tab, line feed and their like are white space, and part of what a text says.
_CONTROLS = "\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f"

INVISIBLE = re.compile(f"[{_IGNORABLE}{_BLANK}{_CONTROLS}]+")
"""Characters that show nothing and are no white space, one or more."""


def is_blank(text: str) -> bool:
    """Whether nothing of `text` can be seen: white space and invisible characters only."""
    return not INVISIBLE.sub("", text).strip()
