"""The saver: LangGraph's checkpointer interface over a Holdfast store.

Owns the translation of LangGraph's calls, sync and async, and how long this process stays a thread's writer. How a
thread is written is ``thread``'s business, how it is read ``reading``'s. What always holds: ``put`` and ``put_writes``
return when the disk has it; reading blocks nobody and waits for nobody.
"""

from __future__ import annotations

import asyncio
import heapq
import os
import random
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Literal, Self

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

from holdfast.agent.store import Store
from holdfast.codec.values import encode
from holdfast.contrib.langgraph import removal
from holdfast.contrib.langgraph.reading import Reader
from holdfast.contrib.langgraph.thread import Thread, writes_event
from holdfast.contrib.langgraph.types import allow, registry_for
from holdfast.errors import BadOption, Unencodable
from holdfast.run.store import open_store
from holdfast.store.keysources import Key

# How often a thread that this process writes is looked at: has its run ended, so that others may write it?
WATCH_S = 0.05
# Without LangGraph's own object for a run there is nothing to look at; the lease then outlives the last write by this.
IDLE_S = 1.0
# Threads whose states stay in memory after their runs, so that the next turn need not load them.
THREADS_KEPT = 64
_RUNTIME = "__pregel_runtime"


class HoldfastSaver(BaseCheckpointSaver[Any]):
    """Keeps LangGraph threads in a Holdfast store: each thread is an agent, each namespace one of its branches.

    ``store`` is a path, an open store, or None for the one that ``holdfast.open()`` finds. ``types`` names modules or
    classes that may be stored besides LangGraph's and LangChain's own. ``wait_s`` is how long a run waits for another
    process that is writing the same thread before it gives up with ``AgentBusy``. ``key`` opens an encrypted store, as
    in ``holdfast.open()``.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | Store | None = None,
        *,
        types: Sequence[Any] = (),
        wait_s: float = 0.0,
        durability: Literal["commit", "batched"] = "commit",
        key: Key = None,
    ) -> None:
        super().__init__()
        self._own = not isinstance(store, Store)
        self.store: Store = store if isinstance(store, Store) else open_store(store, durability=durability, key=key)
        self._registry = registry_for(self.store._registry, types)
        self._wait_s = wait_s
        self._threads: dict[str, Thread] = {}
        self._lock = threading.Lock()
        self._watcher: list[threading.Thread] = []
        # Workers of its own for the disk: the event loop's may all be busy, with tasks that wait for these.
        self._disk = ThreadPoolExecutor(2, thread_name_prefix="holdfast-langgraph")

    # -- its life -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of every thread, and of the store if it was opened here."""
        with self._lock:
            threads = list(self._threads.values())
            self._threads.clear()
        self._disk.shutdown()
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
        await asyncio.to_thread(self.close)

    def with_allowlist(self, extra_allowlist: Collection[tuple[str, ...]]) -> HoldfastSaver:
        """This saver, knowing these types too. LangGraph calls it with the types of a graph's own state."""
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
        new_versions: ChannelVersions,  # noqa: ARG002 - what changed is found out by comparing
    ) -> RunnableConfig:
        """Save a checkpoint. On disk when it returns; writes only what changed."""
        thread = self._thread(config)
        thread.finish(*self._capture(thread, config, checkpoint, metadata))
        return _config(thread.name, config, checkpoint["id"])

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,  # noqa: ARG002
    ) -> RunnableConfig:
        """As put(). The content is fixed in one piece; the event loop never waits for the disk."""
        thread = self._thread(config)
        conf = config["configurable"]
        where = conf.get("checkpoint_ns", ""), conf.get("checkpoint_id") or None
        if not thread.standing(*where):
            await asyncio.to_thread(thread.prepare, *where)
        captured = self._capture(thread, config, checkpoint, metadata)
        await asyncio.shield(asyncio.wrap_future(self._disk.submit(thread.finish, *captured)))
        return _config(thread.name, config, checkpoint["id"])

    def _capture(
        self, thread: Thread, config: RunnableConfig, checkpoint: Checkpoint, metadata: CheckpointMetadata
    ) -> Any:
        conf = config["configurable"]
        parent = conf.get("checkpoint_id") or None
        described = get_checkpoint_metadata(config, metadata)
        return thread.capture(conf.get("checkpoint_ns", ""), parent, checkpoint, described)

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Save what a task wrote. On disk when it returns, with the flush of a checkpoint where one is on its way."""
        thread, event = self._event(config, writes, task_id, task_path)
        thread.ready()
        thread.wait(thread.queue(event))

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """As put_writes()."""
        thread, event = self._event(config, writes, task_id, task_path)
        if not thread.held:
            await asyncio.to_thread(thread.ready)
        queued = thread.queue(event)
        await asyncio.wait([asyncio.wrap_future(queued.done)], timeout=thread.patience_s)
        if not queued.done.done():
            self._disk.submit(thread.flush, queued)
        await asyncio.shield(asyncio.wrap_future(queued.done))

    def _event(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str
    ) -> tuple[Thread, Any]:
        conf = config["configurable"]
        encoded = [
            (WRITES_IDX_MAP.get(channel, index), channel, self._encode(channel, value))
            for index, (channel, value) in enumerate(writes)
        ]
        replace = all(channel in WRITES_IDX_MAP for channel, _ in writes)
        ns, name = conf.get("checkpoint_ns", ""), str(conf["checkpoint_id"])
        return self._thread(config), writes_event(ns, name, encoded, task_id, task_path, replace=replace)

    def _encode(self, channel: str, value: Any) -> bytes:
        try:
            return encode(value, self._registry)
        except Unencodable as error:
            raise error.within(channel) from None

    # -- reading --------------------------------------------------------------------------------------------

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """One checkpoint: the one that the config names, or where the thread stands."""
        conf = config["configurable"]
        if _RUNTIME in conf:
            # A run begins. It becomes the thread's writer before it reads, so that nobody goes on with the thread in
            # between, and so that what it puts later is taken in at once.
            self._thread(config).begin(conf.get("checkpoint_ns", ""))
        reader = self._reader(config)
        if reader is None:
            return None
        row = reader.find(conf.get("checkpoint_id"))
        self._looked(reader)
        if row is None:
            return None
        found = reader.tuple_at(row)
        return found._replace(config=config) if conf.get("checkpoint_id") else found

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """As get_tuple()."""
        return await asyncio.to_thread(self.get_tuple, config)

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
        streams = [reader.tuples(start, filter, only, limit) for reader in self._readers(config)]
        merged = streams[0] if len(streams) == 1 else heapq.merge(*streams, key=_id_of, reverse=True)
        for count, found in enumerate(merged, 1):
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
        while (one := await asyncio.to_thread(next, found, None)) is not None:
            yield one

    def _reader(self, config: RunnableConfig) -> Reader | None:
        conf = config["configurable"]
        self._settle()
        return Reader.of(self.store, self._registry, str(conf["thread_id"]), conf.get("checkpoint_ns", ""))

    def _settle(self) -> None:
        """What this process has put in batches is read only when it is there."""
        if self.store._durability == "batched":
            self.store.flush()

    def _readers(self, config: RunnableConfig | None) -> Sequence[Reader]:
        self._settle()
        if config is None:
            return [reader for name in self._names() for reader in Reader.all_of(self.store, self._registry, name)]
        conf = config["configurable"]
        thread, ns = str(conf["thread_id"]), conf.get("checkpoint_ns")
        if ns is None:
            readers = Reader.all_of(self.store, self._registry, thread)
        else:
            reader = Reader.of(self.store, self._registry, thread, ns)
            readers = [reader] if reader is not None else []
        for reader in readers:
            self._looked(reader)
        return readers

    def _names(self) -> Sequence[str]:
        return [info.name for info in self.store.agents()]

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
        return await asyncio.to_thread(self.get_delta_channel_history, config=config, channels=channels)

    # -- removing and copying -------------------------------------------------------------------------------

    def delete_thread(self, thread_id: str) -> None:
        """Remove a thread with all its checkpoints and writes."""
        with removal.alone(self, str(thread_id)) as thread:
            if thread is not None:
                self.store.remove(thread.name)

    async def adelete_thread(self, thread_id: str) -> None:
        """As delete_thread()."""
        await asyncio.to_thread(self.delete_thread, thread_id)

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Remove the checkpoints that these runs made, in all threads. What delta channels still need is kept."""
        if run_ids:
            removal.delete_for_runs(self, set(map(str, run_ids)), self._names())

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """As delete_for_runs()."""
        await asyncio.to_thread(self.delete_for_runs, run_ids)

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Begin a thread with the whole history of another. No checkpoint is copied: both see the same."""
        self.store.clone(str(source_thread_id), str(target_thread_id))

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """As copy_thread()."""
        await asyncio.to_thread(self.copy_thread, source_thread_id, target_thread_id)

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Keep only the newest checkpoint of each namespace, or (``delete``) nothing. Safe for delta channels."""
        if strategy not in {"keep_latest", "delete"}:
            raise BadOption(f"prune strategy {strategy!r}", hint="Use keep_latest or delete.")
        for name in map(str, thread_ids):
            if strategy == "delete":
                self.delete_thread(name)
            else:
                removal.keep_latest(self, name)

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """As prune()."""
        await asyncio.to_thread(self.prune, thread_ids, strategy=strategy)

    # -- threads that this process writes -------------------------------------------------------------------

    def _thread(self, config: RunnableConfig) -> Thread:
        """A thread that is about to be written, and looked at until it is released again."""
        conf = config["configurable"]
        thread = self._known(str(conf["thread_id"]))
        thread.runtime = conf.get(_RUNTIME) or thread.runtime
        with self._lock:
            if not self._watcher or not self._watcher[0].is_alive():
                watcher = threading.Thread(
                    target=_watch, args=(weakref.ref(self),), name="holdfast-langgraph", daemon=True
                )
                self._watcher[:] = [watcher]
                watcher.start()
        return thread

    def _known(self, name: str) -> Thread:
        with self._lock:
            thread = self._threads.get(name)
            if thread is None:
                thread = self._threads[name] = Thread(self.store, self._registry, name, self._wait_s)
                self._drop_old()
            return thread

    def _looked(self, reader: Reader) -> None:
        """Remember where this process saw a thread stand, so that it notices when another has gone on with it."""
        self._known(reader.thread).looked(reader.ns, reader.branch.head)

    def _drop_old(self) -> None:
        idle = [name for name, thread in self._threads.items() if not thread.held and not thread.inflight]
        for name in idle[: max(0, len(self._threads) - THREADS_KEPT)]:
            del self._threads[name]

    def _let_go(self) -> bool:
        """Release threads whose runs have ended; returns whether some are still held."""
        with self._lock:
            threads = list(self._threads.values())
        for thread in threads:
            with thread.lock:
                if thread.held and not thread.inflight and _ended(thread):
                    thread.release()
        return any(thread.held for thread in threads)


def _ended(thread: Thread) -> bool:
    """Whether the run that wrote a thread is over: nobody but us holds LangGraph's object for it any more."""
    idle_s = time.monotonic() - thread.used
    if thread.runtime is None:
        return idle_s > IDLE_S
    # The thread's attribute and getrefcount's own argument.
    return idle_s > WATCH_S and sys.getrefcount(thread.runtime) <= 2


def _watch(saver: weakref.ref[HoldfastSaver]) -> None:
    """Until nothing is held: look at the threads now and then."""
    idle = 0
    while True:
        time.sleep(WATCH_S)
        found = saver()
        if found is None or found.store.closed:
            return
        idle = 0 if found._let_go() else idle + 1
        if idle > IDLE_S / WATCH_S:
            with found._lock:
                found._watcher.clear()
            return
        del found


def _config(thread: str, config: RunnableConfig, checkpoint_id: str) -> RunnableConfig:
    ns = config["configurable"].get("checkpoint_ns", "")
    return {"configurable": {"thread_id": thread, "checkpoint_ns": ns, "checkpoint_id": checkpoint_id}}


def _id_of(found: CheckpointTuple) -> str:
    return str(found.checkpoint["id"])
