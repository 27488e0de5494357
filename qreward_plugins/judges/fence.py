"""Puts a fence around untrusted text: two markers with a nonce that is drawn for each call.

A judge model reads text of the policy, and the policy is rewarded for text that raises its score. The fence marks where
that text begins and ends. The policy cannot guess the nonce, and a nonce that occurs in the text is redrawn. The judge
server of `qreward_plugins.testing` reads the same markers to find the text to score, so both use this module.

`control_tokens` neutralises control tokens of chat templates (`<|im_start|>`, `[INST]`, ...) in the text. Otherwise a
server that applies the chat template to our message could take them for new turns.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping

NONCE_LENGTH = 12

_MARKER = re.compile(
    rf"<<<(?P<label>[a-z][a-z0-9_]*) (?P<nonce>[0-9a-f]{{{NONCE_LENGTH}}})>>>\n"
    r"(?P<text>.*?)"
    r"\n<<<end (?P=label) (?P=nonce)>>>",
    re.DOTALL,
)


def draw_nonce(key: bytes, *texts: str, attempt: int = 0) -> str:
    """Draw the nonce of one attempt: `NONCE_LENGTH` lower-case hex digits that occur in none of `texts`.

    The nonce is a keyed hash (BLAKE2b, RFC 7693) of the texts and the attempt number. So it does not depend on the
    order in which samples are scheduled, and it cannot be guessed without `key`.
    """
    pieces: list[bytes] = []
    for text in texts:
        encoded = text.encode("utf-8", "surrogatepass")
        pieces += (len(encoded).to_bytes(8, "big"), encoded)
    pieces.append(attempt.to_bytes(4, "big"))
    hashed, counter = b"".join(pieces), 0
    while True:
        drawn = hashed + counter.to_bytes(4, "big")
        nonce = hashlib.blake2b(drawn, key=key[:64], digest_size=NONCE_LENGTH // 2).hexdigest()
        if not occurs_in(nonce, texts):
            return nonce
        counter += 1


def occurs_in(nonce: str, texts: Iterable[str]) -> bool:
    """Whether one of `texts` contains `nonce`."""
    return nonce in "\n".join(texts)


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
    """Find the fenced blocks of a judge prompt. Return their nonce, and the text of each label.

    Returns `(None, {})` if there is no fence. Blocks with another nonce than the first one are ignored.
    """
    nonce: str | None = None
    blocks: dict[str, str] = {}
    for match in _MARKER.finditer(text):
        if nonce is None:
            nonce = match["nonce"]
        if match["nonce"] == nonce:
            blocks.setdefault(match["label"], match["text"])
    return nonce, blocks
