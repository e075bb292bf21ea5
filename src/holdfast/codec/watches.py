"""Instances that user code may have read out of the state, and may have changed since they were told.

Owns what is known of each. One that somebody may hold is *awake*: each capture proves that it is what it was, or
compares it. One that only the state holds is *asleep* and costs nothing; the containers that hold it see reads, which
wake it. One is *loose* while there is no proof for it: it has changed, or it cannot be followed.
What always holds: whatever interrupts, a value that somebody may hold is awake or loose. So what is known of a value is
written down in its new place before it is struck out in the old one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from sys import getrefcount
from typing import Any

from holdfast.codec.proofs import RUN_ITEMS, Run, can_change, run_of
from holdfast.codec.tracked import GONE, Section
from holdfast.codec.types import Registry

# Iterators of one container that are known without looking whether they are still in use.
_ITERATORS_MAX = 8
# Containers whose iterators are known without looking.
_ITERATED_MAX = 256
# Watched values that may be in containers which left the state, without looking.
_KNOWN_MIN = 256
# How long, in captures, a value that was held is not asked for again: twice as long each time, up to this power of two.
_PATIENCE_MAX = 12


class Watch:
    """A watched value: the container that holds it, and its run."""

    __slots__ = ("at", "holder", "run", "value")

    def __init__(self, value: Any, holder: Any, at: Any = GONE, run: Run | None = None) -> None:
        self.value, self.holder, self.run = value, holder, run
        self.at = at  # the key or index where it was last; never trusted


class Watches:
    """The instances of one document that were read."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.known: dict[int, Watch] = {}
        self._loose: dict[int, Watch] = {}
        self._awake: dict[int, Run] = {}
        self._sleeping: OrderedDict[int, Run] = OrderedDict()
        self._dozing: dict[int, dict[int, Run]] = {}  # by container, what is asleep in it
        self._iterators: dict[int, list[Any]] = {}  # by container, those that it gave out and that may be in use
        self._compared: list[tuple[Run | None, list[Watch]]] = []
        self._captures = 0
        self._last: Run | None = None
        self._prune_at = _KNOWN_MIN

    # -- what user code may reach -------------------------------------------------------------------------------

    def out(self, value: Any, holder: Any, at: Any) -> None:
        """Somebody is about to read ``value``, which is in ``holder`` and what it was told to be."""
        watch = self.known.get(id(value))
        if watch is None:
            if can_change(value):
                self._add([value], holder, [at])
        elif watch.holder is not holder:  # C code put it there
            watch.holder = holder
            self._loosen(watch)
        elif watch.run is not None and watch.run.asleep:
            self._wake(watch.run)

    def out_all(self, values: list[Any], holder: Any, places: list[Any]) -> None:
        """As ``out``, of many values."""
        new: list[Any] = []
        where: list[Any] = []
        for value, at in zip(values, places, strict=True):
            if id(value) in self.known:
                self.out(value, holder, at)
            elif can_change(value):
                new.append(value)
                where.append(at)
        for start in range(0, len(new), RUN_ITEMS):
            self._add(new[start : start + RUN_ITEMS], holder, where[start : start + RUN_ITEMS])

    def _add(self, values: list[Any], holder: Any, places: list[Any]) -> None:
        """Watch values that nobody has seen yet: the proof is made before anybody has them."""
        run = run_of(values, self._registry)
        if run is None and len(values) > 1:  # one of them cannot be followed; the others can
            for value, at in zip(values, places, strict=True):
                self._add([value], holder, [at])
            return
        if run is not None:
            run = self._join(run)
        for value, at in zip(values, places, strict=True):
            watch = Watch(value, holder, at, run)
            if run is None:
                self._loose[id(value)] = watch
            self.known[id(value)] = watch

    def put(self, value: Any, holder: Any, at: Any) -> None:
        """A value that nobody holds is about to be in ``holder``, which sees reads from now on."""
        if can_change(value) and not isinstance(holder, Section):
            holder._see_reads()
            if holder._open or self._iterated(holder):  # somebody may read it without being seen
                self.known[id(value)] = self._loose[id(value)] = Watch(value, holder, at)

    def at(self, value: Any, at: Any) -> None:
        watch = self.known.get(id(value))
        if watch is not None:
            watch.at = at

    def given(self, holder: Any, iterator: Any) -> Any:
        """An iterator over a container: as long as it is in use, nothing in there falls asleep."""
        if not holder._doc.intake.readonly:
            known = self._iterators.get(id(holder))
            if known is None:
                if len(self._iterators) >= _ITERATED_MAX:
                    self._forget_iterators()
                known = self._iterators[id(holder)] = []
            elif len(known) > _ITERATORS_MAX:
                known[:] = [one for one in known if getrefcount(one) > _UNHELD]
            known.append(iterator)
        return iterator

    def _forget_iterators(self) -> None:
        """Let go of iterators that nobody uses."""
        for key, known in list(self._iterators.items()):
            known[:] = [one for one in known if getrefcount(one) > _UNHELD]
            if not known:
                del self._iterators[key]

    def _iterated(self, holder: Any) -> bool:
        """Whether somebody may still use an iterator over a container."""
        known = self._iterators.get(id(holder))
        if known:
            known[:] = [one for one in known if getrefcount(one) > _UNHELD]
            if not known:
                del self._iterators[id(holder)]
        return bool(known)

    def left(self, value: Any) -> None:
        """A value left the state."""
        watch = self.known.pop(id(value), None)
        if watch is None:
            return
        self._loose.pop(id(value), None)
        run = watch.run
        if run is not None:
            self._spend(run)

    def wake_all(self, holder: Any) -> None:
        """Somebody reads all of a container."""
        for run in list(self._dozing.get(id(holder), {}).values()):
            self._wake(run)

    def moved(self, value: Any, holder: Any, at: Any) -> None:
        """A value that somebody may hold is in another place of the state now."""
        watch = self.known.get(id(value))
        if watch is not None:
            watch.holder, watch.at = holder, at

    # -- runs -----------------------------------------------------------------------------------------------

    def _wake(self, run: Run) -> None:
        if self._captures - run.due <= 2:
            run.misses += 1  # it did not sleep for long: proving it is cheaper than putting it to bed each time
        self._rouse(run)
        run.asleep = False
        self._sleeping.pop(id(run), None)
        for holder in run.homes:
            runs = self._dozing.get(id(holder))
            if runs is not None:
                runs.pop(id(run), None)

    def _rouse(self, run: Run) -> None:
        self._awake[id(run)] = run
        run.due = self._captures + 1 + (1 << min(run.misses, _PATIENCE_MAX)) // 2

    def _loosen(self, watch: Watch) -> None:
        run = watch.run
        self._loose[id(watch.value)] = watch
        if run is not None:
            watch.run = None
            self._spend(run)

    def _spend(self, run: Run) -> None:
        """One item less counts."""
        run.spent += 1
        if run.asleep:
            self._wake(run)
        if 2 * run.spent > len(run.items):
            self._dissolve(run)

    def _dissolve(self, run: Run) -> None:
        """There is no proof any more for the items of a run."""
        for value in run.items:
            watch = self.known.get(id(value))
            if watch is not None and watch.run is run:
                self._loose[id(value)] = watch
                watch.run = None
        self._awake.pop(id(run), None)

    def _join(self, run: Run) -> Run:
        """Few long runs are proven faster than many short ones."""
        last = self._last
        if (
            last is not None
            and not last.asleep
            and id(last) in self._awake
            and len(last.items) + len(run.items) <= RUN_ITEMS
        ):
            run = last.joined(run)
            self._rouse(run)
            for value in last.items:
                watch = self.known.get(id(value))
                if watch is not None and watch.run is last:
                    watch.run = run
            del self._awake[id(last)]
        else:
            self._rouse(run)
        self._last = run
        return run

    # -- captures -----------------------------------------------------------------------------------------------

    def before(self) -> None:
        """A capture begins: mark what may have changed."""
        self._captures += 1
        self._compared = []
        if self._sleeping:
            self._scrub()
        for run in list(self._awake.values()):
            if not run.unchanged():
                self._dissolve(run)
        if not self._loose:
            return
        watches = list(self._loose.values())
        for watch in watches:
            watch.holder._kid(watch.value, watch.at)
        for start in range(0, len(watches), RUN_ITEMS):
            part = watches[start : start + RUN_ITEMS]
            proof = run_of([watch.value for watch in part], self._registry)
            if proof is None and len(part) > 1:
                self._compared += [(run_of([watch.value], self._registry), [watch]) for watch in part]
            else:
                self._compared.append((proof, part))

    def _scrub(self) -> None:
        """Look at one run that is asleep, in turns: C code may have given it away, past its container's methods."""
        key = next(iter(self._sleeping))
        run = self._sleeping[key]
        if run.unchanged():
            self._sleeping.move_to_end(key)
        else:
            self._wake(run)

    def after(self) -> None:
        """Everything loose was compared: what is still as it was before that is proven from here on."""
        if not self._awake and not self._compared:
            return
        self._prove_again()
        for run in [run for run in self._awake.values() if run.due <= self._captures]:
            if run.spent:
                self._dissolve(run)
            elif not self._to_sleep(run):
                run.misses += 1
                self._rouse(run)

    def _prove_again(self) -> None:
        for run, watches in self._compared:
            if run is None or not run.unchanged():
                continue
            joined = self._join(run)
            for watch in watches:
                if self.known.get(id(watch.value)) is watch:
                    watch.run = joined
                    self._loose.pop(id(watch.value), None)
                else:
                    joined.spent += 1  # it left meanwhile
        self._compared = []

    def _to_sleep(self, run: Run) -> bool:
        """Let a run sleep if nobody can hold its items, nor read them without being seen."""
        homes = self._homes(run)
        if homes is None or not run.unheld():
            return False
        run.due = self._captures  # since when it sleeps
        run.homes = homes
        for holder in homes:
            self._dozing.setdefault(id(holder), {})[id(run)] = run
        run.asleep = True
        self._sleeping[id(run)] = run
        del self._awake[id(run)]
        return True

    def _homes(self, run: Run) -> list[Any] | None:
        """The containers of a run's items; None if somebody may read them without being seen."""
        homes: dict[int, Any] = {}
        for value in run.items:
            watch = self.known.get(id(value))
            if watch is None or watch.run is not run:
                return None
            homes[id(watch.holder)] = watch.holder
        for holder in homes.values():
            if isinstance(holder, Section) or not holder._lazy or holder._open or self._iterated(holder):
                return None
        return list(homes.values())

    def prune(self, attached: Callable[[Any], bool]) -> None:
        """Forget values in containers that left the state. Should one come back, it is in doubt as a whole."""
        if len(self.known) < self._prune_at:
            return
        for watch in list(self.known.values()):
            if not attached(watch.holder):
                watch.holder._kid(watch.value, watch.at)
                self.left(watch.value)
        for key in [key for key, runs in self._dozing.items() if not runs]:
            del self._dozing[key]
        self._prune_at = max(_KNOWN_MIN, 2 * len(self.known))


def _measure() -> int:
    known = [iter([1])]
    return [getrefcount(one) for one in known][0]  # noqa: RUF015 - as it is counted above


_UNHELD = _measure()
