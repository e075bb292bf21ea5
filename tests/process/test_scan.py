"""Scans: a tree is what is in the directory, whoever changed it and however quickly."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import socket
import stat
import subprocess
import threading
import time
from contextlib import closing, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pathspec import GitIgnoreSpec

import holdfast
from holdfast.errors import BadOption
from holdfast.process import chunks, scan
from holdfast.process.ignore import Rules
from holdfast.process.scan import Scanner
from holdfast.process.trees import STAGING, Content, equal
from holdfast.store.cipher import digest
from tests.process.plain import FILES, NAMES, Shelf, as_nobody, look, make, plains, put, room


@pytest.fixture
def root(tmp_path):
    place = tmp_path / "root"
    place.mkdir()
    return place


def settle():
    """Wait until whatever is written from now on gets other times than what was written before."""
    time.sleep(scan.TICK_NS / 1e9 + 0.02)


def applied(tree, found):
    return {path: entry for path, entry in tree.items() if path not in found.gone} | found.changed


@given(plains(), st.lists(st.tuples(NAMES, NAMES, FILES, st.integers(0, 3)), max_size=6))
def test_a_scan_finds_what_is_there_and_the_next_what_was_changed(plain, edits):
    with room() as place:
        _edited(place / "root", plain, edits)


def _edited(root, plain, edits):
    make(root, plain)
    shelf, scanner = Shelf(), Scanner(root, rules=False)
    tree = scanner.scan({}, into=shelf.keep).changed
    assert shelf.plain(tree) == look(root) == plain
    for above, name, (mode, data), kind in edits:
        place = os.path.join(os.fsencode(root), above)
        if kind == 0 and os.path.lexists(place):
            shutil.rmtree(place) if os.path.isdir(place) and not os.path.islink(place) else os.unlink(place)
        elif kind == 1 and os.path.isdir(place) and not os.path.islink(place):
            if not os.path.lexists(os.path.join(place, name)):
                put(root, above + b"/" + name, stat.S_IFREG | mode, data)
        elif kind == 2 and os.path.isfile(place) and not os.path.islink(place):
            os.chmod(place, mode)
        elif not os.path.lexists(place):
            put(root, above, stat.S_IFREG | mode, data)
        found = scanner.scan(tree, into=shelf.keep)
        assert all(not equal(entry, tree.get(path)) for path, entry in found.changed.items())
        tree = applied(tree, found)
        assert shelf.plain(tree) == look(root)


def test_a_change_within_one_tick_of_the_clock_is_found(root):
    scanner, tree, shelf = Scanner(root), {}, Shelf()
    for number in range(200):
        (root / "file").write_bytes(b"%04d" % number)
        (root / f"{number % 7}").unlink(missing_ok=True)
        (root / f"{number % 5}").touch()
        tree = applied(tree, scanner.scan(tree, into=shelf.keep))
        assert shelf.plain(tree)[b"file"][1] == b"%04d" % number
        assert {os.fsdecode(path) for path in tree} == {path.name for path in root.iterdir()}


def test_what_has_not_changed_is_not_read_again_and_what_has_is(root, monkeypatch):
    for number in range(20):
        (root / str(number)).write_bytes(b"x" * 100)
    scanner = Scanner(root)
    monkeypatch.setattr(scan, "TICK_NS", 10**12)
    tree = scanner.scan({}).changed
    monkeypatch.undo()
    settle()
    assert scanner.scan(tree).read_bytes == 2000  # they were too young
    assert scanner.scan(tree).read_bytes == 0
    status = (root / "7").stat()
    (root / "7").write_bytes(b"y" * 100)
    os.utime(root / "7", ns=(status.st_atime_ns, status.st_mtime_ns))
    found = scanner.scan(tree)
    assert (list(found.changed), found.read_bytes) == ([b"7"], 100)


def test_another_process_reads_nothing_again_that_was_remembered_for_it(root, tmp_path):
    make(root, {b"d": (0o040755, None), b"d/odd\xff": (0o100644, b"x" * 100), b"link": (0o120777, b"d")})
    settle()
    first = Scanner(root)
    tree = first.scan({}).changed
    memory = first.memory()
    second = Scanner(root)
    second.remember(memory)
    assert (second.scan(tree).read_bytes, second.scan(tree).changed) == (0, {})
    (root / os.fsdecode(b"d/odd\xff")).write_bytes(b"y" * 100)
    third = Scanner(root)
    third.remember(memory)
    assert list(third.scan(tree).changed) == [b"d/odd\xff"]
    (root / "d").rename(tmp_path / "d")
    for useless in (memory[:-1], memory[:40] + b"?" + memory[41:], b"", Scanner(tmp_path).memory()):
        fourth = Scanner(root)
        fourth.remember(useless)
        assert fourth.scan(tree).gone == {b"d", b"d/odd\xff"}


def test_whatever_is_remembered_a_scan_finds_what_one_finds_that_remembers_nothing(root, rounds, monkeypatch):
    """Names that come and go, files that are written in place, rules that change: in one process and across several."""
    monkeypatch.setattr(scan, "TICK_NS", 20_000_000)
    noise, mine, tree, compared = random.Random(5), Scanner(root), {}, {}
    places = ["", "a/", "a/b/", "c/"]
    for number in range(rounds(60, 2_000)):
        for _ in range(noise.choice([0, 1, 1, 3])):
            _stir(root, noise.choice(places), noise)
        time.sleep(0.03)
        before = mine
        differing = None if number % 3 else {one for one in tree | compared if tree.get(one) != compared.get(one)}
        if noise.random() < 0.3:
            mine, differing = Scanner(root), None
            mine.remember(before.memory())
        found, compared = mine.scan(tree, differing=differing), tree
        if noise.random() < 0.9:  # otherwise it is not saved, and has to be found again
            tree = applied(tree, found)
        else:
            found = mine.scan(tree, differing=())
        plain = Scanner(root).scan({})
        there = applied(tree, found)
        assert there.keys() == plain.changed.keys(), number
        assert all(equal(there[path], entry) for path, entry in plain.changed.items()), number
        assert found.skipped == plain.skipped
        if noise.random() < 0.2:
            tree = {path: entry for path, entry in tree.items() if noise.random() < 0.9}  # the caller lost some


def _stir(root, place, noise):
    """What a shell might do in a directory."""
    folder = root / place
    if not folder.is_dir():
        folder.mkdir(parents=True)
    path = folder / noise.choice(["f", "g.o", "h", "sub", ".gitignore"])
    what = noise.choice(["write", "write", "same size", "replace", "remove", "mode", "folder", "rules"])
    if what == "rules" and not (folder / ".gitignore").is_dir():
        (folder / ".gitignore").write_text(noise.choice(["", "*.o\n", "h\n", "/b\n", ".gitignore\n"]))
    elif path.is_dir():
        shutil.rmtree(path)
    elif what == "folder":
        path.unlink(missing_ok=True)
        path.mkdir()
        (path / "inner").write_bytes(noise.randbytes(3))
    elif what == "replace":
        (root / "new").write_bytes(noise.randbytes(3))
        (root / "new").rename(path)
    elif what == "remove" or not path.exists():
        path.write_bytes(noise.randbytes(3)) if not path.exists() else path.unlink()
    elif what == "mode":
        path.chmod(noise.choice([0o644, 0o755, 0o600]))
    else:
        size = path.stat().st_size if what == "same size" else noise.randrange(5)
        with path.open("r+b") as file:
            file.truncate(size)
            file.write(noise.randbytes(size))


@pytest.mark.root
def test_what_cannot_be_read_is_named_and_never_taken_to_be_gone(tmp_path):
    with room() as place:
        place.chmod(0o777)
        as_nobody(lambda: _cannot_be_read(place / "root"))


def _cannot_be_read(root):
    make(root, {b"d": (0o040755, None), b"d/a": (0o100644, b"a"), b"b": (0o100644, b"b")})
    scanner = Scanner(root)
    tree = scanner.scan({}).changed
    (root / "d").chmod(0)
    (root / "b").chmod(0)
    (root / "c").write_bytes(b"c")
    (root / "c").chmod(0)
    found = scanner.scan(tree)
    assert (found.gone, set(found.marked), set(found.skipped)) == (set(), {b"d", b"b"}, {b"c"})
    assert found.changed == {}
    (root / "d").chmod(0o755)


@pytest.mark.root
def test_another_file_system_is_no_part_of_a_tree(root):
    (root / "mounted").mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "none", root / "mounted"], check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        (root / "mounted" / "file").touch()
        found = Scanner(root).scan({})
    finally:
        subprocess.run(["umount", root / "mounted"], check=True)
    assert (found.changed, found.skipped) == ({}, {b"mounted": "another file system"})


def test_what_is_remembered_saves_no_reading_of_what_the_caller_does_not_have(root):
    (root / "file").write_bytes(b"one")
    scanner = Scanner(root)
    settle()
    scanner.scan({})  # what came of it was lost
    assert [data for _, data in scanner.scan({}, into=list).kept] == [b"one"]


def test_a_file_that_changes_while_it_is_read_is_read_again_and_then_marked(root):
    (root / "busy").write_bytes(b"0" * 100)
    written = iter(range(1, 1000))

    def have(_):
        settle()  # within one tick of the clock nobody can tell, and the next scan reads it again
        (root / "busy").write_bytes(b"%0100d" % next(written))
        return False

    found = Scanner(root).scan({}, have=have, into=dict)
    assert (list(found.marked), next(written)) == ([b"busy"], scan.TRIES + 1)
    assert found.kept[found.changed[b"busy"].content.chunks[0]] == b"%0100d" % (scan.TRIES - 1)


def test_the_chunks_of_a_large_file_are_those_of_the_store_and_most_stay_when_it_changes(root):
    data = os.urandom(12 * 2**20)
    (root / "big").write_bytes(data)
    shelf, scanner = Shelf(), Scanner(root)
    tree = scanner.scan({}, into=shelf.keep).changed
    content = tree[b"big"].content
    assert content.digest == digest(b"value", data)
    assert all(digest(b"chunk", chunk) == name and len(chunk) <= 2**23 for name, chunk in shelf.held.items())
    assert len(content.chunks) > 4
    (root / "big").write_bytes(data[:5_000_000] + b"inserted" + data[5_000_000:])
    found = scanner.scan(tree, into=dict)
    assert sum(map(len, found.kept.values())) < len(data) / 2
    assert set(found.changed[b"big"].content.chunks) & set(content.chunks)
    finer = Scanner(root, average=chunks.IMAGE_AVERAGE_BYTES).scan({}).changed[b"big"].content
    assert len(finer.chunks) > 8 * len(content.chunks)
    assert finer[:2] == found.changed[b"big"].content[:2]


def test_a_hole_of_a_gigabyte_is_not_read_from_the_disk(root):
    with (root / "sparse").open("wb") as file:
        file.truncate(2**30)
        file.seek(300 * 2**20)
        file.write(b"data")
    found = Scanner(root).scan({}, into=dict)
    content = found.changed[b"sparse"].content
    assert content.size == 2**30
    assert sum(map(len, found.kept.values())) < 40 * 2**20
    assert sum(len(found.kept[name]) for name in content.chunks) == 2**30


@pytest.mark.parametrize("line", ["!", "a\\", "\\", "[z-a]", "["])
def test_a_line_of_rules_that_says_nothing_is_passed_over(root, line):
    make(root, dict.fromkeys((b"a.o", b"b.o", b"c"), (0o100644, b"x")))
    (root / ".gitignore").write_text(f"a.o\n{line}\nb.o\n")
    assert set(Scanner(root).scan({}).changed) == {b"c", b".gitignore"}


@given(
    lines=st.lists(
        st.lists(st.sampled_from(["**/", "/**/", "*", "a", "b", "?", "[ab]", "(", "/", "!", "x."]), max_size=9).map(
            "".join
        ),
        min_size=1,
        max_size=3,
    ),
    path=st.lists(
        st.text("abx.(+", min_size=1, max_size=6).filter(lambda name: name.strip(".")), min_size=1, max_size=3
    ),
)
def test_wildcards_say_what_they_say_in_the_library_and_take_no_time(lines, path):
    with suppress(ValueError, re.error):
        theirs = GitIgnoreSpec.from_lines(lines, backend="simple")
        assert (
            Rules("", {".gitignore": "\n".join(lines)})._judge("/".join(path), True)
            == theirs.check_file("/".join(path)).include
        )


@pytest.mark.parametrize(
    ("line", "path"),
    [
        ("*a" * 20 + "*b", "a" * 250),
        ("*a?" * 20 + "/*a" * 9 + "b", ("a" * 250 + "/") * 9 + "a"),
        ("a**" * 20 + "b", "a" * 250),
        ("**/" + "a/**/" * 20 + "a/b", "a/" * 250 + "a"),
    ],
)
def test_a_line_with_many_wildcards_ends(line, path):
    began = time.process_time()
    assert not Rules("", {".gitignore": line}).ignores(path)
    assert Rules("", {".gitignore": line + "\n" + line[:-1]}).ignores(path)
    assert time.process_time() - began < 5  # it takes milliseconds, and took years


def test_ignored_paths_are_left_out_as_git_does_and_gits_own_files_are_kept(root):
    for path in (
        "a.o",
        "keep.o",
        "src/b.o",
        "src/c.py",
        "src/deep/d.tmp",
        "build/x",
        "top/build",
        ".git/logs/e.o",
        ".git/f.tmp",
    ):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()
    (root / ".gitignore").write_text("*.o\n!keep.o\nbuild/\n")
    (root / "src/.holdfastignore").write_text("!b.o\n*.tmp\n")
    scanner = Scanner(root)
    tree = scanner.scan({}).changed
    files = {path for path, entry in tree.items() if entry.content is not None}
    assert files == {
        b"keep.o", b"src/b.o", b"src/c.py", b"top/build", b".git/logs/e.o", b".git/f.tmp", b".gitignore",
        b"src/.holdfastignore",
    }  # fmt: skip
    assert scanner.scan(tree).gone == set()
    (root / ".gitignore").write_text("/.git\nkeep.o\n")
    again = scanner.scan(tree)
    assert {path for path in again.gone if tree[path].content is not None} == {
        b"keep.o",
        b".git/logs/e.o",
        b".git/f.tmp",
    }
    assert {b"a.o", b"build", b"build/x"} <= again.changed.keys()
    assert b"keep.o" in Scanner(root, rules=False).scan({}).changed


def test_files_of_a_store_are_no_part_of_a_tree_wherever_it_lies(root):
    (root / "mine").touch()
    with holdfast.open(root / "folder" / "store") as store:
        store.agent("a")
        found = Scanner(root).scan({})
    assert set(found.changed) == {b"mine", b"folder"}
    assert found.skipped == {b"folder/store": "a Holdfast store"}
    for place in (root / "folder" / "store", root / "folder" / "store" / "packs"):
        with pytest.raises(BadOption, match="Holdfast store"):
            Scanner(place).scan({})


def test_what_is_no_file_is_named_and_links_modes_and_attributes_are_kept(root):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(root / "socket"))
    os.mkfifo(root / "fifo")
    (root / "file").write_bytes(b"1")
    (root / "file").chmod(0o4755)
    os.setxattr(root / "file", "user.colour", b"red")
    (root / "link").symlink_to("/etc/passwd")
    (root / STAGING).touch()
    (root / "empty").mkdir(0o700)
    found = Scanner(root).scan({})
    assert found.skipped.pop(STAGING.encode()) == "a name that Holdfast uses itself"
    assert found.skipped == {b"socket": "socket", b"fifo": "fifo"}
    assert {path: entry.mode for path, entry in found.changed.items()} == {
        b"file": stat.S_IFREG | 0o755, b"link": stat.S_IFLNK | 0o777, b"empty": stat.S_IFDIR | 0o700
    }  # fmt: skip
    assert found.changed[b"link"].content == b"/etc/passwd"
    assert found.changed[b"file"].extra == ((b"user.colour", b"red"),)


def test_a_tree_is_scanned_while_others_change_it(root):
    for number in range(300):
        (root / f"{number % 10}").mkdir(exist_ok=True)
        (root / f"{number % 10}" / f"{number}").write_bytes(b"x")
    stop = threading.Event()

    def stir():
        while not stop.is_set():
            for number in range(10):
                shutil.rmtree(root / str(number), ignore_errors=True)
                (root / str(number)).write_bytes(b"file")
                (root / str(number)).unlink()
                (root / str(number)).mkdir()
                (root / str(number) / "again").write_bytes(b"y")

    thread = threading.Thread(target=stir)
    thread.start()
    try:
        scanner, tree = Scanner(root), {}
        for _ in range(20):
            tree = applied(tree, scanner.scan(tree))
    finally:
        stop.set()
        thread.join()
    shelf = Shelf()
    assert shelf.plain(shelf.tree(root)) == look(root)
    assert all(isinstance(entry.content, (Content, type(None))) for entry in tree.values())


# -- reading ahead ------------------------------------------------------------------------------------------------


def helpers():
    return [one.name for one in threading.enumerate() if one.name == "holdfast-ahead"]


def numbered(count, ended):
    """Pieces that say who made them; ``ended`` is told when no more are asked for."""
    try:
        for number in range(count):
            yield number, threading.current_thread().name
    finally:
        ended.append(threading.current_thread().name)


@pytest.mark.parametrize("count", [0, 1, 40, 5000])
def test_what_another_thread_reads_ahead_comes_in_order_and_complete(count, monkeypatch):
    monkeypatch.setattr(chunks, "AHEAD_FROM_BYTES", 10)
    monkeypatch.setattr(chunks, "AHEAD_BYTES", 7)
    ended = []
    found = list(chunks.ahead(numbered(count, ended), lambda _: 1))
    assert [number for number, _ in found] == list(range(count))
    assert {name for _, name in found[10:]} <= {"holdfast-ahead"}
    assert (len(ended), helpers()) == (1, [])


def test_whoever_gives_up_leaves_no_thread_behind_that_reads_ahead(monkeypatch):
    monkeypatch.setattr(chunks, "AHEAD_FROM_BYTES", 10)
    monkeypatch.setattr(chunks, "AHEAD_BYTES", 1)
    ended = []
    with closing(chunks.ahead(numbered(1_000_000, ended), lambda _: 1)) as pieces:
        for number, _ in pieces:
            if number == 30:
                break
    assert (ended, helpers()) == (["holdfast-ahead"], [])


def test_an_error_of_the_thread_that_reads_ahead_comes_after_all_that_it_has_read(monkeypatch):
    monkeypatch.setattr(chunks, "AHEAD_FROM_BYTES", 10)

    def broken():
        yield from range(25)
        raise OSError(errno.EIO, "broken")

    found = []
    with pytest.raises(OSError, match="broken"):
        found.extend(iter(chunks.ahead(broken(), lambda _: 1)))
    assert (found, helpers()) == (list(range(25)), [])
