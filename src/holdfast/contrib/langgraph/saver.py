"""The saver: LangGraph's checkpointer interface over a Holdfast store.

Owns the translation of LangGraph's calls, how long one waits for another process, and the workers in which the async
forms do the same as the others. How a thread is written is ``thread``'s business, how it is read ``tuples``'s. What
always holds: ``put`` and ``put_writes`` return when the disk has it; reading blocks nobody and waits for nobody; an
event loop waits neither for the disk nor for another process.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, contextmanager
from functools import partial, wraps
from heapq import merge
from itertools import islice
from types import FrameType
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, Self, TypeVar

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    DeltaChannelHistory,
    get_checkpoint_metadata,
)

from holdfast.agent.names import check_name
from holdfast.agent.store import Store
from holdfast.codec.assigned import Known
from holdfast.codec.values import encode
from holdfast.contrib.langgraph import removal, tools
from holdfast.contrib.langgraph.thread import Thread, writes_said
from holdfast.contrib.langgraph.tuples import Reader, agent_of, config_of
from holdfast.contrib.langgraph.types import allow, registry_for
from holdfast.errors import AgentBusy, BadName, BadOption, Unencodable
from holdfast.run import scope
from holdfast.run.effects import Effect
from holdfast.store.keys import Key
from holdfast.store.leases import POLL_S
from holdfast.travel.handle import open_store

# Threads whose states stay in memory after their runs, so that the next turn need not load them.
THREADS_KEPT = 64
# Threads that do the work of async calls. They are made when they are needed: the event loop's may all be busy, with
# tasks that wait for these.
_WORKERS = 64
# The methods in which LangGraph enters a loop, and how many frames are at most between one of these and the saver:
# a replay looks for its state, a checkpointer is wrapped in another.
_ENTERING = {"__enter__", "__aenter__"}
_DEEP = 12
# How long an async run waits at least for another one of its thread in this process: a stream that was let go ends when
# the event loop comes to it.
_ENDING_S = 1.0
_UPDATING = {"perform_superstep", "aperform_superstep"}

P = ParamSpec("P")
T = TypeVar("T")


def _forms(
    call: Callable[Concatenate[HoldfastSaver, P], T],
) -> tuple[Callable[Concatenate[HoldfastSaver, P], T], Callable[Concatenate[HoldfastSaver, P], Any]]:
    """The two forms of a method: one that waits for another process, if it may, and the same in a worker."""

    @wraps(call)
    def patient(self: HoldfastSaver, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._wait(partial(call, self, *args, **kwargs))

    @wraps(call)
    async def aside(self: HoldfastSaver, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._aside(partial(call, self, *args, **kwargs))

    name = call.__name__.removeprefix("_")
    patient.__name__, aside.__name__ = name, f"a{name}"
    return patient, aside


class HoldfastSaver(BaseCheckpointSaver[Any]):
    """Keeps LangGraph threads in a Holdfast store: each thread is an agent, each namespace one of its branches.

    ``store`` is a path, an open store, or None for the one that ``holdfast.open()`` finds. ``types`` names the graph,
    classes or modules whose classes the threads may hold, besides those that are found without: LangGraph's and
    LangChain's own, and data classes that the program has loaded. With ``strict=False`` an instance of any other class
    is read as a record of its fields, and stored again as it was. ``wait_s`` is how long a run waits for another
    process that is writing the same thread before it gives up with ``AgentBusy``. ``left="accept"``: what tools have
    done in nodes that did not finish counts as known with each new input, and stops no other call; for tools that are
    harmless to repeat. ``key`` opens an encrypted store, as in ``holdfast.open()``.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | Store | None = None,
        *,
        types: Any = (),
        strict: bool = True,
        wait_s: float = 0.0,
        durability: Literal["commit", "batched"] = "commit",
        left: Literal["ask", "accept"] = "ask",
        key: Key = None,
    ) -> None:
        super().__init__()
        if left not in {"ask", "accept"}:
            raise BadOption(f"left={left!r}", hint="Use ask or accept.")
        self.left = left
        self._own = not isinstance(store, Store)
        self.store: Store = store if isinstance(store, Store) else open_store(store, durability=durability, key=key)
        self._registry = registry_for(self.store._registry, types)
        self._strict = strict
        self._wait_s = wait_s
        self._evidence = Known()  # what the objects that went in and out are encoded to
        self._threads: dict[str, Thread] = {}
        self._lock = threading.RLock()
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="holdfast-langgraph")

    # -- its life -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of every thread, and of the store if it was opened here."""
        with self._lock:
            threads = list(self._threads.values())
            self._threads.clear()
        self._workers.shutdown()
        for thread in threads:
            thread.release()
        if self._own:
            self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await asyncio.to_thread(self.close)

    def with_allowlist(self, extra_allowlist: Collection[tuple[str, ...]]) -> HoldfastSaver:
        """This saver itself, which knows these types too from then on, as far as the program has imported them.

        LangGraph calls it with the types of a graph's own state where LANGGRAPH_STRICT_MSGPACK is set, and only there;
        ``HoldfastSaver(types=[...])`` does not depend on that.
        """
        allow(self._registry, extra_allowlist)
        return self

    def get_next_version(self, current: Any, channel: None) -> Any:  # noqa: ARG002 - the interface has it
        """Whole numbers; threads that came from savers with versions in text go on with text."""
        if isinstance(current, str):
            number = int(current.split(".")[0]) + 1
            return f"{number:032}.{random.random():016}"  # noqa: S311 - as the savers that began it
        return 1 if current is None else int(current) + 1

    # -- writing --------------------------------------------------------------------------------------------

    def _put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
        update: Update | None,
        run: tools.Run | None,
    ) -> RunnableConfig:
        """Save a checkpoint, for a run, or for somebody who updates the state."""
        conf = config["configurable"]
        ns, parent = conf.get("checkpoint_ns", ""), conf.get("checkpoint_id") or None
        described = get_checkpoint_metadata(config, metadata)
        with self._at_work(conf["thread_id"]) as thread, tools.storing(thread, run, updates=update is not None):
            running = belongs_to_run(conf)
            source, settled = metadata.get("source", ""), update.nodes if update is not None else ()
            if update is not None and not update.named and thread.tools is not None:
                thread.check_at(ns, parent)
            around = partial(tools.saving, thread, checkpoint=checkpoint["id"], source=source, settled=settled, run=run)
            thread.save(ns, parent, checkpoint, described, new_versions, running=running, around=around)
        return config_of(thread.name, ns, checkpoint["id"])

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Save a checkpoint. On disk when it returns; writes only what changed."""
        run = run_in(config)
        update = updating() if run is None else None
        return self._wait(partial(self._put, config, checkpoint, metadata, new_versions, update, run))

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """As put()."""
        run = run_in(config)  # it may have ended when a worker comes to this
        update = updating() if run is None else None
        return await self._aside(partial(self._put, config, checkpoint, metadata, new_versions, update, run))

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Save what a task wrote. On disk when it returns, with the flush of a checkpoint where one is on its way."""
        run = run_in(config)
        updates = run is None and updating() is not None
        self._wait(partial(self._put_writes, config, writes, task_id, task_path, run, updates=updates))

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """As put_writes()."""
        run = run_in(config)
        updates = run is None and updating() is not None
        await self._aside(partial(self._put_writes, config, writes, task_id, task_path, run, updates=updates))

    def _put_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str,
        run: tools.Run | None,
        *,
        updates: bool,
    ) -> None:
        event = self._event(config, writes, task_id, task_path)
        with self._at_work(config["configurable"]["thread_id"]) as thread:
            if run is not None and run.is_moot(channel for channel, _ in writes):
                return
            with tools.storing(thread, run, updates=updates):
                channels = [channel for channel, _ in writes]
                share = run is not None and not any(one in WRITES_IDX_MAP or one in run.awaited for one in channels)
                ns = config["configurable"].get("checkpoint_ns", "")
                thread.become_writer()
                thread.wait(thread.queue(event), share=share)
                if thread.tools is not None:
                    thread.tools.told(ns, str(config["configurable"]["checkpoint_id"]), task_id, channels)

    def _event(self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str) -> Any:
        conf = config["configurable"]
        encoded = []
        for index, (channel, value) in enumerate(writes):
            try:
                encoded.append((WRITES_IDX_MAP.get(channel, index), channel, encode(value, self._registry)))
            except Unencodable as error:
                raise error.within(channel) from None
        replace = all(channel in WRITES_IDX_MAP for channel, _ in writes)
        ns, name = conf.get("checkpoint_ns", ""), str(conf["checkpoint_id"])
        return writes_said(ns, name, encoded, task_id, task_path, replace=replace)

    # -- reading --------------------------------------------------------------------------------------------

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """One checkpoint: the one that the config names, or where the thread stands."""
        with self._begun(config) as run:
            return self._wait(partial(self._read, run, config, updates=run is None and updating() is not None))

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """As get_tuple()."""
        with self._begun(config) as run:
            ending = run is not None and run.calls.must_wait()
            reading = partial(self._read, run, config, updates=run is None and updating() is not None)
            return await self._aside(reading, _ENDING_S if ending else 0.0)

    @contextmanager
    def _begun(self, config: RunnableConfig) -> Iterator[Run | None]:
        """The run that begins with this reading, if one does."""
        conf = config["configurable"]
        loop = loop_of_caller() if belongs_to_run(conf) else None
        run = Run(self, *self._enter(conf["thread_id"]), loop) if loop is not None else None
        try:
            yield run
        except BaseException:
            if run is not None:
                run.end()
            raise

    def _read(self, run: Run | None, config: RunnableConfig, *, updates: bool) -> CheckpointTuple | None:
        """A run becomes the writer before it reads, so that nobody goes on with the thread in between, and stays it."""
        if updates:  # of what a run is about to leave behind
            tools.check_at_rest(self._known(str(config["configurable"]["thread_id"])))
        if run is not None:
            with run.thread.working():  # the run itself may have ended meanwhile
                run.thread.begin(config["configurable"].get("checkpoint_ns", ""))
                run.calls.take_turn()
        return self._tuple(config, run)

    def _tuple(self, config: RunnableConfig, run: Run | None) -> CheckpointTuple | None:
        conf = config["configurable"]
        reader = Reader.of(self, str(conf["thread_id"]), conf.get("checkpoint_ns", ""), running=run is not None)
        if reader is None:
            return None
        name = conf.get("checkpoint_id")
        found = reader.newest() if not name else None
        row = reader.find(name) if found is None else None
        thread = self._looked(reader)
        if found is None and row is not None:
            found = reader.tuple_at(row)
        if found is None:
            return None
        if run is not None:
            run.calls.stands_at(reader.ns, found.checkpoint["id"], named=bool(name))
        if row is None or not name:
            return found
        thread.chosen(reader.ns, row.n)
        if run is not None:
            run.calls.older = row.n != reader.branch.head
        return found._replace(config=config)

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """Checkpoints, newest first: of a namespace, of a thread, or of all threads."""
        if limit is not None and limit < 1:
            return
        conf = config["configurable"] if config is not None else {}
        start = (before or {}).get("configurable", {}).get("checkpoint_id")
        only = conf.get("checkpoint_id") or None
        streams = (reader.tuples(start, filter, only, limit) for reader in self._readers(config))
        yield from islice(merge(*streams, key=lambda found: str(found.checkpoint["id"]), reverse=True), limit)

    async def alist(self, config: RunnableConfig | None, **options: Any) -> AsyncIterator[CheckpointTuple]:
        """As list()."""
        found = self.list(config, **options)
        while (one := await self._aside(partial(next, found, None))) is not None:
            yield one

    def _readers(self, config: RunnableConfig | None) -> Sequence[Reader]:
        if config is None:
            return [reader for name in self._names() for reader in Reader.all_of(self, name)]
        conf = config["configurable"]
        thread, ns = str(conf["thread_id"]), conf.get("checkpoint_ns")
        if ns is None:
            readers = Reader.all_of(self, thread)
        else:
            reader = Reader.of(self, thread, ns)
            readers = [reader] if reader is not None else []
        for reader in readers:
            self._looked(reader)
        return readers

    def _names(self) -> Sequence[str]:
        return [row.name for row in self.store._agents()]

    def _get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """What was written to delta channels since they were last stored whole, read in one walk back."""
        conf = config["configurable"]
        reader = Reader.of(self, str(conf["thread_id"]), conf.get("checkpoint_ns", "")) if channels else None
        row = reader.find(conf.get("checkpoint_id")) if reader is not None else None
        if reader is None or row is None:
            return {channel: {"writes": []} for channel in channels}
        return reader.deltas(row, channels)

    get_delta_channel_history, aget_delta_channel_history = _forms(_get_delta_channel_history)

    # -- what tools have done ---------------------------------------------------------------------------------

    def _accept(self, thread_id: str) -> Sequence[Effect]:
        """Say that what tools have done in nodes that did not finish is known: it answers no call, and stops none.

        Returns it. What is in doubt stays so: ``holdfast effects resolve`` is for that.
        """
        row = agent_of(self.store, str(thread_id))
        if row is None:
            raise BadName(f"there is no thread {thread_id!r}")
        with self._at_work(thread_id) as thread:
            thread.become_writer()
            loop = tools.loop_of(thread)
            return [loop.effect_of(call) for call in loop.accept()]

    accept, aaccept = _forms(_accept)

    # -- removing and copying -------------------------------------------------------------------------------

    def _delete_thread(self, thread_id: str) -> None:
        """Remove a thread with everything in it: checkpoints, writes, tags, branches. ``BadName``: it is no thread."""
        removal.remove(self, str(thread_id))

    delete_thread, adelete_thread = _forms(_delete_thread)

    def _delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Remove the checkpoints that these runs made, in all threads.

        What delta channels still need is kept, and so is what people have tagged and where branches of theirs stand.
        """
        if run_ids:
            removal.delete_for_runs(self, set(map(str, run_ids)), self._names())

    delete_for_runs, adelete_for_runs = _forms(_delete_for_runs)

    def _copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Begin a thread with the whole history of another. No checkpoint is copied: both see the same.

        The copy knows all that tools have done in the original until then, also in nodes that did not finish: the same
        call is answered there too, and not made again.
        """
        source = check_name(str(source_thread_id), "an agent")
        removal.check_thread(self, self.store._agent_row(source))
        self.store.copy(source, str(target_thread_id))

    copy_thread, acopy_thread = _forms(_copy_thread)

    def _prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Keep only the newest checkpoint of each namespace, or (``delete``) nothing. Safe for delta channels.

        With the newest ones stays what people have tagged, where branches of theirs stand, and what a copy of the
        thread sees that is not pruned with it.
        """
        if strategy not in {"keep_latest", "delete"}:
            raise BadOption(f"prune strategy {strategy!r}", hint="Use keep_latest or delete.")
        names = list(map(str, thread_ids))
        if strategy == "keep_latest":
            removal.keep_latest(self, names)
        else:
            for name in names:
                removal.remove(self, name)

    prune, aprune = _forms(_prune)

    # -- threads that this process writes -------------------------------------------------------------------

    def _known(self, name: str) -> Thread:
        with self._lock:
            thread = self._threads.get(name)
            if thread is None:
                thread = self._threads[name] = Thread(
                    self.store, self._registry, name, aside=self._workers.submit, known=self._evidence
                )
                idle = [old for old, thread in self._threads.items() if thread.idle and old != name]
                for old in idle[: max(0, len(self._threads) - THREADS_KEPT)]:
                    self._threads.pop(old).release()
            return thread

    def _enter(self, thread_id: Any) -> tuple[Thread, object]:
        """A thread, and what to leave it with: until then it is this process's own, once it has become its writer."""
        with self._lock:
            thread = self._known(str(thread_id))
            return thread, thread.enter()

    def _at_work(self, thread_id: Any) -> AbstractContextManager[Thread]:
        with self._lock:  # it is not let go before somebody is at work on it
            return self._known(str(thread_id)).working()

    def _looked(self, reader: Reader) -> Thread:
        """Remember where this process saw a thread stand, so that it notices when another has gone on with it."""
        thread = self._known(reader.thread)
        thread.looked(reader.ns, reader.branch.head)
        return thread

    # -- waiting --------------------------------------------------------------------------------------------

    def _wait(self, call: Callable[[], T]) -> T:
        """Do something as soon as no other process writes the thread, within the time that was given for it."""
        until: float | None = None
        while True:
            try:
                return call()
            except AgentBusy:
                until = until if until is not None else time.monotonic() + self._wait_s
                if time.monotonic() >= until:
                    raise
            time.sleep(POLL_S)

    async def _aside(self, call: Callable[[], T], least_s: float = 0.0) -> T:
        """As _wait(), in a worker, which is not kept by waiting. What has begun is done, also when it is cancelled."""
        until: float | None = None
        while True:
            try:
                done = self._workers.submit(call)
            except RuntimeError:  # closed; what can be said about that, the call says
                return call()
            try:
                return await asyncio.shield(asyncio.wrap_future(done))
            except AgentBusy:
                until = until if until is not None else time.monotonic() + max(self._wait_s, least_s)
                if time.monotonic() >= until:
                    raise
            await asyncio.sleep(POLL_S)


# -- runs ------------------------------------------------------------------------------------------------------


def belongs_to_run(configurable: Mapping[str, Any]) -> bool:
    """Whether LangGraph asks for the sake of a run; what people ask for themselves it passes on without this."""
    return tools.RUNTIME in configurable


def run_in(config: RunnableConfig) -> tools.Run | None:
    """The outermost run for which LangGraph stores something."""
    return tools.run_of(config["configurable"].get(tools.RUNTIME))


def loop_of_caller() -> Any:
    """LangGraph's loop that is being entered, when this is called by its entering; otherwise None."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_DEEP):
        if frame is None:
            return None
        if frame.f_code.co_name in _ENTERING:
            loop = frame.f_locals.get("self")
            if hasattr(loop, "checkpointer") and isinstance(getattr(loop, "stack", None), ExitStack | AsyncExitStack):
                return loop
        frame = frame.f_back
    return None


class Update(NamedTuple):
    """What somebody updates the state with: in the names of which nodes, and whether he named the checkpoint."""

    nodes: Collection[str]
    named: bool


def updating() -> Update | None:
    """What ``update_state`` was told, when this is called for it."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_DEEP):
        if frame is None:
            break
        if frame.f_code.co_name in _UPDATING:
            told = frame.f_locals
            named = told.get("input_config", {}).get("configurable", {}).get("checkpoint_id")
            return Update({as_node for _, as_node, *_ in told.get("updates", ()) if as_node}, bool(named))
        frame = frame.f_back
    return None


class Run(BaseCallbackHandler):
    """One run at work on a thread.

    LangGraph does not tell a checkpointer that a run is over: by its end, an interrupt, an error, or because it was
    cancelled. But a run reads its thread while its loop is being entered, and the loop has a stack of what is to be
    done when it is left, in which what was put first is done last: after the last checkpoint is saved. A loop whose
    input is refused is never entered, and so never left; then the run's callbacks are told.
    """

    run_inline = True

    def __init__(self, saver: HoldfastSaver, thread: Thread, user: object, loop: Any) -> None:
        self.thread = thread
        self._user: object | None = user
        self.calls = tools.Run(saver, thread, loop)
        loop.stack.callback(self.end)
        handlers = getattr(getattr(loop, "manager", None), "handlers", None)  # of this run alone
        if isinstance(handlers, list):
            handlers.append(self)

    def on_chain_error(self, error: BaseException, **_more: Any) -> None:  # noqa: ARG002 - the interface has it
        self.end()

    def end(self) -> None:
        user, self._user = self._user, None
        if user is not None:
            self.calls.end()
            self.thread.leave(user)

    def __del__(self) -> None:
        # Its event loop may have ended before it did.
        user, self._user = self._user, None
        if user is not None:
            self.calls.end(lost=True)
            self.thread.leave(user, lost=True)


scope.find_by(tools.find)
