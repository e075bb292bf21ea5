"""What is unusual in a dump: resources near their end, crowds, recursion, code that changed under the program.

Owns the thresholds. Must not know pages. Holds always: a sign is said only when the dump has the figures for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from holdfast.crash import kinds
from holdfast.crash.dump import Dump
from holdfast.crash.records import Frame, as_float, as_int, as_text
from holdfast.crash.render import size

_NEAR = 0.8  # of a limit: little enough left to look there first
_MACHINE_SHORT = 0.05  # of the machine's memory left
_MANY_THREADS = 200
_MANY_TASKS = 1_000
_REPEATED = 50  # times the same function on one stack
_HALF_CLOSED = 20  # sockets that the other side closed and the program did not
_GROWN = 100_000  # items in one container
_BUSY = 4.0  # runnable processes for each processor


def signs(dump: Dump) -> list[str]:
    """In words, the most telling first."""
    process = dump.part(kinds.PROCESS)
    return [*_memory(process), *_descriptors(dump, process), *_code(dump), *_crowds(dump, process), *_heap(dump)]


def _memory(process: dict[str, Any]) -> Iterator[str]:
    cgroup, machine, memory, limits = (
        _dict(process.get(key)) for key in ("cgroup", "machine_memory", "memory", "limits")
    )
    used, most = number(cgroup.get("memory.current")), number(cgroup.get("memory.max"))
    total, free = as_int(machine.get("MemTotal")), as_int(machine.get("MemAvailable"))
    if 0 < most < (total or 2**62) and used > _NEAR * most:
        yield f"memory: {used / most:.0%} of the control group's limit ({size(most)}) is used"
    for line in as_text(cgroup.get("memory.events")).splitlines()[:20]:
        word, _, times = line.partition(" ")
        if word == "oom_kill" and number(times):
            yield f"memory: the kernel has killed {number(times)} processes of this control group for it"
    if total and 0 < free < _MACHINE_SHORT * total:
        yield f"memory: the machine has only {size(free)} of {size(total)} left"
    swap = as_int(memory.get("VmSwap"))
    if swap > 64 << 20:
        yield f"memory: {size(swap)} of the process are swapped out"
    space = as_int(next(iter(_list(limits.get("AS"))), 0))
    if space > 0 and as_int(memory.get("VmSize")) > _NEAR * space:
        yield f"memory: {as_int(memory.get('VmSize')) / space:.0%} of the address space that is allowed is used"


def _descriptors(dump: Dump, process: dict[str, Any]) -> Iterator[str]:
    opened = dump.part(kinds.DESCRIPTORS)
    count = as_int(opened.get("total"))
    most = as_int(next(iter(_list(_dict(process.get("limits")).get("NOFILE"))), 0))
    if most > 0 and count > _NEAR * most:
        yield f"descriptors: {count:,} of {most:,} are open"
    states = Counter(as_text(one.get("state")) for one in _list(opened.get("descriptors")) if isinstance(one, dict))
    if states["close-wait"] >= _HALF_CLOSED:
        yield f"sockets: {states['close-wait']:,} were closed by the other side and not by the program"


def _code(dump: Dump) -> Iterator[str]:
    frames = [frame for thread in dump.threads for frame in thread.frames]
    used = {frame.file for frame in frames}
    for source in dump.sources.values():
        if source.changed and source.file in used:
            yield f"source: {source.file} was changed after the program started; its lines may not fit"
    for thread in dump.threads[:1]:
        yield from _recursion(thread.frames, thread.left_out)
    if any(failure.own_str for failure in dump.exceptions[:1]):
        yield "exception: its class has its own __str__, which was not called; the message is made of its arguments"


def _recursion(frames: Sequence[Frame], left_out: int) -> Iterator[str]:
    repeated = Counter((frame.file, frame.function) for frame in frames).most_common(1)
    if repeated and repeated[0][1] >= _REPEATED:
        (_file, function), times = repeated[0]
        yield f"recursion: {function} is {times:,} times on the first stack, of {len(frames) + left_out:,} frames"


def _crowds(dump: Dump, process: dict[str, Any]) -> Iterator[str]:
    threads = max(as_int(process.get("threads")), len(dump.threads))
    if threads > _MANY_THREADS:
        yield f"threads: {threads:,}"
    if len(dump.tasks) > _MANY_TASKS:
        yield f"tasks: {len(dump.tasks):,}"
    cancelling = sum(task.cancelling for task in dump.tasks)
    if cancelling:
        yield f"tasks: {cancelling:,} were asked to cancel and have not ended"
    cpus, load = as_int(process.get("cpus")), as_float(next(iter(_list(process.get("load"))), 0.0))
    if cpus > 0 and _BUSY * cpus < load < 1e6:
        yield f"load: {load:.0f} on {cpus} processors"


def _heap(dump: Dump) -> Iterator[str]:
    for row in _list(dump.part(kinds.HEAP).get("largest"))[:3]:
        if isinstance(row, list) and len(row) == 3 and as_int(row[1]) >= _GROWN:
            yield f"heap: a {as_text(row[0])} with {as_int(row[1]):,} items, {size(as_int(row[2]))}"


def number(text: Any) -> int:
    """A number of the kernel's, which is text; 0 for ``max`` and nonsense."""
    return int(text) if isinstance(text, str) and text.isascii() and text.isdigit() and len(text) < 20 else 0


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
