"""``holdfast queues``: where submitted runs wait for their turn, and with which limits."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter
from rich.text import Text

from holdfast.cli.session import Given, Json
from holdfast.cli.text import clean
from holdfast.errors import BadOption

SCHEMA = "holdfast.queues/1"
SET_SCHEMA = "holdfast.queues.set/1"
_Number = Annotated[int | None, Parameter(metavar="N", show_default=False)]
_Rate = Annotated[str | None, Parameter(metavar="N/SECONDS", show_default=False)]

queues = App(name="queues", help="List the queues of submitted runs, or change the limits of one.")


@queues.default
def list_(*, json: Json = False, session: Given) -> int:
    """List the queues that submitted runs wait in: their limits, how many are executed now, and how many wait.

    Parameters
    ----------
    json
        Print JSON (schema holdfast.queues/1).
    """
    with session.reading() as store:
        found = store.queues()
        if json:
            session.out.json({"schema": SCHEMA, "store": store.place, "queues": [one.to_json() for one in found]})
            return 0
        if not found:
            session.out.say("No queues: nothing that was submitted waits, and no program has declared one.")
            return 0
        rows: list[list[Text | str]] = [
            [Text(clean(one.name), style="bold cyan"), one.limits, str(one.running), str(one.waiting)] for one in found
        ]
        session.out.columns(("queue", "limits", "running", "waiting"), rows)
    return 0


@queues.command(name="set")
def set_(
    name: str,
    /,
    *,
    concurrency: _Number = None,
    rate: _Rate = None,
    partition_concurrency: _Number = None,
    partition_rate: _Rate = None,
    json: Json = False,
    session: Given,
) -> int:
    """Give a queue other limits, from now on and for all workers. What is not given is not limited.

    A worker whose program declares other numbers does not start any more: change them there, too.

    Parameters
    ----------
    name
        The queue's name.
    concurrency
        How many of its runs are executed at a time.
    rate
        How many begin within how many seconds: 10/60.
    partition_concurrency
        How many of each partition are executed at a time.
    partition_rate
        How many of each partition begin within how many seconds.
    json
        Print JSON (schema holdfast.queues.set/1).
    """
    with session.writing() as store:
        made = store.set_queue(
            name,
            concurrency=concurrency,
            rate=_pair(rate),
            partition_concurrency=partition_concurrency,
            partition_rate=_pair(partition_rate),
        )
        if json:
            session.out.json({"schema": SET_SCHEMA, "queue": made.to_json()})
            return 0
        session.out.say(Text(clean(made.name), style="bold cyan"), f"  {made.limits}")
    return 0


def _pair(rate: str | None) -> tuple[int, float] | None:
    if rate is None:
        return None
    count, _, seconds = rate.partition("/")
    try:
        return int(count), float(seconds)
    except ValueError:
        raise BadOption(f"a rate of {rate!r}", hint="Say how many, and within how many seconds: --rate 10/60") from None
