"""Moving old packs to a colder place, and bringing them back.

Owns the choice of packs: old ones that no branch needs where it stands. How a pack gets there is the store's business.
What always holds: what moves can be read as before, only slower; stopped at any point, nothing is lost and the next
call goes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from holdfast.agent.collecting import Reached
from holdfast.agent.history import Stored
from holdfast.store.catalog import PackRow
from holdfast.store.sealing import Values
from holdfast.store.tiering import Tiering, place_at, url_of

if TYPE_CHECKING:
    from holdfast.agent.store import Store

Progress = Callable[[str, int, int], None]


def move_out(
    store: Store, to: str | os.PathLike[str], older_than: timedelta, progress: Progress, *, dry_run: bool
) -> Tiering:
    """Move packs that were written longer ago than that, unless a branch needs them where it stands."""
    place = place_at(url_of(to))
    catalog = store._catalog
    chosen = _old(store, time.time() - older_than.total_seconds())
    size = sum(pack.size for pack in chosen)
    if dry_run:
        return Tiering(place.url, len(chosen), size, done=False)
    with catalog.forgetting() as forgetting:
        place.prepare()
        there = {pack.uuid for pack in forgetting.reading.pack_rows()}
        for done, pack in enumerate((pack for pack in chosen if pack.uuid in there), 1):
            forgetting.move_out(pack, place)
            progress("packs", done, len(chosen))
    return Tiering(place.url, len(chosen), size, done=True)


def bring_back(store: Store, progress: Progress, *, dry_run: bool) -> Tiering:
    """Bring all packs back from colder places."""
    catalog = store._catalog
    cold = catalog.tiers.packs
    chosen = [pack for pack in catalog.pack_rows() if pack.uuid in cold]
    size = sum(pack.size for pack in chosen)
    urls = ", ".join(sorted(set(cold.values())))
    if dry_run:
        return Tiering(urls, len(chosen), size, done=False)
    with catalog.forgetting() as forgetting:
        for done, pack in enumerate(chosen, 1):
            forgetting.bring_back(pack)
            progress("packs", done, len(chosen))
    return Tiering(urls, len(chosen), size, done=True)


def _old(store: Store, before: float) -> list[PackRow]:
    """Packs here that were written before that time and hold nothing that a branch needs where it stands.

    One that is in its colder place already, and whose file is only left here, is old whatever its time.
    """
    catalog = store._catalog
    cold = catalog.tiers.packs
    needed = _needed_now(store)
    found = []
    for pack in catalog.pack_rows():
        written = catalog.written_at(pack)
        if written is None:
            continue
        wanted = written >= before or any(chunk.digest in needed for chunk in catalog.chunk_rows(pack.p))
        if pack.uuid in cold or not wanted:
            found.append(pack)
    return found


def _needed_now(store: Store) -> set[bytes]:
    """The chunks of all states at which branches stand."""
    catalog = store._catalog
    reached = Reached(catalog, tolerant=True)
    for agent in catalog.agents():
        for branch in catalog.branches(agent.a):
            if not branch.head:
                continue
            head = catalog.checkpoint(branch.head)
            source = Stored(catalog, head)
            since = source.since_base()
            reached.add(source.base.values())
            values = Values(catalog, since)
            for row in since:
                reached.value(row.operations)
                for value in values.of(row):
                    reached.value(value)
    return reached.chunks
