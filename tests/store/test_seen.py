"""An old copy of a store in its place is noticed by whoever has seen a newer one, and can be accepted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

import holdfast
from holdfast.errors import Damaged, StoreWentBack
from holdfast.store.embedded import open_embedded

pytestmark = pytest.mark.usefixtures("remembered")


def grow(path, label):
    with holdfast.open(path) as store:
        agent = store.agent("a")
        agent.state["label"] = label
        return agent.checkpoint(label).id


@pytest.fixture
def old(store_path, tmp_path):
    """A copy of the store, made before it grew."""
    grow(store_path, "one")
    shutil.copytree(store_path, tmp_path / "old")
    grow(store_path, "two")
    return tmp_path / "old"


def put_back(old, path):
    shutil.rmtree(path)
    shutil.copytree(old, path)


def opens(path, **options):
    with holdfast.open(path, **options) as store:
        return [checkpoint.label for checkpoint in store.agent("a", readonly=True).log()]


@pytest.mark.parametrize("readonly", [False, True])
def test_a_store_that_was_put_back_is_noticed(store_path, old, readonly):
    put_back(old, store_path)
    for _ in range(2):  # a refusal changes nothing
        with pytest.raises(StoreWentBack, match="checkpoints 2 to 2"):
            holdfast.open(store_path, readonly=readonly)
    assert opens(store_path, readonly=readonly, accept_older=True) == ["one"]
    assert opens(store_path) == ["one"]
    grow(store_path, "another two")
    assert opens(store_path) == ["another two", "one"]


def test_one_that_has_grown_again_elsewhere_is_noticed(store_path, old):
    store_path.rename(store_path.with_name("away"))
    os.environ["XDG_STATE_HOME"] += "-of-another-user"
    for label in ("other two", "other three"):
        grow(old, label)
    os.environ["XDG_STATE_HOME"] = os.environ["XDG_STATE_HOME"].removesuffix("-of-another-user")
    shutil.copytree(old, store_path)
    with pytest.raises(StoreWentBack, match="the checkpoint that was number 2"):
        holdfast.open(store_path)


def test_the_newest_checkpoint_deleted_together_with_its_traces_is_noticed(store_path, old):
    """The witness inside would notice; whoever can write the store can write that, too."""
    for name in ("store.db", "witness"):
        shutil.copy(old / name, store_path / name)
    with pytest.raises(StoreWentBack):
        holdfast.open(store_path)


def test_events_alone_are_enough(store_path, tmp_path):
    grow(store_path, "one")
    shutil.copytree(store_path, tmp_path / "old")
    with holdfast.open(store_path) as store:
        store.agent("a", readonly=True)
        store.agent("b")
    put_back(tmp_path / "old", store_path)
    with pytest.raises(StoreWentBack, match="events"):
        holdfast.open(store_path)


def test_a_copy_elsewhere_is_another_store(store_path, old):
    assert opens(old) == ["one"]
    grow(old, "other")
    assert opens(old) == ["other", "one"]
    assert opens(store_path) == ["two", "one"]


def test_a_store_that_was_moved_takes_its_record_along(store_path, old, tmp_path):
    store_path.rename(tmp_path / "moved")
    assert opens(tmp_path / "moved") == ["two", "one"]
    put_back(old, tmp_path / "moved")
    with pytest.raises(StoreWentBack):
        holdfast.open(tmp_path / "moved")


def test_an_older_one_that_came_to_a_new_place_is_noticed_when_the_other_is_gone(store_path, old):
    shutil.rmtree(store_path)
    with pytest.raises(StoreWentBack):
        holdfast.open(old)


def test_a_reader_remembers_what_it_saw(store_path, old):
    others = os.environ["XDG_STATE_HOME"] + "-reader"
    environment = {**os.environ, "XDG_STATE_HOME": others}
    look = "import sys, holdfast; print(len(holdfast.open(sys.argv[1], readonly=True).agents()))"

    def reader():
        words = [sys.executable, "-c", look, str(store_path)]
        return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)

    assert reader().stdout == "1\n"
    put_back(old, store_path)
    assert "StoreWentBack" in reader().stderr


def test_a_kill_after_the_acknowledgement_is_enough(store_path, tmp_path):
    grow(store_path, "one")
    shutil.copytree(store_path, tmp_path / "old")
    program = (
        "import os, sys, holdfast\n"
        "agent = holdfast.open(sys.argv[1]).agent('a')\n"
        "agent.state['label'] = 'two'\n"
        "agent.checkpoint('two')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", program, str(store_path)], check=False).returncode == -9
    put_back(tmp_path / "old", store_path)
    with pytest.raises(StoreWentBack):
        holdfast.open(store_path)


@pytest.mark.parametrize("content", [b"", b"x" * 128, b"x" * 10_000])
def test_a_record_that_says_nothing_is_begun_anew(store_path, remembered, content):
    grow(store_path, "one")
    (record,) = [file for file in remembered.rglob("*") if file.is_file()]
    assert record.stat().st_mode & 0o077 == 0
    record.write_bytes(content)
    assert opens(store_path) == ["one"]
    grow(store_path, "two")
    assert opens(store_path) == ["two", "one"]


def test_without_a_place_for_it_stores_work_as_well(store_path, old, monkeypatch, remembered):
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null/none")
    put_back(old, store_path)
    assert opens(store_path) == ["one"]
    monkeypatch.setenv("XDG_STATE_HOME", str(remembered))
    (record,) = [file for file in remembered.rglob("*") if file.is_file()]
    record.unlink()
    record.mkdir()
    assert opens(store_path) == ["one"]


def test_damage_inside_is_told_first(store_path, old):
    shutil.copy(old / "store.db", store_path / "store.db")
    with pytest.raises(Damaged) as caught:
        open_embedded(store_path)
    assert type(caught.value) is Damaged
    open_embedded(store_path, accept_loss=True).close()  # accepts it for both
    open_embedded(store_path).close()
