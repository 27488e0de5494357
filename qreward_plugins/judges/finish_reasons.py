"""Decides from the `finish_reason` of a completion whether the model finished its answer.

Servers use different words. Known words are recognised by a part of them. Unknown words count as finished:

- cut off: length (OpenAI and most), max_tokens (Anthropic), MAX_TOKENS (Gemini, Cohere), model_length (Mistral),
  max_output_tokens, incomplete
- withheld: content_filter (OpenAI, Azure), refusal (Anthropic), safety, blocklist, recitation, spii, prohibited_content
  (Gemini), sensitive (Zhipu), error_toxic (Cohere)
- broken: error (OpenRouter, vLLM), abort (vLLM, SGLang), repetition (vLLM), network_error (Zhipu),
  insufficient_system_resource (DeepSeek), malformed_... (Gemini), cancelled, timeout

A verdict in an unfinished reply may be a draft or half of the answer, so it does not count.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal

_CUT_OFF = re.compile(r"length|max_?(?:\w+_)?tokens|incomplete|truncated|token_limit|error_limit")
_WITHHELD = re.compile(r"filter|safety|refus|sensitive|block|recitation|spii|prohibited|toxic|moderat|guardrail|policy")
_BROKEN = re.compile(
    r"error|abort|cancel|time_?out|insufficient|repetition|malformed|interrupt|fail|unavailable|overload"
)


@lru_cache(64)
def why_no_verdict(finish_reason: str) -> Literal["", "cut off", "withheld", "broken"]:
    """Return why a reply with this `finish_reason` cannot hold a verdict, or "" if it can."""
    reason = finish_reason.strip().lower().replace("-", "_").replace(" ", "_")
    if _CUT_OFF.search(reason):
        return "cut off"
    if _WITHHELD.search(reason):
        return "withheld"
    return "broken" if _BROKEN.search(reason) else ""
