"""Images in a store: what one is, is said by what a checkpoint holds. No process is needed for that."""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import closing

import pytest

import holdfast
from holdfast.agent.layers import THAW
from holdfast.errors import BadOption, NotAnImage, NotEncrypted, NotFrozen
from holdfast.process import images
from holdfast.process.image import DESCRIPTION, LEFT_S, VERSION, Description, encoded
from holdfast.store.rows import body_bytes

KEY = b"k" * 32
SECRET = b"what only memory knew"


def described(**known):
    about = {
        "version": VERSION, "pid": 4711, "pids": [4711], "began": 1, "command": ["python", "program.py"],
        "directory": "/", "uid": os.getuid(), "gid": os.getgid(), "host": "here", "machine": "", "boot": "",
        "system": "Linux", "criu": "4.2", "made_us": 1, "memory_bytes": 1, "terminal": False, "job": False,
        "tcp": "close", "pipes": {}, "files": [], "kept": False,
    }  # fmt: skip
    return Description(**about | known)


@pytest.fixture
def imaged(store, tmp_path, monkeypatch):
    """A store with an image, and a way to save another one."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def save(name="secret", data=SECRET):
        folder = tmp_path / f"image-{os.urandom(4).hex()}"
        (folder / "criu").mkdir(parents=True)
        (folder / "criu" / "pages-1.img").write_bytes(data)
        (folder / DESCRIPTION).write_bytes(encoded(described()))
        return images.save(store, name, folder, described())[0]

    save()
    store.save = save
    return store


def holds(store, name):
    try:
        return bool(images.Stored(store, name).description)
    except NotAnImage:
        return False


def test_an_image_stays_an_image_under_any_name(imaged, tmp_path):
    imaged.copy("images/secret", "plain")
    imaged.agent("other").checkpoint("one")
    plain, sealed = tmp_path / "there", tmp_path / "sealed"
    with holdfast.open(plain) as there:
        for report in (imaged.push(there), there.pull(imaged), imaged.backup(there)):
            assert [one.name for one in there.agents()] == ["other"]
            assert sorted(report.left_out) == ["images/secret", "plain"]
            assert [one.name for one in report.agents] == ["other"]
        with pytest.raises(BadOption, match="plain holds images of processes"):
            imaged.push(there, ["plain"])
        with pytest.raises(BadOption, match="images/secret holds images"):
            imaged.push(there, ["images/secret"], new_name="harmless")
        with pytest.raises(NotEncrypted):
            imaged.push(there, ["plain"], images=True)
        with pytest.raises(NotEncrypted, match="plain holds everything"):
            imaged.export(tmp_path / "bundle", ["plain"])
        assert not (tmp_path / "bundle").exists()
        imaged.export(tmp_path / "bundle", ["plain"], key=KEY)
        with pytest.raises(NotEncrypted, match="nothing was imported"):
            there.import_bundle(tmp_path / "bundle", key=KEY)
        assert [one.name for one in there.agents()] == ["other"]
    with holdfast.open(sealed, key=KEY) as there:
        with pytest.raises(BadOption, match="--images"):  # encrypted or not: only when somebody says so
            imaged.push(there, ["plain"])
        imaged.push(there, images=True)
        assert holds(there, "plain")
        assert holds(there, "secret")
        there.verify()
    with holdfast.open(tmp_path / "third", key=KEY) as there:
        there.import_bundle(tmp_path / "bundle", key=KEY)
        assert holds(there, "plain")


def test_an_agent_that_is_only_called_like_an_image_is_an_agent(store, tmp_path):
    with store.agent("images/holiday") as album:
        for number in range(6):
            album.state["n"] = number
            album.checkpoint(f"picture {number}")
    with holdfast.open(tmp_path / "there") as there:
        report = store.push(there)
        assert [one.name for one in there.agents()] == ["images/holiday"]
        assert not report.left_out
    store.export(tmp_path / "bundle", ["images/holiday"])


def test_images_are_not_put_where_something_else_is_kept(imaged):
    """Of images the last three stay; checkpoints that are none must not go with them."""
    with closing(imaged.agent("images/holiday")) as album:
        for number in range(6):
            album.state["n"] = number
            album.checkpoint(f"picture {number}")
    with pytest.raises(NotFrozen, match="no images"):
        imaged.save("holiday")
    assert len(imaged.agent("images/holiday", readonly=True).log()) == 6
    imaged.save("secret", b"more")  # where images are, another one goes


def test_a_store_moves_with_its_images_or_not_at_all(imaged, tmp_path):
    imaged.agent("other").checkpoint("one")
    with holdfast.open(tmp_path / "plain") as there, pytest.raises(NotEncrypted, match="images/secret would stay"):
        imaged.move(there)
    imaged.agent("other").checkpoint("two")  # it is as it was
    with holdfast.open(tmp_path / "sealed", key=KEY) as there:
        imaged.move(there)
        assert sorted(one.name for one in there.agents()) == ["images/secret", "other"]
        assert holds(there, "secret")


def test_a_store_that_is_encrypted_anew_keeps_its_images_and_knows_which_thaw_is_half_way(
    tmp_path, monkeypatch, imaged
):
    place = tmp_path / "sealed"
    with holdfast.open(place, key=KEY) as there:
        imaged.push(there, images=True)
        with there.agent("clerk") as agent:
            agent.checkpoint("one")
        row = there._agent_row("clerk")
        (branch,) = there._db.view.branches(row.a)
        half_way = body_bytes({"image": "secret@id:0", "to": branch.id, "from": branch.id})
        there._db.change(lambda change: change.set_fact(f"{THAW}{branch.uuid.hex()}", half_way))
        assert [one.agent for one in there.half_thawed()] == ["clerk"]
    holdfast.keys.rotate(place, b"n" * 32, key=KEY, full=True, discard_old=True)
    with holdfast.open(place, key=b"n" * 32) as there:
        assert holds(there, "secret")
        assert [one.agent for one in there.half_thawed()] == ["clerk"], "nobody has gone on since"


def test_the_memory_that_a_killed_freeze_or_thaw_left_in_a_folder_goes_after_a_day(imaged, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    stored, kept = images.Stored(imaged, "secret"), tmp_path / "kept"
    with stored.exported(trust=True) as folder:
        name = folder.parent.name
    left = [tmp_path / f"{name}{number}" for number in range(3)]
    for one in (kept, *left[:2]):
        one.mkdir()
        (one / "pages-1.img").write_bytes(SECRET)
    left[2].symlink_to(kept)
    old_s = time.time() - LEFT_S - 60
    for one in (left[0], kept):
        os.utime(one, (old_s, old_s))
    with stored.exported(trust=True) as folder:
        assert (folder / "criu" / "pages-1.img").read_bytes() == SECRET
        assert [one.exists() for one in left] == [False, True, True], "one that is young may be somebody's at work"
    assert (kept / "pages-1.img").exists()
    assert not folder.exists()
