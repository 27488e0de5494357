"""Finds the thinking in a reply by the marks that open and end it.

Some servers remove the thinking from the content. Others leave it in. If the chat template contains the opening mark,
only the end mark is in the reply. A verdict inside the thinking is a draft and does not count. The list has the marks
of the open models of 2024 to 2026, from the reasoning parsers of vLLM, SGLang and llama.cpp. Each entry has the opening
mark first, and then the end marks:

- `<think>`, `</think>`: DeepSeek, Qwen, QwQ, GLM, Kimi K2, MiniMax, Nemotron, Hunyuan, Granite 3.3, ERNIE, OLMo, Phi,
  Step, SmolLM3, Ring, MiMo, HyperCLOVA X, Falcon-H1R, K2 Think and most others
- the same with `thinking`, `thought`, `reasoning`, `reflection`, ...: Reflection, Marco-o1, EXAONE Deep, distilled
  models, and models whose prompt asks for it
- the same with `seed:think`: Seed-OSS; `longcat_think`: LongCat; `mm:think`: MiniMax M3
- `[THINK]`, `[/THINK]`: Magistral, Ministral, Mistral Small 4
- `◁think▷`, `◁/think▷`: Kimi-VL, Kimi k1.5
- `<|START_THINKING|>`, then `<|END_THINKING|>`, `<|START_RESPONSE|>`, `<|START_TEXT|>`: Cohere Command A
- `<|channel|>analysis` or `commentary`, `<|channel|>final`: gpt-oss
- `analysis...` at the very beginning, `assistantfinal`: gpt-oss without its special tokens
- `<|channel>thought`, `<channel|>`: Gemma 4
- `to=self<|message|>`, `to=user<|message|>`: Muse
- `<|open|>think<|sep|>`, then `<|close|>think<|sep|>`, `<|open|>response<|sep|>`: Kimi K3
- `<|content_thinking|>`, `<|content_text|>`: Inkling
- `<|think|>`, `<|content|>`: Solar; `<|think:start|>`, `<|think:end|>`: Solar Open 2
- `<|begin_of_thought|>`, then `<|end_of_thought|>`, `<|begin_of_solution|>`: OpenThinker, Sky-T1
- `<|inner_prefix|>`, `<|inner_suffix|>`: Apertus; `[unused16]`, `[unused17]`: openPangu
- `Here is my thought process:`, `Here is my response:`: Granite 3.2
- `[BEGIN FINAL RESPONSE]` ends: Apriel
- `<details ...>`, `</details>`: front ends that fold the thinking up

Case is ignored, and so are white space and attributes inside a mark. Case counts only in the two marks of gpt-oss
without its special tokens (`analysis`, `assistantfinal`). A mark in backticks is a quotation, and so is an opening mark
in quotation marks: judges write about the thinking in the response.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

from .fence import normalised

_TAG = (
    r"(?:(?:seed|mm):)?(?:longcat_)?(?:think(?:ing)?|thoughts?|reason(?:ing)?|reflection|analysis|scratchpad"
    r"|chain_of_thought|inner_monologue)"
)

_LESS = "(?:<|&lt;)"

_OPENS = (
    rf"{_LESS}\s*{_TAG}(?:\s[^<>\n]{{0,200}}?)?(?:>|&gt;)",
    r"<details\b[^<>\n]{0,200}>",
    r"\[\s*THINK\s*\]",
    r"◁\s*think\s*▷",
    r"<\|START_THINKING\|>",
    r"<\|channel\|>\s*(?:analysis|commentary)",
    r"\A\s*(?-i:analysis(?=[A-Z]))",
    r"<\|channel>\s*thought",
    r"to=self\s*<\|message\|>",
    r"<\|open\|>\s*think\s*<\|sep\|>",
    r"<\|content_thinking\|>",
    r"<\|(?:think|think:start|begin_of_thought|inner_prefix)\|>",
    r"\[unused16\]",
    r"\A\s*Here(?:'s| is) my (?:thought|thinking|reasoning) process:",
)

_ENDS = (
    rf"{_LESS}\s*/\s*{_TAG}\s*(?:>|&gt;)",
    r"</details>",
    r"\[\s*/\s*THINK\s*\]",
    r"◁\s*/\s*think\s*▷",
    r"<\|(?:END_THINKING|START_RESPONSE|START_TEXT)\|>",
    r"<\|channel\|>\s*final",
    r"(?-i:assistantfinal)",
    r"<channel\|>",
    r"to=user\s*<\|message\|>",
    r"<\|close\|>\s*think\s*<\|sep\|>|<\|open\|>\s*response\s*<\|sep\|>",
    r"<\|content_text\|>",
    r"<\|(?:/think|think:end|end_of_thought|begin_of_solution|inner_suffix|content)\|>",
    r"\[unused17\]",
    r"^[ \t]*Here(?:'s| is) my (?:response|answer):",
    r"\[BEGIN FINAL RESPONSE\]",
)

_MARK = re.compile(f"(?P<opens>{'|'.join(_OPENS)})|(?P<ends>{'|'.join(_ENDS)})", re.IGNORECASE | re.MULTILINE)


_BRACKETED = re.compile(r"<(?!/?details)|\[\s*/?\s*THINK|\[unused|◁", re.IGNORECASE)

_QUOTES = ('""', "''", "\u201c\u201d", "\u2018\u2019")


class Mark(NamedTuple):
    """A mark at `text[start:end]` that opens or ends thinking."""

    opens: bool
    start: int
    end: int


def hides_marks(text: str) -> bool:
    """Whether `text` has disguised marks: in fullwidth letters, or with invisible characters inside."""
    return not text.isascii() and len(marks_in(normalised(text))) != len(marks_in(text))


def marks_in(text: str) -> list[Mark]:
    """Return the marks of thinking in `text`, in order, without quoted ones."""
    if not may_have_marks(text):
        return []
    found = [Mark(match["opens"] is not None, *match.span()) for match in _MARK.finditer(text)]
    return [mark for mark in found if not _is_quoted(text, mark)]


def may_have_marks(text: str) -> bool:
    """Whether `text` has a character or word that every mark has. Few replies do, and the search for marks takes ten
    times as long.
    """
    if not text.isascii():
        return True
    return (
        "<" in text
        or "[" in text
        or "&" in text
        or "analysis" in text
        or "assistantfinal" in text
        or (":" in text and " my " in text.lower())
    )


def _is_quoted(text: str, mark: Mark) -> bool:
    around = text[max(0, mark.start - 1) : mark.start] + text[mark.end : mark.end + 1]
    if around == "``":
        # Three backticks open a code block, which may contain the answer.
        return not text.endswith("``", 0, mark.start) and not text.startswith("``", mark.end)
    return mark.opens and around in _QUOTES


def after_thoughts(text: str) -> str:
    """Return a response without the thoughts at its beginning; "" if these do not end.

    Marks later in the response are part of it, and so are marks that a page or a letter may have (`<details>`, "Here is
    my response:").
    """
    # Every mark that counts begins with one of these. Many responses have none.
    return _after_thoughts(text) if "<" in text or "[" in text or "\u25c1" in text else text


@functools.lru_cache(maxsize=1)  # a judge screens a response, and then writes it into its prompt
def _after_thoughts(text: str) -> str:
    marks = [mark for mark in marks_in(text) if _BRACKETED.match(text, mark.start)]
    if not marks or (marks[0].opens and text[: marks[0].start].strip()):
        return text
    end = next((mark for mark in marks if not mark.opens), None)
    return "" if end is None else text[end.end :].lstrip()


def thinking_spans(marks: Sequence[Mark]) -> list[tuple[int, int]]:
    """Return the (start, end) of each span of thinking, in order.

    A span runs from an opening mark to the next end mark. If the first mark is an end mark, the first span starts at 0.
    A second end mark in a row is ignored, because the text before it belongs to the answer.
    """
    spans: list[tuple[int, int]] = []
    begin: int | None = 0 if marks and not marks[0].opens else None
    for mark in marks:
        if mark.opens:
            begin = mark.start if begin is None else begin
        elif begin is not None:
            spans.append((begin, mark.end))
            begin = None
    return spans
