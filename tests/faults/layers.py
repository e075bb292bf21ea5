"""kill -9 while checkpoints of all layers are taken or put back: state, files, and where CRIU is, a frozen process.

Everything carries one number: each section of the state, each file, and the memory of the process. So whatever is found
afterwards tells of which moment it is, and a mixture shows. Also the program of a troupe (tests/lives.py): a life
edits, saves, goes back, undoes, and has another agent saved by copies of the process, until it is killed.
"""

from __future__ import annotations

import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import holdfast
from holdfast.errors import AgentBusy, HoldfastError, NothingToUndo
from holdfast.process import criu
from holdfast.process.trees import content_digest
from tests.faults.campaign import ROOT, Skip, Task, campaign, quiet
from tests.faults.kills import _killed, _syscalls, traced, whole
from tests.faults.script import Broken, Ledger
from tests.faults.stage import Life, stage
from tests.lives import Troupe, say, serve
from tests.memory import memory
from tests.process.programs import Program, until

Tree = dict[str, bytes | str | None]
LIFE_S = 0.25
OPENING_S = 0.05
KILLED_WHILE_OPENING = 0.2
VERIFY_EVERY = 20
LIVES_PER_STORE = 60
OURS = ("of ", "undo of ", "redo of ")
"""How labels begin; others were made to keep what an edit that was killed had left."""
FREEZE_S = 1.5
"""Longer than a freeze or a thaw takes on a machine that is not busy."""


# -- what belongs to a number -------------------------------------------------------------------------------


def state_of(number: int) -> dict[str, Any]:
    return {"n": number, "items": [number] * 7, "text": f"{number} " * (number % 50)}


def files_of(number: int) -> Tree:
    """Files that all differ, some that come and go, links, directories that become files and the other way round."""
    found: Tree = {f"f{one}": f"{number}\n".encode() * (one * 40 + 1) for one in range(6)}
    found["d"] = None
    found["d/e"] = None
    found["d/e/big"] = random.Random(number).randbytes(30_000)
    found["link"] = f"f{number % 6}"
    found[f"only-{number % 3}"] = f"{number}".encode()
    if number % 2:
        found["turn"] = None
        found["turn/in"] = f"{number}".encode()
    else:
        found["turn"] = f"{number}".encode()
    return found


def edit(repo: Path, number: int) -> None:
    """Let the directory be that of a number, as a shell would: one after the other."""
    wanted, there = files_of(number), tree(repo)
    for name in [*sorted(there.keys() - wanted.keys(), reverse=True), "turn"]:
        path = repo / name
        if path.is_dir() and not path.is_symlink():
            for inner in path.iterdir():
                inner.unlink()
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
    for name, content in wanted.items():
        path = repo / name
        if content is None:
            path.mkdir(exist_ok=True)
        elif isinstance(content, str):
            path.unlink(missing_ok=True)
            path.symlink_to(content)
        else:
            path.write_bytes(content)


def tree(root: Path) -> Tree:
    found: Tree = {}
    for folder, folders, names in os.walk(root):
        for name in (*folders, *names):
            path = Path(folder, name)
            mode = path.lstat().st_mode
            link, folder_too = stat.S_ISLNK(mode), stat.S_ISDIR(mode)
            found[str(path.relative_to(root))] = (
                str(path.readlink()) if link else None if folder_too else path.read_bytes()
            )
    return found


def number_of(agent: holdfast.Agent, checkpoint: holdfast.Checkpoint) -> int:
    """The number that a checkpoint is of. Raises unless its state and its files all are. 0: all was undone."""
    number = checkpoint.state.get("n", 0)
    if not number and not checkpoint.sections:
        return 0
    if checkpoint.state != state_of(number) or not whole(checkpoint):
        raise Broken(f"the state of {checkpoint.label} is a mixture")
    if checkpoint.has_files:
        found = {one.path: one.digest or one.target or None for one in agent.files(checkpoint)}
        wanted = files_of(number)
        named = {path: content_digest(one).hex() if isinstance(one, bytes) else one for path, one in wanted.items()}
        if found != named or agent.read_file("d/e/big", checkpoint) != wanted["d/e/big"]:
            raise Broken(f"the files of {checkpoint.label} are a mixture, or not those of its state")
    return number


# -- the one who is killed ----------------------------------------------------------------------------------


def live(path: str, repo: str, seed: int) -> None:
    """Random work for ever. Says what it is about to do, and what is done."""
    chance, folder = random.Random(seed), Path(repo)
    store = holdfast.open(path)
    agent = store.agent("coder", workspace=folder, when=None)
    other = store.agent("copied", when=None)
    say("opened", agent.state.get("n", 0))
    if agent.head is not None:
        say("restoring", agent.state.get("n", 0))
        agent.restore_workspace()
        say("at", f"{agent.head.id} {agent.state.get('n', 0)}")
    while True:
        what = chance.random()
        if what < 0.4 or agent.head is None or not agent.state:
            number = chance.randrange(1, 10**6)
            say("editing", number)
            edit(folder, number)
            say("saving", number)
            agent.state = state_of(number)
            say("at", f"{agent.checkpoint(f'of {number}').id} {number}")
        elif what < 0.5:
            number = chance.randrange(1, 10**6)
            other.state = state_of(number)
            made = other.checkpoint(f"of {number}", mode="fork").wait()
            say("copied", f"{made.id} {number}")
        else:
            targets = [one for one in agent.log(limit=9, all=chance.random() < 0.5) if one.label.startswith(OURS)]
            say("going", agent.state.get("n", 0))
            with suppress(NothingToUndo):
                if what < 0.8:
                    agent.rollback(chance.choice(targets or [agent.head]))
                else:
                    agent.undo() if chance.random() < 0.6 else agent.redo()
            say("at", f"{agent.head.id} {agent.state.get('n', 0)}")


def after(path: Path, repo: Path, said: list[list[str]], before: Tree, acknowledged: dict[str, int]) -> str:
    """What a dead process left is opened. Returns what it was doing; raises where it is a mixture."""
    doing = said[-1] if said else ["opening"]
    for word, *rest in said:
        if word == "error":
            raise Broken(f"it failed: {' '.join(rest)}")
        if word in {"at", "copied"}:
            acknowledged[rest[0]] = int(rest[1])
    with holdfast.open(path) as store:
        agent = store.agent("coder", workspace=repo, when=None)
        other = store.agent("copied", when=None)
        if any(one.half_way for one in store.workspaces()):
            raise Broken("the directory is still half-way")
        if agent.head is None:
            return doing[0]
        number, there = number_of(agent, agent.head), tree(repo)
        if not number:
            return "all was undone"  # then there are no files to go back to
        if dict(agent.state) != state_of(number):
            raise Broken("the live state is not that of the head")
        word, *rest = doing
        good = there == files_of(number)
        if word == "at" and (agent.head.id != rest[0] or not good):
            raise Broken(f"{rest} was acknowledged; head {agent.head.id}, of {number}, its files there: {good}")
        if word == "going" and not good:
            raise Broken(f"{doing}: the directory is not that of the head, of {number}")
        if word == "saving" and there != files_of(int(rest[0])):
            raise Broken("a checkpoint changed files")
        if word in {"opening", "opened", "restoring"} and not good and there != before:
            raise Broken(f"{doing}: the directory is neither as it was nor that of the head, of {number}")
        ours = [one for one in agent.log(limit=6, all=True) if one.label.startswith(OURS)]
        for one in (*ours[:3], *other.log(limit=2)):
            known = acknowledged.get(one.id)
            if known not in {None, number_of(agent if one.has_files else other, one)}:
                raise Broken(f"{one.id} was acknowledged as {known}")
        return word if word not in {"at", "copied"} else "at rest"


def _random(task: Task, count: int) -> None:
    chance = random.Random(31_400 + task.seed)
    until_done = task.done + count
    with Troupe("tests.faults.layers") as troupe, quiet():
        while task.done < until_done and not task.over:
            with memory() as folder:
                _on(folder, task, troupe, chance, min(until_done, task.done + LIVES_PER_STORE))


def _on(folder: Path, task: Task, troupe: Troupe, chance: random.Random, until_done: int) -> None:
    path, repo = folder / "store", folder / "repo"
    repo.mkdir()
    holdfast.open(path).close()
    acknowledged: dict[str, int] = {}
    while task.done < until_done and not task.over:
        before = tree(repo)
        opening = chance.uniform(0, OPENING_S) if chance.random() < KILLED_WHILE_OPENING else None
        job = {"path": str(path), "repo": str(repo), "seed": chance.getrandbits(40)}
        said = _words(troupe, opening, chance.uniform(0, LIFE_S), job)
        try:
            task.tried(after(path, repo, said, before, acknowledged))
        except (Broken, HoldfastError) as error:
            task.tried("broken")
            task.broke(f"{said[-3:]}: {error!r}")
            return
        if task.done % VERIFY_EVERY == 0 or task.done == until_done:
            with holdfast.open(path, readonly=True) as store:
                found = {
                    one.id for name in ("coder", "copied") for one in store.agent(name, readonly=True).log(all=True)
                }
                report = store.verify()
            if not report.ok or acknowledged.keys() - found:
                task.broke(f"{report}; {len(acknowledged.keys() - found)} acknowledged checkpoints are missing")


def _words(troupe: Troupe, opening: float | None, life_s: float, job: dict[str, object]) -> list[list[str]]:
    life = troupe.begin(**job)
    if opening is None:
        life.until("opened", "error")
        time.sleep(life_s)
    else:
        time.sleep(opening)
    life.kill()
    life.end()
    return [[word, *rest.split()] for word, rest in life.said]


# -- at every call ------------------------------------------------------------------------------------------


def _prepared(folder: Path, _ledger: Ledger) -> None:
    """Three checkpoints."""
    repo = folder / "repo"
    repo.mkdir()
    with holdfast.open(folder / "store") as store:
        agent = store.agent("coder", workspace=repo, when=None)
        for number in (1, 2, 4):
            edit(repo, number)
            agent.state = state_of(number)
            agent.checkpoint(f"of {number}")


def _act(what: str) -> Callable[[Path, Ledger], None]:
    def act(folder: Path, _ledger: Ledger) -> None:
        repo = folder / "repo"
        with holdfast.open(folder / "store") as store:
            agent = store.agent("coder", workspace=repo, when=None)
            if what == "save":
                edit(repo, 7)
                agent.state = state_of(7)
                agent.checkpoint("of 7")
            elif what == "go back":
                agent.rollback("of 1")
            else:
                agent.undo()

    return act


_ALLOWED = {"save": {4, 7}, "go back": {4, 1}, "undo": {4, 2}}


def _check(what: str) -> Callable[[Path, Ledger], None]:
    def check(folder: Path, _ledger: Ledger) -> None:
        repo = folder / "repo"
        with holdfast.open(folder / "store") as store:
            agent = store.agent("coder", workspace=repo, when=None)
            number = number_of(agent, agent.head)
            if number not in _ALLOWED[what] or dict(agent.state) != state_of(number):
                raise Broken(f"{what}: it is of {number}")
            if what != "save" and tree(repo) != files_of(number):
                raise Broken(f"{what}: the directory is a mixture; the state is of {number}")
            report = store.verify()
            if not report.ok:
                raise Broken(str(report))
            edit(repo, 9)
            agent.state = state_of(9)
            number_of(agent, agent.checkpoint("of 9"))

    return check


def _edited(folder: Path, ledger: Ledger) -> None:
    """And files that are in none."""
    _prepared(folder, ledger)
    edit(folder / "repo", 5)


def _check_kept(folder: Path, _ledger: Ledger) -> None:
    """What was in no checkpoint is where it was, or all of it in one."""
    repo = folder / "repo"
    with holdfast.open(folder / "store") as store:
        agent = store.agent("coder", workspace=repo, when=None)
        number, there = agent.state["n"], tree(repo)
        if number not in {4, 1} or dict(agent.state) != state_of(number):
            raise Broken(f"it is of {number}")
        if there != files_of(1 if number == 1 else 5):
            raise Broken(f"the directory is a mixture, or another one; the state is of {number}")
        kept = [one for one in agent.log(all=True) if one.label.startswith("before rollback")]
        if number == 1 and not kept:
            raise Broken("nothing has what was in no checkpoint")
        for one in kept:
            out = agent.export_workspace(one, folder / one.id)
            if tree(out) != files_of(5) or dict(one.state) != state_of(4):
                raise Broken(f"{one.label} is a mixture")
        report = store.verify()
        if not report.ok:
            raise Broken(str(report))


ACTS = {what: Life(f"layers {what}", _act(what), _prepared, _check(what)) for what in _ALLOWED}
ACTS["go back over edits"] = Life("layers go back over edits", _act("go back"), _edited, _check_kept)


def _calls(task: Task, count: int) -> None:
    """Before each call that Python makes to the disk, and at each system call that writes."""
    chance = random.Random(task.seed)
    with stage() as place:
        traceable: dict[tuple[str, str], int] = {}
        with suppress(Skip):
            for what, life in [*ACTS.items()][: len(ACTS) if count > 20 else 1]:
                traceable |= {(what, name): times for name, times in _syscalls(place, life).items()}
        points: list[tuple[str, str, int]] = [(what, "", at) for what in ACTS for at in range(1, 70)]
        points += [(what, name, at) for (what, name), times in traceable.items() for at in range(1, times + 1)]
        if not traceable:
            task.details["no strace: not killed at system calls"] = 1
        for what, name, at in chance.sample(points, min(count, len(points))):
            if task.over:
                return
            life = ACTS[what]
            if name:
                inject = f"inject={name}:signal=KILL:when={at}"
                traced(place, life, "-o", "/dev/null", "-e", f"trace={name}", "-e", inject)
            else:
                _killed(place, lambda ledger, life=life: life.live(place.folder, ledger), place.begin(life), at)
            try:
                life.check(place.folder, Ledger())
            except (Broken, HoldfastError) as error:
                task.broke(f"{what}, {name or 'call'} {at}: {error!r}")
            task.tried(f"{what}: {'system calls' if name else 'calls'}")


# -- a frozen process ---------------------------------------------------------------------------------------

PROGRAM = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[3])
import holdfast
from tests.faults.layers import edit, files_of, state_of, tree

holdfast.freezable()
store = holdfast.open(sys.argv[1])
agent = store.agent("coder", workspace=sys.argv[2], when=None)
number = agent.state.get("n", 0)
while True:
    if number and (dict(agent.state) != state_of(number) or tree(Path(sys.argv[2])) != files_of(number)):
        Path("mixture").write_text(f"memory is of {number}, state of {agent.state.get('n')}, or files are not")
    number += 1
    with agent.atomic():
        edit(Path(sys.argv[2]), number)
        agent.state = state_of(number)
    agent.checkpoint(f"of {number}")
    Path("count.new").write_text(f"{number} {os.getpid()}")
    os.rename("count.new", "count")
    time.sleep(0.02)
"""


def _images(task: Task, count: int) -> None:
    """Whoever freezes or thaws is killed: the process goes on, or can be brought back, with layers of one moment."""
    fetched = ROOT / ".venv" / "criu" / "usr" / "sbin" / "criu"
    if fetched.exists():
        os.environ.setdefault("HOLDFAST_CRIU", str(fetched))
    if not criu.probe().usable:
        task.details["no CRIU: no process was frozen"] = 1
        return
    chance = random.Random(77 + task.seed)
    with memory() as folder, quiet():
        path, repo = folder / "store", folder / "repo"
        repo.mkdir()
        environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
        with Program(folder / "program", PROGRAM, path, repo, ROOT, env=environment) as program:
            program.passes(1)
            first = _cli(path, environment, None, "freeze", "coder")
            if first.returncode:
                raise Broken(f"it cannot be frozen: {first.stderr}")
            for number in range(count):
                if task.over:
                    return
                try:
                    _struck(path, repo, program, environment, chance, thawing=number % 2 == 1)
                except (Broken, HoldfastError, AssertionError) as error:
                    task.broke(f"image {number}: {error!r}")
                    return
                task.tried("a thaw" if number % 2 else "a freeze")


def _struck(
    path: Path, repo: Path, program: Program, environment: dict[str, str], chance: random.Random, *, thawing: bool
) -> None:
    if not thawing:
        _cli(path, environment, chance.uniform(0.1, FREEZE_S), "freeze", "coder")
        program.passes(program.count()[0])  # it goes on
    else:
        program.kill()
        for entry in Path("/proc").glob("[0-9]*/cwd"):  # those that were brought back
            with suppress(OSError):
                if entry.readlink() == program.folder:
                    os.kill(int(entry.parts[2]), signal.SIGKILL)
        with holdfast.open(path, readonly=True) as store:
            before = store.agent("coder", readonly=True).head.id, tree(repo)
        _cli(path, environment, chance.uniform(0.1, FREEZE_S), "thaw", "coder")
        if chance.random() < 0.5:
            _opened(path, repo, *before)
        done = _cli(path, environment, None, "thaw", "coder")
        if done.returncode and "still runs" not in done.stderr:
            raise Broken(f"it cannot be brought back: {done.stderr}")
        (program.folder / "count").unlink(missing_ok=True)
        until(program.count)
    if (program.folder / "mixture").exists():
        raise Broken((program.folder / "mixture").read_text())
    with holdfast.open(path, readonly=True) as store:
        report = store.verify()
        if not report.ok:
            raise Broken(str(report))
        agent, images = (store.agent(name, readonly=True) for name in ("coder", "images/coder"))
        for one in (*agent.log(limit=3), *images.log(limit=3)):
            if not one.has_files:
                raise Broken(f"{one.label} has no files")
            number_of(agent if one.label.startswith("of") else images, one)


def _opened(path: Path, repo: Path, head: str, before: Tree) -> None:
    """Whoever opens what a killed thaw has left finds all as it was, or state and files of one moment.

    Unless the process is back. ``before``: what the killed program had left of its edits.
    """
    with suppress(AgentBusy), holdfast.open(path) as store:
        agent = store.agent("coder", workspace=repo, when=None)
        moved = agent.head.id != head and agent.head.label.startswith(OURS)
        number = number_of(agent, agent.head) if moved else agent.state["n"]
        wanted = files_of(number) if moved else before
        if dict(agent.state) != state_of(number) or tree(repo) != wanted:
            raise Broken(f"after a killed thaw: state of {agent.state['n']}, moved: {moved}, and files are not")


def _cli(
    path: Path, environment: dict[str, str], killed_s: float | None, *words: str
) -> subprocess.CompletedProcess[str]:
    """The command line, killed after a while if somebody says so."""
    started = subprocess.Popen(
        [sys.executable, "-m", "holdfast", "--store", str(path), *words],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd="/",
    )  # fmt: skip
    if killed_s is not None:
        with suppress(subprocess.TimeoutExpired):
            started.wait(killed_s)
        started.kill()
        started.stdout.close()  # whoever it started may have it, too
        started.stderr.close()
        started.wait()
        return subprocess.CompletedProcess(words, started.returncode, "", "")
    out, err = started.communicate(timeout=120)
    return subprocess.CompletedProcess(words, started.returncode, out, err)


@campaign("layers", "kill -9 while state, files and a process are saved or put back", "kills", ci=20, soak=1_000)
def layers(task: Task) -> None:
    """Real work killed at random moments, at calls to the disk and at system calls, and whoever freezes or thaws."""
    few = task.count
    _images(task, max(2, few // 20))
    _calls(task, few // 3)
    _random(task, few - task.done)


if __name__ == "__main__":
    serve(lambda job: live(**job))
