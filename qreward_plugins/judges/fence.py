"""Fences untrusted text: two markers with a nonce around it, and no control token of a chat template inside.

A judge model reads text of the policy, and the policy is rewarded for text that raises its score. The fence marks where
that text begins and ends. The nonce of the response is drawn for each call, and the policy cannot guess it. The other
texts, such as the question, have a nonce that follows from them: so the prompts of all responses to a question begin
alike, and a server's prefix cache serves them. It could be computed by the policy, but a nonce that occurs in any of
the texts is redrawn, and no verdict carries it. An earlier turn of the policy that names it, in whatever disguise, is
one of these texts and so changes it. The judge server of `qreward_plugins.testing` reads the same markers to find the
text to score, so both use this module.

In a template, a text of the sample is not a string but an `Untrusted`, and writing it on the `Page` fences it.

A server applies its chat template to our message and tokenizes the result, so a control token in a response could start
a new turn. The patterns below cover the chat templates and special tokens of the open models of 2023 to 2026:

- `<|name|>`, with ASCII or fullwidth bars: Qwen, Llama 3 and 4, DeepSeek, Kimi, GLM, gpt-oss, Phi, Granite, Cohere,
  OLMo, Hunyuan, Step, Jamba, LFM2, Falcon-H1, MiMo, dots, Apertus, ERNIE, Solar, GigaChat, Inkling, Muse, InternLM
- `<|name>`, `<name|>`: Gemma 4
- `[|name|]`: EXAONE, BlueLM
- `]~b]`, `]~!b[`, `[e~[`, `]!p~[`, `]!d~[`, `]<]name[>[`: MiniMax M2 and M3
- `◁name▷`: Kimi-VL, Kimi k1.5
- `>>NAME<<`: Falcon
- `<s>`, `<bos>`, `<eos>`, `<pad>`, `<unk>`, `<mask>`, `<cls>`, `<sep>`, `<mask:0>`: Llama 2, Mistral, Gemma, Yi,
  Baichuan, ERNIE and everything on SentencePiece
- `<start_of_...>`, `<end_of_...>`, `<beginning_of_...>`: Gemma 2 and 3, MiniMax M1, ERNIE
- `<extra_id_0>`: T5, Nemotron 4; `<reserved_106>`: Baichuan; `<SPECIAL_10>`: Nemotron Nano, Apertus; `<unused12>`:
  Gemma; `[unused16]`: openPangu; `[control_8]`: Mistral; `[UNUSED_TOKEN_145]`: InternLM 2
- `<BOS_TOKEN>`, `<EOS_TOKEN>`: Cohere Command, Aya
- `[INST]`, `<<SYS>>`, `[MODEL_SETTINGS]`, `[THINK]`, `[TOOL_CALLS]`, ...: Llama 2, Mistral, Magistral, Ministral
- `[gMASK]`, `<sop>`, `<eop>`, `<arg_key>`, `<tool_call>`: GLM, Qwen
- `[BOS]`, `[EOS]`, `[EOT]`, `[start_header_id]`: Kimi
- `<seed:...>`: Seed-OSS; `<longcat_...>`: LongCat; `<mm:...>`, `<minimax:...>`: MiniMax; `<atem:...>`: Muse;
  `<_user>`: TeleChat; `<role>`: Ling, Ring; `<用户>`, `<AI>`: MiniCPM; `[BEGIN FINAL RESPONSE]`: Apriel
- `<image>`, `<img>`, `<IMG_CONTEXT>`, `<video>`, `<audio>`: LLaVA, InternVL, Step; with one too many, a request fails
- `<fim_prefix>`, `<issue_start>`, `<jupyter_code>`, `<commit_msg>`, `<file_sep>`: StarCoder, Granite Code, Seed-Coder
- `<think>` and similar: reasoning models

Tokens that only mark content and occur in ordinary text (`<code>`, `<answer>`, `<response>`, `<user>`) are left out.
Case is ignored, except in short names that code uses in the other case (`x[mask]`, `Vec<S>`).
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from ..samples.json_values import encoded, json_text

NONCE_LENGTH = 12

TURN = "\udc1e"
"""Stands before and after the role of a turn, until the id of its fence is known (`Page.show`). A lone surrogate, which
`readable` leaves in no text of a sample."""

_MARKER = re.compile(
    rf"<<<(?P<label>[a-z][a-z0-9_]*) (?P<nonce>[0-9a-f]{{{NONCE_LENGTH}}})>>>\n"
    r"(?P<text>.*?)"
    r"\n<<<end (?P=label) (?P=nonce)>>>",
    re.DOTALL,
)
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")

# A role has no line break, so a marker that was cut spoils no later one.
_ROLE = re.compile(f"{TURN}([^{TURN}\n]*){TURN}")

_SHARED = b"texts that siblings share"


def draw_nonce(key: bytes, texts: Sequence[str], *, attempt: int) -> str:
    """Draw the nonce of one attempt: `NONCE_LENGTH` lower-case hex digits that occur in none of `texts`.

    It is a keyed hash (BLAKE2b, RFC 7693) of `texts` and the attempt number: it does not depend on the order in which
    samples are scheduled, and cannot be guessed without `key`.
    """
    return _drawn(key, texts, attempt, "\n".join(texts))


def shared_nonce(shared: Sequence[str], texts: Sequence[str], nonce: str) -> str:
    """Return the nonce of the texts `shared`, which siblings have in common. It follows from them alone, so it is the
    same in every process, and occurs neither in `texts` nor as `nonce`.
    """
    return _drawn(_SHARED, shared, 0, "\n".join((*texts, nonce)))


def _drawn(key: bytes, texts: Sequence[str], attempt: int, kept_out: str) -> str:
    counter = 0
    while True:
        # JSON, so that no other texts are hashed alike.
        hashed = encoded([attempt, counter, *texts])
        nonce = hashlib.blake2b(hashed, key=key[:64], digest_size=NONCE_LENGTH // 2).hexdigest()
        if nonce not in kept_out:
            return nonce
        counter += 1


def readable(text: str) -> str:
    """Replace lone surrogates by U+FFFD, because UTF-8 cannot encode them."""
    # Most texts are ASCII, which Python knows without looking at every character.
    return text if text.isascii() else _LONE_SURROGATE.sub("\ufffd", text)


def cap(text: str, max_chars: int) -> str:
    """Keep the beginning and the end of `text`, `max_chars` characters in all, and write how many were left out."""
    if len(text) <= max_chars:
        return text
    head = max_chars // 2
    tail = max_chars - head
    left_out = len(text) - max_chars
    return f"{text[:head]}\n[... {left_out} characters left out here by the judge's size cap ...]\n{text[-tail:]}"


def fence(label: str, text: str, nonce: str) -> str:
    """Return `text` between markers with `nonce`. The caller must cap and neutralise it first."""
    return f"<<<{label} {nonce}>>>\n{text}\n<<<end {label} {nonce}>>>"


def read_fences(text: str) -> tuple[str | None, Mapping[str, str]]:
    """Find the fenced blocks of a judge prompt. Return the nonce of the response, and the text of each label.

    Several responses are labelled `response_1`, `response_2` ... Without any, the nonce is that of the first block.
    Returns `(None, {})` if there is no fence. What stands inside of a fence is its text, whatever markers it holds.
    """
    nonces: dict[str, str] = {}
    blocks: dict[str, str] = {}
    for match in _MARKER.finditer(text):
        nonces.setdefault(match["label"], match["nonce"])
        blocks.setdefault(match["label"], match["text"])
    first = nonces.get("response", next(iter(nonces.values()), None))
    return nonces.get("response_1", first), blocks


# Invisible are white space, controls, the code points that fonts do not draw (`Default_Ignorable_Code_Point` of
# DerivedCoreProperties.txt, Unicode 17, with unassigned ones), and a few that are drawn as blanks. All others are
# visible: a font may have a glyph for a private-use character, and a later version of Unicode may assign a code point
# that this Python does not know.
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


# A name never holds brackets or their lookalikes. Otherwise a match could enclose a neutralised token, and neutralising
# the text twice would change it again.
_NEVER = r"<>\[\]◁▷\u2039\u203a\u27e6\u27e7\u25c3\u25b9"

_AFTER_ANGLE = (
    # Any name between bars.
    rf"\|[^\s{_NEVER}](?:[^\n{_NEVER}]{{0,62}}?[^\s{_NEVER}])??\|>",
    r"\|/?[a-z0-9_]{1,32}>|/?[a-z0-9_]{1,32}\|>",
    r"</?SYS>>",
    # Known names.
    r"(?-i:/?s)>",
    r"/?(?:bos|eos|eod|eot|eom|unk|pad|mask|cls|sep|sop|eop|eoa|eoh|role|AI|用户)>|mask:\d{1,4}>",
    r"/?(?:start|end|begin|beginning)_of_[a-z_]{1,32}>",
    r"/?(?:extra|extra_id|reserved|reserved_token|reserved_special_token|special|special_token|unused|unused_token"
    r"|placeholder|control)_?\d{1,6}>",
    r"/?[a-z]{2,16}(?:_[a-z]{2,16}){0,3}_token>",
    r"/?(?:seed|mm|minimax|atem):[a-z_]{1,48}>|/?longcat_[a-z_]{1,32}>|/?_[a-z]{2,16}>",
    r"/?(?:think|thinking|thought|thoughts|reasoning|reflection|think_on|think_off|no_think)>",
    r"/?(?:tool_calls?|tool_response|tool_sep|arg_key|arg_value)>",
    r"/?(?:img|img_context|imgpad|image_pad|image_placeholder|image_soft_token|audio_soft_token)>",
    r"(?:image|video|audio)>",
    r"/?(?:fim|issue|jupyter|commit|tts_text)_[a-z_]{1,24}>|(?:file_sep|repo_name|reponame|gh_stars)>",
)

_AFTER_SQUARE = (
    r"\|/?[a-z_]{2,32}\|\]",
    r"e~\[",
    r"/?(?:INST|THINK|SYSTEM_PROMPT|MODEL_SETTINGS|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|CALL_ID"
    r"|IMG_BREAK|IMG_END|BEGIN_AUDIO|OUTPUT_AUDIO|STREAMING_PAD|STREAMING_WORD|gMASK|sMASK|start_header_id"
    r"|end_header_id)\]",
    r"(?:BEGIN|END) FINAL RESPONSE\]",
    r"(?:unused|control|unused_token|extra_id|reserved)_?\d{1,6}\]",
    r"(?-i:/?(?:ARGS|IMG|AUDIO|TRANSCRIBE|REF|PREFIX|SUFFIX|MIDDLE|MASK|CLS|SEP|PAD|UNK|BOS|EOS|EOT))\]",
)

# Each alternative begins with a fixed character outside of the case-insensitive part, to which `re` can skip quickly.
_TOKEN = re.compile(
    rf"<(?i:{'|'.join(_AFTER_ANGLE)})"
    rf"|\[(?i:{'|'.join(_AFTER_SQUARE)})"
    rf"|\](?i:~b\]|~!b\[|![pd]~\[|<\][^\n{_NEVER}]{{1,32}}\[>\[)"
    rf"|◁(?:/?[^\n{_NEVER}]{{1,32}}▷)"
    r"|>(?:>(?:TITLE|ABSTRACT|INTRODUCTION|SUMMARY|COMMENT|ANSWER|QUESTION|DOMAIN|PREFIX|SUFFIX|MIDDLE)<<)"
)

# Every token has one of these brackets, or a form of it that NFKC folds to it. Most texts have none.
_BRACKET = re.compile("[<\\[\\]◁\uff1c\uff3b\uff3d\ufe64\ufe47\ufe48]")


class _Folded(dict[int, int]):
    """Maps characters to NFKC if the result is one character: fullwidth and styled letters become plain letters."""

    def __missing__(self, code: int) -> int:
        folded = unicodedata.normalize("NFKC", chr(code))
        self[code] = ord(folded) if len(folded) == 1 else code
        return self[code]


_FOLDED = _Folded()

_LOOKALIKE = str.maketrans(
    {
        **dict.fromkeys("<\uff1c\ufe64", "\u2039"),
        **dict.fromkeys(">\uff1e\ufe65", "\u203a"),
        **dict.fromkeys("[\uff3b\ufe47", "\u27e6"),
        **dict.fromkeys("]\uff3d\ufe48", "\u27e7"),
        "◁": "\u25c3",
        "▷": "\u25b9",
    }
)


def neutralise(text: str) -> str:
    """Replace the brackets of control tokens in `text` by lookalikes: `<s>` becomes `‹s›`.

    The length stays the same. Tokens disguised with fullwidth, styled or invisible characters are replaced, too. The
    result holds no control token, so neutralising it again changes nothing.
    """
    if not _has_bracket(text):
        return text
    pieces: list[str] = []
    done = 0
    for start, end in _spans(text):
        pieces += (text[done:start], text[start:end].translate(_LOOKALIKE))
        done = end
    if not pieces:
        return text
    return "".join((*pieces, text[done:]))


def normalised(text: str) -> str:
    """Remove invisible characters from `text`, and make fullwidth and styled characters plain."""
    return INVISIBLE.sub("", text).translate(_FOLDED)


def _has_bracket(text: str) -> bool:
    if text.isascii():
        # A search for several characters at once takes ten times as long.
        return "<" in text or "[" in text or "]" in text
    return _BRACKET.search(text) is not None


def _spans(text: str) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) of each control token in `text`, in order."""
    gaps = [match.span() for match in INVISIBLE.finditer(text)]
    plain = INVISIBLE.sub("", text) if gaps else text
    # Matches are found in `plain` and mapped back to `text`. `places` are the positions in `plain` where invisible
    # characters were removed; `left_out` counts the characters that were removed up to each of them.
    left_out = list(accumulate(end - start for start, end in gaps))
    places = [start - gone for (start, _), gone in zip(gaps, [0, *left_out], strict=False)]
    for match in _TOKEN.finditer(plain if plain.isascii() else plain.translate(_FOLDED)):
        first, last = match.start(), match.end() - 1
        before = bisect_right(places, first)
        inside = bisect_right(places, last)
        start = first + (left_out[before - 1] if before else 0)
        end = last + 1 + (left_out[inside - 1] if inside else 0)
        yield start, end


class Untrusted:
    """A text, a list or a mapping of the sample. A template can test and compare it, take a part of it, and write it;
    writing fences it.
    """

    __slots__ = ("_label", "_max_chars", "_value", "page")

    def __init__(self, page: Page, label: str, value: Any, max_chars: int) -> None:
        self.page = page
        self._label = label
        self._value = value
        self._max_chars = max_chars

    def text(self) -> str:
        """Return what is written. Raises `InputError` for a value that JSON cannot hold."""
        return self._value if isinstance(self._value, str) else readable(json_text(self._value, self._label))

    def part(self, key: Any) -> Any:
        """Return an item, wrapped. Raises LookupError."""
        if isinstance(self._value, Mapping):
            return self.page.value(f"{self._label}_{key}", self._value[key], max_chars=self._max_chars)
        if isinstance(self._value, (list, tuple)) and isinstance(key, int):
            return self.page.value(self._label, self._value[key], max_chars=self._max_chars)
        raise LookupError

    def __bool__(self) -> bool:
        return bool(self._value)

    def __contains__(self, part: object) -> bool:
        return (part._value if isinstance(part, Untrusted) else part) in self._value

    def __eq__(self, other: object) -> bool:
        return bool(self._value == (other._value if isinstance(other, Untrusted) else other))

    def __hash__(self) -> int:
        return hash(self._value)

    def __str__(self) -> str:
        raise TypeError(f"the {self._label} can only be written in its fence")

    def __repr__(self) -> str:
        return f"the {self._label}"


class Page:
    """The state of rendering one message: its nonces, and the texts written so far.

    `nonce` fences the response, and `shared` all other texts (default: `nonce`). `shown` holds the labels and `texts`
    the untrusted texts that were written, as they were given and as they are shown. `cut` maps the label of each
    truncated text to its full length in characters. `rewritten` is true if control tokens in any text were neutralised,
    and `marks_turns` if the roles of turns carry the shared nonce. `hidden` maps further words, which are no control
    tokens, to what is written instead of them.
    """

    def __init__(self, nonce: str, *, shared: str = "", hidden: Mapping[str, str] | None = None) -> None:
        self.nonce = nonce
        self.shared = shared or nonce
        self.hidden = hidden or {}
        self.shown: set[str] = set()
        self.texts: list[str] = []
        self.cut: dict[str, int] = {}
        self.rewritten = False
        self.marks_turns = False
        self._shares = False

    def text(self, label: str, text: str, *, max_chars: int) -> Untrusted:
        """Wrap a text with its label; at most `max_chars` characters of it are written."""
        return Untrusted(self, label, text, max_chars)

    def value(self, label: str, value: Any, *, max_chars: int) -> Any:
        """Wrap any value of the sample; numbers, booleans and None are returned unchanged."""
        if hasattr(value, "tolist") and hasattr(value, "shape"):
            value = value.tolist()
        if value is None or isinstance(value, (bool, int, float)):
            return value
        if not isinstance(value, (str, Mapping, list, tuple, bytes)):  # bytes are refused when they are written
            value = str(value)
        value = readable(value) if isinstance(value, str) else value
        return Untrusted(self, re.sub(r"[^a-z0-9_]+", "_", label[:64].lower()), value, max_chars)

    def show(self, text: Untrusted) -> str:
        """Return a text in its fence; for a text that was written before, return a reference to it.

        Texts are identified by their label, except in `extras`, where several may have the same label.
        """
        if text._label in self.shown and not text._label.startswith("extras"):
            return f"(the {text._label} between the markers above)"
        self.shown.add(text._label)
        whole = text.text()
        self.texts.append(whole)
        capped = whole
        if len(whole) > text._max_chars:
            self.cut[text._label] = len(whole)
            capped = cap(whole, text._max_chars)
        shown = neutralise(capped)
        if self.hidden:
            for word, instead in self.hidden.items():
                shown = shown.replace(word, instead)
        if shown is not whole and shown != whole:
            self.texts.append(shown)
            self.rewritten = self.rewritten or shown != capped
        if TURN in shown:
            self.marks_turns = True
            shown = _ROLE.sub(lambda found: f"[{found[1]} {self.shared}]", shown).replace(TURN, "")
        if text._label == "response" or text._label.startswith("response_"):
            return fence(text._label, shown, self.nonce)
        self._shares = True
        return fence(text._label, shown, self.shared)

    @property
    def ids(self) -> str:
        """The nonces of the fences that were written, in words."""
        return f"{self.shared} or {self.nonce}" if self._shares and self.shared != self.nonce else self.nonce
