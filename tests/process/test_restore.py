"""Restores: exactly the other tree, whoever kills it; nothing of anybody else's, and nothing outside."""

from __future__ import annotations

import errno
import os
import py_compile
import stat
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

import pytest
from hypothesis import given

import holdfast
from holdfast.errors import BadOption, Damaged, DiskFull, HoldfastError, StoreFailed
from holdfast.process import folders, restore
from holdfast.process.restore import export, halfway, obstacles
from holdfast.process.scan import Scanner
from holdfast.process.trees import STAGING, Content, Difference, Entry, content_digest, differences
from holdfast.store.rows import chunk_digest
from tests.lives import dies
from tests.process.plain import Shelf, as_nobody, look, make, plains, room

CALLS = [
    *((restore.os, name) for name in ("mkdir", "rmdir", "unlink", "rename", "symlink", "fchmod", "fsync", "pwrite")),
    (folders, "_rename"),
]
"""All by which a restore changes a directory."""


@pytest.fixture
def tmp_path():
    with room() as place:
        yield place


@pytest.fixture
def root(tmp_path):
    place = tmp_path / "root"
    place.mkdir()
    return place


def both(place, old, new):
    """A directory that holds the old one; the tree of it and of the new one, and the chunks of both."""
    shelf, trees = Shelf(), []
    for plain in (new, old):
        make(place, plain)
        trees.append(shelf.tree(place))
    return *reversed(trees), shelf


def go(place, changes, shelf, **options):
    return restore.restore(place, changes, shelf.read, **options)


def file(data, mode=0o644):
    names = (chunk_digest(data),) if data else ()
    return Entry(stat.S_IFREG | mode, Content(content_digest(data), len(data), names))


@given(plains(), plains())
def test_a_restore_leads_from_any_tree_to_any_other(old, new):
    with room() as place:
        root = place / "root"
        before, after, shelf = both(root, old, new)
        changes = differences(before, after)
        assert obstacles(root, changes, leaving_links=True) == {}
        assert look(root) == old
        done = go(root, changes, shelf, leaving_links=True)
        assert look(root) == new
        assert (*done[1:], halfway(root)) == (set(), {}, set(), False)
        assert set(done.changed) == set(changes)


OLD = {
    b"same": (0o100644, b"same"),
    b"edited": (0o100644, b"old"),
    b"mode": (0o100644, b"mode"),
    b"gone": (0o100644, b"gone"),
    b"folder": (0o040755, None),
    b"folder/file": (0o100644, b"in it"),
    b"to-folder": (0o100644, b"file"),
    b"to-link": (0o100644, b"file"),
    b"link": (0o120777, b"same"),
}
NEW = {
    b"same": (0o100644, b"same"),
    b"edited": (0o100644, b"new"),
    b"mode": (0o100755, b"mode"),
    b"folder": (0o100600, b"now a file"),
    b"to-folder": (0o040555, None),
    b"to-folder/deep": (0o040700, None),
    b"to-folder/deep/file": (0o100644, b"deep"),
    b"to-link": (0o120777, b"same"),
    b"link": (0o120777, b"edited"),
    b"added": (0o100644, b"added"),
}


def test_whoever_is_killed_on_the_way_goes_on_from_there(root):
    before, after, shelf = both(root, OLD, NEW)
    changes = differences(before, after)
    at = moments = 0
    while True:
        at += 1
        make(root, OLD)
        if not dies(lambda: go(root, changes, shelf), at, *CALLS):
            break
        moments += 1
        if not halfway(root):
            assert look(root) in (OLD, NEW)
        if at % 3 == 0:  # killed once more while it goes on
            dies(lambda: go(root, changes, shelf), at // 3, *CALLS)
        done = go(root, changes, shelf)
        assert (look(root), done.foreign, done.blocked, done.left) == (NEW, set(), {}, set()), at
        assert not halfway(root)
    assert moments > 80


@contextmanager
def failing(name, number, code):
    """The n-th call of a function of ``os`` fails."""
    real, count = getattr(restore.os, name), 0

    def call(*args, **options):
        nonlocal count
        count += 1
        if count == number:
            raise OSError(code, os.strerror(code))
        return real(*args, **options)

    setattr(restore.os, name, call)
    try:
        yield
    finally:
        setattr(restore.os, name, real)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
def test_a_disk_that_fails_leaves_the_old_tree_or_one_that_goes_on(root, code):
    before, after, shelf = both(root, OLD, NEW)
    changes = differences(before, after)
    failures = 0
    for name in ("pwrite", "fsync", "symlink", "rename", "mkdir", "unlink", "rmdir", "fchmod", "listdir", "stat"):
        for number in range(1, 8):
            make(root, OLD)
            with suppress(HoldfastError), failing(name, number, code):
                go(root, changes, shelf)
                continue
            failures += 1
            if not halfway(root):
                assert look(root) in (OLD, NEW)
            done = go(root, changes, shelf)
            assert (look(root), done.foreign, done.blocked, done.left, halfway(root)) == (NEW, set(), {}, set(), False)
    assert failures > 20


def test_what_could_not_be_moved_is_named(root):
    before, after, shelf = both(root, {}, {b"d": (0o040755, None), b"d/e": (0o040755, None)})
    with failing("mkdir", 3, errno.EPERM), pytest.raises(StoreFailed, match="not all files are in place yet: d/e: "):
        go(root, differences(before, after), shelf)


def test_a_full_disk_is_named_and_nothing_was_moved(root):
    before, after, shelf = both(root, OLD, NEW)
    with failing("pwrite", 2, errno.ENOSPC), pytest.raises(DiskFull):
        go(root, differences(before, after), shelf)
    assert look(root) == OLD


def test_chunks_that_are_not_what_was_saved_are_noticed_before_anything_moves(root):
    before, after, shelf = both(root, OLD, NEW)
    shelf.held[chunk_digest(b"added")] = b"other"
    with pytest.raises(Damaged, match="added"):
        go(root, differences(before, after), shelf)
    assert look(root) == OLD


def test_what_somebody_else_changed_is_told_before_and_left_alone(root):
    before, after, shelf = both(root, OLD, NEW)
    changes = differences(before, after)
    (root / "edited").write_bytes(b"mine")  # as long as what was there
    (root / "gone").unlink()
    (root / "added").symlink_to("edited")
    (root / "to-folder").unlink()
    (root / "to-folder").write_bytes(b"other")
    seen = obstacles(root, changes)
    assert set(seen) == {b"to-folder/deep", b"to-folder/deep/file"}
    done = go(root, changes, shelf)
    assert (done.foreign, done.blocked) == ({b"edited", b"added", b"to-folder"}, seen)
    assert (root / "edited").read_bytes() == b"mine"
    assert (root / "added").readlink().name == "edited"
    assert (root / "to-folder").read_bytes() == b"other"
    assert (root / "folder").read_bytes() == b"now a file"


@pytest.mark.parametrize("swaps", [True, False], ids=["exchange", "no exchange"])
@pytest.mark.parametrize("path", ["edited", "gone", "to-folder", "added"])
@pytest.mark.parametrize("times", [1, 9])
def test_an_edit_in_the_very_moment_of_the_swap_is_put_back(root, monkeypatch, path, swaps, times):
    before, after, shelf = both(root, OLD, NEW)
    changes = differences(before, after)
    real, edits = folders._rename, []

    def rename(fd, name, other_fd, other, flags):
        if path.encode() in {name, other} and len(edits) < times:
            with suppress(FileNotFoundError):
                (root / path).unlink()  # as editors do
            edits.append(b"mine %d" % len(edits))
            (root / path).write_bytes(edits[-1])
        return (swaps or flags != folders._EXCHANGE) and real(fd, name, other_fd, other, flags)

    monkeypatch.setattr(folders, "_rename", rename)
    done = go(root, changes, shelf)
    assert edits[-1] in [content for _, content in look(root).values()]
    assert path.encode() in done.foreign
    assert not halfway(root)
    if times > 1:
        return
    assert (root / path).read_bytes() == edits[-1]
    monkeypatch.undo()
    (root / path).unlink()
    go(root, changes, shelf)
    assert look(root) == NEW


@pytest.mark.parametrize("path", ["edited", "gone", "to-folder", "folder/file"])
@pytest.mark.parametrize("killed", [False, True], ids=["", "killed"])
def test_what_is_written_through_an_open_descriptor_while_files_move_lies_beside(root, monkeypatch, path, killed):
    before, after, shelf = both(root, OLD, NEW)
    changes = differences(before, after)
    real = restore._Restore._flush
    with (root / path).open("ab") as log:

        def flush(restoring):
            if killed:
                raise KeyboardInterrupt
            log.write(b"said meanwhile")
            log.flush()
            real(restoring)

        monkeypatch.setattr(restore._Restore, "_flush", flush)
        if killed:
            with pytest.raises(KeyboardInterrupt):
                go(root, changes, shelf)
            monkeypatch.undo()
            clean = restore._Restore._clean

            def late(restoring, staging, *, keep):
                if not log.tell() > len(OLD[path.encode()][1]):
                    log.write(b"said meanwhile")
                    log.flush()
                clean(restoring, staging, keep=keep)

            monkeypatch.setattr(restore._Restore, "_clean", late)
        done = go(root, changes, shelf)
    kept = [name for name in look(root) if b".kept-" in name]
    assert {*kept} == done.foreign
    assert [look(root)[name][1] for name in kept] == [OLD[path.encode()][1] + b"said meanwhile"]
    assert not halfway(root)
    (root / os.fsdecode(kept[0])).unlink()
    assert look(root) == NEW


def test_names_of_one_file_that_go_together_leave_nothing(root):
    before, after, shelf = both(root, OLD, NEW)
    for name in ("edited", "gone"):
        (root / name).unlink()
    (root / "edited").write_bytes(b"one file")
    os.link(root / "edited", root / "gone")
    before = shelf.tree(root)
    assert not go(root, differences(before, after), shelf).foreign
    assert look(root) == NEW


def test_an_edit_that_was_displaced_by_one_that_was_killed_comes_back(root):
    before, after, shelf = both(root, OLD, NEW)
    changes = differences(before, after)
    real = folders._rename

    def rename(fd, name, other_fd, other, flags):
        if other == b"edited":
            (root / "edited").write_bytes(b"mine")
            real(fd, name, other_fd, other, flags)
            os._exit(7)
        return real(fd, name, other_fd, other, flags)

    child = os.fork()
    if not child:
        folders._rename = rename
        go(root, changes, shelf)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert (root / "edited").read_bytes() == b"new"
    done = go(root, changes, shelf)
    assert (done.foreign, (root / "edited").read_bytes()) == ({b"edited"}, b"mine")


def test_another_restore_than_the_one_that_was_begun_is_refused(root):
    before, after, shelf = both(root, OLD, NEW)
    assert dies(lambda: go(root, differences(before, after), shelf), 40, *CALLS)
    assert halfway(root)
    with pytest.raises(BadOption, match="has begun"):
        go(root, {b"elsewhere": Difference(None, None)}, shelf)


def test_a_directory_with_ignored_files_stays_and_a_file_cannot_take_its_place(root):
    make(root, {b"a": (0o040755, None), b"a/x": (0o100644, b"x"), b"b": (0o040755, None), b"b/x": (0o100644, b"x")})
    shelf = Shelf()
    before = shelf.tree(root)
    (root / "a" / "ignored.o").touch()
    (root / "b" / "ignored.o").touch()
    shelf.held[chunk_digest(b"file")] = b"file"
    done = go(root, differences(before, {b"a": file(b"file")}), shelf)
    assert (done.left, set(done.blocked)) == ({b"b"}, {b"a"})
    assert set(look(root)) == {b"a", b"a/ignored.o", b"b", b"b/ignored.o"}


def test_a_restored_file_has_another_second_than_one_of_its_size_so_that_python_compiles_it_anew(root):
    module, shelf = root / "module.py", Shelf()
    module.write_text("x = 1\n")
    trees = [shelf.tree(root)]
    module.write_text("x = 2\n")
    trees.append(shelf.tree(root))
    before = time.time()
    for number in range(6):
        py_compile.compile(str(module), doraise=True)
        go(root, differences(trees[(number + 1) % 2], trees[number % 2]), shelf)
        words = [sys.executable, "-c", "import module; print(module.x)"]
        shown = subprocess.run(words, cwd=root, capture_output=True, check=True)
        assert int(shown.stdout) == number % 2 + 1
    assert module.stat().st_mtime >= before - 1


def test_holes_stay_holes_and_attributes_come_back(root):
    sparse, shelf = root / "sparse", Shelf()
    with sparse.open("wb") as stream:
        stream.truncate(64 * 2**20)
        stream.seek(20 * 2**20 + 123)
        stream.write(b"data")
    os.setxattr(sparse, "user.colour", b"red")
    tree, was = shelf.tree(root), sparse.read_bytes()
    sparse.unlink()
    go(root, differences({}, tree), shelf)
    assert sparse.read_bytes() == was
    assert sparse.stat().st_blocks * 512 < 2**20
    assert os.getxattr(sparse, "user.colour") == b"red"


HOSTILE = [
    *((path, file(b"x")) for path in (
        b"", b"/etc/x", b"../x", b"a/../../x", b"a/..", b".", b"./x", b"a//x", b"a/", b"a\0b", b"n" * 256,
        b"/".join([b"d"] * 300), STAGING.encode() + b"/x", b"a/" + STAGING.encode(),
    )),
    (b"setuid", file(b"x", 0o4755)),
    (b"setgid", Entry(stat.S_IFDIR | 0o2755, None)),
    (b"device", Entry(stat.S_IFCHR | 0o666, None)),
    (b"fifo", Entry(stat.S_IFIFO | 0o666, None)),
    (b"disguised", Entry(stat.S_IFREG | 0o644, b"/etc/passwd")),
    (b"link", Entry(stat.S_IFLNK | 0o777, b"")),
    (b"capable", Entry(stat.S_IFREG | 0o644, file(b"x").content, ((b"security.capability", b"x"),))),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_a_tree_that_reaches_beyond_its_root_is_refused_and_nothing_is_touched(tmp_path, root, number):
    path, entry = HOSTILE[number]
    shelf = Shelf()
    shelf.held[chunk_digest(b"x")] = b"x"
    changes = {b"fine": Difference(None, file(b"x")), path: Difference(None, entry)}
    for act in (lambda: obstacles(root, changes), lambda: go(root, changes, shelf)):
        with pytest.raises(Damaged):
            act()
    with pytest.raises(Damaged):
        export(tmp_path / "new", {name: change.after for name, change in changes.items()}, shelf.read)
    assert set(look(tmp_path)) == {b"root"}


@pytest.mark.parametrize("target", [b"/etc", b"..", b"../x", b"a/../../x"])
def test_a_link_that_leads_out_is_made_only_for_those_who_want_it_and_never_followed(tmp_path, root, target):
    outside = tmp_path / "x"
    outside.mkdir()
    shelf = Shelf()
    shelf.held[chunk_digest(b"x")] = b"x"
    link = Entry(stat.S_IFLNK | 0o777, target)
    changes = {b"link": Difference(None, link), b"link/file": Difference(None, file(b"x"))}
    done = go(root, changes, shelf)
    assert (set(done.blocked), look(root)) == ({b"link", b"link/file"}, {})
    done = go(root, changes, shelf, leaving_links=True)
    assert look(root) == {b"link": (0o120777, target)}
    done = go(root, changes, shelf, leaving_links=True)
    assert set(done.blocked) == {b"link/file"}
    assert look(tmp_path).keys() == {b"root", b"root/link", b"x"}


def test_a_link_or_a_store_in_the_way_is_not_entered(tmp_path, root):
    (tmp_path / "outside").mkdir()
    (root / "a").symlink_to(tmp_path / "outside")
    with holdfast.open(root / "store") as store:
        store.agent("a")
    shelf = Shelf()
    shelf.held[chunk_digest(b"x")] = b"x"
    paths = [b"a/file", b"store/file", b"store/packs/file", b"store/store.db"]
    done = go(root, {path: Difference(None, file(b"x")) for path in paths}, shelf)
    assert set(done.blocked) == set(paths)
    assert not list((tmp_path / "outside").iterdir())
    assert not (root / "store" / "file").exists()
    assert not (root / "store" / "packs" / "file").exists()


@given(plains())
def test_an_export_is_the_whole_tree_or_nothing(plain):
    shelf = Shelf()
    with room() as place:
        make(place / "root", plain)
        tree = shelf.tree(place / "root")
        export(place / "far" / "new", tree, shelf.read, leaving_links=True)
        assert look(place / "far" / "new") == plain
        with pytest.raises(BadOption, match="is there already"):
            export(place / "far" / "new", tree, shelf.read)
        assert os.listdir(place / "far") == ["new"]


def test_thousands_of_files_are_restored_with_few_flushes(root, monkeypatch):
    shelf = Shelf()
    names = {f"{number % 50}/{number}".encode(): b"%d" % number for number in range(300)}
    plain = {b"%d" % number: (0o040755, None) for number in range(50)}
    plain |= {path: (0o100644, data) for path, data in names.items()}
    make(root, plain)
    tree = shelf.tree(root)
    make(root, {})
    flushes = []
    monkeypatch.setattr(restore.os, "fsync", flushes.append)
    go(root, differences({}, tree), shelf)
    assert (look(root), len(flushes) < 5) == (plain, True)


@pytest.mark.root
def test_directories_that_are_read_only_are_changed_and_read_only_afterwards(tmp_path):
    old = {b"d": (0o040555, None), b"d/a": (0o100444, b"old"), b"d/b": (0o100444, b"gone"), b"e": (0o040500, None)}
    new = {b"d": (0o040555, None), b"d/a": (0o100444, b"new"), b"e": (0o040500, None), b"e/c": (0o100400, b"c")}
    tmp_path.chmod(0o777)

    def act():
        root = tmp_path / "mine"
        before, after, shelf = both(root, old, new)
        changes = differences(before, after)
        for at in range(1, 200, 7):
            make(root, old)
            killed = dies(lambda: go(root, changes, shelf), at, *CALLS)
            done = go(root, changes, shelf)
            assert (look(root), done.foreign, done.blocked) == (new, set(), {})
            if not killed:
                return
        raise AssertionError("it never ended")

    as_nobody(act)


@pytest.mark.root
def test_what_root_restores_belongs_to_whom_it_belonged(root):
    before, after, shelf = both(root, OLD, NEW)
    for place, folders_, files in os.walk(root):
        for name in (".", *folders_, *files):
            os.chown(os.path.join(place, name), 1234, 4321, follow_symlinks=False)
    go(root, differences(before, after), shelf)
    assert look(root) == NEW
    for path in NEW:
        status = os.lstat(os.path.join(os.fsencode(root), path))
        assert (path, status.st_uid, status.st_gid) == (path, 1234, 4321)


@pytest.mark.root
def test_a_file_that_cannot_be_read_is_in_the_way_and_stays(tmp_path):
    tmp_path.chmod(0o777)

    def act():
        root = tmp_path / "mine"
        before, after, shelf = both(root, OLD, NEW)
        (root / "edited").chmod(0)
        done = go(root, differences(before, after), shelf)
        assert set(done.blocked) == {b"edited"}
        (root / "edited").chmod(0o644)
        assert look(root)[b"edited"][1] == b"old"

    as_nobody(act)


def test_a_scan_does_not_see_what_is_being_restored(root):
    before, after, shelf = both(root, OLD, NEW)
    assert dies(lambda: go(root, differences(before, after), shelf), 30, *CALLS)
    assert halfway(root)
    assert not any(path.startswith(STAGING.encode()) for path in Scanner(root).scan({}).changed)
