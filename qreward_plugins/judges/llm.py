"""Defines `LLMJudge`: it asks a language model for a score. `prompt.py` writes what it asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from ..config import configured_name
from ..config.models import ImageLimits, Interval
from ..config.nodes import Integer, NonNegativeFloat, PositiveInt, no_bool, takes
from ..errors import ConfigurationError, InputError, InvalidReply, Mistake
from ..samples import Cause, Failed, RawScore, Sample, Verdict
from ..scheduling.calls import Call
from ..sources.base import Reply, Request, Source
from ..sources.kind import TEXT
from .base import Opening
from .fence import Page, draw_nonce, is_blank, shared_nonce
from .forms import Read, form_of
from .leaf import Leaf, fingerprint
from .prompt import Prompt, PromptConfig
from .tasks import LabelTask, ListTask, ReferenceTask, RubricTask, ScoreTask, Task
from .verdicts import ParsedVerdict, Scale, excerpt, why_no_verdict
from .views import ImageRules, ListSample, SampleTexts, Show, View, has_images

DEFAULT_TOKENS = 512
"""Longest completion of a model that does not think, in tokens."""
DEFAULT_THINKING_TOKENS = 8192
"""Longest completion of a model that thinks, in tokens."""

_MAX_REPLY_CHARS = 65_536
_REPLY_CHARS_PER_TOKEN = 16


class LLMJudge(Leaf):
    """A language model that reads the response and gives a score.

    Its verdict is read strictly. Raises `ConfigurationError` with all mistakes in the templates and the numbers.
    """

    class Config(PromptConfig):
        """A language model that reads the response and gives a score."""

        invalid_retries: Annotated[int, Field(ge=0, le=10), BeforeValidator(no_bool)] = 3
        """Further tries after an invalid verdict, on another source if there is one. Default: 3. A judge that answers 1
        of 10 requests with prose then loses 1 of 10,000 samples."""

        reward_range: Interval = (0.0, 1.0)
        """The range that the score is mapped to, linearly. Default: 0 to 1."""

        response_format: Literal["json_schema", "json_object", "none"] = "json_schema"
        """The structured output that the server is asked for. Use `json_object` or `none` for a server that does not
        support `json_schema` (the default). The dialect `anthropic` has no `json_object`. Only `read: json` asks for
        it."""

        temperature: NonNegativeFloat = 0.0
        """Sampling temperature. Default: 0. Only the dialects `openai` and `gemini` send it; for a source of another
        dialect, any number but 0 is refused at the start."""

        max_tokens: PositiveInt | None = None
        """Longest completion in tokens, thoughts included. Default: 4 with `read: logprobs`; otherwise 512, and 8,192
        at a source whose model is known to think: every dialect but `openai`, and `openai` if the source's `parameters`
        turn thinking on (`reasoning_effort`, `chat_template_kwargs: {enable_thinking: true}`). Write a number for other
        models that think."""

        seed: Integer | None = None
        """Sampling seed that is sent to the server. Default: none. The dialects `responses` and `anthropic` have none.
        """

        show: Show = Show()
        """What the judge sees of a sample. Default: all but the thoughts with which a response begins."""

        read: Annotated[Read, takes("`json`, `tagged`, `boxed`, `logprobs`, or a mapping with `form`")] = Read()
        """The form in which the judge answers; a mapping has its details. The other forms protect less from a response
        with a verdict in it than JSON does. Default: `json`."""

        images: ImageLimits = ImageLimits()
        """What is sent of the images of a sample, to sources with `vision: true`."""

        @field_validator("read", mode="before")
        @classmethod
        def _form_alone(cls, read: Any) -> Any:
            return {"form": read} if isinstance(read, str) else read

    asks = TEXT

    def __init__(self, name: str, config: Config, opening: Opening, *, task: Task | None = None) -> None:
        self._task = task or task_of(config)
        self._rubric = self._task if isinstance(self._task, RubricTask) else None
        self._reference = self._task if isinstance(self._task, ReferenceTask) else None
        mistakes = _mistakes(name, config)
        try:
            self._form = form_of(self._task, config.read, config.response_format)
        except ValueError as error:
            remedy = "Write json, or change what the judge answers."
            mistakes.append(Mistake(f"judges.{name}.read", f"{error}.", remedy))
            self._form = form_of(self._task, Read(), config.response_format)
        self._images = ImageRules(name, config.images, opening)
        mistakes += self._images.mistakes()
        try:
            self._prompt = Prompt(name, config, self._task, self._form)
        except ConfigurationError as error:
            mistakes += error.mistakes
        identity = fingerprint("llm", *self._task.identity, *self._form.identity)
        super().__init__(name, config, sources=opening.sources, fingerprint=identity, mistakes=mistakes)
        self._config = config
        self._view = View(name, config.show, config.reference.extract if config.reference else None)
        self.extract = self._view.extract
        self._opening = opening
        # Labels have rewards, and need no scale.
        self._scale = Scale(config.reward_range if config.labels else self._task.range, config.reward_range)
        most = config.max_tokens or self._form.max_tokens
        self._max_tokens = most or DEFAULT_TOKENS
        self._thinking_tokens = 0 if most else DEFAULT_THINKING_TOKENS - DEFAULT_TOKENS
        self._parameters = {"temperature": config.temperature, "max_tokens": self._max_tokens}
        if config.seed is not None:
            self._parameters["seed"] = config.seed
        # A judge asks thousands of times with the same ones.
        self._asked = cache(lambda count: {**self._parameters, **self._form.parameters(count)})
        most_tokens = self._max_tokens + self._thinking_tokens
        self._max_reply_chars = max(_MAX_REPLY_CHARS, _REPLY_CHARS_PER_TOKEN * most_tokens)

    def for_lists(self) -> LLMJudge:
        """This judge, but it scores the responses of a `ListSample`; their scores are the raw components of a verdict.

        Raises `ConfigurationError` if it gives labels or several scores, or if its instructions write the response.
        """
        config = self._config
        several = [key for key in ("labels", "rubric", "reference", "criteria") if getattr(config, key)]
        written = [key for key in ("response", "extras") if key in self._prompt.variables]
        remedy = "Remove it, or compare by another judge."
        if several or config.read.form != "json":
            key, problem = [*several, "read"][0], "it does not answer with one score in JSON."
        elif written:
            key, problem = "instructions", f"they use `{written[0]}` of one sample, but several are compared."
            remedy = "Leave it out; the responses are written below the instructions."
        elif config.on_invalid == "floor":
            key, problem = "on_invalid", "one response could bring the floor upon all that are compared with it."
        else:
            return LLMJudge(self.name, config, self._opening, task=ListTask(config.score_range))
        raise ConfigurationError([Mistake(f"judges.{self.name}.{key}", problem, remedy)])

    def shown(self, sample: Sample) -> str:
        """The response of a sample as the judge sees it."""
        return self._view.of(sample).response

    def rewarded(self, score: float) -> Verdict:
        """The verdict of a score. One outside of the score range counts as its nearer end."""
        low, high = self._task.range
        return self._mapped(RawScore(min(max(score, low), high)))

    def call(self, sample: Sample) -> Call[Verdict]:
        call = super().call(sample)
        if self._rubric is not None or (self._images.sends and has_images(sample)):
            with suppress(InputError):  # what cannot be read fails in `request`
                call = self._images.call(call, self._view.without_hidden_images(sample))
                if self._rubric is not None:
                    # A data set with other points gives other scores.
                    call.identity = fingerprint(call.identity, *self._rubric.identity_of(sample))
        return call

    def screen(self, sample: Sample) -> Verdict | None:
        """Return the floor for a response without a visible character or an image."""
        response: object = sample.response
        if not isinstance(response, str) or isinstance(sample, ListSample):
            return None
        if self._reference is not None:
            self._reference.count(sample)
        sample = self._view.of(sample)
        if is_blank(sample.response) and not (self._images.sends and sample.response_images):
            return self.instead(Failed(Cause.POLICY, "empty", self._view.emptiness(response), judge=self.name))
        return None

    def request(self, sample: Sample, *, attempt: int) -> Request:
        """Build the messages and parameters of the `attempt`-th try (from 0).

        Raises `InputError` for messages or a ground truth that cannot be written as text, for images that cannot be
        sent, and if a template fails on this sample or its text grows too large.
        """
        whole, sample = sample, self._view.of(sample)
        images = self._images.of(sample) if self._images.sent(sample) else None
        if images is not None:
            sample = replace(sample, messages=images.messages)
        shown = SampleTexts.of(sample)
        texts = [shown.question, shown.response, shown.reference or ""]
        while True:
            nonce = draw_nonce(self._opening.key, texts, attempt=attempt)
            shared = shared_nonce((shown.question, shown.reference or ""), texts, nonce)
            page = Page(nonce, shared=shared, hidden=self._form.hidden)
            texts_shown, rules = self._prompt.write(sample, shown, page)
            # What the template has written beside: columns of `extras`, the conversation, neutralised texts.
            further = [text for text in page.texts if text not in texts]
            if not (further and any(nonce in text or shared in text for text in further)):
                break
            texts.extend(page.texts)
        messages: list[Any] = []
        if self._prompt.system:
            messages.append({"role": "system", "content": self._prompt.system})
        messages.append({"role": "user", "content": self._prompt.content(texts_shown, rules, images)})
        return Request(
            sample=whole,
            messages=tuple(messages),
            parameters=self._asked(self._task.count(whole)),
            nonce=nonce,
            shared_nonce=shared,
            max_completion_tokens=self._max_tokens,
            judge=self.name,
            cut=bool(page.cut),
            thinking_tokens=self._thinking_tokens,
        )

    def mistakes(self, sources: Mapping[str, Source]) -> Sequence[Mistake]:
        """Return a mistake for every parameter of its requests that one of its sources would leave out."""
        # Whatever the schema is. Who sends one of the two parameters of `logprobs` sends the other.
        asked = dict(self._asked(1))
        asked.pop("top_logprobs", None)
        found: dict[Mistake, None] = {}
        for name, source in sources.items():
            for refusal in source.unmet(asked, thinking_tokens=self._thinking_tokens):
                # The user has written the form, and not the parameter with which it is asked for.
                key = "read" if refusal.key == "logprobs" else refusal.key
                problem = f"source {configured_name(name)!r}: {refusal.problem}"
                remedy = refusal.remedy or "Leave it out, or name other sources for this judge."
                found.setdefault(Mistake(f"judges.{self.name}.{key}", problem, remedy))
        return list(found)

    def verdict(self, request: Request, reply: Reply) -> Verdict:
        """Read the reply. Raises `InvalidReply` unless it has exactly one valid verdict, in JSON with the request's
        nonce.
        """
        try:
            words = self._words(request, reply)
        except InvalidReply as error:
            # The message quotes the reply, which may echo secrets.
            problem = reply.cleaned(str(error))
        else:
            return self._mapped(words.raw, rationale=reply.cleaned(words.rationale), model=reply.model, cut=request.cut)
        raise InvalidReply(problem)

    def _words(self, request: Request, reply: Reply) -> ParsedVerdict:
        problem = why_no_verdict(reply.finish_reason)
        if problem == "cut off" and self._form.max_tokens is None:
            # Only a source that thinks gets more than `max_tokens`, and only there a reply can be longer.
            written = reply.usage.completion_tokens if reply.usage is not None else 0
            most = self._max_tokens + (self._thinking_tokens if written > self._max_tokens else 0)
            raise InvalidReply(
                f"the reply was cut off (finish_reason {excerpt(reply.finish_reason)}); raise "
                f"judges.{self.name}.max_tokens, now {most:,}: {excerpt(reply.text)}"
            )
        if problem and problem != "cut off":
            raise InvalidReply(f"the judge gave no verdict: the reply ended with {excerpt(reply.finish_reason)}")
        return self._form.read(
            reply,
            nonce=request.nonce,
            read=lambda answer, source: self._task.read(answer, request.sample, source),
            max_chars=self._max_reply_chars,
        )

    def component_names(self) -> tuple[str, ...]:
        return self._task.components

    def rehearsed_verdict(self, request: Request, share: float) -> Verdict:
        found, (low, high) = super().rehearsed_verdict(request, share), self._task.range
        count = len(request.sample.responses) if isinstance(request.sample, ListSample) else 0
        each = {f"{n}": low + (share + n / count) % 1.0 * (high - low) for n in range(1, count + 1)}
        return replace(found, raw=RawScore(low + share * (high - low), each))

    def mapped(self, raw: RawScore) -> Verdict:
        low, high = self._task.range
        numbers = (raw.score, *(raw.components.values() if self._task.scales_components else ()))
        if not all(low <= number <= high for number in numbers):
            raise InvalidReply("the recorded numbers are outside of the judge's score range")
        return self._mapped(raw)

    def _mapped(self, raw: RawScore, *, rationale: str = "", model: str = "", cut: bool = False) -> Verdict:
        components = {name: raw.components[name] for name in self._task.components}
        if components and self._task.scales_components:
            components = {name: self._scale.reward(number) for name, number in components.items()}
        reward = self._scale.reward(raw.score)
        # Not `verdict_with`, which passes keywords on: this runs for every reply.
        return Verdict(reward, components, rationale, self.correct(reward), self.name, "", model, cut=cut, raw=raw)


def task_of(config: LLMJudge.Config) -> Task:
    """What a judge with this configuration answers."""
    if config.reference is not None:
        return ReferenceTask()
    if config.labels is not None:
        return LabelTask(config.labels)
    return ScoreTask(config.score_range, config.criteria) if config.rubric is None else RubricTask(config.rubric)


def _mistakes(name: str, config: LLMJudge.Config) -> list[Mistake]:
    """Find keys that say twice what the judge answers, and labels whose rewards are out of range."""
    found = []
    given = [key for key in ("labels", "rubric", "reference") if getattr(config, key) is not None]
    beside = [key for key in ("score_range", "criteria") if key in config.model_fields_set and given]
    if len(given) + len(beside) > 1:
        problem = f"{' and '.join([*given, *beside])} exclude each other; each says what the judge answers."
        found.append(Mistake(f"judges.{name}.{given[0]}", problem, "Keep one of them."))
    low, high = config.reward_range
    outside = [label for label, reward in (config.labels or {}).items() if not low <= reward <= high]
    if outside:
        problem = f"the reward of {', '.join(outside)} is outside of the reward range {low:g} to {high:g}."
        found.append(Mistake(f"judges.{name}.labels", problem, "Set `reward_range`."))
    return found
