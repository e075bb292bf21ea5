"""Batches: one function for each of many items, as one run of an agent.

Owns which items are left, how many are under way at once, and what becomes of one that fails. What always holds: the
batch is one run, and what resumes is the batch; an item has a position in it, which its key gives, and records there,
but no state and no checkpoints; one that has finished is not executed again, what it has done outside is not repeated,
and one that fails or is in doubt does not stop the others. A store that cannot be written is no failure of an item: it
ends the batch, which goes on when it is called again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, Self

from holdfast.agent import watchers
from holdfast.agent.points import TOOL
from holdfast.errors import BadName, BadOption, Cancelled, InDoubt
from holdfast.run import records as rec
from holdfast.run import waiting
from holdfast.run.arguments import Stowed, fetch, fingerprint, not_there, refuse, scrub, stow
from holdfast.run.calls import LEDGER
from holdfast.run.doubt import settle_all
from holdfast.run.durables import Options, check_whole, known, options_of, unfinished
from holdfast.run.effects import ITEM
from holdfast.run.host import AgentHost
from holdfast.run.outcomes import MESSAGE_MAX, said
from holdfast.run.past import Past, RunPast
from holdfast.run.rollback import resuming
from holdfast.run.runs import Body, Run, traced
from holdfast.run.scope import Lane, in_doubt, now_us, number_tasks, safe
from holdfast.run.steps import Steps, Work, drive, drive_later
from holdfast.run.tools import TOOLS

KEY_MAX = 150
"""Characters of an item's key: it is part of every position in it."""

WORKERS_MAX = 1_000
"""Each is a thread, or a task."""

RUN = "map"
"""The id of the run that a batch is. An agent has one batch: called again it goes on, with more items if there are."""

OnError = Literal["collect", "raise"]


class Item(Run):
    """The execution of one item: a part of the batch's run, with no state of its own."""

    owns_state = False

    def __init__(self, host: AgentHost, past: Past, this: RunPast, path: str, *, strict: bool) -> None:
        super().__init__(host, past, this, strict=strict)
        self.lane = Lane(self, f"{path}/", label=f"{this.begin.function} {path}")

    def looks(self, kind: str) -> bool:  # noqa: ARG002 - as it is for runs
        """The batch is cancelled, not an item that is under way."""
        return False

    def look(self) -> None:
        """As above."""

    def _point(self, lane: Lane, path: str, label: str, asked: str | None) -> Any:
        """It has no safe points, either. A tool that asks for a checkpoint is told so."""
        return self._checkpoint(lane, path, label) if asked == TOOL else None

    def _looking(self, path: str) -> Steps:  # noqa: ARG002 - as it is for runs
        yield from ()

    def _checkpoint(self, lane: Lane, path: str, label: str, **options: Any) -> Any:  # noqa: ARG002 - as for runs
        raise BadOption(
            "an item of a batch takes no checkpoint: the state is not its own",
            hint="What its tools return is recorded anyway. For work with a state, give the item an agent of its own.",
        )


class Batch:
    """One call of ``store.map``."""

    def __init__(
        self,
        host: AgentHost,
        function: Callable[..., Any],
        items: Iterable[Any],
        key: Callable[[Any], str] | None,
        workers: int,
        on_error: OnError,
    ) -> None:
        if on_error not in {"collect", "raise"}:
            raise BadOption(f"on_error={on_error!r}", hint='Use "collect" or "raise".')
        if not 1 <= workers <= WORKERS_MAX:
            raise BadOption(f"workers={workers}", hint=f"Use a number from 1 to {WORKERS_MAX}.")
        self.made, options = known(function), options_of(function)
        if options != Options(strict=options.strict):
            raise BadOption("an item of a batch has no options but strict; nothing was done")
        self._strict = self.made.strict if options.strict is None else options.strict
        self.host, self.workers, self.on_error = host, workers, on_error
        self.items = list(items)
        self.keys = keys_of(self.items, key)
        self.results: list[Any] = [None] * len(self.items)
        self.failed: BaseException | None = None  # what ends the batch
        self._first: Exception | None = None  # that an item raised; one in doubt before all others
        self._marks: list[bytes] = []
        self._past = Past()
        self._begin = rec.Begin(0, RUN, self.made.name, None, b"", kind="map")
        self._number = 0  # of the record with which the batch began
        self._parts: dict[str, RunPast] = {}  # what is recorded of each item, by its position
        self._left: Iterator[int] = iter(())
        self._whole: Run | None = None  # the run that the batch is, as far as it can be cancelled
        self._lock = threading.Lock()
        self._watch = watchers.UNWATCHED

    @contextmanager
    def watched(self) -> Iterator[Self]:
        """Inside, it is executed, and whoever watches is told."""
        with watchers.watching("run", self.host.name, self.host.branch_name, function=self.made.name) as self._watch:
            yield self

    # -- all of it --------------------------------------------------------------------------------------------

    def now(self) -> list[Any]:
        """Execute what is left, in threads."""
        if self.made.waits:
            raise BadOption(f"{self.made.name} is async", hint="Use `await store.amap(...)`.")
        drive(self._prepare())

        def work() -> None:
            try:
                with self._watch.inside():
                    while (at := self._next()) is not None:
                        self._note(at, lambda: drive(self._steps(at)))
            except BaseException as error:  # noqa: BLE001 - raised where the batch was begun
                self.failed = self.failed or error

        threads = [threading.Thread(target=work, name=f"map {number}") for number in range(self._wanted)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException as error:
            self.failed = error  # those under way are finished, no other begins
            for thread in threads:
                thread.join()
            raise
        return self._finished()

    async def later(self) -> list[Any]:
        """Execute what is left, in tasks."""
        import asyncio

        number_tasks(asyncio.get_running_loop())
        await drive_later(self._prepare())

        async def work() -> None:
            while (at := self._next()) is not None:
                try:
                    self.results[at] = await drive_later(self._steps(at))
                except Exception as error:  # noqa: BLE001 - it is that item's outcome
                    self._fail(at, error)

        tasks = [asyncio.ensure_future(work()) for _ in range(self._wanted)]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        return await Work(self._finished).later()  # type: ignore[no-any-return] # what a Work returns is not declared

    @property
    def _wanted(self) -> int:
        return min(self.workers, len(self.items))

    def _next(self) -> int | None:
        with self._lock:
            if self.failed is None:
                self._look()
            return next(self._left, None) if self.failed is None else None

    def _look(self) -> None:
        """Begin no item any more if somebody has cancelled the batch. Those under way are finished."""
        whole = self._whole
        stop = whole.look() if whole is not None and whole.looks("read") else None
        if whole is not None and stop is not None and whole.takes(stop):
            done = rec.Done(now_us(), RUN, "=stop", "stopped", tool=ITEM, kind="read", event=stop.event)
            done.fault = "", Cancelled.__name__, stop.why, None
            self.host.ledger.append(done, flush=True)
            self.failed = Cancelled(stop.why, by=stop.by)

    def _note(self, at: int, call: Callable[[], Any]) -> None:
        try:
            self.results[at] = call()
        except Exception as error:  # noqa: BLE001 - it is that item's outcome
            self._fail(at, error)
        except BaseException as error:  # noqa: BLE001 - raised where the batch was begun
            self.failed = error

    def _fail(self, at: int, error: Exception) -> None:
        if isinstance(error, LEDGER):
            self.failed = self.failed or error
            return
        self.results[at] = error
        if self._first is None or (isinstance(error, InDoubt) and not isinstance(self._first, InDoubt)):
            self._first = error
        if self.on_error == "raise":
            self.failed = self.failed or error

    def _finished(self) -> list[Any]:
        """The batch has ended: one that was interrupted has not."""
        if self.failed is None or (
            isinstance(self.failed, Exception | Cancelled) and not isinstance(self.failed, LEDGER)
        ):
            end = rec.End(now_us(), RUN, "finished")
            if isinstance(self.failed, Cancelled) and not isinstance(self._first, InDoubt):
                end.how, end.fault, end.by = "cancelled", self._fault(self.failed), self.failed.by
            elif self._first is not None:
                end.how, end.fault = (
                    "attention" if isinstance(self._first, InDoubt) else "failed",
                    self._fault(self._first),
                )
            self.host.ledger.append(end, flush=True)
            self._watch.tell(status=end.how)
            self.host.whole = end.how != "attention"
        if self.failed is not None:
            raise self.failed
        return self.results

    def _fault(self, error: BaseException) -> rec.Fault:
        message = scrub(self.host, said(error)[:MESSAGE_MAX], f"an error of {self.made.name}")
        return "", type(error).__qualname__, message, None

    # -- what is left -----------------------------------------------------------------------------------------

    def _prepare(self) -> Steps:
        """Read what is recorded, and refuse what does not fit to it before anything is done."""
        host = self.host
        registry, name = host.registry, self.made.name
        for item in self.items:
            refuse(host, f"an item of {name}", {"item": item}, host.registry)
            self._marks.append(fingerprint({"function": name, "arguments": {"item": item}}, registry))
        yield from resuming(host)
        past = self._past = yield Work(lambda: Past(host.ledger.records()))  # it may have ended, and is asked again
        owner = past.owner(host.origin)
        if owner is not None and owner.id != RUN:
            raise unfinished(host, owner)
        host.loop.read(past)
        this = past.runs.get(RUN)
        if this is not None and this.status == "cancelled":
            unclaimed = {call.number for call in host.loop.unclaimed}
            if any(call.number not in unclaimed for call in this.left() if call.outcome is not None):
                this = None  # something else was answered with what it had done, or somebody has accepted that
        self._parts = this.parts() if this is not None else {}
        for key, mark in zip(self.keys, self._marks, strict=True):
            done = self._done(place(key))
            if (this is not None and (this.begin.kind, this.begin.function) != ("map", name)) or (
                done is not None and done.fingerprint != mark
            ):
                raise BadOption(
                    f"{host.name} has an item {key!r}, with other content or another function; nothing was done",
                    hint="Use another name= for another batch, or key= to say what identifies an item.",
                )
        yield from host.loop.settling()
        host.loop.check_settled()
        host.whole = False
        if this is None:
            self._begin.at = now_us()
            yield Work(host.begin(self._begin, Stowed(None, {}, {}), past))
            self._number = host.ledger.count
        else:
            self._begin, self._number = this.begin, this.number
            left = this.status == "cancelled"
            if left:
                yield Work(host.loop.note)
            host.ledger.append(this.resumed(now_us()))
            if left:  # that is its own again
                host.loop.restart(host.ledger.count)
        traced(host, this or RunPast(self._number, self._begin), self._watch, resumed=this is not None)
        self._whole = Run(host, past, RunPast(self._number, self._begin), strict=False)
        self._left = iter(range(len(self.items)))

    def _done(self, path: str) -> rec.Done | None:
        """The outcome of an item that has finished."""
        part = self._parts.get(path)
        done = part.calls[path].done if part is not None and path in part.calls else None
        return done if done is not None and done.how == "value" else None

    def _steps(self, at: int) -> Steps:
        host, item, path = self.host, self.items[at], place(self.keys[at])
        registry, started = host.registry, now_us()
        found = self._done(path)
        if found is not None:
            if isinstance(found.value, int):
                raise not_there(found.value, f"what item {self.keys[at]} of {host.name} returned", path=path)
            return fetch(found.value, host.ledger, registry)
        this = self._parts.get(path) or RunPast(self._number, self._begin)
        this.forget_failure(path)
        check_whole(this)
        run = Item(host, self._past, this, path, strict=self._strict)
        given = stow({"item": item}, registry)
        done = rec.Done(0, RUN, path, "value", tool=ITEM, kind="read", fingerprint=self._marks[at], started=started)
        done.args = given.value
        try:
            left = yield from settle_all(run, this.open_calls(), TOOLS.find)
            if left:
                run.unsettled = left
                raise in_doubt(run, left)
            result = yield from waiting.body(run, Body(run, self.made.name, partial(self.made.function, item)))
            run.check_settled()
            run.check_reached()
            kept = stow(scrub(host, result, f"the result of {self.made.name}"), registry)
            done.at, done.value = now_us(), kept.value
            run.gather(done, Stowed(None, {**given.nodes, **kept.nodes}, {**given.chunks, **kept.chunks}))
            return fetch(kept.value, host.ledger, registry)
        except (InDoubt, *LEDGER):
            raise
        except Exception as error:
            if run.broken is not None:
                raise run.broken from error
            done.at, done.how, done.fault = now_us(), "error", self._fault(error)
            run.gather(done, given)
            raise
        finally:
            run.ended = True


def place(key: str) -> str:
    """The position of an item in its batch."""
    return f"{safe(key)}:0"


def keys_of(items: list[Any], key: Callable[[Any], str] | None) -> list[str]:
    """What identifies each item: what ``key`` says, or its number."""
    keys: list[Any] = [str(number) for number in range(len(items))] if key is None else [key(item) for item in items]
    seen: set[str] = set()
    for one in keys:
        if not isinstance(one, str) or not 0 < len(one) <= KEY_MAX:
            raise BadName(f"an item's key is a text of 1 to {KEY_MAX} characters, not {one!r:.80}")
        if one in seen:
            raise BadOption(f"two items have the key {one!r}; nothing was done")
        seen.add(one)
    return keys
