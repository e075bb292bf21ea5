"""The table of open runs: it says what the lines and the log say, and ``due()`` looks where it points."""

from __future__ import annotations

import json
import random
import threading
import uuid
from contextlib import suppress

import pytest

import holdfast
from holdfast import errors
from holdfast.run import listing, waiting
from holdfast.run import opened as table
from holdfast.run import store as run_store
from holdfast.run.listing import runs_of
from holdfast.run.waiting import Until
from holdfast.store.changes import now_us
from tests.agent.damage import KEY
from tests.conftest import SOAK
from tests.lives import die, dies
from tests.memory import memory
from tests.run.bench import Crash


class Place:
    """Where a store is; opening it again is what a new process does."""

    def __init__(self, where, key):
        self.where, self.key, self.store = where, key, None

    def open(self):
        self.close()
        self.store = holdfast.open(self.where, key=self.key)
        return self.store

    def close(self):
        if self.store is not None:
            self.store.close()


ENCRYPTED_TOO = pytest.mark.parametrize("places", ["directory", "encrypted", "server"], indirect=True)


@pytest.fixture(params=["directory", "server"])
def places(request):
    """``places(name)`` is the place of a store of one kind."""
    made = []

    def keep(place):
        made.append(place)
        return place

    if request.param != "server":
        key = KEY if request.param == "encrypted" else False
        with memory() as folder:
            yield lambda name="store": keep(Place(str(folder / name), key))
            for one in made:
                one.close()
        return
    server = request.getfixturevalue("postgres_server")
    request.getfixturevalue("monkeypatch").setenv("HOLDFAST_ALLOW_UNSAFE_POSTGRES", "1")  # it does not flush
    with server.database(f"test_{uuid.uuid4().hex}") as url:
        yield lambda name="store": keep(Place(f"{url}&schema={name}", False))
        for one in made:
            one.close()


@pytest.fixture
def place(places):
    return places()


def rows(store):
    """What the table has, and what it should have, as sets."""
    store.flush()
    view = store._db.view
    there, wanted = set(), set()
    for branch in view.branches():
        log = view.log(branch.a) if branch.a else []
        for found, some in (
            (view.opened(branch.b), there),
            (table.rows_of(view, branch, log) if branch.a else [], wanted),
        ):
            some.update((one.b, one.run, one.signal, one.due, json.dumps(one.body, sort_keys=True)) for one in found)
    return there, wanted


def check(store):
    there, wanted = rows(store)
    assert there == wanted
    # The answer of the lines, all of them read, for what was begun or resumed where it is.
    mine = {(b, run.decode()) for b, run, signal, *_ in there if not signal}
    due = [
        (view._branch.b, info.id)
        for view in store._views()
        for info in runs_of(view, only_due=True)
        if (view._branch.b, info.id) in mine
    ]
    branches = {(agent.name, branch.name): branch.b for agent in store._db.view.agents()
                for branch in store._db.view.branches(agent.a)}  # fmt: skip
    assert [(branches[info.agent, info.branch], info.id) for info in store.due()] == due
    return there


def due_of(store, agent="a"):
    """By run, what the table says of an agent's runs."""
    view = store._db.view
    branches = view.branches(view.agent(agent).a)
    return {one.run.decode(): one.due for branch in branches for one in view.opened(branch.b) if not one.signal}


@holdfast.durable(name="opened-script")
def script(agent, steps):
    """Does what it is told, one after the other."""
    for number, (what, name) in enumerate(steps):
        agent.state["at"] = number
        if what == "wait":
            agent.wait_for(name)
        elif what == "sleep":
            agent.sleep(name)
        elif what == "save":
            agent.checkpoint(str(name))
        elif what == "crash":
            Crashes.left -= 1
            if Crashes.left >= 0:
                raise Crash
        elif what == "fail":
            raise ValueError(name)
        elif what == "spawn":
            agent.spawn(script, f"child{number}", [["wait", name]]).join()
        else:
            act(name)
    return len(steps)


@holdfast.tool(name="opened-act", effect="write")
def act(name):
    if name == "doubt":
        raise ConnectionError("nobody knows")


def item(number):
    if number == 2:
        act("doubt")
    if number == 3:
        Crashes.left -= 1
        if Crashes.left >= 0:
            raise Crash
    return number


class Crashes:
    left = 0


# -- one row, from its beginning to its end ----------------------------------------------------------------------------


@ENCRYPTED_TOO
def test_a_row_says_when_somebody_should_look(places, place):
    store = place.open()
    agent = store.agent("a")
    before = now_us()
    with pytest.raises(errors.Waiting):
        agent.run(script.options(id="r", wait=False), [["wait", "go"]])
    assert due_of(store) == {"r": table.NEVER}
    (row,) = store._db.view.opened(agent._branch.b)
    assert {**row.body, "code": ""} == {
        "function": "opened-script", "code": "", "kind": "run", "status": "waiting", "number": 1,
        "waits": [["signal", "go", 0]],
    }  # fmt: skip
    agent.cancel("r")
    assert due_of(store) == {}
    with pytest.raises(errors.Waiting):
        agent.run(script.options(id="s", wait=False), [["sleep", 3600]])
    assert before + 3600 * 10**6 <= due_of(store)["s"] <= now_us() + 3600 * 10**6
    assert store.due() == []
    agent.cancel("s")
    Crashes.left = 1
    with pytest.raises(Crash):
        agent.run(script.options(id="c"), [["crash", ""]])
    assert due_of(store) == {"c": table.NOW}
    assert agent.run(script.options(id="c"), [["crash", ""]]) == 1
    with pytest.raises(errors.InDoubt):
        agent.run(script.options(id="d"), [["act", "doubt"]])
    assert due_of(store) == {"d": table.ATTENTION}
    agent.resolve(agent.effects()[-1], "not-done")
    assert due_of(store) == {"d": table.NOW}
    check(store)
    assert store.verify().ok


def test_a_run_that_sleeps_is_due_when_its_time_has_come(place, monkeypatch):
    store = place.open()
    for name, seconds in (("a", 3600), ("b", 7200)):
        with pytest.raises(errors.Waiting):
            store.agent(name).run(script.options(id="r", wait=False), [["sleep", seconds]])
    for hours, names in ((0.5, []), (1.5, ["a"]), (2.5, ["a", "b"])):
        later = now_us() + round(hours * 3600 * 10**6)
        for module in (run_store, listing):
            monkeypatch.setattr(module, "now_us", lambda later=later: later)
        assert [info.agent for info in store.due()] == names


def test_a_rollback_takes_rows_away_and_resuming_makes_them_again(place):
    store = place.open()
    agent = store.agent("a")
    with pytest.raises(errors.Waiting):
        agent.run(script.options(id="r", wait=False), [["save", "in it"], ["wait", "go"]])
    store.signal("a", "early", 1, run="r")
    store.signal("a", "kept", 1, any_run=True)
    agent.rollback("in it")
    assert due_of(store) == {}
    assert len(check(store)) == 1  # the signal to any run
    with pytest.raises(errors.Waiting):
        agent.resume("r", wait=False)
    assert due_of(store) == {"r": table.NEVER}
    assert len(check(store)) == 3
    assert store.verify().ok


def test_a_failed_run_has_no_row_and_keeps_its_signals(place):
    agent = place.open().agent("a")
    with pytest.raises(ValueError, match="no"):
        agent.run(script.options(id="r"), [["fail", "no"]])
    place.store.signal("a", "go", 1, run="r")
    assert due_of(place.store) == {}
    assert len(check(place.store)) == 1


# -- signals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"run": "r"}, {"any_run": True}], ids=["run", "any run"])
def test_a_signal_that_comes_while_a_run_is_put_off_is_not_missed(place, options, monkeypatch):
    """It is sent after the run has looked for the last time, and before it is written that it waits."""
    store = place.open()
    agent = store.agent("a")
    put_off = waiting.put_off

    def late(run):
        store.signal("a", "go", 7, **options)
        return put_off(run)

    with monkeypatch.context() as patched:
        patched.setattr(waiting, "put_off", late)
        with pytest.raises(errors.Waiting):
            agent.run(script.options(id="r", wait=False), [["wait", "go"]])
    assert [info.id for info in store.due()] == ["r"]
    check(store)
    store = place.open()
    assert [info.id for info in store.due()] == ["r"]
    assert store.agent("a").resume("r", wait=False) == 1
    assert check(store) == set()
    assert store.due() == []


def test_signals_that_are_sent_while_runs_are_put_off_are_never_missed(place):
    """Sender and writer meet in every order; whatever it was, the run has the signal or is due."""
    store = place.open()
    agent = store.agent("a")
    agent.checkpoint("before")
    for number in range(12):
        id, over = f"r{number}", threading.Event()

        def send(id=id, over=over):
            while not over.is_set():
                with suppress(errors.BadOption):  # it has not begun yet
                    store.signal("a", "go", run=id)
                    return

        sender = threading.Thread(target=send)
        sender.start()
        try:
            with suppress(errors.Waiting):
                agent.run(script.options(id=id, wait=False), [["wait", "go"]])
                continue
            sender.join()
            assert [info.id for info in store.due()] == [id]
            assert agent.resume(id, wait=False) == 1
        finally:
            over.set()
            sender.join()
    assert {info.status for info in agent.runs()} == {"finished"}
    assert check(store) == set()
    assert store.verify().ok


def test_a_signal_that_nobody_waits_for_points_nowhere(place, monkeypatch):
    store = place.open()
    for name in "ab":
        with pytest.raises(errors.Waiting):
            store.agent(name).run(script.options(id="r", wait=False), [["wait", "go"]])
    misspelt = store.signal("a", "og", 1)
    store.signal("a", "go", 1, any_run=True)
    store = place.open()
    read = []
    monkeypatch.setattr(Until, "_look", lambda _: read.append(1))
    assert [[one.run for one in rows] for _, rows in table.candidates(store._db.view, now_us())] == [[b"r"]]
    assert [info.agent for info in store.due()] == ["a"]
    store.drop_signal("a", misspelt.id)
    check(store)
    assert not read


def test_a_taken_signal_points_nowhere(place):
    store = place.open()
    agent = store.agent("a")
    steps = [["wait", "go"], ["wait", "go"]]
    with pytest.raises(errors.Waiting):
        agent.run(script.options(id="r", wait=False), steps)
    store.signal("a", "go", 1)
    with pytest.raises(errors.Waiting):
        agent.resume("r", wait=False)
    assert len(check(store)) == 1
    assert list(table.candidates(store._db.view, now_us())) == []


# -- what came from elsewhere ------------------------------------------------------------------------------------------


def overdue(store, name="a"):
    """A run that was put off, and whose signal has come."""
    with pytest.raises(errors.Waiting):
        store.agent(name).run(script.options(id="r", wait=False), [["save", "in it"], ["wait", "go"]])
    store.signal(name, "go", 1, run="r")


@ENCRYPTED_TOO
@pytest.mark.parametrize("way", ["push", "bundle", "backup", "clone", "branch"])
def test_a_copy_does_not_act_until_it_is_resumed_or_adopted(places, way, tmp_path):
    store = places("store").open()
    overdue(store)
    other, name, branch = store, "a", "main"
    if way == "clone":
        store.copy("a", "copy")
        name = "copy"
    elif way == "branch":
        store.branch("a", "side")
        branch = "side"
    else:
        other = places("other").open()
        if way == "push":
            store.push(other)
        elif way == "backup":
            store.backup(other)
        else:
            store.export(tmp_path / "file", ["a"])
            other.import_bundle(tmp_path / "file", key=KEY if store.encrypted else None)
    assert [(info.agent, info.branch) for info in store.due()] == [("a", "main")]
    check(store)
    check(other)
    assert other.verify().ok
    assert [info.id for info in other.due() if (info.agent, info.branch) == (name, branch)] == []
    assert [info.id for info in other.adopt(name, branch=branch)] == ["r"]
    check(other)
    assert other.verify().ok
    if way in {"push", "bundle", "backup"}:  # signals go along; those of a branch are its own
        assert [info.id for info in other.due()] == ["r"]
        assert other.agent(name, branch=branch).resume("r", wait=False) == 2
    check(other)


def test_a_run_that_was_continued_elsewhere_comes_back_without_a_row(places):
    here, there = places("here").open(), places("there").open()
    waits_for_two = [["wait", "go"], ["wait", "go"]]
    with pytest.raises(errors.Waiting):
        here.agent("a").run(script.options(id="r", wait=False), waits_for_two)
    here.push(there)
    there.signal("a", "go", 1, run="r")
    with pytest.raises(errors.Waiting):
        there.agent("a").resume("r", wait=False)
    assert len(check(there)) == 1
    there.agent("a").close()
    here.agent("a").close()
    there.push(here)
    assert check(here) == set()
    here.signal("a", "go", 2, run="r")
    assert here.due() == []
    assert here.verify().ok
    assert [info.id for info in here.adopt("a")] == ["r"]
    assert [info.id for info in here.due()] == ["r"]
    check(here)


def test_a_signal_that_arrives_makes_a_run_due(places):
    here, there = places("here").open(), places("there").open()
    with pytest.raises(errors.Waiting):
        here.agent("a").run(script.options(id="r", wait=False), [["wait", "go"]])
    here.push(there)
    there.signal("a", "go", 1, run="r")
    assert here.due() == []
    there.push(here)
    assert [info.id for info in here.due()] == ["r"]
    assert here.agent("a").resume("r", wait=False) == 1
    check(here)


def test_adopting_needs_the_branch(place):
    store = place.open()
    overdue(store)
    with pytest.raises(errors.AgentBusy):
        store.adopt("a")


def test_runs_go_on_where_a_store_has_moved_to(places):
    old, new = places("old").open(), places("new").open()
    overdue(old)
    old.branch("a", "side")
    old.move(new)
    assert [(info.branch, info.id) for info in new.due()] == [("main", "r")]
    check(new)
    assert new.verify().ok


def test_another_key_leaves_runs_due(store_path):
    old, new = "1" * 64, "2" * 64
    with holdfast.open(store_path, key=old) as store:
        overdue(store)
    holdfast.keys.rotate(store_path, key=old, new=new)
    with holdfast.open(store_path, key=new) as store:
        assert [info.id for info in store.due()] == ["r"]
        check(store)
        assert store.verify().ok


# -- care --------------------------------------------------------------------------------------------------------------


def test_removing_an_agent_removes_its_rows(place):
    store = place.open()
    overdue(store, "a")
    overdue(store, "b")
    store.remove("a")
    assert [info.agent for info in store.due()] == ["b"]
    assert len(check(store)) == 2


def test_an_agent_that_is_removed_while_a_signal_is_sent_leaves_nothing(place, monkeypatch):
    store, body_of = place.open(), waiting.body_of

    def late(*args, **options):
        store.remove("a")
        return body_of(*args, **options)

    overdue(store)
    with monkeypatch.context() as patched:
        patched.setattr(waiting, "body_of", late)
        with pytest.raises(errors.UnknownAgent):
            store.signal("a", "go", 2)
    assert check(store) == set()
    assert store.verify().ok


def test_damaged_rows_do_not_keep_an_agent_from_arriving(store_path, tmp_path):
    with holdfast.open(store_path) as here, holdfast.open(tmp_path / "there") as there:
        overdue(here)
        here.push(there)
        assert [info.id for info in there.adopt("a")] == ["r"]
        there._db.change(lambda change: change.tx.do("UPDATE open SET due = due + 1"))
        assert here.agent("a").resume("r", wait=False) == 2
        here.push(there)
        assert check(there) == set()
        assert there.verify().ok


@pytest.mark.parametrize("how", ["DELETE FROM open", "DELETE FROM open WHERE length(signal) > 0"])
def test_verify_misses_rows_and_repair_makes_them_again(store_path, tmp_path, how):
    with holdfast.open(store_path, key=False) as store:
        overdue(store)
        before = check(store)
        store._db.change(lambda change: change.tx.do(how))
        found = [problem.detail for problem in store.verify().problems]
        assert found
        assert all("is missing" in one for one in found)
    report = holdfast.repair(store_path, tmp_path / "new", key=False)
    assert report.whole
    with holdfast.open(tmp_path / "new", key=False) as store:
        assert check(store) == before
        assert [info.id for info in store.due()] == ["r"]


def test_verify_finds_a_row_that_says_something_else(store_path):
    with holdfast.open(store_path) as store:
        overdue(store)
        (b,) = [branch.b for branch in store._db.view.branches()]
        (row,) = [one for one in store._db.view.opened(b) if not one.signal]
        late = row._replace(due=row.due - 1)
        extra = row._replace(run=b"nobody")
        store._db.change(lambda change: change.set_open(b, table.Opens([(b"r", b"")], [late, extra])))
        found = sorted(problem.detail for problem in store.verify().problems)
        assert [one.partition(": ")[2] for one in found] == [
            "the row of run nobody should not be there",
            "the row of run r is missing, or says something else",
        ]


def test_damaged_rows_do_not_keep_an_agent_from_its_work(store_path):
    with holdfast.open(store_path) as store:
        overdue(store)
    with holdfast.open(store_path) as store:
        store._db.change(lambda change: change.tx.do("UPDATE open SET due = due + 1"))
        assert not store.verify().ok
        with pytest.raises(errors.Damaged):
            store.due()
        assert store.agent("a").resume("r", wait=False) == 2
        check(store)
        assert store.verify().ok


SHAPES = [
    {}, [], {"function": 1}, {"waits": [["signal"]]}, {"waits": "x"}, {"number": -1}, {"status": None}, {"kind": b""},
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_of_another_shape_with_a_sum_that_fits_is_damage_and_nothing_else(store_path, tmp_path, shape):
    with holdfast.open(store_path, key=False) as store:
        overdue(store)
        (b,) = [branch.b for branch in store._db.view.branches()]
        (row,) = [one for one in store._db.view.opened(b) if not one.signal]
        body = {**row.body, **shape} if shape else shape
        store._db.change(
            lambda change: change.set_open(b, table.Opens([(b"r", b"")], [row._replace(due=1, body=body)]))
        )
        assert not store.verify().ok
        with pytest.raises(errors.Damaged):
            store.due()
    holdfast.repair(store_path, tmp_path / "new", key=False)
    with holdfast.open(tmp_path / "new", key=False) as store:
        assert [info.id for info in store.due()] == ["r"]
        check(store)
    with holdfast.open(store_path, key=False) as store:
        assert store.agent("a").resume("r", wait=False) == 2
        assert store.verify().ok


# -- killed, and at random ---------------------------------------------------------------------------------------------


def test_the_row_of_a_killed_run_says_that_it_can_be_looked_at(store_path):
    @holdfast.durable(name="killed")
    def works(agent):
        agent.state["begun"] = True
        agent.checkpoint("in it")
        die()

    assert dies(lambda: holdfast.open(store_path, key=False).agent("a").run(works.options(id="r")), 0)
    with holdfast.open(store_path, key=False) as store:
        assert due_of(store) == {"r": table.NOW}
        check(store)
        assert store.due() == []  # it waits for nothing
        assert [info.status for info in store.runs()] == ["interrupted"]


class Life:
    """A store that things happen to, with a copy elsewhere."""

    def __init__(self, places, seed):
        self.random = random.Random(seed)
        self.place, self.other = places("store"), places("other")
        self.store = self.place.open()
        self.other.open()
        self.count = 0

    def agent(self):
        name = self.random.choice(["a", "b", *(info.name for info in self.store.agents() if "/" in info.name)])
        branches = [branch for info in self.store.agents() if info.name == name for branch in info.branches] or ["main"]
        return self.store.agent(name, branch=self.random.choice(branches))

    def open_run(self, agent):
        found = [info.id for info in agent.runs() if info.kind == "run"]
        return self.random.choice(found) if found else None

    def begin(self):
        kinds = [("wait", "go"), ("wait", "stop"), ("save", self.count), ("sleep", 3600), ("sleep", 0), ("crash", ""),
                 ("fail", "no"), ("act", "well"), ("act", "doubt"), ("spawn", "go")]  # fmt: skip
        steps = [list(self.random.choice(kinds)) for _ in range(self.random.randint(1, 5))]
        Crashes.left = 1
        self.count += 1
        id = self.random.choice([f"r{self.count}", "again", None])
        self.agent().run(script.options(id=id, wait=False, again=self.random.random() < 0.5), steps)

    def batch(self):
        agent = self.agent()
        name = agent.name
        Crashes.left = 1
        self.store.map(item, [0, 1, self.random.randint(0, 3)], name=name, workers=1, on_error="raise")

    def resume(self):
        agent = self.agent()
        Crashes.left = self.random.randint(0, 1)
        if run := self.open_run(agent):
            agent.resume(run, wait=False)

    def send(self):
        agent = self.agent()
        whose = {"any_run": True} if self.random.random() < 0.4 else {"run": self.open_run(agent)}
        self.store.signal(agent.name, self.random.choice(["go", "stop"]), 1, branch=agent.branch_name, **whose)

    def drop(self):
        for one in self.store.signals()[:1]:
            self.store.drop_signal(one.agent, one.id, branch=one.branch)

    def cancel(self):
        agent = self.agent()
        if run := self.open_run(agent):
            agent.cancel(run)

    def decide(self):
        agent = self.agent()
        for effect in [one for one in agent.effects() if one.status == "in doubt"][:1]:
            agent.resolve(effect, self.random.choice(["done", "not-done"]))

    def back(self):
        agent = self.agent()
        points = list(agent.log())
        if points:
            target = agent.plan_rollback(self.random.choice(points))
            agent.rollback(target.target, accept=sorted({one.effect.tool for one in target.blocked}))

    def branch(self):
        agent = self.agent()
        self.count += 1
        if agent.head is not None:
            agent.branch(f"side{self.count}", at=self.random.choice(list(agent.log())))

    def fork(self):
        agent = self.agent()
        self.count += 1
        if run := self.open_run(agent):
            agent.fork(run, at=str(self.random.randint(0, 4)), branch=f"fork{self.count}")

    def plain(self):
        agent = self.agent()
        with agent:
            agent.state["plain"] = self.count
            agent.checkpoint("plain")

    def reopen(self):
        self.store = self.place.open()

    def push(self):
        self.reopen()
        self.store.push(self.other.store, beside=True)

    def pull(self):
        self.reopen()
        self.store.pull(self.other.store, beside=True)

    def elsewhere(self):
        self.reopen()
        self.store, mine = self.other.open(), self.store
        try:
            with suppress(Crash, errors.HoldfastError, ValueError):
                self.random.choice([self.begin, self.resume, self.send])()
        finally:
            self.other.open()
            self.store = mine

    def adopt(self):
        self.reopen()
        agent = self.agent()
        name, branch = agent.name, agent.branch_name
        agent.close()
        self.store.adopt(name, branch=branch)

    def remove(self):
        if self.random.random() < 0.2:
            self.store.remove(self.random.choice("ab"))

    def clone(self):
        self.count += 1
        self.store.copy(self.random.choice("ab"), f"c{self.count}")


STEPS = ["begin"] * 6 + ["resume"] * 5 + ["send"] * 4 + [
    "batch", "drop", "cancel", "decide", "back", "back", "branch", "fork", "fork", "plain", "reopen", "push",
    "pull", "elsewhere", "adopt", "remove", "clone",
]  # fmt: skip


@ENCRYPTED_TOO
@pytest.mark.parametrize("seed", range(100 if SOAK else 3))
def test_whatever_happens_the_table_says_what_the_lines_say(places, seed):
    life, told = Life(places, seed), []
    for _ in range(30):
        told.append(life.random.choice(STEPS))
        with suppress(Crash, errors.HoldfastError, ValueError):
            getattr(life, told[-1])()
        there, wanted = rows(life.store)
        assert there == wanted, told
        assert rows(life.other.store)[0] == rows(life.other.store)[1], told
    life.reopen()
    check(life.store)
    assert life.store.verify().ok
