"""Reads a successful reply of a chat-completions server.

Compatible servers differ in their details: some put errors inside a 200, some send a list of parts instead of a text,
and some send `null` after reasoning used up all tokens. A completion without an answer is a `TransientError` and not an
invalid verdict, because another try may help.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..errors import InvalidReply, QRewardError
from .base import Reply
from .rate_limit_headers import announced_limits
from .replies import Answer, Problem, name_of, usage_of

_BROKEN_OFF = ("error", "abort", "aborted", "cancelled")
"""Values of `finish_reason` for a fault of the provider, which does not depend on the question."""
_THOUGHT = re.compile("think|thought|reason", re.IGNORECASE)
"""What is in the type of a part that holds thoughts: `thinking` (Mistral, Cohere), `reasoning`, `reasoning_text`."""
_FILTERED = ("content_filter", "refusal")
"""Values of `finish_reason` for an answer that was withheld because of the question; the judge rejects those."""


class CompletionAnswer(Answer):
    """One HTTP reply to a chat completion request."""

    __slots__ = ()

    def read_content(self, body: Mapping[str, Any]) -> Reply | QRewardError:
        choices = body.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if isinstance(choice, dict) and choice.get("error"):
            return self.error_of(Problem.of(choice))
        message = choice.get("message") if isinstance(choice, dict) else None
        if not isinstance(choice, dict) or not isinstance(message, dict):
            return self.unreadable("no choices[0].message", self.http.body)
        ended = name_of(choice.get("finish_reason"))
        if ended.lower() in _BROKEN_OFF:
            return self.unreadable(f"a reply that the provider broke off (finish_reason {ended!r})")
        usage = usage_of(body.get("usage"))
        text, refusal = _text(message.get("content"))
        if text is None:
            return self.unreadable("a message content of the wrong type", self.http.body)
        refusal = refusal or name_of(message.get("refusal"))
        if refusal and not text:
            return InvalidReply(f"source {self.name!r} refused to judge: {self.redactor.of(refusal)}")
        thinking = _thinking(message)
        unanswered = not text.strip() and (message.get("content") is None or thinking)
        # A reply that ended in its thoughts is no fault of the source: the judge says which number to raise.
        ended_in_thoughts = ended == "length" and (thinking or (usage and usage.thinking_tokens))
        if unanswered and not ended_in_thoughts and ended.lower() not in _FILTERED:
            what = "reasoning and no answer" if thinking else "a content of null"
            return self.unreadable(f"{what} (finish_reason {ended or 'null'!r})")
        return Reply(
            text=text,
            thinking=thinking,
            usage=usage,
            model=name_of(body.get("model")),
            finish_reason=ended,
            announced=announced_limits(self.http.headers),
        )


def _thinking(message: Mapping[str, Any]) -> str:
    """Return the reasoning beside a message's content; "..." if it is not readable. Servers use several keys for it."""
    for key in ("reasoning_content", "reasoning", "reasoning_details"):
        stated = message.get(key)
        if stated:
            return stated if isinstance(stated, str) else "..."
    content = message.get("content")
    return "..." if isinstance(content, list) and has_thoughts(content) else ""


def _text(content: Any) -> tuple[str | None, str]:
    """Return the text and the refusal in a message's content; the text is None if the type is unknown."""
    if content is None:
        return "", ""
    if isinstance(content, str):
        return content, ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return None, ""
    refusals = [part["refusal"] for part in content if isinstance(part.get("refusal"), str)]
    return text_of_parts(content), "".join(refusals)


def text_of_parts(parts: list[dict[str, Any]]) -> str:
    """Return the answer in the parts of a content. Thoughts may be such parts, too; a verdict in them is a draft."""
    return "".join(part["text"] for part in parts if isinstance(part.get("text"), str) and not _is_thought(part))


def has_thoughts(parts: list[Any]) -> bool:
    """Whether thoughts are among the parts of a content."""
    return any(isinstance(part, dict) and _is_thought(part) for part in parts)


def _is_thought(part: Mapping[str, Any]) -> bool:
    kind = part.get("type")
    return isinstance(kind, str) and _THOUGHT.search(kind) is not None
