"""Letting values go against a model: random programs of runs, writes, rollbacks, branches and retention.

Whatever was let go: an id is never executed twice, a booking is never made twice on one branch, a rollback that is
offered undoes what was really booked, what a policy keeps comes back as it was, the rest raises ``ResultForgotten``.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress
from uuid import uuid4

import pytest

import holdfast
from holdfast import Policy
from holdfast.errors import ResultForgotten, RollbackBlocked, RunEnded, RunUnfinished, UnknownRevision
from tests.conftest import SOAK

BOOKED: dict[str, dict[str, tuple[str, str]]] = {}  # by world: what stands outside, by key, and who booked it
WHO = {"now": ""}
FAILING: set[str] = set()
SIZES = (3, 40, 3_000, 30_000)


class Broken(Exception):
    pass


def value(what: str) -> str:
    noise = random.Random(what)
    return f"{what} {noise.randbytes(noise.choice(SIZES)).hex()}"


@holdfast.tool(effect="read", name="outlived.look")
def look(what: str) -> str:
    return value(what)


def cancel(effect: holdfast.Effect) -> None:
    """Undo a booking: only what was really booked, under its key and with its result, can be."""
    what = effect.args["what"]
    assert BOOKED[effect.args["world"]].get(effect.key, (what, ""))[0] == what
    assert effect.result == value(f"booked {what}")
    BOOKED[effect.args["world"]].pop(effect.key, None)


@holdfast.tool(compensate=cancel, name="outlived.book")
def book(world: str, what: str) -> str:
    booked = BOOKED[world]
    assert holdfast.effect().key not in booked, f"{what} was booked twice"
    booked[holdfast.effect().key] = what, WHO["now"]
    return value(f"booked {what}")


@holdfast.durable(name="outlived.travel")
def travel(agent, world: str, id: str, plan: list[str]) -> str:
    found = []
    for number, step in enumerate(plan):
        if step == "look":
            found.append(look(f"{id} {number}"))
        elif step == "book":
            found.append(book(world, f"{id} {number}"))
        elif step == "save":
            agent.state["found"] = [one[:20] for one in found]
            agent.checkpoint(f"{id} {number}")
        elif step == "fail" and id in FAILING:
            raise Broken(id)
    return value(f"result {id} {len(found)}")


class Model:
    def __init__(self, path, seed):
        self.world = f"{path}"
        self.path, self.noise = path, random.Random(seed)
        BOOKED[self.world] = {}
        self.store = holdfast.open(path, durability="batched")
        self.count = 0
        self.plans: dict[str, list[str]] = {}
        self.results: dict[str, str] = {}
        self.executed: Counter[str] = Counter()
        self.store.agent("a").checkpoint("begun")

    def pick(self):
        info = self.noise.choice(self.store.agents())
        return self.store.agent(info.name, branch=self.noise.choice(info.branches))

    def ask(self, agent, id):
        """Run something that may have been run before; what comes of it is right, or raises."""
        WHO["now"] = f"{agent.name}@{agent.branch_name}"
        result = agent.run(travel.options(id=id), self.world, id, self.plans[id])
        plan = self.plans[id]
        assert result == value(f"result {id} {plan.count('look') + plan.count('book')}")
        return result

    def step(self):
        what = self.noise.choices(
            ("run", "again", "back", "resume", "branch", "clone", "tag", "retain", "reopen"),
            (30, 12, 8, 6, 3, 1, 2, 14, 3),
        )[0]
        getattr(self, f"_{what}")(self.pick())
        self.sound()

    def sound(self):
        twice = [what for what, times in Counter(BOOKED[self.world].values()).items() if times > 1]
        assert not twice, twice

    def _run(self, agent):
        self.count += 1
        id = f"run {self.count}"
        steps = self.noise.choices(("look", "look", "book", "save", "fail"), k=self.noise.randrange(1, 8))
        self.plans[id] = steps
        if self.noise.random() < 0.3:
            FAILING.add(id)
        try:
            self.ask(agent, id)
        except Broken:
            if self.noise.random() < 0.5:
                FAILING.discard(id)
                self.ask(agent, id)
            else:
                agent.accept()
        FAILING.discard(id)

    def _again(self, agent):
        infos = [info for info in agent.runs() if info.kind == "run"]
        for info in self.noise.sample(infos, min(3, len(infos))):
            before = dict(BOOKED[self.world])
            try:
                self.ask(agent, info.id)
            except (ResultForgotten, RunEnded, RunUnfinished, UnknownRevision):
                assert before == BOOKED[self.world]
            else:
                assert info.status != "finished" or before == BOOKED[self.world]

    def _resume(self, agent):
        """Into the middle of a run, and on from there, unless what it was answered went."""
        places = [one for one in agent.log() if one.label in self.all_labels()]
        if not places:
            return
        with suppress(RollbackBlocked):
            agent.rollback(self.noise.choice(places))
            last = [info for info in agent.runs() if info.kind == "run" and info.status == "rolled back"]
            for info in last[-1:]:
                before = dict(BOOKED[self.world])
                try:
                    self.ask(agent, info.id)
                except (ResultForgotten, RunEnded, UnknownRevision):
                    assert before == BOOKED[self.world]

    def all_labels(self):
        return {f"{id} {number}" for id, plan in self.plans.items() for number in range(len(plan))}

    def _back(self, agent):
        """A rollback is blocked only by what another branch may count on."""
        target = self.noise.choice(agent.log())
        plan = agent.plan_rollback(target)
        if plan.blocked:
            assert {one.why for one in plan.blocked} <= {"another branch made it and may count on it"}
            return
        plan.apply()
        assert agent.state.get("found") == target.state.get("found")

    def _branch(self, agent):
        if len(self.store.agents()[0].branches) < 4:
            self.count += 1
            agent.branch(f"b{self.count}", at=self.noise.choice(agent.log()))

    def _clone(self, agent):
        if len(self.store.agents()) < 3:
            self.count += 1
            self.store.copy(agent.name, f"c{self.count}")

    def _tag(self, agent):
        self.count += 1
        agent.tag(f"t{self.count}", self.noise.choice(agent.log()))

    def _reopen(self, _agent):
        self.store.close()
        self.store = holdfast.open(self.path, durability="batched")

    def _retain(self, _agent):
        noise = self.noise
        policy = Policy(last=noise.choice((1, 2, 5)), runs=noise.choice((0, 1, 3)), tags=noise.random() < 0.5)
        some = None if noise.random() < 0.7 else [noise.choice(self.store.agents()).name]
        before = self.seen()
        told = self.store.retain(policy, some, dry_run=True)
        report = self.store.retain(policy, some)
        assert (told.values, told.removed) == (report.values, report.removed)
        after = self.seen()
        assert {place: [info[:2] for info in runs] for place, runs in before.items()} == {
            place: [info[:2] for info in runs] for place, runs in after.items()
        }
        for place, runs in after.items():
            if some is None or place[0] in some:
                over = [info for info in runs if info[1] in {"finished", "failed", "cancelled", "rolled back"}]
                were = {info[0]: info[3] for info in before[place]}
                went = [info for info in over if info[3] and not were[info[0]]]
                assert len(went) <= max(0, len(over) - policy.runs)
                if all(info[1] == "finished" for info in over):
                    newest = sorted(over, key=lambda info: info[2])[max(0, len(over) - policy.runs) :]
                    assert not {info[0] for info in went} & {info[0] for info in newest}
            else:
                assert runs == before[place]
        again = self.store.retain(policy, some)
        assert (again.values, again.removed) == (0, 0)
        found = self.store.verify()
        assert found.ok, str(found)
        assert not {"lost_values", "lost_effects"} & found.checked.keys()

    def seen(self):
        """By agent and branch: runs as id, status, end, whether their values went."""
        found = {}
        for info in self.store.agents():
            for branch in info.branches:
                agent = self.store.agent(info.name, branch=branch)
                found[info.name, branch] = [
                    (one.id, one.status, one.ended or one.began, one.let_go)
                    for one in agent.runs()
                    if one.kind == "run"
                ]
        return found


@pytest.mark.parametrize("seed", range(400 if SOAK else 6))
def test_whatever_goes_nothing_is_done_twice_and_what_is_kept_comes_back(store_path, seed):
    model = Model(store_path, seed)
    for _ in range(40):
        model.step()
    model._retain(None)
    model.store.close()
    del BOOKED[model.world]


def test_on_a_server_it_is_the_same(postgres_server, monkeypatch):
    monkeypatch.setenv("HOLDFAST_ALLOW_UNSAFE_POSTGRES", "1")
    with postgres_server.database(f"test_{uuid4().hex}") as url:
        model = Model(url, 901)
        for _ in range(12):
            model.step()
        model._retain(None)
        model.store.close()
