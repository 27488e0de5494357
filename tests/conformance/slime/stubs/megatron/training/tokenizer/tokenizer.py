"""How Megatron pads a vocabulary, under the name that slime v0.3.1 falls back to."""

from __future__ import annotations


def _vocab_size_with_padding(vocab_size: int, args: object) -> int:
    return vocab_size
