"""A recorded run is executed again: the same way, proven by digests, and with nothing done outside."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import holdfast
from holdfast import travel
from holdfast.errors import BadOption
from holdfast.travel.jobs import Workers
from tests.travel.conftest import loaded

PROGRAM = str(Path(__file__).parent / "trips.py")


@pytest.fixture(autouse=True, scope="module")
def workers():
    """One process that executes again, for all tests: starting one takes longer than most of them."""
    with Workers():
        yield


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with holdfast.open(tmp_path / "store") as opened:
        yield opened


def files_of(store):
    """Everything a store holds, but for what readers of a write-ahead log leave behind, and room that is made in it."""
    return {
        path.name: path.read_bytes().rstrip(b"\0")
        for path in sorted(store.path.rglob("*"))
        if path.is_file() and not path.name.endswith("-shm")
    }


def test_runs_of_every_shape_go_the_same_way_with_equal_digests(store, trips):
    when = holdfast.When(every_steps=1)
    names = []
    for at in range(2):
        store.agent(f"plain-{at}").run(trips.travel, "TP1"[: at + 1])
        store.agent(f"varied-{at}", when=when).run(trips.varied, ["Rome", "nowhere", "Oslo"])
        asyncio.run(store.agent(f"crowd-{at}").arun(trips.crowd, [f"town {n}" for n in range(7)]))
        names += [f"plain-{at}", f"varied-{at}", f"crowd-{at}"]
    with pytest.raises(ValueError, match="over budget"):
        store.agent("failing").run(trips.travel, "TP1234")
    head = {name: store.agent(name).head.id for name in names}
    before = files_of(store)
    found = travel.replay_all(store, [(name, None) for name in [*names, "failing"]], program=PROGRAM)
    for one in found:
        assert one.same, (one.agent, one.difference, one.failed, one.stopped, one.blocked)
        assert one.compared == len(one.checkpoints) >= 2
    assert found[-1].status == "failed"
    assert found[-1].error == "ValueError: over budget"
    assert {name: store.agent(name).head.id for name in names} == head
    assert files_of(store) == before


def test_what_a_run_does_with_its_own_history_and_log_is_no_difference(store, trips):
    for way in ("tag", "logs", "back", "branch"):
        agent = store.agent(way)
        if way == "back":
            with pytest.raises(holdfast.errors.RunRolledBack):
                agent.run(trips.busy, way)
        else:
            agent.run(trips.busy, way)
    before = files_of(store)
    tags, logs, back, branch = travel.replay_all(
        store, [(way, None) for way in ("tag", "logs", "back", "branch")], program=PROGRAM
    )
    for one in (tags, logs, back):
        assert one.same, (one.agent, one.difference, one.failed, one.stopped, one.blocked)
        assert one.compared >= 2
    assert "go back to one" in back.status
    assert branch.difference is None  # what the program would do on it nobody can see
    assert branch.stopped.startswith("it would begin the branch 'aside' at ")
    assert files_of(store) == before


def test_a_run_that_another_process_executes_is_replayed_as_far_as_it_is_recorded(store, trips, tmp_path):
    child = tmp_path / "child.py"
    child.write_text(
        f"import sys; sys.path.insert(0, {str(Path(PROGRAM).parent)!r})\n"
        "import holdfast, trips, time\n"
        "@holdfast.tool(effect='read')\n"
        "def forever():\n"
        "    print('there', flush=True); sys.stdin.readline()\n"
        "@holdfast.durable\n"
        "def long(agent):\n"
        "    agent.state['n'] = trips.trip_price('ab')\n"
        "    agent.checkpoint('half')\n"
        "    forever()\n"
        "if __name__ == '__main__':\n"
        "    holdfast.open(sys.argv[1]).agent('busy').run(long)\n"
    )
    import subprocess

    with subprocess.Popen(
        [sys.executable, child, store.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "there\n"
        found = store.replay("busy", program=str(child))
        assert found.same, found
        assert (found.status, found.partial) == ("recorded up to 2: forever()", True)
        assert [one.label for one in found.checkpoints] == ["half"]
        process.stdin.write("\n")
        process.stdin.close()
        assert process.wait() == 0  # nobody took its lease


LEFT = """
import asyncio, holdfast

@holdfast.tool(effect="read")
async def look(n, seconds):
    await asyncio.sleep(seconds)
    return n

@holdfast.tool
async def buy(n, seconds):
    await asyncio.sleep(seconds)
    return n

async def fails(n):
    await look(n, 0.01)
    raise ValueError("ENDS")

@holdfast.durable
async def gathered(agent, tool):
    agent.state["left"] = 1
    agent.checkpoint("begun")
    async def other():
        try:
            await globals()[tool](2, 30)
        finally:
            agent.state["left"] = 0  # as its loop ends, after the run
    await asyncio.gather(fails(1), other())

@holdfast.durable
async def grouped(agent, tool):
    agent.checkpoint("begun")
    async with asyncio.TaskGroup() as group:
        group.create_task(globals()[tool](2, 30))
        group.create_task(fails(1))

@holdfast.durable
async def first(agent, tool):
    agent.state["n"] = 0
    tasks = [asyncio.create_task(globals()[tool](n, 0.01 + 30 * n)) for n in range(2)]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    agent.state["n"] = 1
    agent.checkpoint("done")
    return "ENDS"

@holdfast.durable
async def queued(agent, tool):
    agent.state["seen"] = []
    places = asyncio.Queue()
    async def work():
        while True:
            agent.state["seen"].append(await look(await places.get(), 0.01))
            places.task_done()
    workers = [asyncio.create_task(work()) for _ in range(2)]
    for n in range(4):
        places.put_nowait(n)
    await places.join()
    agent.checkpoint("done")
    return [one.cancel() for one in workers] and "ENDS"
"""


def two_programs(folder, old, new):
    """The files of one, and of another in which something is replaced."""
    program, other = folder / "left.py", folder / "other" / "left.py"
    program.write_text(LEFT)
    other.parent.mkdir()
    other.write_text(LEFT.replace(old, new))
    return program, other


def test_what_was_under_way_when_a_run_ended_keeps_nobody_from_its_end(store, tmp_path):
    """Calls of other tasks that have no outcome are never answered; what came after is executed and compared."""
    program, other = two_programs(tmp_path, "ENDS", "ends")
    names = []
    with loaded(program) as left:
        for function in (left.gathered, left.grouped, left.first, left.queued):
            for tool in ("look", "buy"):
                names.append(f"{function.__name__}-{tool}")
                agent = store.agent(names[-1])
                with suppress(ValueError, ExceptionGroup):
                    asyncio.run(agent.arun(function, tool))
                if function is left.gathered:
                    agent.checkpoint("what its tasks did after it")
    runs = [(name, None) for name in names]
    for one in travel.replay_all(store, runs, program=str(program)):
        assert one.same, (one.agent, one)
        assert one.status in {"failed", "finished"}, (one.agent, one)
    for one in travel.replay_all(store, runs, program=str(program), code=str(other.parent)):
        assert one.difference is not None, one.agent
        assert "ends" in one.difference.actual, (one.agent, one)


def test_where_a_fix_waits_for_a_call_that_nobody_answered_nobody_can_say_that_it_is_one(store, tmp_path):
    program, other = two_programs(tmp_path, 'raise ValueError("ENDS")', "return n")
    with loaded(program) as left:
        agent = store.agent("gathered")
        with suppress(ValueError):
            asyncio.run(agent.arun(left.gathered, "buy"))
        agent.checkpoint("what its tasks did after it")
    found = store.validate("gathered", program=str(program), code=str(other.parent))
    assert found.before.status == "failed"
    assert found.problems == ["nobody can say: it is recorded up to ~1/0: buy(n=2, seconds=30)"]
    again = store.replay("gathered", program=str(program), code=str(other.parent))
    assert again.difference.actual == "it waits for buy(n=2, seconds=30), which nobody answered"


def test_a_timer_that_never_stops_keeps_no_replay_from_its_end(store, tmp_path):
    program, other = two_programs(tmp_path, 'raise ValueError("ENDS")', "return n")
    beats = """

async def beats():
    while True:
        await asyncio.sleep(1)

async def fails(n):
    globals()["heart"] = asyncio.create_task(beats())
"""
    for file in (program, other):
        file.write_text(file.read_text().replace("\nasync def fails(n):\n", beats))
    with loaded(program) as left:
        agent = store.agent("gathered")
        with suppress(ValueError):
            asyncio.run(agent.arun(left.gathered, "buy"))
        agent.checkpoint("what its tasks did after it")
    assert store.replay("gathered", program=str(program)).same
    again = store.replay("gathered", program=str(program), code=str(other.parent))
    assert again.failed == ""
    assert again.difference.actual == "it waits for buy(n=2, seconds=30), which nobody answered"


def test_where_the_ways_part_in_a_task_for_which_nobody_waits_the_replay_ends(store, tmp_path):
    program, other = two_programs(tmp_path, "places.get(), 0.01", "places.get(), 0.02")
    with loaded(program) as left:
        asyncio.run(store.agent("queued").arun(left.queued, "look"))
    found = store.replay("queued", program=str(program), code=str(other.parent))
    assert (found.difference.expected, found.difference.actual) == (
        "look(n=0, seconds=0.01)",
        "look(n=0, seconds=0.02)",
    )


def test_the_first_difference_is_shown_with_the_line_of_the_program(store, trips, tmp_path):
    agent = store.agent("code")
    agent.run(trips.moody, "code")
    store.agent("clock").run(trips.moody, "clock")
    other = tmp_path / "other"
    other.mkdir()
    text = Path(PROGRAM).read_text()
    (other / "trips.py").write_text(text.replace('"noise": False', '"noise": True'))
    one = store.replay("code", program=PROGRAM, code=str(other))
    assert (one.difference.kind, one.difference.path) == ("call", "1")
    assert (one.difference.expected, one.difference.actual) == ("trip_price(flight='AAA')", "trip_price(flight='AA')")
    assert one.difference.differs == ["flight: 'AAA' -> 'AA'"]
    line = next(at for at, line in enumerate(text.splitlines(), 1) if 'trip_price("AA" if' in line)
    assert one.difference.line == f"{other / 'trips.py'}:{line}"
    two = store.replay("clock", program=PROGRAM)
    assert two.difference.kind == "state"
    assert two.difference.differs[0].startswith("state.now: ")
    assert [one.same for one in two.checkpoints] == [True, False]
    with pytest.raises(ValueError, match="over budget"):
        store.agent("end").run(trips.travel, "TP1234")
    (other / "trips.py").write_text(text.replace('raise ValueError("over budget")', "return"))
    end = store.replay("end", program=PROGRAM, code=str(other))
    assert str(end.difference).startswith("at the end\n  expected: failed: ValueError")


def test_a_replay_can_do_nothing_outside_and_names_the_line_that_tried(store, trips, tmp_path, monkeypatch):
    outside = tmp_path / "outside.txt"
    monkeypatch.setenv("TRIPS_OUTSIDE", str(outside))
    for way in ("file", "socket", "process"):
        store.agent(way).run(trips.moody, way)
    store.agent("scratch").run(trips.moody, "scratch")
    outside.unlink()
    found = travel.replay_all(
        store, [(name, None) for name in ("file", "socket", "process", "scratch")], program=PROGRAM
    )
    lines = Path(PROGRAM).read_text().splitlines()
    for one, words in zip(found, ('write_text("here")', "socket.create_connection", "subprocess.run"), strict=False):
        assert not one.same
        file, _, number = one.blocked[0]["line"].rpartition(":")
        assert file == PROGRAM
        assert words in lines[int(number) - 1]
    assert not outside.exists()
    assert found[3].same, found[3]
    assert all("audit" in one.isolation for one in found)
    if os.getuid() == 0:
        assert all("no network" in one.isolation for one in found)


def test_a_replay_has_a_copy_of_the_workspace_of_its_moment(store, trips, tmp_path):
    files = tmp_path / "files"
    files.mkdir()
    (files / "old.txt").write_text("old")
    agent = store.agent("drawing", workspace=files)
    agent.checkpoint("files")
    agent.run(trips.moody, "files")
    assert agent.state["seen"] == ["drawn", "old", "old and new"]
    for one in files.iterdir():
        one.write_text("something else since")
    found = store.replay("drawing", program=PROGRAM)
    assert found.same, (found.difference, found.error, found.failed, found.blocked)
    assert {one.read_text() for one in files.iterdir()} == {"something else since"}


def test_a_relative_path_that_leads_nowhere_in_a_replay_is_explained(store, trips, tmp_path):
    files = tmp_path / "tree"
    files.mkdir()
    (files / "old.txt").write_text("old")
    agent = store.agent("relative", workspace=files)
    agent.run(trips.moody, "relative")
    found = store.replay("relative", program=PROGRAM)
    assert found.difference.actual.startswith("FileNotFoundError")
    assert found.difference.differs[0].startswith("tree/old.txt is relative")
    assert "agent.workspace" in str(found.difference)


def test_what_a_tool_wrote_and_no_checkpoint_has_yet_is_said_to_be_why(store, trips, tmp_path):
    files = tmp_path / "tree"
    files.mkdir()
    agent = store.agent("written", workspace=files)
    agent.run(trips.moody, "written")
    assert agent.state["seen"] == "written by a tool"
    found = store.replay("written", program=PROGRAM)
    assert found.difference.actual.startswith("FileNotFoundError")
    reason = "files that trip_make may have written since the checkpoint before are not in a replay"
    assert found.difference.differs == [reason]
    agent.run(trips.moody, "written later")
    assert store.replay("written", program=PROGRAM).same


def test_a_run_with_children_is_replayed_with_what_came_of_them_and_so_are_they(store, trips):
    store.agent("party").run(trips.party, ["TP1", "TP1234"])
    names = [("party", None), ("party/TP1", None), ("party/TP1234", None)]
    found = travel.replay_all(store, names, program=PROGRAM)
    assert all(one.same for one in found), [(one.difference, one.failed, one.stopped) for one in found]
    assert found[0].compared == 3
    assert found[2].error == "ValueError: over budget"
    store.map(trips.trip_price, ["TP1", "AB1"], name="many")
    with pytest.raises(BadOption, match="many has no runs"):
        store.replay("many", program=PROGRAM)


def test_a_program_that_cannot_be_loaded_or_a_run_that_is_not_there_is_said(store, trips, tmp_path):
    store.agent("a").run(trips.travel, "TP1")
    with pytest.raises(holdfast.UnknownRevision, match="no run and no checkpoint"):
        store.replay("a", "nope", program=PROGRAM)
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0\n")
    assert "ZeroDivisionError" in store.replay("a", program=str(broken)).failed
    assert "no durable function 'travel'" in store.replay("a", program="json").failed


def test_a_checkpoint_names_the_run_in_which_it_was_taken(store, trips):
    agent = store.agent("a")
    agent.run(trips.travel, "T")
    first = agent.runs()[0].id
    agent.run(trips.travel, "TP")
    agent.state["by hand"] = 1
    agent.checkpoint("by hand")
    one, two = travel.replay_all(store, [("a", "#3"), ("a", None)], program=PROGRAM)
    assert one.run == first
    assert two.run != first
    with pytest.raises(holdfast.errors.BadOption, match="not taken in a run"):
        store.replay("a", "by hand", program=PROGRAM)


def test_a_checkpoint_of_another_branch_names_no_run_of_this_one(store, trips):
    store.agent("a").run(trips.travel, "T")
    (found,) = store.what_if("a", travel.WhatIf(results={"trip_price": 900}), program=PROGRAM)
    store.keep(found, "dear")
    other = store.agent("a", branch="dear", readonly=True)
    for name in ("dear", f"id:{other.head.id}", other.head):
        with pytest.raises(BadOption, match="is a checkpoint of a@dear") as caught:
            store.replay("a", name, program=PROGRAM)
        assert "holdfast replay a@dear id:" in caught.value.hint
        with pytest.raises(BadOption, match="has no runs"):
            store.replay("a", name, program=PROGRAM, branch="dear")
    forked = store.agent("a").branch("forked")
    forked.run(trips.travel, "TP")
    mine, ours = (store.replay("a", name, program=PROGRAM, branch="forked") for name in ("~0", "#2"))
    assert (mine.run, ours.run) == (forked.runs()[0].id, store.agent("a").runs()[0].id)
    with pytest.raises(BadOption, match="is a checkpoint of a@forked"):
        store.replay("a", "forked", program=PROGRAM)


@pytest.mark.parametrize("mood", ["gone", "bad", "good"])
def test_a_run_that_was_taken_back_into_its_middle_and_resumed_is_replayed_without_what_was_left_behind(
    store, trips, monkeypatch, mood
):
    agent, towns = store.agent(mood), ["Rome", "Oslo", "Bonn", "Kyiv"]
    monkeypatch.setattr(trips, "FARES", {"mood": mood, "Bonn": 20})
    with suppress(KeyboardInterrupt, ValueError):
        agent.run(trips.shop, towns)
    agent.rollback("Oslo", accept=["trip_book"])
    first = store.replay(mood, program=PROGRAM)  # nobody has gone on: it is as it was executed
    labels = ["began", *towns, *(["run shop finished"] if mood == "good" else [])]
    assert [one.label for one in first.checkpoints] == labels
    assert first.status == {"gone": "recorded up to 14: trip_mood()", "bad": "failed", "good": "finished"}[mood]
    assert first.same, first
    bonn = next(one for one in agent.log(all=True) if one.label == "Bonn")
    trips.FARES = {"mood": "good", "Bonn": 200, "Kyiv": 600}
    assert agent.run(trips.shop, towns) == 0
    again, then = (store.replay(mood, run, program=PROGRAM) for run in (None, bonn))
    assert again.run == then.run == first.run
    assert again.same, again
    assert (again.result, again.compared) == ("0", 6)
    assert then.same, then
    assert [one.label for one in then.checkpoints] == labels
    found = agent.bisect(lambda state: state.get("left", 1000) >= 700, program=PROGRAM)
    assert found.checkpoint.label == "Bonn"
    assert (found.turn.after, found.no_turn) == ("trip_fare(town='Bonn')", "")
    assert "rolled back" not in {one.status for one in found.cause.effects}
    same, other = store.what_if(
        mood, travel.WhatIf(results={"trip_fare#3": 600}), travel.WhatIf(results={"trip_fare#2": 20}), program=PROGRAM
    )
    assert same.same, same
    assert other.stopped.startswith("it would write: trip_book(flight='Bonn', amount=20)")  # that was before


def test_calls_of_tasks_complete_in_the_order_of_the_execution_that_counts(store, trips, monkeypatch, tmp_path):
    agent = store.agent("tasks")
    monkeypatch.setattr(trips, "FARES", {"a": 0.0, "b": 0.05})
    asyncio.run(agent.arun(trips.shops, ["a", "b"]))
    agent.rollback("began")
    trips.FARES = {"a": 0.05, "b": 0.0}
    assert asyncio.run(agent.arun(trips.shops, ["a", "b"])) == "B"
    found = store.replay("tasks", program=PROGRAM)
    assert found.same, found
    assert found.result == "'B'"
    other = tmp_path / "other"
    other.mkdir()
    text = Path(PROGRAM).read_text().replace("trip_queue(town)", "trip_queue(town + town)")
    (other / "trips.py").write_text(text)
    changed = store.replay("tasks", program=PROGRAM, code=str(other))
    assert (changed.failed, changed.difference.actual) == ("", "trip_queue(town='aa')")


def test_a_run_that_was_begun_anew_under_its_id_and_the_one_before_it_are_two(store, trips, monkeypatch):
    agent = store.agent("anew", when=None)
    agent.checkpoint("before")
    found, first = [], None
    for fare in (200, 300):
        monkeypatch.setattr(trips, "FARES", {"Rome": fare})
        agent.run(trips.shop.options(id="trip", again=fare == 300), ["Rome"])
        ended = agent.head
        first = first or ended
        agent.rollback("before")
        found += [(store.replay("anew", run, program=PROGRAM), 1000 - fare) for run in ("trip", ended)]
    found += [(store.replay("anew", first, program=PROGRAM), 800)]
    for one, left in found:
        assert one.same, one
        assert one.result == str(left)
