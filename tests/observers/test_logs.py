"""The log of failures: one line a cause, with a count, whatever samples and servers put into it."""

from __future__ import annotations

from qreward_plugins.observers import FailureLog
from qreward_plugins.observers.events import SampleEnded
from qreward_plugins.samples import Cause, Failed
from qreward_plugins.samples.spent import Spent

GONE = Failed(Cause.INFRA, "exhausted", "source 'a' answered 500", judge="j", source="a", spent=Spent(6))


def ended(number, failed, at=0.0):
    return SampleEnded(at, f"sample-{number}", "math", failed)


def test_one_cause_is_one_line_and_then_a_count_once_a_minute(caplog):
    log = FailureLog()
    for number in range(512):
        log.ended(ended(number, GONE, number / 10))
    assert caplog.messages == [
        "sample-0 (math): infra failure (exhausted) after 6 attempts: source 'a' answered 500",
    ]
    log.ended(ended(512, GONE, 61.0))
    assert caplog.messages[1].startswith(
        "512 more samples ended in this way in the last 61 s; the last was sample-512 (math)"
    )
    log.ended(ended(513, GONE, 122.0))
    assert caplog.messages[2].startswith("1 more samples ended")
    # Another cause is told at once.
    log.ended(ended(0, Failed(Cause.INFRA, "deadline", "too late", judge="j", source="a"), 62.0))
    log.ended(ended(0, Failed(Cause.INFRA, "exhausted", "another", judge="j", source="b"), 62.0))
    assert len(caplog.messages) == 5


def test_names_and_details_stay_on_their_line(caplog):
    evil = "x\nERROR all is lost\x1b[31m\u202e\x9b" + "y" * 5000
    FailureLog().ended(SampleEnded(0.0, evil, evil, Failed(Cause.INFRA, "input", evil)))
    (line,) = caplog.messages
    assert line.isprintable()
    assert len(line) < 1300
