"""Effects that a rollback left standing, or a run that ended without finishing, in runs.

Owns what happens when a run comes to a call that still stands outside. In plain use ``claims`` does the same. What
always holds: such an effect answers one call, and is written down there with its old key, so that it is known for one
effect by whoever undoes it; while one of a tool is left, that tool is not called with other arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.run import records as rec
from holdfast.run.past import Call, add_to
from holdfast.run.scope import now_us
from holdfast.run.tools import Tool

if TYPE_CHECKING:
    from holdfast.run.runs import Run


def adopt(run: Run, path: str, tool: Tool, mark: bytes) -> Call | None:
    """The standing effect that answers this call, now recorded at its position; None when there is none."""
    loop = run.host.loop
    found = loop.kept(tool, mark, run.past.calls)
    if found is None or found.intent is None or found.outcome is None:
        return found  # one without an outcome is made again, with its key
    old, outcome = found.intent, found.outcome
    # With the number of the attempt that it was: a greater one would say that it was called again.
    intent = rec.Intent(
        now_us(), run.run_id, path, old.tool, old.kind, old.args, old.fingerprint, old.key, old.attempt,
        run.agent.generation,
    )  # fmt: skip
    how = outcome.how if isinstance(outcome, rec.Done) else "value"
    fault = outcome.fault if isinstance(outcome, rec.Done) else None
    call = Call(run.run_id, path)
    number = run.write(intent)
    add_to(call, number, intent)
    done = rec.Done(now_us(), run.run_id, path, how, number, value=outcome.value, fault=fault, started=old.at)
    add_to(call, run.complete(done), done)
    run.ledger.flush()
    return call
