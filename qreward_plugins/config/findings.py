"""A mistake on its way to the user, and the words that messages have in common.

A message may show a name that is near an allowed one or looks like one (`is_plain_key`), a number or a boolean, and
never another text: any text may be a key in the wrong place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import NamedTuple, TypeAlias

Path: TypeAlias = tuple[str | int, ...]

SHOWN_CHARS = 60
"""Longest name in a message, in characters."""

_LONGEST_KEY_CHARS = 40
_LONGEST_KEY_WITH_DIGITS = 16
"""A longer name with digits may be an API key in the wrong place."""
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


class Finding(NamedTuple):
    """One mistake at `path`. `problem` has no full stop at its end; `remedy` is a sentence."""

    path: Path
    problem: str
    remedy: str = ""


def path_text(path: Path) -> str:
    """Write a path as in `sources.fast.base_url[1]` or `routes["math/*"]`."""
    text = ""
    for key in path:
        if isinstance(key, int):
            text += f"[{key}]"
        elif _PLAIN_KEY.fullmatch(key):
            text += f".{cut(key)}" if text else cut(key)
        else:
            text += f"[{json.dumps(cut(key), ensure_ascii=False)}]"
    return text


def is_plain_key(key: str) -> bool:
    """Whether an unknown key or name looks like a misspelt one, and may be shown. Any other text may be a line of
    another file, with secrets in it.
    """
    if len(key) > _LONGEST_KEY_WITH_DIGITS and any(map(str.isdigit, key)):
        return False
    return len(key) <= _LONGEST_KEY_CHARS and _PLAIN_KEY.fullmatch(key.replace(" ", "_")) is not None


def cut(text: str) -> str:
    """Shorten a text for a message."""
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 1]}…"


def listed(names: Iterable[str]) -> str:
    """Write names for a message, ten at most."""
    shown = [f"`{cut(name)}`" for name in names]
    return ", ".join(shown[:10]) + (f" and {len(shown) - 10} more" if len(shown) > 10 else "")


def nearest(word: str, words: Iterable[str]) -> str | None:
    """Return the one of `words` that `word` is probably a misspelling of; None if there is none."""
    by_letters = {letters(candidate): candidate for candidate in words}
    own = letters(word)
    if close := get_close_matches(own, by_letters, n=1):
        return by_letters[close[0]]
    holding = [candidate for key, candidate in by_letters.items() if len(own) >= 3 and own in key]
    return holding[0] if len(holding) == 1 else None


def letters(word: str) -> str:
    """Return a word in lower case, without underscores and signs."""
    return re.sub(r"[\W_]", "", word).lower() or word


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Return a sentence that suggests the nearest of `words`, with a space after it; "" if none is near."""
    near = nearest(word, words)
    return f"Did you mean `{cut(near)}`? " if near is not None else ""


def _habits() -> dict[str, list[tuple[str, ...]]]:
    found: dict[str, list[tuple[str, ...]]] = {}
    for line in _OF_OTHER_TOOLS.strip().split("\n"):
        path, words = line.split(":")
        for word in words.split():
            found.setdefault(letters(word), []).append(tuple(path.strip().split(".")))
    return found


_OF_OTHER_TOOLS = """
    base_url: url api_base endpoint host address
    url: base_url api_base endpoint host address
    model: model_name model_id deployment model_path
    api_key: key token auth_token api_token
    api_key_env: api_keys api_key_file key_file
    headers: extra_headers default_headers
    parameters: extra_body params generation_config sampling_params options temperature max_tokens top_p
    limits.requests_per_minute: rpm rate_limit qps rps
    limits.tokens_per_minute: tpm token_limit
    limits.concurrency: max_concurrency max_concurrent concurrent_requests max_parallel
    timeouts.total_s: timeout timeout_s timeout_ms request_timeout
    price.input_per_million: input_price input_cost
    price.output_per_million: output_price output_cost
    verify_tls: verify_ssl ssl_verify
    httpx.proxy: http_proxy https_proxy
    batch.max_size: batch_size
    function: path callable fn reward_fn
    kwargs: args reward_kwargs
    data_parallel: dp num_replicas replicas
    tensor_parallel: tp tp_size num_gpus
    sources: source model models judge_model endpoints providers
    instructions: prompt template user_prompt judge_prompt
    system: system_prompt
    criteria: dimensions aspects metrics
    score_range: scale range
    show.response: show_thinking
    correct_at: threshold cutoff
    floor: default_score fallback
    invalid_retries: retries max_retries num_retries
    dense: token_level step_rewards
    response_format: json_mode structured_output guided_json
    max_tokens: max_completion_tokens max_new_tokens
    weights: parts components coefficients
    judges: rewards rubrics graders reward_functions
    routes: routing router
    engine.deadline_s: timeout
    engine.max_attempts: retries max_retries attempts
    engine.scheduling.hedge: hedging
    engine.journal.path: cache database journal_path
    engine.budget.usd: budget_usd max_cost
    budget.usd: budget_usd max_cost
"""
HABITS = _habits()
"""The keys that people write by habit, from other tools (as `letters`): the paths of ours that they may mean, below a
source or a judge, or from the top. A hint counts only where its key exists.
"""
