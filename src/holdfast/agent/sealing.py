"""Folding: after a seal, the loose checkpoints above it become a segment.

Owns what is put into a segment, and when. Nobody waits for it, and nothing depends on it: a store whose folding was
interrupted is as whole as any. What always holds: a segment is a run of checkpoints that are each other's children and
begins with a root, a sealed one, or a child of one that lies in a segment already; the sealed one itself stays loose
until the next seal, so that a segment that is lost takes no other one with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

from holdfast.agent.history import children, named_in
from holdfast.errors import Damaged
from holdfast.store.catalog import Point, Row, View, slices
from holdfast.store.changes import Change
from holdfast.store.database import Database
from holdfast.store.engine import Refused
from holdfast.store.manifest import split_payload
from holdfast.store.segments import DICTIONARY_BYTES, SEGMENT_BYTES, SEGMENT_CHECKPOINTS, Packed, pack

FOLD_MIN = 8
"""Fewer are not worth a segment."""

_LOOK_BACK = 4 * SEGMENT_CHECKPOINTS


def fold_below(db: Database, n: int) -> int:
    """Put the loose checkpoints above a sealed one into segments; returns how many segments that made."""
    with db.moment() as (view, _):
        rows = view.loose(n, _LOOK_BACK)
        if len(rows) <= FOLD_MIN or not rows[0].sealed:
            return 0
        made = [(run, _packed(view, run, rows[0])) for run in _runs(rows[:0:-1]) if len(run) >= FOLD_MIN]
    folded = 0
    for run, packed in made:
        try:
            db.change(partial(Change.fold, numbers=[row.n for row in run], packed=packed))
            folded += 1
        except Refused:
            break  # somebody else has, or they are gone: nothing to do
    return folded


def _runs(rows: list[Row]) -> Iterator[list[Row]]:
    """A run of checkpoints, oldest first, in parts that are not too large for one segment.

    One that is too large by itself stays as it is.
    """
    part: list[Row] = []
    size = 0
    for row in rows:
        length = sum(map(len, split_payload(row.data or b"")))
        if part and (len(part) >= SEGMENT_CHECKPOINTS or size + length > SEGMENT_BYTES):
            yield part
            part, size = [], 0
        if length <= SEGMENT_BYTES:
            part.append(row)
            size += length
    if part:
        yield part


def _packed(view: View, rows: list[Row], tip: Row) -> Packed:
    points = [view.point(row) for row in rows]
    for above, below in pairwise(points):
        if below.manifest.parent != above.id:
            short = above.id.hex()[:12]
            raise Damaged(f"checkpoint {short} is not the one that its child names", what=(f"checkpoint {short}",))
    operations = [view.operations(point) for point in points]
    named: list[bytes] = []
    for data in operations:
        nodes, chunks = named_in(data)
        named += [*nodes, *chunks]
    leaves = _new_leaves(view, view.point(tip), points[0])
    return pack([row.n for row in rows], [point.raw for point in points], operations, leaves, named)


def _new_leaves(view: View, point: Point, since: Point) -> dict[bytes, bytes]:
    """Leaves of a sealed state that the last sealed one before lacks: what operations put there stands in them."""
    above = [since.row] if since.row.sealed else view.up(since.n, _LOOK_BACK)
    sealed = next((row for row in above if row.sealed), None)
    before = [root for _, root in view.point(sealed).manifest.sections] if sealed is not None else []
    known = set(before)
    fresh: dict[bytes, bytes] = {}
    size = 0
    level = [root for _, root in point.manifest.sections if root not in known]
    while level:  # both trees from above, where they differ: what one level of the earlier one names is known
        inner = [raw for raw in view.nodes(before).values() if raw[1]]
        known.update(child for raw in inner for child in children(raw))
        below: dict[bytes, None] = {}
        for part in slices(level, 64):
            for name, raw in view.nodes(part).items():
                if raw[1]:
                    below |= dict.fromkeys(children(raw))
                    continue
                size += len(raw)
                if size > DICTIONARY_BYTES:
                    return {}
                fresh[name] = raw
        before = [child for raw in inner if raw[1] > 1 for child in children(raw) if child not in below]
        level = [child for child in below if child not in known]
    return fresh
