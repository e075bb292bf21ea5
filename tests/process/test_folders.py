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


@pytest.fixture(params=["at once", "one by one"])
def way(request, monkeypatch):
    """With the system's library, and where it is another one than is known."""
    if request.param == "one by one":
        monkeypatch.setattr(folders, "_has_fts", lambda: False)
    elif not folders._has_fts():
        pytest.skip("not with this library")


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
    assert stamps([]) == []
    assert stamps([Paths([path]) for path in there]) == wanted
    times = -(-MANY // len(there))
    assert stamps([Paths(there), Paths(there * times)]) == wanted * (times + 1)


@pytest.mark.usefixtures("way")
def test_what_cannot_be_looked_at_is_not_what_it_was(tmp_path):
    paths = [b"%b/%d" % (os.fsencode(tmp_path), number) for number in range(6)]
    for path in paths:
        Path(os.fsdecode(path)).write_bytes(b"before")
    before = stamps([Paths(paths)])
    os.unlink(paths[0])
    os.unlink(paths[1])
    os.symlink("2", paths[1])
    Path(os.fsdecode(paths[2])).write_bytes(b"content of another length")
    os.utime(paths[3], ns=(0, 0))
    os.rename(paths[4], paths[5])
    now = stamps([Paths([*paths, paths[0] + b"/below", b"/" + b"x" * 5_000])])
    assert not {*before[:4], *before[5:]} & {*now}
    assert now[0] == now[4] == now[6] == now[7]


LOOKS = """
import os, sys
from holdfast.process.folders import Paths, stamps

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

paths = [Paths([os.fsencode(sys.argv[1])] * 6_000)]
stamps(paths)
before = resident()
for _ in range(50):
    stamps(paths)
print(resident() - before)
"""


def test_looking_again_and_again_keeps_no_memory(tmp_path):
    """Whatever lies in the memory that the library gets: it does not clear all that it looks at in the end."""
    environment = {**os.environ, "MALLOC_PERTURB_": "1"}
    said = subprocess.run([sys.executable, "-c", LOOKS, tmp_path], env=environment, stdout=subprocess.PIPE, check=True)
    assert int(said.stdout) < 20 * 2**20, "one look takes some 2 MB"
