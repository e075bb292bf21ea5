"""Tools that are called in a graph's nodes: recorded on the thread's line, and done once.

Owns the step from LangGraph's context to a task of Holdfast: which thread, which task, which execution of it, and what
LangGraph has stored of the task's end. What is left and what answers is the guard's business (``run.claims``). What
always holds: a call is known by thread, task, tool, arguments and the how-manyth such call of this execution, never by
its order; a write is left until its task, or one around it in the graph that both are part of, is stored as finished.

The name of a task says all that is needed to look its end up, ``node:id|inner:id@checkpoint,checkpoint#step.path``: the
levels of its namespace, the checkpoint that each was prepared from, and its place in its graph, which is the same when
a graph that has stored nothing is executed again with other ids.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler

from holdfast.agent.graph import Graph
from holdfast.contrib.langgraph.thread import Namespace, Thread, key_of
from holdfast.contrib.langgraph.tuples import left_standing, rollbacks_of
from holdfast.errors import NoAgent
from holdfast.run import context
from holdfast.run.choosing import unfinished
from holdfast.run.claims import Loop, Task, TaskLane, key_in, part_in, task_of
from holdfast.run.ledger import Ledger
from holdfast.run.listing import origin_of
from holdfast.run.past import TASK, Call, Past, RunPast, task_in
from holdfast.run.positions import Lane
from holdfast.run.steps import Steps, Work
from holdfast.run.stored import StoredLedger
from holdfast.run.tools import TOOLS, Tool

if TYPE_CHECKING:
    from holdfast.contrib.langgraph.saver import HoldfastSaver

log = logging.getLogger("holdfast.langgraph")

# What LangGraph says about a task besides its output (langgraph.pregel._task_status).
_CONTROL = frozenset({"__error__", "__error_source_node__", "__interrupt__", "__resume__"})
_ERROR, _END = "__error__", "__end__"
# How LangGraph tags the callbacks of a node's run, and where its metadata and its config say which task that is.
_STEP, _NS, _MAP = "graph:step:", "langgraph_checkpoint_ns", "checkpoint_map"
_SEP = "|"
# How the name of a task begins that acts anew, before the length of the line at that time and a space.
_ANEW = "@"
_ACTS_ANEW = re.compile(rf"\A{_ANEW}\d+ ")


class Level(NamedTuple):
    """One level of a task's namespace: the task there, in which graph, prepared from which checkpoint."""

    graph: str  # the namespace of the graph that the task is part of
    node: str
    id: str  # empty where LangGraph leaves it out: in subgraphs that have a history of their own
    checkpoint: str


def levels_of(name: str) -> list[Level]:
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
    return found


def name_of(info: Any, config: Mapping[str, Any]) -> str:
    """The name of a task, from what LangGraph says of its execution, and from the config in it."""
    above = config.get("configurable", {}).get(_MAP, {})
    outer = [above.get(level.graph, "") for level in levels_of(f"{info.checkpoint_ns}@#")[:-1]]
    metadata = config.get("metadata", {})
    path = "".join(char for char in str(metadata.get("langgraph_path", "")) if char.isalnum() or char in "_-,")
    place = f"{metadata.get('langgraph_step', '')}.{path}"
    return f"{info.checkpoint_ns}@{','.join([*outer, info.checkpoint_id])}#{place}".replace(TASK, "/ /")


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

    def follows(self, other: Task) -> bool:
        if not isinstance(other, NodeTask) or super().follows(other):
            return other is not self
        return any(self.around[ns] != run for ns, run in other.around.items() if ns in self.around)


class ThreadHost:
    """A thread as the run room sees it: no state of its own, since the graph has that."""

    def __init__(self, thread: Thread, space: Namespace) -> None:
        self.name = thread.name
        self.registry = thread.registry
        self.ledger: Ledger = StoredLedger(thread.store._db, space.branch.b, space.writer)
        self._thread, self._space = thread, space

    @property
    def handle(self) -> Any:
        raise NoAgent(
            f"{self.name} is a LangGraph thread: the graph has its state",
            hint="Use what the node is given, and returns.",
        )

    @property
    def identity(self) -> tuple[bytes, bytes]:
        return self._thread.row.uuid, self._space.branch.uuid

    @property
    def generation(self) -> int:
        return self._space.writer.generation

    def is_dead(self, generation: int, number: int) -> bool:
        db = self._thread.store._db
        made = db.view.numbered(db.view.branch_at(self._space.branch.b).line, number)
        if not made.b or (made.b, generation) == (self._space.branch.b, self.generation):
            return False  # in another store, or here
        return not db.leases.alive(db.view.branch_at(made.b).uuid, generation)

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

    def stands_in(self, run: RunPast) -> bool:  # noqa: ARG002 - the graph's checkpoints are no run's
        return False

    def save(self, *_what: Any) -> Callable[[], None]:
        """A tool or a breaker asks for a checkpoint. LangGraph takes one after each step."""
        return lambda: None


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
        self._ended: dict[
            tuple[str, str], str
        ] = {}  # (checkpoint, task) -> the graph in which it is stored as finished
        self._passed: set[str] = set()  # checkpoints of the thread itself from which a run has gone on to the next
        self._failed: set[tuple[str, str]] = set()  # the same: stored with an error
        self._stored: dict[tuple[int, str], tuple[object, str]] = {}  # run and graph -> its newest checkpoint
        self._inputs: dict[tuple[int, str], str] = {}  # run and graph -> the checkpoint with which it last began there
        self._users: dict[str, object] = {}  # by the paths of calls that are under way
        self._looked: set[tuple[str, str]] = set()

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
            task.run.settle(self)
            last = task.levels[-1]
            self._look_up([last])
            task.reads = task.execution.node_attempt == 1 and (last.checkpoint, last.id) not in self._failed
            task.known = True

    def _begin(self, path: str, tool: Tool, task: Task) -> Future[None] | None:
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

    def is_left(self, call: Call, task: Task, path: str) -> bool:
        if not super().is_left(call, task, path):
            return False
        made = task_in(call.path)
        if not isinstance(task, NodeTask) or not made:
            return True
        near = relation(made, task.name)
        parts = {part_in(call.path), part_in(path)}
        if near == "beside" or (near == "same" and len(parts) == 2 and "" not in parts):
            return False  # what is beside it, or the other part of it, is executed again and asks for it
        owner = self._owner.get(key_in(call))
        if owner is not None and owner.run is task.run:
            # A node around both is tried again. What a graph inside of it had finished counts if that goes on from
            # there, and not if it was begun anew.
            began = {ns: at for (run, ns), at in self._inputs.items() if run == id(task.run)}
            levels = [one for one in levels_of(task_in(call.path)) if one.checkpoint >= began.get(one.graph, "")]
        else:
            levels = levels_of(task_in(call.path))
        return not any(self._graph_of(level) in task.graphs and self._is_over(call, level) for level in levels)

    def stops(self, call: Call, task: Task) -> bool:
        made = task_in(call.path)
        return not made or relation(made, task.name) != "perhaps beside"

    def finished(self, call: Call) -> bool:
        """For a checkpoint of the thread itself: whether its own task is over."""
        levels = levels_of(task_in(call.path))
        return any(not self._graph_of(level) and self._is_over(call, level) for level in levels)

    def _graph_of(self, level: Level) -> str:
        """The graph that a task is part of. One of the functional API is part of that of the task that called it."""
        return self._ended.get((level.checkpoint, level.id), level.graph)

    def _is_over(self, call: Call, level: Level) -> bool:
        if (level.checkpoint, level.id) in self._ended or (not level.graph and level.checkpoint in self._passed):
            return True
        owner = self._owner.get(key_in(call))
        of, at = self._stored.get((id(owner.run), level.graph), (None, "")) if owner is not None else (None, "")
        return owner is not None and of is owner.run and level.checkpoint < at

    def loaded(self) -> None:
        self._look_up([level for call in self._left for level in levels_of(task_in(call.path))])

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
                elif source == "loop" and not ns and run.start:  # all that was to be done there is done
                    self._passed.add(run.start)
            if nodes:
                self.read()
                for call in self._left:
                    for level in levels_of(task_in(call.path)):
                        if level.graph == ns and (level.node in nodes or _END in nodes):
                            self._ended[level.checkpoint, level.id] = ns
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
        from langgraph.errors import GraphBubbleUp  # whoever runs a graph has them; a saver alone does not need them
        from langgraph.types import Command

        context.let_pass(GraphBubbleUp)
        given = getattr(loop, "input", None)
        self.fresh = given is not None and not isinstance(given, Command)  # new input, instead of going on
        self.resumes = given is None or (isinstance(given, Command) and not given.goto)
        self.start = ""  # the checkpoint whose tasks it goes on with
        self.older = False  # whether it goes on from a checkpoint that is not the newest
        self.anew = ""
        self._begun = False
        self._executed: dict[str, UUID] = {}  # namespace of a task -> its run, of the newest attempt
        self._parts: dict[UUID, str] = {}  # run of a tool -> the id that the model gave to its call
        first = _RUNS.setdefault(id(self.control), self) is self  # otherwise a graph inside of one that runs
        above = getattr(getattr(loop, "manager", None), "inheritable_handlers", None)
        if first and isinstance(above, list) and TOOLS.declared:
            above.append(self)
        context.begin(self)

    def on_chain_start(self, *_given: Any, run_id: UUID, tags: Any = None, metadata: Any = None, **_more: Any) -> None:
        if metadata and tags and any(tag.startswith(_STEP) for tag in tags):
            ns = metadata.get(_NS, "")
            self._executed[ns] = self._executed[_bare(ns)] = run_id

    def on_tool_start(self, *_given: Any, run_id: UUID, tool_call_id: str | None = None, **_more: Any) -> None:
        if tool_call_id:
            self._parts[run_id] = tool_call_id

    def around(self, ns: str) -> dict[str, UUID]:
        """The runs of the nodes around a task, and its own, by their namespaces."""
        parts = ns.split(_SEP)
        names = [_SEP.join(parts[:length]) for length in range(1, len(parts) + 1)]
        return {name: self._executed[name] for name in names if name in self._executed}

    def end(self, *, lost: bool = False) -> None:
        """``lost``: from a destructor, which may come at any moment, in any thread."""
        if _RUNS.get(id(self.control)) is self:
            _RUNS.pop(id(self.control), None)
        context.end(self)
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


def _bare(ns: str) -> str:
    """A namespace as LangGraph has it in subgraphs with a history of their own: without ids."""
    return _SEP.join(part.partition(":")[0] for part in ns.split(_SEP) if not part.isdigit())


_RUNS: dict[int, Run] = {}  # by what LangGraph makes for each run, and hands to everything in it


def run_of(control: object) -> Run | None:
    return _RUNS.get(id(control))


def loop_of(thread: Thread) -> ThreadLoop:
    """What the nodes of a thread do. This process must be its writer."""
    with thread.lock:
        space = thread.begin("")
        loop: ThreadLoop | None = thread.tools
        if loop is None or loop.space is not space:
            loop = thread.tools = ThreadLoop(thread, space)
        return loop


def saving(
    thread: Thread, space: Namespace, *, checkpoint: str, source: str, settled: Collection[str], control: object
) -> AbstractContextManager[None]:
    """Around the capture of a checkpoint. A thread whose nodes call no tools does not pay for it."""
    if thread.tools is None and (space.ns or not space.writer.position[0]):
        return nullcontext()
    return loop_of(thread).saving(space.ns, checkpoint, run_of(control), settled, source)


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
    run = run_of(runtime.control)
    config = get_config()
    if run is not None:
        return run.lane(info, config)
    from holdfast.contrib.langgraph.saver import HoldfastSaver

    if kind != "read" and isinstance(config["configurable"].get("__pregel_checkpointer"), HoldfastSaver):
        raise NoAgent(
            f"{name} was called after its run had ended; it was not called",
            hint="Wait for all tasks and threads of a node before it returns.",
        )
    return None
