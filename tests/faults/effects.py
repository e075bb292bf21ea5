"""kill -9 of processes that act on the outside world: nothing lost, nothing doubled, nothing forgotten.

``effects``: durable functions with tasks, children, waits, streams and compensations, a batch, and a plain loop, killed
at every point of the journal and at any moment. The world is an HTTP server with its own database (tests/run/world.py).
What may be repeated or asked about is done exactly once in the end; what can be neither is reported in doubt, every
time, and never repeated. ``graphs``: the same for the nodes of LangGraph graphs, killed at any moment
(tests/contrib/tools_child.py).
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import holdfast
from tests import warm
from tests.faults import effects_child as child
from tests.faults.campaign import Task, campaign, quiet
from tests.lives import Life
from tests.lives import Troupe as Lives
from tests.memory import memory
from tests.run.world import World

POINTS = (
    child.START, child.BEFORE_INTENT, child.AFTER_INTENT, child.DURING, child.BEFORE_RESULT, child.UNFLUSHED,
    child.AFTER_RESULT, child.SETTLING, child.CHECKPOINT, child.END, child.COMPENSATION, child.ROLLBACK,
    child.WAITING, child.PROGRESS, "any moment",
)  # fmt: skip
# A bare write that was killed here has an intent on disk and no outcome.
IN_DOUBT = {child.AFTER_INTENT, child.DURING, child.BEFORE_RESULT}
CERTAIN = {child.START, child.BEFORE_INTENT, child.AFTER_RESULT, child.CHECKPOINT, child.END}
AGAIN = 0.7  # of the lives that go on after a kill are killed, too
OUTSIDE = 0.2  # of the kills come from outside, at any moment, instead of at a point
LIVES_MAX = 12
SPREAD = (5**0.5 - 1) / 2  # the golden ratio: however few first lives there are, their ends lie all over the way
POINTS_MET = 1_000
"""After so many kills every point of the journal has been one."""

SCENES = {
    "safe": "one call after the other",
    "many": "tasks with gather",
    "family": "children",
    "waits": "waits and signals",
    "listens": "streams",
    "back": "compensations",
    "back family": "compensations of children",
    "anew": "failed, cancelled and begun anew",
    "bare": "writes that nobody can ask about",
    "map": "a batch",
    "loop": "a plain loop",
}


class Ended:
    """How one process ended: where it was killed, what it was in doubt about, or what came of it."""

    def __init__(self, life: Life) -> None:
        self.killed = life.end() == -signal.SIGKILL
        said = dict(life.said)
        self.point, _, self.kind = said.get("at", "any moment|" if self.killed else "|").partition("|")
        self.doubt: list[str] | None = json.loads(said["doubt"]) if "doubt" in said else None
        self.end: dict[str, Any] | None = json.loads(said["end"]) if "end" in said else None
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


class Stage:
    """Scene after scene with one troupe."""

    def __init__(self, task: Task, troupe: Troupe, world: World) -> None:
        self.task, self.troupe, self.world = task, troupe, world
        self.chance = random.Random(4_000 + task.seed)
        self.kills: Counter[str] = Counter()  # by scene
        self.moments: dict[str, int] = {}
        self.typical_s: dict[str, float] = {}

    def rehearse(self, scene: str) -> None:
        """Once without a kill: how many moments there are, and how long it takes."""
        name, job = f"rehearsal-{scene}", {"told": {}}
        if scene.startswith("back"):
            job, name = {"of": _undone(scene)}, f"rehearsal-{_undone(scene)}"
        began = time.perf_counter()
        life = self.troupe.live(scene=scene, agent=name, **job)
        assert life.end, f"{scene} without a kill: {life.error or life.doubt}"
        self.moments[scene], self.typical_s[scene] = life.end["moments"], time.perf_counter() - began

    def perform(self, scene: str, name: str, number: int) -> None:
        if scene == "bare":
            self.bare(name, number)
        elif scene.startswith("back"):
            self.back(scene, name, number)
        else:
            self.safe(scene, name, number)

    def killed(self, scene: str, life: Ended) -> None:
        self.kills[scene] += 1
        self.task.details[life.point] += 1
        self.task.tried(SCENES[scene])

    def live(self, scene: str, name: str, number: int, lives: int, **job: object) -> Ended:
        """One life of a scene, killed or not."""
        last = lives == LIVES_MAX or (lives and self.chance.random() > AGAIN)
        if last:
            return self.troupe.live(scene=scene, agent=name, **job)
        if self.chance.random() < OUTSIDE:
            after_s = self.chance.uniform(0, self.typical_s[scene])
            life = self.troupe.live(scene=scene, agent=name, after_s=after_s, **job)
        else:
            every = self.moments[scene]
            # A life that goes on has fewer moments left than a whole one: an early one is more likely to come.
            at = 1 + int(every * (number * SPREAD % 1)) if not lives else 1 + int(every * self.chance.random() ** 2)
            life = self.troupe.live(scene=scene, agent=name, at=at, **job)
        if life.killed:
            self.killed(scene, life)
        return life

    def safe(self, scene: str, name: str, number: int) -> None:
        """What may be repeated or asked about: in the end it has finished, and all was done once."""
        for lives in range(LIVES_MAX + 1):
            life = self.live(scene, name, number, lives)
            if life.error or life.doubt is not None:
                self.task.broke(f"{name}: {life.error or life.doubt} after a life that got to {life.point}")
                return
            if life.end:
                break
        keyed, probed, expected = outcome(scene, name)
        self.count(name, "keyed", keyed)
        self.count(name, "probed", probed)
        found: Any = life.end["result"] if scene == "map" else life.end["state"]
        if scene == "many":  # in which order two tasks come there is not said
            found = {key: sorted(value) if isinstance(value, list) else value for key, value in found.items()}
        if found != expected or (scene not in {"map", "anew"} and life.end["result"] != f"{name} done"):
            self.task.broke(f"{name}: {life.end} instead of {expected}")

    def count(self, name: str, kind: str, refs: tuple[str, ...], times: int = 1, what: str = "do") -> None:
        for ref in refs:
            done = self.world.done(f"{name}/{ref}", what)
            self.task.details[f"effects {'undone' if what == 'undo' else kind}"] += times
            if done != times:
                self.task.broke(f"{name}/{ref}: {what} {done} times instead of {times}")

    def bare(self, name: str, number: int) -> None:
        """Writes that nobody can repeat or ask about: in doubt whenever it is not known, and never repeated."""
        told: dict[str, str] = {}  # what a person found out, for the next life; one that is killed asks again
        due, certain = False, True  # certain: every kill so far was where an outcome is on disk, or no intent is
        for lives in range(LIVES_MAX + 1):
            life = self.live("bare", name, number, lives, told=told)
            told = {}
            if life.error:
                self.task.broke(f"{name}: {life.error}")
                return
            if life.doubt is not None:
                if certain and lives:
                    self.task.broke(f"{name}: in doubt, though it was known: {life.doubt}")
                self.task.details["effects in doubt"] += len(life.doubt)
                told = {ref: "done" if self.world.done(ref) else "not-done" for ref in life.doubt}
                due = certain = False
            elif due and (life.end or life.kind == "bare"):
                self.task.broke(f"{name}: went on to {life.point or 'the end'} without being in doubt")
            if life.killed:
                due = due or (life.kind == "bare" and life.point in IN_DOUBT)
                certain = certain and life.point in CERTAIN
            if life.end:
                break
        else:
            life = self.troupe.live(scene="bare", agent=name, told=told)
        for ref in ("bare-1", "bare-2"):
            if self.world.done(f"{name}/{ref}") > 1:
                self.task.broke(f"{name}/{ref} was repeated")
        if life.end:
            self.count(name, "bare", ("bare-1", "bare-2"))

    def back(self, scene: str, name: str, number: int) -> None:
        """A rollback: interrupted, then finished; everything is undone once, and done again with other keys.

        Every other time the run itself was killed before, so that it is not known what there is to undo.
        """
        of = _undone(scene)
        at = self.chance.randrange(1, self.moments[of] + 1) if number % 2 else 0
        life = self.troupe.live(scene=of, agent=name, at=at)
        if life.killed:
            self.killed(scene, life)
        whole = life.end is not None
        for lives in range(LIVES_MAX + 1):
            life = self.live(scene, name, number, lives, of=of)
            if life.error or life.doubt is not None:
                self.task.broke(f"{name}: {life.error or life.doubt} in a rollback, {life.point}")
                return
            if life.end:
                break
        if (life.end["result"], life.end["state"]) != ("start", {}):
            self.task.broke(f"{name}: {life.end}")
        refs = [ref for some in outcome(of, name)[:2] for ref in some]
        before = {ref: self.world.done(f"{name}/{ref}") for ref in refs}
        for ref, times in before.items():
            self.count(name, "undone", (ref,), times=times, what="undo")
            if times > 1 or (whole and not times):
                self.task.broke(f"{name}: {ref} was done {times} times before the rollback")
        life = self.troupe.live(scene=of, agent=name)
        if not life.end:
            self.task.broke(f"{name}: after the rollback: {life.error or life.doubt}")
            return
        for ref, times in before.items():
            self.count(name, ref.partition("-")[0], (ref,), times=times + 1)


def _undone(scene: str) -> str:
    """The scene whose run a rollback undoes."""
    return scene.removeprefix("back").strip() or "safe"


def outcome(scene: str, name: str) -> tuple[tuple[str, ...], tuple[str, ...], Any]:
    """What a scene has done in the end, by key and by probe, and what it has come to."""
    refs = [f"{name}/{item}" for item in child.ITEMS]
    booked = {"keyed": f"{name}/keyed-1", "probed": f"{name}/probed-1"}
    seen = [f"value of {name}/read-{which}" for which in (1, 2)]
    told = [f"{name}/read-{which} {part}" for which in (1, 2) for part in child.PARTS]
    one, two = ("keyed-1",), ("keyed-1", "keyed-2")
    return {
        "safe": (one, ("probed-1",), {**booked, "seen": seen, "notes": ["looked", "ordered"]}),
        "many": (
            one,
            ("probed-2",),
            {"keyed": booked["keyed"], "probed": f"{name}/probed-2", "seen": seen, "notes": ["branch 1", "branch 2"]},
        ),
        "family": (two, ("probed-1", "probed-2"), {"legs": [f"{name}/probed-1", f"{name}/probed-2"]}),
        "waits": (one, ("probed-1",), {**booked, "answers": ["yes", "once"]}),
        "listens": (one, ("probed-1",), {**booked, "seen": told}),
        "anew": (two, ("probed-1",), {**booked, "second": f"{name}/keyed-2", "mended": True}),
        "map": (two, ("probed-1", "probed-2"), refs),
        "loop": (two, ("probed-1", "probed-2"), {"done": refs}),
    }[scene]


@campaign("effects", "Kill -9 of programs that act outside", "kills", ci=33, soak=11_000)
def effects(task: Task) -> None:
    """Durable functions with gather, children, waits, streams and compensations, a batch, and a plain loop, each as
    often, killed at every point of the journal and at any moment. What was really done is counted apart."""
    with memory() as folder, quiet():
        store = folder / "store"
        holdfast.open(store).close()
        with World(folder) as world:
            troupe = Troupe(store, world.port)
            try:
                stage = Stage(task, troupe, world)
                for scene in SCENES:
                    stage.rehearse(scene)
                turns: Counter[str] = Counter()
                while not task.over:
                    scene = min(SCENES, key=lambda one: (stage.kills[one], turns[one]))
                    turns[scene] += 1
                    stage.perform(scene, f"{scene.replace(' ', '-')}-{turns[scene]}", turns[scene])
            finally:
                troupe.close()
        with holdfast.open(store, readonly=True) as opened:
            report = opened.verify()
        if not report.ok:
            task.broke(str(report))
    missed = [point for point in POINTS if task.done >= POINTS_MET and not task.details[point]]
    if missed:
        task.broke(f"never killed {', '.join(missed)}")


# -- graphs -----------------------------------------------------------------------------------------------------

LIFE_S = 0.35  # of CPU time
KILLS_PER_THREAD = 6
THREADS_PER_STORE = 10


@campaign("graphs", "Kill -9 of LangGraph graphs whose nodes act outside", "kills", ci=24, soak=5_000)
def graphs(task: Task) -> None:
    """ToolNode, RetryPolicy, Send, interrupts, update_state, subgraphs of all three kinds and @task, under the three
    durabilities, killed at any moment. What was really done is in a file that the store knows nothing of."""
    chance = random.Random(20_260 + task.seed)
    with memory() as folder:
        number = 0
        with Lives("tests.contrib.tools_child", loaded=warm.LANGGRAPH) as troupe:
            while not task.over:
                group, number = number // KILLS_PER_THREAD, number + 1
                ledger = folder / f"thread-{group}"
                where = Path(f"{ledger}.where")
                where.write_text("opening")
                life = troupe.begin(
                    store=str(folder / f"store{group // THREADS_PER_STORE}"), ledger=str(ledger), thread=ledger.name,
                    functional=group % 3 == 2, seed=chance.randrange(2**32), cpu_s=chance.uniform(0.02, LIFE_S),
                )  # fmt: skip
                if life.end() != -signal.SIGPROF:
                    task.broke(f"seed {task.seed}, kill {number}: {life.code} {life.said}")
                    break
                for word in where.read_text().strip().split(", "):
                    task.details[word] += 1
                task.tried()
        done = sum(len(ledger.read_text().splitlines()) for ledger in folder.glob("thread-*[0-9]"))
        task.details["effects"] += done
        if done < task.done:
            task.broke("most lives ended before anything happened")
