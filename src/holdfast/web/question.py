"""A process that answers one question about an agent's history, within limits: ``python -m holdfast.web.question``.

The page starts it for whatever may take long or evaluates what somebody wrote. Gets the question as JSON on standard
input, tells its progress in lines of JSON, and at last the answer, or what is wrong. It only reads. What always holds:
it ends within its time and its memory, also when nobody waits for it any more.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import holdfast
from holdfast import Agent, Invariant, Store
from holdfast.errors import BadOption, HoldfastError
from holdfast.web.brief import brief

CPU_S = 90
MEMORY_BYTES = 4 << 30
_TOLD_S = 0.1
"""How often it tells how far it is."""

Told = dict[str, Any]
Progress = Callable[[str, int, int], None]


def _reader(store: Store, question: Told) -> Agent:
    return store.agent(question["agent"], branch=question.get("branch") or "main", create=False, readonly=True)


def _at(question: Told) -> str | None:
    return question.get("at") or None


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def blame(store: Store, question: Told, tell: Progress) -> Told:  # noqa: ARG001 - it is quick
    return _reader(store, question).blame(question["path"], at=_at(question)).to_json()


def bisect(store: Store, question: Told, tell: Progress) -> Told:
    agent = _reader(store, question)
    good, every = question.get("good") or None, bool(question.get("every")) or None
    return agent.bisect(when=question["when"], good=good, bad=_at(question), all=every, progress=tell).to_json()


def check(store: Store, question: Told, tell: Progress) -> Told:  # noqa: ARG001 - it has none to tell
    agent = _reader(store, question)
    rules = _lines(question["rules"])
    if not rules:
        raise BadOption("there is no rule to check", hint="Write one on each line: budget >= 0")
    found = agent.check(*map(Invariant, rules), until=agent.at(_at(question)))
    shown = [one.to_json() for one in found[:200]]
    return {"rules": rules, "nowhere": list(found.nowhere), "violations": shown, "total": len(found)}


def drift(store: Store, question: Told, tell: Progress) -> Told:  # noqa: ARG001 - as above
    agent = _reader(store, question)
    paths, may = _lines(question.get("paths", "")), _lines(question.get("may", ""))
    return agent.drift(question["baseline"], _at(question), paths=paths, may=may).to_json()


def explain(store: Store, question: Told, tell: Progress) -> Told:  # noqa: ARG001 - as above
    rules = _lines(question.get("rules", ""))
    branch = question.get("branch") or "main"
    return store.explain(
        question["agent"], branch=branch, check=question.get("check") or None, invariants=rules
    ).to_json()


QUESTIONS = {"blame": blame, "bisect": bisect, "check": check, "drift": drift, "explain": explain}


def main() -> None:
    """Answer the one question on standard input."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    question = json.loads(sys.stdin.buffer.readline())
    last = 0.0

    def tell(what: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _TOLD_S or done == total:
            last = time.monotonic()
            _say({"progress": {"what": what[:200], "done": done, "total": total}})

    try:
        with holdfast.open(question["place"], create=False, readonly=True, inert=True) as store:
            answer = QUESTIONS[question["ask"]](store, question, tell)
        _say({"answer": brief(answer, 1_000, 200, 20_000, marked=True)})
    except HoldfastError as error:
        _say({"error": {"message": error.message, "hint": error.hint}})
    except MemoryError:
        _say({"error": {"message": "this needs more memory than it may have", "hint": "Use the command line."}})


def _say(told: Told) -> None:
    sys.stdout.write(json.dumps(told, allow_nan=False) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
