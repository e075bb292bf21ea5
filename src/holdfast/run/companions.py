"""What is kept along with an agent's state: generators' states, descriptions of resources.

Owns when these are written, restored and closed. How is the business of ``generators`` and ``resources``, which are
loaded only by programs that use them. What always holds: a checkpoint knows what its companions were at that moment.
"""

from __future__ import annotations

from typing import Any


class Companion:
    """Goes where the state goes."""

    def __init__(self, host: Any) -> None:
        self.host = host

    def keep(self) -> None:
        """Before a digest or a capture: put into the state what belongs there."""

    def describe(self) -> None:
        """Before a capture: record what a restored process has to know."""

    def restore(self, *, replaying: bool) -> None:
        """The state was moved. ``replaying``: to before the branch began, for a run that is executed again."""

    def passed(self) -> None:
        """A replay has come to where the branch began."""

    def close(self) -> None:
        """The agent is closed, or its state moved away."""


class Generators(Companion):
    """Random generators whose states are kept."""

    def keep(self) -> None:
        from holdfast.run import generators

        generators.keep(self.host)

    def restore(self, *, replaying: bool) -> None:
        from holdfast.run import generators

        generators.restore(self.host, replaying=replaying)

    def passed(self) -> None:
        from holdfast.run import generators

        generators.reseed(self.host)


class Resources(Companion):
    """Handles that are opened again by their descriptions."""

    def describe(self) -> None:
        from holdfast.run import resources

        resources.describe_all(self.host)

    def restore(self, *, replaying: bool) -> None:  # noqa: ARG002 - what is open fits no other state
        self.close()

    def close(self) -> None:
        from holdfast.run import resources

        resources.close_all(self.host)
