"""What the store's tests share: a small writer of commits, and child processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from holdfast.store.catalog import Append, BranchRow, Commit, Event, NewRecord, checkpoint_id, effect_chain
from holdfast.store.embedded import Embedded
from tests import warm

ROOT = Path(__file__).resolve().parents[2]


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def event() -> Event:
    return Event(1, b"\x80")


def new_branch(store: Embedded, name: str = "one") -> BranchRow:
    key = name.encode().ljust(32, b".")
    _, branch = store.add_agent(
        key=key,
        body=b"\x80",
        uuid=os.urandom(16),
        branch_key=b"main".ljust(32, b"."),
        branch_body=b"\x80",
        branch_uuid=os.urandom(16),
        event=event(),
    )
    return branch


class Hand:
    """Writes one checkpoint after another on a branch, as an agent would."""

    def __init__(self, store: Embedded, branch: BranchRow, **lease) -> None:
        self.store = store
        self.lease = store.lease(branch, **lease)
        self.row = self.lease.row
        self.head = self.row.head_id
        self.depth = 0
        self.ids: list[bytes] = []

    def next(self, tail: bytes | None = b"tail", **more) -> Commit:
        manifest = more.pop("manifest", None) or os.urandom(200)
        self.depth += 1
        return Commit(
            self.row.a,
            self.row.b,
            self.lease.generation,
            self.head,
            checkpoint_id(manifest),
            self.depth,
            manifest,
            os.urandom(50),
            tail=tail,
            **more,
        )

    def commit(self, tail: bytes | None = b"tail", **more) -> int | None:
        commit = self.next(tail, **more)
        n = self.store.commit(commit)
        self.head = commit.id
        self.ids.append(commit.id)
        return n


def start(*arguments: object) -> subprocess.Popen[str]:
    """A child process that runs a function of child.py; it says "ready" when it has got there."""
    return warm.Popen(
        [sys.executable, "-m", "tests.store.child", *map(str, arguments)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def line(process: subprocess.Popen[str]) -> str:
    return process.stdout.readline().strip()


def finish(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=180)
    assert process.returncode == 0, out
    return out.strip()


class Pen:
    """Writes one record after another on the line of a branch, as a journal would, without its care."""

    def __init__(self, hand: Hand) -> None:
        self.hand = hand
        line = hand.store.line(hand.row.b)
        self.count, self.chain = line.count, line.chain

    def next(self, *bodies: bytes, **more) -> Append:
        end = self.chain
        for body in bodies:
            end = effect_chain(end, body)
        row, generation = self.hand.row, more.pop("generation", self.hand.lease.generation)
        records = [NewRecord(more.pop("mark", 0), more.pop("refs", b""), body) for body in bodies]
        append = Append(row.a, row.b, generation, self.count, self.chain, records, end, **more)
        self.count, self.chain = self.count + len(bodies), end
        return append

    def write(self, *bodies: bytes, flush: bool = True, **more) -> None:
        self.hand.store.append(self.next(*bodies, **more), flush=flush)
