"""How many tokens a request takes, before its source says so, and what is believed of what the source says then.

An estimate must not be below the truth, or a declared limit breaks. Nothing is known of a tokenizer at first but that
it makes no more tokens than bytes, so that is reserved, and given back as soon as the answer states its usage. What was
answered then lowers the estimate for texts of the same kind (about the same length and the same parts of English,
digits, CJK, emoji, see `Texture`). A kind that few answers are known of is estimated by one much like it, and every
byte by which it differs counts a token: a policy that turns from English to Chinese is reserved a token a byte again,
until answers say what its Chinese takes. Within a kind the most of the recent answers counts, times a margin that
shrinks as there are more of them and they differ less.

What this guarantees: with a tokenizer that makes at most a token a byte, the estimate holds while fewer than `ENOUGH`
answers are known of anything, and later for every text that takes at most `MARGIN` times as many tokens a byte as the
recent ones of its kind did. A text beyond that can take a source over its limit once, by what was under way when its
answer came: then the estimates of what is under way are raised, too.

A server's usage is as little to be trusted as its text: figures that the bytes of the request, or the bound of its
completion, rule out are cut down to what they allow, unless several replies say so (a provider adds a long prompt of
its own, or counts reasoning beyond `max_tokens`).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from typing import TypeAlias

from ..samples import Usage
from ..sources.base import Request, Source
from ..sources.demand import Demand

ENOUGH = 8
"""Answers to texts of a kind from which on they are believed."""
MARGIN = 1.03
"""What texts of a kind may take more than the most of the recent ones; more than that while few were answered, or where
they differ."""

_FIRST_TOKENS_PER_BYTE = 1 / 3
_WEIGHT = 0.05
_RECENT = 64
_KINDS = 1024
_STEPS = 32
_ALIKE = 4
"""By how many of these steps kinds may differ that are alike: digits say nothing of base64."""
_LONG_TEMPLATE = 200
"""Tokens of a chat template that answers to longer texts may hide."""
_STATED = 32
_WITNESSES = 3
_MOST_ADDED = 65_536.0
_MOST_FACTOR = 64.0
_COMPLETION_SLACK = 16
_UNBOUNDED_COMPLETION = 4096
_BYTES_PER_TOKEN_AT_MOST = 128

_Kind: TypeAlias = tuple[int, int, int, int, int]


class TokenEstimates:
    """Estimates for one source, learned from its answers."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._kinds: dict[_Kind, _Seen] = {}
        self._alike: dict[_Kind, tuple[float, int]] = {}
        """What `_by_what_is_alike` found, until something is learned."""
        self._added = _Repeated(_MOST_ADDED)
        self._factor = _Repeated(_MOST_FACTOR)
        self._per_byte = _FIRST_TOKENS_PER_BYTE
        self._completion = 0.0
        self.doubted = False
        """Whether an incredible usage was cut down."""

    def prompt(self, request: Request) -> int:
        """The prompt tokens of `request` at most."""
        demand = request.demand(self._source)
        most = demand.prompt + math.ceil(self._added.value)
        kind = _kind_of(demand)
        seen = self._kinds.get(kind)
        if seen is None or seen.count < ENOUGH:
            per_byte, further = self._by_what_is_alike(kind)
        else:
            per_byte, further = seen.most, 0
        if per_byte >= 1.0:
            return most
        return min(most, math.ceil(per_byte * demand.texture.size) + demand.overhead + further)

    def completion(self, request: Request) -> int:
        """The completion tokens of `request` at most."""
        return math.ceil(request.demand(self._source).completion * max(1.0, self._factor.value))

    def least(self, request: Request) -> int:
        """Tokens that `request` asks for or takes whatever the tokenizer: the completion that its parameters allow, and
        a token for as many bytes as no tokenizer puts into one.
        """
        demand = request.demand(self._source)
        return demand.completion + demand.texture.size // _BYTES_PER_TOKEN_AT_MOST

    def likely(self, size: float) -> float:
        """The tokens that a request of `size` bytes is likely to take, prompt and completion."""
        return size * self._per_byte + self._completion

    def credible(self, request: Request, usage: Usage) -> tuple[Usage | None, bool]:
        """What can be true of a stated `usage`, None where it says nothing, and whether it was cut down."""
        demand = request.demand(self._source)
        if not usage.prompt_tokens and demand.texture.size:
            return None, False  # a server that does not count states zeros
        prompt, completion = demand.prompt + self._added.value, self._most_completion(demand)
        self._added.note(usage.prompt_tokens - demand.prompt)
        if demand.completion:
            self._factor.note(usage.completion_tokens / demand.completion)
        else:
            self._factor.note(usage.completion_tokens / _UNBOUNDED_COMPLETION)
        believed = replace(
            usage,
            prompt_tokens=min(usage.prompt_tokens, math.ceil(prompt)),
            completion_tokens=min(usage.completion_tokens, math.ceil(completion)),
        )
        return believed, believed != usage

    def learn(self, request: Request, usage: Usage, *, cut_down: bool = False) -> bool:
        """Learn from the believed `usage` of an answered request; return whether an estimate rose by that."""
        demand = request.demand(self._source)
        size = demand.texture.size
        self._completion += _WEIGHT * (usage.completion_tokens - self._completion)
        if cut_down or not size or not usage.prompt_tokens:
            return False
        ratio = min(1.0, usage.prompt_tokens / size)
        if request.size:
            self._per_byte += _WEIGHT * (min(1.0, usage.prompt_tokens / request.size) - self._per_byte)
        kind = _kind_of(demand)
        seen = self._kinds.get(kind)
        if seen is None:
            if len(self._kinds) >= _KINDS:
                del self._kinds[next(iter(self._kinds))]
            seen = self._kinds[kind] = _Seen()
        self._alike.clear()
        return seen.note(ratio)

    def _by_what_is_alike(self, kind: _Kind) -> tuple[float, int]:
        """Tokens per byte at most of a kind that little is known of, and further tokens, by the kind most like it."""
        found = self._alike.get(kind)
        if found is None:
            found = (1.0, 0)
            best = 1.0
            for other, seen in self._kinds.items():
                steps = _difference(kind, other)
                if seen.count >= ENOUGH and steps <= _ALIKE:
                    apart = (steps + 1) / _STEPS
                    longer = other[0] > kind[0]
                    if apart + 0.01 * longer < best:
                        best = apart + 0.01 * longer
                        found = (min(1.0, seen.most + apart), _LONG_TEMPLATE if longer else 0)
            self._alike[kind] = found
        return found

    def _most_completion(self, demand: Demand) -> float:
        factor = max(1.0, self._factor.value)
        return (demand.completion or _UNBOUNDED_COMPLETION) * factor + _COMPLETION_SLACK


class _Seen:
    """Tokens per byte of the recent answers to texts of one kind, and the `most` that the next ones are to take."""

    __slots__ = ("_ratios", "count", "most")

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=_RECENT)
        self.count = 0
        self.most = 1.0

    def note(self, ratio: float) -> bool:
        self._ratios.append(ratio)
        self.count += 1
        before, most = self.most, max(self._ratios)
        spread = most * len(self._ratios) / math.fsum(self._ratios) - 1
        self.most = min(1.0, most * max(MARGIN + spread / 2, 1 + 3 / self.count))
        return self.most > before and self.count > ENOUGH


class _Repeated:
    """The most that several of the last replies stated, so that no reply alone changes it; at most `most`."""

    __slots__ = ("_most", "_stated", "value")

    def __init__(self, most: float) -> None:
        self._most = most
        self._stated: deque[float] = deque(maxlen=_STATED)
        self.value = 0.0

    def note(self, stated: float) -> None:
        self._stated.append(min(max(0.0, stated), self._most))
        if len(self._stated) >= _WITNESSES:
            self.value = sorted(self._stated)[-_WITNESSES]


def _kind_of(demand: Demand) -> _Kind:
    """The order of the length (factors of 4), and the parts of the classes of characters in 32nds."""
    texture = demand.texture
    size = texture.size or 1
    return (
        texture.size.bit_length() // 2,
        _STEPS * texture.dense // size,
        _STEPS * texture.two // size,
        _STEPS * texture.three // size,
        _STEPS * texture.four // size,
    )


def _difference(kind: _Kind, other: _Kind) -> int:
    """By how many 32nds the parts of `kind` exceed those of `other`, all classes together."""
    more = sum(max(0, mine - its) for mine, its in zip(kind[1:], other[1:], strict=True))
    light = sum(other[1:]) - sum(kind[1:])
    return more + max(0, light)
