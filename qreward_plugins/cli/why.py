"""`qreward why`: why a sample got its reward. What was sent, what was replied, how it was read, and what it waited for.

Prompts, responses and replies are foreign text: control characters are escaped, because a terminal would obey them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from ..errors import InputError
from ..journal.entries import Entry
from ..journal.stories import Stories, Story, Wanted, deciding, judge_of, last_sent, lines_of, turns_of
from ..secrets import one_line
from .console import OK, OUT, Journals, number, number_of, print_whole, say, seconds, short

_LINE_CHARS = 20_000
_BAR = 40
"""Width of the time line, in characters."""
_STYLES = {"valid": "green", "invalid": "yellow", "throttled": "magenta", "failed": "red", "cancelled": "dim"}


def command(
    paths: Journals,
    sample: Annotated[str | None, typer.Option(metavar="ID", help="The sample with this id, e.g. 'line 17'.")] = None,
    row: Annotated[int | None, typer.Option(metavar="N", help="The sample of entry N of the journal.")] = None,
    step: Annotated[int | None, typer.Option(metavar="N", help="Only samples of this training step.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Samples without a reward, the latest first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="The lowest rewards first, of the latest step.")] = False,
    most: Annotated[int, typer.Option("--most", metavar="N", min=1, help="How many samples are shown.")] = 1,
) -> int:
    """Show why a sample got its reward, or none; also while a run writes.

    It shows the prompt, the response, and its siblings with their rewards. For each judge: every attempt on a time
    line, what was sent, what was replied, and how it was read, or the rule that refused it. Without ID, the latest
    sample is shown. Rows of a file that `qreward score` scored have the ids `line 1`, `line 2` ..., unless they have
    their own; `qreward ui` shows ids and rows. The texts are there if engine.journal.keep kept them.

    Exit codes: 0 shown; 2 there is no such journal, or no such sample.
    """
    wanted = Wanted(sample, row, step, failed=failed, worst=worst)
    with Stories(paths) as stories:
        found, count = stories.find(wanted, most)
    if not found:
        given = {name: value for name, value in asdict(wanted).items() if value is not None and value is not False}
        chosen = "".join(f" --{name}" if value is True else f" --{name} {value}" for name, value in given.items())
        remedy = f" matches{chosen}; `qreward journal` shows what is there, `qreward ui` all of it" if chosen else ""
        raise InputError(f"no sample in {' and '.join(paths)}{remedy}")
    for story in found:
        _tell(story)
    if count > len(found):
        say(OUT, f"\nshown: {len(found)} of {number_of(count, 'sample')}; --most and --step choose others")
    return OK


def _tell(story: Story) -> None:
    first = story.sample
    step = "no step" if first.step is None else f"step {first.step}"
    names = [step, first.split, first.data_source, f"sample {first.sample_id or first.id}", f"run {first.run_id}"]
    reward = deciding(story.entries)[-1].reward
    names.append("no reward" if reward is None else f"reward {number(reward)}")
    OUT.rule(Text(" · ".join(_line(name) for name in names if name), style="bold"), align="left")
    own = story.trained.get(first.sample_id or "")
    if own is not None and own.masked:
        say(OUT, Text("the trainer left it out", style="yellow"))
    if story.siblings or own is not None:
        say(OUT, _siblings(story))
    _quote("prompt", _told(turns_of(first.prompt)))
    _quote("response", first.response)
    _quote("ground truth", first.ground_truth)
    if first.prompt is None:
        say(OUT, Text("its texts are not kept; engine.journal.keep: all keeps those of every sample", style="dim"))
    for entry, attempts in zip(story.entries, story.attempts, strict=True):
        OUT.print()
        say(OUT, _verdict(entry, judge_of(entry, attempts), shared=bool(attempts)))
        if attempts:
            print_whole(OUT, _time_line(attempts))
        _exchanges(attempts)
        _quote("the judge's words", entry.rationale)


def _siblings(story: Story) -> Text:
    """The rewards of the group by judge, and what the trainer made of them; its own in bold."""
    own = {entry.id for entry in story.entries}
    shown = Text(f"group {_line(story.entries[0].group_id or '')}")
    for judge in dict.fromkeys(entry.judge for entry in story.siblings):
        entries = [entry for entry in story.siblings if entry.judge == judge]
        shown.append(f"\n  {_line(judge) or 'no judge'}: ")
        for entry in sorted(entries, key=lambda entry: (entry.reward is None, entry.reward or 0.0)):
            shown.append(
                f"{'failed' if entry.reward is None else number(entry.reward)} ",
                style="bold reverse" if entry.id in own else "",
            )
        rewards = [entry.reward for entry in entries if entry.reward is not None]
        if rewards:
            shown.append(f" mean {fmean(rewards):.3g}")
    if story.trained:
        shown.append("\n  advantages: ")
        for trained in sorted(story.trained.values(), key=lambda trained: trained.advantage or 0.0):
            advantage = "left out" if trained.masked else number(trained.advantage)
            is_own = trained.sample_id == story.entries[0].sample_id
            shown.append(f"{advantage} ", style="bold reverse" if is_own else "")
    return shown


def _verdict(entry: Entry, judge: str, *, shared: bool) -> Text:
    shown = Text(f"{_line(judge)}: ", style="bold")
    if entry.outcome == "scored":
        shown.append(f"reward {number(entry.score)}", style="bold green")
        if entry.raw_score is not None and entry.raw_score != entry.score:
            shown.append(f", from the judge's score {number(entry.raw_score)}")
        shown.append({1: ", correct", 0: ", not correct"}.get(entry.correct if entry.correct is not None else -1, ""))
        for name, value in json.loads(entry.components or "{}").items():
            shown.append(f", {_line(name)} {number(value)}")
        shown.append("; it saw the text without its middle" if entry.reason else "")
    else:
        got = "no reward" if entry.floor is None else f"the floor {number(entry.floor)}"
        shown.append(f"{got}, {entry.cause}/{_line(entry.reason or '')}", style="bold red")
        shown.append(f": {_line(entry.detail or '')}")
    asked = " ".join(_line(name) for name in (entry.source, entry.model and f"({entry.model})") if name)
    tokens = f"{short(entry.prompt_tokens)} + {short(entry.completion_tokens)} tokens"
    cost = f", ${entry.cost_usd:.4g}" if entry.cost_usd else ""
    how = f"{asked}; {number_of(entry.attempts, 'attempt')}, {seconds(entry.latency_s)}, {tokens}{cost}"
    if entry.cached:
        how = f"{asked}; from the journal"
    elif not entry.attempts:
        why = "an equal question was under way" if shared else "no source was asked for this itself"
        how = f"{why}; {seconds(entry.latency_s)}"
    shown.append(f"\n  {how}; row {entry.id} of {_line(entry.journal)}", style="dim")
    return shown


def _time_line(attempts: Sequence[Mapping[str, Any]]) -> Table:
    """Each attempt from its start to its end; lighter before its request was written."""
    end = max(attempt["ended_s"] for attempt in attempts) or 1.0
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1))
    for _ in range(6):
        table.add_column(no_wrap=True)
    table.columns[-1].no_wrap = False
    for place, attempt in enumerate(attempts, 1):
        start, sent, last = (
            min(_BAR - 1, int(_BAR * (attempt[name] or attempt["started_s"]) / end))
            for name in ("started_s", "sent_s", "ended_s")
        )
        style = _STYLES.get(attempt["result"], "")
        bar = Text(" " * start + "░" * (sent - start)).append("█" * (last - sent + 1), style=style)
        took = f"{seconds(attempt['started_s'])} + {seconds(attempt['ended_s'] - attempt['started_s'])}"
        name = Text(attempt["result"] + (" hedge" if attempt.get("hedge") else ""), style=style)
        table.add_row(f"  {place}", _line(attempt["source"]), name, took, bar, _line(attempt.get("problem", "")))
    return table


def _exchanges(attempts: Sequence[Mapping[str, Any]]) -> None:
    """What was sent by the attempt that was answered, or by the last one, and every reply."""
    sent = last_sent(attempts)
    if sent is not None:
        _quote(f"sent (attempt {sent[0]})", "\n".join(lines_of(sent[1])))
    for place, attempt in enumerate(attempts, 1):
        _quote(f"thoughts (attempt {place})", attempt.get("thinking"))
        _quote(f"replied (attempt {place}, {attempt['result']})", attempt.get("reply") or attempt.get("said"))


def _told(turns: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"{role}: {content}" if role else content for role, content in turns)


def _quote(title: str, text: str | None) -> None:
    if text:
        say(OUT, Text(title, style="bold"))
        say(OUT, Text("\n".join(f"  │ {_line(line)}" for line in text.split("\n"))))


def _line(text: str) -> str:
    return one_line(text, _LINE_CHARS)
