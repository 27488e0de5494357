"""The directory in which processes find each other: one for all of a user, and nobody else's."""

from __future__ import annotations

import errno
import os
import re
import socket
from pathlib import Path

import pytest

from qreward_plugins import ConfigurationError
from qreward_plugins.sharing import private_directory as module
from qreward_plugins.sharing.machine_keeper import SOCKET, is_own_user
from qreward_plugins.sharing.private_directory import private_directory

from ..kit.disks import NOBODY, read_only


@pytest.fixture
def directory(short_directory):
    return Path(short_directory)


def refused(path) -> str:
    """The one error, which names the key."""
    with pytest.raises(ConfigurationError) as found:
        private_directory(None if path is None else str(path))
    (mistake,) = found.value.mistakes
    assert mistake.path == "engine.shared_directory"
    assert mistake.remedy
    return f"{mistake.problem} {mistake.remedy}"


def as_another_user(monkeypatch):
    uid = os.getuid() + 1
    monkeypatch.setattr(module.os, "getuid", lambda: uid)


def test_it_is_made_for_this_user_alone_whatever_the_umask(directory):
    umask = os.umask(0)
    try:
        made = private_directory(str(directory / "new" / "inner"))
    finally:
        os.umask(umask)
    assert made.stat().st_mode & 0o777 == 0o700
    assert private_directory(str(made)) == made


def test_a_place_that_cannot_be_made_is_named(monkeypatch):
    made = []

    def mkdir(path, *_, **__):
        made.append(path)
        raise OSError(errno.EROFS, "not in a test")

    monkeypatch.delenv(module.VARIABLE)
    monkeypatch.setattr(module.Path, "mkdir", mkdir)
    assert f"/tmp/qreward-{os.getuid()} cannot be made (not in a test)" in refused(None)
    assert made == [Path("/tmp")]


def test_a_directory_that_others_may_enter_is_refused(directory):
    directory.chmod(0o755)
    said = refused(directory)
    assert "not private" in said
    assert f"chmod 700 {directory}" in said
    assert directory.stat().st_mode & 0o777 == 0o755


def test_a_directory_that_cannot_be_written_is_refused(directory):
    directory.chmod(0o700)
    with read_only(directory):
        os.seteuid(os.getuid())
        directory.chmod(0o500)  # private, unlike what `read_only` makes of it
        if os.getuid() == 0:
            os.seteuid(NOBODY)
        assert "cannot be written to" in refused(directory)


@pytest.mark.parametrize("what", ["directory", "link", "dangling", "file"])
def test_what_another_user_has_put_there_is_refused_and_left_alone(directory, monkeypatch, what):
    """Anybody may make /tmp/qreward-UID before its user does."""
    usual = directory / "qreward-{uid}"
    theirs = directory / f"qreward-{os.getuid() + 1}"
    (directory / "there").mkdir(mode=0o700)
    {
        "directory": lambda: theirs.mkdir(mode=0o700),
        "link": lambda: theirs.symlink_to(directory / "there"),
        "dangling": lambda: theirs.symlink_to(directory / "nowhere"),
        "file": theirs.touch,
    }[what]()
    before = theirs.lstat()
    monkeypatch.setattr(module, "USUAL", str(usual))
    as_another_user(monkeypatch)
    assert re.search(rf"belongs to another user \(uid {before.st_uid}; .*Name a directory of this user", refused(None))
    assert theirs.lstat() == before
    assert not (directory / "nowhere").exists()


def test_a_link_and_a_file_of_this_user_are_no_directories(directory):
    (directory / "there").mkdir(mode=0o700)
    (directory / "link").symlink_to(directory / "there")
    (directory / "file").touch()
    assert "is a symbolic link, which is not followed" in refused(directory / "link")
    assert "is no directory" in refused(directory / "file")
    assert "cannot be made" in refused(directory / "file" / "below")


def test_a_path_that_is_too_long_for_a_socket_is_refused_with_both_lengths(short_directory):
    # Nothing is made: the check comes first.
    said = refused("/nowhere/" + "x" * 100)
    assert f"path of {9 + 100 + 1 + len(SOCKET)} bytes, and a system takes {module.LONGEST_SOCKET_PATH}" in said
    longest = int(re.search(r"at most (\d+) bytes", said)[1])
    path = f"{short_directory}/{'x' * (longest - len(short_directory) - 1)}"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(private_directory(path) / SOCKET))
    assert "too long" in refused(path + "x")


def test_the_process_at_the_other_end_is_one_of_this_user(monkeypatch):
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert is_own_user(ours)
        as_another_user(monkeypatch)
        assert not is_own_user(ours)
