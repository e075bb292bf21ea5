"""Statuses of many files at once: what tells that a file has changed is the same however it is looked at."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from holdfast.process import folders
from holdfast.process.folders import Paths, stamp_of, stamps

MANY = 3 * folders._GLANCES_MIN
"""Enough for several threads."""


@pytest.fixture(params=["at once", "by whole paths", "one by one"])
def way(request, monkeypatch):
    """With the system's library, also where threads must stay where they are; and where it is another one."""
    if request.param == "one by one":
        monkeypatch.setattr(folders, "_has_fts", lambda: False)
    elif not folders._has_fts():
        pytest.skip("not with this library")
    elif request.param == "by whole paths":
        monkeypatch.setattr(folders, "_stands_apart", lambda _: False)


def stamps_of(root, *lists):
    """The stamps of lists of paths beneath a root, wherever this process stands."""
    with folders.Folders(root) as opened:
        return stamps([Paths(os.fsencode(root), paths) for paths in lists], opened.root)


def paths_in(root):
    return [
        os.path.join(above, name) for above, inner, names in os.walk(os.fsencode(root)) for name in chain(inner, names)
    ]


@pytest.mark.usefixtures("way")
def test_many_statuses_are_those_that_each_one_has(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "leads").symlink_to("folder")
    (tmp_path / "leads nowhere").symlink_to("nowhere")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\n odd")).touch()
    with (tmp_path / "large").open("wb") as large:
        large.truncate(5 * 2**30)
    for number, at_ns in enumerate((-1, -(10**18) - 7, 1, 2**31 * 10**9 + 123_456_789)):
        (tmp_path / f"{number}").touch()
        os.utime(tmp_path / f"{number}", ns=(0, at_ns))
    there = paths_in(tmp_path)
    wanted = [stamp_of(os.lstat(path)) for path in there]
    assert len(set(wanted)) == len(there) == 10
    inner = [path.removeprefix(os.fsencode(tmp_path) + b"/") for path in there]
    assert stamps_of(tmp_path) == []
    assert stamps_of(tmp_path, *([path] for path in inner)) == wanted
    times = -(-MANY // len(there))
    assert stamps_of(tmp_path, inner, inner * times) == wanted * (times + 1)
    assert stamps_of(tmp_path, [b""]) == [stamp_of(os.lstat(tmp_path))]


@pytest.mark.usefixtures("way")
def test_what_cannot_be_looked_at_is_not_what_it_was(tmp_path):
    paths = [tmp_path / f"{number}" for number in range(6)]
    for path in paths:
        path.write_bytes(b"before")
    names = [os.fsencode(path.name) for path in paths] * (MANY // len(paths))
    before = stamps_of(tmp_path, names)[:6]
    paths[0].unlink()
    paths[1].unlink()
    paths[1].symlink_to("2")
    paths[2].write_bytes(b"content of another length")
    os.utime(paths[3], ns=(0, 0))
    paths[4].rename(paths[5])
    now = stamps_of(tmp_path, [b"0/below", b"x" * 5_000, *names])
    assert not {*before[:4], *before[5:]} & {*now}
    assert now[0] == now[1] == now[2] == now[6]


def test_only_the_threads_that_look_stand_in_the_root(tmp_path, monkeypatch):
    """The program, and what it starts meanwhile, stay where they are."""
    if not folders._has_fts():
        pytest.skip("not with this library")
    stood, stands = [], folders._stands_apart

    def standing(root):
        there = stands(root)
        stood.append((there, os.getcwd()))
        return there

    monkeypatch.setattr(folders, "_stands_apart", standing)
    monkeypatch.chdir("/")
    (tmp_path / "file").touch()
    assert {*stamps_of(tmp_path, [b"file"] * MANY)} == {stamp_of(os.lstat(tmp_path / "file"))}
    assert os.getcwd() == "/"
    if any(there for there, _ in stood):  # a sandbox may forbid it
        assert {*stood} == {(True, str(tmp_path))}


LOOKS = """
import os, sys
from holdfast.process.folders import Paths, stamps

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

paths, root = [Paths(os.fsencode(sys.argv[1]), [b""] * 6_000)], os.open(sys.argv[1], os.O_RDONLY)
stamps(paths, root)
before = resident()
for _ in range(50):
    stamps(paths, root)
print(resident() - before)
"""


def test_looking_again_and_again_keeps_no_memory(tmp_path):
    """Whatever lies in the memory that the library gets: it does not clear all that it looks at in the end."""
    environment = {**os.environ, "MALLOC_PERTURB_": "1"}
    said = subprocess.run([sys.executable, "-c", LOOKS, tmp_path], env=environment, stdout=subprocess.PIPE, check=True)
    assert int(said.stdout) < 20 * 2**20, "one look takes some 2 MB"
