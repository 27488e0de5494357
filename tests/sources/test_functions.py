"""Functions as sources: where they run, what they are given, what they may do wrong, and how their workers end."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from qreward_plugins import RewardEngine
from qreward_plugins.errors import (
    ConfigurationError,
    InvalidReply,
    PermanentError,
    QRewardError,
    SampleFault,
    SampleRefused,
    SourceUnusable,
    Throttled,
    TransientError,
)
from qreward_plugins.samples import Failed, Sample, Scored
from qreward_plugins.sources import FunctionSource, Request, threads
from qreward_plugins.sources.worker_program import END_WITHIN_S
from qreward_plugins.system.functions import PathLoader, load

from ..kit import Program, comes, each_of, lives, mistakes_of, wait_until
from .wire import nothing

pytestmark = pytest.mark.anyio
FUNCTIONS = Path(__file__).with_name("scoring_functions.py")
PATIENCE_S = 30.0


def config(name, **settings):
    return FunctionSource.Config(kind="function", function=f"{FUNCTIONS}:{name}", **{"workers": 1, **settings})


def request(response="r", **fields):
    fields.setdefault("messages", [{"role": "user", "content": "q"}])
    return Request(sample=Sample(response=response, **fields))


def samples(*responses):
    return [Sample([{"role": "user", "content": "?"}], response) for response in responses]


@pytest.fixture
async def opened():
    sources: list[FunctionSource] = []

    def make(name, **settings):
        sources.append(FunctionSource("f", config(name, **settings)))
        return sources[-1]

    yield make
    for source in sources:
        await source.aclose()


async def value(source, asked):
    reply = await asyncio.wait_for(source.send(asked, on_sent=nothing), PATIENCE_S)
    return reply.value


def written(path):
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("mode", ["auto", "thread"])
async def test_a_sync_function_gets_the_fields(mode, opened):
    source = opened("fields", mode=mode, kwargs={"bonus": 2.0})
    sent: list[int] = []
    asked = request("text", data_source="math", ground_truth="42", extras={"level": 5})
    reply = await source.send(asked, on_sent=lambda: sent.append(1))
    assert sent == [1]
    assert reply.value["score"] == 3.0
    assert reply.value["given"] == ["math", "text", "42", {"level": 5}]
    assert (reply.value["pid"] == os.getpid()) == (mode == "thread")
    assert (source.model, source.slots) == (f"{FUNCTIONS}:fields", 1)
    asked = request("text", ground_truth=[1, 2], group_id="g", step=3, split="train", id="i")
    given, bonus = await value(opened("of_sample", mode=mode, arguments="sample", kwargs={"bonus": 1.0}), asked)
    assert (given, bonus) == (asked.sample, 1.0)


async def test_an_async_function_and_its_failures(opened):
    for name, score in (("awaited_object", 0.25), ("awaited_object.method", 0.75)):
        assert (opened(name).slots, await value(opened(name), request())) == (None, score)
    source = opened("awaited")
    assert await value(source, request()) == {"score": 0.5}
    with pytest.raises(PermanentError, match=r"raised ValueError: bad sample \(.*functions.py:\d+\)"):
        await value(source, request("raise"))
    with pytest.raises(PermanentError, match="raised SystemExit: 3"):
        await value(source, request("exit"))


@pytest.mark.parametrize("mode", ["process", "thread"])
async def test_what_a_function_raises(mode, opened):
    source = opened("misbehave", mode=mode)
    for response, kind, says in (
        ("raise", SampleRefused, r"raised ValueError: bad \\x1b sample \(.*functions.py:\d+\)"),
        ("strange", SampleRefused, "raised Strange: a"),
        ("stop", SampleRefused, "raised StopIteration"),
        ("exit", SampleRefused, "raised SystemExit: 3"),
        ("late", TransientError, "raised TimeoutError: too late"),
        ("lost", TransientError, "raised ConnectionResetError: lost"),
        ("coroutine", SampleRefused, "returned a coroutine"),
        ("throttled", Throttled, "wait"),
        ("invalid", InvalidReply, "no"),
    ):
        with pytest.raises(kind, match=says) as caught:
            await value(source, request(response))
        assert type(caught.value) is kind
        assert getattr(caught.value, "retry_after_s", 2.0) == 2.0
    assert (await value(source, request()))["score"] == 1.0


async def test_a_worker_that_is_lost_is_replaced(opened):
    source = opened("misbehave")
    for response, kind, says in (
        (lambda: None, SampleRefused, "got arguments that cannot be pickled for a worker"),
        ("crash", SampleFault, r"worker process died \(exit status 7\)"),
        ("segfault", SampleFault, r"worker process died \(killed by signal 11\)"),
        ("lambda", SampleRefused, "of type function, which cannot be pickled"),
    ):
        with pytest.raises(kind, match=says) as caught:
            await value(source, request(response) if isinstance(response, str) else request(ground_truth=response))
        assert type(caught.value) is kind
        assert (await value(source, request()))["score"] == 1.0


def test_a_loader_that_does_not_pickle_is_a_mistake():
    with pytest.raises(ConfigurationError, match="cannot be pickled"):
        FunctionSource("f", config("fields"), loader=lambda: dict)


async def test_cancelling_kills_the_call_with_all_that_it_started_and_frees_its_slot(opened, tmp_path):
    source, started = opened("misbehave"), tmp_path / "started"
    task = asyncio.create_task(source.send(request("family", extras={"started": str(started)}), on_sent=nothing))
    await comes(lambda: len(written(started).split()) == 2)
    pids = written(started).split()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await comes(lambda: not any(lives(int(pid)) for pid in pids))
    assert (await value(source, request()))["score"] == 1.0


def test_workers_end_when_their_source_is_collected_unclosed(tmp_path):
    """A training step raises in the middle of a batch, and the process goes on."""

    def workers():
        return {child.pid for child in psutil.Process().children() if lives(child.pid)}

    async def step(source, started):
        task = asyncio.create_task(source.send(request("hang", extras={"started": str(started)}), on_sent=nothing))
        await comes(lambda: written(started))
        raise KeyError(task.get_name())

    before = workers()
    with pytest.raises(KeyError):
        asyncio.run(step(FunctionSource("f", config("misbehave", workers=2)), tmp_path / "started"))
    gc.collect()
    wait_until(lambda: not workers() - before)


async def test_closing_ends_workers_that_hang_and_fails_their_calls(opened, tmp_path):
    source = opened("misbehave", workers=2)
    await value(source, request())
    started = tmp_path / "started"
    task = asyncio.create_task(source.send(request("hang", extras={"started": str(started)}), on_sent=nothing))
    pid = int(await comes(functools.partial(written, started)))
    await asyncio.wait_for(source.aclose(), PATIENCE_S)
    with pytest.raises(TransientError):
        await task
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(SourceUnusable, match="closed"):
        await value(source, request())
    await source.aclose()
    # Also while a worker starts.
    source = opened("misbehave")
    task = asyncio.create_task(source.send(request(), on_sent=nothing))
    await asyncio.sleep(0)
    await asyncio.wait_for(source.aclose(), PATIENCE_S)
    with pytest.raises(SourceUnusable, match="closed"):
        await task


async def test_a_worker_is_a_process_like_any_other(opened, capfd):
    source = opened("misbehave")
    # Ctrl-C is for the parent.
    assert await value(source, request("interrupt")) == (await value(source, request()))["pid"]
    # A function may use processes of its own.
    assert await value(source, request("fork")) == 3
    # What it prints is no part of the output of a command, and comes at once, a line as a whole.
    source = opened("prints")
    assert await value(source, request("hello")) == 1.0
    assert capfd.readouterr() == ("", "hello\n")


async def test_a_function_that_loads_here_but_not_in_a_worker(tmp_path, monkeypatch):
    path = tmp_path / "picky.py"
    path.write_text(
        "import os\nif os.getpid() != int(os.environ['QREWARD_TEST_PID']): raise ValueError('elsewhere')\n"
        "def score(**given): return 1.0\n"
    )
    monkeypatch.setenv("QREWARD_TEST_PID", str(os.getpid()))
    source = FunctionSource("f", FunctionSource.Config(kind="function", function=f"{path}:score", workers=1))
    with pytest.raises(SourceUnusable, match="cannot be loaded in a worker process: ValueError: elsewhere"):
        await value(source, request())
    await source.aclose()


async def test_no_process_can_be_started(opened, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(11, "Resource temporarily unavailable")

    source = opened("misbehave")
    monkeypatch.setattr(subprocess, "Popen", fail)
    with pytest.raises(TransientError, match="no worker process can be started"):
        await value(source, request())
    monkeypatch.undo()
    assert (await value(source, request()))["score"] == 1.0


def test_two_event_loops_one_after_the_other():
    source = FunctionSource("f", config("misbehave", workers=2))

    async def use():
        replies = await asyncio.gather(*(value(source, request()) for _ in range(6)))
        return len(replies)

    assert asyncio.run(use()) == 6
    first = source._pool.pids  # type: ignore[union-attr]
    assert asyncio.run(use()) == 6
    assert first & source._pool.pids  # type: ignore[union-attr]
    asyncio.run(source.aclose())


PARENT = """
import asyncio, sys
from qreward_plugins.samples import Sample
from qreward_plugins.sources import FunctionSource, Request

async def main(function, response, started):
    source = FunctionSource("f", FunctionSource.Config(kind="function", function=function, workers=1))
    sample = Sample(messages=[], response=response, extras={"started": started})
    await source.send(Request(sample=sample), on_sent=lambda: None)
    print([*source._pool.pids][0], flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_parent_that_is_killed_leaves_no_worker_behind(tmp_path):
    started = tmp_path / "started"
    with Program("-c", PARENT, f"{FUNCTIONS}:misbehave", "hang", started) as parent:
        pid = int(await comes(functools.partial(written, started)))
        parent.send_signal(signal.SIGKILL)  # to it alone
        killed_at = time.monotonic()
        await comes(lambda: not lives(pid))
    assert time.monotonic() - killed_at < END_WITHIN_S  # others are soon given its concurrency


def test_a_parent_that_forgets_to_close_ends_cleanly(tmp_path):
    with Program("-W", "error", "-c", PARENT, f"{FUNCTIONS}:misbehave", "fine", tmp_path) as parent:
        code, pid, problems = parent.end(0)
    assert (code, problems) == (0, "")
    wait_until(lambda: not lives(int(pid)))


class Gate:
    """A function for threads that waits until it is let go."""

    def __init__(self):
        self.entered = threading.Semaphore(0)
        self.opened = threading.Event()

    def __call__(self, **given):
        self.entered.release()
        assert self.opened.wait(PATIENCE_S)
        return 1.0


def in_threads(gate, workers=1):
    return FunctionSource("f", config("fields", mode="thread", workers=workers), loader=lambda: gate)


async def entered(gate):
    assert await asyncio.to_thread(gate.entered.acquire, timeout=PATIENCE_S)


async def test_no_more_threads_than_told():
    gate = Gate()
    source = in_threads(gate, workers=2)
    sent: list[int] = []
    tasks = [asyncio.create_task(source.send(request(), on_sent=lambda: sent.append(1))) for _ in range(5)]
    for _ in range(2):
        await entered(gate)
    assert len(sent) == 2
    gate.opened.set()
    assert [(await task).value for task in tasks] == [1.0] * 5
    assert len(sent) == 5
    await source.aclose()


async def test_a_hanging_thread_gives_its_slot_back_and_there_is_a_limit(monkeypatch):
    monkeypatch.setattr(threads, "_MOST_ABANDONED", 4)
    gate = Gate()
    source = in_threads(gate)
    for _ in range(4):
        task = asyncio.create_task(source.send(request(), on_sent=nothing))
        await entered(gate)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert source._threads is not None
    assert source._threads.abandoned == 4
    with pytest.raises(TransientError, match="4 abandoned calls still run"):
        await value(source, request())
    gate.opened.set()
    await source.aclose()
    assert source._threads.abandoned == 0


# Several samples in one call


BATCHED = """
import os, time

def fields(data_source, solution_str, ground_truth, extra_info, scale=1.0):
    assert len(data_source) == len(solution_str) == len(ground_truth) == len(extra_info)
    return [scale * len(text) for text in solution_str]

def verl(data_sources, solution_strs, ground_truths, extra_infos):
    assert len(data_sources) == len(solution_strs) == len(ground_truths) == len(extra_infos)
    return [float(len(text)) for text in solution_strs]

def samples(samples):
    return tuple(float(len(sample.response)) for sample in samples)

async def awaited(samples):
    return [float(len(sample.response)) for sample in samples]

def array(samples):
    import numpy
    return numpy.array([len(sample.response) for sample in samples], dtype="float32")

def too_few(samples):
    return [1.0] * (len(samples) - 1)

def one_number(samples):
    return 0.5

def bad(samples):
    texts = [sample.response for sample in samples]
    if "raise" in texts:
        raise ValueError("cannot score this")
    if "crash" in texts:
        os._exit(3)
    if "hang" in texts:
        time.sleep(600)
    return [float(len(text)) for text in texts]
"""


@pytest.fixture
def node(tmp_path):
    (tmp_path / "rewards.py").write_text(BATCHED)

    def made(name, **settings):
        own = {"workers": 1, "batch": {"max_size": 8}, "arguments": "sample"}
        return {"kind": "function", "function": f"{tmp_path}/rewards.py:{name}", **own, **settings}

    return made


async def called(node, responses):
    source = FunctionSource("f", FunctionSource.Config.model_validate(node))
    sent: list[bool] = []
    requests = [Request(Sample([], text, ground_truth="g", data_source="d")) for text in responses]
    try:
        return [reply.value for reply in await source.send_batch(requests, on_sent=lambda: sent.append(True))]
    except QRewardError as error:
        return error
    finally:
        await source.aclose()
        assert sent == [True]


@pytest.mark.parametrize("mode", ["process", "thread"])
async def test_a_function_gets_lists_and_returns_a_value_for_each(node, mode):
    # A worker makes lists of arrays.
    for name in ("verl", "array") if mode == "process" else ("fields", "verl", "samples", "awaited", "array"):
        arguments = "fields" if name in ("fields", "verl") else "sample"
        assert await called(node(name, arguments=arguments, mode=mode), ["a", "bb", "ccc"]) == [1.0, 2.0, 3.0], name


async def test_of_lists_further_arguments_are_none_and_values_are_as_many_as_samples(node):
    assert await called(node("fields", arguments="fields", mode="thread", kwargs={"scale": 2.0}), ["a"]) == [2.0]
    for name, said in (
        ("too_few", "returned 2 values for 3 samples"),
        ("one_number", "type float; with `batch` it must return a list"),
    ):
        error = await called(node(name, mode="thread"), ["a", "bb", "ccc"])
        assert isinstance(error, InvalidReply)
        assert said in str(error)


async def test_one_bad_sample_costs_no_neighbour(node):
    source = node("bad", timeouts={"total_s": 1})
    async with RewardEngine({"sources": {"f": source}, "judges": {"j": {"kind": "function"}}}) as engine:
        for response, reason in (("raise", "raised"), ("crash", "crashed"), ("hang", "hung")):
            outcomes = await asyncio.wait_for(engine.score_all(samples("a", "bb", response, "ccc", "dddd")), 60)
            scores = [outcome.verdict.score for outcome in outcomes if isinstance(outcome, Scored)]
            assert scores == [1.0, 2.0, 3.0, 4.0]
            assert isinstance(outcomes[2], Failed)
            assert outcomes[2].reason == reason


# Devices: a device is only a number in an environment variable here


ON_DEVICES = """
import os, time
from contextlib import suppress
from pathlib import Path

SEEN = os.environ["CUDA_VISIBLE_DEVICES"]  # when the file is imported
with (Path(__file__).parent / "imports").open("a") as file:
    file.write(f"{os.getpid()} {SEEN}\\n")

def score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "crash once on 5":
        crashed = Path(__file__).parent / "crashed"
        if SEEN == "5":
            with suppress(FileExistsError):
                crashed.touch(exist_ok=False)
                os._exit(3)
        while not crashed.exists():
            time.sleep(0.01)
    return {"score": 1.0, "device": int(SEEN), "pid": os.getpid()}

def plurals(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(len(text)) for text in solution_strs]

async def awaited(**_):
    return 1.0

if (Path(__file__).parent / "out of memory").exists():
    os._exit(9)
"""


@pytest.fixture
def tree(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as in a reward worker
    (tmp_path / "model.py").write_text(ON_DEVICES)

    def made(name="score", **source):
        node = {"kind": "function", "function": f"{tmp_path}/model.py:{name}", "devices": [3, 5], **source}
        return {"sources": {"rm": node}, "judges": {"j": {"kind": "function"}}, "engine": {"deadline_s": 60}}

    return made


def imports(tmp_path):
    """The devices that the importing processes saw, by process id."""
    return {int(pid): int(seen) for pid, seen in map(str.split, (tmp_path / "imports").read_text().splitlines())}


async def test_each_worker_sees_its_own_device_when_it_imports_the_file(tree, tmp_path):
    async with RewardEngine(tree()) as engine:
        outcomes = await engine.score_all(samples(*"abcdefgh"))
    seen = imports(tmp_path)
    assert sorted(seen.values()) == [3, 5]  # all workers, and neither this process
    assert {(o.verdict.components["pid"], o.verdict.components["device"]) for o in outcomes} <= set(seen.items())


async def test_a_worker_that_dies_is_replaced_on_its_device(tree, tmp_path):
    async with RewardEngine(tree(workers=3)) as engine:
        outcomes = await engine.score_all(samples(*["crash once on 5"] * 3))
        assert [outcome.reward for outcome in outcomes] == [1.0] * 3
        await comes(lambda: len(imports(tmp_path)) == 4)
    *first, last = imports(tmp_path).values()
    assert (sorted(first), last) == ([3, 3, 5], 5)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("score", "no worker process could be started"),  # they die while they load
        ("nowhere", "the function cannot be loaded: .*model.py has no 'nowhere'"),
        ("awaited", "the function cannot be loaded: it is async, and would run in a process without devices"),
    ],
)
async def test_a_function_that_workers_cannot_load_stops_the_start(tree, tmp_path, name, problem):
    if name == "score":
        (tmp_path / "out of memory").touch()
    async with RewardEngine(tree(name, devices=[3])) as engine:
        for _ in range(2):
            with pytest.raises(ConfigurationError, match=rf"sources\.rm\.function: .*{problem}"):
                await engine.score_all(samples("a"))


AN_ENGINE = """
from qreward_plugins import Sample, load_config, process_portal

def score(solution_str, **_):
    return 1.0

sources = {"f": {"kind": "function", "function": "script.py:score"}}
portal = process_portal(load_config({"sources": sources, "judges": {"j": {"kind": "function"}}}))
portal.score(Sample([{"role": "user", "content": "?"}], "!"))
"""


A_CALL = """
from qreward_plugins import accelerate

@accelerate(mode="process")
def double(x):
    return 2 * x

double(2)
"""


@each_of("script", [AN_ENGINE, A_CALL])
def test_a_script_that_each_worker_would_repeat_is_told_of_the_main_guard(tmp_path, script):
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "if __name__ ==" in done.stderr.splitlines()[-1]


def test_a_decorator_may_add_what_its_function_takes():
    def with_client(function):
        @functools.wraps(function)
        def called(solution_str, **fields):
            return function(object(), solution_str)

        return called

    @with_client
    def score(client, text):
        return 1.0

    FunctionSource("f", config("fields", mode="thread"), loader=lambda: score)


MISSPELT = {"function": "qreward_plugins.checks:number", "kwargs": {"tolerence": 0.1}, "devices": None}


@each_of(
    ("settings", "key", "problem"),
    [
        ({"function": "ray:judge.score"}, "devices", "Ray gives an actor its devices"),
        ({"mode": "thread"}, "devices", "threads see the devices of their process; remove mode: thread, or devices"),
        ({"workers": 1}, "devices", "workers: 1 leaves devices unused; set 2 or more, or remove it"),
        ({"devices": [0, -1]}, "devices", "-1 is no index of a device"),
        ({"devices": []}, "devices", "must be a list of devices, by index or name"),
        ({"devices": None, "batch": {"max_tokens": 100}}, "batch.max_tokens", "max_tokens"),
        (MISSPELT, "kwargs.tolerence", "tolerance"),
        ({"function": f"{FUNCTIONS}:of_sample", "devices": None}, "function", "it takes (sample, bonus)"),
    ],
)
def test_what_cannot_work_is_refused(tree, settings, key, problem):
    [(path, said)] = mistakes_of(RewardEngine, tree(**settings)).items()
    assert (path, problem in said) == (f"sources.rm.{key}", True), said


# Where a function is found


@each_of(
    ("path", "says"),
    [
        ("HERE/unfinished.py:score", "unfinished.py, line 1"),
        ("no_such_package.inner:score", "there is no module 'no_such_package'"),
        ("nowhere/rewards.py:score", r"nowhere/rewards.py' \(a relative path begins at the current directory\)"),
        ("json:JSONEncoderr", "json has no 'JSONEncoderr'; did you mean 'JSONEncoder'"),
        (f"{FUNCTIONS}:value", "value of .* is of type float, not a function"),
        ("HERE/broken.py:score", "ModuleNotFoundError: No module named 'no_such_module_at_all' .*broken.py:1"),
    ],
)
def test_what_is_wrong_with_a_path(path, says, tmp_path):
    (tmp_path / "unfinished.py").write_text("def score(\n")
    (tmp_path / "broken.py").write_text("import no_such_module_at_all\n")
    with pytest.raises(ConfigurationError, match=says) as caught:
        load(PathLoader(path.replace("HERE", str(tmp_path))), key="sources.f.function")
    assert [mistake.path for mistake in caught.value.mistakes] == ["sources.f.function"]
    assert "importlib" not in str(caught.value)


def test_nobody_imports_what_only_others_need():
    program = (
        "import sys, qreward_plugins.sources.worker_program, qreward_plugins.system.functions\n"
        "print(sorted({'aiohttp', 'pydantic', 'asyncio'} & set(sys.modules)))\n"
        "import qreward_plugins.sources.openai\n"
        "print('httpx' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\nFalse\n"
