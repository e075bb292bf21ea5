"""What goes of the records of runs that are over, what never does, and that nothing is done because of it."""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from datetime import timedelta

import pytest

import holdfast
from holdfast import Policy
from holdfast.agent import letting, retention
from holdfast.errors import (
    BadOption,
    Damaged,
    HoldfastError,
    InDoubt,
    ResultForgotten,
    ResultLost,
    RollbackBlocked,
    RunUnfinished,
    Waiting,
)
from holdfast.store.manifest import body_digest, body_proof, join_body, values_bytes
from holdfast.store.rows import Branch
from tests import warm
from tests.lives import dies

DONE: list[str] = []
LONG = [f"a long result, line {number}" for number in range(3_000)]
ALL = ["*"]
KEY = bytes(range(32))


@pytest.fixture(autouse=True)
def nothing_done():
    DONE.clear()


@holdfast.tool(effect="read", name="kept.search")
def search(place: str) -> list[str]:
    DONE.append(f"search {place}")
    return [place, *LONG]


def cancel(effect: holdfast.Effect) -> None:
    DONE.append(f"cancel {effect.args['what']} {effect.result}")


@holdfast.tool(compensate=cancel, name="kept.book")
def book(what: str) -> str:
    DONE.append(f"book {what}")
    return f"booked {what}"


@holdfast.durable(name="kept.travel")
def travel(agent, place, how=""):
    found = search(place)
    agent.checkpoint(f"searched {place}")
    agent.state["booked"] = booked = book(found[0])
    if how == "fails":
        raise ValueError(place)
    if how == "waits":
        agent.wait_for("go")
    return f"{booked}!"


def go(agent, *places, how=""):
    return [agent.run(travel.options(id=place, wait=False), place, how) for place in places]


def line(store, name="trip-7", branch="main"):
    view = store._db.view
    return view.line(view.branch(view.agent(name).a, branch).line)


def gone(store, name="trip-7", branch="main"):
    return [one.i for one in line(store, name, branch) if one.let_go]


def size(store, name="trip-7"):
    return sum(values_bytes(one.body) + 32 * len(one.refs) for one in line(store, name))


# -- what stays known -------------------------------------------------------------------------------------------


def test_an_id_whose_values_went_is_still_executed_once(opened):
    agent = opened()
    go(agent, "Lisbon", "Porto", "Faro")
    store = agent._store
    before, ids = size(store), [(one.id, one.status, one.function) for one in agent.runs()]
    chain = store._db.view.branch_at(agent._branch.b).chain
    report = store.retain(Policy(last=1, runs=1))
    assert report.values > 0
    assert size(store) < before
    done = list(DONE)
    for place in ("Lisbon", "Porto"):
        with pytest.raises(ResultForgotten, match=f"what run {place} returned is no longer stored") as caught:
            go(agent, place)
        assert caught.value.run == place
    assert go(agent, "Faro") == ["booked Faro!"]
    assert done == DONE
    agent = opened()
    with pytest.raises(ResultForgotten):
        go(agent, "Lisbon")
    assert [(one.id, one.status, one.function) for one in agent.runs()] == ids
    assert agent._store._db.view.branch_at(agent._branch.b).chain == chain
    assert [one.let_go for one in agent.runs()] == [True, True, False]
    assert [(one.tool, one.status) for one in agent.effects()] == [("kept.search", "done"), ("kept.book", "done")] * 3
    with pytest.raises(ResultForgotten):
        agent.effects()[0].result  # noqa: B018
    with pytest.raises(ResultForgotten):
        agent.runs()[0].args  # noqa: B018
    found = agent._store.verify()
    assert found.ok
    assert found.checked["let_go"] == report.values


def test_a_dry_run_names_what_goes_and_about_how_many_bytes(opened):
    agent = opened()
    go(agent, "Lisbon", "Porto", "Faro")
    store = agent._store
    policy = Policy(branches=ALL, runs=1)
    told = store.retain(policy, dry_run=True)
    assert not told.done
    assert not gone(store)
    report = store.retain(policy)
    assert told.values == report.values == len(gone(store))
    assert told.freed_bytes > 0
    assert store.retain(policy, dry_run=True).values == 0


def test_values_go_by_age(opened):
    agent = opened()
    go(agent, "Lisbon")
    assert agent._store.retain(Policy(last=1, runs=timedelta(hours=1))).values == 0
    assert agent._store.retain(Policy(last=1, runs=timedelta(0))).values > 0


def test_without_the_rule_nothing_goes(opened):
    agent = opened()
    go(agent, "Lisbon", "Porto")
    assert agent._store.retain(Policy(last=1)).values == 0
    assert not gone(agent._store)


@pytest.mark.parametrize("runs", [-1, 1.5, "30d", True, timedelta(seconds=-1)])
def test_a_rule_that_says_nothing_is_refused(runs):
    with pytest.raises(BadOption, match="runs="):
        Policy(last=1, runs=runs)


def test_a_rule_for_values_alone_would_keep_no_checkpoint(opened):
    with pytest.raises(BadOption) as caught:
        Policy(runs=5)
    assert 'branches=["*"]' in str(caught.value)


@pytest.mark.parametrize("runs", [0, 7, timedelta(0), timedelta(days=30)])
def test_the_rule_is_kept_in_the_store(opened, reopened, runs):
    policy = Policy(last=3, runs=runs)
    reopened().set_policy(policy)
    assert reopened().policies() == {None: policy}
    assert Policy.from_json(policy.to_json()) == policy


# -- writes -----------------------------------------------------------------------------------------------------


def test_a_write_goes_with_the_last_checkpoint_before_it(opened):
    agent = opened()
    agent.checkpoint("first")
    go(agent, "Lisbon")
    agent.checkpoint("second")
    store = agent._store
    assert store.retain(Policy(labels=["first"], runs=0)).values > 0
    effects = {one.tool: one for one in agent.effects()}
    assert effects["kept.search"].let_go
    assert effects["kept.book"].result == "booked Lisbon"
    DONE.clear()
    store.agent("trip-7").rollback("first")  # still offered, and undoes what was really booked
    assert DONE == ["cancel Lisbon booked Lisbon"]


def test_a_tag_before_a_write_keeps_its_values_as_long_as_it_is_there(opened):
    agent = opened()
    agent.checkpoint("first")
    agent.tag("keep")
    go(agent, "Lisbon")
    agent._store.retain(Policy(last=1, runs=0))
    assert [one.let_go for one in agent.effects()] == [True, False]
    agent._store.retain(Policy(last=1, runs=0, tags=False))
    assert [one.let_go for one in agent.effects()] == [True, True]


def test_a_rollback_into_the_middle_works_and_going_on_executes_nothing(opened):
    agent = opened()
    go(agent, "Lisbon")
    agent._store.retain(Policy(branches=ALL, runs=0))
    agent.rollback("searched Lisbon")
    done = list(DONE)
    assert done[-1] == "cancel Lisbon booked Lisbon"
    with pytest.raises(ResultForgotten, match=r"what kept\.search returned at 0 in run Lisbon") as caught:
        go(agent, "Lisbon")
    assert (caught.value.tool, caught.value.path, caught.value.run) == ("kept.search", "0", "Lisbon")
    assert done == DONE
    assert go(agent, "Porto") == ["booked Porto!"]


# -- what never goes --------------------------------------------------------------------------------------------


def test_what_a_failed_run_did_answers_the_next_one(opened):
    agent = opened()
    with pytest.raises(ValueError, match="Lisbon"):
        go(agent, "Lisbon", how="fails")
    agent.checkpoint("after it")

    @holdfast.durable
    def simple(agent, place):
        return book(place)

    agent._store.retain(Policy(last=1, runs=0))
    assert agent.run(simple.options(id="next"), "Lisbon") == "booked Lisbon"
    assert DONE.count("book Lisbon") == 1


def test_one_that_failed_last_can_be_run_again(opened):
    agent = opened()
    with pytest.raises(ValueError, match="Lisbon"):
        go(agent, "Lisbon", how="fails")
    assert agent._store.retain(Policy(last=1, runs=0)).values == 0
    with pytest.raises(ValueError, match="Lisbon"):
        go(agent, "Lisbon", how="fails")
    assert DONE == ["search Lisbon", "book Lisbon"]


def test_a_run_that_waits_keeps_everything(opened):
    agent = opened()
    with pytest.raises(Waiting):
        go(agent, "Lisbon", how="waits")
    assert agent._store.retain(Policy(last=1, runs=0)).values == 0
    agent._store.signal("trip-7", "go", run="Lisbon")
    assert go(agent, "Lisbon", how="waits") == ["booked Lisbon!"]
    assert DONE == ["search Lisbon", "book Lisbon"]


def test_what_is_in_doubt_keeps_everything(opened):
    @holdfast.tool
    def pay(what: str) -> None:
        raise TimeoutError(what)

    @holdfast.durable
    def paying(agent):
        search("Lisbon")
        pay("Lisbon")

    agent = opened()
    with pytest.raises(InDoubt):
        agent.run(paying.options(id="pays"))
    assert agent._store.retain(Policy(last=1, runs=0)).values == 0
    with pytest.raises(RunUnfinished):
        go(agent, "Porto")


def test_a_child_keeps_everything_until_its_parent_is_over(opened):
    @holdfast.durable
    def child(agent):
        return search("child")[0]

    @holdfast.durable
    def parent(agent):
        one = agent.spawn(child, "one")
        found = one.join()
        agent.wait_for("go")
        return found

    agent = opened()
    store = agent._store
    with pytest.raises(Waiting):
        agent.run(parent.options(id="p", wait=False))
    assert store.retain(Policy(last=1, runs=0)).values == 0
    store.signal("trip-7", "go", run="p")
    assert agent.run(parent.options(id="p", wait=False)) == "child"
    agent.close()
    assert store.retain(Policy(last=1, runs=0)).values > 0
    assert gone(store, "trip-7/one")
    assert DONE == ["search child"]
    agent = opened()
    agent.rollback(agent.log()[0])  # what says which children there were is there
    assert agent._store.verify().ok


def test_calls_outside_of_runs_keep_everything(opened):
    agent = opened()
    with agent:
        search("Lisbon")
        book("Lisbon")
    agent.checkpoint("done")
    assert agent._store.retain(Policy(last=1, runs=0)).values == 0


def test_a_branch_from_the_middle_of_a_run_keeps_what_the_run_was_answered(opened):
    agent = opened()
    go(agent, "Lisbon")
    side = agent.branch("side", at="searched Lisbon")
    agent._store.retain(Policy(branches=ALL, runs=0))
    DONE.clear()
    assert go(side, "Lisbon") == ["booked Lisbon!"]
    assert DONE == ["book Lisbon"]


def test_what_a_clone_without_the_rule_has_stays_for_both(opened):
    agent = opened()
    go(agent, "Lisbon")
    store = agent._store
    store.copy("trip-7", "copy")
    assert store.retain(Policy(last=1, runs=0), ["trip-7"]).values == 0
    assert store.retain(Policy(last=1, runs=0)).values > 0


def test_a_batch_whose_values_went_raises_for_each_item_and_does_none_again(opened):
    store = opened()._store
    assert store.map(book, ["a", "b"], name="many") == ["booked a", "booked b"]
    assert store.retain(Policy(last=1, runs=0)).values > 0
    done = list(DONE)
    again = store.map(book, ["a", "b", "c"], name="many")
    assert [str(one).partition(":")[0] for one in again[:2]] == [
        f"what item {number} of many returned is no longer stored" for number in (0, 1)
    ]
    assert again[2] == "booked c"
    done.append("book c")
    assert done == DONE


def test_whoever_submitted_a_run_is_told_that_its_result_went(reopened):
    store = reopened()
    submitted = store.submit(travel.options(id="Lisbon"), "Lisbon")
    store.worker().run(drain=True)
    assert submitted.result() == "booked Lisbon!"
    store.retain(Policy(last=1, runs=0))
    with pytest.raises(ResultForgotten):
        store.submit(travel.options(id="Lisbon"), "Lisbon").result()
    store.worker().run(drain=True)
    assert DONE.count("book Lisbon") == 1


# -- lost, and let go -------------------------------------------------------------------------------------------


def rewrite(path, sql, *args):
    with closing(sqlite3.connect(path / "store.db")) as db, db:
        return db.execute(sql, args).rowcount


def test_a_flipped_bit_cannot_say_that_values_were_let_go(opened, store_path):
    agent = opened()
    go(agent, "Lisbon")
    agent._store.close()
    assert rewrite(store_path, "UPDATE record SET mark = mark + 2 WHERE i = 2")
    with holdfast.open(store_path) as store:
        found = store.verify()
    assert not found.ok
    assert "record" in str(found)


def test_values_that_were_taken_away_are_lost_and_not_let_go(opened, store_path):
    agent = opened()
    go(agent, "Lisbon")
    bodies = {one.i: one.body for one in line(agent._store)}
    agent._store.close()
    newest = max(bodies)
    assert rewrite(store_path, "UPDATE record SET body = ? WHERE i = ?", body_proof(bodies[newest]), newest)
    agent = opened()
    found = agent._store.verify()
    assert found.checked["lost_values"] == 1
    assert "let_go" not in found.checked
    with pytest.raises(Damaged, match="what run Lisbon returned is lost"):
        go(agent, "Lisbon")
    agent._store.retain(Policy(last=1, runs=0))  # and stay lost
    assert agent._store.verify().checked["lost_values"] == 1
    assert DONE == ["search Lisbon", "book Lisbon"]


def test_other_values_are_damage(opened, store_path):
    agent = opened()
    go(agent, "Lisbon")
    bodies = {one.i: one.body for one in line(agent._store)}
    agent._store.close()
    newest = max(bodies)
    other = body_proof(bodies[newest]) + b"\xa5never"
    assert rewrite(store_path, "UPDATE record SET body = ? WHERE i = ?", other, newest)
    with holdfast.open(store_path) as store:
        assert not store.verify().ok


def test_damage_to_a_value_leaves_what_the_record_says(opened, store_path, tmp_path):
    agent = opened()
    go(agent, "Lisbon")
    bodies = {one.i: one.body for one in line(agent._store)}
    agent._store.close()
    newest = max(bodies)
    assert rewrite(store_path, "UPDATE record SET body = ? WHERE i = ?", bodies[newest][:-1] + b"?", newest)
    report = holdfast.repair(store_path, tmp_path / "repaired")
    assert any("the values of record" in text for text in report.missing)
    with holdfast.open(tmp_path / "repaired") as store:
        agent = store.agent("trip-7")
        assert [one.status for one in agent.runs()] == ["finished"]
        with pytest.raises(Damaged, match="is lost"):
            go(agent, "Lisbon")
        assert DONE == ["search Lisbon", "book Lisbon"]
        assert store.verify().checked["lost_values"] == 1


def test_a_repair_keeps_what_went_told_from_what_is_lost(opened, store_path, tmp_path):
    agent = opened()
    go(agent, "Lisbon", "Porto")
    agent._store.retain(Policy(last=1, runs=1))
    went = gone(agent._store)
    agent._store.close()
    assert rewrite(store_path, "UPDATE node SET data = x'00' WHERE k = (SELECT max(k) FROM node)")
    holdfast.repair(store_path, tmp_path / "repaired")
    with holdfast.open(tmp_path / "repaired") as store:
        assert gone(store) == went
        with pytest.raises(ResultForgotten):
            go(store.agent("trip-7"), "Lisbon")


def test_with_a_key_nobody_else_can_say_so(store_path):
    with holdfast.open(store_path, key=KEY) as store:
        agent = store.agent("trip-7")
        go(agent, "Lisbon", "Porto")
        store.retain(Policy(last=1, runs=1))
        assert store.verify().ok
        with pytest.raises(ResultForgotten):
            go(agent, "Lisbon")
        assert go(agent, "Porto") == ["booked Porto!"]
        kept = next(one for one in line(store) if not one.let_go and values_bytes(one.body))
    with closing(sqlite3.connect(store_path / "store.db")) as db, db:
        row = db.execute("SELECT sum FROM record WHERE i = 1").fetchone()
        db.execute("UPDATE record SET mark = mark + 2, sum = ? WHERE r = ?", (*row, kept.r))
    with holdfast.open(store_path, key=KEY) as store:
        assert not store.verify().ok


# -- elsewhere --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["push", "bundle"])
def test_a_line_travels_without_the_values_that_went(opened, tmp_path, how):
    agent = opened()
    go(agent, "Lisbon", "Porto")
    store = agent._store
    store.retain(Policy(last=1, runs=1))
    there = holdfast.open(tmp_path / "there")
    with there:
        if how == "push":
            store.push(there)
        else:
            store.export(tmp_path / "bundle", ["trip-7"])
            there.import_bundle(tmp_path / "bundle")
        found = there.verify()
        assert found.ok
        assert gone(there) == gone(store)
        assert [one.digest for one in line(there)] == [one.digest for one in line(store)]
        copy = there.agent("trip-7")
        with pytest.raises(ResultForgotten):
            go(copy, "Lisbon")
        assert go(copy, "Porto") == ["booked Porto!"]
        go(copy, "Faro")
        copy.close()
        agent.close()
        store.pull(there)
        assert go(store.agent("trip-7"), "Faro") == ["booked Faro!"]
    assert DONE.count("book Faro") == 1


def test_a_copy_that_has_the_values_and_one_that_has_not_stay_one_line(opened, tmp_path):
    agent = opened()
    go(agent, "Lisbon", "Porto")
    store = agent._store
    with holdfast.open(tmp_path / "there") as there:
        store.push(there)
        store.retain(Policy(last=1, runs=0))
        go(agent, "Faro")
        store.push(there)
        assert not gone(there)[:1]
        assert there.verify().ok
        assert go(there.agent("trip-7"), "Lisbon") == ["booked Lisbon!"]
    assert DONE.count("book Lisbon") == 1


def test_whoever_sends_a_line_cannot_change_what_its_records_say():
    """A record without values has the digest of the whole one, and no other words have."""
    whole = join_body(b"\x81\xa1t\xa3end", b"value")
    assert body_digest(body_proof(whole)) == body_digest(whole)
    others = [join_body(b"\x81\xa1t\xa3run", b"value"), join_body(b"\x81\xa1t\xa3end", b"other"), b"\x81\xa1t\xa3end"]
    assert body_digest(whole) not in map(body_digest, others)


# -- interrupted, and at the same time --------------------------------------------------------------------------


class Enough(Exception):
    pass


def test_what_was_stopped_half_way_is_done_by_the_next(opened, monkeypatch):
    agent = opened()
    go(agent, "Lisbon", "Porto", "Faro")
    store = agent._store
    monkeypatch.setattr(letting, "AT_ONCE", 2)
    steps = iter(range(3))
    strip = letting._strip

    def stopping(change, some):
        if next(steps, None) is None:
            raise Enough
        strip(change, some)

    monkeypatch.setattr(letting, "_strip", stopping)
    with pytest.raises(Enough):
        store.retain(Policy(last=1, runs=1))
    assert len(gone(store)) == 6
    assert store.verify().ok
    monkeypatch.setattr(letting, "_strip", strip)
    store.retain(Policy(last=1, runs=1))
    assert store.verify().ok
    assert store.retain(Policy(last=1, runs=1)).values == 0
    assert go(agent, "Faro") == ["booked Faro!"]
    assert len(DONE) == 6


@pytest.mark.parametrize("after", [0, 3])
def test_killed_in_the_middle_of_it_nothing_is_lost(opened, store_path, monkeypatch, after):
    agent = opened()
    go(agent, "Lisbon", "Porto", "Faro")
    agent._store.close()
    monkeypatch.setattr(letting, "AT_ONCE", 1)
    policy = Policy(last=1, runs=1)
    assert dies(lambda: holdfast.open(store_path).retain(policy), 2 * (after + 1), (letting, "_strip"))
    agent = opened()
    assert agent._store.verify().ok
    assert len(gone(agent._store)) == after
    assert agent._store.retain(policy).values > 0
    assert agent._store.verify().ok
    assert go(agent, "Faro") == ["booked Faro!"]
    with pytest.raises(ResultForgotten):
        go(agent, "Lisbon")
    assert len(DONE) == 6


def test_another_process_that_has_the_agent_open_goes_on(opened, store_path):
    """The writer need not be asked: what it appends afterwards is part of the same line."""
    agent = opened()
    go(agent, "Lisbon", "Porto")
    code = "import sys, holdfast; print(holdfast.open(sys.argv[1]).retain(holdfast.Policy(last=1, runs=0)).values)"
    said = warm.run([sys.executable, "-c", code, store_path], check=True, capture_output=True, text=True)
    assert int(said.stdout) > 0
    assert go(agent, "Faro") == ["booked Faro!"]
    with pytest.raises(HoldfastError):
        go(agent, "Lisbon")
    assert DONE.count("book Lisbon") == 1
    assert agent._store.verify().ok


def test_the_room_comes_back(opened):
    agent = opened()
    for number in range(12):
        go(agent, f"place {number}")
    before = agent._store._db.view.counts()["node"]
    report = agent._store.retain(Policy(branches=ALL, runs=1))
    assert report.removed == 0
    assert report.freed_bytes > 0
    assert agent._store._db.view.counts()["node"] < before
    assert isinstance(agent._store._db.view.branch_at(agent._branch.b), Branch)


def test_a_result_that_is_lost_can_be_told_by_a_person(opened, store_path):
    """As one that could not be saved: the call is not made again."""
    agent = opened()
    with pytest.raises(Waiting):
        go(agent, "Lisbon", how="waits")
    (done,) = [one for one in line(agent._store) if b"booked Lisbon" in one.body and values_bytes(one.body)]
    agent._store.close()
    assert rewrite(store_path, "UPDATE record SET body = ? WHERE i = ?", body_proof(done.body), done.i)
    agent = opened()
    with pytest.raises(ResultLost):
        go(agent, "Lisbon", how="waits")
    (effect,) = [one for one in agent.effects() if one.tool == "kept.book"]
    assert effect.status == "lost"
    agent.resolve(effect, "done", result="booked, says the airline", why="asked")
    agent._store.signal("trip-7", "go", run="Lisbon")
    assert go(agent, "Lisbon", how="waits") == ["booked, says the airline!"]
    assert DONE == ["search Lisbon", "book Lisbon"]


def test_whoever_has_read_a_record_before_is_told_that_its_value_went(opened):
    agent = opened()
    go(agent, "Lisbon")
    (effect,) = [one for one in agent.effects() if one.tool == "kept.search"]
    agent._store.retain(Policy(last=1, runs=0))
    with pytest.raises(ResultForgotten):
        effect.result  # noqa: B018


def test_a_run_is_not_forked_from_what_went(opened):
    agent = opened()
    go(agent, "Lisbon")
    agent._store.retain(Policy(branches=ALL, runs=0))
    with pytest.raises(ResultForgotten):
        agent.plan_fork("Lisbon", at="2")
    assert agent.branches() == ["main"]


def test_what_a_fork_was_answered_stays(opened):
    agent = opened()
    go(agent, "Lisbon")
    agent.plan_fork("Lisbon", at="2").apply("again")
    agent._store.retain(Policy(branches=ALL, runs=0))
    side = agent._store.agent("trip-7", branch="again")
    assert go(side, "Lisbon") == ["booked Lisbon!"]
    assert DONE == ["search Lisbon", "book Lisbon", "book Lisbon"]
    assert agent._store.verify().ok


def test_a_policy_in_the_store_is_followed_for_values_too(opened):
    """What the background does, step by step, and stopped between any two of them."""
    agent = opened()
    go(agent, "Lisbon", "Porto")
    store = agent._store
    chosen = [(store._db.view.agent("trip-7"), Policy(branches=ALL, runs=1))]
    for steps in range(200):
        left = iter(range(steps))

        def pace(left=left):
            if next(left, None) is None:
                raise Enough

        try:
            retention.follow(store, chosen, pace)
        except Enough:
            continue
        break
    assert gone(store)
    assert store.verify().ok
    assert go(agent, "Porto") == ["booked Porto!"]


def test_a_checkpoint_that_comes_back_from_elsewhere_undoes_nothing_that_it_cannot(opened, tmp_path):
    agent = opened()
    agent.checkpoint("first")
    go(agent, "Lisbon")
    store = agent._store
    with holdfast.open(tmp_path / "there") as there:
        store.push(there)
        there.tag("trip-7", "old", "first")
        store.retain(Policy(last=1, runs=0))
        store.pull(there)
    assert "first" in [one.label for one in agent.log(all=True)] + [one.label for one in map(agent.at, agent.tags())]
    done = list(DONE)
    assert [one.why for one in agent.plan_rollback("old").blocked] == ["what it was given was let go"]
    with pytest.raises(RollbackBlocked, match="was let go"):
        agent.rollback("old")
    assert done == DONE
