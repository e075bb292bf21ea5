"""The program that is killed while it acts on the outside world, at a moment that it is told by number.

The program of a troupe (tests/lives.py): a life opens the store, does one scene, and says how it ended. Moments are
counted as they come: before and after every record that is written, around every checkpoint and every move of the
head, and in the tools themselves, where the world outside does the killing.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import holdfast
from holdfast.agent.branch import BranchWriter
from holdfast.run import records as rec
from holdfast.run.host import AgentHost
from holdfast.run.line import Line
from holdfast.store.changes import Change
from holdfast.store.database import Database
from tests.lives import say, serve
from tests.run.world import Client

BEFORE_INTENT = "before intent"
AFTER_INTENT = "after intent, before the call"
DURING = "during the call"
BEFORE_RESULT = "after the call, before the result"
UNFLUSHED = "result written, not flushed"
AFTER_RESULT = "after the result"
SETTLING = "while settling a doubt"
COMPENSATION = "in compensation"
ROLLBACK = "in rollback"
CHECKPOINT = "in checkpoint"
WAITING, PROGRESS = "as it waits", "in a stream"
START, END = "as it begins", "at the end of the run"

# What a life would otherwise import by itself: ten times the rest of its work.
WARM = (
    "concurrent.futures.thread", "encodings.idna", "holdfast.agent.recovery", "holdfast.codec.rollback",
    "holdfast.run.store",
)  # fmt: skip

ITEMS = ("keyed-1", "probed-1", "keyed-2", "probed-2")
PARTS = ("one", "two", "three")
PART_S = 0.03
"""Between two items of a stream: those that come within 50 ms are one record."""
WHEN = ("before", "while", "after")
"""What the world has done when it kills whoever asked: nothing, it is about to, it has."""

# Names that no other test's tools have: this module is imported by the test, too.
NAMES = {"kill.look": "read", "kill.note": "local", "kill.book": "keyed", "kill.order": "probed", "kill.pay": "bare"}
NAMES |= {"kill.alook": "read", "kill.abook": "keyed", "kill.aorder": "probed", "kill.tell": "read"}


class Moments:
    """Counts the moments of a life, and ends it at one of them: by SIGKILL, or SIGSTOP to see what a zombie does."""

    def __init__(self) -> None:
        self.at = self.seen = 0
        self.how = signal.SIGKILL
        self.only = ""  # a point and a kind, instead of a number
        self.port = 0
        self.database: Any = None  # that of this life

    def due(self, point: str, kind: str) -> bool:
        self.seen += 1
        if self.seen != self.at and self.only != f"{point}|{kind}":
            return False
        self.only = ""
        say("at", f"{point}|{kind}")
        return True

    def pass_by(self, point: str, kind: str) -> None:
        if not self.due(point, kind):
            return
        # Who is stopped in the middle of a transaction, perhaps of another thread, keeps all others from writing. That
        # is another test's business.
        with at_rest(self.database) if self.how == signal.SIGSTOP else nullcontext():
            os.kill(os.getpid(), self.how)


@contextmanager
def at_rest(database: Database) -> Iterator[None]:
    """No thread is in the middle of a transaction."""
    try:
        if not database.rest(time.monotonic() + 60):
            raise TimeoutError("it does not come to rest")
        yield
    finally:
        database.resume()


MOMENTS = Moments()


# -- tools --------------------------------------------------------------------------------------------------


def ask(path: str, kind: str, ref: str, client: Client | None = None, **more: Any) -> Any:
    """A request to the world, which may be the last."""
    for when in WHEN:
        if MOMENTS.due(COMPENSATION if path == "/undo" else DURING, kind):
            more |= {"kill": os.getpid(), "when": when}
    return (client or Client(MOMENTS.port)).post(path, ref=ref, **more)


def undo(effect: holdfast.Effect) -> None:
    ask("/undo", NAMES[effect.tool], effect.args["ref"], key=holdfast.effect().key, keyed=True)


def find(effect: holdfast.Effect) -> Any:
    found = Client(MOMENTS.port).post("/find", key=effect.key)
    return holdfast.Absent() if found is None else holdfast.Found(found)


@holdfast.tool(name="kill.look", effect="read")
def look(ref: str) -> Any:
    MOMENTS.pass_by(BEFORE_INTENT, "read")
    return ask("/read", "read", ref)["value"]


@holdfast.tool(name="kill.note", effect="local")
def note(text: str) -> None:
    MOMENTS.pass_by(DURING, "local")
    holdfast.current().state.setdefault("notes", []).append(text)
    MOMENTS.pass_by(DURING, "local")


@holdfast.tool(name="kill.book", effect="idempotent", compensate=undo)
def book(ref: str) -> Any:
    return ask("/do", "keyed", ref, key=holdfast.effect().key, keyed=True)


@holdfast.tool(name="kill.order", probe=find, compensate=undo)
def order(ref: str) -> Any:
    return ask("/do", "probed", ref, key=holdfast.effect().key)


@holdfast.tool(name="kill.pay")
def pay(ref: str) -> Any:
    return ask("/do", "bare", ref, key=holdfast.effect().key)


@holdfast.tool(name="kill.tell", effect="read", stream=True)
def tell(ref: str) -> Iterator[str]:
    for part in PARTS:
        MOMENTS.pass_by(PROGRESS, "read")
        yield f"{ref} {part}"
        time.sleep(PART_S)


@holdfast.tool(name="kill.alook", effect="read")
async def alook(ref: str) -> Any:
    MOMENTS.pass_by(BEFORE_INTENT, "read")
    return (await asyncio.to_thread(ask, "/read", "read", ref))["value"]


@holdfast.tool(name="kill.abook", effect="idempotent", compensate=undo)
async def abook(ref: str) -> Any:
    return await asyncio.to_thread(ask, "/do", "keyed", ref, key=holdfast.effect().key, keyed=True)


@holdfast.tool(name="kill.aorder", probe=find, compensate=undo)
async def aorder(ref: str) -> Any:
    return await asyncio.to_thread(ask, "/do", "probed", ref, key=holdfast.effect().key)


# -- what agents do -----------------------------------------------------------------------------------------


@holdfast.durable
def safe(agent: holdfast.Agent, name: str) -> str:
    agent.checkpoint("start")
    agent.state["seen"] = [look(f"{name}/read-1")]
    note("looked")
    with agent.phase("booking"):
        agent.state["keyed"] = book(f"{name}/keyed-1")["ref"]
    agent.checkpoint("half")
    agent.state["probed"] = order(f"{name}/probed-1")["ref"]
    note("ordered")
    agent.state["seen"].append(look(f"{name}/read-2"))
    return f"{name} done"


@holdfast.durable
async def many(agent: holdfast.Agent, name: str) -> str:
    """The same at once, from several tasks."""

    async def branch(number: int) -> None:
        agent.state.setdefault("seen", []).append(await alook(f"{name}/read-{number}"))
        if number % 2:
            agent.state["keyed"] = (await abook(f"{name}/keyed-{number}"))["ref"]
            await agent.acheckpoint("half")
        else:
            agent.state["probed"] = (await aorder(f"{name}/probed-{number}"))["ref"]
        note(f"branch {number}")

    await asyncio.gather(*(branch(number) for number in (1, 2)))
    return f"{name} done"


@holdfast.durable
def leg(agent: holdfast.Agent, name: str, number: int) -> str:
    agent.state["keyed"] = book(f"{name}/keyed-{number}")["ref"]
    agent.checkpoint("half")
    return str(order(f"{name}/probed-{number}")["ref"])


@holdfast.durable
def family(agent: holdfast.Agent, name: str) -> str:
    """The same at once, by two children."""
    agent.checkpoint("start")
    children = [agent.spawn(leg, f"leg-{number}", name, number) for number in (1, 2)]
    agent.state["legs"] = [child.join() for child in children]
    return f"{name} done"


@holdfast.durable
def waits(agent: holdfast.Agent, name: str) -> str:
    """Sleeps, and is approved once, however often the approval is sent."""
    agent.state["keyed"] = book(f"{name}/keyed-1")["ref"]
    agent.sleep(0.001)
    agent.state["answers"] = [agent.wait_for("approval")]
    agent.state["probed"] = order(f"{name}/probed-1")["ref"]
    try:
        agent.state["answers"].append(agent.wait_for("approval", timeout_s=0.01))
    except TimeoutError:
        agent.state["answers"].append("once")
    return f"{name} done"


def approved(store: holdfast.Store, agent: holdfast.Agent, name: str) -> str:
    """Resume the run each time that it was put off, and approve each time that it asks."""
    while True:
        try:
            return str(agent.run(waits.options(id="one", wait=False), name))
        except holdfast.Waiting as waiting:
            if waiting.signal:
                store.signal(name, waiting.signal, "yes", run="one", id="approved")


@holdfast.durable
def listens(agent: holdfast.Agent, name: str) -> str:
    """What a stream tells is there once, whatever was received before a kill."""
    agent.state["seen"] = list(tell(f"{name}/read-1"))
    agent.state["keyed"] = book(f"{name}/keyed-1")["ref"]
    agent.state["seen"] += list(tell(f"{name}/read-2"))
    agent.state["probed"] = order(f"{name}/probed-1")["ref"]
    return f"{name} done"


@holdfast.durable
def bare(agent: holdfast.Agent, name: str) -> str:
    agent.state["first"] = pay(f"{name}/bare-1")["ref"]
    agent.checkpoint("half")
    agent.state["second"] = pay(f"{name}/bare-2")["ref"]
    return f"{name} done"


@holdfast.durable
def frail(agent: holdfast.Agent, name: str) -> str:
    """Fails when it has done everything, until somebody has mended the cause."""
    agent.state["keyed"] = book(f"{name}/keyed-1")["ref"]
    agent.checkpoint("half")
    agent.state["probed"] = order(f"{name}/probed-1")["ref"]
    if "mended" not in agent.state:
        raise RuntimeError("not yet")
    return f"{name} done"


@holdfast.durable
def patient(agent: holdfast.Agent, name: str) -> None:
    book(f"{name}/keyed-2")
    agent.wait_for("what nobody sends")


def anew(agent: holdfast.Agent, name: str) -> str:
    """A run fails, something is saved, another is begun in its place; one is put off and cancelled."""

    def status(id: str) -> str:
        return next((info.status for info in agent.runs() if info.id == id), "")

    if status("one") in {"", "interrupted"}:
        with suppress(RuntimeError):
            agent.run(frail.options(id="one"), name)
    if "mended" not in agent.state:
        agent.state["mended"] = True
        agent.checkpoint("mended")
    with suppress(holdfast.errors.RunEnded):
        raise AssertionError(agent.run(frail.options(id="one"), name))
    result = agent.run(frail.options(id="two"), name)
    if status("three") in {"", "interrupted"}:
        with suppress(holdfast.Waiting):
            agent.run(patient.options(id="three", wait=False), name)
    agent.cancel("three")
    with agent:
        if "second" not in agent.state:
            agent.state["second"] = book(f"{name}/keyed-2")["ref"]
            agent.checkpoint("second")
    return result


def loop(store: holdfast.Store, name: str) -> str:
    """No durable function: a loop that takes a checkpoint after each call, and goes on from the last one."""
    with store.agent(name) as agent:
        done = agent.state.setdefault("done", [])
        while len(done) < len(ITEMS):
            done.append(act(f"{name}/{ITEMS[len(done)]}"))
            agent.checkpoint(f"done {len(done)}")
    return f"{name} done"


def act(ref: str) -> str:
    """What a loop does at a turn, and a batch for an item."""
    return str((book if "keyed" in ref else order)(ref)["ref"])


PLAIN = {"safe": safe, "family": family, "listens": listens}
"""Scenes that are one run of a plain durable function."""


# -- one life -----------------------------------------------------------------------------------------------


def life(path: str, job: dict[str, Any]) -> None:
    store = holdfast.open(path)
    MOMENTS.database = store._db
    name = job["agent"]
    agent = store.agent(name)
    scene = job["scene"]
    MOMENTS.pass_by(START, "")
    try:
        if scene in PLAIN:
            result = agent.run(PLAIN[scene].options(id="one"), name)
        elif scene == "waits":
            result = approved(store, agent, name)
        elif scene == "many":
            result = asyncio.run(agent.arun(many.options(id="one"), name))
        elif scene == "bare":
            for effect in agent.effects():
                if effect.status == "in doubt" and effect.args["ref"] in job["told"]:
                    known = job["told"][effect.args["ref"]]
                    agent.resolve(effect, known, result={"ref": effect.args["ref"]}, why="looked at the books")
            result = agent.run(bare.options(id="one"), name)
        elif scene == "anew":
            result = anew(agent, name)
        elif scene == "loop":
            result = loop(store, name)
        elif scene == "map":
            result = store.map(act, [f"{name}/{item}" for item in ITEMS], name=name, workers=2)
        else:
            result = back(agent, PLAIN[job["of"]])
    except holdfast.InDoubt as error:
        say("doubt", json.dumps([effect.args["ref"] for effect in error.effects]))
    else:
        MOMENTS.pass_by(END, "")
        say(
            "end",
            json.dumps({"result": result, "state": holdfast.plain(store.agent(name).state), "moments": MOMENTS.seen}),
        )
    store.close()


def back(agent: holdfast.Agent, of: Any) -> str:
    """Go back to where the run began, after finishing a rollback that was interrupted."""
    store = agent._store
    with agent:
        pass
    agent = store.agent(agent.name)
    if not any(made.label == "start" for made in agent.log()):  # the run was killed before it had done anything
        return "start"
    try:
        agent.rollback("start")  # even from there: there may be something to undo that no checkpoint knows
    except holdfast.errors.RollbackBlocked:  # a keyed call was cut off: nobody can tell, but it can be finished
        agent.run(of.options(id="one"), agent.name)
        agent.rollback("start")
    return str(agent.head.label)


# -- where it may end -----------------------------------------------------------------------------------------


def around(owner: type, name: str, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """Let a method of a class pass two moments."""
    inner = getattr(owner, name)

    def outer(self: Any, *args: Any, **kwargs: Any) -> Any:
        before(*args)
        found = inner(self, *args, **kwargs)
        after(*args)
        return found

    setattr(owner, name, outer)


KINDS: dict[str, str] = {}  # by path, of the calls that this life has intended
UNDOING: set[str] = set()  # paths of compensations
LAST: list[str] = []  # the kind of the outcome that is being flushed


def before_records(*records: Any) -> None:
    for record in records:
        if isinstance(record, rec.Intent):
            kind = NAMES.get(record.tool.removeprefix("undo "), "")  # the library has tools of its own
            KINDS[record.path] = kind
            if record.undoes:
                UNDOING.add(record.path)
            MOMENTS.pass_by(COMPENSATION if record.undoes else BEFORE_INTENT, kind)
        elif isinstance(record, rec.Done):
            MOMENTS.pass_by(COMPENSATION if record.path in UNDOING else BEFORE_RESULT, KINDS.get(record.path, "read"))
        elif isinstance(record, rec.Decision | rec.Doubt):
            MOMENTS.pass_by(SETTLING, "")
        elif isinstance(record, rec.Wait | rec.Progress):
            MOMENTS.pass_by(WAITING if isinstance(record, rec.Wait) else PROGRESS, "")
        elif isinstance(record, rec.Begin):
            MOMENTS.pass_by(ROLLBACK if record.kind == "rollback" else START, "")


def after_records(*records: Any) -> None:
    for record in records:
        if isinstance(record, rec.Intent):
            MOMENTS.pass_by(COMPENSATION if record.undoes else AFTER_INTENT, KINDS[record.path])
        elif isinstance(record, rec.Done):
            kind = KINDS.get(record.path, "read")
            if record.path in UNDOING:
                MOMENTS.pass_by(COMPENSATION, kind)
            else:
                LAST[:] = [kind] if record.of else []
                MOMENTS.pass_by(UNFLUSHED, kind)
        elif isinstance(record, rec.Decision | rec.Doubt):
            MOMENTS.pass_by(SETTLING, "")
        elif isinstance(record, rec.Wait | rec.Progress):
            MOMENTS.pass_by(WAITING if isinstance(record, rec.Wait) else PROGRESS, "")
        elif isinstance(record, rec.Begin):
            MOMENTS.pass_by(ROLLBACK if record.kind == "rollback" else START, "")
        elif isinstance(record, rec.End):
            MOMENTS.pass_by(END, "")


def after_flush(*_args: Any) -> None:
    if LAST:
        MOMENTS.pass_by(AFTER_RESULT, LAST.pop())


def watch() -> None:
    def pass_by(point: str) -> Callable[..., Any]:
        return lambda *_args: MOMENTS.pass_by(point, "")

    around(Line, "append", before_records, after_records)
    around(Line, "flush", lambda *_args: None, after_flush)
    around(BranchWriter, "finish", saving, saving)
    around(Change, "commit", pass_by(CHECKPOINT), pass_by(CHECKPOINT))
    around(AgentHost, "return_to", pass_by(ROLLBACK), pass_by(ROLLBACK))
    around(Change, "move_to", pass_by(ROLLBACK), pass_by(ROLLBACK))


def saving(pending: Any) -> None:
    if pending.captured is not None:  # otherwise these are records
        MOMENTS.pass_by(CHECKPOINT, "")


def live(job: dict[str, Any]) -> None:
    MOMENTS.at, MOMENTS.only = job.get("at", 0), job.get("only", "")
    MOMENTS.how = signal.Signals[job.get("how", "SIGKILL")]
    life(sys.argv[1], job)


if __name__ == "__main__":
    MOMENTS.port = int(sys.argv[2])
    for name in WARM:
        importlib.import_module(name)
    watch()
    serve(live)
