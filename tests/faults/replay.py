"""What a disk may hold after a crash, computed from a recording of calls (tests/faults/disk.py).

The model: what was flushed is there. Of what was not, each sector of 512 bytes of a file has any of the contents that
it was given since, independently of the others; each change of a directory that was not flushed happened or did not.
So subsets, reorderings and torn writes all occur. A flush of a file promises nothing about its name.
A flush that failed has lost what it was to flush, and no later one brings it back.
Knows nothing of stores: a state is a mapping of paths to bytes, with None for a directory.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.faults.disk import ROOT_DIRECTORY, Call, Disk

SECTOR_BYTES = 512

State = dict[str, bytes | None]


@dataclass(slots=True)
class Content:
    """One file: what is flushed, and the writes and truncations since, as indexes into the recording."""

    flushed: bytes = b""
    pending: list[int] = field(default_factory=list)
    live: bytearray = field(default_factory=bytearray)


@dataclass(slots=True)
class Atom:
    """The smallest thing that reaches the disk or does not: a sector of a write, a truncation, a change of a name."""

    index: int
    start: int = 0
    end: int = 0


class Replay:
    """Walks through a recording; at each call it can tell the states in which a crash may leave the disk."""

    def __init__(self, disk: Disk) -> None:
        self.calls = disk.calls
        self._files = {number: Content(data, [], bytearray(data)) for number, data in disk.contents.items()}
        self._names = {number: dict(entries) for number, entries in disk.tree_before.items()}
        self._flushed_names = {number: dict(entries) for number, entries in disk.tree_before.items()}
        self._pending_names: dict[int, list[int]] = {}
        self.at = 0

    def step(self) -> Call:
        """Take the next call into account."""
        index, call = self.at, self.calls[self.at]
        self.at += 1
        if call.what == "create":
            self._files[call.file] = Content()
        elif call.what == "mkdir":
            self._names[call.file] = {}
            self._flushed_names[call.file] = {}
        if call.what in {"create", "mkdir", "rename", "unlink", "rmdir"}:
            _rename(self._names, call)
            self._pending_names.setdefault(call.directory, []).append(index)
        elif call.what == "syncdir":
            self._flushed_names[call.file] = dict(self._names[call.file])
            self._pending_names[call.file] = []
        elif call.file in self._files:
            content = self._files[call.file]
            if call.what == "sync":
                data = bytearray(content.flushed)
                for number in content.pending:
                    _write(data, self.calls[number], 0, len(self.calls[number].data))
                content.flushed = bytes(data)
                content.pending = []
            elif call.what == "failed":  # the system has forgotten that these were not written: no flush will again
                content.pending = []
            elif call.what in {"write", "truncate"}:
                _write(content.live, call, 0, len(call.data))
                content.pending.append(index)
        return call

    # States

    def atoms(self) -> list[Atom]:
        """Everything that is not flushed now, in the order in which it was done."""
        found: list[Atom] = []
        for content in self._files.values():
            for index in content.pending:
                found += self._sectors(index)
        found += [Atom(index) for pending in self._pending_names.values() for index in pending]
        return sorted(found, key=lambda atom: (atom.index, atom.start))

    def _sectors(self, index: int) -> list[Atom]:
        call = self.calls[index]
        if call.what == "truncate":
            return [Atom(index)]
        cuts = [0]
        to_next = SECTOR_BYTES - call.offset % SECTOR_BYTES
        cuts += range(to_next, len(call.data), SECTOR_BYTES)
        return [Atom(index, start, end) for start, end in zip(cuts, [*cuts[1:], len(call.data)], strict=True)]

    def everything(self) -> State:
        """The disk as the program sees it: what a killed process leaves behind."""
        return self._state(self._names, {number: bytes(content.live) for number, content in self._files.items()})

    def state(self, atoms: Sequence[Atom], chosen: Sequence[bool]) -> State:
        """The disk after a crash, of what was not flushed only the chosen atoms."""
        taken: dict[int, list[Atom]] = {}
        missing: set[tuple[int, int]] = set()  # sectors of which an earlier version is not there, so no later one is
        for atom, there in zip(atoms, chosen, strict=True):
            call = self.calls[atom.index]
            sector = (call.file, (call.offset + atom.start) // SECTOR_BYTES)
            if atom.end and not there:
                missing.add(sector)
            if there and not (atom.end and sector in missing):
                taken.setdefault(atom.index, []).append(atom)
        contents = {}
        for number, content in self._files.items():
            if not content.pending:
                contents[number] = content.flushed
                continue
            data = bytearray(content.flushed)
            for index in content.pending:
                for atom in taken.get(index, ()):
                    _write(data, self.calls[index], atom.start, atom.end)
            contents[number] = bytes(data)
        names = {number: dict(entries) for number, entries in self._flushed_names.items()}
        for index in sorted(index for pending in self._pending_names.values() for index in pending):
            if index in taken:
                _rename(names, self.calls[index])
        return self._state(names, contents)

    def _state(self, names: dict[int, dict[str, int]], contents: dict[int, bytes]) -> State:
        found: State = {}

        def walk(directory: int, prefix: str) -> None:
            for name, number in sorted(names[directory].items()):
                if number in names:
                    found[prefix + name] = None
                    walk(number, f"{prefix}{name}/")
                elif number in contents:
                    found[prefix + name] = contents[number]

        walk(ROOT_DIRECTORY, "")
        return found

    def states(self, chance: random.Random, samples: int) -> Iterator[State]:
        """States in which a crash just after the last call may leave the disk, some of them equal.

        All of it and none of it; the last write torn at every sector, from either end; all but one and only one of the
        calls; then ``samples`` random choices of calls, of sectors, and of names alone.
        """
        yield self.everything()
        atoms = self.atoms()
        if not atoms:
            return
        yield self.state(atoms, [False] * len(atoms))
        last = [atom.index == atoms[-1].index for atom in atoms]
        torn = [place for place, is_last in enumerate(last) if is_last]
        for cut in torn[1:]:
            yield self.state(atoms, [place < cut for place in range(len(atoms))])
            yield self.state(atoms, [not is_last or place >= cut for place, is_last in enumerate(last)])
        calls = sorted({atom.index for atom in atoms})
        for one in calls if len(calls) <= samples else chance.sample(calls, samples):
            yield self.state(atoms, [atom.index != one for atom in atoms])
            yield self.state(atoms, [atom.index == one for atom in atoms])
        for number in range(samples):
            share = chance.random()
            if number % 3 == 0:  # whole calls
                there = {index: chance.random() < share for index in calls}
                yield self.state(atoms, [there[atom.index] for atom in atoms])
            elif number % 3 == 1:  # sectors
                yield self.state(atoms, [chance.random() < share for _ in atoms])
            else:  # all data, some names; or some data, all names
                which = chance.random() < 0.5
                yield self.state(atoms, [bool(atom.end) is which or chance.random() < share for atom in atoms])


def _write(data: bytearray, call: Call, start: int, end: int) -> None:
    if call.what == "truncate":
        if len(data) > call.offset:
            del data[call.offset :]
        else:
            data.extend(bytes(call.offset - len(data)))
        return
    at = call.offset + start
    if len(data) < at:
        data.extend(bytes(at - len(data)))
    data[at : call.offset + end] = call.data[start:end]


def _rename(names: dict[int, dict[str, int]], call: Call) -> None:
    """Apply a change of names, as far as what it needs is there."""
    entries = names.setdefault(call.directory, {})
    if call.what in {"create", "mkdir"}:
        entries[call.name] = call.file
        if call.what == "mkdir":
            names.setdefault(call.file, {})
    elif call.what == "rename":
        if entries.get(call.name) == call.file:
            del entries[call.name]
        entries[call.new_name] = call.file
    else:
        entries.pop(call.name, None)
