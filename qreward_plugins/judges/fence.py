"""Puts a fence around untrusted text: two markers with a nonce.

A judge model reads text of the policy, and the policy is rewarded for text that raises its score. The fence marks where
that text begins and ends. The nonce of the response is drawn for each call, and the policy cannot guess it. The other
texts, such as the question, have a nonce that follows from them: so the prompts of all responses to a question begin
alike, and a server's prefix cache serves them. It could be computed by the policy, but a nonce that occurs in any of
the texts is redrawn, and no verdict carries it. The judge server of `qreward_plugins.testing` reads the same markers to
find the text to score, so both use this module.

`control_tokens` neutralises control tokens of chat templates (`<|im_start|>`, `[INST]`, ...) in the text. Otherwise a
server that applies the chat template to our message could take them for new turns.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

NONCE_LENGTH = 12

_MARKER = re.compile(
    rf"<<<(?P<label>[a-z][a-z0-9_]*) (?P<nonce>[0-9a-f]{{{NONCE_LENGTH}}})>>>\n"
    r"(?P<text>.*?)"
    r"\n<<<end (?P=label) (?P=nonce)>>>",
    re.DOTALL,
)


_SHARED = b"texts that siblings share"


def draw_nonces(key: bytes, texts: Sequence[str], *, attempt: int, shared: Sequence[int] = ()) -> tuple[str, str]:
    """Draw the nonce of one attempt, and the nonce of the texts at the places `shared`, which siblings have in common:
    each `NONCE_LENGTH` lower-case hex digits that occur in none of `texts`.

    A nonce is a keyed hash (BLAKE2b, RFC 7693). The first is one of `texts` and the attempt number: it does not depend
    on the order in which samples are scheduled, and cannot be guessed without `key`. The other follows from the shared
    texts alone, so it is the same in every process.
    """
    pieces, joined = [_hashed(text) for text in texts], "\n".join(texts)
    nonce = _drawn(key, pieces, attempt, joined)
    return nonce, _drawn(_SHARED, [pieces[place] for place in shared], 0, f"{joined}\n{nonce}")


def _hashed(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogatepass")
    return len(encoded).to_bytes(8, "big") + encoded


def _drawn(key: bytes, pieces: list[bytes], attempt: int, kept_out: str) -> str:
    hashed, counter = b"".join([*pieces, attempt.to_bytes(4, "big")]), 0
    while True:
        drawn = hashed + counter.to_bytes(4, "big")
        nonce = hashlib.blake2b(drawn, key=key[:64], digest_size=NONCE_LENGTH // 2).hexdigest()
        if nonce not in kept_out:
            return nonce
        counter += 1


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
