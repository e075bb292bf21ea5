"""``holdfast backup`` and ``holdfast move``: a whole store in another place, on another backend, under another key."""

from __future__ import annotations

from holdfast.cli.asking import OneKeyFile, key_in
from holdfast.cli.progress import bars
from holdfast.cli.push import dest_at, source_at, tell
from holdfast.cli.session import Given, Json, Objects
from holdfast.cli.text import clean

SCHEMA = "holdfast.move/1"
BACKUP_SCHEMA = "holdfast.backup/1"


def backup(
    dest: str,
    /,
    *,
    objects: Objects = None,
    source_key_file: OneKeyFile = None,
    dest_key_file: OneKeyFile = None,
    json: Json = False,
    session: Given,
) -> int:
    """Bring everything that DEST lacks there: all agents, and the rules that are kept in the store.

    Only what is missing moves, and everything is proven on arrival, so it may be done every night. Nothing is removed
    from DEST. Agents may be written meanwhile; what they write after the beginning comes the next time.

    Parameters
    ----------
    dest
        The other store: its directory, or postgresql://... It is made if there is none.
    objects
        Where DEST keeps large values, if it is made now: a directory, or a URL such as s3://bucket/prefix.
    source_key_file
        The key of the store, when it is not that of $HOLDFAST_KEY and the like; "none" when it has none.
    dest_key_file
        The key of DEST, likewise.
    json
        Print JSON (schema holdfast.backup/1).
    """
    with (
        source_at(session.place, dest, key_in(source_key_file), readonly=True) as source,
        dest_at(dest, key_in(dest_key_file), objects, source) as other,
        bars(session.err) as progress,
    ):
        report = source.backup(other, progress)
    tell(session, report, json=json, schema=BACKUP_SCHEMA)
    return 0


def move(
    dest: str,
    /,
    *,
    objects: Objects = None,
    source_key_file: OneKeyFile = None,
    dest_key_file: OneKeyFile = None,
    json: Json = False,
    session: Given,
) -> int:
    """Move everything to DEST. The store here stays, can only be read from now on, and says where everything is.

    Nobody else may have the store open, or, on a server, write to it. Run it again after an interruption: it goes on
    where it was.

    Parameters
    ----------
    dest
        The other store: its directory, or postgresql://... It is made if there is none.
    objects
        Where DEST keeps large values, if it is made now: a directory, or a URL such as s3://bucket/prefix.
    source_key_file
        The key of the store, when it is not that of $HOLDFAST_KEY and the like; "none" when it has none.
    dest_key_file
        The key of DEST, likewise.
    json
        Print JSON (schema holdfast.move/1).
    """
    with (
        source_at(session.place, dest, key_in(source_key_file), readonly=False) as source,
        dest_at(dest, key_in(dest_key_file), objects, source) as other,
        bars(session.err) as progress,
    ):
        report = source.move(other, progress)
    tell(session, report, json=json, schema=SCHEMA)
    if not json:
        session.out.say(f"{clean(report.source)} can only be read from now on. Programs open {clean(report.dest)}.")
    return 0
