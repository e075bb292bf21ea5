"""An exception that a signal handler raises while a value is encoded or decoded comes out as it is, whatever it is."""

from __future__ import annotations

import collections
import datetime as dt
import decimal
import fractions
import gc
import pathlib
import random
import signal
import sys
import time
import uuid
import zoneinfo
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from holdfast.codec.values import decode, decode_items, encode
from holdfast.errors import CorruptValue, HoldfastError, SchemaMismatch, Unencodable
from tests.codec import kinds
from tests.codec.kinds import same
from tests.conftest import SOAK
from tests.strikes import alone

TYPES = kinds.registry()
ROUNDS = 20_000 if SOAK else 150


def rich() -> Any:
    """Something of everything, so that a handler can strike in every part of the codec."""
    note = kinds.Note("a", ["b"])
    note.parent = kinds.Note("back", parent=note)
    return {
        "numbers": [1, 2**70, -(2**70), 1.5, 1j, decimal.Decimal("1.5"), fractions.Fraction(2**70, 3), range(2**70)],
        "texts": ["text", "\ud800", b"bytes", bytearray(b"more"), uuid.UUID(int=5), pathlib.PurePosixPath("a/b")],
        "times": [
            dt.datetime(2024, 1, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Lisbon")), dt.time(1, tzinfo=dt.UTC),
            dt.date(2024, 1, 1), dt.timedelta(1), dt.timezone(dt.timedelta(hours=1), "x"),
        ],
        "containers": [(1, [2]), {3, "x"}, frozenset({(1, 2)}), {1: 2, (3,): 4}, collections.deque([1, [2]], 5)],
        "mappings": [collections.OrderedDict({1: 2}), collections.Counter("ab"), collections.defaultdict(list)],
        "instances": [
            note, kinds.Point(1, {kinds.Point(2)}), kinds.Colour.BLUE, kinds.Action.SHOUT, kinds.Pair(1, [2]),
            kinds.Wheel(1, kinds.Bolt(2)), kinds.Celsius((1, 2)), kinds.Model(name="a"), kinds.Extra(name="b", c=[1]),
            {kinds.Point(1, "k"): kinds.Note("v")},
        ],
        "arrays": [np.arange(6).reshape(2, 3), np.zeros(1, [("a", "i1"), ("b", "f8")]), np.str_("x"), np.float32(1)],
    }  # fmt: skip


VALUE = rich()
DATA = encode(VALUE, TYPES)
MODELS = [encode(kinds.Model(name=str(i), anything={"a": [i]}), TYPES) for i in range(20)]
DAMAGED = DATA.replace(b"Europe/Lisbon", b"Europe/Atlant")


def encoded() -> None:
    assert encode(VALUE, TYPES) == DATA


def decoded() -> None:
    assert same(decode(DATA, TYPES), VALUE)


def decoded_inert() -> None:
    inert = decode(DATA, inert=True)
    assert encode(inert) == DATA


def many_decoded() -> None:
    assert [encode(item, TYPES) for item in decode_items(MODELS, TYPES)] == MODELS


def refused() -> None:
    """Refusals and damage are errors of ours: they, too, must not be put in place of another's."""
    with pytest.raises(Unencodable):
        encode([{"a": (kinds.Note("a", parent=kinds.Plain(x=print)),)}], TYPES)
    with pytest.raises(Unencodable):
        encode({"\ud800": {kinds.Node("a"): 1}}, TYPES)
    with pytest.raises(CorruptValue):
        decode(DATA[:-3], TYPES)
    with pytest.raises(CorruptValue):
        decode(b"\x92\xa1\xff\xc0", TYPES)


WORK = [encoded, decoded, decoded_inert, many_decoded, refused]


class Struck(BaseException):
    """No ``except Exception`` may see it."""


KINDS: list[type[BaseException]] = [
    Struck, TimeoutError, KeyboardInterrupt, ValueError, TypeError, KeyError, IndexError, LookupError, RuntimeError,
    UnicodeError, OverflowError, AttributeError, ImportError, MemoryError,
]  # fmt: skip


def outcome(work: Callable[[], None]) -> BaseException | None:
    """What came out. Inside the program's own save and load functions nobody can tell whose exception it is."""
    try:
        work()
    except (SchemaMismatch, Unencodable) as error:
        return error.__cause__ if "function of tests.codec.kinds.Celsius failed" in str(error) else error
    except BaseException as error:
        return error
    return None


# One that strikes in a finalizer is shown by the interpreter and goes no further.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_signal_handlers_exception_comes_out_as_it_is(kind):
    chance = random.Random(kind.__name__)
    raised: list[BaseException] = []
    armed = False

    def strike(_number: int, _frame: Any) -> None:
        nonlocal armed
        if armed:
            armed = False
            raised.append(kind("struck"))
            raise raised[-1]

    def run(work: Callable[[], None]) -> None:
        nonlocal armed
        armed = True
        work()
        armed = False

    lasted: dict[Any, float] = {}
    for work in WORK * 3:
        start = time.perf_counter()
        work()
        lasted[work] = min(time.perf_counter() - start, lasted.get(work, 1))
    before = signal.signal(signal.SIGALRM, strike)
    try:
        for _ in range(ROUNDS):
            work = chance.choice(WORK)
            signal.setitimer(signal.ITIMER_REAL, max(1e-6, chance.random() * lasted[work]))
            count = len(raised)
            found = outcome(lambda work=work: run(work))
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert found is None or (len(raised) > count and found is raised[-1]), (work, found, found.__context__)
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert raised


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
def test_an_exception_at_any_line_of_the_codec_comes_out_as_it_is(work, kind):
    """As above at every line, one after another: a trace function is called where a signal handler would be."""
    lines = 0
    target = 0
    raised: BaseException | None = None

    def trace(frame: Any, event: str, _argument: Any) -> Any:
        nonlocal lines, raised
        if not str(frame.f_globals.get("__name__")).startswith("holdfast.codec"):
            return None
        if event == "line":
            lines += 1
            if lines == target:
                raised = kind("struck")
                raise raised
        return trace

    def run() -> BaseException | None:
        nonlocal lines, raised
        lines, raised = 0, None
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            return outcome(work)
        finally:
            sys.settrace(before)
            gc.enable()  # tracing raises where no signal can: between the end of a pause and the collector's return

    assert alone(run) is None
    total = lines
    step = max(1, total // (5_000 if SOAK else 100))
    for target in range(1 + KINDS.index(kind) * step // len(KINDS), total, step):
        found = alone(run)
        assert found is raised, (work.__name__, target, found, found.__context__ if found else None)


def test_the_errors_of_the_data_itself_are_still_ours():
    for data in (DAMAGED, DATA[:-1], b"\xc1", b"\xa1\xff"):
        with pytest.raises(HoldfastError):
            decode(data, TYPES)
