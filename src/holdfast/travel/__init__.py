"""Time travel: which change broke it, what differs, who changed it last, what must never be, and what would have been.

What users need of it are methods of ``Agent`` and ``Store``, and names of ``holdfast`` itself. These are for those who
ask the same questions elsewhere, as the command line does. Each is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast import lazy as _lazy

if TYPE_CHECKING:
    from holdfast.agent.changes import words
    from holdfast.codec.state import Held
    from holdfast.codec.values import encode
    from holdfast.travel.bisect import Abort, Bisection, Check, Step, Verdict, log_of
    from holdfast.travel.blame import Blame
    from holdfast.travel.causes import Cause
    from holdfast.travel.compare import Comparison
    from holdfast.travel.detector import Alarm, Detector
    from holdfast.travel.drift import Drift
    from holdfast.travel.execution import Difference, Execution, Moment, Passed
    from holdfast.travel.explain import Claim, Report
    from holdfast.travel.expressions import Expression, Look, follow, parse_path
    from holdfast.travel.failure import Failure
    from holdfast.travel.invariants import Invariant, Violation, Violations, declared
    from holdfast.travel.logs import LogHandler, LogLine, Metrics
    from holdfast.travel.minimal import Minimal, first_bad, moment_before
    from holdfast.travel.probe import Capture, Probe
    from holdfast.travel.reconcile import Action, Reconciled
    from holdfast.travel.watch import Hit, Watchpoint
    from holdfast.travel.whatif import Validation, WhatIf, debug, replay_all

__all__ = [
    "Abort",
    "Action",
    "Alarm",
    "Bisection",
    "Blame",
    "Capture",
    "Cause",
    "Check",
    "Claim",
    "Comparison",
    "Detector",
    "Difference",
    "Drift",
    "Execution",
    "Expression",
    "Failure",
    "Held",
    "Hit",
    "Invariant",
    "LogHandler",
    "LogLine",
    "Look",
    "Metrics",
    "Minimal",
    "Moment",
    "Passed",
    "Probe",
    "Reconciled",
    "Report",
    "Step",
    "Validation",
    "Verdict",
    "Violation",
    "Violations",
    "Watchpoint",
    "WhatIf",
    "debug",
    "declared",
    "encode",
    "first_bad",
    "follow",
    "log_of",
    "moment_before",
    "parse_path",
    "replay_all",
    "words",
]

_HOMES = {
    "Abort": "holdfast.travel.bisect",
    "Action": "holdfast.travel.reconcile",
    "Alarm": "holdfast.travel.detector",
    "Bisection": "holdfast.travel.bisect",
    "Blame": "holdfast.travel.blame",
    "Capture": "holdfast.travel.probe",
    "Cause": "holdfast.travel.causes",
    "Check": "holdfast.travel.bisect",
    "Claim": "holdfast.travel.explain",
    "Comparison": "holdfast.travel.compare",
    "Detector": "holdfast.travel.detector",
    "Difference": "holdfast.travel.execution",
    "Drift": "holdfast.travel.drift",
    "Execution": "holdfast.travel.execution",
    "Expression": "holdfast.travel.expressions",
    "Failure": "holdfast.travel.failure",
    "Held": "holdfast.codec.state",
    "Hit": "holdfast.travel.watch",
    "Invariant": "holdfast.travel.invariants",
    "LogHandler": "holdfast.travel.logs",
    "LogLine": "holdfast.travel.logs",
    "Look": "holdfast.travel.expressions",
    "Metrics": "holdfast.travel.logs",
    "Minimal": "holdfast.travel.minimal",
    "Moment": "holdfast.travel.execution",
    "Passed": "holdfast.travel.execution",
    "Probe": "holdfast.travel.probe",
    "Reconciled": "holdfast.travel.reconcile",
    "Report": "holdfast.travel.explain",
    "Step": "holdfast.travel.bisect",
    "Validation": "holdfast.travel.whatif",
    "Verdict": "holdfast.travel.bisect",
    "Violation": "holdfast.travel.invariants",
    "Violations": "holdfast.travel.invariants",
    "Watchpoint": "holdfast.travel.watch",
    "WhatIf": "holdfast.travel.whatif",
    "debug": "holdfast.travel.whatif",
    "declared": "holdfast.travel.invariants",
    "encode": "holdfast.codec.values",
    "first_bad": "holdfast.travel.minimal",
    "follow": "holdfast.travel.expressions",
    "log_of": "holdfast.travel.bisect",
    "moment_before": "holdfast.travel.minimal",
    "parse_path": "holdfast.travel.expressions",
    "replay_all": "holdfast.travel.whatif",
    "words": "holdfast.agent.changes",
}

__getattr__ = _lazy.names(__name__, _HOMES)
