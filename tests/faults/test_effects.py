"""kill -9 of processes that act on the outside world, at every point of the journal: nothing lost, nothing doubled.

The world is an HTTP server with its own database (tests/run/world.py). What may be repeated or asked about is done
exactly once in the end; what can be neither is reported in doubt, every time, and never repeated.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

import holdfast
from tests.faults import effects_child as child
from tests.lives import Life
from tests.lives import Troupe as Lives
from tests.run.world import World

KINDS = ("keyed", "probed", "read", "local", "bare", "")
POINTS = (
    child.START, child.BEFORE_INTENT, child.AFTER_INTENT, child.DURING, child.BEFORE_RESULT, child.UNFLUSHED,
    child.AFTER_RESULT, child.SETTLING, child.CHECKPOINT, child.END, child.COMPENSATION, child.ROLLBACK, "any moment",
)  # fmt: skip
# A bare write that was killed here has an intent on disk and no outcome.
IN_DOUBT = {child.AFTER_INTENT, child.DURING, child.BEFORE_RESULT}
CERTAIN = {child.START, child.BEFORE_INTENT, child.AFTER_RESULT, child.CHECKPOINT, child.END}
AGAIN = 0.7  # of the lives that go on after a kill are killed, too
OUTSIDE = 0.2  # of the kills come from outside, at any moment, instead of at a point
LIVES_MAX = 12
SPREAD = (5**0.5 - 1) / 2  # the golden ratio: however few first lives there are, their ends lie all over the way
TROUPES = 2  # templates at work at once, each with its own store


class Tally:
    """What was killed where, and what came of it."""

    def __init__(self) -> None:
        self.kills: Counter[tuple[str, str]] = Counter()
        self.effects: Counter[tuple[str, str]] = Counter()  # by kind: asked for, lost, doubled, in doubt
        self.wrong: list[str] = []
        self.lives = 0

    def table(self) -> str:
        lines = [f"{'killed':36}" + "".join(f"{kind or 'between':>9}" for kind in KINDS) + f"{'all':>9}"]
        for point in POINTS:
            row = [self.kills[point, kind] for kind in KINDS]
            lines.append(f"{point:36}" + "".join(f"{count or '':>9}" for count in row) + f"{sum(row):>9}")
        lines.append(f"{'all':36}" + "".join(f"{self.of(kind):>9}" for kind in KINDS) + f"{self.kills.total():>9}")
        lines.append("")
        lines.append(f"{'kind':36}{'effects':>9}{'lost':>9}{'doubled':>9}{'in doubt':>9}")
        for kind in ("keyed", "probed", "read", "local", "bare", "undo"):
            found = [self.effects[kind, what] for what in ("effects", "lost", "doubled", "in doubt")]
            lines.append(f"{kind:36}" + "".join(f"{count:>9}" for count in found))
        return "\n".join(lines)

    def of(self, kind: str) -> int:
        return sum(count for (_, killed), count in self.kills.items() if killed == kind)


class Ended:
    """How one process ended: where it was killed, what it was in doubt about, or what came of it."""

    def __init__(self, life: Life) -> None:
        self.killed = life.end() == -signal.SIGKILL
        said = dict(life.said)
        self.point, _, self.kind = said.get("at", "any moment|" if self.killed else "|").partition("|")
        self.doubt: list[str] | None = json.loads(said["doubt"]) if "doubt" in said else None
        self.end: dict | None = json.loads(said["end"]) if "end" in said else None
        self.error = said.get("error", "")


class Troupe(Lives):
    """Lives on one store."""

    def __init__(self, path: Path, port: int) -> None:
        self.path = path
        super().__init__("tests.faults.effects_child", path, port)

    def live(self, *, after_s: float | None = None, **job: object) -> Ended:
        """One life to its end. ``after_s``: it is killed from outside then."""
        life = self.begin(**job)
        if after_s is not None:
            time.sleep(after_s)
            life.kill()
        return Ended(life)


class Campaign:
    """Scene after scene with one troupe."""

    def __init__(self, troupe: Troupe, world: World, tally: Tally, seed: int) -> None:
        self.troupe, self.world, self.tally = troupe, world, tally
        self.chance = random.Random(seed)
        self.moments: dict[str, int] = {}
        self.typical_s: dict[str, float] = {}

    def rehearse(self, scene: str, name: str, **job: object) -> None:
        """Once without a kill: how many moments there are, and how long it takes."""
        began = time.perf_counter()
        life = self.troupe.live(scene=scene, agent=name, **job)
        assert life.end, f"{scene} without a kill: {life.error or life.doubt}"
        self.moments[scene], self.typical_s[scene] = life.end["moments"], time.perf_counter() - began

    def live(self, scene: str, name: str, number: int, lives: int, **job: object) -> Ended:
        """One life of a scene, killed or not."""
        self.tally.lives += 1
        last = lives == LIVES_MAX or (lives and self.chance.random() > AGAIN)
        if last:
            return self.troupe.live(scene=scene, agent=name, **job)
        if self.chance.random() < OUTSIDE:
            life = self.troupe.live(
                scene=scene, agent=name, after_s=self.chance.uniform(0, self.typical_s[scene]), **job
            )
        else:
            every = self.moments[scene]
            # A life that goes on has fewer moments left than a whole one: an early one is more likely to come.
            at = 1 + int(every * (number * SPREAD % 1)) if not lives else 1 + int(every * self.chance.random() ** 2)
            life = self.troupe.live(scene=scene, agent=name, at=at, **job)
        if life.killed:
            self.tally.kills[life.point, life.kind] += 1
        return life

    def safe(self, scene: str, name: str, number: int) -> None:
        """A run of tools that may be repeated or asked about: in the end it has finished, all was done once."""
        for lives in range(LIVES_MAX + 1):
            life = self.live(scene, name, number, lives)
            if life.error or life.doubt is not None:
                self.tally.wrong.append(f"{name}: {life.error or life.doubt} after a life that got to {life.point}")
                return
            if life.end:
                break
        assert life.end
        if scene in {"loop", "map"}:
            for kind in ("keyed", "probed"):
                self.count(name, kind, (f"{kind}-1", f"{kind}-2"))
            found = life.end["state"]["done"] if scene == "loop" else life.end["result"]
            if found != [f"{name}/{item}" for item in child.ITEMS]:
                self.tally.wrong.append(f"{name}: {life.end}")
            return
        if scene == "anew":
            self.count(name, "keyed", ("keyed-1", "keyed-2"))
            self.count(name, "probed", ("probed-1",))
            refs = {"keyed": f"{name}/keyed-1", "probed": f"{name}/probed-1", "second": f"{name}/keyed-2"}
            if life.end["state"] != {**refs, "mended": True}:
                self.tally.wrong.append(f"{name}: {life.end}")
            return
        two = 2 if scene == "many" else 1
        self.count(name, "keyed", ("keyed-1",))
        self.count(name, "probed", (f"probed-{two}",))
        state = life.end["state"]
        self.count_texts("read", state["seen"], [f"value of {name}/read-{which}" for which in (1, 2)])
        notes = ["looked", "ordered"] if scene == "safe" else ["branch 1", "branch 2"]
        self.count_texts("local", state["notes"], notes)
        if (life.end["result"], state["keyed"]) != (f"{name} done", f"{name}/keyed-1"):
            self.tally.wrong.append(f"{name}: {life.end}")

    def count(self, name: str, kind: str, refs: tuple[str, ...], times: int = 1, what: str = "do") -> None:
        column = "undo" if what == "undo" else kind
        for ref in refs:
            done = self.world.done(f"{name}/{ref}", what)
            self.tally.effects[column, "effects"] += times
            self.tally.effects[column, "lost"] += max(0, times - done)
            self.tally.effects[column, "doubled"] += max(0, done - times)
            if done != times:
                self.tally.wrong.append(f"{name}/{ref}: {what} {done} times instead of {times}")

    def count_texts(self, kind: str, found: list[str], expected: list[str]) -> None:
        """What a local tool or a read left in the state: each once, whatever was executed again."""
        missing, extra = Counter(expected) - Counter(found), Counter(found) - Counter(expected)
        self.tally.effects[kind, "effects"] += len(expected)
        self.tally.effects[kind, "lost"] += missing.total()
        self.tally.effects[kind, "doubled"] += extra.total()
        if missing or extra:
            self.tally.wrong.append(f"state: {found} instead of {expected}")

    def bare(self, name: str, number: int) -> None:
        """Writes that nobody can repeat or ask about: in doubt whenever it is not known, and never repeated."""
        told: dict[str, str] = {}  # what a person found out, for the next life; one that is killed asks again
        due, certain = False, True  # certain: every kill so far was where an outcome is on disk, or no intent is
        for lives in range(LIVES_MAX + 1):
            life = self.live("bare", name, number, lives, told=told)
            told = {}
            if life.error:
                self.tally.wrong.append(f"{name}: {life.error}")
                return
            if life.doubt is not None:
                if certain and lives:
                    self.tally.wrong.append(f"{name}: in doubt, though it was known: {life.doubt}")
                self.tally.effects["bare", "in doubt"] += len(life.doubt)
                told = {ref: "done" if self.world.done(ref) else "not-done" for ref in life.doubt}
                due = certain = False
            elif due and (life.end or life.kind == "bare"):
                self.tally.wrong.append(f"{name}: went on to {life.point or 'the end'} without being in doubt")
            if life.killed:
                due = due or (life.kind == "bare" and life.point in IN_DOUBT)
                certain = certain and life.point in CERTAIN
            if life.end:
                break
        else:
            life = self.troupe.live(scene="bare", agent=name, told=told)
        for ref in ("bare-1", "bare-2"):
            if self.world.done(f"{name}/{ref}") > 1:
                self.tally.wrong.append(f"{name}/{ref} was repeated")
        if life.end:
            self.count(name, "bare", ("bare-1", "bare-2"))

    def back(self, name: str, number: int) -> None:
        """A rollback: interrupted, then finished; everything is undone once, and done again with other keys.

        Every other time the run itself was killed before, so that it is not known what there is to undo.
        """
        at = self.chance.randrange(1, self.moments["safe"] + 1) if number // TROUPES % 2 else 0
        life = self.troupe.live(scene="safe", agent=name, at=at)
        if life.killed:
            self.tally.kills[life.point, life.kind] += 1
        whole = life.end is not None
        for lives in range(LIVES_MAX + 1):
            life = self.live("back", name, number, lives)
            if life.error or life.doubt is not None:
                self.tally.wrong.append(f"{name}: {life.error or life.doubt} in a rollback, {life.point}")
                return
            if life.end:
                break
        if life.end != {"result": "start", "state": {}, "moments": life.end["moments"]}:
            self.tally.wrong.append(f"{name}: {life.end}")
        before = {kind: self.world.done(f"{name}/{kind}-1") for kind in ("keyed", "probed")}
        for kind, times in before.items():
            self.count(name, kind, (f"{kind}-1",), times=times, what="undo")
            if times > 1 or (whole and not times):
                self.tally.wrong.append(f"{name}: {kind} was done {times} times before the rollback")
        life = self.troupe.live(scene="safe", agent=name)
        if not life.end:
            self.tally.wrong.append(f"{name}: after the rollback: {life.error or life.doubt}")
            return
        for kind, times in before.items():
            self.count(name, kind, (f"{kind}-1",), times=times + 1)


@pytest.fixture
def world(tmp_path):
    with World(tmp_path) as made:
        yield made


@pytest.fixture
def troupe(store_path, world):
    holdfast.open(store_path).close()
    made = Troupe(store_path, world.port)
    yield made
    made.close()


SCENES = ("safe", "bare", "loop", "back", "anew", "bare", "many", "map")


@pytest.mark.slow
def test_kills_lose_nothing_and_double_nothing(tmp_path, world, rounds):
    kills = rounds(40, 50_000)
    tally = Tally()
    failed: list[BaseException] = []

    def perform(which: int) -> None:
        path = tmp_path / f"store-{which}"
        holdfast.open(path).close()
        troupe = Troupe(path, world.port)
        campaign = Campaign(troupe, world, tally, 4_000 + which)
        try:
            for scene in ("safe", "many", "loop", "map", "anew"):
                campaign.rehearse(scene, f"rehearsal-{scene}-{which}")
            campaign.rehearse("bare", f"rehearsal-bare-{which}", told={})
            campaign.rehearse("back", f"rehearsal-safe-{which}")
            number, turns = which, Counter()
            # Every scene at least once, however many kills there are by then.
            while (tally.kills.total() < kills or number < TROUPES * len(SCENES)) and not tally.wrong and not failed:
                scene = SCENES[number // TROUPES % len(SCENES)]
                turns[scene] += 1
                turn = turns[scene] * TROUPES + which  # so that together they end at every moment
                name = f"{scene}-{number}"
                if scene in {"safe", "many", "loop", "map", "anew"}:
                    campaign.safe(scene, name, turn)
                elif scene == "bare":
                    campaign.bare(name, turn)
                else:
                    campaign.back(name, turn)
                number += TROUPES
        except BaseException as error:
            failed.append(error)
        finally:
            troupe.close()
        with holdfast.open(path, readonly=True) as store:
            report = store.verify()
            if not report.ok:
                tally.wrong.append(str(report))

    threads = [threading.Thread(target=perform, args=(which,)) for which in range(TROUPES)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"\n{tally.lives} lives, {tally.kills.total()} kills, {time.perf_counter() - began:.0f} s\n\n{tally.table()}")
    if failed:
        raise failed[0]
    assert not tally.wrong, "\n".join(tally.wrong[:20])
    for kind in ("keyed", "probed", "read", "local", "bare", "undo"):
        assert tally.effects[kind, "effects"]
        assert not tally.effects[kind, "lost"] + tally.effects[kind, "doubled"]
    assert tally.effects["bare", "in doubt"]
    missed = [point for point in POINTS if kills >= 1_000 and not any(tally.kills[point, kind] for kind in KINDS)]
    assert not missed


@pytest.mark.slow
def test_kills_around_resuming_cancelling_and_beginning_anew_lose_and_double_nothing(troupe, world, rounds):
    tally = Tally()
    campaign = Campaign(troupe, world, tally, 4_100)
    campaign.rehearse("anew", "rehearsal")
    for number in range(rounds(12, 10_000)):
        campaign.safe("anew", f"anew-{number}", number)
        assert not tally.wrong, tally.wrong
    assert tally.kills.total()
    with holdfast.open(troupe.path, readonly=True) as store:
        assert store.verify().ok


# -- zombies ------------------------------------------------------------------------------------------------


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


def wait_until(true, what: str) -> None:
    ends = time.monotonic() + 180
    while not true():
        assert time.monotonic() < ends, what
        time.sleep(0.005)


STOPPED = [
    (child.BEFORE_INTENT, "keyed"), (child.AFTER_INTENT, "keyed"), (child.BEFORE_RESULT, "keyed"),
    (child.BEFORE_INTENT, "probed"), (child.AFTER_INTENT, "probed"), (child.BEFORE_RESULT, "probed"),
    (child.AFTER_INTENT, "bare"), (child.BEFORE_RESULT, "bare"),
]  # fmt: skip


@pytest.mark.parametrize(("point", "kind"), STOPPED)
def test_a_process_that_was_stopped_taken_over_and_woken_doubles_nothing(troupe, world, monkeypatch, point, kind):
    scene = "bare" if kind == "bare" else "safe"
    ref = f"zombie/{kind}-1"
    monkeypatch.setattr(child.MOMENTS, "port", world.port)
    zombie = troupe.begin(scene=scene, agent="zombie", only=f"{point}|{kind}", how="SIGSTOP", told={})
    try:
        wait_until(lambda: stopped(zombie.pid), "it did not stop")
        with holdfast.open(troupe.path) as store:
            agent = store.agent("zombie", takeover=True)
            known = point == child.BEFORE_INTENT or kind == "keyed" or (kind, point) == ("probed", child.BEFORE_RESULT)
            if known:
                assert agent.run(getattr(child, scene).options(id="one"), "zombie") == "zombie done"
            else:
                # It may yet happen: that a probe finds nothing is not believed of somebody who lives.
                with pytest.raises(holdfast.InDoubt):
                    agent.run(getattr(child, scene).options(id="one"), "zombie")
                assert [run.status for run in agent.runs()] == ["needs attention"]
            os.kill(zombie.pid, signal.SIGCONT)
            life = Ended(zombie)
            assert "Fenced" in life.error, life.__dict__
            assert world.done(ref) == (0 if point == child.BEFORE_INTENT and not known else 1)
            if not known:
                if kind == "bare":
                    (doubtful,) = [effect for effect in agent.effects() if effect.status == "in doubt"]
                    agent.resolve(doubtful, "done", result={"ref": ref}, why="looked at the books")
                assert agent.run(getattr(child, scene).options(id="one"), "zombie") == "zombie done"
            assert world.done(ref) == 1
            assert store.verify().ok
    finally:
        with suppress(ProcessLookupError):
            os.kill(zombie.pid, signal.SIGCONT)


def test_a_world_that_hangs_up_answers_late_or_refuses_leaves_nothing_doubled(store_path, world):
    """Timeouts and failures instead of kills, in one process."""
    from tests.run.world import Client

    troubles: list[dict] = []

    def ask(ref, **more):
        trouble = troubles.pop()
        client = Client(world.port, **({"timeout_s": 0.2} if "late" in trouble else {}))
        return client.post("/do", ref=ref, key=holdfast.effect().key, **trouble, **more)

    def find(effect):
        found = Client(world.port).post("/find", key=effect.key)
        return holdfast.Absent() if found is None else holdfast.Found(found)

    @holdfast.tool(effect="idempotent", retries=3)
    def book(ref):
        return ask(ref, keyed=True)

    @holdfast.tool(probe=find, retries=3)
    def order(ref):
        return ask(ref)

    @holdfast.tool
    def pay(ref):
        return ask(ref)

    @holdfast.durable
    def work(agent, tool, ref):
        return {"book": book, "order": order, "pay": pay}[tool](ref)["ref"]

    with holdfast.open(store_path) as store:
        for fault in ({"fault": "before"}, {"fault": "after"}, {"fault": "error"}):
            for tool in ("book", "order"):
                ref = f"{tool}-{fault['fault']}"
                troubles[:] = [{}, fault, fault]
                assert store.agent(ref).run(work, tool, ref) == ref
                assert world.done(ref) == 1
            troubles[:] = [fault]
            ref = f"pay-{fault['fault']}"
            with pytest.raises(holdfast.InDoubt):
                store.agent(ref).run(work, "pay", ref)
            assert world.done(ref) == (fault["fault"] == "after")
        # An answer that comes too late: the world does it after the caller has given up. Only a key helps then.
        troubles[:] = [{}, {"late": True}]
        assert store.agent("late").run(work, "book", "late") == "late"
        wait_until(lambda: len(world.keys("late")) == 2, "it was not asked for twice")
        assert world.done("late") == 1
