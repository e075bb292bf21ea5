"""The program that the benchmark kills: three bookings one after another, by Holdfast, DBOS or LangGraph.

Usage: kills_child.py ROW FOLDER PORT. Started once for each row as a warm template; each line on its standard input, a
JSON object, forks a real process that begins the work or goes on with it, and says how it ended. There are five moments
for each booking, the same for everybody: as the step begins, three inside the world outside (nothing done yet, about to
be done, done), and before the step returns.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.run.world import Client  # noqa: E402 - the world is that of the tests

BOOKINGS = ("flight", "hotel", "car")
MOMENTS = ("as it begins", "asked, nothing done", "asked, about to be done", "done, not answered", "before it returns")
WHEN = ("before", "while", "after")
SAY = os.dup(1)


class Trip:
    """One piece of work, and where its process is to be killed."""

    def __init__(self, port: int, job: dict[str, Any]) -> None:
        self.client, self.name, self.at = Client(port), job["name"], job.get("at", 0)
        self.told: dict[str, str] = job.get("told", {})
        self.seen = 0

    def due(self, moment: str) -> bool:
        self.seen += 1
        if self.seen != self.at:
            return False
        say("at", moment)
        return True

    def ref(self, what: str) -> str:
        return f"{self.name}/{what}"

    def book(self, what: str, key: str = "", *, keyed: bool = False) -> int:
        """The body of a step."""
        more: dict[str, Any] = {}
        if self.due(MOMENTS[0]):
            os.kill(os.getpid(), signal.SIGKILL)
        for moment, when in zip(MOMENTS[1:4], WHEN, strict=True):
            if self.due(moment):
                more = {"kill": os.getpid(), "when": when}
        number = self.client.post("/do", ref=self.ref(what), key=key, keyed=keyed, **more)["number"]
        if self.due(MOMENTS[4]):
            os.kill(os.getpid(), signal.SIGKILL)
        return int(number)


def say(word: str, rest: Any = "") -> None:
    os.write(SAY, f"{word} {rest}\n".encode())


Do = Callable[[Trip], None]


def holdfast_work(kind: str, folder: Path) -> Do:
    import importlib

    import holdfast

    for name in ("holdfast.run.store", "holdfast.agent.recovery"):
        importlib.import_module(name)

    def do(trip: Trip) -> None:
        def find(effect: holdfast.Effect) -> Any:
            found = trip.client.post("/find", key=effect.key)
            return holdfast.Absent() if found is None else holdfast.Found(found["number"])

        effect: Any = "idempotent" if kind == "keyed" else "write"

        @holdfast.tool(effect=effect, probe=find if kind == "probed" else None)
        def book(what: str) -> int:
            return trip.book(what, holdfast.effect().key, keyed=kind == "keyed")

        @holdfast.durable
        def travel(agent: holdfast.Agent) -> None:
            for what in BOOKINGS:
                agent.state[what] = book(what)
                agent.checkpoint(what)

        with holdfast.open(folder / "store") as store:
            agent = store.agent(trip.name)
            for effect in agent.effects():
                if effect.status == "in doubt" and trip.ref(effect.args["what"]) in trip.told:
                    agent.resolve(effect, trip.told[trip.ref(effect.args["what"])], result=0, why="looked")  # type: ignore[arg-type]
            try:
                agent.run(travel.options(id="one"))
            except holdfast.InDoubt as error:
                say("doubt", json.dumps([trip.ref(effect.args["what"]) for effect in error.effects]))
                return
        say("end")

    return do


def dbos_work(kind: str, folder: Path) -> Do:
    from dbos import DBOS, SetWorkflowID

    def do(trip: Trip) -> None:
        url = f"sqlite:///{folder / 'dbos.sqlite'}"
        DBOS(config={"name": "kills", "system_database_url": url, "log_level": "ERROR"})

        @DBOS.step(name="book")
        def book(what: str) -> int:
            key = f"{DBOS.workflow_id}/{DBOS.step_id}" if kind == "keyed" else ""
            return trip.book(what, key, keyed=kind == "keyed")

        @DBOS.workflow(name="travel")
        def travel() -> None:
            for what in BOOKINGS:
                book(what)

        DBOS.launch()
        if DBOS.get_workflow_status(trip.name) is None:
            with SetWorkflowID(trip.name):
                DBOS.start_workflow(travel)
        DBOS.retrieve_workflow(trip.name).get_result()  # its own recovery goes on with what was interrupted
        say("end")

    return do


class State(TypedDict):
    """The graph's."""

    done: int


def langgraph_work(kind: str, folder: Path) -> Do:
    from langgraph.checkpoint.sqlite import SqliteSaver
    from langgraph.graph import END, START, StateGraph

    def do(trip: Trip) -> None:
        def node(what: str) -> Callable[[State], State]:
            def book(_state: State) -> State:
                key = f"{trip.name}/{what}" if kind == "keyed" else ""
                return {"done": trip.book(what, key, keyed=kind == "keyed")}

            return book

        builder = StateGraph(State)
        for before, what in zip((START, *BOOKINGS), BOOKINGS, strict=False):
            builder.add_node(what, node(what))
            builder.add_edge(before, what)
        builder.add_edge(BOOKINGS[-1], END)
        with SqliteSaver.from_conn_string(str(folder / "saver.db")) as saver:
            graph = builder.compile(checkpointer=saver)
            config: Any = {"configurable": {"thread_id": trip.name}}
            state = graph.get_state(config)
            begun = state.created_at is not None
            if not begun or state.next:
                graph.invoke(None if begun else {"done": 0}, config, durability="sync")
        say("end")

    return do


ROWS: dict[str, tuple[Callable[[str, Path], Do], str]] = {
    "holdfast, keyed": (holdfast_work, "keyed"),
    "holdfast, probed": (holdfast_work, "probed"),
    "holdfast, neither": (holdfast_work, "bare"),
    "dbos": (dbos_work, "bare"),
    "dbos, key made by hand": (dbos_work, "keyed"),
    "langgraph": (langgraph_work, "bare"),
    "langgraph, key made by hand": (langgraph_work, "keyed"),
}


def main() -> None:
    row, folder, port = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    os.environ.setdefault("LANGCHAIN_TRACING_V2", "false")
    logging.disable(logging.CRITICAL)
    maker, kind = ROWS[row]
    do = maker(kind, folder)
    gc.freeze()
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            try:
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                    do(Trip(port, job))
            except BaseException as error:  # noqa: BLE001 - it is told
                say("error", repr(error)[:500].replace("\n", " "))
            os._exit(0)
        say("pid", child)
        _, status = os.waitpid(child, 0)
        say("gone", os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
