"""Computes upper bounds on the tokens of a request from the body that is sent.

- Completion: `max_tokens` (or a synonym) plus the reasoning budget, times the number of completions (`n`). They are
  read from the final body, so it does not matter where they were configured.
- Images: 2,048 for each image and one for each 512 pixels that are sent (`Header.tokens` in samples/images), which is
  more than most models take. `TokenEstimates` learns from usage what they really take, as for texts.
- Prompt: its UTF-8 bytes, plus some tokens of the chat template for each message. A byte-level BPE, or a SentencePiece
  model with byte fallback, never makes more tokens than bytes. Most texts need far fewer: English about one token for 4
  bytes, digits and base64 up to one for each byte. `Texture` says what a text consists of.

Keys of the body: the API references of OpenAI (chat completions), vLLM, SGLang, Ollama, OpenRouter, DashScope, Gemini.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ..samples.images.encoded import images_in

TOKENS_PER_MESSAGE = 8
"""Assumed tokens that a chat template puts around a message: role and control tokens."""
TOKENS_PER_REQUEST = 32
"""Assumed tokens that a chat template adds to a request: answer prefix, date, short default system message."""
TOKENS_PER_ATTACHMENT = 4096
"""Assumed tokens of a part of a message that is neither text nor an image of known size."""

BYTES_PER_TOKEN_AT_MOST = 128
"""Most bytes that a tokenizer puts into one token."""

SHARES = 32
"""In how many parts the share of a class of characters is counted in a `Kind`."""

Kind: TypeAlias = tuple[int, int, int, int, int, int]
"""What prompts have in common whose tokens per byte are about the same: their length in powers of 4, and the shares of
dense bytes, of characters of 2, 3 and 4 bytes, and of images, in parts of `SHARES`."""

_LIGHT = b"abcdefghijklmnopqrstuvwxyz "
_ASCII = bytes(range(0x80))
_NOT_LEADS = bytes(byte for byte in range(0x100) if byte < 0xC0)
_THREE_OR_FOUR = bytes(byte for byte in range(0x100) if byte < 0xE0)
_FOUR = bytes(byte for byte in range(0x100) if byte < 0xF0)

_BOUNDS = frozenset({"maxtokens", "maxcompletiontokens", "maxnewtokens", "maxoutputtokens", "numpredict", "npredict"})
_BUDGETS = frozenset({"budgettokens", "thinkingbudget", "thinkingtokenbudget", "reasoningbudget", "maxthinkingtokens"})
_COUNTS = frozenset({"n", "bestof", "numreturnsequences", "candidatecount", "numbeams", "beamwidth"})
_REASONING = ("reasoning", "thinking", "thinkingconfig")
_OPAQUE = frozenset(
    {
        "messages",
        "responseformat",
        "tools",
        "functions",
        "metadata",
        "logitbias",
        "guidedjson",
        "structuredoutputs",
        "format",
        "responseschema",
        "responsejsonschema",
        "labels",
    }
)
"""Keys whose values hold the user's texts and names, and no sampling parameters."""


# Not frozen: it is made for every call, and a frozen one takes three times as long.
@dataclass(slots=True)
class Texture:
    """Counts of the UTF-8 bytes of a text, by class.

    `size` counts all bytes. `dense` counts ASCII bytes that are neither lower-case letters nor spaces. `two`, `three`
    and `four` count the bytes of characters that take 2, 3 and 4 bytes. `images` is the assumed tokens of images; they
    count as that many bytes.
    """

    size: int = 0
    dense: int = 0
    two: int = 0
    three: int = 0
    four: int = 0
    images: int = 0

    @classmethod
    def of(cls, texts: Iterable[str | bytes], *, images: int = 0, beside: Texture | None = None) -> Texture:
        """Count the bytes of `texts` and the tokens of `images`, and add those of `beside`."""
        size, dense, two, three, four = images, 0, 0, 0, 0
        if beside is not None:
            size += beside.size
            images += beside.images
            dense, two, three, four = beside.dense, beside.two, beside.three, beside.four
        for text in texts:
            data = str.encode(text, "utf-8", "surrogatepass") if isinstance(text, str) else text
            size += len(data)
            heavy = data.translate(None, _LIGHT)
            foreign = b"" if heavy.isascii() else heavy.translate(None, _ASCII)
            dense += len(heavy) - len(foreign)
            if foreign:
                leads = foreign.translate(None, _NOT_LEADS)
                of_three_up = leads.translate(None, _THREE_OR_FOUR)
                of_four = len(of_three_up.translate(None, _FOUR))
                two += 2 * (len(leads) - len(of_three_up))
                three += 3 * (len(of_three_up) - of_four)
                four += 4 * of_four
        return cls(size, dense, two, three, four, images)

    @property
    def kind(self) -> Kind:
        size = self.size or 1
        return (
            self.size.bit_length() // 2,
            SHARES * self.dense // size,
            SHARES * self.two // size,
            SHARES * self.three // size,
            SHARES * self.four // size,
            SHARES * self.images // size,
        )


# Not frozen: it is made for every call, and a frozen one takes three times as long.
@dataclass(slots=True)
class Demand:
    """An upper bound on the tokens of a request.

    `texture` describes the text and the images of the prompt. `overhead` is the tokens of the chat template and of
    other parts. `completion` is the tokens of all answers; 0 if the body states no bound.
    """

    texture: Texture
    overhead: int = 0
    completion: int = 0
    kind: Kind = field(init=False, repr=False, compare=False)
    """That of its texture."""
    least: int = field(init=False, repr=False, compare=False)
    """The least tokens that a limit must have room for: the completion that the parameters allow, and one prompt token
    for every `BYTES_PER_TOKEN_AT_MOST` bytes: no tokenizer makes fewer."""
    estimate: tuple[int, int] = field(default=(0, 0), init=False, repr=False, compare=False)
    """The last result of `TokenEstimates.most`. The scheduler asks for it several times for each attempt, and answers
    seldom change it."""
    estimated_in: object = field(default=None, init=False, repr=False, compare=False)
    """What `estimate` depends on; None before the first."""

    def __post_init__(self) -> None:
        self.kind = self.texture.kind
        self.least = self.completion + self.texture.size // BYTES_PER_TOKEN_AT_MOST

    @property
    def prompt(self) -> int:
        """Most prompt tokens: one for each byte of text, those of its images, and the overhead."""
        return self.texture.size + self.overhead


def overhead_of(messages: int) -> int:
    """Return the tokens that a chat template adds to this number of messages; 0 without messages."""
    return TOKENS_PER_REQUEST + TOKENS_PER_MESSAGE * messages if messages else 0


def of_messages(messages: Iterable[Any]) -> tuple[list[str], int, int]:
    """Return the texts of chat messages, the tokens of their images, and the tokens of the chat template and of parts
    that are neither.
    """
    texts, images, overhead, count = [], 0, 0, 0
    for message in messages:
        count += 1
        is_mapping = type(message) is dict or isinstance(message, Mapping)
        content = message.get("content") if is_mapping else message
        if type(content) is str:
            texts.append(content)
            continue
        for part in content if isinstance(content, (list, tuple)) else [content]:
            text = part.get("text") if isinstance(part, Mapping) else part
            if isinstance(text, str):
                texts.append(text)
            elif part is not None:
                found = sum(image.tokens for image in images_in(part))
                images += found
                overhead += 0 if found else TOKENS_PER_ATTACHMENT
    return texts, images, overhead + overhead_of(count)


def completion_bound(parameters: Mapping[str, Any], *, holds_budget: bool = False) -> int | None:
    """Return the most completion tokens that the parameters of a body allow; None if they set no bound.

    If several synonyms of a bound are set, the largest counts, because each server reads other names. A thinking budget
    is added, because some servers do that, unless the bound holds it (`holds_budget`).
    """
    found = _Found()
    found.look_into(parameters)
    if found.most is None:
        return None
    return max(1, found.choices) * (found.most + (0 if holds_budget else found.budget))


class _Found:
    __slots__ = ("budget", "choices", "most")

    def __init__(self) -> None:
        self.most: int | None = None
        self.budget = 0
        self.choices = 1

    def look_into(self, parameters: Mapping[str, Any], *, above: str = "", depth: int = 0) -> None:
        for key, value in parameters.items():
            name = str(key).lower().replace("_", "").replace("-", "")
            if isinstance(value, Mapping):
                if name not in _OPAQUE and depth < 4:
                    self.look_into(value, above=name, depth=depth + 1)
                continue
            number = _whole(value)
            if number is None:
                continue
            if name in _BUDGETS or (above in _REASONING and name in _BOUNDS):
                self.budget = max(self.budget, number)
            elif name in _BOUNDS:
                self.most = max(self.most or 0, number)
            elif name in _COUNTS:
                self.choices = max(self.choices, number)


def _whole(value: Any) -> int | None:
    """Return a positive number rounded up; None for anything else. Servers accept a number in quotes, so it counts.

    0 and negative numbers are None, because some servers read them as "no bound".
    """
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return math.ceil(number) if 0 < number < 1e12 else None
