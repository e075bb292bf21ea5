"""``holdfast accept``: a store that was put back from a backup is taken as it is."""

from __future__ import annotations

import holdfast
from holdfast.cli.session import Given
from holdfast.errors import StoreWentBack


def accept(*, session: Given) -> None:
    """Accept that a store is older than it was when it was last used here.

    For a backup that was put back on purpose. What is missing stays missing; the store is used as it is from now on.
    """
    try:
        with holdfast.open(session.path, create=False, readonly=True, inert=True):
            session.out.say("There is nothing to accept: the store is as new as it was.")
    except StoreWentBack as error:
        with holdfast.open(session.path, create=False, inert=True, accept_older=True):
            session.out.say(f"Accepted. Missing from now on: {error.lost}.")
