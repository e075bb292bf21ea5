"""Tools that are called in a graph's nodes: recorded on the thread's line, and done once.

Owns the step from LangGraph's context to a task of Holdfast: which thread, which task, which execution of it, and what
LangGraph has stored of the task's end. What is left and what answers is the guard's business (``run.claims``). What
always holds: a call is known by thread, task, tool, arguments and the how-manyth such call of this execution, never by
its order; a write is left until its task, or one around it in the graph that both are part of, is stored as finished,
and what follows knows what the task wrote.

The name of a task says all that is needed to look its end up, ``node:id|inner:id@checkpoint,checkpoint#step.path``: the
levels of its namespace, the checkpoint that each was prepared from, and its place in its graph, which is the same when
a graph that has stored nothing is executed again with other ids.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler

from holdfast.agent.graph import Graph
from holdfast.contrib.langgraph.thread import Namespace, Thread, key_of, named
from holdfast.contrib.langgraph.tuples import Reader, left_standing, rollbacks_of
from holdfast.errors import AgentBusy, Fenced, NoAgent
from holdfast.run import callers, scope
from holdfast.run import records as rec
from holdfast.run.arguments import fetch, stow
from holdfast.run.claims import Loop, Task, TaskLane, key_in, part_in, task_of
from holdfast.run.durables import unfinished
from holdfast.run.line import Line
from holdfast.run.listing import origin_of
from holdfast.run.past import GUARDED, TASK, Call, Past, task_in
from holdfast.run.scope import Lane, now_us
from holdfast.run.steps import Steps, Work
from holdfast.run.tools import TOOLS, Tool
from holdfast.store.engine import Lease

if TYPE_CHECKING:
    from holdfast.contrib.langgraph.saver import HoldfastSaver

log = logging.getLogger("holdfast.langgraph")

# What LangGraph says about a task besides its output (langgraph.pregel._task_status).
_CONTROL = frozenset({"__error__", "__error_source_node__", "__interrupt__", "__resume__"})
_ERROR, _START, _END = "__error__", "__start__", "__end__"
# How LangGraph tags the callbacks of a node's run, and where its metadata and its config say which task that is.
_STEP, _NS, _MAP = "graph:step:", "langgraph_checkpoint_ns", "checkpoint_map"
_RESUMING = "__pregel_resuming"
_SEP = "|"
RUNTIME = "__pregel_runtime"
# How the name of a task begins that acts anew, before the length of the line at that time and a space.
_ANEW = "@"
PASSED = "passed"
"""The note that says, by the name of a checkpoint, which tasks are finished if it is stored."""
_NAMES_KEPT = 4_096  # of tasks, and of pairs of them
_ACTS_ANEW = re.compile(rf"\A{_ANEW}\d+ ")


class Level(NamedTuple):
    """One level of a task's namespace: the task there, in which graph, prepared from which checkpoint."""

    graph: str  # the namespace of the graph that the task is part of
    node: str
    id: str  # empty where LangGraph leaves it out: in subgraphs that have a history of their own
    checkpoint: str


@lru_cache(_NAMES_KEPT)
def levels_of(name: str) -> tuple[Level, ...]:
    """A task's levels from its name, outermost first."""
    ns, _, checkpoints = name.rpartition("#")[0].rpartition("@")
    ns = _ACTS_ANEW.sub("", ns)
    given = iter(checkpoints.split(","))
    found: list[Level] = []
    above: list[str] = []
    for segment in ns.split(_SEP):
        node, _, id = segment.rpartition(":")
        if not segment.isdigit():  # those only tell several uses of a subgraph in one node apart
            found.append(Level(_SEP.join(above), node or id, id if node else "", next(given, "")))
        above.append(segment)
    return tuple(found)


def name_of(info: Any, config: Mapping[str, Any]) -> str:
    """The name of a task, from what LangGraph says of its execution, and from the config in it."""
    above = config.get("configurable", {}).get(_MAP, {})
    outer = [above.get(level.graph, "") for level in levels_of(f"{info.checkpoint_ns}@#")[:-1]]
    metadata = config.get("metadata", {})
    path = "".join(char for char in str(metadata.get("langgraph_path", "")) if char.isalnum() or char in "_-,")
    place = f"{metadata.get('langgraph_step', '')}.{path}"
    return f"{info.checkpoint_ns}@{','.join([*outer, info.checkpoint_id])}#{place}".replace(TASK, "/ /")


@lru_cache(_NAMES_KEPT)
def relation(one: str, other: str) -> str:
    """How two tasks are related, by their names: same, beside (in one step of a graph), perhaps beside, or none."""
    pairs = list(zip_longest(levels_of(one), levels_of(other)))
    for at, (mine, yours) in enumerate(pairs):
        if mine is None or yours is None or (mine.node, mine.id) == (yours.node, yours.id):
            continue
        if mine.graph == yours.graph and mine.checkpoint == yours.checkpoint:
            return "beside"
        # Their ids differ, since nothing was stored when one of them was prepared: they are known by their places.
        (step, path), (your_step, your_path) = (name.rpartition("#")[2].split(".", 1) for name in (one, other))
        if at < len(pairs) - 1 or _bare(mine.graph) != _bare(yours.graph) or step != your_step:
            return ""
        return "again" if path == your_path else "perhaps beside"
    return "same"


class NodeTask(Task):
    """One execution of a node: an ``ExecutionInfo``, in what LangGraph executes now of the nodes around it."""

    run: Run

    def __init__(self, name: str, run: Run, execution: Any, around: Mapping[str, UUID]) -> None:
        super().__init__(name, run)
        self.execution = execution
        self.known = False  # whether it was looked up how earlier executions have ended
        self.around = around
        self.levels = levels_of(name)
        # The graphs that it is part of, and those that it executes itself: what they have stored as finished counts.
        self.graphs = {level.graph for level in self.levels} | {execution.checkpoint_ns}

    def is_beyond(self, level: Level) -> bool:
        """Whether its run had to finish that task before this one began. LangGraph may not have stored it yet."""
        start = self.run.starts.get(level.graph)
        return start == level.checkpoint and any(
            mine.graph == level.graph and mine.checkpoint > start for mine in self.levels
        )

    def follows(self, other: Task) -> bool:
        if not isinstance(other, NodeTask) or super().follows(other):
            return other is not self
        return any(self.around[ns] != run for ns, run in other.around.items() if ns in self.around)


class ThreadHost:
    """A thread as the run room sees it: no state of its own, since the graph has that."""

    def __init__(self, thread: Thread, space: Namespace) -> None:
        self.name = thread.name
        self.registry = thread.registry
        self.ledger: Line = Line(thread.store._db, space.branch.b, space.writer)
        self._thread, self._space = thread, space

    @property
    def handle(self) -> Any:
        raise NoAgent(
            f"{self.name} is a LangGraph thread: its state belongs to the graph",
            hint="Use what the node is given, and returns.",
        )

    @property
    def identity(self) -> tuple[bytes, bytes]:
        return self._thread.row.uuid, self._space.branch.uuid

    @property
    def generation(self) -> int:
        return self._space.writer.generation

    @property
    def lease(self) -> Lease | None:
        return self._thread._lease

    def outlives_s(self, call: Call) -> float | None:
        return callers.outlives_s(self._thread.store._db, self._space.branch.b, self.generation, call)

    def shared_us(self) -> int:
        return self._thread.store._db.engine.clock()

    whole = False

    @property
    def origin(self) -> int:
        return origin_of(self._thread.store._db.view, self._space.branch)

    def check_free(self) -> None:
        """Raise while a rollback has begun and not ended, or a run of the agent that people use the thread as."""
        if not self.whole:
            ledger: Any = self.ledger
            owner = Past(ledger.marked()).owner(self.origin) if ledger.count else None
            if owner is not None:
                raise unfinished(self, owner, executing=False)
            self.whole = True


class ThreadLoop(Loop):
    """What the nodes of a thread do, and what is left of that."""

    forgets_reads = False  # LangGraph may store a checkpoint late

    def __init__(self, thread: Thread, space: Namespace) -> None:
        view = thread.store._db.view
        head = view.branch_at(space.branch.b).head
        since = view.point(head).manifest.effects[0] if head else 0
        super().__init__(ThreadHost(thread, space), since)
        self.settling_words = f"saver.accept({thread.name!r}), graph.update_state(..., as_node=...)"
        self.space = space
        self._thread = thread
        self._tasks: dict[int, NodeTask] = {}  # by the id of their ExecutionInfo, which they hold
        # (checkpoint, task) -> the graph that has what it wrote: who goes on from there does not execute it again
        self._ended: dict[tuple[str, str], str] = {}
        self._taken_in: dict[tuple[str, str], str] = {}  # the same: known to a checkpoint that came after it
        self._passed: set[str] = set()  # checkpoints of the thread itself from which a run has gone on to the next
        self._failed: set[tuple[str, str]] = set()  # the same: stored with an error
        self._stored: dict[tuple[int, str], tuple[object, str]] = {}  # run and graph -> its newest checkpoint
        self._inputs: dict[tuple[int, str], str] = {}  # run and graph -> the checkpoint with which it last began there
        self._users: dict[str, object] = {}  # by the paths of calls that are under way
        self._looked: set[tuple[str, str]] = set()
        # Checkpoint of a graph inside of another -> that graph, and tasks that are finished if it is stored.
        self._passing: dict[str, tuple[str, list[list[str]]]] = {}
        self._sources: dict[tuple[str, str, str], set[str]] = {}  # of all checkpoints of a graph between two of them

    def place(self, path: str) -> str:
        nodes = " > ".join(level.node for level in levels_of(task_in(path)))
        return f"in the node {nodes}" if task_in(path) else super().place(path)

    def keeps(self, tool: Tool) -> bool:  # noqa: ARG002 - LangGraph takes one after each step, whatever it is
        return False

    # -- tasks ------------------------------------------------------------------------------------------------

    def task_of(self, run: Run, info: Any, config: Mapping[str, Any]) -> NodeTask:
        """The task of an execution. Known by identity: a retry, a resume and a new process have another object."""
        with self.lock:
            task = self._tasks.get(id(info))
            if task is None:
                name = f"{run.anew}{name_of(info, config)}"
                task = self._tasks[id(info)] = NodeTask(name, run, info, run.around(info.checkpoint_ns))
            return task

    def asked(self, lane: Lane, path: str, tool: Tool, mark: bytes, arguments: dict[str, Any]) -> Steps:
        task = task_of(lane)
        if isinstance(task, NodeTask) and not task.known:
            yield Work(partial(self._prepare, task))
        return (yield from super().asked(lane, path, tool, mark, arguments))

    def _prepare(self, task: NodeTask) -> None:
        """What has to be read before the first call of an execution. Not on an event loop."""
        with self.lock:
            self.read()
            task.run.settle(self)
            self._check_passed()
            last = task.levels[-1]
            self._look_up([last])
            task.reads = task.execution.node_attempt == 1 and (last.checkpoint, last.id) not in self._failed
            task.known = True

    def _begin(self, path: str, tool: Tool, task: Task) -> Future[None] | None:
        with self.lock:
            if isinstance(task, NodeTask) and tool.kind in GUARDED:
                task.run.check_turn(f"{tool.name} was not called")
            other = super()._begin(path, tool, task)
        if other is None:  # a call may outlive its run: nobody else may write the thread before it has ended
            self._users[path] = self._thread.enter()
        return other

    def leave_call(self, path: str) -> None:
        super().leave_call(path)
        user = self._users.pop(path, None)
        if user is not None:
            self._thread.leave(user)

    def forget(self, run: object) -> None:
        """A run has ended: its executions make no more calls."""
        with self.lock:
            self._tasks = {id: task for id, task in self._tasks.items() if task.run is not run}
            self._stored = {place: (of, at) for place, (of, at) in self._stored.items() if of is not run}
            self._inputs = {place: at for place, at in self._inputs.items() if place[0] != id(run)}

    def check_settled(self, tool: Tool | None = None) -> None:
        if tool is None or tool.kind != "read":
            super().check_settled(tool)

    # -- what is finished ---------------------------------------------------------------------------------------

    def may_answer(self, made: str, task: Task, path: str) -> bool:
        """What is beside it, or the other part of it, is executed again and asks for that."""
        near = relation(task_in(made), task.name) if task_in(made) else ""
        parts = {part_in(made), part_in(path)}
        return near != "beside" and not (near == "same" and len(parts) == 2 and "" not in parts)

    def is_left(self, call: Call, task: Task, path: str) -> bool:
        if not super().is_left(call, task, path):
            return False
        if not isinstance(task, NodeTask) or not task_in(call.path):
            return True
        owner = self._owner.get(key_in(call))
        levels = levels_of(task_in(call.path))
        # A node around both is executed again. What a graph inside of it had finished counts if that goes on from
        # there, and not if it was begun anew.
        if owner is not None and owner.run is task.run:
            began = {ns: at for (run, ns), at in self._inputs.items() if run == id(task.run)}
            levels = tuple(one for one in levels if one.checkpoint >= began.get(one.graph, ""))
        else:
            levels = tuple(one for one in levels if self._graph_of(one) in {"", *task.run.starts})
        return not any(
            self._graph_of(level) in task.graphs
            and (self._is_over(call, level) or self._has_ended(level, owner, task.run) or task.is_beyond(level))
            and not self._begun_since(level, task.run)
            for level in levels
        )

    def stops(self, call: Call, task: Task) -> bool:
        made = task_in(call.path)
        return not made or relation(made, task.name) != "perhaps beside"

    def finished(self, call: Call) -> bool:
        """For a checkpoint of the thread itself: whether its own task is over."""
        levels = levels_of(task_in(call.path))
        return any(not self._graph_of(level) and self._is_over(call, level) for level in levels)

    def _graph_of(self, level: Level) -> str:
        """The graph that a task is part of. One of the functional API is part of that of the task that called it."""
        of = level.checkpoint, level.id
        return self._ended.get(of, self._taken_in.get(of, level.graph))

    def _has_ended(self, level: Level, owner: Task | None, run: Run) -> bool:
        """Whether a task is finished for a run: what it wrote is known there, and it is not executed again.

        Other input, or a state that somebody has updated, goes on without that: nobody knows then what it has done.
        """
        graph = self._ended.get((level.checkpoint, level.id))
        if graph is None:
            return False
        start = run.starts.get(graph, "")
        if level.checkpoint == start or (owner is not None and owner.run is run):
            return True
        return level.checkpoint < start and self._led(run.saver, graph, level.checkpoint, start) <= {"loop"}

    def _begun_since(self, level: Level, run: Run) -> bool:
        """Whether a graph that a run goes on with was given other input, or the same again, after that task."""
        graph = self._graph_of(level)
        start = run.starts.get(graph, "") if graph else ""
        return level.checkpoint < start and "input" in self._led(run.saver, graph, level.checkpoint, start)

    def _led(self, saver: HoldfastSaver, ns: str, one: str, other: str) -> set[str]:
        """What has led a graph from one checkpoint to another: the sources of those between, as LangGraph has them."""
        known = self._sources.get((ns, one, other))
        if known is None:
            reader = Reader.of(saver, self._thread.name, ns)
            known, given = set(), set()
            for _, about, _ in reader.states() if reader is not None else ():
                if about["id"] <= one:
                    break
                if about["id"] <= other:
                    known.add(about["metadata"].get("source", ""))
                    given.add(about["channel_versions"].get(_START))
            if len(given) > 1:  # with durability="exit" a graph stores what it was given only as a part of what follows
                known.add("input")
            self._sources[ns, one, other] = known
        return known

    def _is_over(self, call: Call, level: Level) -> bool:
        if (level.checkpoint, level.id) in self._taken_in or (not level.graph and level.checkpoint in self._passed):
            return True
        owner = self._owner.get(key_in(call))
        of, at = self._stored.get((id(owner.run), level.graph), (None, "")) if owner is not None else (None, "")
        return owner is not None and of is owner.run and level.checkpoint < at

    def loaded(self, past: Past) -> None:
        levels = [level for call in self._left for level in levels_of(task_in(call.path))]
        self._look_up(levels)
        if any(level.graph for level in levels):
            notes = {name: note for (what, name), note in past.notes.items() if what == PASSED}
            self._passing = {name: fetch(note.value, self.ledger, self.registry) for name, note in notes.items()}

    def _note_passed(self, ns: str, checkpoint: str, run: Run) -> None:
        """A graph inside of another is about to store a checkpoint, perhaps its first: then what came before is done.

        Whoever goes on from there does not execute that again, and may have no other way to know. The checkpoint is
        not of this line, so the note counts if the checkpoint is there.
        """
        began = self._inputs.get((id(run), ns), "")
        owned = [call for call in self._left if getattr(self._owner.get(key_in(call)), "run", None) is run]
        levels = {level for call in owned for level in levels_of(task_in(call.path)) if level.graph == ns}
        over = [level for level in levels if began <= level.checkpoint < checkpoint]
        tasks = sorted([one.checkpoint, one.id] for one in over if (one.checkpoint, one.id) not in self._ended)
        if tasks:
            self._passing[checkpoint] = ns, tasks
            stowed = stow([ns, tasks], self.registry)
            self.write(rec.Note(now_us(), "", PASSED, checkpoint, stowed.value), stowed)

    def _check_passed(self) -> None:
        known = Graph(self._thread.store._db.view, self._thread.row) if self._passing else None
        for checkpoint, (ns, tasks) in list(self._passing.items()):
            if known is not None and named(known, key_of(ns, checkpoint)) is not None:
                self._taken_in.update(((at, task), ns) for at, task in tasks)
                del self._passing[checkpoint]

    def _look_up(self, levels: Collection[Level]) -> None:
        """See in the log what LangGraph has stored about the end of these tasks."""
        keys: dict[bytes, tuple[str, str]] = {}
        for level in levels:
            if level.checkpoint and (level.graph, level.checkpoint) not in self._looked:
                self._looked.add((level.graph, level.checkpoint))
                parts = level.graph.split(_SEP)
                for graph in {_SEP.join(parts[:length]) for length in range(len(parts) + 1)}:
                    keys[key_of(graph, level.checkpoint)] = graph, level.checkpoint
        if not keys:
            return
        db = self._thread.store._db
        known = Graph(db.view, self._thread.row)
        for entry in left_standing(known.under(list(keys)), rollbacks_of(db, known)):
            if entry.body.get("what") == "writes":
                channels = [channel for _, channel, _ in entry.body["writes"]]
                self.told(*keys[entry.key], entry.body["task"], channels)

    def told(self, graph: str, checkpoint: str, task: str, channels: Sequence[str]) -> None:
        """LangGraph has stored this about a task that was prepared from a checkpoint of a graph."""
        with self.lock:
            if any(channel not in _CONTROL for channel in channels):
                self._ended[checkpoint, task] = graph
            elif _ERROR in channels:
                self._failed.add((checkpoint, task))

    @contextmanager
    def saving(self, ns: str, checkpoint: str, run: Run | None, nodes: Collection[str], source: str) -> Iterator[None]:
        """Inside, a checkpoint of a graph is captured: what it follows from is finished then.

        ``nodes``: those that somebody has settled by updating the state in their name. ``source``: as LangGraph
        has it. No record is written meanwhile:
        one that the checkpoint counts is in its note, if it does not know it.
        """
        with self.lock, self.space.writer.lock:
            if run is not None:
                self._stored[id(run), ns] = run, checkpoint
                if source == "input":
                    self._inputs[id(run), ns] = checkpoint
                elif source == "loop" and not ns and "" in run.starts:  # all that was to be done there is done
                    self._passed.add(run.starts[""])
                if ns:
                    self._note_passed(ns, checkpoint, run)
            if nodes:
                self.read()
                for call in self._left:
                    for level in levels_of(task_in(call.path)):
                        if level.graph == ns and (level.node in nodes or _END in nodes):
                            self._taken_in[level.checkpoint, level.id] = ns
            if not ns:
                self.note()
            yield


# -- runs -------------------------------------------------------------------------------------------------------


class Run(BaseCallbackHandler):
    """One run of a graph that calls tools, perhaps. It is told which nodes are executed inside of which others."""

    run_inline = True
    ignore_llm = ignore_retriever = ignore_chat_model = ignore_custom_event = ignore_retry = True

    def __init__(self, saver: HoldfastSaver, thread: Thread, loop: Any) -> None:
        self.saver, self.thread = saver, thread
        self.control: object = getattr(loop, "control", None)
        self._runtime: Any = getattr(loop, "config", {}).get("configurable", {}).get(RUNTIME)
        from langgraph.channels.delta import DeltaChannel
        from langgraph.errors import GraphBubbleUp  # whoever runs a graph has them; a saver alone does not need them
        from langgraph.types import Command

        scope.let_pass(GraphBubbleUp)
        given = getattr(loop, "input", None)
        self.fresh = given is not None and not isinstance(given, Command)  # new input, instead of going on
        self.resumes = given is None or (isinstance(given, Command) and not given.goto)
        self.answers = isinstance(given, Command)
        if getattr(loop, "is_nested", False):
            self.resumes = bool(loop.config["configurable"].get(_RESUMING))
        self.starts: dict[str, str] = {}  # graph -> the checkpoint whose tasks it goes on with
        self.replayed: set[str] = set()  # graphs that do not: all that was done there is executed again
        self.older = False  # whether it goes on from a checkpoint that is not the newest
        self.anew = ""
        self.awaited: set[str] = set()  # the channels whose writes LangGraph waits for before it saves a checkpoint
        self._begun = False
        self._executed: dict[str, UUID] = {}  # namespace of a task -> its run, of the newest attempt
        self._parts: dict[UUID, str] = {}  # run of a tool -> the id that the model gave to its call
        self._ended = False
        self._refusal = ""  # why it may not act any more, if that is so
        handlers = getattr(getattr(loop, "manager", None), "inheritable_handlers", None)
        above = handlers if isinstance(handlers, list) else []
        outer = _told(above, self.control, thread.name) if getattr(loop, "is_nested", False) else None
        # A loop may read its thread more than once while it is entered.
        self.outermost: Run = outer or (run_of(self._runtime) if self._runtime is not None else None) or self
        _RUNS[id(self._runtime)] = self.outermost
        if getattr(loop, "durability", "") == "sync":  # otherwise the checkpoint before may take them along
            channels = getattr(loop, "specs", {}).items()
            self.outermost.awaited.update(name for name, channel in channels if isinstance(channel, DeltaChannel))
        if self.outermost is self and TOOLS.declared:
            above.append(self)
        scope.begin(self)

    # -- turns ------------------------------------------------------------------------------------------------

    def must_wait(self) -> bool:
        """Whether another run has to end before this one may begin.

        A thread whose nodes act outside takes one message at a time. Whoever resumes it takes it over instead: the
        run before may be a stream that nobody reads on.
        """
        holder: Run | None = self.thread.holder
        other = holder is not None and holder is not self and not holder._ended
        return other and self.fresh and self.outermost is self and self.thread.tools is not None

    def take_turn(self) -> None:
        """From now on this run acts, and no other that has begun before: what that one is storing is stored first."""
        if self.outermost is not self:
            return
        turns = self.thread.turns
        with turns:
            holder: Run | None = self.thread.holder
            if self.must_wait():
                raise _at_work(self.thread)
            if holder is None or holder is self:
                self.thread.holder = self
            elif self.fresh and not holder._ended:
                self._refusal = "another run was at work on it when this one began"
            else:  # one that was cancelled may still be storing something
                holder._refusal = "another run has resumed it since this one began"
                self.thread.holder = self
            # Not only by the one before: it may have been waiting for this, too.
            while self.thread.tools is not None and any(run is not self for run in self.thread.storing):
                turns.wait()

    def check_turn(self, what: str) -> None:
        """Raise if this run may not act. Where no node acts outside, runs go beside each other as LangGraph has it."""
        if self._refusal and self.thread.tools is not None:
            raise Fenced(
                f"thread {self.thread.name!r}: {self._refusal}; {what}",
                hint="Begin a run when the one before has ended, and close a stream that is not read on.",
            )

    def is_moot(self, channels: Iterable[str]) -> bool:
        """Whether a task of this run has only failed or asked, and another run executes it now."""
        return bool(self._refusal) and self.thread.tools is not None and all(one in _CONTROL for one in channels)

    # -- what LangGraph tells -----------------------------------------------------------------------------------

    def on_chain_start(self, *_given: Any, run_id: UUID, tags: Any = None, metadata: Any = None, **_more: Any) -> None:
        if metadata and tags and any(tag.startswith(_STEP) for tag in tags):
            ns = metadata.get(_NS, "")
            self._executed[ns] = self._executed[_bare(ns)] = run_id

    def on_tool_start(self, *_given: Any, run_id: UUID, tool_call_id: str | None = None, **_more: Any) -> None:
        if tool_call_id:
            self._parts[run_id] = tool_call_id

    def stands_at(self, ns: str, checkpoint: str, *, named: bool) -> None:
        """The graph of this run stands there: it goes on with the tasks that are left, or does something else.

        Where somebody names a checkpoint and gives no answer, LangGraph executes all of its tasks again.
        """
        run = self.outermost
        if run.thread is not self.thread:
            return
        if named and not self.answers:
            run.replayed.add(ns)
        run.starts.pop(ns, None)
        if self.resumes and ns not in run.replayed:
            run.starts[ns] = checkpoint

    def around(self, ns: str) -> dict[str, UUID]:
        """The runs of the nodes around a task, and its own, by their namespaces."""
        parts = ns.split(_SEP)
        names = [_SEP.join(parts[:length]) for length in range(1, len(parts) + 1)]
        return {name: self._executed[name] for name in names if name in self._executed}

    def end(self, *, lost: bool = False) -> None:
        """``lost``: from a destructor, which may come at any moment, in any thread."""
        self._ended = True
        _RUNS.pop(id(self._runtime), None)
        scope.end(self)
        loop = self.thread.tools
        if loop is not None and not lost:
            loop.forget(self)

    def lane(self, info: Any, config: Mapping[str, Any]) -> TaskLane:
        loop = loop_of(self.thread)
        if self.older and not self.anew:
            self.anew = f"{_ANEW}{loop.ledger.count} "
        within: Any = getattr(config.get("callbacks"), "parent_run_id", None)
        return TaskLane(loop, loop.task_of(self, info, config), self._parts.get(within, ""))

    def settle(self, loop: ThreadLoop) -> None:
        """What is left may be settled by how this run begins."""
        begun, self._begun = self._begun, True
        if begun:
            return
        if self.older:
            known = loop.accept()
            names = ", ".join(sorted({call.tool for call in known})) or "nothing that is left"
            log.warning("%s: a run from an older checkpoint acts anew; not asked again: %s", self.thread.name, names)
        elif self.fresh and self.saver.left == "accept":
            loop.accept()


class _Storing:
    """Inside, something is stored for a run."""

    __slots__ = ("_run",)

    def __init__(self, run: Run) -> None:
        self._run = run

    def __enter__(self) -> None:
        run, thread = self._run, self._run.thread
        with thread.turns:
            run.check_turn("nothing was written")
            thread.storing.append(run)

    def __exit__(self, *_error: object) -> None:
        thread = self._run.thread
        with thread.turns:
            thread.storing.remove(self._run)
            thread.turns.notify_all()


def _bare(ns: str) -> str:
    """A namespace as LangGraph has it in subgraphs with a history of their own: without ids."""
    return _SEP.join(part.partition(":")[0] for part in ns.split(_SEP) if not part.isdigit())


# By what LangGraph makes for each graph that runs, and hands to the saver: the outermost run that it is part of.
_RUNS: dict[int, Run] = {}


def run_of(runtime: object) -> Run | None:
    return _RUNS.get(id(runtime))


def _told(handlers: Any, control: object, thread: str) -> Run | None:
    """The run that something is part of, by the callbacks there; or, without them, by what else is handed on."""
    for one in handlers or ():
        if isinstance(one, Run) and one.control is control and not one._ended:
            return one
    runs = list(_RUNS.values())
    return next((run for run in runs if run.control is control and run.thread.name == thread), None)


def loop_of(thread: Thread) -> ThreadLoop:
    """What the nodes of a thread do. This process must be its writer."""
    with thread.lock:
        space = thread.begin("")
        loop: ThreadLoop | None = thread.tools
        if loop is None or loop.space is not space:
            loop = thread.tools = ThreadLoop(thread, space)
        return loop


def _at_work(thread: Thread) -> AgentBusy:
    return AgentBusy(
        f"another run of thread {thread.name!r} is at work in this process",
        holder={"pid": os.getpid()},
        hint="HoldfastSaver(..., wait_s=30) waits until it has ended. If it is a stream that nobody reads"
        " on, close it: stream.close(), or await stream.aclose(). Resuming the thread takes it over.",
    )


def storing(thread: Thread, run: Run | None, *, updates: bool) -> AbstractContextManager[None]:
    """Around all that is stored in a thread, for a run, perhaps, or for somebody who updates its state."""
    if run is not None:
        return _Storing(run) if run.thread is thread else nullcontext()
    return _updating(thread) if updates else nullcontext()


def check_at_rest(thread: Thread) -> None:
    """Raise while a run is at work whose nodes act outside."""
    holder: Run | None = thread.holder
    if holder is not None and not holder._ended and thread.tools is not None:
        raise _at_work(thread)


@contextmanager
def _updating(thread: Thread) -> Iterator[None]:
    """Inside, no run of the thread is at work, and none begins: it would go on without the update, which were lost.

    Where no node acts outside, both go beside each other as LangGraph has it.
    """
    user = object()
    with thread.turns:
        check_at_rest(thread)
        thread.storing.append(user)
    try:
        yield
    finally:
        with thread.turns:
            thread.storing.remove(user)
            thread.turns.notify_all()


def saving(
    thread: Thread, space: Namespace, *, checkpoint: str, source: str, settled: Collection[str], run: Run | None
) -> AbstractContextManager[None]:
    """Around the capture of a checkpoint. A thread whose nodes call no tools does not pay for it."""
    if thread.tools is None and (space.ns or not space.writer.position[0]):
        return nullcontext()
    return loop_of(thread).saving(space.ns, checkpoint, run, settled, source)


def find(name: str, kind: str) -> TaskLane | None:
    """The lane of the node in which a tool is called; None where that is no node of a thread in a Holdfast store."""
    if not _RUNS and "langgraph.runtime" not in sys.modules:
        return None
    from langgraph.config import get_config
    from langgraph.runtime import get_runtime

    try:
        runtime = get_runtime()
    except RuntimeError:  # outside of any graph
        return None
    info = getattr(runtime, "execution_info", None)
    if info is None:
        return None
    config = get_config()
    thread = str(config["configurable"].get("thread_id", ""))
    run = _told(getattr(config.get("callbacks"), "inheritable_handlers", None), runtime.control, thread)
    if run is not None:
        return run.lane(info, config)
    from holdfast.contrib.langgraph.saver import HoldfastSaver

    if kind != "read" and isinstance(config["configurable"].get("__pregel_checkpointer"), HoldfastSaver):
        raise NoAgent(
            f"{name} was called after its run had ended; it was not called",
            hint="Wait for all tasks and threads of a node before it returns.",
        )
    return None
