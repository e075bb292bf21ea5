"""What a line says."""

from __future__ import annotations

import pytest

from holdfast.run import records as rec
from holdfast.run.past import Past
from holdfast.run.tools import tool
from tests.run.bench import Bench, Crash


def line(*records):
    return Past(enumerate(records, 1))


def begin(run="r"):
    return rec.Begin(1, run, "work", b"\x80", b"f")


def intent(path, run="r", kind="write"):
    return rec.Intent(1, run, path, "pay", kind, b"\x80", b"f", f"key {path}")


def done(path, of, run="r", how="value"):
    return rec.Done(1, run, path, how, of, value=b"\x01")


def test_an_intent_without_an_outcome_is_open_and_one_with_a_decision_is_not():
    past = line(begin(), intent("0"), intent("1"), done("1", 3), intent("2"), rec.Doubt(1, "r", "2", 5, "why"))
    run = past.runs["r"]
    assert [call.path for call in run.open_calls()] == ["0", "2"]
    assert [call.status for call in run.calls.values()] == ["in doubt", "done", "in doubt"]
    assert run.order == ["1"]
    past = line(begin(), intent("0"), rec.Decision(1, "r", "0", 2, "done", "ann", "saw it", b"\x05"))
    assert not past.runs["r"].open_calls()
    assert past.runs["r"].calls["0"].outcome.value == b"\x05"


def test_a_rollback_voids_what_came_after_its_target_and_raises_the_incarnation():
    records = [begin(), intent("0"), done("0", 2), intent("1"), done("1", 4), rec.RolledBack(1, "", 3, b"id")]
    past = line(*records)
    assert list(past.runs["r"].calls) == ["0"]
    assert past.incarnation == 2
    again = line(*records, intent("1"), done("1", 7))
    assert list(again.runs["r"].calls) == ["0", "1"]
    assert again.runs["r"].calls["1"].number == 7


def test_signals_modes_and_breakers_survive_a_rollback():
    received = rec.Done(1, "r", "0", "value", tool="wait", kind="read", value=b"\x01", event=9)
    past = line(begin(), received, rec.Note(1, "", "breaker", "pay", b"\x01"), rec.RolledBack(1, "", 0, b"id"))
    assert past.taken == {9}
    assert past.notes["breaker", "pay"].value == b"\x01"
    assert not past.runs
    assert [(run.id, run.status) for run in past.every_run] == [("r", "rolled back")]


def test_calls_inside_a_completed_tool_are_not_in_the_order():
    past = line(
        begin(), intent("0"), intent("0/0"), done("0/0", 3), done("0", 2), intent("1"), intent("1/0"), done("1/0", 7)
    )
    assert past.runs["r"].order == ["0", "1/0"]


def test_a_marked_change_reads_as_old_where_the_run_has_passed_and_as_new_elsewhere():
    new = [False]
    crash = [True]

    @tool(effect="read")
    def search(city):
        return city

    def work(agent):
        from holdfast.run.scope import here

        found = [search("a")]
        if new[0]:
            lane = here()
            found.append(lane.scope.version(lane, "more"))
            if found[-1]:
                found.append(search("new"))
        found.append(search("b"))
        if crash[0]:
            raise Crash
        return found

    bench = Bench()
    with pytest.raises(Crash):
        bench.run(work)
    bench.ledger.flush()
    new[0], crash[0] = True, False
    again = bench.crashed()
    assert again.run(work) == ["a", False, "b"]
    assert again.crashed(again.ledger.count - 1).run(work) == ["a", False, "b"]
    fresh = Bench()
    assert fresh.run(work) == ["a", True, "new", "b"]
    assert fresh.crashed(fresh.ledger.count - 1).run(work) == ["a", True, "new", "b"]
