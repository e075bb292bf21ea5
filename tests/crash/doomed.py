"""A program that is watched and ends in the way that it is told. Run by tests as a process of its own."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import linecache
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

from holdfast.crash import cores, inside, kinds, outside, sidecar

SIDE: list[sidecar.Sidecar] = []
PATIENCE_S = 120
KEY = "sk-ant-" + "a1B2" * 12
WAITS = "sys.stdin.readline()"  # the line on which it waits to be killed


def end(how: str) -> None:
    held = "a local of the frame that ends"
    if how == "wait":
        sys.stdin.readline()
    elif how == "segv":
        ctypes.string_at(0)
    elif how == "exit":
        sys.exit(3)
    elif how == "_exit":
        os._exit(3)
    elif how == "hang":
        # With the interpreter's lock held: no other thread runs, and no handler in Python.
        got = ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)
        print(f"read {got}, {held}", flush=True)
    elif how == "native":
        found = SIDE[0].native(within_s=60)
        own = next(thread for thread in found["threads"] if thread["native_id"] == os.getpid())
        print(len(found["threads"]), len(own["registers"]) > 20, len(own.get("frames", ())) > 3, flush=True)
    elif how == "fork":
        for number in (signal.SIGKILL, signal.SIGSEGV):
            child = os.fork()
            if not child:
                os.kill(os.getpid(), number)
            os.waitpid(child, 0)
        print("the children are dead", child, flush=True)
    elif how == "memory":
        kept = []
        while True:
            kept.append(bytes([len(kept) % 255 + 1]) * (1 << 20))
    else:
        os.kill(os.getpid(), getattr(signal, how))


def main() -> None:
    folder, how, *wanted = sys.argv[1:]
    if "faulthandler" in wanted:
        faulthandler.enable()
    for place in [item[7:] for item in wanted if item.startswith("cgroup=")]:
        (Path(place) / "cgroup.procs").write_text(str(os.getpid()))
    os.environ["DATABASE_PASSWORD"] = "correct-horse-77"
    handler = outside.enable_fatal(folder) if "unwatched" in wanted or how != "stop" else None
    if "core" in wanted:
        print("core:", cores.allow(), flush=True)
    if "unwatched" not in wanted:
        # A dead process's file with nothing in it. The sidecar removes it after its first look at this process, in
        # which it learns what will be gone with it.
        unseen = Path(folder) / f"0{outside.SUFFIX}"
        if "early" not in wanted:
            unseen.touch()
        side = sidecar.start(folder, fatal=handler, hang_s=0.5 if "hang_s" in wanted else None, core="core" in wanted)
        SIDE.append(side)
        if "early" in wanted:  # before the sidecar has looked at anything
            print("sidecar", side.pid, flush=True)
            end(how)
        inside.keep_logs(100).ship = side.log
        logging.getLogger("trip").warning("booked with %s", KEY)
        logging.getLogger("trip").warning("connected by correct-horse-77")
        side.tell(kinds.AGENT, "trip-7@main", {"agent": "trip-7", "checkpoint": "c1", "note": f"key {KEY}"})
        side.progress()
        atexit.register(side.ending)

        beaten = threading.Event()

        def beats() -> None:
            settled = False
            while True:
                side.beat()
                beaten.set()
                if how == "wait" and not settled:
                    frame = sys._current_frames()[threading.main_thread().ident]
                    settled = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip() == WAITS
                    if settled:  # from here on nothing changes: let the newest stacks say so
                        side._snapshot_at = 0.0
                        side.beat()
                        print("settled", flush=True)
                time.sleep(0.05)

        threading.Thread(target=beats, daemon=True, name="beats").start()
        beaten.wait()
        until = time.monotonic() + PATIENCE_S
        while unseen.exists() and time.monotonic() < until:
            time.sleep(0.005)
        if how == "stop":
            side.stop()
            how = "SIGKILL"
        print("sidecar", side.pid, flush=True)
    end(how)


if __name__ == "__main__":
    main()
