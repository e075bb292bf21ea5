"""A warm process that forks others, which move packs and are killed at a chosen point, for ``test_cold_kills.py``.

Reads one JSON object per line and answers with one: how the child ended, and how many points it passed. A point is any
call that opens, renames, deletes or locks a file, as the interpreter's audit events tell them.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import fsspec

import holdfast
from holdfast import Policy

POINTS = frozenset({"open", "os.rename", "os.remove", "os.mkdir", "fcntl.flock", "fcntl.fcntl", "fcntl.lockf"})


def act(do: str, path: str, to: str, key: bytes | None, new: bytes) -> None:
    if do == "rotate":
        holdfast.keys.rotate(path, new, key=key, full=True)
        return
    with holdfast.open(path, key=key) as store:
        if do == "tier":
            store.tier(to)
        elif do == "back":
            store.tier()
        else:
            store.retain(Policy(last=1))


def child(order: dict[str, str], at: int) -> int:
    """Do it, and die at point ``at``; returns how many there were."""
    passed = 0

    def count(event: str, _arguments: object) -> None:
        nonlocal passed
        if event in POINTS:
            passed += 1
            if passed == at:
                os.kill(os.getpid(), signal.SIGKILL)

    fsspec.config.conf["webdav"] = {
        "base_url": order["server"], "retry": False, "verify": False, "timeout": 120.0,
        "headers": {"X-Asked-By": str(os.getpid())},
    }  # fmt: skip
    sys.addaudithook(count)
    act(order["do"], order["path"], order["to"], bytes.fromhex(order["key"]) or None, bytes.fromhex(order["new"]))
    return passed


def main() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            code = 1
            try:
                os.write(writing, str(child(order, order["at"])).encode())
                code = 0
            finally:
                os._exit(code)
        os.close(writing)
        _, status = os.waitpid(pid, 0)
        passed = os.read(reading, 100)
        os.close(reading)
        print(json.dumps({"end": os.waitstatus_to_exitcode(status), "passed": int(passed or 0)}), flush=True)


if __name__ == "__main__":
    main()
