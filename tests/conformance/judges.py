"""Judges that behave in some way, and the answers that they are asked about. Nothing here knows a framework.

Prompts, answers and verdicts follow from numbers (item, draft, part), never from the order in which things arrive: so
whoever plays a scenario, a framework or the fake trainer, must come to the same rewards, masks and failures.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from qreward_plugins.testing import Faults, JudgeCall, JudgeServer, JudgeServerError, Latency, ServerLimits

from . import functions

GROUPS = 2
"""Groups that a step trains."""
GROUP_SIZE = 4
"""Drafts of an item: the samples of a group."""
ITEMS = 64
"""Items in the data set."""

_BEST = 10


@dataclass(frozen=True, order=True)
class Draft:
    """One answer to one prompt."""

    item: int
    draft: int
    part: int = 0

    @property
    def response(self) -> str:
        text = f"item {self.item} draft {self.draft} quality {self.quality} ."
        return f"{text} part {self.part}" if self.part else text

    @property
    def quality(self) -> int:
        """What the judge says of it, 0 to 10; the parts of a fan-out differ."""
        return (random.Random(f"{self.item}/{self.draft}").randrange(_BEST + 1) + 3 * self.part) % (_BEST + 1)

    @property
    def reward(self) -> float:
        return self.quality / _BEST


def prompt_of(item: int) -> str:
    return f"item {item} : what is {item} + {item + 1} ?"


def label_of(item: int) -> str:
    return str(2 * item + 1)


def item_of(prompt: str) -> int:
    found = re.search(r"item (\d+) :", prompt)
    assert found is not None, f"no item in {prompt!r}"
    return int(found[1])


def read_response(response: str) -> Draft:
    """The draft that a response is. Raises `ValueError` for any other text."""
    found = re.fullmatch(r"item (\d+) draft (\d+) quality \d+ \.(?: part (\d+))?", response)
    if found is None:
        raise ValueError(f"not a response of these scenarios: {response!r}")
    return Draft(int(found[1]), int(found[2]), int(found[3] or 0))


WORDS = ("<unk>", "<pad>", "<eos>", "item", "draft", "quality", "part", "what", "is", ":", "+", "?", ".")
WORDS += tuple(map(str, range(2 * ITEMS + 2)))
"""The vocabulary: every word is a token, and its place is the token's id."""

EOS = WORDS.index("<eos>")
"""The token that ends a response; it is no part of the text."""

_IDS = {word: number for number, word in enumerate(WORDS)}


def encode(text: str) -> list[int]:
    return [_IDS[word] for word in text.split()]


def decode(ids: list[int]) -> str:
    return " ".join(WORDS[number] for number in ids)


def make_tokenizer(folder: Path) -> Path:
    """Write a tokenizer with one token a word to `folder`, in the look of a tiny model, and return it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel(_IDS, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
        chat_template="{% for message in messages %}{{ message['content'] }} {% endfor %}",
    )
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": len(WORDS)}))
    return folder


def never(_: Draft) -> bool:
    return False


@dataclass(frozen=True)
class Judge:
    """How a judge behaves."""

    spoils: Callable[[Draft], bool] = never
    """Of which drafts it says NaN."""
    holds: Callable[[Draft], bool] = never
    """Which drafts it answers only when it is released. The others are answered once `held` such requests are there,
    so that there is no question of who comes first."""
    held: int = 0
    prose: Callable[[Draft], bool] = never
    """Drafts that it answers with prose when it is asked first, and with a verdict after that."""
    answers: int | None = None
    """After so many answers it answers no more and is stopped."""
    away_s: float | None = None
    """After `answers` it is stopped for so many seconds only."""
    cold_s: float = 1.0
    """Seconds that it takes for an answer from then on, as one does whose caches are cold."""
    listens: bool = True
    latency: Latency = field(default_factory=Latency)
    faults: Faults = field(default_factory=Faults)
    limits: ServerLimits = field(default_factory=ServerLimits)

    def start(self) -> RunningJudge:
        return RunningJudge(self)


class RunningJudge:
    """A judge server that behaves as a `Judge` says. A context manager; `server` is its `JudgeServer`."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        more = {"latency": judge.latency, "faults": judge.faults, "limits": judge.limits}
        self.server = JudgeServer(self._score, seed=11, **more)
        self._asked = 0
        self._held_here = asyncio.Event()
        self._released = asyncio.Event()
        self._held_asked = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._back = False
        self._told_prose: set[Draft] = set()

    def __enter__(self) -> RunningJudge:
        self.server.start()
        if not self.judge.listens:
            self.server.stop()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop()

    @property
    def base_url(self) -> str:
        return self.server.base_url

    def release(self) -> None:
        """Answer what was held, and hold nothing any more."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._released.set)

    def wait_until_dead(self, over: threading.Event) -> None:
        """Block until it has given all its answers, or until `over` is set, and stop it; then until it is back."""
        while not over.is_set():
            with suppress(JudgeServerError):
                self.server.wait_for(lambda report: report.answered >= self.judge.answers, timeout_s=0.2)
                break
        self.server.stop()
        if self.judge.away_s is not None:
            over.wait(self.judge.away_s)
            self._back = True
            self.server.start()

    async def _score(self, call: JudgeCall) -> float | str:
        self._loop = asyncio.get_running_loop()
        draft = read_response(call.blocks["response"])
        assert prompt_of(draft.item) in call.blocks["question"], f"judged with another question: {call.blocks}"
        assert call.blocks["reference"] == label_of(draft.item), f"judged with another reference: {call.blocks}"
        number, self._asked = self._asked, self._asked + 1
        if self._back:
            await asyncio.sleep(self.judge.cold_s)
        elif self.judge.answers is not None and number >= self.judge.answers:
            await asyncio.Event().wait()
        if self.judge.prose(draft) and draft not in self._told_prose:
            self._told_prose.add(draft)
            return "The answer looks about right to me, if a little short."
        if self.judge.holds(draft):
            self._held_asked += 1
            if self._held_asked >= self.judge.held:
                self._held_here.set()
            await self._released.wait()
        elif self.judge.held:
            await self._held_here.wait()
        return math.nan if self.judge.spoils(draft) else draft.quality


@contextmanager
def dying(judge: RunningJudge) -> Iterator[None]:
    """Stop the judge in mid-batch, if it is one that dies or goes away."""
    if judge.judge.answers is None:
        yield
        return
    over = threading.Event()
    killer = threading.Thread(target=judge.wait_until_dead, args=(over,))
    killer.start()
    try:
        yield
    finally:
        over.set()
        killer.join()


def tenth(draft: Draft) -> bool:
    """One draft in ten."""
    return (draft.item * GROUP_SIZE + draft.draft) % 10 == 3


def hanging(draft: Draft) -> bool:
    """The drafts for which the function of `functions.py` hangs."""
    return functions.hangs(draft.item, draft.draft)


def uneven(draft: Draft) -> bool:
    """Spoil one draft of an even item, and all but one of an odd one: the rest of a group may be a single sample."""
    return draft.draft != 2 if draft.item % 2 else draft.draft == 1
