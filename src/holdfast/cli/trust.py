"""``holdfast trust``: a store that was put back from a backup is taken as it is."""

from __future__ import annotations

import holdfast
from holdfast.cli.session import Given, Json
from holdfast.errors import StoreWentBack

SCHEMA = "holdfast.trust/1"


def trust(*, json: Json = False, session: Given) -> None:
    """Trust a store that is older than it was when it was last used here.

    For a backup that was put back on purpose. What is missing stays missing; the store is used as it is from now on.

    Parameters
    ----------
    json
        Print JSON (schema holdfast.trust/1).
    """
    missing = ""
    try:
        with holdfast.open(session.place, create=False, readonly=True, inert=True) as store:
            place = store.place
    except StoreWentBack as error:
        missing = error.lost
        with holdfast.open(session.place, create=False, inert=True, trust_older=True) as store:
            place = store.place
    if json:
        session.out.json({"schema": SCHEMA, "store": place, "trusted": bool(missing), "missing": missing})
    elif missing:
        session.out.say(f"Trusted. Missing from now on: {missing}.")
    else:
        session.out.say("There is nothing to decide: the store is as new as it was.")
