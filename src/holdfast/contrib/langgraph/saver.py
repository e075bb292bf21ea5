"""The saver: LangGraph's checkpointer interface over a Holdfast store.

Owns the translation of LangGraph's calls, sync and async, and how long this process stays a thread's writer. How a
thread is written is ``thread``'s business, how it is read ``tuples``'s. What always holds: ``put`` and ``put_writes``
return when the disk has it; reading blocks nobody and waits for nobody.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

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
from holdfast.contrib.langgraph import removal
from holdfast.contrib.langgraph.lease import Run, belongs_to_run, loop_of_caller
from holdfast.contrib.langgraph.thread import Thread, writes_event
from holdfast.contrib.langgraph.tuples import Reader, merged
from holdfast.contrib.langgraph.types import allow, registry_for
from holdfast.errors import AgentBusy, BadOption, Unencodable
from holdfast.run.store import open_store
from holdfast.store.bodies import body_of
from holdfast.store.keysources import Key
from holdfast.store.locks import LEASE_POLL_S

# Threads whose states stay in memory after their runs, so that the next turn need not load them.
THREADS_KEPT = 64
_READERS = 4

T = TypeVar("T")


class HoldfastSaver(BaseCheckpointSaver[Any]):
    """Keeps LangGraph threads in a Holdfast store: each thread is an agent, each namespace one of its branches.

    ``store`` is a path, an open store, or None for the one that ``holdfast.open()`` finds. ``types`` names the graph,
    classes or modules whose classes the threads may hold, besides those that are found without: LangGraph's and
    LangChain's own, and data classes that the program has loaded. With ``strict=False`` an instance of any other class
    is read as a record of its fields, and stored again as it was. ``wait_s`` is how long a run waits for another
    process that is writing the same thread before it gives up with ``AgentBusy``. ``key`` opens an encrypted store, as
    in ``holdfast.open()``.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | Store | None = None,
        *,
        types: Any = (),
        strict: bool = True,
        wait_s: float = 0.0,
        durability: Literal["commit", "batched"] = "commit",
        key: Key = None,
    ) -> None:
        super().__init__()
        self._own = not isinstance(store, Store)
        self.store: Store = store if isinstance(store, Store) else open_store(store, durability=durability, key=key)
        self._registry = registry_for(self.store._registry, types)
        self._strict = strict
        self._wait_s = wait_s
        self._evidence = Known()  # what the objects that went in and out are encoded to
        self._threads: dict[str, Thread] = {}
        self._lock = threading.Lock()
        # Workers of its own for the disk: the event loop's may all be busy, with tasks that wait for these.
        self._disk = ThreadPoolExecutor(2, thread_name_prefix="holdfast-langgraph")
        self._looking = ThreadPoolExecutor(_READERS, thread_name_prefix="holdfast-langgraph-read")

    # -- its life -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of every thread, and of the store if it was opened here."""
        with self._lock:
            threads = list(self._threads.values())
            self._threads.clear()
        self._disk.shutdown()
        self._looking.shutdown()
        for thread in threads:
            thread.release()
        if self._own:
            self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await _alone(self.close)

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

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Save a checkpoint. On disk when it returns; writes only what changed."""
        thread, user = self._enter(config["configurable"]["thread_id"])
        try:
            thread.ready()
            thread.finish(*self._capture(thread, config, checkpoint, metadata, new_versions))
        finally:
            thread.leave(user)
        return _config(thread.name, config, checkpoint["id"])

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """As put(). The content is fixed in one piece; the event loop never waits for the disk."""
        thread, user = self._enter(config["configurable"]["thread_id"])
        try:
            conf = config["configurable"]
            where = conf.get("checkpoint_ns", ""), conf.get("checkpoint_id") or None
            if not thread.standing(*where):
                await self._as_writer(thread, partial(thread.prepare, *where, running=belongs_to_run(conf)))
            done = self._disk.submit(thread.finish, *self._capture(thread, config, checkpoint, metadata, new_versions))
        except BaseException:
            thread.leave(user)
            raise
        done.add_done_callback(lambda _: thread.leave(user))  # also when nobody waits for it any more
        await asyncio.shield(asyncio.wrap_future(done))
        return _config(thread.name, config, checkpoint["id"])

    def _capture(
        self,
        thread: Thread,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> Any:
        conf = config["configurable"]
        parent = conf.get("checkpoint_id") or None
        described = get_checkpoint_metadata(config, metadata)
        ns, running = conf.get("checkpoint_ns", ""), belongs_to_run(conf)
        return thread.capture(ns, parent, checkpoint, described, new_versions, running=running)

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Save what a task wrote. On disk when it returns, with the flush of a checkpoint where one is on its way."""
        event = self._event(config, writes, task_id, task_path)
        thread, user = self._enter(config["configurable"]["thread_id"])
        try:
            thread.ready()
            thread.wait(thread.queue(event))
        finally:
            thread.leave(user)

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """As put_writes()."""
        event = self._event(config, writes, task_id, task_path)
        thread, user = self._enter(config["configurable"]["thread_id"])
        try:
            if not thread.held:
                await self._as_writer(thread, thread.ready)
            queued = thread.queue(event)
            await asyncio.wait([asyncio.wrap_future(queued.done)], timeout=thread.patience_s)
            if not queued.done.done():
                self._disk.submit(thread.flush, queued)
            await asyncio.shield(asyncio.wrap_future(queued.done))
        finally:
            thread.leave(user)

    def _event(self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str) -> Any:
        conf = config["configurable"]
        encoded = [
            (WRITES_IDX_MAP.get(channel, index), channel, self._encode(channel, value))
            for index, (channel, value) in enumerate(writes)
        ]
        replace = all(channel in WRITES_IDX_MAP for channel, _ in writes)
        ns, name = conf.get("checkpoint_ns", ""), str(conf["checkpoint_id"])
        return writes_event(ns, name, encoded, task_id, task_path, replace=replace)

    def _encode(self, channel: str, value: Any) -> bytes:
        try:
            return encode(value, self._registry)
        except Unencodable as error:
            raise error.within(channel) from None

    # -- reading --------------------------------------------------------------------------------------------

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """One checkpoint: the one that the config names, or where the thread stands."""
        run = self._begun(config)
        if run is None:
            return self._tuple(config)
        try:
            run.thread.begin(config["configurable"].get("checkpoint_ns", ""))
            return self._tuple(config)
        except BaseException:
            run.end()
            raise

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """As get_tuple()."""
        run = self._begun(config)
        if run is None:
            return await self._beside(self._tuple, config)
        try:
            begin = partial(run.thread.begin, config["configurable"].get("checkpoint_ns", ""))
            await self._as_writer(run.thread, begin)
            return await self._beside(self._tuple, config)
        except BaseException:
            run.end()
            raise

    def _begun(self, config: RunnableConfig) -> Run | None:
        """The run that begins with this reading, if one does.

        It becomes the thread's writer before it reads, so that nobody goes on with the thread in between, and stays it
        until it has ended.
        """
        conf = config["configurable"]
        loop = loop_of_caller() if belongs_to_run(conf) else None
        return Run(*self._enter(conf["thread_id"]), loop) if loop is not None else None

    def _tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        conf = config["configurable"]
        reader = self._reader(config)
        if reader is None:
            return None
        name = conf.get("checkpoint_id")
        row = reader.find(name)
        thread = self._looked(reader)
        if row is None:
            return None
        if not name:
            return reader.tuple_at(row)
        thread.chosen(reader.ns, row.n)
        return reader.tuple_at(row)._replace(config=config)

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
        streams = merged(self._readers(config), lambda reader: reader.tuples(start, filter, only, limit))
        for count, found in enumerate(streams, 1):
            yield found
            if count == limit:
                return

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """As list()."""
        found = self.list(config, filter=filter, before=before, limit=limit)
        while (one := await self._beside(next, found, None)) is not None:
            yield one

    def _reader(self, config: RunnableConfig) -> Reader | None:
        conf = config["configurable"]
        self._settle()
        return Reader.of(self, str(conf["thread_id"]), conf.get("checkpoint_ns", ""))

    def _settle(self) -> None:
        """What this process has put in batches is read only when it is there."""
        if self.store._durability == "batched":
            self.store.flush()

    def _readers(self, config: RunnableConfig | None) -> Sequence[Reader]:
        self._settle()
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
        return [str(body_of(row)["name"]) for row in self.store._agents()]

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """What was written to delta channels since they were last stored whole, read in one walk back."""
        conf = config["configurable"]
        nothing: dict[str, DeltaChannelHistory] = {channel: {"writes": []} for channel in channels}
        if not channels:
            return nothing
        reader = self._reader(config)
        row = reader.find(conf.get("checkpoint_id")) if reader is not None else None
        if reader is None or row is None:
            return nothing
        return reader.deltas(row, channels)  # type: ignore[return-value]

    async def aget_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """As get_delta_channel_history()."""
        return await self._beside(partial(self.get_delta_channel_history, config=config, channels=channels))

    # -- removing and copying -------------------------------------------------------------------------------

    def delete_thread(self, thread_id: str) -> None:
        """Remove a thread with everything in it: checkpoints, writes, tags, branches. ``BadName``: it is no thread."""
        removal.remove(self, str(thread_id))

    async def adelete_thread(self, thread_id: str) -> None:
        """As delete_thread()."""
        await _alone(self.delete_thread, thread_id)

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Remove the checkpoints that these runs made, in all threads.

        What delta channels still need is kept, and so is what people have tagged and where branches of theirs stand.
        """
        if run_ids:
            removal.delete_for_runs(self, set(map(str, run_ids)), self._names())

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """As delete_for_runs()."""
        await _alone(self.delete_for_runs, run_ids)

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Begin a thread with the whole history of another. No checkpoint is copied: both see the same."""
        source = check_name(str(source_thread_id), "an agent")
        removal.check_thread(self, self.store._agent_row(source))
        self.store.clone(source, str(target_thread_id))

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """As copy_thread()."""
        await _alone(self.copy_thread, source_thread_id, target_thread_id)

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Keep only the newest checkpoint of each namespace, or (``delete``) nothing. Safe for delta channels.

        With the newest ones stays what people have tagged, and where branches of theirs stand.
        """
        if strategy not in {"keep_latest", "delete"}:
            raise BadOption(f"prune strategy {strategy!r}", hint="Use keep_latest or delete.")
        for name in map(str, thread_ids):
            if strategy == "delete":
                self.delete_thread(name)
            else:
                removal.keep_latest(self, name)

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """As prune()."""
        await _alone(partial(self.prune, thread_ids, strategy=strategy))

    # -- threads that this process writes -------------------------------------------------------------------

    def _enter(self, thread_id: Any) -> tuple[Thread, object]:
        """A thread, and what to leave it with: until then it is this process's own, once it was ready."""
        with self._lock:
            thread = self._found(str(thread_id))
            return thread, thread.enter()

    def _known(self, name: str) -> Thread:
        with self._lock:
            return self._found(name)

    def _found(self, name: str) -> Thread:
        thread = self._threads.get(name)
        if thread is None:
            aside = self._disk.submit
            thread = self._threads[name] = Thread(
                self.store, self._registry, name, self._wait_s, aside=aside, known=self._evidence
            )
            idle = [name for name, thread in self._threads.items() if thread.idle]
            for old in idle[: max(0, len(self._threads) - THREADS_KEPT)]:
                if old != name:
                    del self._threads[old]
        return thread

    def _looked(self, reader: Reader) -> Thread:
        """Remember where this process saw a thread stand, so that it notices when another has gone on with it."""
        thread = self._known(reader.thread)
        thread.looked(reader.ns, reader.branch.head)
        return thread

    # -- beside the event loop ------------------------------------------------------------------------------

    async def _beside(self, call: Callable[..., T], *arguments: Any) -> T:
        """Read or write something short without keeping the event loop."""
        try:
            done = self._looking.submit(call, *arguments)
        except RuntimeError:  # closed; what can be said about that, the call says
            return await _alone(call, *arguments)
        return await asyncio.wrap_future(done)

    async def _as_writer(self, thread: Thread, call: Callable[[], object]) -> None:
        """Do something as a thread's writer. No worker is kept by waiting for another process."""
        until: float | None = None
        while True:
            try:
                await self._beside(thread.as_writer, call)
            except AgentBusy:
                until = until if until is not None else time.monotonic() + self._wait_s
                if time.monotonic() >= until:
                    raise
                await asyncio.sleep(LEASE_POLL_S)
            else:
                return


async def _alone(call: Callable[..., T], *arguments: Any) -> T:
    """Do something that may take long in a thread of its own."""
    worker = ThreadPoolExecutor(1, thread_name_prefix="holdfast-langgraph-once")
    try:
        return await asyncio.wrap_future(worker.submit(call, *arguments))
    finally:
        worker.shutdown(wait=False)


def _config(thread: str, config: RunnableConfig, checkpoint_id: str) -> RunnableConfig:
    ns = config["configurable"].get("checkpoint_ns", "")
    return {"configurable": {"thread_id": thread, "checkpoint_ns": ns, "checkpoint_id": checkpoint_id}}
