"""Work in threads of its own: an interrupt at any place leaves it done or not begun, and keeps nothing of it alive."""

from __future__ import annotations

import gc
import sys
import weakref

from holdfast.store.processes import apart
from tests.strikes import Strike


class Thing:
    """Something that work refers to, as a lease is."""


def interrupted(place, done):
    """Whether the interrupt at the `place`th line struck, and the thing that the work referred to."""
    lines = 0

    def trace(_frame, event, _arg):
        nonlocal lines
        lines += event == "line"
        if lines == place:
            lines += 1
            raise Strike
        return trace

    thing = Thing()
    reference = weakref.ref(thing)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        apart(lambda: done.append(thing is not None))
    except Strike:
        return True, reference
    finally:
        sys.settrace(before)
    return False, reference


def test_an_interrupt_at_any_line_leaves_the_work_done_or_not_and_nothing_of_it_alive():
    place, struck = 0, True
    while struck:
        place += 1
        done = []
        struck, thing = interrupted(place, done)
        gc.collect()
        assert thing() is None, place
        assert done in ([], [True])
    assert done == [True]
    assert place > 10
