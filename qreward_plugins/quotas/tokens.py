"""The tokens of a request: upper bounds, computed from the body that is sent (`Demand`), and estimates, learned from
answers (`TokenEstimates`), which also check the usage that an answer states.

What the parts of a body take at most:
- Prompt: its UTF-8 bytes, plus some tokens of the chat template for each message. A byte-level BPE, or a SentencePiece
  model with byte fallback, never makes more tokens than bytes. Most texts need far fewer: English about one token for 4
  bytes, digits and base64 up to one for each byte. `Texture` says what a text consists of.
- Images: `EncodedImage.tokens`: 2,048 for each image and one for each 512 pixels that are sent, which is more than most
  models take. `TokenEstimates` learns from usage what they really take, as for texts.

An estimate below the truth would break a declared limit. So the first requests reserve one token for each byte, which
no tokenizer exceeds, and the rest is given back when the answer states its usage. These answers then lower the estimate
for texts of the same kind: about the same length, and the same parts of English, digits, CJK and emoji (`Texture`).

- Known kind (`ENOUGH` answers): the most tokens per byte of the recent answers, times a margin. The margin shrinks as
  answers become more and differ less.
- Other kinds: the estimate of the most similar known kind, plus a token for each byte by which they differ. When a
  policy turns from English to Chinese, its requests reserve one token for each byte again until answers are in.

Guarantee, for tokenizers that make at most one token for each byte: the estimate is never too low while no kind is
known, and later for every text that takes at most `MARGIN` times the tokens per byte of the recent texts of its kind. A
text beyond that can exceed the source's limit once, by the requests in flight when its answer arrives: their estimates
are raised, too, from then on.

A stated usage is not trusted either. Figures that the bytes of the request or the bound of its completion rule out are
reduced to that bound, unless several replies state them: a provider may add a long prompt of its own, or count
reasoning beyond `max_tokens`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ..samples.images.encoded import images_in
from ..samples.spent import Usage

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

ENOUGH = 8
"""Number of answers from which a kind counts as known."""
MARGIN = 1.03
"""Smallest factor between the most tokens per byte of the recent answers and the estimate. It is larger while there are
few answers, or if they differ."""

_FIRST_TOKENS_PER_BYTE = 1 / 3
"""Likely tokens per byte before the first answer; for plans only, not for reservations."""
_WEIGHT = 0.05
"""Weight of the last answer in the likely tokens per byte and the likely completion."""
_RECENT = 64
"""Recent answers of a kind that its estimate considers."""
_KINDS = 1024
"""Most kinds that are remembered; the oldest is dropped."""
_LEVELS = 1024
"""Estimates of a kind are rounded up to a multiple of 1/1024 tokens per byte. Without that they would rise a little
with every second answer, and each rise updates all requests in flight."""
_LOWERED = 0.97
"""An estimate is lowered only to less than this part of it: otherwise it falls a little whenever a high answer is
forgotten, and rises again with the next one."""
_FEW = 3.0
"""While there are few answers: this over their number is the least margin."""
_LONGER = 0.01
"""A longer kind counts as less similar by this, so that a shorter one with the same shares is preferred."""
_ALIKE = 4
"""Most steps (of 1/`SHARES`) by which similar kinds may differ: digits say nothing about base64."""
_LONG_TEMPLATE = 200
"""Tokens of a long chat template: in the tokens per byte of longer texts they hardly show, so shorter texts get them on
top."""
_STATED = 32
"""Recent replies whose stated usage is compared."""
_WITNESSES = 3
"""Replies among these that must state a usage beyond a bound before it is believed."""
_MOST_ADDED = 65_536.0
"""Most prompt tokens that a provider may add and be believed."""
_MOST_FACTOR = 64.0
"""Most by which a completion may exceed its bound and be believed, as a factor."""
_COMPLETION_SLACK = 16
"""Tokens by which any completion may exceed its bound."""
_UNBOUNDED_COMPLETION = 4096
"""Bound of a completion, in tokens, if the request states none."""


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


class TokenEstimates:
    """Estimates for one source, learned from its answers."""

    def __init__(self) -> None:
        self.state = object()
        """Replaced whenever an estimate changes, so that results for an older one are not used again."""
        self._kinds: dict[Kind, _Seen] = {}
        self._alike: dict[Kind, tuple[float, int]] = {}
        """Results of `_by_similar_kind`; cleared when an estimate changes."""
        self._added = _Repeated(_MOST_ADDED)
        self._beyond = _Repeated(_MOST_FACTOR - 1)
        """By how many times its bound a completion is longer."""
        self._per_byte = _FIRST_TOKENS_PER_BYTE
        self._completion = 0.0

    def most(self, demand: Demand) -> tuple[int, int]:
        """The most prompt tokens and completion tokens of a request, by what was learned so far. The latter are 0 if
        its body states no bound.
        """
        if demand.estimated_in is not self.state:
            demand.estimate = self._prompt(demand), math.ceil(demand.completion * (1 + self._beyond.value))
            demand.estimated_in = self.state
        return demand.estimate

    def _prompt(self, demand: Demand) -> int:
        size = demand.texture.size
        most = size + demand.overhead + math.ceil(self._added.value)
        seen = self._kinds.get(demand.kind)
        if seen is None or seen.count < ENOUGH:
            per_byte, further = self._by_similar_kind(demand.kind)
        else:
            per_byte, further = seen.most, 0
        if per_byte >= 1.0:
            return most
        return min(most, math.ceil(per_byte * size) + demand.overhead + further)

    def likely(self, size: float) -> float:
        """The average tokens of a request of `size` bytes, prompt and completion."""
        return size * self._per_byte + self._completion

    def credible(self, demand: Demand, usage: Usage) -> tuple[Usage | None, bool]:
        """Return the part of a stated `usage` that is possible, and whether it was reduced. None: nothing is stated."""
        if not usage.prompt_tokens and demand.texture.size:
            return None, False  # a server that does not count states zeros
        prompt, completion = demand.prompt + self._added.value, self._most_completion(demand)
        risen = self._added.note(usage.prompt_tokens - demand.prompt)
        if self._beyond.note(usage.completion_tokens / (demand.completion or _UNBOUNDED_COMPLETION) - 1) or risen:
            self.state = object()
        if usage.prompt_tokens <= prompt and usage.completion_tokens <= completion:
            return usage, False
        most_prompt, most_completion = math.ceil(prompt), math.ceil(completion)
        believed = Usage(
            prompt_tokens=min(usage.prompt_tokens, most_prompt),
            completion_tokens=min(usage.completion_tokens, most_completion),
            cached_tokens=min(usage.cached_tokens, most_prompt),
            thinking_tokens=min(usage.thinking_tokens, most_completion),
        )
        return (usage, False) if believed == usage else (believed, True)

    def learn(self, demand: Demand, bytes_sent: int, usage: Usage, *, cut_down: bool = False) -> bool:
        """Learn from the `usage` that `credible` returned for a request; return whether an estimate rose.

        `bytes_sent`: the size of the request. `cut_down`: the usage was reduced, so its prompt tokens are not learned
        from.
        """
        size = demand.texture.size
        self._completion += _WEIGHT * (usage.completion_tokens - self._completion)
        if cut_down or not size or not usage.prompt_tokens:
            return False
        ratio = min(1.0, usage.prompt_tokens / size)
        if bytes_sent:
            self._per_byte += _WEIGHT * (min(1.0, usage.prompt_tokens / bytes_sent) - self._per_byte)
        seen = self._kinds.get(demand.kind)
        if seen is None:
            if len(self._kinds) >= _KINDS:
                del self._kinds[next(iter(self._kinds))]
            seen = self._kinds[demand.kind] = _Seen()
            self._changed()
        before = seen.most
        rose = seen.note(ratio)
        if seen.most != before or seen.count == ENOUGH:
            self._changed()
        return rose

    def _changed(self) -> None:
        """Use no result again that depends on the tokens per byte of a kind."""
        self._alike.clear()
        self.state = object()

    def _by_similar_kind(self, kind: Kind) -> tuple[float, int]:
        """The most tokens per byte, and further tokens, of a kind that is not known, by the most similar known one."""
        found = self._alike.get(kind)
        if found is None:
            found = (1.0, 0)
            best = 1.0
            for other, seen in self._kinds.items():
                steps = _difference(kind, other)
                if seen.count >= ENOUGH and steps <= _ALIKE:
                    apart = (steps + 1) / SHARES
                    longer = other[0] > kind[0]
                    if apart + _LONGER * longer < best:
                        best = apart + _LONGER * longer
                        found = (min(1.0, seen.most + apart), _LONG_TEMPLATE if longer else 0)
            self._alike[kind] = found
        return found

    def _most_completion(self, demand: Demand) -> float:
        return (demand.completion or _UNBOUNDED_COMPLETION) * (1 + self._beyond.value) + _COMPLETION_SLACK


class _Seen:
    """Tokens per byte of the recent answers to texts of one kind. `most` is the estimate for the next text."""

    __slots__ = ("_highest", "_ratios", "count", "most")

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=_RECENT)
        self._highest = 0.0
        self.count = 0
        self.most = 1.0

    def note(self, ratio: float) -> bool:
        ratios = self._ratios
        forgotten = ratios[0] if len(ratios) == _RECENT else 0.0
        ratios.append(ratio)
        # A search through all of them is only needed when the highest is forgotten, and the new one is lower.
        self._highest = max(ratios) if ratio < self._highest <= forgotten else max(self._highest, ratio)
        self.count += 1
        before, highest = self.most, self._highest
        spread = highest * len(ratios) / sum(ratios) - 1
        estimate = highest * max(MARGIN + spread / 2, 1 + _FEW / self.count)
        most = min(1.0, math.ceil(estimate * _LEVELS) / _LEVELS)
        if most > before or most < _LOWERED * before:
            self.most = most
        return most > before and self.count > ENOUGH


class _Repeated:
    """The largest number that `_WITNESSES` of the last `_STATED` replies reached, at most `most`. No single reply
    changes it.
    """

    __slots__ = ("_most", "_stated", "value")

    def __init__(self, most: float) -> None:
        self._most = most
        self._stated: deque[float] = deque(maxlen=_STATED)
        self.value = 0.0

    def note(self, stated: float) -> bool:
        """Note what a reply states; return whether that changes `value`."""
        if stated <= 0 and not self.value:
            # Nearly all replies state no more than expected. They need no sorting.
            self._stated.append(0.0)
            return False
        before = self.value
        self._stated.append(min(max(0.0, stated), self._most))
        if len(self._stated) >= _WITNESSES:
            self.value = sorted(self._stated)[-_WITNESSES]
        return self.value != before


def _difference(kind: Kind, other: Kind) -> int:
    """By how many parts of `SHARES` the shares of `kind` exceed those of `other`, summed over all classes."""
    more = sum(max(0, mine - its) for mine, its in zip(kind[1:], other[1:], strict=True))
    light = sum(other[1:]) - sum(kind[1:])
    return more + max(0, light)
