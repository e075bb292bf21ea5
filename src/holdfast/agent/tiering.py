"""Moving old packs to a colder place, and bringing them back.

Owns the choice of packs: old ones that no branch needs where it stands; and which place it is, which the store keeps.
How a pack gets there is the store's business. What always holds: what moves can be read as before, only slower; stopped
at any point, nothing is lost and the next call resumes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from holdfast.agent.collection import Reached
from holdfast.agent.history import state_of
from holdfast.errors import BadOption, Damaged, StoreBusy
from holdfast.store.catalog import Progress, View
from holdfast.store.changes import Change
from holdfast.store.database import COLD, Contents
from holdfast.store.files import in_store
from holdfast.store.objects import location, open_objects, path_of

if TYPE_CHECKING:
    from holdfast.agent.store import Store


class Tiering(Struct, frozen=True):
    """What was moved to a colder place, or brought back.

    ``needed`` and ``young``: how many packs stay because a branch needs them where it stands, or for their age.
    """

    place: str
    packs: int
    moved_bytes: int
    done: bool
    needed: int = 0
    young: int = 0

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__struct_fields__}


def move_out(
    store: Store, to: str | os.PathLike[str], older_than: timedelta, progress: Progress, *, dry_run: bool
) -> Tiering:
    """Move packs that were written longer ago than that, unless a branch needs them where it stands."""
    place = location(to)
    if place.startswith("file://") and in_store(Path(path_of(place))):
        raise BadOption("a cold place cannot be inside a store", hint="Name a directory elsewhere, or a URL.")
    store._db.packs.look_again()
    known = _known(store._db.view, place)
    with store._db.moment() as contents:
        chosen, needed, young = _sorted(contents, older_than.total_seconds())
    if dry_run:
        return Tiering(place, len(chosen), sum(chosen.values()), done=False, needed=needed, young=young)
    packs = store._db.packs
    if known != place or packs.cold is None or packs.cold.place != place:  # it may have been given up elsewhere
        cold = open_objects(to, store._db.uuid.hex())
        # A place that has packs is never made anew: where a disk is not mounted, that would hide what lies on it.
        cold.require() if known else cold.prepare()
        store._db.change(partial(_choose, store, place=place))
        packs.cold = cold

    def is_known() -> bool:
        return store._db.view.facts().get(COLD, b"").decode() == place

    moved = _moved(store, place, chosen, partial(packs.chill, known=is_known), progress)
    return replace(moved, needed=needed, young=young)


def _known(view: View, place: str) -> str:
    """The place that packs go to already, if any; raises if it is another one."""
    known = view.facts().get(COLD, b"").decode()
    if known and known != place:
        raise BadOption(
            f"this store's packs go to {known}", hint="Bring them back first (`holdfast tier --back`), then move."
        )
    return known


def _choose(store: Store, change: Change, place: str) -> None:
    _known(change, place)  # somebody else may have chosen one meanwhile
    change.set_fact(COLD, place.encode())
    store._db.own(change)


def bring_back(store: Store, progress: Progress, *, dry_run: bool) -> Tiering:
    """Bring all packs back from the colder place."""
    store._db.packs.look_again()
    place = store._db.view.facts().get(COLD, b"").decode()
    if not place:
        return Tiering("", 0, 0, done=not dry_run)
    sizes = store._db.view.packs()
    where = store._db.packs.whereabouts()  # also of packs that went from the store while the place was away
    chosen = {pack: sizes[pack] for pack, (_, age) in where.items() if age is not None and pack in sizes}
    if dry_run:
        return Tiering(place, len(chosen), sum(chosen.values()), done=False)
    packs = store._db.packs
    moved = _moved(store, place, chosen, packs.warm, progress)
    if moved.packs == len(chosen):
        forget = partial(store._db.change, lambda change: change.set_fact(COLD, None))
        if not packs.give_up(store._db.view, store._db.engine, forget):
            raise StoreBusy(f"somebody else moves packs to {place}", hint="Nothing is lost. Bring them back later.")
    return moved


def _moved(
    store: Store, place: str, chosen: dict[bytes, int], move: Callable[..., bool], progress: Progress
) -> Tiering:
    """Move packs one at a time. One that is damaged stays where it is and is told of when all others have moved."""
    moved: list[bytes] = []
    damaged: list[Damaged] = []
    for done, pack in enumerate(chosen, 1):
        try:
            if move(store._db.view, store._db.engine, pack):
                moved.append(pack)
        except Damaged as error:
            damaged.append(error)
        progress("packs", done, len(chosen))
    store._db.sweep_strays()
    if damaged:
        raise damaged[0]
    return Tiering(place, len(moved), sum(chosen[pack] for pack in moved), done=True)


def _sorted(contents: Contents, age_s: float) -> tuple[dict[bytes, int], int, int]:
    """Packs here that may move, and how many stay: because a branch needs them where it stands, or for their age."""
    view, packs = contents
    wanted = {place.pack for place in view.chunks(_needed_now(contents)).values()}
    found: dict[bytes, int] = {}
    needed = young = 0
    where = packs.whereabouts()
    for pack, size in view.packs().items():
        here, cold = where.get(pack, (None, None))
        if here is None:
            continue
        if pack in wanted:
            needed += 1
        elif cold is None and here < age_s:
            young += 1
        else:
            found[pack] = size
    return found, needed, young


def _needed_now(contents: Contents) -> set[bytes]:
    """The chunks of all states at which branches stand."""
    view, reached = contents.view, Reached()
    for n in {branch.head for branch in view.branches() if branch.head}:
        point = view.point(n)
        roots = [root for _, root in point.manifest.sections]
        reached.add(view, roots, more=state_of(contents, point).unstored())
    return reached.chunks
