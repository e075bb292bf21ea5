"""After a move nobody writes in the old place any more, also not a process that had it open all the time."""

from __future__ import annotations

import os
import threading

import pytest

import holdfast
from holdfast import Policy
from holdfast.agent.move import Restored, _judged
from holdfast.agent.store import Store
from holdfast.agent.verify import Problem
from holdfast.errors import ReadOnly, StoreBusy
from holdfast.store.rows import BEGINNING


@pytest.fixture
def place(server):
    with server.database(f"test_{os.urandom(6).hex()}") as url:
        yield url


def opened_elsewhere(place):
    """As another process would have it: with connections of its own."""
    return Store.opened(f"{place}&application_name=other")


def test_whoever_has_a_store_on_a_server_open_learns_that_it_was_moved(place, tmp_path):
    with holdfast.open(place) as source, holdfast.open(tmp_path / "new") as dest:
        with source.agent("old") as agent:
            agent.state["n"] = 1
            agent.checkpoint()
        other = opened_elsewhere(place)
        held = other.agent("held")
        held.checkpoint("there")
        held.close()
        source.move(dest)
        changes = [
            lambda: other.agent("late"),
            lambda: other.agent("old"),
            lambda: other.copy("old", "late"),
            lambda: other.branch("old", "late"),
            lambda: other.tag("old", "late"),
            lambda: other.set_policy(Policy(last=1)),
        ]
        for change in changes:
            with pytest.raises(ReadOnly, match="moved"):
                change()
        other.close()
        assert {one.name for one in dest.agents()} == {"old", "held"}
    with holdfast.open(place, readonly=True) as left:
        assert {one.name for one in left.agents()} == {"old", "held"}


def test_what_somebody_is_making_while_a_store_moves_is_in_the_new_place_or_refused(place, tmp_path):
    with holdfast.open(place) as source, holdfast.open(tmp_path / "new") as dest:
        source.agent("first").close()
        other, over, outcomes = opened_elsewhere(place), threading.Event(), []

        def move():
            try:
                source.move(dest)
                outcomes.append("moved")
            except StoreBusy:
                outcomes.append("busy")
            over.set()

        def make(change):
            made = change.add_agent("late", b"l" * 16, {"created": 1})
            change.add_branch(made.a, "main", b"b" * 16, {"created": 1, "from": b""}, None, BEGINNING)
            change.agents()  # the server has answered
            thread.start()
            over.wait(2)  # for one that does not wait for this transaction

        thread = threading.Thread(target=move)
        other._db.change(make)
        thread.join()
        other.close()
        assert outcomes == ["busy"], "something that is not in the new place was made in the old one"
        source.move(dest)
        assert {one.name for one in dest.agents()} == {"first", "late"}


def test_a_restore_test_says_what_is_known_to_be_wrong_and_not_that_it_is_unknown():
    away, whole = Restored("a", problem="it does not answer", unknown=True), Restored("b", 3)
    of_all, of_a = Problem("store.db", "a page is damaged"), Problem("checkpoint 1", "it is missing", "a")
    assert _judged(away, [of_all]) == away, "nothing of it came back"
    assert _judged(away, [of_all, of_a]) == Restored("a", problem="it is missing")
    assert _judged(whole, [of_a]) == whole
    assert _judged(whole, [of_all, of_a]) == Restored("b", 3, "a page is damaged")
