"""What is measured. Each function takes the run's settings, prepares, measures, checks, and returns figures as a dict.

Owns the order of events inside a measurement. What always holds: rivals that are compared take turns in the same
rounds, in an order shuffled anew for each, in folders of one filesystem; a ratio is the median of the ratios within
rounds, so that a machine that is slow for a while is slow for both sides.
"""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter, perf_counter_ns
from typing import Any

import msgspec
from material import RECORD_BYTES, encoded_bytes, incompressible, realistic, records, zstd_ratio
from rivals import MAKERS, WHOLE_STATE, Floor, Rival, connect_rows, open_quietly, saver_policy

import holdfast

HERE = Path(__file__).resolve().parent
LENGTHS = (1_000, 10_000, 100_000)
EDIT_BYTES = (50_000, 5_000_000)
LOAD_MESSAGES = 10_240
DISK_CHECKPOINTS = (1_000, 10_000)
FLOOR_LENGTH = 10_000
SERVER_MESSAGES = 500
THREADS = 64
SAVER_DISK_CHECKPOINTS = 1_000
"""SqliteSaver writes the whole state each time: half a gigabyte after 1,000 checkpoints, fifty after 10,000."""
WRITERS = 8
_PASSES = ("first", "second", "third", "warm", "plain", "plain")
"""Each element is read three times. The second pass may still pay for wrapping that the first one put off.

The plain containers are gone through once before they are measured: they had fallen out of the processor's caches.
"""

Figures = dict[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """One run: where it works, its seed, how often it repeats, and a checkout of another Holdfast to compare with."""

    folder: Path
    seed: int
    quick: bool
    say: Say
    against: Path | None = None

    def times(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def rng(self, *names: object) -> random.Random:
        return random.Random("/".join(map(str, (self.seed, *names))))

    @contextmanager
    def place(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            yield Path(name)


def summary(times_ns: list[int]) -> Figures:
    ordered = sorted(times_ns)
    return {
        "count": len(ordered),
        "median_us": median(ordered) / 1e3,
        "p99_us": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] / 1e3,
        "worst_us": ordered[-1] / 1e3,
    }


FLOORS = {"ratio": "floor", "ratio_in_place": "in place"}


def take_turns(
    acts: dict[str, Callable[[int], None]], counts: dict[str, int], rng: random.Random, settle: Callable[[], None],
    ratios: dict[str, str] = FLOORS,
) -> dict[str, Figures]:  # fmt: skip
    """Let each act ``counts`` times, spread over the rounds. ``settle`` runs, untimed, after one that writes a lot.

    ``ratios``: by name, against whom. Who acts less often than that one is compared in the rounds of both.
    """
    rounds = max(counts.values())
    chosen = {name: set(rng.sample(range(rounds), count)) for name, count in counts.items()}
    times: dict[str, dict[int, int]] = {name: {} for name in acts}
    gc.collect()
    for number in range(rounds):
        order = [name for name in acts if number in chosen[name]]
        rng.shuffle(order)
        for name in order:
            act = acts[name]
            began = perf_counter_ns()
            act(number)
            times[name][number] = perf_counter_ns() - began
            if name in WHOLE_STATE:
                settle()
    figures = {}
    for name, taken in times.items():
        figures[name] = summary(list(taken.values()))
        for ratio, base in ratios.items():
            both = taken.keys() & times[base].keys()
            figures[name][ratio] = median(taken[number] / times[base][number] for number in both)
    return figures


def _duel(
    settings: Settings,
    names: list[str],
    items: list[Any],
    counts: dict[str, int],
    act: Callable[[Rival, int], None],
    rng: random.Random,
) -> dict[str, Figures]:
    """Give each rival a folder and its own copy of the items, then let them take turns."""
    data = msgspec.msgpack.encode(items)
    with settings.place() as folder:
        rivals: dict[str, Rival] = {}
        for name in names:
            own = folder / name.replace(" ", "-")
            own.mkdir()
            rivals[name] = MAKERS[name](own)
            rivals[name].fill(msgspec.msgpack.decode(data))
        del data
        spare = folder / "spare"
        spare.mkdir()
        settle = Floor(spare)
        acts = {name: (lambda number, rival=rival: act(rival, number)) for name, rival in rivals.items()}
        for one in acts.values():
            one(-1)  # the first time pays for imports and for files that are made
        figures = take_turns(acts, counts, rng, lambda: settle.append({}))
        for rival in (*rivals.values(), settle):
            rival.close()
    return figures


def rivals_for(policy: str) -> list[str]:
    """All of them; SqliteSaver a second time only if it does not flush at every commit by itself."""
    return [name for name in MAKERS if name != "langgraph FULL" or "synchronous=FULL" not in policy]


def append(settings: Settings, policy: str) -> Figures:
    """One message of about 1 KB added to a history of 1,000 to 100,000, then made durable."""
    figures: Figures = {}
    light = settings.times(400, 60)
    heavy = {1_000: settings.times(60, 10), 10_000: settings.times(24, 4), 100_000: settings.times(5, 2)}
    names = rivals_for(policy)
    for length in LENGTHS[: settings.times(3, 2)]:
        settings.say(f"append at {length:,} messages")
        rng = settings.rng("append", length)
        source = realistic(rng)
        items = list(islice(source, length))
        fresh = list(islice(source, light + 1))

        def act(rival: Rival, number: int, fresh: list[Any] = fresh) -> None:
            rival.append(dict(fresh[number]))

        counts = {name: heavy[length] if name in WHOLE_STATE else light for name in names}
        figures[str(length)] = _duel(settings, names, items, counts, act, rng)
    return figures


def floor(settings: Settings, policy: str) -> Figures:
    """The same append at 10,000 messages beside the floors alone, in several runs: a single one says little."""
    del policy
    names, count = ["floor", "in place", "holdfast"], settings.times(400, 30)
    runs = []
    for number in range(settings.times(10, 2)):
        settings.say(f"append at {FLOOR_LENGTH:,} messages, run {number + 1}")
        rng = settings.rng("floor", number)
        source = realistic(rng)
        items, fresh = list(islice(source, FLOOR_LENGTH)), list(islice(source, count + 1))

        def act(rival: Rival, number: int, fresh: list[Any] = fresh) -> None:
            rival.append(dict(fresh[number]))

        runs.append(_duel(settings, names, items, dict.fromkeys(names, count), act, rng)["holdfast"])
    return {name: [run[name] for run in runs] for name in ("ratio", "ratio_in_place", "median_us")}


def server(settings: Settings, policy: str) -> Figures:
    """A commit on PostgreSQL at 500 messages: against one INSERT of as many bytes, and PostgresSaver.put.

    The server is a real one that flushes, on this machine and its default settings, reached through a socket.
    """
    del policy
    sys.path.insert(0, str(HERE.parent))
    from rivals import BareInsert, OnServer, PostgresPut

    from tests import postgres

    settings.say(f"commits on PostgreSQL at {SERVER_MESSAGES} messages")
    rng = settings.rng("server")
    source = realistic(rng)
    count = settings.times(400, 30)
    data = msgspec.msgpack.encode(list(islice(source, SERVER_MESSAGES)))
    fresh = list(islice(source, count + 1))
    try:
        with postgres.server(fsync="on") as running, running.database("bench") as url:
            ours = OnServer(url)
            rivals: dict[str, Rival] = {"bare INSERT": BareInsert(url, ours), "holdfast": ours, "put": PostgresPut(url)}
            for rival in (ours, *(rival for rival in rivals.values() if rival is not ours)):
                rival.fill(msgspec.msgpack.decode(data))
            acts = {
                name: (lambda number, rival=rival: rival.append(dict(fresh[number]))) for name, rival in rivals.items()
            }
            for one in acts.values():
                one(-1)
            ratios = {"ratio": "bare INSERT", "of_ours": "holdfast"}
            found = take_turns(acts, dict.fromkeys(acts, count), rng, lambda: None, ratios)
            for rival in rivals.values():
                rival.close()
    except postgres.NoServer as error:
        return {"not_run": str(error)}
    return found


def threads(settings: Settings, policy: str) -> Figures:
    """64 threads with an agent each in one process: checkpoints per second, each flushed, and batched."""
    del policy
    sources = {"holdfast": None} | ({"against": settings.against} if settings.against else {})
    figures: Figures = {}
    for durability in ("commit", "batched"):
        found: dict[str, list[Figures]] = {name: [] for name in sources}
        for number in range(settings.times(3, 1)):
            for name in settings.rng("threads", durability, number).sample(sorted(sources), len(sources)):
                settings.say(f"{THREADS} threads, {durability}, {name}")
                with settings.place() as folder:
                    job = (THREADS, durability, settings.times(3, 1))
                    found[name].append(_child("write-threads", folder, *job, source=sources[name]))
        figures[durability] = {
            name: {key: median(answer[key] for answer in answers) for key in answers[0]}
            for name, answers in found.items()
        }
    return figures


def edits(settings: Settings, policy: str) -> Figures:
    """One field changed in 1% of the records, scattered, then made durable once."""
    figures: Figures = {}
    names = rivals_for(policy)
    for size in EDIT_BYTES:
        settings.say(f"1% scattered edits on {size // 1000:,} KB")
        rng = settings.rng("edits", size)
        items = records(size // RECORD_BYTES, rng)
        count = settings.times(120 if size < 1_000_000 else 24, 8)
        changes = [
            [(at, "score", rng.random()) for at in rng.sample(range(len(items)), max(1, len(items) // 100))]
            for _ in range(count + 1)
        ]

        def act(rival: Rival, number: int, changes: list[Any] = changes) -> None:
            rival.edit(changes[number])

        found = _duel(settings, names, items, dict.fromkeys(names, count), act, rng)
        figures[str(size)] = {"records": len(items), "edits": len(changes[0]), "rivals": found}
    return figures


def disk(settings: Settings, policy: str) -> Figures:
    """Bytes of all files after so many checkpoints of one appended message each, every log folded, all closed."""
    del policy
    figures: Figures = {}
    steps = DISK_CHECKPOINTS[: settings.times(2, 1)]
    for kind, make in (("incompressible", incompressible), ("realistic", realistic)):
        source = make(settings.rng("disk", kind))
        messages = list(islice(source, steps[-1]))
        figures[kind] = {"zstd_ratio": zstd_ratio(messages[:1_000]), "after": {}}
        for step in steps:
            logical = sum(map(encoded_bytes, messages[:step]))
            figures[kind]["after"][str(step)] = {"logical": logical}
        for name in ("holdfast", "sqlite rows", "pickle", "langgraph"):
            if name == "langgraph" and kind != "realistic":
                continue  # it does not compress: one material shows it
            settings.say(f"bytes on disk, {kind}, {name}")
            for step, size in _grow(settings, name, messages, steps):
                figures[kind]["after"][str(step)][name] = size
    return figures


def _grow(settings: Settings, name: str, messages: list[Any], steps: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    with settings.place() as folder:
        rival = MAKERS[name](folder)
        rival.fill([])
        done = 0
        for step in steps:
            if name == "langgraph" and step > SAVER_DISK_CHECKPOINTS:
                break
            if name == "pickle":  # its one file holds the last state, however often it was written before
                rival.fill(messages[:step])
            else:
                for message in messages[done:step]:
                    rival.append(message)
            done = step
            if name == "holdfast":
                rival.close()
                yield step, folder_bytes(folder)
                rival = MAKERS[name](folder)
            elif name == "sqlite rows":
                rival.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # type: ignore[attr-defined]
                yield step, folder_bytes(folder)
            else:
                if name == "langgraph":
                    rival.close()
                yield step, folder_bytes(folder)
        if name != "langgraph":
            rival.close()


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def load(settings: Settings, policy: str) -> Figures:
    """A process starts, opens what was kept, and reads every field of a document of 10 MB."""
    del policy
    settings.say("cold load of 10 MB")
    rng = settings.rng("load")
    messages = list(islice(realistic(rng), LOAD_MESSAGES))
    verbs = ("msgpack", "holdfast", "pickle", "langgraph")
    with settings.place() as folder:
        (folder / "state.msgpack").write_bytes(msgspec.msgpack.encode({"messages": messages}))
        for name in ("pickle", "langgraph"):
            rival = MAKERS[name](folder)
            rival.fill(messages)
            rival.close()
        with open_quietly(folder / "store") as store:
            agent = store.agent("bench")
            held = agent.state.setdefault("messages", [])
            for at in range(0, len(messages), 20):
                held.extend(msgspec.msgpack.decode(msgspec.msgpack.encode(messages[at : at + 20])))
                agent.checkpoint()
        for verb in verbs:
            _child(f"load-{verb}", folder)  # compiles what is imported
        found: dict[str, list[Figures]] = {verb: [] for verb in verbs}
        for _ in range(settings.times(15, 3)):
            for verb in rng.sample(verbs, len(verbs)):
                found[verb].append(_child(f"load-{verb}", folder))
    fields = sum(len(message) for message in messages)
    for verb, answers in found.items():
        if any(answer["seen"] != fields for answer in answers):
            raise RuntimeError(f"{verb} did not read all of the document")
    base = [answer["total"] for answer in found["msgpack"]]
    figures: Figures = {"messages": len(messages), "bytes": encoded_bytes(messages)}
    for verb, answers in found.items():
        totals = [answer["total"] for answer in answers]
        figures[verb] = summary(totals)
        figures[verb]["ratio"] = median(total / one for total, one in zip(totals, base, strict=True))
        if "load" in answers[0]:
            figures[verb]["load_ratio"] = median(
                answer["load"] / one for answer, one in zip(answers, base, strict=True)
            )
        for part in ("open", "load", "read"):
            if part in answers[0]:
                figures[verb][f"{part}_us"] = median(answer[part] for answer in answers) / 1e3
    return figures


def _child(verb: str, folder: Path, *rest: object, source: Path | None = None) -> Figures:
    """``source``: a checkout whose Holdfast does it, instead of this one."""
    command = [sys.executable, str(HERE / "child.py"), verb, str(folder), *map(str, rest)]
    environment = child_environment(folder) | ({"PYTHONPATH": str(source / "src")} if source else {})
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment)
    return dict(json.loads(done.stdout))


def child_environment(folder: Path) -> dict[str, str]:
    """Compiled modules are kept between starts, as on a machine where nobody turned that off (some containers do)."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPYCACHEPREFIX": str(folder.parent / "pycache")}


def reading(settings: Settings, policy: str) -> Figures:
    """Elements of a list of messages and of a dict of them, against a plain list and a plain dict."""
    del policy
    settings.say("reading and iterating")
    rng = settings.rng("reading")
    messages = list(islice(realistic(rng), 10_000))
    by_id = {message["id"]: message for message in messages[:5_000]}
    places = rng.sample(range(len(messages)), 1_000)
    # As programs have them: equal to the keys of the dict, and not the same objects, which are found faster.
    keys = json.loads(json.dumps(rng.sample(sorted(by_id), 1_000)))

    def each(container: Any, wanted: list[Any]) -> None:
        for key in wanted:
            container[key]

    def fields(items: list[Any], _: Any) -> None:
        for item in items:
            item["content"]

    def walk(items: Any, _: Any) -> None:
        for item in items:
            item["content"]

    cases: dict[str, tuple[Callable[[Any, Any], None], Any, int]] = {
        "list element": (each, places, len(places)),
        "dict element": (each, keys, len(keys)),
        "message field": (fields, None, len(places)),
        "iteration": (walk, None, len(messages)),
    }
    times: dict[str, dict[str, list[float]]] = {case: {name: [] for name in _PASSES} for case in cases}
    with settings.place() as folder:
        with open_quietly(folder / "store") as store:
            agent = store.agent("bench")
            agent.state["messages"] = messages
            agent.state["by_id"] = by_id
            agent.checkpoint()
        with holdfast.open(folder / "store", readonly=True) as store:
            for _ in range(settings.times(15, 5)):
                for case in rng.sample(sorted(cases), len(cases)):
                    work, wanted, count = cases[case]
                    state = store.agent("bench").state  # a new handle each time: nothing has been touched yet
                    ours: Any = state["by_id"] if case == "dict element" else state["messages"]
                    plain: Any = by_id if case == "dict element" else messages
                    if case == "message field":
                        ours, plain = [ours[at] for at in places], [messages[at] for at in places]
                    gc.collect()
                    for name in _PASSES:
                        target = plain if name in {"warm", "plain"} else ours
                        began = perf_counter_ns()
                        work(target, wanted)
                        times[case][name].append((perf_counter_ns() - began) / count)
    figures = {}
    for case, found in times.items():
        middle = {name: median(values) for name, values in found.items()}
        figures[case] = {
            **{f"{name}_ns": value for name, value in middle.items()},
            **{f"{name}_ratio": middle[name] / middle["plain"] for name in ("first", "second", "third")},
        }
    return figures


def crowd(settings: Settings, policy: str) -> Figures:
    """Eight processes write at once into one store, each its own agent; then everything is counted."""
    del policy
    count = settings.times(400, 60)
    figures: Figures = {"writers": WRITERS, "checkpoints_each": count}
    settings.say(f"{WRITERS} processes writing {WRITERS} agents of one store")
    with settings.place() as folder:
        open_quietly(folder / "store").close()
        answers, seconds = _together(settings, "write-holdfast", folder, count)
        lost = 0
        with holdfast.open(folder / "store") as store:
            for number, answer in enumerate(answers):
                agent = store.agent(f"writer-{number}")
                written = count - len(answer["errors"])
                lost += written - len(agent.log()) + abs(written - len(agent.state["messages"]))
                lost += agent.digest != answer["digest"]
        figures["holdfast"] = _crowd_figures(answers, lost, seconds)
    settings.say(f"{WRITERS} processes writing one SQLite database")
    with settings.place() as folder:
        connect_rows(folder / "rows.db").close()
        answers, seconds = _together(settings, "write-rows", folder, count)
        connection = connect_rows(folder / "rows.db")
        (rows,) = connection.execute("SELECT count(*) FROM item").fetchone()
        connection.close()
        lost = sum(count - len(answer["errors"]) for answer in answers) - rows
        figures["sqlite rows"] = _crowd_figures(answers, lost, seconds)
    return figures


def _crowd_figures(answers: list[Figures], lost: int, seconds: float) -> Figures:
    waits = [wait for answer in answers for wait in answer["waits"]]
    errors = [error for answer in answers for error in answer["errors"]]
    return {**summary(waits), "errors": len(errors), "first_errors": errors[:3], "lost": lost, "seconds": seconds}


def _together(settings: Settings, verb: str, folder: Path, count: int) -> tuple[list[Figures], float]:
    command = [sys.executable, str(HERE / "child.py"), verb, str(folder)]
    children = [
        subprocess.Popen(
            [*command, str(number), str(count), str(settings.seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment(folder),
        )
        for number in range(WRITERS)
    ]
    for child in children:
        if child.stdout is None or child.stdout.readline() != "ready\n":
            raise RuntimeError(f"{verb}: a writer did not start")
    began = perf_counter()
    for child in children:
        if child.stdin is not None:
            child.stdin.write("go\n")
            child.stdin.flush()
    answers = [json.loads(child.communicate()[0]) for child in children]
    return answers, perf_counter() - began


def imports(settings: Settings, policy: str) -> Figures:
    """A whole process that does nothing, against one that imports holdfast, and one that goes on to use it.

    The second is told apart because the package loads its rooms when a name is first used: that time is paid as well.
    """
    del policy
    settings.say("import time")
    rng = settings.rng("imports")
    programs = {"bare": "pass", "import": "import holdfast", "open": "import holdfast; holdfast.open"}
    programs["opened"] = "import holdfast, os; holdfast.open('store'); os._exit(0)"
    times: dict[str, list[int]] = {name: [] for name in programs}
    with settings.place() as folder:
        open_quietly(folder / "store").close()
        environment = child_environment(folder)
        for number in range(settings.times(31, 5) + 1):
            for name in rng.sample(sorted(programs), len(programs)):
                began = perf_counter_ns()
                subprocess.run([sys.executable, "-c", programs[name]], check=True, env=environment, cwd=folder)
                if number:  # the first one compiles
                    times[name].append(perf_counter_ns() - began)
    figures: Figures = {name: summary(taken) for name, taken in times.items()}
    for name in ("import", "open", "opened"):
        above = median(a - b for a, b in zip(times[name], times["bare"], strict=True))
        figures[name]["above_bare_ms"] = above / 1e6
    return figures


SCENARIOS: dict[str, Callable[[Settings, str], Figures]] = {
    "append": append,
    "floor": floor,
    "server": server,
    "threads": threads,
    "edits": edits,
    "load": load,
    "reading": reading,
    "disk": disk,
    "crowd": crowd,
    "imports": imports,
}


def policy_of_saver(settings: Settings) -> str:
    with settings.place() as folder:
        return saver_policy(folder)
