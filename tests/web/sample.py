"""A store with something of everything, for tests of the page's views and for its pictures.

Run as a program it makes one: ``python -m tests.web.sample PLACE``. What it holds is hostile on purpose where a person
could have written anything: labels, texts, names of branches.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from contextlib import suppress

import holdfast
from holdfast import crash

SCRIPT = "<script>window.hit=1</script><img src=x onerror=window.hit=1>"
BIDI = "gnp.\u202etxt\u2066 \x00\x1b[31m"
ANSWER = (
    "I compared fourteen flights. The best one leaves Frankfurt at 09:40, lands in Lisbon at 11:55 local time and "
    "costs 182 euros with a cabin bag. The hotel in Alfama is quiet and has a desk to work at."
)


def search_flights(to: str) -> list[dict[str, object]]:
    time.sleep(0.02)
    return [{"number": "TP539", "price": 182.0, "to": to}, {"number": "LH1172", "price": 239.5, "to": to}]


def book_flight(number: str) -> dict[str, object]:
    time.sleep(0.03)
    return {"number": number, "seat": "14C"}


def unbook(effect: holdfast.Effect) -> None:
    """The airline takes it back."""


def book_hotel(name: str) -> str:
    time.sleep(0.05)
    return f"{name}: two nights"


def send_mail(to: str) -> str:
    raise TimeoutError("the mail server did not answer in time")


def tools() -> tuple[object, ...]:
    """Made when they are needed: two tools of one name in one process are refused."""
    return (
        holdfast.tool(effect="read")(search_flights),
        holdfast.tool(compensate=unbook)(book_flight),
        holdfast.tool()(book_hotel),
        holdfast.tool()(send_mail),
    )


def make(place: str, *, long: int = 0, dumps: bool = True) -> None:
    """The store. ``long``: checkpoints of an agent that has many."""
    search, flight, hotel, mail = tools()
    with holdfast.open(place) as store:
        trip(store, search, flight, hotel, mail)
        hostile(store)
        if long:
            with store.agent("long", when=None) as agent:
                for number in range(long):
                    agent.state["budget"] = 1000 - number
                    agent.checkpoint("" if number % 10 else f"round {number}")
        if dumps:
            fail(store, place)


def trip(store: holdfast.Store, search, flight, hotel, mail) -> None:
    @holdfast.durable
    def plan(agent: holdfast.Agent, to: str) -> str:
        state = agent.state
        with agent.phase("look"):
            state["flights"] = search(to)
            agent.checkpoint("flights compared")
        with agent.phase("book"):
            state["booking"] = flight("TP539")
            state["budget"] = state["budget"] - 182.0
            agent.checkpoint("flight booked")
            state["hotel"] = hotel("Alfama Rooms")
            state["budget"] = state["budget"] - 310.0
            agent.checkpoint("hotel booked")
        return "two nights in Lisbon"

    with store.agent("trip-7", when=None) as agent:
        agent.state = {
            "budget": 900.0,
            "messages": [{"role": "system", "content": "You plan trips. Stay within the budget."}],
            "preferences": {"window seat": True, "quiet": True, "latest departure": "10:30"},
        }
        agent.checkpoint("began")
        agent.state["messages"].append({"role": "user", "content": "Two nights in Lisbon, please, not too early."})
        agent.checkpoint("asked")
        store.tag("trip-7", "baseline", "asked")
        agent.run(plan, "Lisbon")
        agent.state["messages"].append({"role": "assistant", "content": ANSWER})
        agent.checkpoint("answered")
        wrong = agent.checkpoint("before the mistake")
        agent.state["budget"] = -2600.0
        agent.state["messages"].append({"role": "assistant", "content": "I also booked a yacht."})
        agent.checkpoint("yacht booked")
        agent.state["messages"].append({"role": "user", "content": "What? No!"})
        agent.checkpoint("complaint")
        agent.rollback(wrong)
        agent.state["messages"][-1]["content"] = ANSWER.replace("182", "189").replace(
            "quiet", "quiet, on the third floor,"
        )
        agent.checkpoint("answer corrected")
        with suppress(Exception):
            mail("traveller@example.com")
        store.branch("trip-7", "cheaper", "asked")
        agent.state["sent"] = False
        agent.checkpoint("mail tried")
    with store.agent("trip-7", branch="cheaper", when=None) as agent:
        agent.state["budget"] = 500.0
        agent.state["messages"].append({"role": "user", "content": "Could it be cheaper?"})
        agent.checkpoint("asked for less")
        agent.state["hotel"] = "hostel, eight beds"
        agent.checkpoint("hostel chosen")

    @holdfast.durable
    def approve(agent: holdfast.Agent) -> object:
        agent.state["waiting"] = True
        agent.checkpoint("waits for somebody")
        return agent.wait_for("approved")

    with store.agent("trip-8", when=None) as agent, suppress(holdfast.errors.Waiting):
        agent.run(approve.options(wait=False))


def hostile(store: holdfast.Store) -> None:
    with store.agent("hostile", when=None) as agent:
        agent.state = {
            "notes": {SCRIPT: SCRIPT, BIDI: BIDI, "]'\"": ["a", {"b": SCRIPT}]},
            "messages": [{"role": SCRIPT, "content": SCRIPT}, {"role": "user", "content": BIDI}],
            "huge": "x" * 10_000_000,
            "price": 2**60,
            "many": {f"key {at}": at for at in range(5_000)},
            "__kept__": {"by": "an integration"},
        }
        agent.checkpoint(SCRIPT)
        agent.invariant("price < 0", name=SCRIPT)
        agent.state["notes"][BIDI] = SCRIPT + " once more, with a text that is long enough to be compared by its words"
        agent.state["__kept__"]["by"] = "another"
        agent.checkpoint(BIDI.replace("\x00", "").replace("\x1b", ""))
        store.branch("hostile", "b-" + "very-" * 10 + "long")


def fail(store: holdfast.Store, place: str) -> None:
    """Two dumps of one cause, and one of another."""
    for name, error in (("trip-7", ZeroDivisionError), ("trip-7", ZeroDivisionError), ("hostile", ValueError)):
        with store.agent(name, when=None) as agent:
            try:
                divide(len(agent.state), error)
            except (ZeroDivisionError, ValueError) as raised:
                crash.capture(error=raised, to=f"{place}/dumps")


def divide(rooms: int, error: type[Exception]) -> float:
    guests = 0
    if error is ValueError:
        raise ValueError(SCRIPT)
    return rooms / guests


async def crowd(place: str) -> None:
    """A dump of a program with a thread and two tasks, of which one waits for the other."""

    def sleeper(cargo: dict[str, int]) -> int:
        held.wait()
        return len(cargo)

    async def porter(bags: list[object]) -> int:
        await asyncio.sleep(60)
        return len(bags)

    async def guest() -> int:
        return await first

    held = threading.Event()
    thread = threading.Thread(target=sleeper, args=({"apples": 3},), name="sleeper")
    thread.start()
    first = asyncio.create_task(porter(["red", {"inner": list(range(1_000))}]), name="porter")
    second = asyncio.create_task(guest(), name="guest")
    await asyncio.sleep(0.01)
    with holdfast.open(place):
        crash.capture(to=f"{place}/dumps")
    first.cancel()
    second.cancel()
    held.set()
    thread.join()


if __name__ == "__main__":
    if sys.argv[2:] == ["crowd"]:
        asyncio.run(crowd(sys.argv[1]))
    else:
        make(sys.argv[1], long=int(sys.argv[2]) if len(sys.argv) > 2 else 0)
