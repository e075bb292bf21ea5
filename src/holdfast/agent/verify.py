"""Verify: read everything and prove it.

Owns the proof that a store is what was written: the engine's structure, every row's sum, every node, chunk and value,
the hash chain of every agent, that the operations of each checkpoint lead to the digests that it recorded, and the
records of what happened outside.
Changes nothing. What always holds: everything is read as it was at one moment, so that what others write or forget
meanwhile is never taken for damage; damage is reported with the checkpoints it affects, and one damaged thing does not
keep the rest from being checked; what lies in a place that does not answer is neither proven nor called damaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast.agent import history
from holdfast.agent.ledgers import Ledgers
from holdfast.agent.line import Line
from holdfast.agent.manifest import Manifest
from holdfast.codec.state import State
from holdfast.codec.values import decode
from holdfast.errors import ColdPlaceMissing, Damaged, HoldfastError, Rekeying
from holdfast.store.bodies import body_of
from holdfast.store.catalog import AgentRow, CheckpointRow, Progress, lost_metadata, quietly
from holdfast.store.contents import Moment
from holdfast.store.ranges import Ranges
from holdfast.store.schema import SUMMED_TABLES
from holdfast.store.sealing import Values
from holdfast.store.witness import WitnessReport, witness_report

if TYPE_CHECKING:
    from holdfast.agent.store import Store

# States kept at hand while walking a history that branches; others are loaded again, which is bounded work.
_STATES_KEPT = 4


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding. ``affected`` are the ids of checkpoints whose state can no longer be proven."""

    what: str
    detail: str
    agent: str = ""
    affected: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"what": self.what, "detail": self.detail, "agent": self.agent, "affected": self.affected}


@dataclass(slots=True)
class Unreachable:
    """A colder place that did not answer. What lies there, and the ``checkpoints`` that need it, could not be proven.

    Nothing is known to be wrong with any of it.
    """

    place: str
    detail: str
    hint: str
    packs: int = 0
    _needing: dict[str, None] = field(default_factory=dict)

    @property
    def checkpoints(self) -> list[str]:
        return list(self._needing)

    def add(self, checkpoints: Sequence[str], packs: int) -> None:
        self._needing.update(dict.fromkeys(checkpoints))
        self.packs += packs

    def to_json(self) -> dict[str, Any]:
        return {
            "place": self.place, "detail": self.detail, "packs": self.packs, "checkpoints": self.checkpoints,
        }  # fmt: skip


class VerifyReport:
    """What was checked and what was found. ``problems`` are damage, ``unreachable`` is what could not be looked at."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.unreachable: list[Unreachable] = []
        self.checked: dict[str, int] = {
            "rows": 0, "agents": 0, "checkpoints": 0, "operations": 0, "nodes": 0, "chunks": 0, "bytes": 0,
            "effects": 0,
        }  # fmt: skip

    @property
    def ok(self) -> bool:
        """Whether everything was looked at and is as it was written."""
        return not self.problems and not self.unreachable

    def lost_metadata(self) -> None:
        """Count a record that a repair put in the place of metadata which it could not save: that is no damage."""
        self.checked["lost_metadata_records"] = self.checked.get("lost_metadata_records", 0) + 1

    @property
    def affected(self) -> list[str]:
        """Ids of all checkpoints that some problem touches."""
        return list(dict.fromkeys(name for problem in self.problems for name in problem.affected))

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "checked": self.checked,
            "problems": [problem.to_json() for problem in self.problems],
            "affected": self.affected,
            "unreachable": [one.to_json() for one in self.unreachable],
        }

    def __str__(self) -> str:
        counts = ", ".join(f"{count:,} {name}" for name, count in self.checked.items())
        if self.ok:
            return f"all is well: {counts}"
        away = [
            f"- not looked at: {one.packs} pack(s), {len(one.checkpoints)} checkpoint(s): {one.detail}"
            for one in self.unreachable
        ]
        found = [f"- {problem.what}: {problem.detail}" for problem in self.problems]
        return "\n".join([f"{len(self.problems)} problem(s): {counts}", *found, *away])

    def __repr__(self) -> str:
        away = f", {len(self.unreachable)} places unreachable" if self.unreachable else ""
        return f"<VerifyReport {'ok' if self.ok else f'{len(self.problems)} problems{away}'}>"


def verify(store: Store, progress: Progress | None, agents: Sequence[str]) -> VerifyReport:
    """Prove the whole store, or the states of some agents and everything that they share with others."""
    report = VerifyReport()
    try:
        store._catalog.flush()
    except HoldfastError as error:
        report.problems.append(Problem("catalog", error.message))
    noted = witness_report(store.path)  # before the moment, which can then only be newer
    with store._catalog.moment() as moment:
        run = _Verification(store, moment, report, progress or quietly)
        run.engine(noted)
        run.rows()
        run.nodes()
        run.chunks()
        rows: list[AgentRow] = []
        with run.finding("agents"):
            rows = moment.agents()
        names = {row.a: run.name_of(row) for row in rows}
        for row in rows:
            if not agents or names[row.a] in agents:
                run.agent(row, names[row.a])
        run.lines()
        run.events()
    if report.problems and store._catalog.encrypted:
        with run.finding("store.db"):
            store._catalog.fact("cipher")  # raises where another key explains them
    return report


class _Verification:
    def __init__(self, store: Store, moment: Moment, report: VerifyReport, progress: Progress) -> None:
        self.store = store
        self.catalog = moment
        self.progress = progress
        self.report = report
        # No type is known here, so that every instance is read as the record that it is stored as: what is proven are
        # the bytes, before any migration.
        self.judged: dict[tuple[int, bytes], dict[str, Any]] = {}  # agent, checkpoint -> what its validity row says
        self.walked: set[int] = set()  # agents whose checkpoints were all read
        self.newest: dict[int, tuple[int, bytes]] = {}  # branch -> the newest checkpoint that was made on it
        self.proven: set[int] = set()  # checkpoints that a clone need not prove again
        self.present = {"checkpoint": Ranges(), "event": Ranges(), "effect": Ranges()}
        self.forgotten: dict[int, Ranges] = {}  # agent -> the checkpoints that it said it forgot
        self.forgotten_ids: set[bytes] = set()  # of these, the ones that had children which stayed
        self.removed_effects = Ranges()
        self.unproven = 0  # times that something lay in a place which cannot be reached
        self.ledgers = Ledgers(
            self.catalog, lambda what, detail, affected: self.problem(what, detail, affected=affected)
        )

    @contextmanager
    def finding(
        self, what: str, agent: str = "", affected: list[str] | None = None, *, packs: int = 0
    ) -> Iterator[None]:
        """Turn an error into a problem. ``packs``: how many are not looked at where a place cannot be reached."""
        try:
            yield
        except Rekeying:
            raise
        except ColdPlaceMissing as error:
            self.unreachable(error, affected or [], packs)
        except HoldfastError as error:
            named = ", ".join(getattr(error, "what", ()) or ()) or what
            self.problem(named, error.message, agent, affected or [])
        except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            self.problem(what, f"does not follow the format ({type(error).__name__}: {error})", agent, affected or [])

    def unreachable(self, error: ColdPlaceMissing, checkpoints: Sequence[str], packs: int) -> None:
        """Each place is told of once, however many packs lie there."""
        known = next((one for one in self.report.unreachable if one.place == error.place), None)
        if known is None:
            known = Unreachable(error.place, error.message, error.hint)
            self.report.unreachable.append(known)
        known.add(checkpoints, packs)
        self.unproven += 1

    def problem(self, what: str, detail: str, agent: str = "", affected: Sequence[str] = ()) -> None:
        self.report.problems.append(Problem(what, detail, agent, list(affected)))

    # -- bytes ----------------------------------------------------------------------------------------

    def engine(self, witness: WitnessReport) -> None:
        self.progress("database structure", 0, 1)
        with self.finding("store.db"):
            for text in self.catalog.engine_check(quick=False):
                self.problem("store.db", text)
        for text in witness.problems:
            self.problem("witness", text)
        for text in self.store._catalog.key_problems():
            self.problem("keys", text)
        with self.finding("witness"):
            n, e, r = self.catalog.newest()
            noted = witness.newest
            if noted is not None and (n < noted.n or e < noted.e or r < noted.r):
                self.problem("witness", "the catalog is older than the newest commit that was acknowledged")
        self.progress("database structure", 1, 1)

    def rows(self) -> None:
        counts: dict[str, int] = {}
        with self.finding("store.db"):
            counts = self.catalog.counts()
        total = sum(counts.values())
        for table in sorted(SUMMED_TABLES):
            with self.finding(f"table {table}"):
                found: list[Any] = []
                for key, fits in self.catalog.scan(table):
                    self.report.checked["rows"] += 1
                    if table in self.present:
                        found.append(key)
                    if not fits:
                        name = key.hex() if isinstance(key, bytes) else key
                        self.problem(f"{table} {name}", "its content does not match its sum")
                if table in self.present:
                    self.present[table] = Ranges.of(found)
                self.progress("rows", self.report.checked["rows"], total)
        self._dense()
        with self.finding("table metadata"):
            for digest in self.catalog.metadata_digests():
                with self.finding(f"metadata {digest.hex()[:16]}"):
                    data = self.catalog.metadata(digest) or b""
                    decode(data, inert=True)
                    if data == lost_metadata(digest):
                        self.report.lost_metadata()

    def _dense(self) -> None:
        """Checkpoints and events are numbered without gaps but those that were told of, so a row that is gone shows."""
        with self.finding("store.db"):
            told = {"checkpoint": Ranges(), "event": Ranges(), "effect": Ranges()}
            branch = 0
            for row, body in self.catalog.forgotten():
                numbers = Ranges(body["n"])
                for table, gone in (("checkpoint", "n"), ("event", "e"), ("effect", "r")):
                    told[table] |= Ranges(body.get(gone, ()))
                self.forgotten[row.a] = self.forgotten.get(row.a, Ranges()) | numbers
                self.forgotten_ids.update(body["cut"])
                branch = max([branch, *body.get("branches", ())])
            self.removed_effects = told["effect"]
            n, e, r = self.catalog.newest()
            for table, newest in (("checkpoint", n), ("event", e), ("effect", r)):
                accounted = self.present[table] | told[table]
                if len(accounted) != newest:
                    self.problem(f"table {table}", f"{newest - len(accounted)} of {newest} rows are missing")
            agent, last = self.catalog.newest_names()
            numbered = (
                ("checkpoint", n), ("event", e), ("effect", r), ("agent", agent), ("branch", max(branch, last)),
            )  # fmt: skip
            if self.catalog.sequences() != {name: number for name, number in numbered if number}:
                self.problem("table sqlite_sequence", "the numbers given out so far are not those of the newest rows")

    def nodes(self) -> None:
        with self.finding("table node"):
            total = self.catalog.counts()["node"]
            for done, digest in enumerate(self.catalog.node_digests(), 1):
                with self.finding(f"node {digest.hex()[:16]}"):
                    self.report.checked["bytes"] += sum(map(len, self.catalog.nodes([digest]).values()))
                    self.report.checked["nodes"] += 1
                if done % 64 == 0 or done == total:
                    self.progress("nodes", done, total)

    def chunks(self) -> None:
        with self.finding("packs"):
            packs = self.catalog.pack_rows()
            for done, pack in enumerate(packs, 1):
                with self.finding(f"pack {pack.uuid.hex()}"):
                    for row in self.catalog.chunk_rows(pack.p):
                        with self.finding(f"chunk {row.digest.hex()[:16]}"):
                            self.report.checked["bytes"] += sum(map(len, self.catalog.chunks([row.digest])))
                            self.report.checked["chunks"] += 1
                with self.finding(f"pack {pack.uuid.hex()}", packs=1):
                    self.catalog.check_pack(pack)
                self.progress("packs", done, len(packs))

    # -- histories --------------------------------------------------------------------------------------

    def name_of(self, row: AgentRow) -> str:
        names = [f"agent {row.a}"]
        with self.finding(names[0]):
            names.append(str(body_of(row)["name"]))
        return names[-1]

    def agent(self, row: AgentRow, name: str) -> None:
        self.report.checked["agents"] += 1
        rows: dict[int, CheckpointRow] = {}
        lines: list[Line] = []
        with self.finding(f"agent {name}", name):
            lines.append(Line(self.store, row, reading=self.catalog))
        if not lines:
            return
        line = lines[0]
        with self.finding(f"agent {name}", name):
            for checkpoint in line.rows(newest_first=False):
                rows[checkpoint.n] = checkpoint
            self._shared(line, name)
            self.walked.add(row.a)
        states: dict[int, State] = {}
        broken: set[int] = set()
        away: set[int] = set()  # nothing is wrong with them as far as one can see
        resting: list[str] = []  # on a broken checkpoint, with no sealed state in between
        values = Values(self.catalog)
        for done, checkpoint in enumerate(rows.values(), 1):
            identity = checkpoint.id.hex()
            before = len(self.report.problems), self.unproven
            if checkpoint.a == row.a:
                self.newest[checkpoint.b] = checkpoint.n, checkpoint.id
            with self.finding(f"validity {checkpoint.n}", name, [identity]):
                judged = self.catalog.validity(row.a, checkpoint.n)
                self.judged[row.a, checkpoint.id] = body_of(judged) if judged is not None else {}
            with self.finding(f"checkpoint {identity[:12]}", name, [identity]):
                manifest = self._chain(line, checkpoint, rows)
                self.ledgers.speaks(checkpoint.n, checkpoint.b, manifest.effects, identity)
                if checkpoint.n in self.proven:
                    pass
                elif manifest.parent and (checkpoint.parent not in rows or checkpoint.parent in away):
                    history.operations_of(checkpoint, manifest, values)
                    states[checkpoint.n] = self._read(checkpoint)
                elif checkpoint.parent not in broken:
                    self._state(checkpoint, manifest, rows, states, values)
                elif checkpoint.sealed:
                    states[checkpoint.n] = self._read(checkpoint)
                else:
                    broken.add(checkpoint.n)
                    resting.append(identity)
            if (len(self.report.problems), self.unproven) != before:
                (broken if len(self.report.problems) > before[0] else away).add(checkpoint.n)
                states.pop(checkpoint.n, None)
            elif checkpoint.n not in broken:
                self.proven.add(checkpoint.n)
            self.report.checked["checkpoints"] += 1
            self.progress(f"checkpoints of {name}", done, len(rows))
        if resting:
            self.problem(
                "history", f"{len(resting)} later checkpoint(s) rest on ones that cannot be proven", name, resting
            )
        self._names(row, name, rows)

    def _shared(self, line: Line, name: str) -> None:
        """What an origin has forgotten is still there for those who see it."""
        for a, (most, _) in line.origins.items():
            for n in self.forgotten.get(a, Ranges()).upto(most):
                if n not in line.forgotten and n not in self.present["checkpoint"]:
                    self.problem(f"checkpoint {n}", "it is missing from the history of a clone", name)

    def _chain(self, line: Line, row: CheckpointRow, rows: dict[int, CheckpointRow]) -> Manifest:
        """The manifest, its parent, its place."""
        manifest = Manifest.decode(row.manifest)
        parent = rows.get(row.parent)
        if parent is not None or not manifest.parent:
            if row.parent and parent is None:
                raise _bad(row, "its parent is missing")
            if manifest.parent != (parent.id if parent is not None else b""):
                raise _bad(row, "its parent is not the checkpoint that it names")
            if row.depth != (parent.depth if parent is not None else 0) + 1:
                raise _bad(row, "its depth is not its parent's plus one")
            if row.base not in {row.n, parent.base if parent is not None else 0}:
                raise _bad(row, "its base is neither itself nor its parent's")
        elif row.parent not in line.forgotten and (row.parent or manifest.parent not in self.forgotten_ids):
            raise _bad(row, "its parent is missing")
        elif row.depth < 2 or (not row.parent and not row.sealed):
            raise _bad(row, "its parent was forgotten, and it does not stand alone")
        if manifest.agent not in line.uuids or not line.owns(row.a, row.n):
            raise _bad(row, "it belongs to another agent")
        if self.catalog.metadata(manifest.metadata) is None:
            raise _bad(row, "its metadata is missing")
        return manifest

    def _state(
        self,
        row: CheckpointRow,
        manifest: Manifest,
        rows: dict[int, CheckpointRow],
        states: dict[int, State],
        values: Values,
    ) -> None:
        """Replay the operations on the parent's state, and for a sealed checkpoint read the nodes as well."""
        operations = history.operations_of(row, manifest, values)
        self.report.checked["operations"] += len(operations)
        state = states.pop(row.parent, None)
        if state is None:
            state = history.state_of(self.catalog, rows[row.parent] if row.parent else None)
        state.do(operations)
        if state.digests() != manifest.sections:
            raise _bad(row, "its operations do not lead to the state that it recorded")
        history.read_values(state, operations)
        if row.sealed:
            self._read(row)
        states[row.n] = state
        while len(states) > _STATES_KEPT:
            del states[min(states)]

    def _read(self, row: CheckpointRow) -> State:
        """A sealed state, read from its nodes alone, and every value in it."""
        return history.read_all(self.catalog, row)

    def _names(self, row: AgentRow, name: str, rows: dict[int, CheckpointRow]) -> None:
        """Branches and tags lead to the checkpoints that they name."""
        with self.finding(f"branches of {name}", name):
            for branch in self.catalog.branches(row.a):
                head = rows.get(branch.head)
                if branch.head_id != (head.id if head is not None else b"") or (branch.head and head is None):
                    self.problem(f"branch {body_of(branch)['name']}", "its head is not the checkpoint it names", name)
        with self.finding(f"tags of {name}", name):
            for tag in self.catalog.tags(row.a):
                body = body_of(tag)
                if tag.n not in rows or rows[tag.n].id != body["at"]:
                    self.problem(f"tag {body['name']}", "it does not lead to the checkpoint it names", name)

    def lines(self) -> None:
        total = 0
        with self.finding("store.db"):
            total = self.catalog.counts()["effect"]
        with self.finding("table effect"):
            self.ledgers.prove(self.removed_effects, lambda done: self.progress("effects", done, total))
        self.report.checked["effects"] = self.ledgers.checked

    def events(self) -> None:
        """The catalog's names are what its events say, so that one that is gone or was put back shows."""
        with self.finding("table event"):
            told = Told()
            for event in self.catalog.events():
                told.add(event.a, body_of(event))
            found = {row.a for row in self.catalog.agents()}
            if found != set(told.branches):
                self.problem("table agent", f"{len(set(told.branches) - found)} agent(s) are missing")
            for a in found:
                rows = {body_of(row)["name"]: row for row in self.catalog.branches(a)}
                if set(rows) != told.branches.get(a, set()):
                    self.problem("table branch", f"agent {a}: branches are missing or were never made")
                for name, row in rows.items():
                    if self.ledgers.start(row.b) != told.lines.get((a, name), (0, 0)):
                        self.problem(f"branch {name}", f"agent {a}: its line does not begin where its history says")
                for name, row in rows.items() if a in self.walked else ():
                    newest = self.newest.get(row.b, (0, body_of(row)["from"]))
                    if row.head_id != told.head(a, name, *newest):
                        self.problem(f"branch {name}", f"agent {a}: its head is not where its history left it")
                marked = {body_of(row)["name"]: body_of(row)["at"] for row in self.catalog.tags(a)}
                if marked != told.tags.get(a, {}):
                    self.problem("table tag", f"agent {a}: tags are missing or were moved behind the history's back")
            for (a, identity), body in self.judged.items():
                judged = body.get("validity", "good"), body.get("reason", "")
                if judged != told.validity.get(a, {}).get(identity, ("good", "")):
                    short = identity.hex()[:12]
                    self.problem("table validity", f"checkpoint {short}: not what was said of it", "", [identity.hex()])


class Told:
    """What the events say that the catalog should hold."""

    def __init__(self) -> None:
        self.branches: dict[int, set[str]] = {}
        self.tags: dict[int, dict[str, bytes]] = {}
        self.validity: dict[int, dict[bytes, tuple[str, str]]] = {}
        self.rollbacks: dict[tuple[int, str], list[tuple[bytes, bytes]]] = {}
        self.lines: dict[tuple[int, str], tuple[int, int]] = {}  # what branches inherited: origin, how many records
        # Where branches stood when something was forgotten, and the newest number at that time.
        self.stood: dict[tuple[int, str], tuple[int, bytes]] = {}

    def add(self, a: int, body: dict[str, Any]) -> None:
        match body["what"]:
            case "agent":
                self.branches[a] = {"main"}
            case "branch":
                self.branches.setdefault(a, set()).add(body["name"])
                if "line" in body:
                    self.lines[a, body["name"]] = body["line"][0], body["line"][1]
            case "tag":
                self.tags.setdefault(a, {})[body["name"]] = body["at"]
            case "untag":
                self.tags.get(a, {}).pop(body["name"], None)
            case "validity":
                judged = (body["validity"], body["reason"])
                self.validity.setdefault(a, {})[body["at"]] = ("good", "") if judged[0] == "good" else judged
            case "rollback":
                self.rollbacks.setdefault((a, body["branch"]), []).append((body["from"], body["to"]))
            case "clone":
                self.branches[a] = {name for name, _ in body["branches"]}
                self.tags[a] = dict(body["tags"])
                self.validity[a] = {identity: (validity, reason) for identity, validity, reason in body["validity"]}
                self.lines.update({(a, name): (origin, start) for name, origin, start in body.get("lines", ())})
            case "forget":
                for name in body["untag"]:
                    self.tags.get(a, {}).pop(name, None)
                for name, head in body["heads"]:
                    self.stood[a, name] = body["newest"], head
                    self.rollbacks.pop((a, name), None)
            case "receive":
                for name, head in body["heads"]:
                    self.stood[a, name] = body["newest"], head
                    self.rollbacks.pop((a, name), None)
            case "remove":
                self.branches.pop(a, None)
                self.tags.pop(a, None)

    def head(self, a: int, branch: str, n: int, newest: bytes) -> bytes:
        """Where a branch stands whose newest checkpoint (or, before the first, its beginning) is ``newest``."""
        then, stood = self.stood.get((a, branch), (-1, b""))
        if n <= then:
            newest = stood
        rollbacks = self.rollbacks.get((a, branch), [])
        # Going back over the rollbacks that followed each other: they came after ``newest`` if they started from it.
        expected = b""
        for start, end in reversed(rollbacks):
            if expected and end != expected:
                return newest
            if start == newest:
                return rollbacks[-1][1]
            expected = start
        return newest


def _bad(row: CheckpointRow, detail: str) -> HoldfastError:
    short = row.id.hex()[:12]
    return Damaged(f"checkpoint {short}: {detail}", what=(f"checkpoint {short}",))
