"""Files of a workspace on the command line."""

from __future__ import annotations

import json

import pytest

import holdfast
from holdfast.process import restore
from tests.lives import die, dies


@pytest.fixture
def repo(store_path, tmp_path):
    """A workspace with two checkpoints."""
    root = tmp_path / "repo"
    root.mkdir()
    (root / "app.py").write_text("one\ntwo\n")
    (root / "raw").write_bytes(b"\xff\0")
    with holdfast.open(store_path) as store:
        agent = store.agent("coder", workspace=root)
        agent.checkpoint("one")
        (root / "app.py").write_text("one\nthree\n")
        (root / "new").symlink_to("app.py")
        agent.checkpoint("two")
    return root


def test_shows_files_and_what_differs(cli, repo):
    assert cli("show", "coder@one", "--file", "app.py").out == "one\ntwo\n"
    listed = cli("show", "coder", "--files").out
    assert [line.split()[-1] for line in listed.splitlines()[1:-1]] == ["app.py", "app.py", "raw"]
    found = cli("show", "coder", "--file", "app.py", "--json").json
    assert (found["content"], [one["path"] for one in found["files"]]) == ("one\nthree\n", ["app.py"])
    every = json.loads(cli("show", "coder", "--files", "--json").out)["files"]
    assert [one["path"] for one in every] == ["app.py", "new", "raw"]
    assert cli("show", "coder", "--file", "raw", "--json").json["content"] == "\\xff\0"
    for spelling in ("./app.py", "raw/../app.py", repo / "app.py"):
        assert cli("show", "coder", "--file", str(spelling)).out == "one\nthree\n"
        assert cli("show", "coder", "--file", str(spelling), "--json").json["files"][0]["path"] == "app.py"
    ended = cli("show", "coder", "--file", "nothing")
    assert (ended.code, "no file" in ended.err) == (2, True)
    shown = cli("diff", "coder@one", "coder").out
    assert "-   two" in shown
    assert "+ new: added, link to app.py" in shown
    assert cli("diff", "coder@one", "coder", "--exit-code").code == 1
    found = json.loads(cli("diff", "coder@one", "--json").out)
    assert [one["kind"] for one in found["files"]] == ["changed", "added"]


def test_a_rollback_lists_files_first_and_puts_them_back(cli, repo):
    planned = cli("rollback", "coder", "--to", "one", "--dry-run").out
    assert "2 files" in planned
    assert (repo / "app.py").read_text() == "one\nthree\n"
    cli("rollback", "coder", "--to", "one", "--yes")
    assert (repo / "app.py").read_text() == "one\ntwo\n"
    assert not (repo / "new").is_symlink()


def test_a_dry_run_shows_what_becomes_of_files_that_are_not_saved_yet_and_where_they_are_then(cli, repo):
    (repo / "app.py").write_text("mine\n")
    (repo / "mine").write_text("mine\n")
    before = {path.name: path.lstat().st_mtime_ns for path in repo.iterdir()}
    planned = cli("rollback", "coder", "--to", "one", "--dry-run")
    assert "3 files" in planned.out
    assert "mine: removed" in planned.out
    assert {path.name: path.lstat().st_mtime_ns for path in repo.iterdir()} == before
    done = cli("rollback", "coder", "--to", "one", "--yes")
    assert "What was not saved yet is in" in done.out
    saved = next(
        one for one in cli("log", "coder", "--all", "--json").json["checkpoints"] if one["label"].startswith("before")
    )
    assert f"--to id:{saved['id'][:12]}" in done.out + done.err
    cli("rollback", "coder", "--to", f"id:{saved['id']}", "--yes")
    assert (repo / "mine").read_text() == (repo / "app.py").read_text() == "mine\n"


def test_an_undo_lists_the_files_that_it_takes_back(cli, repo):
    (repo / "app.py").write_text("mine\n")
    (repo / "mine").write_text("mine\n")
    said = cli("undo", "coder").out
    assert "~ app.py: changed" in said
    assert "- mine: removed" in said
    assert "+ mine: added" in cli("undo", "coder", "--redo").out


def test_a_directory_is_no_file_and_is_called_one(cli, store_path, repo):
    (repo / "tests").mkdir()
    (repo / "tests" / "a").write_text("a")
    with holdfast.open(store_path) as store:
        store.agent("coder").checkpoint("three")
    ended = cli("show", "coder", "--file", "tests")
    assert (ended.code, "is a directory" in ended.err) == (2, True)
    assert cli("show", "coder", "--file", "tests/a").out == "a"


def test_every_verb_says_that_a_directory_is_half_way(cli, store_path, repo, tmp_path, monkeypatch):
    def life() -> None:
        monkeypatch.setattr(restore, "restore", lambda *_, **__: die())
        with holdfast.open(store_path) as store:
            store.agent("coder").rollback("one")

    assert dies(life, 0)
    there = [str(tmp_path / name) for name in ("pushed", "kept", "moved", "pulled", "a bundle")]
    for words in (
        ["agents"], ["log", "coder"], ["doctor"], ["verify"], ["push", there[0]], ["backup", there[1]],
        ["move", there[2], "--yes"], ["export", there[4], "coder"],
        ["rollback", "coder", "--to", "two", "--load", "json", "--dry-run"], ["stats"],
    ):  # fmt: skip
        assert "is half-way between two checkpoints: files of coder" in cli(*words).err, words
    assert "is half-way between two checkpoints: files of coder" in cli("pull", str(store_path), store=there[3]).err
    assert "half-way" in json.loads(cli("doctor", "--json").out)["troubles"][0]["text"]
    cli("rollback", "coder", "--to", "one", "--yes")
    assert (repo / "app.py").read_text() == "one\ntwo\n"
    assert "half-way" not in cli("agents").err


def test_a_rollback_says_that_no_file_moves_where_the_directory_is_not_there(cli, store_path, repo, tmp_path):
    repo.rename(tmp_path / "elsewhere")
    for words in (["--dry-run"], ["--yes"]):
        said = cli("rollback", "coder", "--to", "one", *words)
        assert f"2 files of the checkpoint differ, and no file is moved: its workspace {repo} is not there" in said.out
        assert "store.agent('coder', workspace=DIRECTORY)" in said.out
        assert " change:" not in said.out
    assert "Only the state went back: no file was moved." in said.out
    assert (tmp_path / "elsewhere" / "app.py").read_text() == "one\nthree\n"
    head = cli("log", "coder", "--all", "--json").json["checkpoints"][0]["id"]
    planned = cli("rollback", "coder", "--to", f"id:{head}", "--yes", "--json").json
    assert planned["unmoved"] == f"its workspace {repo} is not there"
    assert "no file is moved" in cli("undo", "coder").out


def test_a_dry_run_lists_files_that_stay_because_a_rule_leaves_them_out(cli, store_path, repo):
    (repo / ".gitignore").write_text("raw\n")
    with holdfast.open(store_path) as store:
        store.agent("coder").checkpoint("three")
    (repo / "raw").write_text("mine")
    planned = cli("rollback", "coder", "--to", "one", "--dry-run").out
    assert "3 files of its workspace change:" in planned
    assert "= raw: stays as it is: a rule that counts now leaves it out" in planned
    cli("rollback", "coder", "--to", "one", "--yes")
    assert (repo / "raw").read_text() == "mine"
