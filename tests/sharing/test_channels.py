"""How processes come to share: the way to a keeper that `engine.shared` leads to, the directory of a machine, and which
of their sources are the same.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import types
from pathlib import Path

import pytest

from qreward_plugins import ConfigurationError, RewardEngine
from qreward_plugins.config import load_config
from qreward_plugins.quotas.shared import SharedQuota
from qreward_plugins.sharing import machine_channel, membership
from qreward_plugins.sharing.machine_channel import private_directory
from qreward_plugins.sharing.machine_keeper import SOCKET
from qreward_plugins.sharing.membership import source_keys
from qreward_plugins.system.ray_actors import ray_is_up
from tests.kit import each_of, in_virtual_time, make_config


@pytest.fixture(params=[True, False], ids=["ray_is_up", "without_ray"])
def up(request, monkeypatch):
    monkeypatch.setattr(membership, "ray_is_up", lambda: request.param)
    return request.param


def engine(shared, limits=None, **fields):
    return RewardEngine(
        make_config("a", limits={"a": limits or {"concurrency": 8}}, engine={"shared": shared}), **fields
    )


def is_shared(engine):
    return isinstance(engine.upstreams["a"].quota, SharedQuota)


@pytest.mark.parametrize("limits", [{"concurrency": 8}, {"requests_per_minute": 60}, {"tokens_per_minute": 6000}])
def test_auto_shares_wherever_ray_is_initialised_and_elsewhere_declared_rates(up, limits):
    assert is_shared(engine("auto", limits)) is (up or "concurrency" not in limits)
    # Whoever counts the processes may have them on several machines.
    assert is_shared(engine("auto", limits, processes=2)) is up


def a_function(**keys):
    function = {"kind": "function", "function": "operator:length_hint", "arguments": "sample"}
    return {"sources": {"a": {**function, **keys}}, "judges": {"j": {"kind": "function"}}}


def test_functions_without_limits_need_no_keeper(up):
    assert not is_shared(RewardEngine(a_function()))
    assert is_shared(RewardEngine(a_function(limits={"concurrency": 4}))) is up


@pytest.mark.anyio
async def test_the_first_declared_rate_needs_a_restart_because_sharing_begins_with_it():
    made = engine("auto")
    with pytest.raises(ConfigurationError, match="first limit of all sources needs a restart"):
        await made.reload(engine("auto", {"requests_per_minute": 60}).config)
    await made.aclose()


@pytest.mark.anyio
async def test_a_reload_that_is_refused_starts_no_keeper(monkeypatch):
    started = []
    monkeypatch.setattr(membership, "ray_is_up", lambda: True)
    monkeypatch.setattr(membership, "start_ahead", lambda *keeper: started.append(keeper))
    async with RewardEngine(a_function()) as made:
        with pytest.raises(ConfigurationError, match="needs a restart"):
            await made.reload(a_function(limits={"concurrency": 4}))
    assert started == []


@in_virtual_time
async def test_simulated_time_needs_no_keeper_of_the_machine():
    assert not is_shared(engine("auto", {"requests_per_minute": 60}))


def test_what_is_called_ray_may_be_anything(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    assert ray_is_up() is False


def test_ray_shares_or_says_why_it_cannot(up):
    if up:
        assert is_shared(engine("ray"))
        return
    with pytest.raises(ConfigurationError, match=r"(?s)engine\.shared.*not initialised.*ray\.init\(\)"):
        engine("ray")


@pytest.mark.parametrize(("shared", "part"), [("local", 2), ("off", 8)])
def test_local_divides_the_limit_among_its_processes_and_off_gives_each_the_whole(up, shared, part):
    made = engine(shared, {"concurrency": 8, "tokens_per_minute": 800}, processes=4)
    assert not is_shared(made)
    quota = made.upstreams["a"].quota
    assert (quota.concurrency, quota.tokens_per_window()) == (part, 100 * part)


# The directory of a machine: one for all of a user, and nobody else's


@pytest.fixture
def directory(short_directory):
    return Path(short_directory)


def named(path):
    """The directory if the environment names this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(machine_channel.VARIABLE, str(path))
        return private_directory()


def refused(path):
    """The one error of a directory, which names the variable."""
    with pytest.raises(ConfigurationError) as found:
        named(path)
    (mistake,) = found.value.mistakes
    assert mistake.path == machine_channel.VARIABLE
    assert mistake.remedy
    return f"{mistake.problem} {mistake.remedy}"


def test_it_is_made_for_this_user_alone_whatever_the_umask(directory):
    umask = os.umask(0)
    try:
        made = named(directory / "new" / "inner")
    finally:
        os.umask(umask)
    assert made.stat().st_mode & 0o777 == 0o700
    assert named(made) == made


def test_what_is_no_private_directory_is_refused(directory):
    directory.chmod(0o700)
    (directory / "there").mkdir(mode=0o755)
    (directory / "link").symlink_to(directory / "there")
    (directory / "file").touch()
    assert "Name a directory that is for this alone" in refused(directory / "there")
    assert (directory / "there").stat().st_mode & 0o777 == 0o755
    assert "a link is not followed" in refused(directory / "link")
    assert "is no directory" in refused(directory / "file")
    assert "cannot be made" in refused(directory / "file" / "below")


def test_what_another_user_has_put_there_is_refused_and_left_alone(directory, monkeypatch):
    """Anybody may make /tmp/qreward-UID before its user does."""
    (directory / "there").mkdir(mode=0o700)
    makers = {
        "directory": lambda path: path.mkdir(mode=0o700),
        "link": lambda path: path.symlink_to(directory / "there"),
    }
    other_uid = os.getuid() + 1
    for what, make in makers.items():
        theirs = directory / f"{what}-{other_uid}"
        make(theirs)
        before = theirs.lstat()
        with monkeypatch.context() as patch:
            patch.setattr(machine_channel, "USUAL", str(directory / f"{what}-{{uid}}"))
            patch.setattr(machine_channel.os, "getuid", lambda: other_uid)
            said = refused("")
        assert re.search(rf"belongs to another user \(uid {before.st_uid}; .*Name a directory of this user", said)
        assert theirs.lstat() == before


def test_a_path_that_is_too_long_for_a_socket_is_refused(short_directory):
    longest = int(re.search(r"at most (\d+) bytes", refused(f"{short_directory}/" + "x" * 100))[1])
    path = f"{short_directory}/{'x' * (longest - len(short_directory) - 1)}"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(named(path) / SOCKET))
    assert "too long" in refused(path + "x")


def test_a_relative_path_is_refused(monkeypatch, short_directory):
    """Processes with another working directory had limits of their own."""
    monkeypatch.chdir(short_directory)
    assert "relative" in refused("shared")
    assert not Path("shared").exists()


def test_a_keeper_of_another_version_is_refused_while_it_is_there(directory):
    """An engine waited for its answers until the deadline."""
    directory.chmod(0o700)
    (directory / "keeper.sock").touch()  # as version 0.2.0 called it
    said = refused(directory)
    assert f"in {directory} is of another version of the package. End its last run" in said
    (directory / "keeper.sock").unlink()
    assert named(directory) == directory


# What makes two sources the same to their provider


URL = "http://judge.example/v1"
BASE = {"kind": "openai", "base_url": URL, "model": "judge", "api_key": "one-secret"}


def keys(**sources):
    kind = "function" if all(source["kind"] == "function" for source in sources.values()) else "llm"
    tree = {"sources": sources, "judges": {"quality": {"kind": kind}}}
    return source_keys(load_config(tree))


def key(**fields):
    node = {name: value for name, value in {**BASE, **fields}.items() if value is not None}
    return keys(a=node)["a"]


def test_a_source_is_known_by_what_the_provider_sees_and_not_by_its_name():
    assert keys(a=BASE)["a"] == keys(other=BASE)["other"]
    assert re.fullmatch(r"[0-9a-f]{24}", key())
    assert key(limits={"requests_per_minute": 5}, timeouts={"total_s": 9}, price={"per_request": 1.0}) == key()
    others = [
        {"base_url": "http://other.example/v1"},
        {"base_url": [URL, "http://second.example/v1"]},
        {"model": "other"},
        {"api_key": "another-secret"},
        {"headers": {"x-team": "red"}},
    ]
    assert len({key(), *(key(**fields) for fields in others)}) == 1 + len(others)


def test_the_same_endpoint_twice_in_one_configuration_is_two_sources():
    twice = keys(a=BASE, b=BASE)
    assert twice["a"] != twice["b"]
    assert twice["a"] != key()
    # Another process with the same configuration means the same two.
    assert twice == keys(b=BASE, a=BASE)


@each_of(
    ("one", "other"),
    [
        *(
            ({"base_url": one}, {"base_url": other})
            for one, other in [
                (URL, f"{URL}/"),
                (URL, "http://JUDGE.example/v1"),
                (URL, "http://judge.example:80/v1"),
                ("https://judge.example/v1", "https://judge.example:443/v1"),
                (URL, "http://judge.example./v1"),
                ("http://[::1]:8000/v1", "http://[0:0:0:0:0:0:0:1]:8000/v1"),
                ("http://judge.example/~me/v1", "http://judge.example/%7Eme/v1"),
                (URL, [URL, "http://judge.example:80/v1"]),
                (["http://a.example/v1", "http://b.example/v1"], ["http://b.example/v1", "http://a.example/v1"]),
            ]
        ),
        ({"headers": {"X-Team": "red", "a": "b"}}, {"headers": {"A": "b ", "x-team": " red"}}),
        ({}, {"api_key": " one-secret\n"}),
        ({}, {"api_key": None, "headers": {"authorization": "Bearer one-secret"}}),
        ({}, {"api_key": None, "api_key_env": "THE_KEY"}),
    ],
)
def test_what_is_sent_is_compared_and_not_how_it_is_written(one, other, monkeypatch):
    monkeypatch.setenv("THE_KEY", "one-secret")
    assert key(**one) == key(**other)


def test_functions_are_known_by_what_they_call(tmp_path, monkeypatch):
    def of(function):
        return keys(a={"kind": "function", "function": function})["a"]

    monkeypatch.chdir(tmp_path)
    assert of(f"{tmp_path}/judges.py:grade") == of("./judges.py:grade")
    assert of("scoring.judges:grade") != of("scoring.judges:other")
