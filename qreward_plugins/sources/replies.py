"""Turns an HTTP reply into a `Reply` or an error that tells the scheduler what to do next.

This module holds what all kinds of server share: the meaning of a status and of an error object. It decides by status
and codes, never by searching the text of a message, and checks the type of every value. Each kind of source defines how
a successful reply is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import orjson
from yarl import URL

from ..errors import InvalidReply, PermanentError, QRewardError, SourceUnusable, Throttled, TransientError
from ..samples.spent import Usage
from ..secrets import Redactor
from .base import Logprobs, Reply, Request, Source
from .http import HTTPReply
from .rate_limit_headers import announced_limits, pause_of, retry_after_s

if TYPE_CHECKING:
    from .bodies import Lists

_UNUSABLE = {
    401: "the key is missing or was refused; check api_key or api_key_env",
    402: "the account has no credit",
    403: "the key has no permission",
    404: "unknown URL or model",
    405: "this URL does not accept POST",
    407: "the proxy wants credentials",
}
_VERSION = re.compile(r"/v[0-9]")
_TRANSIENT = (408, 409, 425)
_BUSY = (503, 529)
_OUT_OF_CREDIT = ("insufficient_quota", "billing_hard_limit_reached", "billing_not_active", "billing_error")
_THROTTLED = ("rate_limit_exceeded", "rate_limit_error", "too_many_requests", "resource_exhausted")
_REFUSED = (
    "content_filter",
    "content_policy_violation",
    "responsibleaipolicyviolation",
    "invalid_prompt",
    "bio_policy",
    "misalignment_policy_violation",
    "image_content_policy_violation",
)
_KEY_REFUSED = ("api_key_invalid", "authentication_error", "unauthenticated")
_UNSUPPORTED = ("unsupported_parameter", "unsupported_value")
_MOST_TOKENS = 10**9
_LONGEST_NAME_CHARS = 200
_MOST_SAID_BYTES = 2**16
_MOST_TOKENS_READ = 8
_MOST_LIKELY = 100


# Not frozen: it is made for every reply, and a frozen one takes three times as long.
@dataclass(slots=True, eq=False)
class Answer:
    """One HTTP reply of the source `name` at `url` for `model`. `url_key` is the configuration key of the URL."""

    name: str
    url: URL
    model: str
    url_key: str
    http: HTTPReply
    redactor: Redactor

    def reply(self) -> Reply:
        """Return a new `Reply`, which its source completes.

        Raises InvalidReply for an answer that cannot be a verdict (a refusal); Throttled, SourceUnusable or
        PermanentError according to the status or an error object; TransientError for a reply that cannot be read.
        """
        outcome = self._no_answer() or self.read()
        if isinstance(outcome, Reply):
            return outcome
        # Raised only here, so that no frame of the traceback holds a part of the reply.
        raise self._said(outcome)

    def _said(self, error: QRewardError) -> QRewardError:
        """Note on an error what the server said, without secrets."""
        said = self.http.body[:_MOST_SAID_BYTES].decode("utf-8", "replace")
        error.said = self.redactor.strike_out(said)
        return error

    def _no_answer(self) -> QRewardError | None:
        """Return the error of a reply that holds no answer; None for one that has to be read."""
        if not 200 <= self.http.status < 300:
            return self.of_status(self.http.status, Problem.of(json_of(self.http.body)))
        body = self.http.body
        return self.unreadable("an empty body") if not body or body.isspace() else None

    def replies(self, lists: Lists, requests: Sequence[Request], source: Source) -> Sequence[Reply | QRewardError]:
        """Return the reply or the error of each of several requests that were sent as one.

        Raises what `reply` raises, if it concerns all of them, and InvalidReply if the results cannot be matched.
        """
        outcome = self._understand_all(lists, requests, source)
        if isinstance(outcome, QRewardError):
            raise self._said(outcome)
        return [self._said(each) if isinstance(each, QRewardError) else each for each in outcome]

    def _understand_all(
        self, lists: Lists, requests: Sequence[Request], source: Source
    ) -> Sequence[Reply | QRewardError] | QRewardError:
        content = self._no_answer() or self.parsed()
        if isinstance(content, QRewardError):
            return content
        parts = lists.take_apart(content, len(requests))
        if isinstance(parts, str):
            problem = f"source {self.name!r} ({self.url}) answered several calls with {parts}"
            return InvalidReply(f"{problem}; each is asked again alone")
        replies = [self.read_content(part) for part in parts]
        usage = self.usage_in(content)
        if usage is None:
            return replies
        shares = lists.divided(usage, requests, source)
        return [
            replace(reply, usage=share) if isinstance(reply, Reply) else reply
            for reply, share in zip(replies, shares, strict=True)
        ]

    def usage_in(self, content: Any) -> Usage | None:
        """Return the usage of all requests together; None if it is not stated, or stated for each of them."""
        return usage_of(content.get("usage")) if isinstance(content, dict) else None

    def replied(self, content: Any, **fields: Any) -> Reply:
        """Return a `Reply` with these fields, and with what a content states in any format: usage, model and limits."""
        stated = content if isinstance(content, dict) else {}
        model = name_of(stated.get("model") or stated.get("modelVersion"))
        return Reply(usage=self.usage_in(content), model=model, announced=announced_limits(self.http.headers), **fields)

    def refused(self, why: str) -> InvalidReply:
        """Return the error for an answer that is a refusal. `why` is what the model says."""
        return InvalidReply(f"source {self.name!r} refused to judge: {self.redactor.of(why)}")

    def read(self) -> Reply | QRewardError:
        """Read the non-empty body of a reply with a 2xx status. Return errors instead of raising them, so that no
        traceback holds a part of the reply. Default: `parsed`, then `read_content`.
        """
        content = self.parsed()
        return content if isinstance(content, QRewardError) else self.read_content(content)

    def parsed(self) -> Any:
        """Return the content of the body, or the error that it is. Default: a JSON object that states no error."""
        content = self.json()
        if not isinstance(content, dict):
            return self.unreadable(f"{self.content_type()} that is not a JSON object", self.http.body)
        if content.get("error") or content.get("type") == "error":
            return self.error_of(Problem.of(content))
        return content

    def json(self) -> Any:
        """Return the body, parsed as JSON; None if it is not JSON."""
        return json_of(self.http.body)

    def read_content(self, content: Any) -> Reply | QRewardError:
        """Read what `parsed` returned; of a reply to several calls, one of the parts that `Lists.parts` returned. Each
        class overrides this or, if it takes one call in a request, `read`.
        """
        raise NotImplementedError(f"{type(self).__name__} defines neither `read` nor `read_content`")

    def error_of(self, problem: Problem) -> QRewardError:
        """Return the error for a problem that the body states. The status of the reply may be 200."""
        if problem.status is not None and problem.status >= 400:
            return self.of_status(problem.status, problem)
        if problem.has(_OUT_OF_CREDIT) or problem.has(_THROTTLED):
            return self.of_status(429, problem)
        if problem.has(_REFUSED):
            return self.of_status(400, problem)
        return TransientError(self._says("answered with an error", problem), status=self.http.status)

    def of_status(self, status: int, problem: Problem) -> QRewardError:
        """Return the error for a status. A kind overrides it if its servers use a status differently."""
        pause_s = retry_after_s(self.http.headers)
        if pause_s is None:
            pause_s = problem.retry_after_s
        if problem.has(_OUT_OF_CREDIT):
            return SourceUnusable(
                self._says(f"answered {status}: the account is out of credit", problem), status=status
            )
        if status == 429 or (status in _BUSY and pause_s is not None):
            return Throttled(self._says(f"answered {status}", problem), status=status, retry_after_s=pause_s)
        if problem.has(_REFUSED) and status < 500:
            detail = problem.message and f": {self.redactor.of(problem.message)}"
            return InvalidReply(f"source {self.name!r} refused the prompt (content filter){detail}")
        if status == 404 and problem.has(("model_not_found",)):
            text = f"answered 404: unknown model {self.model!r}"
            return SourceUnusable(self._says(text, problem), status=status)
        if status == 400 and problem.has(_KEY_REFUSED):
            return SourceUnusable(self._says(f"answered {status}: {_UNUSABLE[401]}", problem), status=status)
        if status in _UNUSABLE:
            text = f"answered {status}: {_UNUSABLE[status]}{self._hint(status)}"
            return SourceUnusable(self._says(text, problem), status=status)
        if 300 <= status < 400:
            # Every request gets the same redirect, so the configuration is wrong.
            text = f"answered {status}, a redirect; redirects are not followed, change {self.url_key}"
            return SourceUnusable(self._says(text, problem), status=status)
        if status in _TRANSIENT or status >= 500:
            return TransientError(self._says(f"answered {status}", problem), status=status)
        hint = ""
        if problem.has(_UNSUPPORTED) and self.url_key == "base_url":
            hint = (
                "; a reasoning model of OpenAI needs dialect: openai_reasoning; parameters: {KEY: null} removes a key"
            )
        return PermanentError(self._says(f"answered {status}{hint}", problem), status=status)

    def _hint(self, status: int) -> str:
        """Return a hint on the most frequent mistake in the URL, or "". Default: that of a chat-completions server."""
        if status in (404, 405) and self.url_key == "base_url" and not _VERSION.search(self.url.path):
            return "; most servers want a base_url that ends in /v1"
        return ""

    def _says(self, text: str, problem: Problem) -> str:
        detail = self.redactor.of(problem.message or self.http.body)
        return f"source {self.name!r} ({self.url}) {text}" + (f" ({detail})" if detail else "")

    def content_type(self) -> str:
        kind = self.http.headers.get("Content-Type", "").partition(";")[0].strip() or "no content type"
        page = f" (a web page; check {self.url_key})" if kind.lower() == "text/html" else ""
        return self.redactor.of(kind, 80) + page

    def unreadable(self, what: str, body: bytes = b"") -> TransientError:
        """Return the error for a reply that cannot be read. `what` describes it, `body` is quoted briefly."""
        detail = self.redactor.of(body)
        text = f"source {self.name!r} ({self.url}) answered {self.http.status} with {self.redactor.of(what)}"
        return TransientError(text + (f": {detail}" if detail else ""), status=self.http.status)


@dataclass(frozen=True, slots=True)
class Problem:
    """An error object of a server: its message, its codes in lower case, the status among its codes, and the pause in
    seconds that it asks for.
    """

    message: str = ""
    codes: frozenset[str] = frozenset()
    status: int | None = None
    retry_after_s: float | None = None

    @classmethod
    def of(cls, body: Any) -> Problem:
        # {"error": {...}} (OpenAI, Anthropic, Google), {"error": "..."}, {"detail": ...} (FastAPI), the object itself
        # (older vLLM), or a list of one (Google).
        if isinstance(body, list) and len(body) == 1:
            body = body[0]
        if not isinstance(body, dict):
            return cls()
        error = body.get("error") or body
        if not isinstance(error, dict):
            return cls(message=error) if isinstance(error, str) else cls()
        inner = error.get("innererror")
        details = error.get("details")
        details = [detail for detail in details if isinstance(detail, dict)] if isinstance(details, list) else []
        named = [error.get("code"), error.get("type"), inner.get("code") if isinstance(inner, dict) else None]
        named += [name_of(error.get("status")) or None, *(detail.get("reason") for detail in details)]
        codes = frozenset(str(code).lower() for code in named if isinstance(code, (str, int)))
        statuses = [int(code) for code in sorted(codes) if len(code) == 3 and code.isascii() and code.isdecimal()]
        message = error.get("message") or error.get("detail")
        delays = [delay for detail in details if (delay := pause_of(detail.get("retryDelay"))) is not None]
        return cls(
            message if isinstance(message, str) else "",
            codes,
            statuses[0] if statuses else None,
            max(delays, default=None),
        )

    def has(self, codes: tuple[str, ...]) -> bool:
        return not self.codes.isdisjoint(codes)


def json_of(body: bytes) -> Any:
    """Parse a body as JSON; None if it is not JSON."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None


def usage_of(usage: Any, *, prompt: str = "prompt_tokens", completion: str = "completion_tokens") -> Usage | None:
    """Return the tokens that a reply states under these keys; None if they are absent or impossible."""
    if not isinstance(usage, dict):
        return None
    before, after = usage.get(f"{prompt}_details"), usage.get(f"{completion}_details")
    return counted(
        usage.get(prompt),
        usage.get(completion),
        cached=before.get("cached_tokens") if isinstance(before, dict) else None,
        thinking=after.get("reasoning_tokens") if isinstance(after, dict) else None,
    )


def counted(
    prompt: Any,
    completion: Any,
    *,
    further_prompt: tuple[Any, ...] = (),
    further_completion: tuple[Any, ...] = (),
    cached: Any = None,
    thinking: Any = None,
) -> Usage | None:
    """Return the usage with these figures; None if `prompt` or `completion` is absent or impossible.

    `further_prompt` and `further_completion` are added, where they are stated. `cached` and `thinking` are parts of the
    sums. A further figure that is absent or impossible counts as 0.
    """
    prompt, completion = _count(prompt), _count(completion)
    if prompt is None or completion is None:
        return None
    for more in further_prompt:
        prompt += _count(more) or 0
    for more in further_completion:
        completion += _count(more) or 0
    if cached is None and thinking is None:
        return Usage(prompt, completion)
    return Usage(prompt, completion, min(_count(cached) or 0, prompt), min(_count(thinking) or 0, completion))


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= _MOST_TOKENS else None


def logprobs_of(tokens: Any, likely: Any) -> Logprobs:
    """Return the first tokens of a reply with the likely ones at their places; () if one of them is
    not of the known form. `likely` holds a list for each of the `tokens`.
    """
    if not isinstance(tokens, list) or not isinstance(likely, list) or len(tokens) != len(likely):
        return ()
    found = []
    for chosen, several in zip(tokens[:_MOST_TOKENS_READ], likely, strict=False):
        if not isinstance(chosen, Mapping) or not isinstance(several, list):
            return ()
        pairs: list[tuple[Any, Any]] = [
            (each.get("token"), each.get("logprob")) for each in several[:_MOST_LIKELY] if isinstance(each, Mapping)
        ]
        if not all(isinstance(name, str) and type(number) in (int, float) for name, number in pairs):
            return ()
        found.append((str(chosen.get("token")), tuple((name, float(number)) for name, number in pairs)))
    return tuple(found)


def name_of(value: Any) -> str:
    """Return a name that a reply states, truncated to 200 characters; "" for a value that is not a text."""
    return value[:_LONGEST_NAME_CHARS] if isinstance(value, str) else ""
