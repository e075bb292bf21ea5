"""Moving old packs to a colder place, and bringing them back.

Owns the choice of packs: old ones that no branch needs where it stands. How a pack gets there is the store's business.
What always holds: what moves can be read as before, only slower; stopped at any point, nothing is lost and the next
call goes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from msgspec.structs import replace

from holdfast.agent import history
from holdfast.agent.collecting import Reached
from holdfast.agent.manifest import Manifest
from holdfast.errors import Damaged
from holdfast.store.catalog import PackRow, Progress
from holdfast.store.forgetting import Forgetting
from holdfast.store.tiering import Tiering, place_at, refuse_own, refuse_store, url_of

if TYPE_CHECKING:
    from holdfast.agent.store import Store


def move_out(
    store: Store, to: str | os.PathLike[str], older_than: timedelta, progress: Progress, *, dry_run: bool
) -> Tiering:
    """Move packs that were written longer ago than that, unless a branch needs them where it stands."""
    url = url_of(to)
    refuse_store(url)
    place = place_at(url)
    chosen, needed, young = _sorted(store, time.time() - older_than.total_seconds())
    if dry_run:
        size = sum(pack.size for pack in chosen)
        return Tiering(url, len(chosen), size, done=False, needed=needed, young=young)

    def begin(forgetting: Forgetting) -> None:
        # A place that has packs is never made anew: where a disk is not mounted, that would hide what lies on it.
        if url in store._catalog.tiers.packs.values():
            place.require()
        else:
            place.prepare()
            for folder in (store.path, store.path / "packs"):
                refuse_own(place, folder)
        forgetting.clear_strays()

    moved = _moved(store, url, chosen, lambda forgetting, pack: forgetting.move_out(pack, place), progress, begin)
    return replace(moved, needed=needed, young=young)


def bring_back(store: Store, progress: Progress, *, dry_run: bool) -> Tiering:
    """Bring all packs back from colder places."""
    cold = store._catalog.tiers.packs
    chosen = [pack for pack in store._catalog.pack_rows() if pack.uuid in cold]
    urls = ", ".join(sorted(set(cold.values())))
    if dry_run:
        return Tiering(urls, len(chosen), sum(pack.size for pack in chosen), done=False)
    return _moved(store, urls, chosen, Forgetting.bring_back, progress)


def _moved(
    store: Store,
    where: str,
    chosen: Sequence[PackRow],
    move: Callable[[Forgetting, PackRow], None],
    progress: Progress,
    begin: Callable[[Forgetting], None] = Forgetting.clear_strays,
) -> Tiering:
    """Move packs one at a time: whoever wants to clone, receive or forget meanwhile waits for one of them only.

    One that is damaged stays where it is and is told of when all others have moved.
    """
    moved: list[PackRow] = []
    damaged: list[Damaged] = []
    with store._catalog.forgetting() as forgetting:
        begin(forgetting)
    for done, pack in enumerate(chosen, 1):
        with store._catalog.forgetting() as forgetting:
            if forgetting.reading.pack_row(pack.p) == pack:  # it may have gone, and its number to another
                try:
                    move(forgetting, pack)
                    moved.append(pack)
                except Damaged as error:
                    damaged.append(error)
        progress("packs", done, len(chosen))
    with store._catalog.forgetting() as forgetting:
        forgetting.clear_strays()
    if damaged:
        raise damaged[0]
    return Tiering(where, len(moved), sum(pack.size for pack in moved), done=True)


def _sorted(store: Store, before: float) -> tuple[list[PackRow], int, int]:
    """Packs here that may move, and how many stay: because a branch needs them where it stands, or for their age.

    One that is in its colder place already, and whose file is only left here, moves whatever its time.
    """
    catalog = store._catalog
    cold = catalog.tiers.packs
    wanted = _needed_now(store)
    found: list[PackRow] = []
    needed = young = 0
    for pack in catalog.pack_rows():
        written = catalog.written_at(pack)
        if written is None:
            continue
        if pack.uuid in cold:
            found.append(pack)
        elif any(chunk.digest in wanted for chunk in catalog.chunk_rows(pack.p)):
            needed += 1
        elif written >= before:
            young += 1
        else:
            found.append(pack)
    return found, needed, young


def _needed_now(store: Store) -> set[bytes]:
    """The chunks of all states at which branches stand."""
    catalog = store._catalog
    reached = Reached(catalog, tolerant=True)
    for agent in catalog.agents():
        for branch in catalog.branches(agent.a):
            if not branch.head:
                continue
            row = catalog.checkpoint(branch.head)
            unwritten: Mapping[bytes, bytes] = {}
            if not row.sealed:
                unwritten = history.state_of(catalog, row).unstored()
            reached.state(Manifest.decode(row.manifest).sections, unwritten)
    return reached.chunks
