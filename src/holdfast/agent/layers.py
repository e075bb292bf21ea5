"""Layers beside the state: what a checkpoint asks of whoever keeps files, or a process, together with it.

Owns the names of the layers and what the branch writer is told of one. The rooms above make them; here nobody knows
what is in them. What always holds: a layer's tree is a dict of the same objects as the state's, so that history, proof,
transfer and retention treat it as they treat the state; its contents are in durable packs before anything names them;
a checkpoint has the state and all layers of one capture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from holdfast.codec.state import State
from holdfast.store.catalog import View
from holdfast.store.changes import Change, NewPack
from holdfast.store.manifest import APART, Manifest, apart
from holdfast.store.rows import read_body

WORKSPACE = "workspace "
"""What the row of a branch's directory is called in the table of facts: this, and its uuid in hexadecimal."""

FILES = apart("workspace", "files")
"""The section that holds an agent's files."""

MARKED = apart("workspace", "marked")
"""The section that says which of them may not be what was there at any moment."""


def half_way(view: View) -> dict[str, str]:
    """The directories in which files are still to be put back, by the uuids of their branches in hexadecimal."""
    found = {}
    for name, value in view.facts().items():
        if name.startswith(WORKSPACE):
            said = read_body(value, "table store, the row of a workspace")
            if said.get("to"):
                found[name.removeprefix(WORKSPACE)] = str(said.get("path", ""))
    return found


IMAGE = apart("process", "image")
"""The section that holds the image of a process."""

MOMENTARY = f"{APART}process{APART}"
"""An image belongs to the one checkpoint that it was made for: the next one does not have it."""


def holds_image(manifest: Manifest) -> bool:
    """Whether a checkpoint holds the memory of a process: by what it has, whatever its agent is called.

    Such a one leaves a store only when somebody says so, and goes only to where it is encrypted.
    """
    return len(manifest.layers) > 1 and any(name == IMAGE for name, _ in manifest.sections)


THAW = "thaw "
"""What the row of a branch is called in the table of facts while its process is brought back: this, and its uuid in
hexadecimal. It is written before anything is undone or moved, and goes when the process is there."""


ANY = object()
"""Instead of a tree: what it was compared with does not matter."""


class Looked(NamedTuple):
    """How a layer differs from what was told of it: items of its dict by the encodings of their keys, None: gone.

    ``packs`` are durable and bring chunks; ``named`` are chunks that must be in the store besides. Without ``items``
    the layer goes. ``told`` is the very tree that it was compared with, None where there was none.
    """

    section: str
    items: Mapping[bytes, bytes | None] | None
    packs: tuple[NewPack, ...] = ()
    named: frozenset[bytes] = frozenset()
    told: object = ANY


class Going(Protocol):
    """A layer on its way to what another checkpoint has of it."""

    def intend(self, change: Change, to: bytes, at: bytes) -> None:
        """Note, in the transaction that moves the state, that it has to get there: from then on there is one way.

        ``to`` is the checkpoint that it will be like, ``at`` the one that it is like now.
        """

    def go(self) -> bool:
        """Get there. Answers whether somebody else changed something meanwhile, which stays as he left it.

        Whoever opens the agent after a process that did not get there, does it.
        """


class Layer(Protocol):
    """What is kept together with the state of one agent."""

    def look(self) -> Sequence[Looked]:
        """How it differs from what was told, if at all. It may take long, and needs no lock of the agent."""

    def changed(self) -> bool:
        """Whether it differs."""

    def going(self, wanted: State, id: bytes) -> Going | None:
        """What becomes of it when the state goes to that of the checkpoint ``id``; None: nothing.

        Without an id, of one that the next checkpoint will be like. Everything that is there now has been saved before.
        """
