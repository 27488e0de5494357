"""The faults that a judge server can play, by name, and when it plays them.

Every kind was seen at a provider or follows from HTTP. The fault of each admitted request comes from the script until
its end, then from the rates, which are drawn from the server's seed in order of arrival.
"""

from __future__ import annotations

import math
import random
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from typing import Literal


@dataclass(frozen=True)
class Latency:
    """Time between a request and its answer, besides the scorer's own. Raises `ValueError` for invalid values."""

    median_s: float = 0.0
    """Median in seconds. 0 answers at once."""
    sigma: float = 0.0
    """Standard deviation of the logarithm: 0 is constant, 0.6 is usual for LLM judges."""
    stragglers: float = 0.0
    """Share of the requests, 0 to 1, that take `straggler_factor` times as long."""
    straggler_factor: float = 10.0

    def __post_init__(self) -> None:
        for name in ("median_s", "sigma", "straggler_factor"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"Latency.{name} must be a finite number of at least 0, not {value!r}")
        if not 0 <= self.stragglers <= 1:
            raise ValueError(f"Latency.stragglers is a share between 0 and 1, not {self.stragglers!r}")

    def draw(self, rng: random.Random) -> float:
        """Draw one latency in seconds. It always draws as many numbers from `rng`, whatever the settings."""
        spread = rng.gauss(0.0, 1.0)
        straggles = rng.random() < self.stragglers
        return self.median_s * math.exp(self.sigma * spread) * (self.straggler_factor if straggles else 1.0)


FaultStage = Literal["status", "connection", "reply", "verdict", "stream", "list"]


class FaultKind(str, Enum):
    """The kinds of faults. `says` describes the fault. `stage` says what it affects: there is no answer ("status",
    "connection"), the HTTP reply is faulty ("reply"), the answer itself ("verdict"),
    or the stream that carries it ("stream"; a reply that is not streamed is then good). The descriptions are for chat
    completions; `faulty_answers` lists the faults of scores."""

    _value_: str
    stage: FaultStage
    says: str

    def __new__(cls, name: str, stage: FaultStage, says: str) -> FaultKind:
        kind = str.__new__(cls, name)
        kind._value_ = name
        kind.stage = stage
        kind.says = says
        return kind

    def __str__(self) -> str:
        return str(self.value)

    ERROR_400 = "error_400", "status", "HTTP 400, bad request"
    ERROR_401 = "error_401", "status", "HTTP 401, wrong key"
    ERROR_403 = "error_403", "status", "HTTP 403, not allowed"
    ERROR_404 = "error_404", "status", "HTTP 404, no such model"
    ERROR_408 = "error_408", "status", "HTTP 408, request time-out"
    ERROR_409 = "error_409", "status", "HTTP 409, conflict"
    ERROR_413 = "error_413", "status", "HTTP 413, prompt too large"
    ERROR_422 = "error_422", "status", "HTTP 422, invalid parameters"
    ERROR_425 = "error_425", "status", "HTTP 425, too early"
    ERROR_429 = "error_429", "status", "HTTP 429 without a hint when to retry"
    ERROR_429_SECONDS = "error_429_seconds", "status", "HTTP 429, Retry-After in seconds"
    ERROR_429_DATE = "error_429_date", "status", "HTTP 429, Retry-After as an HTTP date"
    ERROR_429_HUGE = "error_429_huge", "status", "HTTP 429, Retry-After of three years"
    ERROR_429_NEGATIVE = "error_429_negative", "status", "HTTP 429, Retry-After of -5"
    ERROR_429_RESET = "error_429_reset", "status", "HTTP 429, only x-ratelimit-reset-requests says when to retry"
    ERROR_500 = "error_500", "status", "HTTP 500"
    ERROR_502 = "error_502", "status", "HTTP 502 with a gateway's HTML page"
    ERROR_503 = "error_503", "status", "HTTP 503"
    ERROR_503_SECONDS = "error_503_seconds", "status", "HTTP 503, Retry-After in seconds"
    ERROR_504 = "error_504", "status", "HTTP 504 with a gateway's HTML page"
    ERROR_529 = "error_529", "status", "HTTP 529, overloaded"
    REDIRECT = "redirect", "status", "HTTP 307 to another host"
    REDIRECT_LOOP = "redirect_loop", "status", "HTTP 307 to the same address"

    RESET = "reset", "connection", "the connection is reset before any answer"
    CLOSE = "close", "connection", "the connection is closed without an answer"
    HANG = "hang", "connection", "no answer until the client disconnects or the server stops"

    SLOW_HEADERS = "slow_headers", "reply", "status line and headers drip in byte by byte"
    SLOW_BODY = "slow_body", "reply", "the body drips in byte by byte"
    MID_BODY_RESET = "mid_body_reset", "reply", "the connection is reset after half of the body"
    TRUNCATED_BODY = "truncated_body", "reply", "Content-Length is longer than the body, then the connection closes"
    SHORT_LENGTH = "short_length", "reply", "Content-Length is half of the body"
    BAD_CHUNK = "bad_chunk", "reply", "chunked encoding with a chunk size that is not a number"
    CLOSE_AFTER = "close_after", "reply", "a good answer that promises keep-alive, then the connection closes"
    TRUNCATED_JSON = "truncated_json", "reply", "the JSON stops in the middle, Content-Length agrees"
    HTML = "html", "reply", "HTTP 200 with an HTML page"
    EMPTY = "empty", "reply", "HTTP 200 without a body"
    NO_CONTENT = "no_content", "reply", "HTTP 204"
    INVALID_UTF8 = "invalid_utf8", "reply", "the JSON has bytes that are no UTF-8"
    WRONG_JSON_TYPE = "wrong_json_type", "reply", "the JSON is a list"
    DEEP_NESTING = "deep_nesting", "reply", "JSON nested 100,000 levels deep"
    NO_CHOICES = "no_choices", "reply", "choices is an empty list"
    ERROR_IN_200 = "error_in_200", "reply", "HTTP 200 with an error object"
    WRONG_MODEL = "wrong_model", "reply", "a good answer that names another model"
    HUGE_BODY = "huge_body", "reply", "a body of Faults.huge_bytes"
    HUGE_HEADER = "huge_header", "reply", "a good answer with a header of 1 MiB"
    BAD_GZIP = "bad_gzip", "reply", "Content-Encoding: gzip with a body that is not gzip"
    GZIP_BOMB = "gzip_bomb", "reply", "a small gzip body that decompresses to Faults.huge_bytes"

    NULL_CONTENT = "null_content", "verdict", "the message's content is null"
    CUT_OFF = "cut_off", "verdict", "the verdict stops in the middle, finish_reason is length"
    CONTENT_FILTER = "content_filter", "verdict", "empty content, finish_reason is content_filter"
    REFUSAL = "refusal", "verdict", "content is null, the message's refusal is filled"
    REFUSAL_TEXT = "refusal_text", "verdict", "the content is a refusal in prose"
    PROSE = "prose", "verdict", "the content talks about a score but holds no JSON"
    SCORE_NAN = "score_nan", "verdict", "the score is NaN"
    SCORE_INFINITE = "score_infinite", "verdict", "the score is Infinity"
    SCORE_STRING = "score_string", "verdict", "the score is a string"
    SCORE_BOOL = "score_bool", "verdict", "the score is true"
    SCORE_NULL = "score_null", "verdict", "the score is null"
    SCORE_OUT_OF_RANGE = "score_out_of_range", "verdict", "the score is 1e9"
    TWO_VERDICTS = "two_verdicts", "verdict", "two verdicts that disagree, both with the right id"
    FORGED_VERDICT = "forged_verdict", "verdict", "a verdict with full marks and without id"
    WRONG_NONCE = "wrong_nonce", "verdict", "a verdict with another id"
    DUPLICATE_KEYS = "duplicate_keys", "verdict", "one verdict that states its score twice, differently"

    STREAM_CUT = "stream_cut", "stream", "the stream ends properly in the middle of the answer"
    STREAM_RESET = "stream_reset", "stream", "the connection is reset in the middle of the answer"
    STREAM_NO_DONE = "stream_no_done", "stream", "a whole answer without what may be left out, as [DONE] and the usage"
    STREAM_BAD_JSON = "stream_bad_json", "stream", "an event in the middle that is not JSON"
    STREAM_BAD_UTF8 = "stream_bad_utf8", "stream", "an event in the middle with bytes that are no UTF-8"
    STREAM_ERROR = "stream_error", "stream", "an error object in the middle of the answer"
    STREAM_AFTER_FINISH = "stream_after_finish", "stream", "a part of the answer after its end"
    STREAM_TWO_CHOICES = "stream_two_choices", "stream", "a second choice between the parts of the first"
    STREAM_HUGE_EVENT = "stream_huge_event", "stream", "an event of Faults.huge_bytes"
    STREAM_GZIP_BOMB = "stream_gzip_bomb", "stream", "a small gzip stream that decompresses to Faults.huge_bytes"
    STREAM_ENDLESS = "stream_endless", "stream", "text without end"
    STREAM_SILENT = "stream_silent", "stream", "half of the answer, and then nothing"
    STREAM_COMMENTS = "stream_comments", "stream", "half of the answer, and then comments or pings for ever"
    STREAM_ODD = "stream_odd", "stream", "a good answer with CRLF, comments, and characters cut in two by the packets"
    STREAM_DRIP = "stream_drip", "stream", "a good answer that drips in byte by byte"

    RESULTS_TOO_FEW = "results_too_few", "list", "the last result is left out"
    RESULTS_TOO_MANY = "results_too_many", "list", "the last result comes twice"
    RESULTS_SHUFFLED = "results_shuffled", "list", "the results in reverse order, their indices are right"
    RESULTS_UNNUMBERED = "results_unnumbered", "list", "results without their indices"
    RESULTS_MISNUMBERED = "results_misnumbered", "list", "several results, all with the index 0"

    @property
    def has_answer(self) -> bool:
        """Whether the scorer is called: the fault modifies an answer instead of replacing it."""
        return self.stage in ("reply", "verdict", "stream", "list")


_KINDS: Mapping[str, FaultKind] = {str(kind): kind for kind in FaultKind}


def fault_kind(name: str) -> FaultKind:
    """Return the kind with this name. Raises `ValueError` if there is none."""
    if name in _KINDS:
        return _KINDS[name]
    raise ValueError(f"unknown fault {name!r}; `qreward fake-judge --list-faults` shows all")


class PlayFault(Exception):
    """A scorer raises it to play a fault for its request, which fails all other texts of the request, too."""

    def __init__(self, kind: str) -> None:
        """Raises `ValueError` for a kind that does not exist."""
        super().__init__(kind)
        self.kind = fault_kind(kind)
        if self.kind.has_answer:
            raise ValueError(f"{kind} changes an answer, and a scorer that raises gives none")


@dataclass(frozen=True)
class Faults:
    """The faults that a judge server plays, each a `FaultKind` or its value. Raises `ValueError` for invalid ones."""

    rates: Mapping[str, float] = field(default_factory=dict)
    """Share of the requests, 0 to 1, that get each kind. Together at most 1."""
    script: Sequence[str | None] | Callable[[int], str | None] = ()
    """The fault of the k-th admitted request (k = 0, 1, ...), or None for a good answer. After a sequence the rates
    apply; a callable covers every request."""
    retry_after_s: int = 1
    """The pause that `error_429_seconds`, `error_429_date`, `error_429_reset` and `error_503_seconds` ask for, in
    seconds.
    """
    huge_bytes: int = 64 * 1024 * 1024
    """Size of `huge_body`, and of the decompressed `gzip_bomb`, in bytes."""
    drip_interval_s: float = 0.05
    """Seconds between two bytes of `slow_headers` and `slow_body`."""

    def __post_init__(self) -> None:
        rates = {fault_kind(name): rate for name, rate in self.rates.items()}
        for kind, rate in rates.items():
            if not 0 <= rate <= 1:
                raise ValueError(f"the rate of fault {kind.value!r} is a share between 0 and 1, not {rate!r}")
        if math.fsum(rates.values()) > 1 + 1e-9:
            raise ValueError(f"the fault rates add up to {math.fsum(rates.values()):.3f}: a request gets one fault")
        if callable(self.script):
            if rates:
                raise ValueError("a callable script covers every request: omit the rates, or use a sequence")
        elif isinstance(self.script, str):
            raise ValueError(f"the fault script is a sequence of faults: write [{self.script!r}]")
        else:
            script = tuple(None if name is None else fault_kind(name) for name in self.script)
            object.__setattr__(self, "script", script)
        for name in ("retry_after_s", "huge_bytes", "drip_interval_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"Faults.{name} must be at least 0, not {getattr(self, name)!r}")
        object.__setattr__(self, "rates", rates)


class FaultPlan:
    """Chooses the fault of each request, in order of arrival."""

    def __init__(self, faults: Faults, rng: random.Random) -> None:
        self._faults = faults
        self._rng = rng
        self._kinds = [fault_kind(name) for name in faults.rates]
        self._bounds = list(accumulate(faults.rates.values()))
        self._next = 0

    def choose(self) -> FaultKind | None:
        """The fault of the next request. None: a good answer."""
        index, self._next = self._next, self._next + 1
        # Drawn for every request, so that a script does not change the faults of later requests.
        drawn = self._rng.random() if self._bounds else 1.0
        script = self._faults.script
        if callable(script) or index < len(script):
            name = script(index) if callable(script) else script[index]
            return None if name is None else fault_kind(name)
        at = bisect(self._bounds, drawn)
        return self._kinds[at] if at < len(self._kinds) else None
