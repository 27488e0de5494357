"""How Megatron pads a vocabulary; a vocabulary of the tests needs no padding."""

from __future__ import annotations


def vocab_size_with_padding(vocab_size: int, args: object) -> int:
    return vocab_size
