"""Defines `RewardModelSource`: a reward model behind an inference server that answers with numbers, not with text.

`reward_protocols.py` says how each server is asked. `RewardModelJudge` applies an activation if one is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ..config.source_models import BaseURLs, Batch, EndpointConfig, ModelName
from ..errors import InputError, InvalidReply, Mistake, QRewardError
from ..samples import Message
from .base import Reply, Request
from .bodies import Lists
from .endpoint import Endpoint
from .kind import LOGITS
from .rendering import ChatTemplate, StepTokenizer, Tokens, step_logits
from .reward_protocols import PROTOCOLS, LogitsAnswer, Protocol, ProtocolName

_TOKENIZED_KEPT = 64


class RewardModelSource(Endpoint):
    """A reward model behind vLLM, SGLang, text-embeddings-inference or OpenRLHF: it answers with raw numbers.

    `Reply.value` maps labels (or positions, "0", "1" ...) to logits. For a process reward model it is a list with the
    offset of the end of each step in the response, in characters, and such a mapping. Raises ConfigurationError as
    every `Endpoint` does, and for a chat template that is missing, not needed or broken.
    """

    class Config(EndpointConfig):
        """A reward model (a sequence classifier) behind an inference server."""

        URL_KEY: ClassVar[str] = "base_url"

        base_url: BaseURLs
        """URL of the server without a path, e.g. `http://localhost:8000`; or a list of replicas that share the limits
        of this source. Inside a trainer, `framework://reward` is the reward model that the trainer serves."""

        model: ModelName
        """Name of the model on the server (for vLLM its `--served-model-name`)."""

        protocol: ProtocolName = "vllm_classify"
        """How the server is asked. `vllm_classify` (default): a sequence classifier behind vLLM. `vllm_score`: a model
        with one label behind vLLM, which reads prompt and response as two texts. `vllm_steps`: a process reward model
        behind vLLM, which scores every step of the response; it needs `chat_template` and the package `tokenizers`,
        because the conversation is tokenized here. `sglang_classify`: SGLang with `--is-embedding`. `tei_predict`: a
        classifier behind text-embeddings-inference. `openrlhf`: OpenRLHF's `serve_rm`. For any other service use the
        kind `http`."""

        chat_template: Annotated[str, Field(min_length=1)] | None = None
        """Path to the reward model's folder, its `tokenizer_config.json`, or a Jinja file; the conversation is then
        rendered here. Default: the server renders it, which only `vllm_classify` can do. Protocols that read two texts
        use none."""

        step_separator: Annotated[str, Field(min_length=1, max_length=100)] = "\n\n"
        """Text that ends a step of the response, for `vllm_steps`. Default: an empty line."""

        batch: Batch | None = None
        """Send several responses in one request; `vllm_classify` then needs `chat_template`. See docs/reward_models.md.
        Default: one response a request."""

        step_token: Annotated[str, Field(min_length=1, max_length=100)] | None = None
        """Text that takes the place of every separator, and follows the last step, too: the token at which the model
        was trained to score a step (e.g. `<extra_0>`). A step's score is read at its last token. Default: the
        separator."""

    answers = (LOGITS,)
    usual_latency_s = 0.2
    ANSWER = LogitsAnswer

    def __init__(self, name: str, config: Config) -> None:
        self._protocol_name = config.protocol
        self._protocol = protocol = PROTOCOLS[config.protocol]
        tokens = protocol.form == "tokens"
        self._model = config.model
        self._template: ChatTemplate | None = None
        self._tokens: Callable[[tuple[tuple[str, str], ...]], Tokens] | None = None
        self._steps = (config.step_separator, config.step_token) if tokens else None
        where = f"sources.{name}.chat_template"
        mistakes: list[Mistake] = []
        if protocol.form == "pair" and config.chat_template:
            problem = f"{config.protocol} sends prompt and response as two texts and renders no conversation."
            mistakes.append(Mistake(where, problem, "Leave it out, or use another protocol."))
        elif protocol.form in ("text", "tokens") and not config.chat_template:
            problem = f"{config.protocol} takes a finished text, so the conversation is rendered here."
            mistakes.append(Mistake(where, problem, "Set it to the folder of the reward model."))
        self._takes_images = protocol.form == "messages" and not config.chat_template
        if not tokens:
            for key in sorted({"step_separator", "step_token"} & config.model_fields_set):
                problem = "only a process reward model scores steps."
                mistakes.append(Mistake(f"sources.{name}.{key}", problem, "Use vllm_steps, or leave it out."))
        mistakes += _overridden(f"sources.{name}.parameters", config, protocol)
        if config.batch is not None and self._takes_images:
            problem = f"{config.protocol} takes one response a request."
            remedy = "Set chat_template to the folder of the reward model, or leave batch out."
            mistakes.append(Mistake(f"sources.{name}.batch", problem, remedy))
        super().__init__(name, config, mistakes=mistakes, path=protocol.path)
        self._reads_with = partial(LogitsAnswer, protocol=protocol)
        if config.chat_template:
            self._template = ChatTemplate(config.chat_template, where=where)
            if tokens:
                tokenizer = StepTokenizer(
                    config.chat_template,
                    self._template,
                    separator=config.step_separator,
                    mark=config.step_token or "",
                    where=where,
                )
                # The scheduler's estimate, the body and the reply each need them.
                self._tokens = lru_cache(maxsize=_TOKENIZED_KEPT)(
                    lambda turns: tokenizer.tokens([Message(role=role, content=content) for role, content in turns])
                )

    @property
    def reads(self) -> object:
        # Not every protocol sends the name of the model, and other models give other logits.
        read = (self._protocol_name, self._model)
        return read if self._steps is None else (*read, *self._steps)

    @property
    def lists(self) -> Lists | None:
        return self._protocol.lists

    async def send(self, request: Request, *, on_sent: Callable[[], None]) -> Reply:
        return self._with_steps(request, await super().send(request, on_sent=on_sent))

    async def send_batch(
        self, requests: Sequence[Request], *, on_sent: Callable[[], None]
    ) -> Sequence[Reply | QRewardError]:
        results = await super().send_batch(requests, on_sent=on_sent)
        return [self._with_steps_or_error(*pair) for pair in zip(requests, results, strict=True)]

    def _with_steps_or_error(self, request: Request, result: Reply | QRewardError) -> Reply | QRewardError:
        try:
            return self._with_steps(request, result) if isinstance(result, Reply) else result
        except InvalidReply as error:
            return error.with_traceback(None)

    def _with_steps(self, request: Request, reply: Reply) -> Reply:
        """Reduce the numbers of every token to those of the steps. Raises `InvalidReply`."""
        if self._tokens is None:
            return reply
        steps = step_logits(reply.value, self._tokens(_turns(request)), self._name)
        return replace(reply, value=steps)

    def body(self, request: Request) -> Mapping[str, Any]:
        """Return the body. Raises `InputError` if the chat template refuses the messages."""
        messages = request.messages
        if not messages or messages[-1]["role"] != "assistant":
            raise InputError("the last message is not the response, a turn of the assistant")
        if self._takes_images:
            return self._protocol.body(self._model, {"messages": [dict(message) for message in messages]})
        if not all(isinstance(message["content"], str) for message in messages):
            raise InputError("a reward model takes texts only")
        prompt = {"prompt": _plain(messages[:-1]), "response": messages[-1]["content"]}
        if self._protocol.form == "pair":
            return self._protocol.body(self._model, prompt)
        if self._tokens is not None:
            return self._protocol.body(self._model, {"tokens": self._tokens(_turns(request)).ids})
        if self._template is not None:
            return self._protocol.body(self._model, {"text": self._template.render(messages), **prompt})
        raise InputError("the protocol needs a chat template")


def _turns(request: Request) -> tuple[tuple[str, str], ...]:
    return tuple((message["role"], message["content"]) for message in request.messages)


def _overridden(path: str, config: RewardModelSource.Config, protocol: Protocol) -> list[Mistake]:
    """Find parameters that would replace the conversation, or the settings by which a server answers with logits."""
    mistakes = []
    settings = protocol.body(config.model, {"text": "", "tokens": (), "prompt": "", "response": ""})
    for key, value in config.parameters.items():
        replaced = key in settings and key != "model" and value is not None and value != settings[key]
        if key in _CONVERSATION or replaced:
            problem = f"{config.protocol} writes it, to get the logits of the response."
            mistakes.append(Mistake(f"{path}.{key}", problem, "Leave it out; `activation` is a key of the judge."))
    return mistakes


_CONVERSATION = frozenset({"messages", "input", "text", "inputs", "query", "queries", "prompts", "documents"})
"""Keys of the protocols that hold the prompt or the response."""


def _plain(messages: Sequence[Message]) -> str:
    """Return a prompt as one text: its only turn, or all turns, each below its role."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in messages)
