"""The directory in which processes find each other: one for all of a user, and nobody else's."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from qreward_plugins import ConfigurationError
from qreward_plugins.sharing import machine_channel as module
from qreward_plugins.sharing.machine_channel import private_directory
from qreward_plugins.sharing.machine_keeper import SOCKET


@pytest.fixture
def directory(short_directory):
    return Path(short_directory)


def named(path):
    """The directory if the environment names this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(module.VARIABLE, str(path))
        return private_directory()


def refused(path):
    """The one error of a directory, which names the variable."""
    with pytest.raises(ConfigurationError) as found:
        named(path)
    (mistake,) = found.value.mistakes
    assert mistake.path == module.VARIABLE
    assert mistake.remedy
    return f"{mistake.problem} {mistake.remedy}"


def as_another_user(monkeypatch):
    uid = os.getuid() + 1
    monkeypatch.setattr(module.os, "getuid", lambda: uid)


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
    for what, make in makers.items():
        theirs = directory / f"{what}-{os.getuid() + 1}"
        make(theirs)
        before = theirs.lstat()
        with monkeypatch.context() as patch:
            patch.setattr(module, "USUAL", str(directory / f"{what}-{{uid}}"))
            as_another_user(patch)
            said = refused("")
        assert re.search(rf"belongs to another user \(uid {before.st_uid}; .*Name a directory of this user", said)
        assert theirs.lstat() == before


def test_a_path_that_is_too_long_for_a_socket_is_refused(short_directory):
    longest = int(re.search(r"at most (\d+) bytes", refused(f"{short_directory}/" + "x" * 100))[1])
    path = f"{short_directory}/{'x' * (longest - len(short_directory) - 1)}"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(named(path) / SOCKET))
    assert "too long" in refused(path + "x")


def test_a_keeper_of_another_version_is_refused_while_it_is_there(directory):
    """An engine waited for its answers until the deadline."""
    directory.chmod(0o700)
    (directory / "keeper.sock").touch()  # as version 0.2.0 called it
    said = refused(directory)
    assert f"in {directory} is of another version of the package. End its last run" in said
    (directory / "keeper.sock").unlink()
    assert named(directory) == directory
