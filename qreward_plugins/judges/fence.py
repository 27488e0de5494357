"""The fence around untrusted text, in one place because two sides must agree on it.

A judge shows a model text that the policy under training wrote, and the policy is rewarded for whatever makes the
judge generous. So the text stands between two markers that carry an identifier drawn for this one call, which the text
cannot have guessed, and which is redrawn should the text contain it anyway. The judge server of
`qreward_plugins.testing` reads the same markers to find what it has to score.

Control tokens of chat templates (`<|im_start|>`, `[INST]`, ...) inside the text are neutralised by `control_tokens`: a
server that renders the chat template over our message would otherwise take them for turns of their own.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

NONCE_LENGTH = 12

_MARKER = re.compile(
    rf"<<<(?P<label>[a-z][a-z0-9_]*) (?P<nonce>[0-9a-f]{{{NONCE_LENGTH}}})>>>\n"
    r"(?P<text>.*?)"
    r"\n<<<end (?P=label) (?P=nonce)>>>",
    re.DOTALL,
)


def draw_nonce(key: bytes, *texts: str, attempt: int = 0) -> str:
    """Draw the identifier of one judge call: `NONCE_LENGTH` lower-case hex digits that occur in none of `texts`.

    The identifier is a keyed hash (BLAKE2b, RFC 7693) of the texts and the attempt number, so that it depends neither
    on the order in which samples are scheduled nor on anything a policy can see: who does not know `key` cannot guess
    it.
    """
    digest = hashlib.blake2b(key=key[:64], digest_size=NONCE_LENGTH // 2)
    for text in texts:
        encoded = text.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "big"))
        digest.update(encoded)
    counter = 0
    while True:
        candidate = digest.copy()
        candidate.update(attempt.to_bytes(4, "big") + counter.to_bytes(4, "big"))
        nonce = candidate.hexdigest()
        if not any(nonce in text for text in texts):
            return nonce
        counter += 1


def cap(text: str, max_chars: int) -> str:
    """Keep the first and last part of `text`, at most `max_chars` characters of it, and say what was left out
    between.
    """
    if len(text) <= max_chars:
        return text
    head = max_chars // 2
    tail = max_chars - head
    left_out = len(text) - max_chars
    return f"{text[:head]}\n[... {left_out} characters left out here by the judge's size cap ...]\n{text[-tail:]}"


def fence(label: str, text: str, nonce: str) -> str:
    """Return `text` between markers that carry `nonce`; capping and neutralising it is up to the caller."""
    return f"<<<{label} {nonce}>>>\n{text}\n<<<end {label} {nonce}>>>"


def read_fences(text: str) -> tuple[str | None, Mapping[str, str]]:
    """Find the fenced blocks of a judge prompt: the nonce they share, and the text of each label.

    Returns `(None, {})` where there is no fence. Only blocks that carry the nonce of the first one count.
    """
    nonce: str | None = None
    blocks: dict[str, str] = {}
    for match in _MARKER.finditer(text):
        if nonce is None:
            nonce = match["nonce"]
        if match["nonce"] == nonce:
            blocks.setdefault(match["label"], match["text"])
    return nonce, blocks
