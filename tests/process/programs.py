"""Programs that are frozen by tests: none of them knows anything of it, but where it says so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

SERVER = """
import asyncio, os, sqlite3, sys, threading, time

log = open("server.log", "a", buffering=1)
rows = sqlite3.connect("server.db", isolation_level=None)
rows.execute("PRAGMA journal_mode=WAL")
rows.execute("CREATE TABLE IF NOT EXISTS asked (n)")
count, ticks = 0, 0

def tick():
    global ticks
    while True:
        time.sleep(0.005)
        ticks += 1

threading.Thread(target=tick, daemon=True).start()

async def serve(reader, writer):
    global count
    try:
        while (await reader.readline()).strip():
            pass
        count += 1
        log.write(f"{count}\\n")
        rows.execute("INSERT INTO asked VALUES (?)", (count,))
        stored = rows.execute("SELECT count(*) FROM asked").fetchone()[0]
        body = f"{count} {stored} {ticks} {os.getpid()}".encode()
        writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\nConnection: close\\r\\n\\r\\n" % len(body) + body)
        await writer.drain()
        writer.close()
    except OSError:
        pass

async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    open("port.new", "w").write(str(server.sockets[0].getsockname()[1]))
    os.rename("port.new", "port")
    await server.serve_forever()

asyncio.run(main())
"""

COUNTER = """
import os, sys, time
count = 0
while True:
    count += 1
    open("count.new", "w").write(f"{count} {os.getpid()}")
    os.rename("count.new", "count")
    time.sleep(0.01)
"""

# Calls a tool that books in a file outside, which is no part of the process: it is closed again each time.
AGENT = """
import os, sys, time
import holdfast

@holdfast.tool(effect="write", compensate=lambda effect: open("booked", "a").write(f"undone {effect.args['n']}\\n"))
def book(n, slow=0.0):
    open("calling", "w").close()
    time.sleep(slow)
    os.unlink("calling")
    open("booked", "a").write(f"booked {n}\\n")
    return n

if __name__ == "__main__":
    holdfast.freezable()
    store = holdfast.open(sys.argv[1])
    with store.agent("clerk", when=None) as agent:
        agent.state.setdefault("n", 0)
        agent.checkpoint("begun")
        memory = 0  # what only the process knows
        while True:
            n = agent.state["n"] + 1
            book(n)
            agent.state["n"] = n
            memory += 1
            agent.checkpoint(f"booked {n}")
            open("count.new", "w").write(f"{n} {memory}")
            os.rename("count.new", "count")
            while os.path.exists("hold"):
                open("held", "w").close()
                time.sleep(0.01)
            time.sleep(0.05)
"""

PATIENCE_S = 60.0


class Program:
    """A program in a process of its own, in a folder of its own."""

    def __init__(self, folder: Path, text: str, *words: object, **options: object) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        (folder / "program.py").write_text(text)
        with (folder / "output").open("ab") as output:
            streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output, **options}
            self.process = subprocess.Popen(
                [sys.executable, "program.py", *map(str, words)], cwd=folder, start_new_session=True, **streams
            )
        self.pid = self.process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        for entry in Path("/proc").glob("[0-9]*/cwd"):  # those that were brought back are nobody's children
            with suppress(OSError):
                if entry.readlink() == self.folder and int(entry.parts[2]) != os.getpid():
                    os.kill(int(entry.parts[2]), signal.SIGKILL)

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Inside, one of the text of AGENT makes no call: whoever ends it there leaves nothing in doubt."""
        (self.folder / "hold").touch()
        self.wait_for("held")
        yield
        for name in ("hold", "held"):
            (self.folder / name).unlink()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)  # whoever traces it must let go of it first

    def wait_for(self, name: str) -> str:
        """What is in a file of its folder, as soon as it is there."""
        return until((self.folder / name).read_text, FileNotFoundError)

    def count(self) -> list[int]:
        return [int(word) for word in self.wait_for("count").split()]

    def passes(self, number: int) -> list[int]:
        """Wait until it has counted further than that."""
        return until(lambda: found if (found := self.count())[0] > number else None)


def until(look, *errors):
    """What something gives, as soon as it gives something."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with suppress(*errors):
            if (found := look()) is not None:
                return found
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
