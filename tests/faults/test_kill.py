"""kill -9 of a writing process at random moments: what was acknowledged is there, all else is whole or absent."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from queue import Queue

import pytest

import holdfast
from holdfast.codec.values import encode
from tests.faults.kill_child import SMALL
from tests.faults.rich import limits

ROOT = Path(__file__).resolve().parents[2]
# Longest life of a writer after it said that it is open, on a machine that is not busy. Elsewhere it lives longer, so
# that it gets as far: too short a life ends before the first checkpoint, and shows nothing.
LIFE_S = 0.06
ENOUGH_CHECKPOINTS = 3  # on average, in one life
PACE_MAX = 20.0
# A life ends in the middle of opening (recovery of the log, taking the lease) this often.
KILLED_WHILE_OPENING = 0.15
VERIFY_EVERY = 50


class Template:
    """The warm process that forks writers, and the lines that come from them."""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.kill_child", str(path)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        self.lines: Queue[str] = Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.put(line.strip())
        self.lines.put("end")

    def run(self, name: str, seed: int, durability: str, opening_s: float | None, life_s: float) -> list[list[str]]:
        """One life; returns what it acknowledged."""
        self.process.stdin.write(f"{name} {seed} {durability}\n")
        self.process.stdin.flush()
        said: list[list[str]] = []
        word, pid = self._next()
        while word != "pid":  # a quick child may be first
            said.append([word, *pid.split()])
            word, pid = self._next()
        if opening_s is not None:
            time.sleep(opening_s)
        else:
            while not any(line[0] in {"open", "made", "error"} for line in said):
                word, rest = self._next()
                said.append([word, *rest.split()])
            time.sleep(life_s)
        with suppress(ProcessLookupError):  # it ended by itself, and its last line says why
            os.kill(int(pid), signal.SIGKILL)
        while True:
            word, rest = self._next()
            if word == "gone":
                return said
            said.append([word, *rest.split()])

    def _next(self) -> tuple[str, str]:
        word, _, rest = self.lines.get(timeout=60).partition(" ")
        assert word != "end", "the template died"
        return word, rest

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=30)
        self.process.stdout.close()


@pytest.fixture
def same_limits():
    """The reader's rule for where nodes end must be the writer's."""
    with limits(SMALL):
        yield


@pytest.mark.slow
def test_acknowledged_checkpoints_survive_500_kills(store_path, rounds, same_limits):
    kills = rounds(500, 10_000)
    chance = random.Random(20_240)
    holdfast.open(store_path).close()
    template = Template(store_path)
    acknowledged: dict[str, str] = {}  # every one ever, id -> digest
    unseen: dict[str, tuple[str, str]] = {}  # those since the last look
    opened = 0
    pace = 1.0
    try:
        for kill in range(kills):
            if kill and kill % 10 == 0 and len(acknowledged) < ENOUGH_CHECKPOINTS * kill:
                pace = min(pace * 1.25, PACE_MAX)
            name = f"agent {kill // 125}".replace(" ", "-")  # a new one now and then, so that histories stay short
            opening = chance.uniform(0, 0.02 * pace) if chance.random() < KILLED_WHILE_OPENING else None
            durability = "batched" if kill % 5 == 4 else "commit"
            for word, *rest in template.run(
                name, chance.getrandbits(40), durability, opening, chance.uniform(0, LIFE_S * pace)
            ):
                assert word in {"open", "made", "moved"}, f"life {kill}: {word} {' '.join(rest)}"
                opened += word == "open"
                unseen[rest[0]] = (name, rest[1])
                acknowledged[rest[0]] = rest[1]
            look(store_path, name, unseen, chance, everything=kill % VERIFY_EVERY == VERIFY_EVERY - 1)
            unseen.clear()
        look(store_path, name, {}, chance, everything=True)
        with holdfast.open(store_path, readonly=True) as store:
            digests = {
                c.id: c.digest for info in store.agents() for c in store.agent(info.name, readonly=True).log(all=True)
            }
            missing = {identity for identity, digest in acknowledged.items() if digests.get(identity) != digest}
            assert not missing
            print(
                f"\n{kills} kills: {len(acknowledged):,} acknowledged checkpoints all there,"
                f" {len(digests) - len(acknowledged):,} unacknowledged ones whole; {store.stats()['counts']}"
            )
    finally:
        template.close()
    assert len(acknowledged) > kills


def look(
    path: Path, name: str, expected: dict[str, tuple[str, str]], chance: random.Random, *, everything: bool
) -> None:
    """Reopen and compare."""
    with holdfast.open(path, readonly=True) as store:
        known = {info.name for info in store.agents()}
        if name not in known:
            assert not expected
            return
        agent = store.agent(name, readonly=True)
        found = {checkpoint.id: checkpoint for checkpoint in agent.log(limit=400, all=True)}
        for identity, (_, digest) in expected.items():
            checkpoint = found.get(identity) or agent.at(f"id:{identity}")
            assert checkpoint.digest == digest
        # The newest few, acknowledged or not: the whole state loads, and its digest is proven on the way.
        for checkpoint in [
            *list(found.values())[:2],
            *chance.sample(sorted(found.values(), key=lambda c: c.id), k=min(1, len(found))),
        ]:
            assert whole(checkpoint)
        for branch in agent.branches()[-3:]:
            handle = store.agent(name, branch=branch, readonly=True)
            if handle.head is not None:
                assert whole(handle.head)
        if everything:
            report = store.verify()
            assert report.ok, str(report)


def whole(checkpoint: holdfast.Checkpoint) -> bool:
    state = checkpoint.state
    return all(encode(state.raw_section(section)) for section in state) and set(state) == set(checkpoint.sections)
