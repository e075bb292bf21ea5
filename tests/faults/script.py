"""A life with every kind of operation in it, and the ledger of what it was told is safe.

``perform`` is what campaigns crash, starve and cut off. It writes to a ``Ledger`` outside the store: after each call
returned, what must be there from then on, with the content as plain values. ``Ledger.check`` compares a store with it.
What always holds: the ledger is written after the call returned, and never reads the store.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

import holdfast
import holdfast.agent.store  # its limits are changed
from holdfast.codec.values import encode
from tests.faults.rich import journey
from tests.limits import limits

# So small that every few calls there is a seal, a segment, a node on a second level, a bulk value, a folded log.
SMALL = {
    "SEAL_CHECKPOINTS": 4,
    "BULK_MIN_BYTES": 3_000,
    "INLINE_MAX_BYTES": 512,
    "LEAF_MIN_BYTES": 256,
    "LEAF_TARGET_BYTES": 1_024,
    "LEAF_MAX_BYTES": 2_048,
    "LEAF_MAX_ITEMS": 16,
    "FOLD_FRAMES": 24,
    "FOLD_MIN": 2,
    "EXTEND_BYTES": 8_192,
    "EXTEND_ROOM_BYTES": 0,
    "TRIM_PAGES": 0,
}


def small():
    return limits(SMALL)


def fingerprint(sections: dict[str, Any]) -> str:
    """What a state is, byte for byte."""
    total = blake3()
    for name in sorted(sections):
        total.update(encode([name]))
        total.update(encode(sections[name]))
    return total.hexdigest()


def fingerprint_of(checkpoint: holdfast.Checkpoint) -> str:
    state = checkpoint.state
    return fingerprint({section: state.raw_section(section) for section in state})


class Broken(AssertionError):
    """A promise was not kept."""


@dataclass
class Ledger:
    """What was acknowledged. ``told`` is called with each line; a killed child sends them to its parent."""

    checkpoints: dict[str, dict[str, str]] = field(default_factory=dict)  # agent -> id -> fingerprint
    heads: dict[tuple[str, str], str] = field(default_factory=dict)  # agent and branch -> id
    tags: dict[tuple[str, str], str] = field(default_factory=dict)
    effects: dict[str, int] = field(default_factory=dict)  # agent -> how many effects were done, at least
    gone: set[str] = field(default_factory=set)
    unsure: set[str] = field(default_factory=set)  # agents that are being made or taken away just now
    going: dict[str, set[str]] = field(default_factory=dict)  # agent -> checkpoints that are being taken away just now
    opened: bool = False  # whether there is a store
    told: Callable[[str], None] = lambda _line: None

    def write(self, *words: str) -> None:
        """One acknowledgement, as words without spaces."""
        self.read(" ".join(words))
        self.told(" ".join(words))

    def read(self, line: str) -> None:
        what, *rest = line.split(" ")
        if what == "open":
            self.opened = True
        elif what == "checkpoint":
            agent, branch, identity, content = rest
            self.checkpoints.setdefault(agent, {})[identity] = content
            self.heads[agent, branch] = identity
            self.gone.discard(agent)
        elif what == "head":
            agent, branch, identity = rest
            self.heads[agent, branch] = identity
        elif what == "tag":
            agent, name, identity = rest
            self.tags[agent, name] = identity
        elif what == "untag":
            self.tags.pop((rest[0], rest[1]), None)
        elif what == "effects":
            self.effects[rest[0]] = int(rest[1])
        elif what == "clone":
            old, new = rest
            self.checkpoints[new] = dict(self.checkpoints[old])
            self.heads |= {(new, branch): identity for (agent, branch), identity in self.heads.items() if agent == old}
            self.tags |= {(new, name): identity for (agent, name), identity in self.tags.items() if agent == old}
        elif what == "changing":
            self.unsure.add(rest[0])
        elif what == "forgetting":
            self.going.setdefault(rest[0], set()).update(rest[1:])
        elif what == "forgot":
            self.going.pop(rest[0], None)
            for identity in rest[1:]:
                self.checkpoints[rest[0]].pop(identity, None)
        elif what == "removed":
            agent = rest[0]
            self.unsure.discard(agent)
            self.gone.add(agent)
            self.checkpoints.pop(agent, None)
            for known in (self.heads, self.tags):
                for key in [key for key in known if key[0] == agent]:
                    del known[key]
            self.effects.pop(agent, None)

    def check(self, store: holdfast.Store, *, contents: bool = True) -> int:
        """Everything that was acknowledged is there, byte for byte. Returns how many things were compared."""
        compared = 0
        names = {info.name for info in store.agents()}
        for name in self.gone - self.unsure:
            if name in names and name not in self.checkpoints:
                raise Broken(f"{name} was removed, and is there")
        for name, known in self.checkpoints.items():
            if name in self.unsure:
                continue
            if name not in names:
                raise Broken(f"agent {name} is gone with {len(known)} checkpoints")
            agent = store.agent(name, readonly=True)
            found = {checkpoint.id: checkpoint for checkpoint in agent.log(all=True)}
            for identity, content in known.items():
                if identity not in found:
                    if identity in self.going.get(name, ()):
                        continue
                    raise Broken(f"{name}: acknowledged checkpoint {identity[:12]} is not there")
                if contents and fingerprint_of(found[identity]) != content:
                    raise Broken(f"{name}: checkpoint {identity[:12]} is not what was saved")
                compared += 1
            self._check_names(store, name, agent)
        return compared

    def _check_names(self, store: holdfast.Store, name: str, agent: Any) -> None:
        tags = {tag: checkpoint.id for tag, checkpoint in agent.tags().items()}
        for (owner, tag), identity in self.tags.items():
            there = identity in self.checkpoints[name] and identity not in self.going.get(name, ())
            if owner == name and there and tag not in tags:
                raise Broken(f"{name}: tag {tag} is gone")
        for owner, branch in self.heads:
            if owner == name and branch not in agent.branches():
                raise Broken(f"{name}: branch {branch} is gone")
        if name in self.effects:
            done = sum(effect.status == "done" for effect in agent.effects())
            if done < self.effects[name]:
                raise Broken(f"{name}: {done} effects of {self.effects[name]} are there")


class Hand:
    """Writes through an agent and keeps what the state must be, as plain values."""

    def __init__(self, ledger: Ledger, agent: Any, plain: dict[str, Any] | None = None) -> None:
        self.ledger = ledger
        self.agent = agent
        self.plain: dict[str, Any] = copy.deepcopy(plain) if plain is not None else {}
        self.saved: dict[str, dict[str, Any]] = {}
        self.waiting: list[tuple[str, str]] = []

    def set(self, section: str, value: Any) -> None:
        self.agent.state[section] = copy.deepcopy(value)
        self.plain[section] = value

    def append(self, section: str, *values: Any) -> None:
        self.plain.setdefault(section, [])
        if section not in self.agent.state:
            self.agent.state[section] = []
        for value in values:
            self.agent.state[section].append(copy.deepcopy(value))
            self.plain[section].append(value)

    def save(self, label: str = "", *, waits: bool = False) -> holdfast.Checkpoint:
        made = self.agent.checkpoint(label)
        self.saved[made.id] = copy.deepcopy(self.plain)
        if waits:
            self.waiting.append((made.id, fingerprint(self.plain)))
        else:
            self.said(made.id, fingerprint(self.plain))
        return made

    def said(self, identity: str, content: str) -> None:
        self.ledger.write("checkpoint", self.agent.name, self.agent.branch_name, identity, content)

    def flush(self) -> None:
        self.agent.flush()
        for identity, content in self.waiting:
            self.said(identity, content)
        self.waiting.clear()

    def back(self, to: holdfast.Checkpoint) -> None:
        self.agent.rollback(to)
        self.plain = copy.deepcopy(self.saved[to.id])
        self.ledger.write("head", self.agent.name, self.agent.branch_name, to.id)

    def moved(self, made: holdfast.Checkpoint, plain: dict[str, Any]) -> None:
        """An undo or a redo made a checkpoint."""
        self.plain = copy.deepcopy(plain)
        self.saved[made.id] = copy.deepcopy(plain)
        self.said(made.id, fingerprint(plain))


def perform(path: Any, ledger: Ledger, *, seed: int = 1, rounds: int = 1, **options: Any) -> None:
    """All of it, from a place where nothing is (or where an earlier performance ended)."""
    chance = random.Random(seed)
    store = holdfast.open(path, **options)
    ledger.write("open")
    for number in range(rounds):
        act(store, ledger, chance, f"{seed}.{number}")
    store.close()
    with holdfast.open(path, **{**options, "durability": "batched"}) as store:
        batched(store, ledger, f"batched-{seed}")
    ledger.write("closed")


def act(store: holdfast.Store, ledger: Ledger, chance: random.Random, mark: str) -> None:
    first = Hand(ledger, store.agent(f"first-{mark}"))
    early = grow(first, chance)
    branches(first, early)
    effects(store, ledger, mark)
    clones(store, ledger, first, mark)
    forgets(store, ledger, first)
    first.agent.close()


def grow(hand: Hand, chance: random.Random) -> holdfast.Checkpoint:
    """Checkpoints across seals, a bulk value, large containers."""
    hand.set("notes", {"a": 1, "pair": (1, 2), "set": {"x", "y"}})
    hand.append("messages", {"role": "user", "content": "hello"})
    early = hand.save("early")
    for number in range(5):
        hand.append("messages", {"role": "assistant", "content": f"answer {number} " * chance.randrange(1, 30)})
        hand.save(f"answer {number}")
    hand.set("bulk", chance.randbytes(9_000))
    hand.set("table", {f"row {row}": "x" * 40 for row in range(60)})
    hand.save("bulk")
    hand.set("bulk", chance.randbytes(3_500))
    hand.save("bulk again")
    return early


def branches(hand: Hand, early: holdfast.Checkpoint) -> None:
    """Branch, tag, mark, undo, redo, rollback."""
    agent, ledger = hand.agent, hand.ledger
    side = Hand(ledger, agent.branch("side", at=early), hand.saved[early.id])
    ledger.write("head", agent.name, "side", early.id)
    side.append("messages", {"role": "user", "content": "on the side"})
    side.save("side")
    side.agent.close()
    agent.tag("kept", early)
    ledger.write("tag", agent.name, "kept", early.id)
    agent.tag("passing", early)
    ledger.write("tag", agent.name, "passing", early.id)
    ledger.write("untag", agent.name, "passing")  # it may be gone as soon as the call has begun
    agent.untag("passing")
    agent.mark(early, "suspect", "for the sake of it")
    before = copy.deepcopy(hand.plain)
    hand.set("extra", [1, 2, 3])
    hand.save("extra")
    with_extra = copy.deepcopy(hand.plain)
    hand.moved(agent.undo(), before)
    hand.moved(agent.redo(), with_extra)
    hand.back(early)
    hand.append("messages", {"role": "user", "content": "another way"})
    hand.save("another way")


def effects(store: holdfast.Store, ledger: Ledger, mark: str) -> None:
    agent = store.agent(f"actor-{mark}")
    agent.run(journey.options(id="one"), 2)
    ledger.write("effects", agent.name, "2")
    head = agent.head
    ledger.write("checkpoint", agent.name, agent.branch_name, head.id, fingerprint_of(head))
    agent.close()


def clones(store: holdfast.Store, ledger: Ledger, hand: Hand, mark: str) -> None:
    name = f"clone-{mark}"
    ledger.write("changing", name)
    store.copy(hand.agent.name, name)
    ledger.write("clone", hand.agent.name, name)
    clone = Hand(ledger, store.agent(name), hand.plain)
    clone.append("messages", {"role": "user", "content": "I am another"})
    clone.save("cloned")
    clone.agent.close()
    ledger.write("changing", name)
    store.remove(name)
    ledger.write("removed", name)


def forgets(store: holdfast.Store, ledger: Ledger, hand: Hand) -> None:
    """Forget most of what no branch reaches any more, and collect what only that needed."""
    let_go(store, ledger, holdfast.Policy(last=2), [hand.agent.name])
    hand.append("messages", {"role": "user", "content": "lighter"})
    hand.save("lighter")


def let_go(store: holdfast.Store, ledger: Ledger, policy: holdfast.Policy, names: list[str]) -> None:
    """Retention, of which the ledger knows that it may take what no branch stands on."""
    stood_on = set(ledger.heads.values())
    for name in names:
        ledger.write("forgetting", name, *(known for known in ledger.checkpoints[name] if known not in stood_on))
    store.retain(policy, names)
    for name in names:
        left = {checkpoint.id for checkpoint in store.agent(name, readonly=True).log(all=True)} | stood_on
        ledger.write("forgot", name, *(known for known in list(ledger.checkpoints[name]) if known not in left))


def batched(store: holdfast.Store, ledger: Ledger, name: str) -> None:
    hand = Hand(ledger, store.agent(name))
    for number in range(6):
        hand.append("messages", {"role": "user", "content": f"{number} " * 20})
        hand.save(f"batched {number}", waits=True)
        if number % 3 == 2:
            hand.flush()
