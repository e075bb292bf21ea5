"""Every error that Holdfast raises on purpose, in one tree.

Owns the names, the stable ``kind`` strings and the hints. Knows nothing of any other room.
The second level groups errors by what a handler would do:

    HoldfastError
      InputError        fix the call: nothing was changed
        Unencodable       a value that cannot be saved (path, reason)
        UnknownAgent      no agent of that name
        UnknownRevision   no such branch, tag, label, depth or id
          Forgotten         a checkpoint that was there and has been forgotten since
        BadName           an empty, too long or already used name
        BadOption         an argument outside its documented values
          BadExpression     an expression that cannot be read, or not evaluated (text, at)
          QueueDiffers      a program declares a queue with other numbers than the store has (queue)
        AtomicOpen        a checkpoint in the middle of `with agent.atomic():`
          ForkPointOpen     a checkpoint, or a tool that does not only read, inside `with fork_point():`
        ForkRefused       the process cannot be copied now (reason)
        ReadOnly          a change through a handle or a past state that only reads
          StoreCopied       a copy of a store whose packs lie elsewhere, not yet allowed to take its place (lost)
        Stale             a node that rollback, undo or redo removed from the state
        NothingToUndo     undo or redo with nothing left to reverse
        ThreadExists      a thread to be imported is there already, with other content (thread)
        NoAgent           a tool was called where no agent is current, while one is active elsewhere
        UnknownTool       a tool, probe or durable function that this program does not have
        UnknownSecret     a secret that nobody gave to this process
        NotInDump         a thread, frame or value that the dump does not hold
      Outcome           an outside call, or the run around it, did not go through
        ToolFailed        the call failed and that is known (tool, error_type, path)
        FailedBeforeEffect  raised by tools: nothing has happened outside, so the call may be repeated
        ResultLost        the call was done, but what it returned cannot be saved
        ResultForgotten   it was done, and what came of it was let go since: it is not done again (tool, path, run)
        InDoubt           nobody can know whether an effect happened (effects)
        MaybeRepeated     the call may repeat one that was made before the restore (unclaimed)
        Diverged          the program does not do what it did when it was recorded (path, expected, actual)
        Blocked           a program that is executed again tried to do something outside; it was not done
        RunUnfinished     a run of this agent has not ended, and nothing else is done on its branch (run)
        RunEnded          a run has ended: it is not begun anew by itself, and takes no signal (run, status)
        RollbackBlocked   effects stand in the way of a rollback, or could not be undone (blocked, remaining)
        WorkspaceBlocked  files of a workspace cannot be put back, because something is in the way (paths)
        RunRolledBack     a run was rolled back from inside: it has stopped there (checkpoint, undone)
        Waiting           the run sleeps or waits for a signal, and was not to block (run, until, signal)
        BreakerOpen       the tool failed too often lately; it was not called (tool, breaker, until)
        NotQuiet          something was not quiet in time for a checkpoint, and nothing was saved
        CandidateFailed   a candidate of `explore` came to no value (candidate, reason)
        GateFailed        the state did not pass a check, and was not saved (gate, plan)
        InvariantViolated  the state breaks an invariant that refuses it, and was not saved (invariant, plan)
        WatchTriggered    a watchpoint was met that raises (path, old, new)
        BisectFailed      a bisection was stopped, or its ends are not what they were said to be (skipped)
      Contention        try later, or decide who may write
        AgentBusy         another process holds this branch (holder)
        StoreBusy         other writers kept the store for too long
        Fenced            this handle lost its branch to another writer
        HistoriesDiverged  an agent has gone on in two stores (agent, branch, source_head, dest_head)
        StillArriving     an agent or branch whose transfer from elsewhere was interrupted
      Incompatible      the data is healthy, this program cannot read it
        NotAStore         the path holds something else
        NewerFormat       written by a newer Holdfast
        KeyNeeded         the store is encrypted and no key was given
        WrongKey          the store is encrypted and this key does not open it
        NotEncrypted      a key was given, and the store is not encrypted
        UnknownType       a type that is not registered here
        SchemaMismatch    a type's stored version has no way to the registered one
        SourceUnreadable  what is to be imported is not there, or not what it should be
        NotABundle        the file is not a bundle of agents
        NotADump          the file is not a dump
        NotAnImage        the checkpoint has no image of a process that this program can read
        UntrustedImage    an image that this machine did not make; to thaw it is to run it
      Damaged           stored bytes are wrong (what, affected, newest_valid)
        StoreWentBack     the whole store is older than this user has seen it (lost)
        CorruptValue      bytes that are not a value of the format
        NotAuthentic      encrypted bytes that were not written here with the store's key
        Untracked         paranoid mode found a change that was never recorded
      Unavailable       the machine said no; nothing acknowledged is lost
        StoreReadOnly     the directory cannot be written
        DiskFull          no room; works again when there is
        StorePoisoned     a flush failed; reopen to go on from the last durable point
        StoreClosed       the handle was closed
        ForkedHandle      a handle from before fork, used in the child
        ForkLost          a copy of this process is gone before it was done
        StoreFailed       any other failure of the disk or of SQLite
        ColdPlaceMissing  old packs lie in a place that cannot be reached (place)
        DumpFailed        a dump could not be written
        NotFrozen         a process could not be saved whole; it goes on as before (pid)
        NotThawed         a saved process could not be brought back; files are as they were
        NotProbed         a process could not be probed; it goes on as before (pid)

Beside the tree stands ``Cancelled``, which is no ``Exception``: a handler for what may go wrong is not meant.
"""

from __future__ import annotations

from typing import ClassVar


def command(*words: str) -> str:
    """A command of Holdfast as a person can type it: names with spaces in them are quoted."""
    from shlex import join  # few programs come here

    return join(("holdfast", *words))


class HoldfastError(Exception):
    """The base of all errors here. ``kind`` is stable and machine-readable; ``hint`` says what to do next."""

    kind: ClassVar[str] = "error"
    message = ""  # of a derived class that does not call this constructor
    hint = ""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        text = self.message or super().__str__()
        return f"{text}\n{self.hint}" if self.hint else text


class InputError(HoldfastError):
    """The call was wrong; nothing was changed."""

    kind = "input"


def format_path(parts: tuple[object, ...], root: str = "state") -> str:
    """``("plan", 3, Attribute("callback"))`` -> ``state.plan[3].callback``."""
    text = root
    for part in parts:
        if isinstance(part, Attribute) or (isinstance(part, str) and part.isidentifier()):
            text += f".{part}"
        else:
            text += f"[{part!r}]"
    return text


class Attribute(str):
    """A path part that is an attribute of an instance, not a key."""

    __slots__ = ()


class Unencodable(InputError, TypeError):
    """A value that cannot be saved. ``path`` is where it sits below ``root``, ``reason`` what is wrong with it."""

    kind = "unencodable"
    root = "state"

    def __init__(self, reason: str, *, path: tuple[object, ...] = (), hint: str = "") -> None:
        super().__init__(reason, hint=hint)
        self.reason = reason
        self.path = path

    def within(self, *parts: object) -> Unencodable:
        """The same error seen from further out: ``parts`` go in front of the path."""
        self.path = (*parts, *self.path)
        return self

    def __str__(self) -> str:
        text = f"{format_path(self.path, self.root)}: {self.reason}"
        return f"{text}\n{self.hint}" if self.hint else text


class UnknownAgent(InputError, LookupError):
    """No agent of that name is in the store."""

    kind = "unknown-agent"


class UnknownRevision(InputError, LookupError):
    """The revision names nothing in this agent's history."""

    kind = "unknown-revision"


class Forgotten(UnknownRevision):
    """The checkpoint was there and has been forgotten since: by a removal, or by a policy of what to keep."""

    kind = "forgotten"


class BadName(InputError, ValueError):
    """An agent, branch or tag name that is empty, too long or taken."""

    kind = "bad-name"


class BadOption(InputError, ValueError):
    """An argument outside its documented values."""

    kind = "bad-option"


class BadExpression(BadOption):
    """An expression that cannot be read, or not evaluated on this state. ``at`` is the place in ``text``, from 0."""

    kind = "bad-expression"

    def __init__(self, message: str, *, text: str = "", at: int = 0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.text = text
        self.at = at


class QueueDiffers(BadOption):
    """A program declares a queue with other numbers than the store has. ``queue`` is its name."""

    kind = "queue-differs"

    def __init__(self, message: str, *, queue: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.queue = queue


class AtomicOpen(InputError):
    """A checkpoint was asked for while ``with agent.atomic():`` is open, here or in another task or thread."""

    kind = "atomic-open"


class ForkPointOpen(AtomicOpen):
    """A checkpoint or a tool was asked for in a memory that may not be the one that goes on; nothing was done."""

    kind = "fork-point-open"


class ForkRefused(InputError):
    """The process cannot be copied: ``reason`` says why. Nothing was done."""

    kind = "fork-refused"

    def __init__(self, message: str, *, reason: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.reason = reason


class ReadOnly(InputError):
    """A change was tried through something that only reads."""

    kind = "read-only"


class StoreCopied(ReadOnly):
    """A copy of a store whose packs lie elsewhere, where the original would delete what is written by this one.

    ``lost`` says in words what may be missing here. ``trust_older=True`` lets it take the place of the original.
    """

    kind = "store-copied"

    def __init__(self, message: str, *, lost: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.lost = lost


class Stale(InputError):
    """The node is no longer part of the state: a rollback, undo or redo removed it."""

    kind = "stale"


class NothingToUndo(InputError):
    """There is no checkpoint left to undo, or none to redo."""

    kind = "nothing-to-undo"


class ThreadExists(InputError):
    """The store has a thread of that name with other content; it was left as it is."""

    kind = "thread-exists"

    def __init__(self, message: str, *, thread: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.thread = thread


class NoAgent(InputError):
    """A tool was called in a thread or task that does not know which agent it works for; nothing was called."""

    kind = "no-agent"


class UnknownTool(InputError, LookupError):
    """A tool, probe, compensation or durable function of that name is not loaded in this program."""

    kind = "unknown-tool"


class UnknownSecret(InputError, LookupError):
    """Nobody has given this secret to this process. Secrets are not stored: each process gets them anew."""

    kind = "unknown-secret"


class NotInDump(InputError, LookupError):
    """The dump holds no such thread, task, frame or value."""

    kind = "not-in-dump"


class Outcome(HoldfastError):
    """An outside call, or the run around it, did not go through."""

    kind = "outcome"


class ToolFailed(Outcome):
    """The call failed, and it is recorded so. ``error_type`` and ``reason`` are those of the tool's own exception."""

    kind = "tool-failed"

    def __init__(self, message: str, *, tool: str, error_type: str = "", path: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.tool = tool
        self.error_type = error_type
        self.path = path


class FailedBeforeEffect(Outcome):
    """Raised by a tool that knows that nothing has happened outside. The call may then be repeated safely."""

    kind = "failed-before-effect"


class ResultLost(Outcome):
    """The call was done and must not be repeated, but what it returned cannot be saved."""

    kind = "result-lost"

    def __init__(self, message: str, *, tool: str, path: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.tool = tool
        self.path = path


class ResultForgotten(Outcome):
    """What a call or a run was given, or returned, was let go by a policy of what to keep. It is not done again."""

    kind = "result-forgotten"

    def __init__(self, message: str, *, tool: str = "", path: str = "", run: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.tool = tool
        self.path = path
        self.run = run


class InDoubt(Outcome):
    """It is not known whether these effects happened. Nothing new starts until somebody decides."""

    kind = "in-doubt"

    def __init__(self, message: str, *, effects: tuple[object, ...] = (), hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.effects = effects


class MaybeRepeated(Outcome):
    """The call was not made: it looks like one of ``unclaimed``, which happened before the state was restored."""

    kind = "maybe-repeated"

    def __init__(self, message: str, *, unclaimed: tuple[object, ...] = (), hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.unclaimed = unclaimed


class Diverged(Outcome):
    """The program does something else than what is recorded at ``path``."""

    kind = "diverged"

    def __init__(self, message: str, *, path: str = "", expected: str = "", actual: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.path = path
        self.expected = expected
        self.actual = actual


class Blocked(Outcome):
    """A program that is executed again tried to do something outside; it was not done."""

    kind = "blocked"


class RunUnfinished(Outcome):
    """The branch belongs to a run that has not ended, ``run``: nothing else was begun, done or saved there."""

    kind = "run-unfinished"

    def __init__(self, message: str, *, run: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.run = run


class RunEnded(Outcome):
    """The run has ended: it is neither resumed nor begun anew, and takes no signal.

    ``run`` is its id, if there is one, ``status`` says how it ended.
    """

    kind = "run-ended"

    def __init__(self, message: str, *, run: str = "", status: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.run = run
        self.status = status


class Waiting(Outcome):
    """The run is put off: until ``until`` (microseconds, 0: no limit), or until ``signal`` is sent."""

    kind = "waiting"

    def __init__(self, message: str, *, run: str = "", until: int = 0, signal: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.run = run
        self.until = until
        self.signal = signal


class BreakerOpen(Outcome):
    """The tool was not called: it has failed too often lately. It is tried again after ``until`` (microseconds)."""

    kind = "breaker-open"

    def __init__(self, message: str, *, tool: str = "", breaker: str = "", until: int = 0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.tool = tool
        self.breaker = breaker
        self.until = until


class GateFailed(Outcome):
    """The state did not pass the check of ``gate``; nothing was saved.

    ``plan`` is what going back to the last good checkpoint would do, where that was asked for and would undo something
    outside: then it was not done. Its cause is what the check raised, if it raised.
    """

    kind = "gate-failed"

    def __init__(self, message: str, *, gate: str = "", plan: object = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.gate = gate
        self.plan = plan


class InvariantViolated(Outcome):
    """The state breaks ``invariant``, which refuses it; nothing was saved, and the live state stays.

    ``plan`` is what going back would do, where the invariant asks for that and it was not done: something outside would
    have to be undone, or it was done too often in a row.
    """

    kind = "invariant-violated"

    def __init__(self, message: str, *, invariant: object = None, plan: object = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.invariant = invariant
        self.plan = plan


class WatchTriggered(Outcome):
    """A watchpoint was met that raises: what stands at ``path`` has become ``new``, and was ``old``."""

    kind = "watch-triggered"

    def __init__(self, message: str, *, path: str = "", old: object = None, new: object = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.path = path
        self.old = old
        self.new = new


class BisectFailed(Outcome):
    """A bisection ended without an answer: its check asked for that, or too little could be checked.

    ``skipped`` are pairs of a checkpoint and why its verdict is not known.
    """

    kind = "bisect-failed"

    def __init__(self, message: str, *, skipped: tuple[object, ...] = (), hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.skipped = skipped


class NotQuiet(Outcome):
    """What was asked to be quiet for a checkpoint was not, or not in time; nothing was saved."""

    kind = "not-quiet"


class CandidateFailed(Outcome):
    """A candidate of ``explore`` came to no value.

    ``reason`` is raised, time, memory, died or value; ``candidate`` its place in the list; ``error_type`` the class of
    what it raised.
    """

    kind = "candidate-failed"

    def __init__(
        self, message: str, *, candidate: int = 0, reason: str = "", error_type: str = "", hint: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.candidate = candidate
        self.reason = reason
        self.error_type = error_type


class RollbackBlocked(Outcome):
    """A rollback cannot be done, or not to its end. Nothing was skipped, and the state has not moved.

    ``blocked`` are the effects that stand in the way, ``remaining`` those that are still to be undone, newest first.
    """

    kind = "rollback-blocked"

    def __init__(
        self, message: str, *, blocked: tuple[object, ...] = (), remaining: tuple[object, ...] = (), hint: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.blocked = blocked
        self.remaining = remaining


class WorkspaceBlocked(Outcome):
    """Files of a workspace cannot be put back: ``paths`` says which, the message why, and what was done."""

    kind = "workspace-blocked"

    def __init__(self, message: str, *, paths: tuple[bytes, ...] = (), hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.paths = paths


class RunRolledBack(Outcome):
    """The run called ``rollback``: its state is that of ``checkpoint`` now, and ``undone`` was undone."""

    kind = "run-rolled-back"

    def __init__(
        self, message: str, *, checkpoint: object = None, undone: tuple[object, ...] = (), hint: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.checkpoint = checkpoint
        self.undone = undone


class Cancelled(BaseException):
    """The run is to stop: somebody has cancelled it, or its time limit is over. ``by`` says who.

    It is raised once, in the place of a recorded call. What is called while it is handled is done as ever. With
    ``undo``, what the run did is undone when it has ended; otherwise that stands.
    """

    kind: ClassVar[str] = "cancelled"
    hint = ""

    def __init__(self, message: str, *, by: str = "", undo: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.by = by
        self.undo = undo


class Contention(HoldfastError):
    """Somebody else is writing."""

    kind = "contention"


class AgentBusy(Contention):
    """Another handle holds the branch. ``holder`` describes it: pid, host, program, since."""

    kind = "agent-busy"

    def __init__(self, message: str, *, holder: dict[str, object] | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.holder = holder or {}


class StoreBusy(Contention):
    """Other writers kept the store locked for longer than the limit."""

    kind = "store-busy"


class Fenced(Contention):
    """This handle is no longer the writer of its branch; nothing was written."""

    kind = "fenced"


class HistoriesDiverged(Contention):
    """Two stores hold histories of one agent of which neither contains the other; nothing was mixed.

    ``source_head`` and ``dest_head`` are where ``branch`` stands in each, empty where one has another agent altogether.
    """

    kind = "histories-diverged"

    def __init__(
        self,
        message: str,
        *,
        agent: str = "",
        branch: str = "",
        source_head: str = "",
        dest_head: str = "",
        hint: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.agent = agent
        self.branch = branch
        self.source_head = source_head
        self.dest_head = dest_head


class StillArriving(Contention):
    """An agent, or a branch of it, that is coming from elsewhere and is not whole yet."""

    kind = "still-arriving"


class Incompatible(HoldfastError):
    """Healthy data that this program cannot read."""

    kind = "incompatible"


class NotAStore(Incompatible):
    """The path exists and is not a Holdfast store."""

    kind = "not-a-store"


class NewerFormat(Incompatible):
    """The store was written by a newer format version."""

    kind = "newer-format"


class KeyNeeded(Incompatible):
    """The store is encrypted, and no key was given."""

    kind = "key-needed"


class WrongKey(Incompatible):
    """The store is encrypted, and the key that was given does not open it."""

    kind = "wrong-key"


class NotEncrypted(Incompatible):
    """A key was given, and the store is not encrypted. It is refused, because it may have been put there instead."""

    kind = "not-encrypted"


class UnknownType(Incompatible):
    """Stored data has a type that is not registered in this process. ``type_name`` names it."""

    kind = "unknown-type"

    def __init__(self, message: str, *, type_name: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.type_name = type_name


class SchemaMismatch(Incompatible):
    """A type's stored version is newer than the registered one, or a migration is missing."""

    kind = "schema-mismatch"

    def __init__(self, message: str, *, type_name: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.type_name = type_name


class SourceUnreadable(Incompatible):
    """What is to be imported cannot be read: it is not there, not what it should be, or a package is missing."""

    kind = "source-unreadable"


class NotABundle(Incompatible):
    """The file is not a bundle of agents, or cannot be read."""

    kind = "not-a-bundle"


class NotADump(Incompatible):
    """The file is not a dump, or cannot be read."""

    kind = "not-a-dump"


class NotAnImage(Incompatible):
    """The checkpoint holds no image of a process, or one that this program cannot read."""

    kind = "not-an-image"


class UntrustedImage(Incompatible):
    """An image that was not made here, or has changed since. A thaw runs what the image says."""

    kind = "untrusted-image"


class Damaged(HoldfastError):
    """Stored bytes are not what was written.

    ``what`` names the damaged things, ``newest_valid`` the checkpoint id that ``recover=True`` would take
    (empty when none), ``lost`` says in words what would be missing.
    """

    kind = "damaged"

    def __init__(
        self,
        message: str,
        *,
        what: tuple[str, ...] = (),
        newest_valid: str = "",
        lost: str = "",
        hint: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.what = what
        self.newest_valid = newest_valid
        self.lost = lost


class StoreWentBack(Damaged):
    """The store is older than this user has seen it: somebody put an old copy back, on purpose or not.

    ``lost`` says in words what is missing. ``trust_older=True`` goes on with what is there.
    """

    kind = "went-back"


class CorruptValue(Damaged):
    """Bytes that are not a value of the format, or exceed its limits."""

    kind = "corrupt-value"


class NotAuthentic(Damaged):
    """In an encrypted store: something that is damaged, not encrypted, moved here, or made with another key."""

    kind = "not-authentic"


class Untracked(Damaged):
    """Paranoid mode: the state in memory has a change that was never recorded."""

    kind = "untracked"


class Unavailable(HoldfastError):
    """The machine refused; what was acknowledged is safe."""

    kind = "unavailable"


class StoreReadOnly(Unavailable):
    """The store's directory cannot be written."""

    kind = "store-read-only"


class DiskFull(Unavailable):
    """No room on the disk. Nothing is half-written; it works again when there is room."""

    kind = "disk-full"


class StorePoisoned(Unavailable):
    """A flush failed, so what the disk holds is unknown. Reopen the store to go on."""

    kind = "store-poisoned"


class StoreClosed(Unavailable):
    """The store or agent handle was closed."""

    kind = "store-closed"


class ForkedHandle(Unavailable):
    """A handle that was opened before fork() was used in the child."""

    kind = "forked-handle"


class ForkLost(Unavailable):
    """What a copy of this process, made by a fork, was to save is not there: it was killed, or memory was short."""

    kind = "fork-lost"


class StoreFailed(Unavailable):
    """Any other failure of the disk or of the database."""

    kind = "store-failed"


class ColdPlaceMissing(Unavailable):
    """Packs were moved to a colder place, which cannot be reached. ``place`` is its URL."""

    kind = "cold-place-missing"

    def __init__(self, message: str, *, place: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.place = place


class DumpFailed(Unavailable):
    """A dump could not be written. The program is not touched by that."""

    kind = "dump-failed"


class NotFrozen(Unavailable):
    """A process could not be saved whole. It goes on as if nothing had been; ``pid`` is its number."""

    kind = "not-frozen"

    def __init__(self, message: str, *, pid: int = 0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.pid = pid


class NotProbed(Unavailable):
    """A process could not be probed, or has ended meanwhile. It goes on as before; ``pid`` is its number."""

    kind = "not-probed"

    def __init__(self, message: str, *, pid: int = 0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.pid = pid


class NotThawed(Unavailable):
    """A saved process could not be brought back. Its files are as they were before."""

    kind = "not-thawed"


class DetachedChange(UserWarning):
    """A container that was put into the state has changed outside it since; that change is not saved."""


class UnsavedChanges(UserWarning):
    """An agent, its store, ``with agent:`` or the program ended, and the state has changes that no checkpoint has."""
