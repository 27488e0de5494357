"""Defines `FunctionSource`: it calls a Python function of the user or of a framework.

Async functions are awaited. Sync functions run in worker processes by default, because reward functions hang (in a
regular expression, in sympy, in the policy's own code) and only a process can be killed.

An exception of the function fails its sample without another try. There are two exceptions to this: time-outs and lost
connections are tried again, and errors of this package keep their meaning. A call that hangs or kills its process is
the sample's fault. It is the source's fault only if no worker process starts, or if none can load the function.

With `devices`, only the workers load the function, each with its device in its environment. This process often sees no
device: there, a file that loads its model when it is imported would fail, or load the model on the CPU. A ready-made
check is loaded here, too, so that a misspelt option is refused at the start.
"""

from __future__ import annotations

import functools
import inspect
import os
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from ..config.findings import did_you_mean
from ..config.nodes import PositiveInt, takes
from ..config.source_models import Batch, FreeMapping, SourceConfig
from ..errors import (
    ConfigurationError,
    InvalidReply,
    Mistake,
    NotStarted,
    SampleRefused,
    SourceUnusable,
)
from ..replicas.server_kinds import Device, TopologyError, variables_of_each
from ..samples import Sample
from ..secrets import Redactor, secrets_in, without_secrets
from ..system.functions import GUARD, Loader, PathLoader, describe, importing, is_async, load, origin_of
from . import worker_program as program
from .base import Reply, Request
from .function_arguments import FunctionArguments, ListLoader, as_list, is_ready_made, misfit, options_of
from .kind import VALUE, Provider, SourceKind
from .ray_methods import RayMethod, is_ray_method
from .threads import FunctionRaised, ThreadSlots, TooManyAbandoned
from .workers import CannotLoad, PoolClosed, WorkerPool


class FunctionSource(SourceKind):
    """A Python function that scores, yours or a framework's own.

    It is called once for each request, or once for several with `batch`.

    `name` is its name in the configuration. `loader` returns the function; the path in the configuration is then only
    its name. `loader` must pickle, because every worker process calls it. An adapter passes a framework's function this
    way, e.g. `functools.partial(load_function, settings)`. `secrets` are secret texts that the loader passes to the
    function in addition to `kwargs`; they are redacted from every message, like the secrets of `kwargs`.

    At most `slots` calls run at once; further ones wait in `send` before they start, except for a Ray actor. A source
    serves one event loop at a time.

    Raises ConfigurationError if the function cannot be loaded.
    """

    class Config(SourceConfig):
        """A Python function that scores; it may be a framework's own reward function."""

        function: Annotated[
            str,
            Field(pattern=r"^([^:]+:[A-Za-z_][A-Za-z0-9_.]*|ray:.+\.[A-Za-z_][A-Za-z0-9_]*)$"),
            takes("`package.module:name`, `path/to/file.py:name` or `ray:ACTOR.method`"),
        ]
        """`package.module:name` or `path/to/file.py:name`. `ray:ACTOR.method` or `ray:NAMESPACE/ACTOR.method`: a method
        of a named Ray actor, which must run when the engine is made. It is awaited, like an async function."""

        arguments: Literal["fields", "sample"] = "fields"
        """What the function is called with. `fields` (default): the keywords `data_source`, `solution_str`,
        `ground_truth` and `extra_info`, the convention of reward functions. `sample`: one `Sample`."""

        kwargs: FreeMapping = Field(default_factory=dict)
        """Further keyword arguments of every call. Values that come from the environment, and values under a key such
        as `api_key`, `token` or `password`, are treated as secrets."""

        mode: Literal["auto", "process", "thread"] = "auto"
        """Where a sync function runs; async functions are always awaited. `process` (`auto`, the default): in worker
        processes; a call that hangs is killed. `thread`: in threads, for functions that only wait; a call that hangs
        cannot be killed, and goes on after its time-out. A sample whose call crashes is tried once more, after all
        other samples. If other samples wait and no worker is free, a call is killed before `timeouts.total_s` when it
        takes 8 times as long as usual, but not before 5 s (15 s if no call has ended yet). Its sample is tried once
        more after the others, with the whole `timeouts.total_s`. A call that took the whole `timeouts.total_s` is not
        tried again."""

        workers: PositiveInt | None = None
        """Worker processes or threads. Default: one for each of `devices`, or else the number of processors that this
        process may use. For a Ray actor: calls that this process sends to it at once, at most its `max_concurrency`,
        because a call that waits in the actor uses up its time limit. Default for an actor: 1, as Ray's."""

        devices: (
            Annotated[
                tuple[Annotated[Device, Field(union_mode="left_to_right")], ...],
                Field(min_length=1),
                takes("a list of devices, by index or name"),
            ]
            | None
        ) = None
        """The devices of a function that computes on GPUs, by index or name. Each worker process sees one, in
        `CUDA_VISIBLE_DEVICES` (or those of ROCm), from before it imports the function's file; the workers
        are spread evenly, and one that is started again gets the same device. No other process loads the file. All
        workers start before the first sample, whose deadline runs from when they have loaded the function. Every
        process that scores has workers of its own. Default: what this process sees, which in a reward worker of verl
        or ROLL is none."""

        batch: Batch | None = None
        """Call the function with several samples at once, for a model on this machine. Each keyword then holds a list:
        `data_source`, `solution_str`, `ground_truth` and `extra_info`, or verl's plural names if the function has a
        parameter `solution_strs`; with `arguments: sample` it gets a list of `Sample`s. It returns a list, an array or
        a tensor with one value for each sample. `timeouts.total_s` is for the whole call. `max_tokens` is not possible,
        because tokens of functions are not counted. Default: one sample a call."""

        @field_validator("devices")
        @classmethod
        def _has_workers(cls, value: tuple[Device, ...] | None, info: ValidationInfo) -> tuple[Device, ...] | None:
            if value is None:
                return None
            if is_ray_method(info.data.get("function", "")):
                raise ValueError("Ray gives an actor its devices: start it with num_gpus, and remove devices")
            if info.data.get("mode") == "thread":
                raise ValueError("threads see the devices of their process; remove mode: thread, or devices")
            workers = info.data.get("workers")
            if workers is not None and workers < len(value):
                raise ValueError(f"workers: {workers} leaves devices unused; set {len(value)} or more, or remove it")
            try:
                variables_of_each(value)
            except TopologyError as error:
                raise ValueError(f"{error.problem} {error.remedy}".strip()) from None
            return value

    answers = (VALUE,)
    local = True
    usual_latency_s = 0.1

    def __init__(self, name: str, config: Config, *, loader: Loader | None = None, secrets: Iterable[str] = ()) -> None:
        super().__init__(name, config)
        self._config = config
        self._redactor = Redactor([*secrets_in(config.kwargs), *secrets])
        self._excerpt = self._redactor.of
        key = f"sources.{name}.function"
        if loader is None:
            loader = RayMethod(config.function) if is_ray_method(config.function) else PathLoader(config.function)
        self._loader = loader
        unseen = bool(config.devices) and not is_ready_made(config.function)
        self._function = _unloaded if unseen else load(loader, key=key, excerpt=self._excerpt)
        problem, options = f"{config.function} has no such argument.", options_of(self._function)
        mistakes = [
            Mistake(
                f"sources.{name}.kwargs.{each}",
                problem,
                did_you_mean(each, options) or f"It takes {', '.join(options)}.",
            )
            for each in config.kwargs
            if options and each not in options
        ]
        if config.batch is not None and config.batch.max_tokens is not None:
            problem = "the tokens of a function are not counted."
            mistakes.append(Mistake(f"sources.{name}.batch.max_tokens", problem, "Leave it out."))
        self._arguments = FunctionArguments(
            self._function, config.arguments, without_secrets(config.kwargs), batched=config.batch is not None
        )
        args, kwargs = self._arguments.of_batch([]) if config.batch is not None else self._arguments.of(Sample((), ""))
        problem = misfit(self._function, args, kwargs)
        if problem and not mistakes:
            mistakes.append(Mistake(key, f"{problem}.", "Let it take these, or add **_ to its parameters."))
        if mistakes:
            raise ConfigurationError(mistakes)
        self._closed = False
        self.model = config.function
        self._threads: ThreadSlots | None = None
        self._pool: WorkerPool | None = None
        self._started = not config.devices
        if is_async(self._function):
            if isinstance(loader, RayMethod):
                self.slots = config.workers or 1
            return
        devices = config.devices or ()
        self.slots = config.workers or len(devices) or processors()
        if config.mode == "thread":
            self._threads = ThreadSlots(name, self.slots)
            return
        if importing():
            raise ConfigurationError([Mistake(key, f"put the engine of {importing()} {GUARD}")])
        try:
            batched = config.batch is not None
            own = ListLoader(loader, batched, unseen=bool(devices)) if devices or batched else loader
            variables = variables_of_each(devices) if devices else ({},)
            self._pool = WorkerPool(self._where, own, self.slots, variables)
        except Exception as error:
            problem = (
                f"the function's loader cannot be pickled for the worker processes: {self._excerpt(describe(error))}."
            )
            remedy = "Define it at the top level of a module, or set mode: thread."
            raise ConfigurationError([Mistake(key, problem, remedy)]) from error

    @property
    def started(self) -> bool:
        return self._started

    def question(self, request: Request) -> object | None:
        """Return the version, the arguments, and the function's file and bound arguments, for the journal's key.

        None if the configuration has no `version`: the modules that a function imports may change unseen, so only the
        user can state that the function is unchanged.
        """
        if not self.reusable(self._config):
            return None
        return (
            "function",
            self._config.version,
            self._config.function,
            self._origin,
            self._arguments.of(request.sample),
        )

    @classmethod
    def reusable(cls, config: Any) -> bool:
        return config.version is not None

    @classmethod
    def provider(cls, config: Any, environment: Mapping[str, str]) -> Provider:
        """Return what the provider counts by: the path of the function, with the real path of its file."""
        where, _, name = config.function.rpartition(":")
        return Provider(config.kind, (f"{os.path.realpath(where) if where.endswith('.py') else where}:{name}",))

    @functools.cached_property
    def _origin(self) -> object:
        if isinstance(self._loader, RayMethod) or self._function is _unloaded:
            return (origin_of(self._loader),)
        return origin_of(self._loader), origin_of(self._function)

    async def start(self) -> None:
        """Start the workers that have devices, and wait until they have loaded the function.

        Raises ConfigurationError if the function cannot be loaded. Cancelling ends only the wait.
        """
        if self._started or self._pool is None:
            return
        try:
            await self._pool.start()
        except CannotLoad as error:
            problem = f"the function cannot be loaded: {self._excerpt(str(error))}"
            mistake = Mistake(f"sources.{self._name}.function", problem)
        except PoolClosed:
            return
        else:
            self._started = True
            return
        raise ConfigurationError([mistake])

    async def send(self, request: Request, *, on_sent: Callable[[], None]) -> Reply:
        """Call the function, and return its value as `Reply.value`.

        Cancelling kills a call in a worker process, together with the processes that it started. A cancelled call in a
        thread frees its slot and goes on.

        Raises SampleFault if the process of the call died; NotStarted if it cannot start; TransientError if
        the function raised a time-out or lost a connection; SampleRefused if it raised anything else, or if its
        arguments or its value do not pickle; SourceUnusable if the function cannot run at all. Errors of this package
        that the function raised keep their class.
        """
        if self._config.batch is not None:
            return (await self.send_batch([request], on_sent=on_sent))[0]
        return self._reply(await self._call(*self._arguments.of(request.sample), on_sent))

    async def send_batch(self, requests: Sequence[Request], *, on_sent: Callable[[], None]) -> Sequence[Reply]:
        """Call the function with the samples of several requests; see `Source`.

        Raises what `send` raises for all of them, and `InvalidReply` if it does not return a value for each sample.
        """
        args, kwargs = self._arguments.of_batch([request.sample for request in requests])
        values = as_list(await self._call(args, kwargs, on_sent))
        if not isinstance(values, (list, tuple)):
            kind = type(values).__name__
            problem = f"{self._where} returned a value of type {kind}; with `batch` it must return a list of values"
            raise InvalidReply(problem)
        if len(values) != len(requests):
            raise InvalidReply(f"{self._where} returned {len(values)} values for {len(requests)} samples")
        return [self._reply(value) for value in values]

    async def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], on_sent: Callable[[], None]) -> Any:
        """Call the function once, and return its value. Raises what `send` raises."""
        if self._closed:
            raise SourceUnusable(f"source {self._name!r} is closed", certain=True)
        if self._pool is not None:
            return await self._in_process(self._pool, args, kwargs, on_sent)
        call = functools.partial(self._function, *args, **kwargs)
        failure: Exception
        try:
            if self._threads is not None:
                value = await self._threads.run(call, on_start=on_sent)
            else:
                on_sent()
                value = await call()
        except TooManyAbandoned as error:
            raise NotStarted(f"source {self._name!r}: {error}; `mode: process` kills such calls") from None
        except FunctionRaised as wrapper:
            failure = program.failure_of(wrapper.error)
        except (Exception, SystemExit) as error:
            failure = program.failure_of(error)
        else:
            if not inspect.iscoroutine(value):
                return value
            value.close()
            failure = SampleRefused(program.COROUTINE, reason="raised")
        raise self._named(failure)

    async def aclose(self) -> None:
        """End the worker processes, within a few seconds even if they hang. Idempotent."""
        self._closed = True
        if self._pool is not None:
            await self._pool.aclose()
        if self._threads is not None:
            await self._threads.aclose()

    async def _in_process(
        self, pool: WorkerPool, args: tuple[Any, ...], kwargs: dict[str, Any], on_sent: Callable[[], None]
    ) -> Any:
        try:
            message = pickle.dumps((args, kwargs), pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            problem = f"got arguments that cannot be pickled for a worker process: {describe(error)}"
            raise self._named(SampleRefused(problem)) from None
        try:
            kind, payload = await pool.call(message, on_start=on_sent)
        except CannotLoad as error:
            problem = f"cannot be loaded in a worker process: {error}"
            raise self._named(SourceUnusable(problem, certain=True)) from None
        except PoolClosed:
            raise SourceUnusable(f"source {self._name!r} is closed", certain=True) from None
        try:
            carried = pickle.loads(payload)
        except Exception as error:
            problem = f"returned a value that cannot be unpickled: {describe(error)}"
            raise self._named(SampleRefused(problem, reason="raised")) from None
        if kind == program.VALUE:
            return carried
        raise self._named(carried)

    def _named(self, failure: Exception) -> Exception:
        """Put the name of the function before the message of a failure, and redact it."""
        failure.args = (f"{self._where} {self._excerpt(str(failure))}",)
        return failure

    def _reply(self, value: Any) -> Reply:
        return Reply(value=value, clean=self._redactor.clean)

    @property
    def _where(self) -> str:
        return f"source {self._name!r}: {self._config.function}"


def _unloaded(*_: Any, **__: Any) -> Any:
    """Stands for a function that only the workers load."""


def processors() -> int:
    """Return the number of processors that this process may use."""
    # A container or a job scheduler may give this process fewer processors than the machine has.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
