"""Hostile files: every parser is fed changed bytes. It may refuse them with a declared error, and nothing else.

Nothing that they hold may be executed: no program is started, nothing is unpickled, nothing is asked over a network.

Where atheris is installed it makes the inputs, guided by which lines of Holdfast they reach (tests/faults/guided.py).
Where it is not, they are random changes of the seeds, and inputs with an outcome not seen before join the seeds. Either
way a parser runs in a process of its own with 256 MiB more than it had and one second of processor time for an input.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
import resource
import signal
import subprocess
import sys
import time
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.errors import HoldfastError
from tests.faults.campaign import ROOT, Task, campaign, quiet, remembering
from tests.faults.isolated import Died, isolated
from tests.faults.parsers import PARSERS, Parser, build
from tests.memory import memory

MEMORY_BYTES = 256 * 2**20
TIME_S = 1.0
HEAVY = 200
"""Parsers with this weight make and open whole stores: for them the second is half a minute."""
PER_PROCESS = 20_000
PER_PROCESS_GUIDED = 200_000
HANG_S = 900.0
CORPUS_MAX = 400
INTERESTING = (
    b"\x00", b"\xff", b"\x7f", b"\x80", b"\xc0", b"\xc1", b"\xdc\xff\xff", b"\xdd\xff\xff\xff\xff",
    b"\xdf\x7f\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\x00\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x14",
    b"\xcf" + b"\xff" * 8, b"\xd3\x80" + bytes(7), b"\xcb\x7f\xf8" + bytes(6), b"\xc7\x00\x16",
    b"\xd8\x28" + bytes(16), b"\x91" * 200, b"\x81\xa1a" * 120,
)  # fmt: skip


EXECUTION = frozenset((
    "pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.connect",
))  # fmt: skip
"""What a parser never does, as Python's audit events name it."""


class Slow(BaseException):
    """An input took more processor time than it may."""


class Executed(BaseException):
    """An input made something happen that is no reading."""


# -- mutation -------------------------------------------------------------------------------------------


def mutate(data: bytes, corpus: list[bytes], chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(1 << chance.randrange(4)):
        what = chance.randrange(9)
        at = chance.randrange(len(changed) + 1)
        if what == 0 and changed:
            changed[at - 1] ^= 1 << chance.randrange(8)
        elif what == 1 and changed:
            changed[at - 1] = chance.randrange(256)
        elif what == 2:
            del changed[at : at + chance.randrange(1, 9)]
        elif what == 3:
            changed[at:at] = chance.choice(INTERESTING)
        elif what == 4:
            piece = chance.choice(INTERESTING)
            changed[at : at + len(piece)] = piece
        elif what == 5:
            other = chance.choice(corpus)
            start = chance.randrange(len(other) + 1)
            changed[at : at + chance.randrange(40)] = other[start : start + chance.randrange(1, 64)]
        elif what == 6:
            changed[at:at] = changed[at : at + chance.randrange(1, 32)] * chance.randrange(1, 4)
        elif what == 7:
            del changed[at:]
        elif len(changed) >= 8:
            at = chance.randrange(len(changed) - 7)
            size = chance.choice((1, 2, 4, 8))
            value = int.from_bytes(changed[at : at + size]) + chance.choice((-1, 1, -16, 16, 255))
            changed[at : at + size] = (value % (1 << 8 * size)).to_bytes(size)
    return bytes(changed[:200_000])


# -- the loop -------------------------------------------------------------------------------------------


@contextmanager
def bounded() -> Iterator[None]:
    """Little more memory than now, an alarm on processor time, which ``one`` sets, and no execution. For ever."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY_BYTES, now + MEMORY_BYTES))

    def late(_number: int, _frame: types.FrameType | None) -> None:
        raise Slow

    def refuse(event: str, _arguments: tuple[object, ...]) -> None:
        if event in EXECUTION:
            raise Executed(event)

    signal.signal(signal.SIGVTALRM, late)
    sys.addaudithook(refuse)
    yield


def feed(
    parser: Parser, corpus: list[bytes], count: int, seed: int
) -> tuple[int, list[str], list[bytes], dict[str, int]]:
    """``count`` mutated inputs. Returns how many, what was wrong, inputs worth keeping, and the outcomes."""
    chance = random.Random(seed)
    wrong: list[str] = []
    kept: list[bytes] = []
    outcomes: dict[str, int] = {}
    known: set[str] = set()
    done = 0
    with memory() as folder, remembering(folder / "state"), quiet():
        if parser.store:
            build(folder / "original")
        with bounded():
            for _ in range(count):
                data = mutate(chance.choice(corpus), corpus, chance)
                outcome = one(parser, data, folder)
                done += 1
                kind = outcome.partition(":")[0]
                outcomes[kind] = outcomes.get(kind, 0) + 1
                shape = re.sub(r"[0-9a-f]{6,}|\d+", "#", outcome)[:120]
                if shape not in known:
                    known.add(shape)
                    kept.append(data)
                    if kind.startswith("!"):
                        wrong.append(f"{parser.name}: {outcome} from {data[:300].hex()}")
    return done, wrong, kept[:50], outcomes


def one(parser: Parser, data: bytes, folder: Path) -> str:
    signal.setitimer(signal.ITIMER_VIRTUAL, TIME_S * (30 if parser.weight >= HEAVY else 1))
    try:
        parser.parse(data, folder)
    except HoldfastError as error:
        return f"{type(error).__name__}: {str(error)[:100]}"
    except Slow:
        return "!too slow"
    except Executed as event:
        return f"!executed: {event}"
    except MemoryError:
        return "!too much memory"
    except Exception as error:  # whatever it is, it was not declared
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"!{type(error).__name__}: {error} at {Path(where.filename).name}:{where.lineno}"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return "accepted"


@dataclass
class Feeding:
    """One parser over a whole campaign, fed in many processes: what was learned from one goes on to the next."""

    parser: Parser
    folder: Path
    corpus: list[bytes] = field(default_factory=list)

    def turn(self, task: Task, seed: int, share: int) -> None:
        # Importing Holdfast under its eyes takes atheris seconds: a few inputs are not worth that.
        able = self.parser.weight < HEAVY and share >= PER_PROCESS
        guided = able and importlib.util.find_spec("atheris") is not None
        at_once = min(PER_PROCESS_GUIDED if guided else PER_PROCESS, share)
        count = max(10, at_once // self.parser.weight)
        if guided:
            self._guided(task, seed, count)
        else:
            self._random(task, seed, count)

    def _random(self, task: Task, seed: int, count: int) -> None:
        self.corpus = self.corpus or self.parser.seeds()
        try:
            done, wrong, kept, outcomes = isolated(
                lambda _say: feed(self.parser, self.corpus, count, seed), limit_s=HANG_S
            )
        except (AssertionError, Died) as error:
            task.broke(f"{self.parser.name}, seed {seed}: {error}")
            task.tried()
            return
        self.corpus = (self.corpus + kept)[:CORPUS_MAX]
        for text in wrong:
            task.broke(text)
        task.tried(self.parser.name, done)
        task.details["accepted"] += outcomes.get("accepted", 0)

    def _guided(self, task: Task, seed: int, count: int) -> None:
        self.folder.mkdir(exist_ok=True)
        left = HANG_S if task.seconds is None else max(1, task.seconds - (time.monotonic() - task.began))
        command = [
            sys.executable, "-m", "tests.faults.guided", self.parser.name, str(self.folder), f"-runs={count}",
            f"-seed={seed % 2**31}", f"-max_total_time={int(left)}", "-max_len=200000", "-rss_limit_mb=0",
        ]  # fmt: skip
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", check=False)
        runs = re.search(r"^Done (\d+) runs", ended.stderr, re.MULTILINE)
        wrong = self.folder / "wrong"
        if wrong.exists():
            for outcome, data in map(json.loads, wrong.read_text().splitlines()):
                task.broke(f"{self.parser.name}: {outcome} from {data}")
            wrong.unlink()
        if runs is None:
            task.broke(f"{self.parser.name}, seed {seed}: ended with {ended.returncode}: {ended.stderr[-500:]}")
        task.tried(f"{self.parser.name}, guided", int(runs[1]) if runs else 1)


@campaign("hostile", "hostile files", "inputs", ci=4_000, soak=100_000_000)
def hostile(task: Task) -> None:
    """Changes of real data for every parser, with atheris where it is installed, and rows that bear sums that fit."""
    share = task.count // len(PARSERS)
    turn = 0
    with memory() as folder:
        feedings = [Feeding(parser, folder / f"parser {number}") for number, parser in enumerate(PARSERS)]
        while not task.over:
            for feeding in feedings:
                if task.over:
                    return
                turn += 1
                feeding.turn(task, task.seed * 1_000_003 + turn, share)
