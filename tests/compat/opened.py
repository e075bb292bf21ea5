"""What the table of open runs should have, from docs/format.md alone. It must not import holdfast."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.compat.reader import End, Store, expect, lines


def check(path: Path, unlock: Any = None) -> int:
    """Compare the table with lines and log; returns how many rows it has."""
    store = Store(path, unlock)
    there = sorted((tuple(row.values()) for row in store.rows["open"]), key=lambda row: row[:3])
    expect(there == sorted(wanted(store, lines(store)), key=lambda row: row[:3]), "open runs")
    return len(there)


def wanted(store: Store, ends: dict[int, End]) -> Iterator[tuple[Any, ...]]:
    """The rows that the table should have."""
    records = {row["r"]: row for row in store.rows["record"]}
    for branch in (row for row in store.rows["branch"] if row["a"]):
        line, r = [], branch["line"]
        while r:
            line, r = [records[r], *line], records[r]["prev"]
        above, upto = branch["body"].get("own", (0, 0))
        last = max((row["i"] for row in line if row["b"] != branch["b"] and not above < row["i"] <= upto), default=0)
        begun, status, taken, unsettled, back, resumed = {}, {}, set(), set(), set(), set()
        said = [(number, record) for number, record in enumerate(ends[branch["line"]].records, 1) if record]
        for number, record in said:
            run = record.get("run", "")
            if record["t"] == "run" and record.get("kind") == "rollback" and number > last:
                back.add(run)
            elif record["t"] == "rollback":
                back = set()
            elif record["t"] == "end" and record["how"] not in {"", "waiting", "attention"}:
                back.discard(run)
            if record["t"] == "run" and record.get("kind") != "rollback":
                begun[run], status[run] = (number, record), (number, "", [], 1)
                resumed.discard(run)
            elif (record["t"], record.get("what")) == ("note", "resume") and run in begun:
                status[run] = number, "", [], 1
                resumed.add(run)
            elif record["t"] == "end" and run in status:
                waits = record.get("waits", [])
                due = min([2**61, *(until for _, _, until in waits if until)])
                due = 1 if "child" in {what for what, _, _ in waits} else due
                due = 2**61 + 1 if record["how"] == "attention" else due
                status[run] = status[run][0], record["how"], waits, due
            elif record["t"] == "decision" and run in status and status[run][1] == "attention":
                status[run] = *status[run][:3], 1
            elif record["t"] == "rollback":
                status = {run: (0, "rolled back" if how in {"", "waiting", "attention"} else how, [], 1)
                          for run, (_, how, _, _) in status.items() if begun[run][0] <= record["to"]}  # fmt: skip
            taken.add(record.get("ev"))
            if number > last and not run and (record["t"], record.get("kind")) == ("intent", "write"):
                unsettled.add(number)
            elif number > last and not run and record["t"] == "doubt":
                unsettled.add(record["of"])
            elif record["t"] == "decision" or (record["t"] == "done" and not run):
                unsettled.discard(record.get("of"))
        if back:
            yield branch["b"], b"", b"\0rollback", 2**61 + 1, b"", 0, {"name": "", "begun": 0}
        for number in unsettled:
            yield branch["b"], b"", b"\0%d" % number, 2**61 + 2, b"", 0, {"name": "", "begun": number}
        for run, (since, how, waits, due) in status.items():
            number, record = begun[run]
            if since > last and how in {"", "waiting", "attention"}:
                body = {"function": record["fn"], "code": record.get("code", ""), "kind": record.get("kind", "run")}
                body |= {"status": how, "number": number, "waits": waits}
                queue = "\0".join(filter(None, (record.get("queue", ""), record.get("part", "")))).encode()
                turn = record["at"] + (0 if run in resumed else (501 - record.get("priority", 0)) * 2**52)
                yield branch["b"], run.encode(), b"", due, queue, turn if queue else 0, body
        log = [row["body"] for row in store.rows["log"] if row["a"] == branch["a"] and row["key"]]
        gone = {body["id"] for body in log if body["what"] == "signal dropped"} | taken
        for body in (body for body in log if body["what"] == "signal" and body["branch"] == branch["uuid"]):
            run, number = body.get("run", ""), body.get("begun", 0)
            over = status.get(run, (0, "rolled back"))[1] in {"finished", "cancelled", "rolled back"}
            if body["id"] not in gone and not (run and (over or begun[run][0] != number)):
                yield branch["b"], run.encode(), body["id"], 1, b"", 0, {"name": body["name"], "begun": number}
