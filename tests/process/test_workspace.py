"""The workspace of an agent: files and state of one moment, whatever happens to them and to the process."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import threading
import time
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import apsw
import pytest

import holdfast
from holdfast.agent.layers import FILES, Looked
from holdfast.errors import BadOption, Damaged, DiskFull, HoldfastError, StoreFailed, WorkspaceBlocked
from holdfast.process import chunks, claims, restore, scan
from holdfast.process.trees import Content, Entry, content_digest, encode_entry, encode_path
from holdfast.process.workspace import Workspace
from holdfast.store import processes
from holdfast.store.changes import Change
from holdfast.store.packs import Packs
from tests.agent.damage import KEY
from tests.codec.fuzz import SMALL
from tests.limits import limits
from tests.lives import CHANGES, die, dies
from tests.memory import memory


def tree(root: Path) -> dict[str, tuple[int, bytes | str | None]]:
    """A directory as a plain dict."""
    found: dict[str, tuple[int, bytes | str | None]] = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder, name)
            mode = path.lstat().st_mode
            content: bytes | str | None = None
            if stat.S_ISLNK(mode):
                mode, content = stat.S_IFLNK, str(path.readlink())
            elif stat.S_ISREG(mode):
                content = path.read_bytes()
            found[str(path.relative_to(root))] = mode, content
    return found


@pytest.fixture
def tmp_path():
    """Nothing here depends on a disk: what is killed are processes."""
    with memory() as folder:
        yield Path(folder)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    root = tmp_path / "repo"
    root.mkdir()
    (root / "src").mkdir()
    (root / "src" / "app.py").write_text("print('one')\n")
    (root / "README").write_text("read me\n")
    (root / "link").symlink_to("src/app.py")
    (root / "empty").mkdir()
    return root


def edit(root: Path, noise: random.Random) -> None:
    """What a shell might do."""
    names = [f"f{n}" for n in range(6)] + ["d/x", "d/y", "d/e/z"]
    name = noise.choice(names)
    path = root / name
    what = noise.choice(["write", "write", "write", "append", "remove", "link", "folder", "mode", "move", "big"])
    if what in {"write", "link", "folder", "big", "move"}:
        above = path.parent
        while above != root and not above.is_dir():
            if above.is_symlink() or above.exists():
                above.unlink()
            above = above.parent
        path.parent.mkdir(parents=True, exist_ok=True)
    there = path.is_symlink() or path.exists()
    folder = path.is_dir() and not path.is_symlink()
    if what in {"link", "folder", "remove", "write", "big"} and there and not (what != "folder" and not folder):
        shutil.rmtree(path) if folder else path.unlink()
    if what == "write":
        path.unlink(missing_ok=True)
        path.write_bytes(noise.choice([b"", b"text\n", noise.randbytes(50), b"long" * 3000]))
    elif what == "big":
        path.unlink(missing_ok=True)
        path.write_bytes(noise.randbytes(300_000))
    elif what == "append" and path.is_file() and not path.is_symlink():
        with path.open("ab") as file:
            file.write(b"more\n")
    elif what == "remove" and there and not folder:
        path.unlink()
    elif what == "link":
        path.unlink(missing_ok=True)
        path.symlink_to(noise.choice(["f1", "../elsewhere", "/dev/null"]))
    elif what == "folder" and not path.exists():
        path.unlink(missing_ok=True)
        path.mkdir()
    elif what == "mode" and path.is_file() and not path.is_symlink():
        path.chmod(noise.choice([0o644, 0o755, 0o600]))
    elif what == "move" and (root / "f0").exists() and not there:
        (root / "f0").rename(path)


class Model:
    """What an agent with a workspace must be like: its checkpoints, as plain copies."""

    def __init__(self, place, root: Path, key=None) -> None:
        self.place, self.root, self.key = place, root, key
        self.durability = "batched" if key else "commit"
        self.saved: dict[str, tuple[int, dict]] = {}

    def open(self):
        store = holdfast.open(self.place, key=self.key, durability=self.durability)
        return store, store.agent("coder", workspace=self.root)

    def note(self, agent) -> None:
        self.saved[agent.head.id] = agent.state["n"], tree(self.root)

    def check(self, agent) -> None:
        """State and files are those of the head."""
        assert (agent.state["n"], tree(self.root)) == self.saved[agent.head.id]
        assert not agent.dirty


def campaign(model: Model, noise: random.Random, steps: int) -> None:
    store, agent = model.open()
    agent.state["n"] = 0
    agent.checkpoint("begin")
    model.note(agent)
    for number in range(1, steps):
        for _ in range(noise.choice([0, 1, 1, 3])):
            edit(model.root, noise)
        what = noise.choice(["save", "save", "save", "back", "back", "reopen", "undo", "edit", "kill"])
        if what == "save":
            agent.state["n"] = number
            agent.checkpoint(str(number))
            model.note(agent)
            model.check(agent)
        elif what == "back":
            before = agent.dirty and tree(model.root)
            target = noise.choice(list(model.saved))
            agent.rollback(f"id:{target}")
            model.check(agent)
            if before:  # nothing is lost: it is in a checkpoint of its own
                kept = [one for one in agent.log(all=True) if one.label.startswith("before rollback")]
                assert any(_exported(agent, one, model) == before for one in kept)
        elif what == "undo":
            if agent.dirty:
                agent.checkpoint("before")
                model.note(agent)
            head = agent.head
            try:
                made = agent.undo()
            except holdfast.errors.NothingToUndo:
                continue
            target = made.target_id
            parent = next(one.parent_id for one in agent.log(all=True) if one.id == target)
            if parent:
                assert (agent.state["n"], tree(model.root)) == model.saved[parent]
                model.note(agent)
            else:  # before the first one there were neither: nobody goes back to that
                agent.rollback(head)
        elif what == "reopen":
            store.close()
            store, agent = model.open()
        elif what == "kill":
            before = tree(model.root)
            target = noise.choice(list(model.saved))
            store.close()

            def life(target=target) -> None:
                _, agent = model.open()
                agent.rollback(f"id:{target}")

            died = dies(life, noise.randrange(1, 30), *MOMENTS)
            store, agent = model.open()
            if agent.head.id == target:
                assert tree(model.root) == model.saved[target][1]
                assert agent.state["n"] == model.saved[target][0]
            else:
                assert died
                assert tree(model.root) == before
            if agent.head.id not in model.saved:
                model.note(agent)
    assert store.verify().ok
    store.close()


def _exported(agent, checkpoint, model) -> dict:
    out = model.root.parent / "exported"
    agent.export_workspace(checkpoint, out)
    try:
        return tree(out)
    finally:
        shutil.rmtree(out)


MOMENTS = [*CHANGES, *((restore, name) for name in ("exchange", "place", "flush"))]


@pytest.mark.parametrize("seed", range(3))
def test_state_and_files_are_of_one_moment_whatever_is_done(store_path, repo, seed, rounds):
    campaign(Model(store_path, repo), random.Random(seed), rounds(25, 300))


def test_so_they_are_where_it_is_encrypted(store_path, repo):
    campaign(Model(store_path, repo, key=KEY), random.Random(11), 12)


def test_so_they_are_on_a_server(postgres_url, repo, tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_ALLOW_UNSAFE_POSTGRES", "1")
    holdfast.open(postgres_url, objects=str(tmp_path / "packs")).close()
    campaign(Model(postgres_url, repo), random.Random(12), 12)


# -- kills -----------------------------------------------------------------------------------------------------------


def test_killed_anywhere_in_a_rollback_it_is_the_old_or_the_new(store_path, repo):
    with holdfast.open(store_path) as store:
        agent = store.agent("coder", workspace=repo)
        agent.state["n"] = 1
        first = agent.checkpoint("one").id
        one = tree(repo)
        (repo / "src" / "app.py").write_text("print('two')\n")
        (repo / "new").write_bytes(b"n" * 5000)
        (repo / "link").unlink()
        (repo / "empty").rmdir()
        agent.state["n"] = 2
        agent.checkpoint("two")
    (repo / "README").write_text("by somebody else\n")  # it is in no checkpoint
    two = tree(repo)
    copy = repo.parent / "copy"
    shutil.copytree(repo, copy, symlinks=True)
    shutil.copytree(store_path, repo.parent / "store copy")

    def life() -> None:
        with holdfast.open(store_path) as store:
            store.agent("coder", workspace=repo).rollback("one")

    seen = set()
    at = 0
    while dies(life, at := at + 1, *MOMENTS):
        halves = holdfast.open(store_path, readonly=True)
        half = halves.workspaces()[0].half_way
        halves.close()
        with holdfast.open(store_path) as store:
            agent = store.agent("coder")
            assert agent.workspace == repo
            new = agent.head.id == first
            assert (agent.state["n"], tree(repo)) == ((1, one) if new else (2, two))
            assert new or not half
            kept = [point for point in agent.log(all=True) if point.label.startswith("before rollback")]
            if new:
                agent.export_workspace(kept[0], repo.parent / "kept")
                assert tree(repo.parent / "kept") == two
                shutil.rmtree(repo.parent / "kept")
            assert not store.workspaces()[0].half_way
            assert store.verify().ok
            seen.add((new, half))
        shutil.rmtree(repo)
        shutil.copytree(copy, repo, symlinks=True)
        shutil.rmtree(store_path)
        shutil.copytree(repo.parent / "store copy", store_path)
    assert at > 15
    assert seen == {(False, False), (True, True), (True, False)}


@pytest.mark.parametrize("meanwhile", ["state", "forgotten", "edited"])
def test_what_is_half_way_is_finished_whatever_happens_meanwhile(store_path, repo, meanwhile, monkeypatch):
    with holdfast.open(store_path) as store:
        agent = store.agent("coder", workspace=repo)
        agent.checkpoint("one")
        one = tree(repo)
        (repo / "README").write_text("two")
        (repo / "new").write_text("two")
        agent.checkpoint("two")

    def life() -> None:
        monkeypatch.setattr(restore, "restore", lambda *_, **__: die())
        with holdfast.open(store_path) as store:
            store.agent("coder").rollback("one")

    assert dies(life, 0)
    with holdfast.open(store_path) as store:
        if meanwhile == "state":
            agent = store.agent("coder", workspace=None)
            agent.state["n"] = 1
            agent.checkpoint("later")
            agent.close()
        elif meanwhile == "forgotten":
            store.retain(holdfast.Policy(last=1))
            labels = {point.label for point in store.agent("coder", workspace=None).log(all=True)}
            assert labels == {"one", "two"}, "where its files come from, and where they go"
            store.agent("coder", workspace=None).close()
        else:
            (repo / "README").write_text("by somebody else")
        agent = store.agent("coder")
        assert tree(repo) == one
        assert agent.head.label == ("later" if meanwhile == "state" else "one")
        assert not agent.dirty
        if meanwhile == "edited":
            kept = next(point for point in agent.log(all=True) if point.label.startswith("files that were changed"))
            assert agent.read_file("README", kept) == b"by somebody else"
        assert store.verify().ok


def test_going_to_and_fro_the_store_has_what_this_process_has(store_path, repo, rounds):
    """Trees of the last checkpoints are kept in memory. Meanwhile states are sealed, and others are forgotten."""
    noise, out = random.Random(3), repo.parent / "out"
    for number in range(60):
        (repo / f"{number}").write_text(str(number))
    with limits({**SMALL, "SEAL_CHECKPOINTS": 5}), holdfast.open(store_path) as store:
        agent, trees = store.agent("coder", workspace=repo), {}
        for step in range(rounds(40, 1_000)):
            for _ in range(noise.choice([0, 1, 3])):
                path = repo / str(noise.randrange(70))
                path.unlink() if path.exists() and noise.random() < 0.2 else path.write_text(str(step))
            trees[agent.checkpoint(str(step)).id] = tree(repo)
            if noise.random() < 0.2:
                store.retain(policy=holdfast.Policy(last=noise.choice([1, 4])))
            way = noise.choice(["on", "on", "back", "further", "undo"])
            there = {one.id: one for one in agent.log(all=True)}
            if way == "undo" and agent.head.parent_id in there:
                wanted = trees[agent.head.parent_id]
                trees[agent.undo().id] = wanted
            elif way in {"back", "further"}:
                line = list(agent.log())[: 2 if way == "back" else 9]
                agent.rollback(line[-1])
                wanted = trees[line[-1].id]
            else:
                wanted = tree(repo)
            assert tree(repo) == wanted
            shutil.rmtree(out, ignore_errors=True)
            agent.export_workspace(agent.head, out)  # out of what is stored
            assert tree(out) == wanted
        assert store.verify().ok


@pytest.mark.parametrize("lost", ["a node", "operations"])
def test_nobody_goes_back_to_a_tree_in_memory_of_which_the_store_has_lost_something(store_path, repo, lost):
    for number in range(60):
        (repo / f"{number}").write_text(str(number))
    with limits(SMALL), holdfast.open(store_path) as store:
        agent = store.agent("coder", workspace=repo)
        agent.checkpoint("one")
        (repo / "7").write_text("two")
        two = agent.checkpoint("two")._current().n
        before = agent._document.apart(FILES)
        (repo / "30").write_text("three")
        head, three = agent.checkpoint("three"), tree(repo)
        assert store.verify().ok
        now = {leaf.digest for leaf in agent._document.apart(FILES).leaves}
        (other,) = [leaf.digest for leaf in before.leaves if leaf.digest not in now]
        with closing(apsw.Connection(str(store_path / "store.db"))) as connection:
            if lost == "a node":
                connection.execute("DELETE FROM node WHERE digest = ?", (other,))
            else:
                connection.execute("UPDATE loose SET data = zeroblob(length(data)) WHERE n = ?", (two,))
            assert connection.changes() == 1
        with pytest.raises(Damaged):
            agent.rollback("two")
        assert (agent.head, tree(repo)) == (head, three)
        assert not store.workspaces()[0].half_way


@pytest.mark.parametrize("at", [1, 3])
def test_retention_keeps_what_is_needed_to_finish_a_directory(store_path, repo, at):
    with holdfast.open(store_path) as store:
        agent = store.agent("coder", workspace=repo)
        agent.checkpoint("one")
        one = tree(repo)
        (repo / "README").write_text("two")
        (repo / "src" / "app.py").write_text("two")
        (repo / "new").write_text("two")
        agent.checkpoint("two")
        agent.checkpoint("three")

    def life() -> None:
        with holdfast.open(store_path) as store:
            store.agent("coder").rollback("one")

    assert dies(life, at, (restore._Restore, "_compare"))
    with holdfast.open(store_path) as store:
        assert store.workspaces()[0].half_way
        store.retain(policy=holdfast.Policy(last=1))
        agent = store.agent("coder")
        assert (tree(repo), agent.head.label) == (one, "one")
        store.retain(policy=holdfast.Policy(last=1))
        assert "three" not in {point.label for point in agent.log(all=True)}


def test_killed_anywhere_in_a_checkpoint_the_next_one_is_whole(store_path, repo):
    with holdfast.open(store_path) as store:
        store.agent("coder", workspace=repo).checkpoint("one")
    (repo / "new").write_bytes(b"n" * 300_000)

    def life() -> None:
        with holdfast.open(store_path) as store:
            store.agent("coder", workspace=repo).checkpoint("two")

    at = 0
    while dies(life, at := at + 1, *CHANGES, (restore, "flush"), (Packs, "write")):
        with holdfast.open(store_path) as store:
            agent = store.agent("coder")
            agent.checkpoint("again")
            assert not agent.dirty
            assert agent.read_file("new") == b"n" * 300_000
            assert store.verify().ok
        (repo / "new").write_bytes(bytes([at]) * 300_000)
        (repo / "new").write_bytes(b"n" * 300_000)


# -- half-way, and elsewhere -----------------------------------------------------------------------------------------


def _elsewhere(patched, what: str) -> None:
    """What a container is after it was begun anew, and what a machine is after a restart, or another one."""
    for one in what.split():
        if one == "host":
            patched.setattr(socket, "gethostname", lambda: "another")
        elif one in {"boot", "machine"}:
            patched.setattr(claims, one, lambda one=one: f"another {one}")


def _killed_half_way(store_path, repo, at: int, key=None) -> tuple[dict, dict]:
    """Killed before a file moved (0), in the midst of them (3), or when all were there (-1): both trees."""
    with holdfast.open(store_path, key=key) as store:
        agent = store.agent("coder", workspace=repo)
        agent.state["n"] = 1
        agent.checkpoint("one")
        one = tree(repo)
        for name in ("README", "src/app.py", "new"):
            (repo / name).write_text("two")
        agent.state["n"] = 2
        agent.checkpoint("two")
    two = tree(repo)

    def life() -> None:
        real = restore.restore

        def killed(*args, **options):
            if at:
                real(*args, **options)
            die()

        if at <= 0:
            restore.restore = killed
        with holdfast.open(store_path, key=key) as store:
            store.agent("coder").rollback("one")

    assert dies(life, max(0, at), *[(restore._Restore, "_compare")] * (at > 0))
    return one, two


@pytest.mark.parametrize("at", [0, 3, -1])
@pytest.mark.parametrize(
    "what", ["", "host", "host boot", "host boot machine", "moved", "moved host", "moved host boot"]
)
def test_a_directory_that_is_half_way_is_finished_where_it_is_known_and_never_saved_as_it_is(
    store_path, repo, tmp_path, monkeypatch, caplog, at, what
):
    one, two = _killed_half_way(store_path, repo, at)
    if "moved" in what:
        repo = repo.rename(tmp_path / "moved")
    before = tree(repo)
    _elsewhere(monkeypatch, what)
    proven = "boot" not in what or at > 0  # by the directory's inode, or by what stands in it
    found_by_itself = "moved" not in what and proven
    with holdfast.open(store_path) as store:
        agent = store.agent("coder")
        assert agent.state["n"] == 1
        assert agent.workspace == (repo if found_by_itself else None)
        if not found_by_itself:
            assert store.workspaces()[0].half_way
            assert any(one.levelname == "WARNING" and "still to be put back" in one.message for one in caplog.records)
            agent.checkpoint("without the directory")
            assert tree(repo) == before
        agent.close()
        if not proven and not at:
            with pytest.raises(BadOption, match="cannot be shown to be that directory") as raised:
                store.agent("coder", workspace=repo)
            assert store.workspaces()[0].half_way
            assert tree(repo) == before == two
            assert "workspace=None" in raised.value.hint
            agent = store.agent("coder", workspace=None)  # what the hint says
            repo = agent.export_workspace(f"id:{store.workspaces()[0].target[:12]}", tmp_path / "anew")
            agent.close()
        agent = store.agent("coder", workspace=repo)
        assert (tree(repo), agent.workspace, agent.dirty) == (one, repo, False)
        agent.checkpoint("next")
        assert agent.read_file("README") == b"read me\n"
        [info] = store.workspaces()
        assert (info.path, info.half_way) == (str(repo), False)
        assert store.verify().ok


def test_killed_anywhere_and_opened_on_another_machine_it_is_the_old_or_the_new_or_refused(
    store_path, repo, tmp_path, monkeypatch
):
    with holdfast.open(store_path) as store:
        agent = store.agent("coder", workspace=repo)
        agent.state["n"] = 1
        agent.checkpoint("one")
        one = tree(repo)
        for name in ("README", "src/app.py", "new"):
            (repo / name).write_text("two")
        agent.state["n"] = 2
        agent.checkpoint("two")
    two = tree(repo)
    copies = [(repo, tmp_path / "copy"), (store_path, tmp_path / "store copy")]
    for place, copy in copies:
        shutil.copytree(place, copy, symlinks=True)

    def life() -> None:
        with holdfast.open(store_path) as store:
            store.agent("coder").rollback("one")

    seen = set()
    at = 0
    while dies(life, at := at + 1, *MOMENTS, *((restore._Restore, name) for name in ("_sign", "look", "_clean"))):
        with monkeypatch.context() as patched, holdfast.open(store_path) as store:
            _elsewhere(patched, "host boot machine")
            half = store.workspaces()[0].half_way
            with suppress(BadOption):
                agent = store.agent("coder", workspace=repo)
                assert (agent.state["n"], tree(repo)) in [(1, one), (2, two)]
                assert not agent.dirty
                assert (agent.state["n"] == 1) >= half
                seen.add(agent.state["n"])
                half = False
            if half:
                assert store.workspaces()[0].half_way
                assert {name: was for name, was in tree(repo).items() if name != ".holdfast-restoring"} == two
                seen.add("refused")
        for place, copy in copies:
            shutil.rmtree(place)
            shutil.copytree(copy, place, symlinks=True)
    assert at > 20
    assert seen == {"refused", 1, 2}


def test_another_directory_is_not_taken_for_one_that_is_half_way(store_path, repo, tmp_path, caplog):
    _killed_half_way(store_path, repo, 3)
    other = tmp_path / "other"
    other.mkdir()
    (other / "README").write_text("mine")
    half = tree(repo)
    with holdfast.open(store_path) as store:
        with pytest.raises(BadOption, match=r"still to be put back in .*/repo, its workspace until now") as raised:
            store.agent("coder", workspace=other)
        assert raised.value.hint == "Open the agent with that one first."
        with pytest.raises(BadOption, match="half-way: they were being put back for coder@main") as raised:
            store.agent("reviewer", workspace=repo)
        assert raised.value.hint == "Open that one first."
    with (
        holdfast.open(tmp_path / "another store") as store,
        pytest.raises(BadOption, match="for another branch, or by another store"),
    ):
        store.agent("reviewer", workspace=repo)
    assert (tree(repo), tree(other)) == (half, {"README": (0o100644, b"mine")})


@pytest.mark.parametrize("what", ["host", "boot", "machine", "boot machine", "host boot"])
def test_a_workspace_is_on_this_machine_where_that_is_beyond_doubt(store_path, repo, monkeypatch, caplog, what):
    with holdfast.open(store_path) as store:
        agent = store.agent("coder", workspace=repo)
        agent.checkpoint("one")
        (repo / "README").write_text("two")
        agent.checkpoint("two")
    _elsewhere(monkeypatch, what)
    with holdfast.open(store_path) as store:
        agent = store.agent("coder")
        if what in {"host", "boot", "machine"}:  # the same directory, or the same names after a restart
            assert agent.workspace == repo
            return
        assert agent.workspace is None
        [said] = [one for one in caplog.records if one.levelname == "WARNING"]
        assert "cannot be shown to be that machine" in said.message
        agent.rollback("one")
        assert (repo / "README").read_text() == "two"
        agent.close()
        agent = store.agent("coder", workspace=repo)  # somebody has said it
        assert agent.workspace == repo
        agent.close()
        assert store.agent("coder").workspace == repo


@pytest.mark.parametrize("way", ["move", "rotate"])
def test_a_store_is_not_moved_while_a_directory_is_half_way(store_path, repo, tmp_path, way):
    one, _ = _killed_half_way(store_path, repo, 3, KEY)

    def go() -> None:
        if way == "rotate":
            holdfast.keys.rotate(store_path, "another one", key=KEY, full=True)
            return
        with holdfast.open(store_path, key=KEY) as store, holdfast.open(tmp_path / "dest") as dest:
            store.move(dest)

    with pytest.raises(BadOption, match=r"half-way.* files of coder are still to be put back"):
        go()
    with holdfast.open(store_path, key=KEY) as store:
        assert store.workspaces()[0].half_way
        store.agent("coder")
    assert tree(repo) == one
    go()
    if way == "rotate":  # the same store, in the same place
        with holdfast.open(store_path, key="another one") as store:
            assert store.agent("coder").workspace == repo


def test_a_copy_of_an_agent_whose_directory_is_half_way_says_so(store_path, repo, tmp_path, caplog):
    _killed_half_way(store_path, repo, 3)
    with holdfast.open(store_path) as store, holdfast.open(tmp_path / "dest") as dest:
        for act in (lambda: store.push(dest), lambda: store.backup(dest)):
            caplog.clear()
            act()
            assert f"coder: {repo} is half-way between two checkpoints; a copy has no directory" in caplog.text
        assert not dest.workspaces()
        assert store.workspaces()[0].half_way
        caplog.clear()
        store.agent("other").checkpoint("one")
        store.push(dest, ["other"])
        assert "half-way" not in caplog.text


def test_a_copied_store_does_not_take_the_directory_of_its_original(store_path, repo, tmp_path, caplog):
    with holdfast.open(store_path) as store:
        agent = store.agent("coder", workspace=repo)
        agent.checkpoint("one")
        (repo / "README").write_text("two")
        agent.checkpoint("two")
    shutil.copytree(store_path, tmp_path / "copy")
    with holdfast.open(tmp_path / "copy") as copy:
        agent = copy.agent("coder")
        assert agent.workspace is None
        assert f"this store is a copy of {store_path}" in caplog.text
        agent.rollback("one")
    assert (repo / "README").read_text() == "two"
    with holdfast.open(store_path) as store:
        agent = store.agent("coder")
        assert (agent.workspace, agent.dirty) == (repo, False)
    shutil.rmtree(store_path)
    with holdfast.open(tmp_path / "copy") as copy:  # it has taken its place
        assert copy.agent("coder").workspace == repo


def test_a_shell_that_stands_in_a_directory_stands_there_after_a_rollback(store_path, repo):
    with holdfast.open(store_path) as store:
        agent = store.agent("coder", workspace=repo)
        agent.checkpoint("one")
        (repo / "src" / "app.py").write_text("two")
        (repo / "src" / "more").write_text("two")
        (repo / "new").mkdir()
        agent.checkpoint("two")
        inodes = {name: (repo / name).stat().st_ino for name in (".", "src")}
        with subprocess.Popen(
            ["sh", "-c", "echo ready; read line; cat app.py; ls; cd ..; cat README"], cwd=repo / "src",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ) as shell:  # fmt: skip
            assert shell.stdout.readline() == "ready\n"
            agent.rollback("one")
            said, _ = shell.communicate("go on\n", timeout=60)
        assert said == "print('one')\napp.py\nread me\n"
        assert {name: (repo / name).stat().st_ino for name in inodes} == inodes


@pytest.mark.parametrize("way", ["rollback", "undo", "killed"])
def test_going_back_leaves_what_the_rules_of_now_leave_out(store_path, repo, caplog, way):
    (repo / "a.log").write_text("old")
    (repo / "build").mkdir()
    for name in ("x", "gone"):
        (repo / "build" / name).write_text("old")
    with holdfast.open(store_path) as store:
        agent = store.agent("coder", workspace=repo)
        agent.checkpoint("one")
        (repo / ".gitignore").write_text("*.log\nbuild/\n")
        (repo / "README").write_text("two")
        two = agent.checkpoint("two").id
        (repo / "a.log").write_text("new work, in no checkpoint")
        (repo / "build" / "x").write_text("new work, in no checkpoint")
        (repo / "build" / "gone").unlink()
        planned = {file.path: file.kind for file in agent.plan_rollback("one").diff.files}
        assert planned == {
            ".gitignore": "removed", "README": "changed", "a.log": "stays", "build": "stays", "build/x": "stays",
            "build/gone": "added",
        }  # fmt: skip
        if way != "killed":
            agent.rollback("one") if way == "rollback" else agent.undo()
            assert "a.log stays" in caplog.text
            assert "by somebody else" not in caplog.text
    if way == "killed":

        def life() -> None:
            with holdfast.open(store_path) as store:
                store.agent("coder").rollback("one")

        at = 0
        while dies(life, at := at + 1, (restore._Restore, "_compare")):
            with holdfast.open(store_path) as store:
                agent = store.agent("coder")
                assert (repo / "a.log").read_text() == "new work, in no checkpoint"
                agent.rollback(f"id:{two}")
        assert at > 3
    with holdfast.open(store_path) as store:
        assert (repo / "a.log").read_text() == (repo / "build" / "x").read_text() == "new work, in no checkpoint"
        assert ((repo / "README").read_text(), (repo / "build" / "gone").read_text()) == ("read me\n", "old")
        assert not (repo / ".gitignore").exists()
        agent = store.agent("coder")
        assert agent.dirty, "what lies there is no file of that checkpoint"
        agent.checkpoint("kept")
        assert agent.read_file("a.log") == b"new work, in no checkpoint"
        assert store.verify().ok


# -- what happens meanwhile --------------------------------------------------------------------------------------------


def read_by(monkeypatch) -> list[int]:
    """What each scan reads from now on, in bytes."""
    found: list[int] = []
    real = scan.Scanner.scan

    def scanned(self, *args, **options):
        made = real(self, *args, **options)
        found.append(made.read_bytes)
        return made

    monkeypatch.setattr(scan.Scanner, "scan", scanned)
    return found


def _kept_by_another_process(place, repo, monkeypatch, scans) -> Path:
    """What a killed process remembered of its scans: the file in which it is kept."""
    for number in range(100):
        (repo / f"secret-{number}").write_text(f"{number:>10}")
    time.sleep(0.12)
    with _in_another_process(place, repo) as pid:
        os.kill(pid, signal.SIGKILL)
    [kept] = [one for one in scans.iterdir() if not one.name.startswith("new-")]
    read = read_by(monkeypatch)
    with _opened(place) as store:
        agent = store.agent("coder")
        assert not agent.dirty
        assert read == [0]
        (repo / "secret-7").write_text("7 7 7 7 7 ")
        agent.checkpoint("two")
        assert agent.read_file("secret-7") == b"7 7 7 7 7 "
    return kept


def _opened(place):
    return holdfast.open(place, key=KEY) if "encrypted" in str(place) else holdfast.open(place)


@contextmanager
def _in_another_process(place, repo):
    """One that has saved its files, and waits to be killed."""
    told, say = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            with _opened(place) as store:
                store.agent("coder", workspace=repo).checkpoint("one")
                os.write(say, b"x")
                time.sleep(60)
        finally:
            os._exit(1)
    os.close(say)
    assert os.read(told, 1) == b"x"
    os.close(told)
    yield pid
    os.waitpid(pid, 0)


def test_what_a_killed_process_remembered_saves_reading_and_is_never_believed_where_it_is_wrong(
    tmp_path, repo, monkeypatch
):
    place = tmp_path / "store"
    kept = _kept_by_another_process(place, repo, monkeypatch, place / "scans")
    assert b"secret-9" in kept.read_bytes()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    whole = kept.read_bytes()
    with _opened(place) as store:
        all_of_it = sum(one.size for one in store.agent("coder", readonly=True).files() if one.kind == "file")
    noise = random.Random(3)
    for damage in (b"", whole[: noise.randrange(len(whole))], whole[:-1], b"?" * 100, os.urandom(2_000)):
        kept.write_bytes(damage)
        _read_all_again(place, monkeypatch, all_of_it)
    for _ in range(5):
        at = noise.randrange(len(whole))
        kept.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        _read_all_again(place, monkeypatch, all_of_it)
    kept.write_bytes(whole)
    with monkeypatch.context() as another_boot:
        another_boot.setattr(processes, "identity", lambda: ("another boot", 1, 1))
        _read_all_again(place, monkeypatch, all_of_it)
    shutil.rmtree(kept.parent)
    kept.parent.symlink_to(repo)
    before = tree(repo)
    _read_all_again(place, monkeypatch, all_of_it)
    assert tree(repo) == before, "nothing is written, or tidied away, elsewhere"


def _read_all_again(place, monkeypatch, size):
    with monkeypatch.context() as context, _opened(place) as store:
        read = read_by(context)
        assert not store.agent("coder").dirty
        assert read == [size]


def test_of_an_encrypted_store_nobody_reads_the_names_of_files_in_what_was_remembered(tmp_path, repo, monkeypatch):
    place = tmp_path / "encrypted"
    kept = _kept_by_another_process(place, repo, monkeypatch, place / "scans")
    assert b"secret" not in kept.read_bytes()


def test_what_was_remembered_for_a_store_on_a_server_lies_in_the_users_cache_folder(
    postgres_url, repo, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOLDFAST_ALLOW_UNSAFE_POSTGRES", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    holdfast.open(postgres_url, objects=str(tmp_path / "packs")).close()
    _kept_by_another_process(postgres_url, repo, monkeypatch, tmp_path / "cache" / "holdfast" / "scans")
    assert stat.S_IMODE((tmp_path / "cache" / "holdfast" / "scans").stat().st_mode) == 0o700


def test_what_somebody_writes_in_the_very_moment_of_a_rollback_is_kept(store_path, repo, monkeypatch):
    with holdfast.open(store_path) as store:
        agent = store.agent("coder", workspace=repo)
        agent.checkpoint("one")
        one = tree(repo)
        (repo / "README").write_text("two")
        agent.checkpoint("two")
        real = restore.restore

        def late(*args, **options):
            monkeypatch.setattr(restore, "restore", real)
            (repo / "README").write_text("by somebody else")
            return real(*args, **options)

        monkeypatch.setattr(restore, "restore", late)
        agent.rollback("one")
        assert tree(repo) == one
        assert [agent.read_file("README", point) for point in agent.log(all=True)][:1] == [b"by somebody else"]
        assert agent.head.label == "one"


def test_what_a_program_writes_into_a_file_that_it_has_open_while_files_move_is_kept(store_path, repo, monkeypatch):
    with holdfast.open(store_path) as store, (repo / "a.log").open("a") as log:
        agent = store.agent("coder", workspace=repo)
        agent.checkpoint("one")
        log.write("two\n")
        log.flush()
        agent.checkpoint("two")
        real = restore._Restore._flush

        def flush(restoring):
            log.write("three\n" * (log.tell() < 6))
            log.flush()
            real(restoring)

        monkeypatch.setattr(restore._Restore, "_flush", flush)
        agent.rollback("one")
        assert (repo / "a.log").read_text() == ""
        kept = next(point for point in agent.log(all=True) if point.label.startswith("before rollback"))
        name = next(file.path for file in agent.files(kept) if ".kept-" in file.path)
        assert agent.read_file(name, kept) == b"two\nthree\n"
        assert not agent.dirty


@pytest.mark.parametrize("way", ["rollback", "undo", "killed"])
def test_going_back_leaves_what_the_rules_of_that_time_leave_out(store_path, repo, monkeypatch, caplog, way):
    kept = {".env": "secret", "data.db": "rows", "build/x.o": "object", "src/local": "mine"}
    (repo / ".gitignore").write_text("*.db\n.env\nbuild/\n")
    (repo / "src" / ".holdfastignore").write_text("local\n")
    (repo / "build").mkdir()
    for name, text in kept.items():
        (repo / name).write_text(text)
    with holdfast.open(store_path) as store:
        agent = store.agent("coder", workspace=repo)
        agent.checkpoint("one")
        one = tree(repo)
        for name in (".gitignore", "src/.holdfastignore"):
            (repo / name).write_text("")  # by mistake
        (repo / "new").write_text("this one goes")
        two = agent.checkpoint("two").id
        assert {"data.db", "build/x.o"} < {file.path for file in agent.files()}
        gone = {file.path for file in agent.plan_rollback("one").diff.files if file.kind == "removed"}
        assert gone == {"new"}
        if way == "undo":
            agent.undo()
        elif way == "rollback":
            agent.rollback("one")
    if way == "killed":

        def life() -> None:
            monkeypatch.setattr(restore, "restore", lambda *_, **__: die())
            with holdfast.open(store_path) as store:
                store.agent("coder").rollback("one")

        assert dies(life, 0)
    with holdfast.open(store_path) as store:
        agent = store.agent("coder")
        assert tree(repo) == one
        assert not agent.dirty
        if way != "killed":
            assert "data.db stays" in caplog.text
        agent.rollback(f"id:{two}")
        assert (repo / "data.db").read_text() == "rows"
        assert not agent.dirty


def test_nobody_goes_back_to_files_that_are_damaged(store_path, repo):
    with holdfast.open(store_path) as store:
        agent = store.agent("coder", workspace=repo)
        agent.state["n"] = 1
        agent.checkpoint("one")
        (pack,) = (store_path / "packs").iterdir()
        (repo / "README").write_text("two")
        agent.state["n"] = 2
        head, two = agent.checkpoint("two"), tree(repo)
        data = bytearray(pack.read_bytes())
        for at in range(4096, len(data) - 4096, 4096):
            data[at] ^= 1
        pack.chmod(0o600)
        pack.write_bytes(data)
        with pytest.raises(Damaged):
            agent.rollback("one")
        assert (agent.head, agent.state["n"], tree(repo)) == (head, 2, two)
        assert not store.workspaces()[0].half_way


def test_what_could_not_be_put_back_is_not_saved_in_its_place(store_path, repo, monkeypatch):
    with holdfast.open(store_path) as store:
        agent = store.agent("coder", workspace=repo)
        agent.checkpoint("one")
        one = tree(repo)
        (repo / "README").write_text("two")
        agent.checkpoint("two")

        def full(*args, **options):
            raise OSError(errno.ENOSPC, "no room")

        with monkeypatch.context() as broken:
            broken.setattr(restore, "_write", full)
            with pytest.raises(DiskFull, match="they are as they were, and coder is at its checkpoint") as raised:
                agent.rollback("one")
            assert "nothing was changed" not in str(raised.value)
            assert agent.head.label == "one"
            assert store.workspaces()[0].half_way
            with pytest.raises(DiskFull):
                agent.checkpoint("three")
        agent.checkpoint("three")
        assert tree(repo) == one
        assert agent.read_file("README") == b"read me\n"
        assert not store.workspaces()[0].half_way


def test_a_checkpoint_that_fails_leaves_nothing_behind_and_the_next_has_all_files(store_path, repo, monkeypatch):
    with holdfast.open(store_path) as store:
        agent = store.agent("coder", workspace=repo)
        agent.checkpoint("one")
        (repo / "new").write_bytes(b"n" * 10_000)
        agent.state["bad"] = []
        agent.state["n"] = 1

        def refused(*args):
            raise DiskFull("no room")

        packs = set((store_path / "packs").iterdir())
        with monkeypatch.context() as broken:
            broken.setattr(Change, "put_pack", refused)
            with pytest.raises(DiskFull):
                agent.checkpoint("two")
        assert set((store_path / "packs").iterdir()) == packs
        assert agent.dirty
        with agent.atomic(), pytest.raises(holdfast.errors.AtomicOpen):
            agent.checkpoint("no")
        assert set((store_path / "packs").iterdir()) == packs
        (repo / "new").write_bytes(b"m" * 10_000)
        agent.checkpoint("three")
        assert (agent.read_file("new"), agent.head.state["n"]) == (b"m" * 10_000, 1)
        assert store.verify().ok


def test_files_whose_chunks_were_let_go_meanwhile_are_written_again(store_path, repo):
    with holdfast.open(store_path) as store:
        agent = store.agent("coder", workspace=repo)
        (repo / "big").write_bytes(b"b" * 400_000)
        agent.checkpoint("one")
        store._db.change(lambda change: change.tx.do("DELETE FROM chunk", ()))
        (repo / "copy").write_bytes(b"b" * 400_000)
        with suppress(holdfast.errors.StoreBusy):  # as where somebody else has swept what nothing led to
            agent.checkpoint("two")
        agent._document.retell()
        agent.checkpoint("three")
        assert agent.read_file("big") == agent.read_file("copy") == b"b" * 400_000
        assert agent.read_file("README") == b"read me\n"
        agent.state["n"] = 1
        agent.checkpoint("four")
        assert not agent.dirty
        assert store.verify().ok


def test_threads_that_save_look_and_go_back_do_not_wait_for_each_other_for_ever(store_path, repo):
    with holdfast.open(store_path, durability="batched") as store:
        agent = store.agent("coder", workspace=repo)
        agent.checkpoint("one")
        one = tree(repo)
        failed = []

        def work(act) -> None:
            try:
                for number in range(8):
                    act(number)
            except BaseException as error:
                failed.append(error)

        def save(number: int) -> None:
            (repo / f"n{number}").write_text("n")
            agent.state["n"] = number
            agent.checkpoint()

        acts = (save, lambda _: agent.rollback("one"), lambda _: agent.diff("one"), lambda _: agent.dirty)
        threads = [threading.Thread(target=work, args=(act,), daemon=True) for act in acts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not failed
        assert not any(thread.is_alive() for thread in threads)
        agent.rollback("one")
        assert tree(repo) == one
        assert store.verify().ok


def test_the_loop_does_not_wait_for_files(store_path, repo):
    async def program() -> None:
        with holdfast.open(store_path) as store:
            agent = store.agent("coder", workspace=repo)
            threads = []
            real = agent._workspace.look
            agent._workspace.look = lambda: (threads.append(threading.current_thread()), real())[1]
            await agent.acheckpoint("one")
            assert threads
            assert threading.main_thread() not in threads
            assert agent.head.has_files

    asyncio.run(program())


@holdfast.durable
async def _tasks(agent: holdfast.Agent, count: int) -> None:
    """Tasks that change state and files, and save both, in whatever order it comes to. Killed at the end."""
    agent.state["done"] = []

    async def task(mine: int) -> None:
        for number in range(3):
            (agent.workspace / f"{mine}").write_text(f"{number}")
            agent.state["done"].append([mine, number])
            await agent.acheckpoint(f"{mine} {number}")
            await asyncio.sleep(0)

    await asyncio.gather(*map(task, range(count)))
    raise KeyboardInterrupt


def test_in_a_durable_function_the_loop_does_not_wait_for_files_and_the_order_is_the_same_again(
    store_path, repo, monkeypatch
):
    threads: list[int] = []
    look = Workspace.look

    def looked(self):
        threads.append(threading.get_ident())
        return look(self)

    monkeypatch.setattr(Workspace, "look", looked)
    with holdfast.open(store_path) as store:
        agent = store.agent("alone", workspace=repo, when=None)
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(agent.arun(_tasks, 1))
        assert len(agent.log()) == 4
        assert threads.count(threading.get_ident()) == 1, "the beginning of a run has no loop yet"
        agent = store.agent("coder", workspace=repo, when=None)
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(agent.arun(_tasks.options(id="one"), 3))
        made = [one.label for one in agent.log()]
    assert len(made) == 10  # with that of the beginning
    with holdfast.open(store_path) as store:
        agent = store.agent("coder", when=None)
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(agent.arun(_tasks.options(id="one"), 3))
        assert [one.label for one in agent.log()] == made, "all of it was recorded"


def test_a_file_that_keeps_changing_while_it_is_read_is_marked_until_it_rests(store_path, repo, monkeypatch):
    with holdfast.open(store_path) as store:
        agent = store.agent("coder", workspace=repo)
        agent.checkpoint("one")
        real, ran = chunks.read, []

        def restless(fd, *args):
            found = yield from real(fd, *args)
            ran.append(fd)
            with (repo / "log").open("a") as file:
                file.write(f"{len(ran)}\n")
            return found

        (repo / "log").write_text("0\n")
        with monkeypatch.context() as patched:
            patched.setattr(chunks, "read", restless)
            agent.checkpoint("two")
        assert [one.path for one in agent.files() if one.mark] == ["log"]
        assert not [one for one in agent.files("one") if one.mark]
        agent.checkpoint("three")
        assert not [one for one in agent.files() if one.mark]
        assert agent.read_file("log") == (repo / "log").read_bytes()
        assert store.verify().ok


# -- the rest of the house ---------------------------------------------------------------------------------------------


def test_a_copy_of_the_history_has_the_files(store_path, repo, tmp_path):
    states = []
    with holdfast.open(store_path) as store:
        agent = store.agent("coder", workspace=repo)
        for number in range(5):
            (repo / "README").write_text(f"number {number}\n" * 20_000)
            (repo / f"f{number}").write_bytes(os.urandom(2000))
            agent.state["n"] = number
            agent.checkpoint(str(number))
            states.append(tree(repo))
        with holdfast.open(tmp_path / "other", key="long and secret") as other:
            store.push(other)
            store.push(other)
            assert other.verify().ok
            other.export(tmp_path / "bundle", ["coder"])
        with holdfast.open(tmp_path / "third") as third:
            third.import_bundle(tmp_path / "bundle", key="long and secret")
            handle = third.agent("coder")
            assert handle.workspace is None
            for number, state in enumerate(states):
                assert tree(handle.export_workspace(str(number), tmp_path / f"out{number}")) == state
            third.retain(holdfast.Policy(last=1))
            assert third.verify().ok
            assert tree(handle.export_workspace(None, tmp_path / "newest")) == states[-1]
            size = sum(path.stat().st_size for path in (tmp_path / "third" / "packs").iterdir())
            assert size < 200_000  # what only the others had is gone
            handle.close()


def test_a_repaired_store_has_the_files_and_says_which_it_lost(store_path, repo, tmp_path):
    with holdfast.open(store_path) as store:
        agent = store.agent("coder", workspace=repo)
        agent.state["n"] = 1
        agent.checkpoint("one")
        (repo / "README").write_text("two")
        agent.checkpoint("two")
        two = tree(repo)
    newest = max((store_path / "packs").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    data = bytearray(newest.read_bytes())
    data[4097] ^= 1
    newest.chmod(0o600)
    newest.write_bytes(data)
    with holdfast.open(store_path) as store:
        assert [
            point.label for point in map(store.agent("coder").at, [f"id:{id}" for id in store.verify().affected])
        ] == ["two"]
    holdfast.repair(store_path, tmp_path / "repaired")
    with holdfast.open(tmp_path / "repaired") as store:
        agent = store.agent("coder", workspace=None)
        assert agent.head.label == "one"
        assert tree(agent.export_workspace(None, tmp_path / "out")) != two
        assert store.verify().ok


def test_a_store_inside_the_workspace_is_no_part_of_it(repo):
    with holdfast.open(repo / ".holdfast") as store:
        agent = store.agent("coder", workspace=repo)
        agent.checkpoint("one")
        agent.checkpoint("two")
        assert not [one for one in agent.files() if one.path.startswith(".holdfast/")]
        (repo / "README").write_text("two")
        agent.checkpoint("three")
        agent.rollback("one")
        assert (repo / "README").read_text() == "read me\n"


def test_no_state_has_sections_of_another_layer(store_path, repo):
    with holdfast.open(store_path) as store:
        agent = store.agent("coder", workspace=repo)
        agent.state["n"] = 1
        one = agent.checkpoint("one")
        (repo / "README").write_text("two")
        two = agent.checkpoint("two")
        assert (list(agent.state), len(one.state), two.sections) == (["n"], 1, one.sections)
        assert one.digest == two.digest == agent.digest
        assert not agent.diff(one, two).changes
        assert [change.path for change in agent.diff(one, two).files] == ["README"]
        assert not list(agent.changes("one"))
        for name in ("\0workspace\0files", "\0"):
            with pytest.raises(holdfast.errors.Unencodable):
                agent.state[name] = {}
        agent.state = {"m": 2}
        agent.checkpoint("three")
        assert agent.files() == agent.files("two")


def test_without_its_workspace_the_files_go_along_as_they_were(store_path, repo):
    with holdfast.open(store_path) as store:
        store.agent("coder", workspace=repo).checkpoint("one")
    (repo / "README").write_text("two")
    with holdfast.open(store_path) as store:
        agent = store.agent("coder", workspace=None)
        agent.state["n"] = 1
        agent.checkpoint("state")
        assert agent.files() == agent.files("one")
        agent.close()
        agent = store.agent("coder")  # it is remembered
        assert agent.workspace == repo
        agent.checkpoint("both")
        assert agent.read_file("README") == b"two"


@pytest.mark.parametrize("way", ["undo", "redo", "rollback"])
def test_after_files_were_put_back_one_can_still_go_anywhere(store_path, repo, way):
    with holdfast.open(store_path) as store:
        agent = store.agent("coder", workspace=repo, when=None)
        for number in range(3):
            (repo / "README").write_text(str(number))
            agent.state["n"], agent.state["list"] = number, [number]
            agent.checkpoint(str(number))
        if way == "redo":
            agent.undo()
    (repo / "README").write_text("half of an edit")
    with holdfast.open(store_path) as store:
        agent = store.agent("coder", when=None)
        assert agent.restore_workspace()
        getattr(agent, way)(*(["1"] if way == "rollback" else []))
        number = 2 if way == "redo" else 1
        assert (agent.state["n"], list(agent.state["list"])) == (number, [number])
        assert (repo / "README").read_text() == str(number)
        assert store.verify().ok


def test_a_branch_has_a_directory_of_its_own(store_path, repo, tmp_path):
    with holdfast.open(store_path) as store:
        agent = store.agent("coder", workspace=repo)
        agent.checkpoint("one")
        (repo / "README").write_text("unsaved")
        with pytest.raises(HoldfastError):
            agent.branch("main", workspace=tmp_path / "try")
        assert not (tmp_path / "try").exists()
        other = agent.branch("try", workspace=tmp_path / "try")
        assert tree(tmp_path / "try") == tree(repo)
        (tmp_path / "try" / "README").write_text("tried")
        other.checkpoint("tried")
        agent.checkpoint("main")
        assert (agent.read_file("README"), other.read_file("README")) == (b"unsaved", b"tried")
        assert store.agent("coder", branch="try").workspace == tmp_path / "try"
        with pytest.raises(BadOption):
            store.agent("coder", workspace=tmp_path / "try")


def test_what_is_put_back_never_has_the_rights_of_others(store_path, repo, tmp_path):
    (repo / "tool").write_text("one")
    (repo / "tool").chmod(0o6755)
    (repo / "shared").mkdir()
    (repo / "shared").chmod(0o3777)
    with holdfast.open(store_path) as store:
        agent = store.agent("coder", workspace=repo)
        agent.checkpoint("one")
        (repo / "tool").write_text("two")
        (repo / "tool").chmod(0o6755)
        (repo / "shared").chmod(0o3700)
        agent.checkpoint("two")
        agent.rollback("one")
        modes = {name: stat.S_IMODE((repo / name).stat().st_mode) for name in ("tool", "shared")}
        assert modes == {"tool": 0o755, "shared": 0o3777}, "a directory that stays has what its owner gave it"
        copy = agent.export_workspace("one", tmp_path / "copy")
        modes = {name: stat.S_IMODE((copy / name).stat().st_mode) for name in ("tool", "shared")}
        assert modes == {"tool": 0o755, "shared": 0o777}


@pytest.mark.parametrize("path", [b"../out", b"/out", b"a/../../out", b"", b"a//b", b"a/\0b"])
def test_a_tree_that_leads_elsewhere_is_refused(store_path, repo, tmp_path, path):
    entry = Entry(stat.S_IFREG | 0o644, Content(content_digest(b""), 0, ()))
    _refused(store_path, repo, tmp_path, {encode_path(path): encode_entry(entry)})


@pytest.mark.parametrize("mode", [stat.S_IFCHR | 0o600, stat.S_IFREG | 0o4755, stat.S_IFIFO | 0o600])
def test_a_tree_with_devices_or_rights_is_refused(store_path, repo, tmp_path, mode):
    entry = Entry(mode, Content(content_digest(b""), 0, ()))
    _refused(store_path, repo, tmp_path, {encode_path(b"x"): encode_entry(entry)})


def _refused(store_path, repo, tmp_path, items) -> None:
    """A checkpoint with such entries does no harm: not when it is read, nor when somebody goes back to it."""
    with holdfast.open(store_path) as store:
        agent = store.agent("coder", workspace=repo)
        agent.checkpoint("good")
        before = tree(repo)
        workspace, real = agent._workspace, agent._workspace.look
        workspace.look = lambda: [Looked(FILES, items)]
        agent.checkpoint("bad")
        workspace.look = list
        agent.state["n"] = 1
        agent.checkpoint("after")
        workspace.look = real
        for act in (
            lambda: agent.rollback("bad"),
            lambda: agent.export_workspace("bad", tmp_path / "elsewhere"),
            lambda: agent.files("bad"),
        ):
            with pytest.raises(HoldfastError):
                act()
        assert tree(repo) == before
        assert not (tmp_path / "elsewhere").exists()
        assert not (tmp_path / "out").exists()


def test_a_link_of_somebody_elses_checkpoint_may_not_lead_out(store_path, repo, tmp_path):
    (repo / "out").symlink_to("../../secret")
    with holdfast.open(store_path) as store:
        store.agent("coder", workspace=repo).checkpoint("one")
        with holdfast.open(tmp_path / "other") as other:
            store.push(other)
            theirs = other.agent("coder")
            with pytest.raises(WorkspaceBlocked):
                theirs.export_workspace("one", tmp_path / "a")
            assert not (tmp_path / "a").exists()
            assert tree(theirs.export_workspace("one", tmp_path / "b", links=True)) == tree(repo)
        assert tree(store.agent("coder").export_workspace("one", tmp_path / "c")) == tree(repo)


def test_a_link_in_the_place_of_the_workspace_is_not_followed(store_path, repo, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "README").write_text("not of any agent")
    with holdfast.open(store_path) as store:
        agent = store.agent("coder", workspace=repo)
        agent.checkpoint("one")
        (repo / "README").write_text("two")
        agent.checkpoint("two")
        before = tree(repo)
        repo.rename(tmp_path / "away")
        repo.symlink_to(mine)
        agent.state["n"] = 1
        for act in (agent.checkpoint, lambda: agent.rollback("one"), agent.restore_workspace):
            with pytest.raises(StoreFailed, match="Not a directory"):
                act()
        assert (os.listdir(mine), (mine / "README").read_text()) == (["README"], "not of any agent")
        repo.unlink()
        (tmp_path / "away").rename(repo)
        assert (tree(repo), agent.head.label) == (before, "two")
        agent.rollback("one")


def test_who_loses_the_directory_to_another_agent_is_told(store_path, repo, caplog):
    with holdfast.open(store_path) as store:
        store.agent("coder", workspace=repo).checkpoint("one")
    with holdfast.open(store_path) as store:
        store.agent("reviewer", workspace=repo).checkpoint("two")
        assert "was the workspace of coder@main" in caplog.text
    caplog.clear()
    with holdfast.open(store_path) as store:
        assert store.agent("coder", workspace=None).workspace is None
    assert not caplog.text  # that was meant
    with holdfast.open(store_path) as store:
        agent = store.agent("coder")
        assert agent.workspace is None
        assert "coder: its checkpoints have files, and it has no workspace" in caplog.text
    caplog.clear()
    with holdfast.open(store_path) as store:
        assert store.agent("coder", workspace=repo).workspace == repo
        assert "was the workspace of reviewer@main" in caplog.text


def test_no_workspace_lies_in_another_or_is_a_store_or_everything(store_path, repo, tmp_path):
    with holdfast.open(store_path) as store:
        agent = store.agent("coder", workspace=repo)
        agent.checkpoint("one")
        with pytest.raises(BadOption, match=r"lies in .*repo, the workspace of coder@main"):
            agent.branch("try", workspace=repo / "try")
        assert not (repo / "try").exists()
        assert list(agent.branches()) == ["main"]
        for place, why in (
            (repo / "src", "lies in"), (tmp_path, "holds .*repo"), ("/", "whole file system"), (store_path, "store"),
            (store_path / "packs", "store"),
        ):  # fmt: skip
            with pytest.raises(BadOption, match=why):
                store.agent("other", workspace=place)
        (repo.parent / "repository").mkdir()
        assert store.agent("other", workspace=repo.parent / "repository").workspace == repo.parent / "repository"
    with holdfast.open(store_path) as store:  # its own can move inwards
        assert store.agent("coder", workspace=repo / "src").workspace == repo / "src"


@pytest.mark.parametrize("way", ["rollback", "undo", "carried", "undone", "exported"])
def test_so_may_none_that_came_along_in_a_checkpoint_of_ones_own(store_path, repo, tmp_path, way):
    (repo / "out").symlink_to("/etc")
    with holdfast.open(tmp_path / "theirs") as theirs:
        agent = theirs.agent("x", workspace=repo)
        one = agent.checkpoint("one").id
        (repo / "out").unlink()
        (repo / "README").write_text("changed\n")
        agent.checkpoint("two")
        theirs.export(tmp_path / "bundle", ["x"])
    with holdfast.open(store_path) as store:
        store.import_bundle(tmp_path / "bundle")
        if way in {"carried", "undone", "exported"}:
            with store.agent("x", workspace=None) as agent:
                agent.undo() if way == "undone" else agent.rollback(f"id:{one}")
                agent.state["n"] = 1
                agent.checkpoint("mine")
        agent = store.agent("x", workspace=repo)
        head, before = agent.head.id, tree(repo)
        acts = {
            "rollback": lambda: agent.rollback("one"),
            "undo": agent.undo,
            "exported": lambda: agent.export_workspace(None, tmp_path / "elsewhere"),
        }
        with pytest.raises(WorkspaceBlocked, match="leads out"):
            acts.get(way, agent.restore_workspace)()
        assert (tree(repo), agent.head.id) == (before, head)
        # What is there is one's own, also where it is the same.
        (repo / "out").symlink_to("/etc")
        mine = agent.checkpoint("with it")
        (repo / "out").unlink()
        agent.checkpoint("without it")
        agent.rollback(mine)
        assert (repo / "out").is_symlink()


# -- runs --------------------------------------------------------------------------------------------------------------


@holdfast.tool(effect="idempotent", compensate=lambda effect: None)  # its files go back with the checkpoint
def shell(command: str, where: str) -> str:
    return subprocess.run(["sh", "-c", command], cwd=where, check=True, capture_output=True, text=True).stdout


SCRIPT = [  # what a model says, turn by turn
    "git init -q -b main . && git config user.email a@b && git config user.name a",
    "git add -A && git commit -qm first",
    "printf 'def f():\\n    return 1\\n' > src/f.py && git add -A && git commit -qm f",
    "printf 'half' >> src/f.py; sleep 0.01; printf 'of an edit' >> src/f.py; git commit -qam more",
    "git log --format=%s | tail -3 > LOG; rm -f README",
]


@holdfast.durable
def coding(agent: holdfast.Agent, where: str) -> list[str]:
    said: list[str] = []
    for number, command in enumerate(SCRIPT):
        said.append(shell(command, where))
        agent.state["turn"] = number
        agent.checkpoint(f"turn {number}")
    return said


def test_a_coding_agent_killed_in_the_middle_of_an_edit_has_state_and_files_of_one_moment(store_path, repo, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(repo, copy, symlinks=True)
    with holdfast.open(tmp_path / "plain") as store:
        store.agent("coder", workspace=copy).run(coding, str(copy))

    def half() -> None:
        """The third command is cut short in the middle of its edit."""
        real = subprocess.run

        def cut(words, **options):
            if "half" in words[2]:
                real(["sh", "-c", words[2].split(";")[0]], **options)
                die()
            return real(words, **options)

        subprocess.run = cut
        with holdfast.open(store_path) as store:
            store.agent("coder", workspace=repo).run(coding, str(repo))

    killed_there = dies(half, 0)
    assert killed_there
    assert (repo / "src" / "f.py").read_text().endswith("half")
    with holdfast.open(store_path) as store:
        agent = store.agent("coder")
        agent.run(coding, str(repo))
        assert agent.state["turn"] == len(SCRIPT) - 1
        kept = [point for point in agent.log(all=True) if point.validity == "suspect"]
        assert agent.read_file("src/f.py", kept[0]).endswith(b"half")
        assert store.verify().ok
        for name in ("src/f.py", "LOG"):
            assert (repo / name).read_bytes() == (copy / name).read_bytes()
        assert not (repo / "README").exists()
        subprocess.run(["git", "fsck"], cwd=repo, check=True, capture_output=True)
        agent.rollback("turn 1")  # what the later commands did is nowhere else
        assert (repo / "README").exists()
        assert not (repo / "LOG").exists()
        said = subprocess.run(["git", "log", "--format=%s"], cwd=repo, check=True, capture_output=True, text=True)
        assert said.stdout == "first\n"
