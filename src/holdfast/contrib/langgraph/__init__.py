"""LangGraph threads in a Holdfast store.

``HoldfastSaver`` is a LangGraph checkpointer: each thread is an agent, each checkpoint namespace one of its branches.
``import_threads`` brings threads over from LangGraph's own savers. Needs the extra ``langgraph``.
"""

from __future__ import annotations

from holdfast.contrib.langgraph.imports import ImportedThread, ImportReport, check_source, import_threads
from holdfast.contrib.langgraph.saver import HoldfastSaver

__all__ = ["HoldfastSaver", "ImportReport", "ImportedThread", "check_source", "import_threads"]
