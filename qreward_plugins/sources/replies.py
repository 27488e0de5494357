"""Turns an HTTP reply into a `Reply` or an error that tells the scheduler what to do next.

This module holds what all kinds of server share: the meaning of a status and of an error object. It decides by status
and codes, never by searching the text of a message, and checks the type of every value. Each kind of source defines how
a successful reply is read.

Vendors state limits and pauses in different formats (seconds, `6m0s`, milliseconds, HTTP dates, RFC 3339), and a wrong
reading pauses a source for hours or not at all. A value that cannot be parsed is therefore ignored, and every other
value is clamped. Dates are compared with the `Date` header of the same reply, because the server's clock may differ
from ours.

Sources: RFC 9110 section 10.2.3 (Retry-After), draft-ietf-httpapi-ratelimit-headers, and the vendors' own descriptions
of `x-ratelimit-*` and `anthropic-ratelimit-*`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any

import orjson
from yarl import URL

from ..errors import InvalidReply, PermanentError, QRewardError, SourceUnusable, Throttled, TransientError
from ..samples.spent import Usage
from ..secrets import Redactor
from .base import Reply
from .http import HTTPReply

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

LONGEST_PAUSE_S = 300.0
"""The longest pause that a server can ask for, in seconds. A longer one is cut to this."""

_LONGEST_WINDOW_S = 86_400.0
_LONGEST_VALUE_CHARS = 64
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|[dhms]))+")
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[dhms])")
_UNITS_S = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0, "ms": 0.001}

_FACTS = {"limit": "per_window", "remaining": "remaining", "reset": "reset_s"}
# The most specific spelling comes first; the last one counts requests, although its name does not say so.
_SPELLINGS = (
    ("requests", "x-ratelimit-{fact}-requests"),
    ("tokens", "x-ratelimit-{fact}-tokens"),
    ("requests", "anthropic-ratelimit-requests-{fact}"),
    ("tokens", "anthropic-ratelimit-tokens-{fact}"),
    ("requests", "ratelimit-{fact}"),
)


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
        outcome = self.no_answer() or self.read()
        if isinstance(outcome, Reply):
            return outcome
        # Raised only here, so that no frame of the traceback holds a part of the reply.
        raise self.noted(outcome)

    def noted(self, error: QRewardError) -> QRewardError:
        """Note on an error what the server said, without secrets, and return it."""
        said = self.http.body[:_MOST_SAID_BYTES].decode("utf-8", "replace")
        error.said = self.redactor.strike_out(said)
        return error

    def no_answer(self) -> QRewardError | None:
        """Return the error of a reply that holds no answer; None for one that has to be read."""
        if not 200 <= self.http.status < 300:
            return self.of_status(self.http.status, Problem.of(json_of(self.http.body)))
        body = self.http.body
        return self.unreadable("an empty body") if not body or body.isspace() else None

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
        return PermanentError(self._says(f"answered {status}{self._remedy(problem)}", problem), status=status)

    def _remedy(self, problem: Problem) -> str:
        """Return what to change in a request that a chat-completions server does not take, or ""."""
        if self.url_key != "base_url":
            return ""
        if problem.has(_UNSUPPORTED) or "max_completion_tokens" in problem.message:
            return (
                "; a reasoning model of OpenAI needs dialect: openai_reasoning; parameters: {KEY: null} removes a key"
            )
        return "; set response_format: none for this judge" if "response_format" in problem.message else ""

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


def name_of(value: Any) -> str:
    """Return a name that a reply states, truncated to 200 characters; "" for a value that is not a text."""
    return value[:_LONGEST_NAME_CHARS] if isinstance(value, str) else ""


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the pause that a reply asks for in seconds, from 0 to 300; None if it asks for none or is not readable.

    `retry-after-ms` wins over `Retry-After` (seconds or an HTTP date). Without either, the reset of a limit with
    nothing remaining is taken. `headers` must ignore case.
    """
    milliseconds = _number(_value(headers, "retry-after-ms"))
    if milliseconds is not None:
        return min(milliseconds / 1000, LONGEST_PAUSE_S)
    stated = _value(headers, "retry-after")
    pause_s = _number(stated)
    if pause_s is None and stated:
        pause_s = _until(_http_date(stated), headers)
    if pause_s is None:
        limits = announced_limits(headers)
        resets = [
            limits[f"{what}_reset_s"]
            for what in ("requests", "tokens")
            if limits.get(f"{what}_remaining") == 0 and f"{what}_reset_s" in limits
        ]
        pause_s = max(resets, default=None)
    return None if pause_s is None else min(pause_s, LONGEST_PAUSE_S)


def pause_of(stated: object) -> float | None:
    """Return a duration such as "34.07s", as Google states it in the body of an error (`RetryInfo.retryDelay`), in
    seconds from 0 to 300; None if it is not readable.
    """
    if not isinstance(stated, str) or len(stated) > _LONGEST_VALUE_CHARS or not stated.isascii():
        return None
    return min(_duration_s(stated), LONGEST_PAUSE_S) if _DURATION.fullmatch(stated) else None


def announced_limits(headers: Mapping[str, str]) -> dict[str, float]:
    """Return the limits that a reply states: `requests_per_window`, `requests_remaining`, `requests_reset_s`, and the
    same for `tokens`. Limits that are absent or unreadable are left out. `headers` must ignore case.
    """
    found: dict[str, float] = {}
    if "ratelimit" not in " ".join(headers).lower():
        return found
    for what, spelling in _SPELLINGS:
        for fact, suffix in _FACTS.items():
            key = f"{what}_{suffix}"
            stated = _value(headers, spelling.format(fact=fact))
            if not stated or key in found:
                continue
            number = _reset_s(stated, headers) if fact == "reset" else _number(stated)
            if number is not None and math.isfinite(number):
                found[key] = number
    return found


def _value(headers: Mapping[str, str], name: str) -> str:
    value = headers.get(name, "").strip()
    return value if len(value) <= _LONGEST_VALUE_CHARS else ""


def _number(text: str) -> float | None:
    # float() alone would take "inf", "nan", "1_0" and "-1".
    return float(text) if text.isascii() and _NUMBER.fullmatch(text) else None


def _reset_s(text: str, headers: Mapping[str, str]) -> float | None:
    seconds = _number(text)
    if seconds is None and _DURATION.fullmatch(text):
        seconds = _duration_s(text)
    if seconds is None:
        seconds = _until(_rfc3339(text), headers)
    # A larger number is a point in time, in an unknown unit.
    return seconds if seconds is not None and seconds <= _LONGEST_WINDOW_S else None


def _duration_s(text: str) -> float:
    return sum(float(number) * _UNITS_S[unit] for number, unit in _DURATION_PART.findall(text))


def _until(moment: datetime | None, headers: Mapping[str, str]) -> float | None:
    if moment is None:
        return None
    # The header is a wall-clock time, so it is compared with a wall clock and not with the event loop's time.
    now = _http_date(_value(headers, "date")) or datetime.now(timezone.utc)
    seconds = (moment - now).total_seconds()
    return seconds if seconds >= 0 else None


def _http_date(text: str) -> datetime | None:
    try:
        return _in_utc(parsedate_to_datetime(text))
    except (TypeError, ValueError, IndexError, OverflowError):
        return None


def _rfc3339(text: str) -> datetime | None:
    try:
        # Python 3.10 does not read the "Z".
        return _in_utc(datetime.fromisoformat(text[:-1] + "+00:00" if text[-1] in "Zz" else text))
    except (ValueError, OverflowError):
        return None


def _in_utc(moment: datetime) -> datetime:
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=timezone.utc)
