"""Whole-engine tests leave no thread behind."""

from __future__ import annotations

from ..kit import no_thread_left  # noqa: F401 -- holds for each test
