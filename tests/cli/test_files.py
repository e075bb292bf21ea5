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


def test_every_verb_says_that_a_directory_is_half_way(cli, store_path, repo, monkeypatch):
    def life() -> None:
        monkeypatch.setattr(restore, "restore", lambda *_, **__: die())
        with holdfast.open(store_path) as store:
            store.agent("coder").rollback("one")

    assert dies(life, 0)
    for words in (["agents"], ["log", "coder"], ["doctor"]):
        assert "half-way" in cli(*words).err
    assert "half-way" in json.loads(cli("doctor", "--json").out)["troubles"][0]["text"]
    cli("rollback", "coder", "--to", "one", "--yes")
    assert (repo / "app.py").read_text() == "one\ntwo\n"
    assert "half-way" not in cli("agents").err
