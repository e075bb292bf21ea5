"""Whatever a program holds and however it ends, no secret of a known shape is in the bytes of the dump that is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time

import pytest

from holdfast.crash import kinds, open_dump
from holdfast.crash.outside import take
from tests.crash.processes import SOURCE
from tests.crash.test_redaction import SECRETS, raw_bytes, secret_part

LIMIT_S = 120
UNDER_NAMES = ("plain-value-under-a-name", "environment-password", "value-in-argv-77")

PROGRAM = textwrap.dedent("""
    import asyncio, collections, ctypes, json, logging, os, signal, sys, threading, time, warnings
    from pathlib import Path
    import holdfast.crash as crash
    from holdfast.crash import outside, hooks

    # What a dead process left: the sidecar removes it after its first look at this one.
    unseen = Path(sys.argv[1], "0" + outside.SUFFIX)
    unseen.parent.mkdir()
    unseen.touch()
    crash.install(to=sys.argv[1], limits=crash.Limits(deadline_s=600, part_s=300))
    HOW = sys.argv[2]
    secrets = json.loads(sys.argv[3])

    class Point(collections.namedtuple("Point", "x y")):
        pass

    class Holder:
        __slots__ = ("text", "api_key")
        def __init__(self, text):
            self.text, self.api_key = text, "plain-value-under-a-" + "name"

    class Client:
        def __init__(self, text):
            self.text = f"before {text} after"
            self.headers = {"Authorization": text, b"authorization": text.encode()}
            self.nested = [{"deep": ({text: 1}, {text}, frozenset((text,)))}]
            self.queue = collections.deque([text])
            self.point = Point(text, text)
            self.holder = Holder(text)
            self.raw, self.array = f"in bytes {text}".encode(), bytearray(text.encode())
            self.view = memoryview(self.array)
            self.long = "x" * 16_000 + " " + text + " " + "y" * 20_000
            self.error = ValueError(text)
            setattr(self, text, 1)

    log = logging.getLogger("app " + secrets[0])

    def work(text, db_password):
        client = Client(text)
        log.warning("calling with %s", text)
        log.error("as bytes %r", text.encode())
        warnings.warn(text)
        error = ValueError(f"refused: {text}", text, text.encode())
        error.add_note(f"note {text}")
        try:
            raise error
        except ValueError as caught:
            raise RuntimeError(text) from caught

    async def wait(text, gate):
        mine = Client(text)
        await gate.wait()

    def stand(text, ended):
        mine = {"text": text, text: [text]}
        ended.wait()

    def end():
        if HOW == "raise":
            errors = []
            for text in secrets:
                try:
                    work(text, "environment-" + "password")
                except RuntimeError as error:
                    errors.append(error)
            raise ExceptionGroup("all of " + " ".join(secrets), errors)
        print("ready", flush=True)
        if HOW == "wait":
            sys.stdin.read()
        while unseen.exists():
            time.sleep(0.005)
        hooks._active.sidecar._snapshot_at = 0.0
        hooks._active.sidecar.beat()  # it has been told of threads and logs
        os.kill(os.getpid(), signal.SIGKILL) if HOW == "SIGKILL" else ctypes.string_at(0)

    async def main():
        gate = asyncio.Event()
        tasks = [asyncio.create_task(wait(text, gate), name=f"task {text}") for text in secrets]
        ended = threading.Event()
        for text in secrets:
            threading.Thread(target=stand, args=(text, ended), name=f"thread {text}", daemon=True).start()
            log.warning("thread with %s", text)
        opened = open(os.path.join(os.path.dirname(sys.argv[0]), "file " + secrets[2]), "w")
        everything = [Client(text) for text in secrets]
        await asyncio.sleep(0)
        end()

    asyncio.run(main())
""")


@pytest.fixture
def start(tmp_path):
    """Start the program with secrets in its arguments and environment."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM + f"\nAPI = {SECRETS['anthropic']!r}\n")
    started = []

    def run(how):
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(SOURCE),
            "DB_PASSWORD": "environment-password",
            "HOME": f"/home/{SECRETS['github']}",
            "LANG": SECRETS["url"],
            **{f"PLAIN_{number}": text for number, text in enumerate(SECRETS.values())},
        }
        arguments = [sys.executable, file, tmp_path / "d", how, json.dumps(list(SECRETS.values())), *SECRETS.values()]
        process = subprocess.Popen(
            [*arguments, "--password", "value-in-argv-77", "--api-key=value-in-argv-77"],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def without_canaries(path):
    data = raw_bytes(path)
    found = [name for name, text in SECRETS.items() if secret_part(text).encode() in data]
    found += [text for text in UNDER_NAMES if text.encode() in data]
    with open_dump(path) as dump:
        places = {name: [part.kind for part in dump.parts if _holds(dump, part.kind, name)] for name in found}
    assert not found, places
    return data


def _holds(dump, kind, name):
    wanted = secret_part(SECRETS[name]) if name in SECRETS else name
    return any(wanted in repr(payload) for payload in dump._all(kind))


def left_by(process, folder):
    out, err = process.communicate(timeout=LIMIT_S)
    limit = time.monotonic() + LIMIT_S
    while True:
        paths = sorted(folder.glob("*.hfdump"))
        if paths:
            with open_dump(paths[0]) as dump:
                if dump.index:
                    return paths
        assert time.monotonic() < limit, (out, err)
        time.sleep(0.1)


def test_by_the_hook_of_an_uncaught_exception(start, tmp_path):
    process = start("raise")
    (path,) = left_by(process, tmp_path / "d")
    without_canaries(path)
    with open_dump(path) as dump:
        assert len(dump.exceptions) > len(SECRETS)
        assert len(dump.threads) > len(SECRETS)
        assert dump.logs
        assert dump.index["redacted"]


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSEGV"])
def test_by_the_sidecar_after_a_death(start, tmp_path, how):
    paths = left_by(start(how), tmp_path / "d")
    for path in paths:
        without_canaries(path)
    with open_dump(paths[0]) as dump:
        assert dump.extras(kinds.NOTE)["death"]
        assert dump.logs


def test_from_outside(start, tmp_path):
    process = start("wait")
    assert process.stdout.readline() == "ready\n"
    path = take(process.pid, to=tmp_path / "outside")
    without_canaries(path)
    with open_dump(path) as dump:
        assert len(dump.threads) > len(SECRETS)
