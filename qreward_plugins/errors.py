"""Every error this package raises, in one tree.

    QRewardError
    ├── ConfigurationError      the YAML, dict or DictConfig has mistakes; lists all of them
    ├── InputError              samples that cannot be read or turned into a request
    ├── JournalError            the record of verdicts cannot be read or written
    ├── EngineError             the engine is closed, or serves another event loop
    ├── BudgetSpent             a budget is spent, and `on_spent: raise`
    ├── RewardMissing           a failed sample is to be left out of training; carries the Failed
    ├── JudgeUnavailable        too many groups in a row have too few rewards
    ├── KeeperError             the keeper of shared limits does not answer
    │   ├── KeeperLost          the keeper has certainly ended
    │   └── KeeperSilent        the keeper may still be running
    ├── ReplicasNotStarted      the servers of a source cannot be started; ends with the log of the one at fault
    ├── ReplicasNotChanged      weights were not updated everywhere, or servers do not sleep or wake
    ├── RewardServerError       the reward server refused a request, or cannot be reached
    ├── TextFailed              a text did not become whole; carries the text so far
    ├── ReplyBroken             a reply that was passed on to a client broke off
    ├── CircuitOpen             an accelerated function was not called, because its circuit is open
    ├── FunctionTimeout         an accelerated function exceeded `timeout_s` or `deadline_s`; a TimeoutError, too
    ├── InvalidReply            a source replied, but not with a valid answer
    └── SourceError             one attempt at one source failed
        ├── Throttled           429, 529, or 503 with Retry-After: the source asks for a pause
        ├── TransientError      time-outs, resets, 5xx, unreadable replies: another try may help
        │   ├── SourceHeld      the source takes no calls for a while; the call waits, and no failure is counted
        │   ├── NotStarted      a local function could not start the call; this is not the sample's fault
        │   └── SampleFault     this sample hung or crashed a local function
        └── PermanentError      the source will not answer this request
            ├── SampleRefused   this sample cannot be sent, or the function raised on it
            └── SourceUnusable  the source may refuse every request: 401, 403, 404

The scheduler decides by the classes of `SourceError`, so a source maps every exception of its libraries to one of them.
Messages contain our own facts (names, statuses, paths, limits) and redacted excerpts of replies. No key, header or
prompt ever gets into one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class QRewardError(Exception):
    """Base class of all errors of this package."""

    said: str = ""
    """What the server said that this error was read from, without secrets; "" if it said nothing."""

    def __reduce__(self) -> tuple[object, ...]:
        # Ray pickles the errors of its actors. The default reduction calls the constructor with the message alone.
        return _rebuilt, (type(self), self.args), self.__dict__


def _rebuilt(kind: type[QRewardError], args: tuple[Any, ...]) -> QRewardError:
    error = kind.__new__(kind)
    error.args = args
    return error


@dataclass(frozen=True)
class Mistake:
    """One mistake in a configuration.

    `path` is the key ("sources.fast.limits.concurency"), `problem` says what is wrong, `remedy` what to write.
    `line` is the line in the file, from 1; None if it is not known, as for a mapping.
    """

    path: str
    problem: str
    remedy: str = ""
    line: int | None = None

    def __str__(self) -> str:
        line = "" if self.line is None else f"line {self.line}"
        place = (self.path + (line and f" ({line})")) if self.path else line or "(top level)"
        return f"{place}: {self.problem}" + (f" {self.remedy}" if self.remedy else "")


class ConfigurationError(QRewardError):
    """The configuration has mistakes. `mistakes` holds all of them, in the order of the file."""

    def __init__(self, mistakes: Sequence[Mistake], *, origin: str = "configuration") -> None:
        self.mistakes = tuple(mistakes)
        self.origin = origin
        count = f"{len(self.mistakes)} mistake" + ("" if len(self.mistakes) == 1 else "s")
        super().__init__(f"{count} in {origin}:\n" + "\n".join(f"  - {mistake}" for mistake in self.mistakes))


class InputError(QRewardError):
    """Samples cannot be read, or cannot be turned into a request."""


def input_problem(error: Exception) -> str:
    """Why a sample cannot be turned into a request. Of other errors only the type: their text may hold the sample."""
    return str(error) if isinstance(error, InputError) else f"the sample cannot be read ({kind_of(error)})"


def kind_of(value: Any) -> str:
    """Return the name of a value's type for messages: printable, at most 60 characters."""
    try:
        name = str.__str__(type(value).__name__)
    except Exception:
        return "object"
    return "".join(letter if letter.isprintable() else "?" for letter in name[:60])


class JournalError(QRewardError):
    """The journal cannot be opened, read or written."""


class EngineError(QRewardError):
    """The engine cannot serve this call: it is closed, or it runs in another event loop."""


class BudgetSpent(QRewardError):
    """A budget is spent, and its `on_spent: raise` ends the run."""


class RewardMissing(QRewardError):
    """A sample has no reward, and `on_failure` says to leave it out of training. `failed` is its `Failed`."""

    def __init__(self, failed: Any) -> None:
        self.failed = failed
        super().__init__(f"no reward for this sample, leave it out of training: {failed.describe()}")


class JudgeUnavailable(QRewardError):
    """Too many groups in a row had too few rewards; replacing them would not end."""


class KeeperError(QRewardError):
    """The keeper of the limits that processes share does not answer."""


class KeeperLost(KeeperError):
    """The keeper has certainly ended, so it can give no share to anybody."""


class KeeperSilent(KeeperError):
    """The keeper did not answer, but it may still be running."""


class ReplicasNotStarted(QRewardError):
    """The servers of a source of kind `replicas` could not be started. The message ends with the last lines of the log
    of the one at fault, without secrets.
    """


class ReplicasNotChanged(QRewardError):
    """An update of weights, a sleep or a wake-up of a source of kind `replicas` failed. The message names the replicas,
    the cause, and what happens to them now. `replicas` are the numbers of those at fault; empty if none is.
    """

    def __init__(self, message: str, *, replicas: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.replicas = tuple(replicas)


class RewardServerError(QRewardError):
    """The reward server refused a request, or cannot be reached.

    `status` is its HTTP status; None if it gave none. `reason` is one word, as that of a failed sample: "unreachable"
    (or busy until the deadline), "deadline", "server_refused", "input", "other_judges" or "closed".
    """

    def __init__(self, message: str, *, status: int | None = None, reason: str = "unreachable") -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class TextFailed(QRewardError):
    """A text did not become whole (`RewardEngine.complete`, `stream_text` and `embed`).

    `reason` is one word, as that of a failed sample: "broken" if its source failed after the first piece, "deadline",
    "exhausted", "closed", "cancelled", ... `text` is all that came; the message does not contain it. `source` was asked
    last, and `spent`, a `Spent`, has the attempts so far and their usage.
    """

    def __init__(self, reason: str, detail: str, *, text: str, source: str, spent: Any) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail
        self.text = text
        self.source = source
        self.spent = spent


class ReplyBroken(QRewardError):
    """A reply that was passed on to a client as it came did not become whole."""


class CircuitOpen(QRewardError):
    """An accelerated function was not called, because it failed too often in a row (`breaker`, `recovery_s`)."""


class FunctionTimeout(QRewardError, TimeoutError):
    """An attempt of an accelerated function exceeded `timeout_s`, or a call exceeded `deadline_s`."""


class InvalidReply(QRewardError):
    """A source replied, but not with a valid answer: not one unique strict JSON object, a score that is not finite or
    out of range, or a refusal.
    """

    refusal: object | None = None
    """As that of a `PermanentError`, from a source that found the reply invalid itself. What a judge finds invalid, the
    source is told by `Reply.on_judged`."""


class SourceError(QRewardError):
    """One attempt at one source failed.

    `status` is the HTTP status, if there was one.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Throttled(SourceError):
    """The source asks for a pause of `retry_after_s` seconds from now; None if it named no time."""

    def __init__(self, message: str, *, status: int | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message, status=status)
        self.retry_after_s = retry_after_s


class TransientError(SourceError):
    """Another try may help: time-outs, refused or reset connections, 5xx, replies that cannot be read.

    `of_one_replica`: only one of several servers of the source has failed, as far as is known.
    """

    of_one_replica = False


class SourceHeld(TransientError):
    """The source takes no calls for a while: its servers sleep, or get other weights. The call waits for its end, and
    this counts neither against the call nor against the source.
    """


class NotStarted(TransientError):
    """A local function could not start the call: no worker process can be started, too many threads hang, or its Ray
    actor is gone.
    """


class SampleFault(TransientError):
    """A local function hung on this sample and was killed, or its worker process died.

    It does not count against the source: other samples neither wait nor go elsewhere. The sample gets one more try,
    after all others, unless the call already had its whole time limit. If that fails, too, its failure has this
    `reason`: "hung" or "crashed".
    """

    def __init__(self, message: str, *, reason: str = "hung") -> None:
        super().__init__(message)
        self.reason = reason


class PermanentError(SourceError):
    """The source will not answer this request, however often it is asked (400, 413, 422).

    `refusal`: only some of its servers have refused, and another one may answer. The next request of the same call to
    this source carries it (`Request.refusal`). None: the source refuses.
    """

    refusal: object | None = None


class SampleRefused(PermanentError):
    """This source cannot score this sample, and another try would not change that.

    `reason` is the reason of the sample's failure if no other source can score it: "input" if it cannot be sent,
    "raised" if the function raised.
    """

    def __init__(self, message: str, *, reason: str = "input") -> None:
        super().__init__(message)
        self.reason = reason


class SourceUnusable(PermanentError):
    """The source refused a request, and may refuse all (401, 403, 404, a redirect).

    One request may also have provoked it: a firewall blocks some responses with a 403. So the scheduler takes the
    source out only after refusals of many different samples. `certain`: no request can have provoked it, because the
    source is closed or its function cannot be loaded; then one is enough.
    """

    def __init__(self, message: str, *, status: int | None = None, certain: bool = False) -> None:
        super().__init__(message, status=status)
        self.certain = certain
