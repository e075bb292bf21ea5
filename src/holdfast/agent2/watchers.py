"""Whoever wants to know which agents this process has: told of each handle when it is opened and when it is closed.

Costs nothing to import, so that a process can be watched for failures before it uses any agent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.agent2.agent import Agent

WATCHERS: list[Callable[[Agent, bool], None]] = []
"""Called with the handle, and True when it was opened, False when it is being closed. They must not raise."""
