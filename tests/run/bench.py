"""A workbench for runs: a real document and a line in memory, that can crash and be opened again."""

from __future__ import annotations

import os

from holdfast.codec.document import Document
from holdfast.codec.types import REGISTRY
from holdfast.codec.values import decode, encode
from holdfast.run import claims, runs, signals
from holdfast.run.durables import Options
from holdfast.run.positions import here
from holdfast.run.steps import drive, drive_later
from tests.run.memory import Memory


class Saved:
    def __init__(self, identity):
        self.id = identity.hex()


class Bench:
    """An agent as far as runs care."""

    def __init__(self, ledger=None, states=None, generation=1, dead=True):
        self.name = "trip-7"
        self.registry = REGISTRY.child()
        self.ledger = ledger or Memory()
        self.states = states if states is not None else {}
        self.generation = generation
        self.dead = dead
        self.state = Document(self.registry)
        self.identity = (b"a" * 16, b"b" * 16)
        self.sent = []
        self.whole = True
        self.origin = 0
        self.loop = claims.Loop(self, 0)

    @property
    def handle(self):
        return self

    def is_dead(self, generation, number):
        return self.dead and generation != self.generation

    def begin(self, record, stowed):
        record.start = self._keep()
        return lambda: self.ledger.append(record, nodes=stowed.nodes, chunks=stowed.chunks, flush=True)

    def finish(self, record, stowed, label):
        return lambda: self.ledger.append(record, nodes=stowed.nodes, chunks=stowed.chunks, flush=True)

    def stopped(self):
        pass

    def abandoned(self):
        pass

    def check_free(self):
        pass

    def stands_in(self, run):
        return True

    def rewind(self, start):
        self.state.replace(decode(self.states[start], self.registry))

    def state_digest(self):
        return b"".join(digest for _, digest in self.state.digests())[:32]

    def save(self, label, record):
        identity = self._keep()
        taken = record(identity, self.state_digest())

        def write():
            self.ledger.append(taken, flush=True)
            return Saved(identity)

        return write

    def difference(self, identity):
        return []

    def saved(self, identity):
        return Saved(identity)

    def _keep(self):
        identity = os.urandom(32)
        self.states[identity] = encode(self.state.plain(self.state), self.registry)
        return identity

    # what a handle offers to the functions under test

    def send(self, name, value=None, at=0):
        """A signal from elsewhere."""
        body = signals.body_of(os.urandom(16), name, value, self.registry, branch=b"b" * 16, run=None, by="me")
        self.sent.append(signals.read(at, body))

    def signals(self, run=None):
        return list(self.sent)

    def checkpoint(self, label=""):
        lane = here()
        return drive(lane.scope.checkpoint(lane, label))

    async def acheckpoint(self, label=""):
        lane = here()
        return await drive_later(lane.scope.checkpoint_later(lane, label))

    def run(self, function, *args, **options):
        return runs.run_now(self, function, args, {}, Options(**options))

    async def arun(self, function, *args, **options):
        return await runs.run_later(self, function, args, {}, Options(**options))

    def using(self, since):
        """As `with agent:` after a load of the checkpoint at that position."""
        return claims.using(claims.Loop(self, since))

    def crashed(self, keep=None):
        """The same agent in a new process, after a crash that left ``keep`` records, or what was durable."""
        bench = Bench(self.ledger.crashed(keep), self.states, self.generation + 1)
        bench.sent = self.sent
        return bench


class Crash(BaseException):
    """The process ends here."""
