"""Parses the reply of a judge model into a verdict, strictly.

The reply is untrusted: it may quote the response, the response may contain forged verdicts, and a model that obeys the
response may write anything. So a verdict is one JSON object whose `id` is the nonce of this call, and the nonce occurs
as an `id` exactly once in the answer. Nothing is repaired, clipped or guessed. In every doubtful case the parser raises
`InvalidReply`, which leads to another try and never to a reward. The answer begins after the last end of the model's
thinking; a verdict in the thinking is a draft.

The work is bounded by the length of the reply: the parser accepts at most `MOST_NESTING` levels, does not convert
integers of more than 64 digits exactly, and shares one budget of characters among all parsing attempts.

Thinking is found by the marks that open and end it. Some servers remove the thinking from the content. Others leave it
in. If the chat template contains the opening mark, only the end mark is in the reply. The list has the marks of the
open models of 2024 to 2026, from the reasoning parsers of vLLM, SGLang and llama.cpp. Each entry has the opening mark
first, and then the end marks:

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

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from ..errors import InvalidReply
from ..samples import RawScore
from ..samples.json_values import MOST_NESTING, raw_decode, too_deep
from .fence import normalised, readable

MAX_RATIONALE_CHARS = 2_000
MAX_EXCERPT_CHARS = 120

_MAX_CANDIDATES = 256
_MAX_QUOTED_ENDS = 16
_KEPT_REWARDS = 256
_FEW_OBJECTS = 4
"""Most opening braces of a reply that is first tried as a whole. With more, the second try would double the work."""
_CANDIDATE = re.compile(r'\{\s*"|\[\s*[\[{"]')
_ID = re.compile(r'"id"\s*:\s*')
_OPEN = re.compile(r'(?:\[|"\s*:)\s*\Z')

# Parts of the words of servers for why a completion ended. Words without such a part count as finished.
_CUT_OFF = re.compile(r"length|max_?(?:\w+_)?tokens|incomplete|truncated|token_limit|error_limit")
_GIVEN_UP = re.compile(
    r"filter|safety|refus|sensitive|block|recitation|spii|prohibited|toxic|moderat|guardrail|policy"
    r"|error|abort|cancel|time_?out|insufficient|repetition|malformed|interrupt|fail|unavailable|overload"
)

RATIONALE_FORM = "<one or two sentences>"
"""The placeholder of the rationale in the form that the prompt shows. A reply that repeats it has copied the form."""

_NO_LETTER = re.compile(r"\W+")
_FORM_WORDS = _NO_LETTER.sub(" ", RATIONALE_FORM).strip()
_FORM_WORD = max(_FORM_WORDS.split(), key=len)
"""A word without which a text is not the form."""

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


@lru_cache(64)
def why_no_verdict(finish_reason: str) -> Literal["", "cut off", "given up"]:
    """Return why a reply with this `finish_reason` cannot hold a verdict, or "" if it can. A verdict in an unfinished
    reply may be a draft or half of the answer.
    """
    reason = finish_reason.strip().lower().replace("-", "_").replace(" ", "_")
    if _CUT_OFF.search(reason):
        return "cut off"
    return "given up" if _GIVEN_UP.search(reason) else ""


# Not frozen: it is made for every call, and a frozen one takes three times as long.
@dataclass(slots=True)
class ParsedVerdict:
    """The contents of a verdict: what its fields say, and the rationale."""

    raw: RawScore
    rationale: str


class Scale:
    """The linear map from a judge's score range to the reward range.

    It computes with rational numbers and rounds once. So a score of 7 in 0 to 10 is a reward of exactly 0.7, and no
    rounding error overflows or leaves the reward range. Judges give the same few scores again and again, so the last
    results are kept.
    """

    def __init__(self, score_range: tuple[float, float], reward_range: tuple[float, float]) -> None:
        self._low = Fraction(score_range[0])
        self._floor = Fraction(reward_range[0])
        self._slope = (Fraction(reward_range[1]) - self._floor) / (Fraction(score_range[1]) - self._low)
        self.reward = lru_cache(_KEPT_REWARDS)(self._reward)
        """Maps a score to its reward."""

    def _reward(self, score: float) -> float:
        return float(self._floor + (Fraction(score) - self._low) * self._slope)


def excerpt(text: str) -> str:
    """Return at most `MAX_EXCERPT_CHARS` characters of `text`, quoted and escaped, for messages."""
    quoted = repr(text[:MAX_EXCERPT_CHARS])
    if len(text) <= MAX_EXCERPT_CHARS and len(quoted) <= MAX_EXCERPT_CHARS:
        return quoted
    return quoted[: MAX_EXCERPT_CHARS - 4] + quoted[0] + "..."


def within(text: str, max_chars: int) -> str:
    """Return a reply without what is around it. Raises `InvalidReply` for an empty one and for one that is too long."""
    if not text.strip():
        raise InvalidReply("the reply is empty")
    if len(text) > max_chars:
        raise InvalidReply(f"the reply has {len(text):,} characters, at most {max_chars:,} are read: {excerpt(text)}")
    return text.strip().lstrip("\ufeff")


def parse_verdict(
    text: str, *, nonce: str, read: Callable[[Mapping[str, Any], str], RawScore], max_chars: int = 65_536
) -> ParsedVerdict:
    """Parse the verdict in `text`, the reply of a judge to a prompt with `nonce`. `read` reads its fields; it gets them
    and the text of the answer, for messages.

    Thinking is not part of the answer. It ignores prose and code fences around the object, unknown keys, and objects
    without the nonce. Raises `InvalidReply` for everything else, also for an object inside an array or another object,
    and for a rationale that is copied from the form.
    """
    answer = within(text, max_chars)
    verdict = _alone(answer, nonce)
    if verdict is None:
        answer, verdict = _verdict(answer, nonce)
    stated = verdict.get("rationale")
    rationale = readable(stated)[:MAX_RATIONALE_CHARS] if isinstance(stated, str) else ""
    if _is_form(rationale):
        raise InvalidReply(f"the rationale is copied from the form, so nothing was judged: {excerpt(answer)}")
    return ParsedVerdict(read(verdict, answer), rationale)


def _alone(text: str, nonce: str) -> Mapping[str, Any] | None:
    """Return the verdict of a reply that is one flawless JSON object and nothing else, as nearly all replies are; None
    for any other reply, which `_verdict` reads or refuses. The two agree; this one takes a third of the time.
    """
    # With one nonce in the text, and none written with escapes, an object whose `id` is the nonce is no other's part.
    if text[:1] != "{" or text.count("{") > _FEW_OBJECTS or text.count(nonce) != 1 or "\\u" in text:
        return None
    if may_have_marks(text):  # true for every text with a list
        return None
    try:
        value, end, flaw = raw_decode(text, 0)
    except (RecursionError, ValueError):
        return None
    if flaw or end != len(text) or type(value) is not dict or value.get("id") != nonce:
        return None
    return value


def _verdict(text: str, nonce: str) -> tuple[str, Mapping[str, Any]]:
    """Find the answer in a reply, and the verdict in the answer.

    A mark of thinking inside a string of the verdict is a quotation ("the response lacks `</think>`") and ends nothing.
    So the answer begins after the last end mark that has the nonce somewhere behind it, and all later marks must be
    inside the verdict. If this gives no verdict, that end mark may be a quotation in a rationale before the `id`; then
    earlier end marks are tried.
    """
    marks = marks_in(text)
    # The pattern does not contain the nonce, because it would have to be compiled for every reply.
    claim = f'"{nonce}"'
    claims = [match.start() for match in _ID.finditer(text) if text.startswith(claim, match.end())]
    ends = [mark.end for mark in marks if not mark.opens and claims and mark.end <= claims[-1]]
    problem = ""
    for begin in (*ends[: -_MAX_QUOTED_ENDS - 1 : -1], 0):
        try:
            verdict, start, end = _verdict_after(begin, text, nonce, marks, claims)
        except InvalidReply as error:
            problem = problem or str(error)
        else:
            if hides_marks(f"{text[:start]}{{}}{text[end:]}"):
                break
            return text[begin:], verdict
    if hides_marks(text):
        problem = f"the reply disguises where its reasoning ends: {excerpt(text)}"
    raise InvalidReply(problem)


def _verdict_after(
    begin: int, text: str, nonce: str, marks: Sequence[Mark], claims: Sequence[int]
) -> tuple[Mapping[str, Any], int, int]:
    """Parse `text` as an answer that begins at `begin`. Returns the verdict, its start and its end."""
    drafts = thinking_spans([mark for mark in marks if mark.end <= begin])
    if drafts:
        starts = [start for start, _ in drafts]
        # The spans are sorted and do not overlap, so only the last one that starts before a claim can contain it.
        claims = [
            claim for claim in claims if not (before := bisect_right(starts, claim)) or claim >= drafts[before - 1][1]
        ]
    if len(claims) != 1:
        count = "no verdict" if not claims else f"{len(claims)} verdicts, not one,"
        last = max((mark.end for mark in marks if not mark.opens), default=0)
        found = excerpt(text[begin if claims else last :])
        raise InvalidReply(f"the reply holds {count} with this call's id: {found}")
    answer = text[begin:]
    verdict, start, end = _object_with(answer, nonce, claims[0] - begin)
    outside = [mark for mark in marks if begin <= mark.start and not start < mark.start - begin < end]
    if outside:
        raise InvalidReply(f"the reply holds no verdict after its reasoning: {excerpt(answer)}")
    if _enclosed(answer[:start], answer[end:]):
        raise InvalidReply(f"the verdict stands inside an array or another object: {excerpt(answer)}")
    return verdict, begin + start, begin + end


def _enclosed(before: str, after: str) -> bool:
    """Whether a verdict is an item of an array or a value of an object, also of a broken one."""
    goes_on = after.lstrip()[:1] in ("]", "}", ",")
    return _OPEN.search(before) is not None or (goes_on and ("[" in before or "{" in before))


def _object_with(text: str, nonce: str, claim: int) -> tuple[Mapping[str, Any], int, int]:
    """Parse the outermost JSON value around the position `claim`; it must be an object whose own `id` is the nonce.

    Returns the object, its start and its end.
    """
    if too_deep(text):
        raise InvalidReply(f"the reply is nested more than {MOST_NESTING} deep: {excerpt(text)}")
    budget = 8 * len(text)
    position = 0
    for _ in range(_MAX_CANDIDATES):
        candidate = _CANDIDATE.search(text, position)
        if candidate is None or candidate.start() > claim:
            raise InvalidReply(f"the verdict is not a JSON object: {excerpt(text[max(0, claim - 1) :])}")
        start = candidate.start()
        try:
            value, end, flaw = raw_decode(text, start)
        except json.JSONDecodeError as error:
            budget -= error.pos - start
            position = start + 1
        except (RecursionError, ValueError) as error:
            raise InvalidReply(f"the reply cannot be read ({type(error).__name__}): {excerpt(text)}") from None
        else:
            budget -= end - start
            position = end
            if end > claim:
                return _claimant(value, nonce, flaw, text[start:end]), start, end
        if budget < 0:
            break
    raise InvalidReply(f"the reply holds too many pieces that look like JSON: {excerpt(text)}")


def _claimant(value: Any, nonce: str, flaw: str, source: str) -> Mapping[str, Any]:
    if flaw:
        raise InvalidReply(f"the verdict {flaw}: {excerpt(source)}")
    if not isinstance(value, dict) or value.get("id") != nonce:
        raise InvalidReply(f"the verdict stands inside an array or another object: {excerpt(source)}")
    return value


def number_in(name: str, values: Mapping[str, Any], interval: tuple[float, float], source: str) -> float:
    """Read a number of a verdict. Raises `InvalidReply` for what is none, or outside of the interval."""
    if name not in values:
        raise InvalidReply(f"the verdict has no {name}: {excerpt(source)}")
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        kind = "null" if value is None else type(value).__name__
        raise InvalidReply(f"{name} must be a number, not {kind}: {excerpt(source)}")
    # Compared before the conversion, because a conversion could round an integer into the range. NaN is in no range.
    if not interval[0] <= value <= interval[1]:
        raise InvalidReply(f"{name} is outside {interval[0]:g} to {interval[1]:g}: {excerpt(source)}")
    return float(value)


def _is_form(rationale: str) -> bool:
    folded = rationale.casefold()
    return _FORM_WORD in folded and (RATIONALE_FORM in folded or _NO_LETTER.sub(" ", folded).strip() == _FORM_WORDS)


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


@lru_cache(maxsize=1)  # a judge screens a response, and then writes it into its prompt
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
