"""The numbers of the format: extension codes and limits, and what other rooms may add to them.

Owns the numbers of docs/format.md section 1 and the table of container subclasses that other modules hand in.
Must not know how a value is written or read, nor what the registry holds.
Holds always: a code, once released, keeps its meaning; a limit is checked on the way in and on the way out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

DICT = 1
INT = 2
STR = 3
TUPLE = 4
SET = 5
FROZENSET = 6
BYTEARRAY = 7
COMPLEX = 8
DECIMAL = 9
FRACTION = 10
DATETIME = 11
DATE = 12
TIME = 13
TIMEDELTA = 14
TZINFO = 15
UUID = 16
PATH = 17
RANGE = 18
INSTANCE = 20
ENUM = 21
REFERENCE = 22
ARRAY = 24
SCALAR = 25
DEQUE = 26
ORDERED_DICT = 27
COUNTER = 28
DEFAULTDICT = 29
BIG = 40
BULK = 41

SCOPES = frozenset({TUPLE, INSTANCE, DEQUE, ORDERED_DICT, COUNTER, DEFAULTDICT})
"""Extensions that open a scope, inside which instances are numbered, unless one is open already."""

ALONE = frozenset({SET, FROZENSET, ENUM})
"""Extensions whose content has nothing to do with the scope around them."""

MAX_DEPTH = 100
"""Containers inside one another. Far above real states, far below what would exhaust the C stack."""

MAX_VALUE_BYTES = 2**31 - 1
"""One encoded value. Lengths stay within 32 bits signed everywhere; larger data belongs into several values."""

MAX_INT_BYTES = 2**20
"""One integer. Arithmetic on more takes minutes, so a hostile store could stop a program with a single number."""

MAX_NAME_CHARS = 1000
"""Longest name of a type. Names come back out of stored data, so they are bounded like everything else."""

MAX_EMPTY_ITEMS = 2**20
"""Items of a NumPy dtype without bytes cost nothing to declare, so their number needs a limit of its own."""

SCALARS: frozenset[type] = frozenset({type(None), bool, int, float, str, bytes})
"""Types that MessagePack carries as they are (an int or str at the edge of its range excepted)."""

SURE_KEYS = SCALARS - {float}
"""Scalars that can be dict keys and set items whatever their value; a float may be NaN."""

UNWRAP: dict[type, Callable[[Any], Any]] = {}
"""Container subclasses of other modules -> a function that gives the plain container, or a ready extension."""


class Bytes(bytearray):
    """A bytearray that a document owns.

    The packing library writes an exact bytearray as bytes without asking; a subclass reaches the codec.
    """

    __slots__ = ()
