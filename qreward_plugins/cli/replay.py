"""`qreward replay`: the samples of a journal through another judge, or another version of one.

What the judge asks as it was asked before is not asked again: its reply is in the journal, and the judge reads it now.
A reply is found by its question: everything that was sent, but not how the reply was read.
These verdicts go to the journal of the replay first, under a run of their own. Then the samples are scored as those of
any file, and find them there.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import orjson
import typer
from rich.text import Text

from ..config import Config, configured_name, judge_for, parts_of
from ..engine import RewardEngine
from ..errors import InputError
from ..files import Rollout, check_output
from ..journal import Journal, question_keys
from ..journal.entries import Entry
from ..journal.history import PastAttempt
from ..journal.keys import question_of
from ..journal.stories import NOT_KEPT, Stories, Story, deciding, journals_in
from ..journal.texts import MOST_CHARS
from ..judges import JudgeFailed, Leaf
from ..judges.leaf import judged
from ..samples import Sample, Scored
from ..samples.images import is_image_part
from ..samples.spent import NO_USAGE
from ..scheduling.calls import Answer, Call
from ..sources import TEXT, Reply
from ..sources.base import Request
from .console import ERRORS, OK, OUT, Journals, Overwrite, Where, number_of, run, say
from .engines import load_own, open_engine
from .score import Plan, journal_beside, score_rollouts, with_journal

_REPLIES = "stored replies"
"""The run of the verdicts on replies that were read again."""
_BEFORE = "before"
"""The column of the output with the outcome of the journal."""


def command(
    config_path: Annotated[Path, typer.Argument(metavar="CONFIG", help="The configuration to judge with (YAML).")],
    paths: Journals,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="File for the outcomes, .jsonl.")],
    where: Where = "1",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say how many calls are needed, and end.")] = False,
    overwrite: Overwrite = False,
) -> int:
    """Judge the samples of a journal again, with another configuration.

    Says first how many calls that takes and what they cost, by the tokens that such calls took before. A question that
    was asked before, of the same model in the same words, is not asked again: its reply is read from the journal. So
    another version of the reader takes no call. Verdicts go to FILE.journal, and the same command continues after a
    kill. Only samples whose texts the journal kept can be judged (engine.journal.keep); those with images cannot.

    Exit codes: 0 every sample has a reward; 2 the input or the configuration has mistakes; 3 some samples have no
    reward; 130 stopped with Ctrl-C.
    """
    config, own = load_own(config_path), journal_beside(out)
    journal = (config.engine.journal or own).model_copy(update={"path": own.path, "keep": own.keep})
    config = with_journal(config, journal)
    check_output(out, source=Path(paths[0]), overwrite=overwrite)
    if any(Path(path).absolute() == Path(own.path).absolute() for path in journals_in(paths)):
        raise InputError(f"{own.path}: is the journal of the replay itself; name another --out")
    samples = _PastSamples(paths, where)
    samples.check()
    plan = Plan(Path(" and ".join(paths)), out, 0, config, config_path, samples)
    return run(_replay(plan, samples, dry_run=dry_run))


async def _replay(plan: Plan, samples: _PastSamples, *, dry_run: bool) -> int:
    needed = await _reread(plan, samples)
    left_out = samples.left_out
    if left_out:
        there = left_out + needed.samples
        why = "their texts are not kept whole (engine.journal.keep), or they have images or values not in JSON"
        say(ERRORS, f"{number_of(left_out, 'sample')} of {there:,} left out: {why}")
    if not needed.samples:
        none = "no sample can be judged again" if left_out else "there is no such sample"
        raise InputError(f"{plan.rollouts}: {none}")
    for line in needed.told(plan.config):
        say(OUT, line)
    if dry_run:
        return OK
    code = await score_rollouts(replace(plan, total=needed.samples))
    if len(samples.paths) == 1:
        say(OUT, f"what has changed: qreward diff {shlex.quote(samples.paths[0])} {shlex.quote(plan.journal)}")
    return code


@dataclass(frozen=True)
class PastReply:
    """What a source replied. `nonce` is the one that the reply repeats, if the judge asked for that."""

    source: str
    model: str
    text: str
    nonce: str
    finish_reason: str


@dataclass(frozen=True)
class PastSample:
    """A sample of a journal, and its entries. `replies` are by their questions (`keys.question_of`)."""

    sample: Sample
    replies: Mapping[str, PastReply]
    entries: tuple[Entry, ...]


def past_sample(story: Story) -> PastSample | None:
    """Read a sample back. None if it would differ: a text is cut, JSON cannot hold a value, or it has images
    (journals keep only their hashes).
    """
    entry = story.sample
    texts = (entry.prompt, entry.response, entry.ground_truth, entry.extras)
    if None in texts[:2] or any(text == NOT_KEPT or len(text or "") > MOST_CHARS for text in texts):
        return None
    try:
        messages, rest = json.loads(entry.prompt or ""), json.loads(entry.extras or "{}")
    except ValueError:
        return None
    if rest.get("differs"):
        return None
    if not all(isinstance(message, dict) for message in messages) or any(map(_has_images, messages)):
        return None
    sample = Sample(
        messages,
        entry.response or "",
        rest.get("ground_truth", entry.ground_truth),
        data_source=entry.data_source,
        group_id=entry.group_id,
        step=entry.step,
        split=entry.split,  # type: ignore[arg-type]  # the journal has what a sample had
        extras=rest.get("extras", {}),
        id=entry.sample_id or f"entry {entry.id}",
        prompt=rest.get("prompt"),
        turns=rest.get("turns", ()),
    )
    return PastSample(sample, dict(_replies(story)), story.entries)


def _replies(story: Story) -> Iterator[tuple[str, PastReply]]:
    for entry, attempts in zip(story.entries, story.attempts, strict=True):
        for attempt in attempts:
            reply = attempt.get("reply", NOT_KEPT)
            is_whole = reply != NOT_KEPT and len(reply) <= MOST_CHARS
            # The key of an entry is that of the source which was asked last.
            if entry.key is None or attempt["source"] != entry.source or not is_whole:
                continue
            nonce, finish = attempt.get("nonce", ""), attempt.get("finish", "")
            yield question_of(entry.key), PastReply(entry.source, entry.model or "", str(reply), nonce, finish)


def _has_images(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(map(is_image_part, content))


class _PastSamples:
    """The samples of journals that have an entry which is `where`. Call it for those that can be judged again."""

    def __init__(self, paths: Sequence[str], where: str) -> None:
        self.paths = paths
        self._where = where
        self.left_out = 0

    def check(self) -> None:
        """Raise `InputError` for a condition that SQLite does not take."""
        with Stories(self.paths) as stories:
            stories.count(self._where)

    def past(self) -> Iterator[PastSample]:
        """Yield the samples; `left_out` counts those that would not come back as they were."""
        self.left_out = 0
        # Not shared by threads: each has connections of its own.
        with Stories(self.paths) as stories:
            where = f"({self._where}\n) AND run_id != '{_REPLIES}'"
            for past in map(past_sample, stories.every(where, latest=True)):
                if past is None:
                    self.left_out += 1
                else:
                    yield past

    def __call__(self) -> Iterator[Rollout]:
        return map(_rollout, self.past())


def _rollout(past: PastSample) -> Rollout:
    sample, latest = past.sample, deciding(past.entries)[-1]
    before = {"reward": latest.reward, "judge": latest.judge, "rationale": latest.rationale, "reason": latest.reason}
    row: dict[str, Any] = {"id": sample.id, "step": sample.step, "split": sample.split, "group_id": sample.group_id}
    row |= {"data_source": sample.data_source, "messages": sample.messages, "response": sample.response}
    row |= {"turns": list(sample.turns)} if sample.turns else {}
    row |= {"ground_truth": sample.ground_truth, "extra_info": sample.extras, _BEFORE: before}
    return Rollout(row, sample)


@dataclass
class _Needed:
    """The calls that a replay needs. `tokens` are those of earlier calls: prompt and completion of an attempt."""

    samples: int = 0
    reread: int = 0
    recorded: int = 0
    calls: Counter[tuple[str, ...]] = field(default_factory=Counter)
    """By the sources that may answer them."""
    unknown: Counter[str] = field(default_factory=Counter)
    """Samples by their judge, for judges that are not ours and ask as they like."""
    tokens: list[tuple[float, float]] = field(default_factory=list)

    def add(self, past: PastSample) -> None:
        """Count a sample, and what earlier calls about it took."""
        self.samples += 1
        self.tokens += (
            (entry.prompt_tokens / entry.attempts, entry.completion_tokens / entry.attempts)
            for entry in past.entries
            if entry.attempts and entry.prompt_tokens
        )

    def told(self, config: Config) -> Iterator[str]:
        recorded = f", and {self.recorded:,} are in the journal of the replay" if self.recorded else ""
        yield f"{number_of(self.samples, 'sample')}: {self.reread:,} replies are read again without a call{recorded}"
        for sources, count in sorted(self.calls.items()):
            yield f"{number_of(count, 'call')} to {' or '.join(sources)}{self._price(config, sources, count)}"
        if not self.calls and not self.unknown:
            yield "0 calls"
        for judge, count in sorted(self.unknown.items()):
            yield f"judge {judge} asks as it likes about {number_of(count, 'sample')}; its calls are not counted"

    def _price(self, config: Config, sources: Sequence[str], count: int) -> str:
        if not self.tokens:
            return ""
        prompt, completion = (fmean(each[place] for each in self.tokens) for place in (0, 1))
        prices = [config.sources[configured_name(name)].price for name in sources]
        each = [
            price.per_request + (prompt * price.input_per_million + completion * price.output_per_million) / 1e6
            for price in prices
        ]
        low, high = (f"{count * cost:.2f}" for cost in (min(each), max(each)))
        priced = "" if not max(each) else f", about {low if low == high else f'{low} to {high}'} USD"
        return f"{priced}: {prompt:,.0f} prompt and {completion:,.0f} completion tokens a call, as before"


async def _reread(plan: Plan, samples: _PastSamples) -> _Needed:
    """Read all replies that answer a question of the judges, and record the verdicts. Return what is left to ask."""
    needed, config = _Needed(), plan.config
    with ERRORS.status(Text(f"reading {plan.rollouts} ...")):
        async with open_engine(config, plan.config_path) as engine:
            own = config.engine.journal
            assert own is not None
            journal = Journal(own.path, run_id=_REPLIES, keep="all", redact=own.redact)
            try:
                for past in samples.past():
                    needed.add(past)
                    routed = judge_for(config, past.sample.data_source)
                    for name in () if routed is None else parts_of(config, routed):
                        leaf = engine.judges.get(name)
                        if leaf is None:
                            needed.unknown[name] += 1
                        else:
                            for seen in engine.seen_by(name, past.sample):
                                await _reread_one(engine, journal, leaf, replace(past, sample=seen), needed)
                    # Without a call to the journal, nothing above would let Ctrl-C through.
                    await asyncio.sleep(0)
            finally:
                await journal.aclose()
    return needed


async def _reread_one(engine: RewardEngine, journal: Journal, leaf: Leaf, past: PastSample, needed: _Needed) -> None:
    try:
        if leaf.screened(past.sample) is not None:
            return
        call = leaf.call(past.sample)
        request = call.request(0)
    except (InputError, JudgeFailed):
        return
    except Exception:  # a judge of others; its sample fails when it is scored
        needed.calls[leaf.sources] += 1
        return
    sources = {name: engine.upstreams[name].source for name in call.sources}
    keys = question_keys(call, sources)
    if keys and await journal.get(*keys.values()) is not None:
        needed.recorded += 1
        return
    for name, key in keys.items():
        reply = past.replies.get(question_of(key))
        found = None if reply is None else _read(leaf, call, request, name, reply)
        if found is not None:
            await journal.put(key, past.sample, *found)
            needed.reread += 1
            return
    needed.calls[call.sources] += 1


def _read(
    leaf: Leaf, call: Call[Any], request: Request, source: str, past: PastReply
) -> tuple[Scored, tuple[PastAttempt, ...]] | None:
    """Read a reply as if it had come now; None if the judge does not accept it."""
    text = past.text.replace(past.nonce, request.nonce) if past.nonce else past.text
    try:
        is_text = leaf.asks == TEXT
        value = None if is_text else orjson.loads(text)
        reply = Reply(text if is_text else "", value, None, model=past.model, finish_reason=past.finish_reason)
        verdict = judged(Answer(call.read(request, reply), source, past.model), leaf.name)
    except Exception:  # of our judges an `InvalidReply`
        return None
    attempt = PastAttempt(source, 0.0, None, 0.0, "valid", False, "", NO_USAGE, 0.0, request, reply)
    return Scored(verdict), (attempt,)


__all__ = ["command"]
