"""A module whose every hook reports that it ran: nothing of it may run while a dump is taken."""

from __future__ import annotations

import collections
import enum

ran: list[str] = []


def _tell(name):
    def hook(*args, **kwargs):
        ran.append(name)
        raise RuntimeError(f"{name} ran")

    return hook


HOOKS = (
    *(
        "__repr__",
        "__str__",
        "__format__",
        "__bytes__",
        "__eq__",
        "__ne__",
        "__lt__",
        "__hash__",
        "__bool__",
        "__len__",
    ),
    *(
        "__iter__",
        "__next__",
        "__contains__",
        "__getitem__",
        "__setitem__",
        "__delitem__",
        "__missing__",
        "__reversed__",
    ),
    *("__getattribute__", "__getattr__", "__setattr__", "__delattr__", "__dir__", "__call__", "__index__", "__int__"),
    *(
        "__float__",
        "__complex__",
        "__sizeof__",
        "__reduce__",
        "__reduce_ex__",
        "__getstate__",
        "__copy__",
        "__deepcopy__",
    ),
    *(
        "__instancecheck__",
        "__subclasscheck__",
        "__enter__",
        "__exit__",
        "__await__",
        "__aiter__",
        "__anext__",
        "__del__",
    ),
    *("__add__", "__radd__", "__pos__", "__neg__", "__invert__", "__length_hint__", "__fspath__", "__buffer__"),
)


class Meta(type):
    for _name in ("__repr__", "__eq__", "__hash__", "__getattribute__", "__instancecheck__", "__subclasscheck__"):
        locals()[_name] = _tell(f"Meta.{_name}")
    __name__ = property(_tell("Meta.__name__"))
    __module__ = property(_tell("Meta.__module__"))
    __mro__ = property(_tell("Meta.__mro__"))
    __dict__ = property(_tell("Meta.__dict__"))

    def mro(cls):
        return type.mro(cls)


def _body(*, without=()):
    names = [name for name in HOOKS if name not in without]
    space = {name: _tell(name) for name in names}
    space["__class__"] = property(_tell("__class__"))
    space["value"] = property(_tell("property"))
    return space


def make():
    """One of everything, each with a canary that must be in the dump."""
    # Built without running the hooks: through object.__setattr__ and the base classes' own methods.
    things = {}

    cls = Meta("Plain", (), {**_body(without=("__del__",)), "__dict__": property(_tell("__dict__"))})
    hidden = type.__call__(cls)
    things["hidden_dict"] = hidden

    cls = type("Normal", (), _body(without=("__del__",)))
    value = object.__new__(cls)
    object.__setattr__(value, "canary", "normal canary")
    things["normal"] = value

    cls = Meta("WithMeta", (), _body(without=("__del__",)))
    value = object.__new__(cls)
    object.__setattr__(value, "canary", "meta canary")
    things["meta"] = value

    cls = type("Slotted", (), {"__slots__": ("canary", "unset"), **_body(without=("__del__",))})
    value = object.__new__(cls)
    cls.__dict__["canary"].__set__(value, "slot canary")
    things["slotted"] = value

    for base, args in (
        (dict, {"canary": "dict canary"}),
        (list, ["list canary"]),
        (tuple, ("tuple canary",)),
        (set, {"set canary"}),
        (frozenset, {"frozenset canary"}),
        (str, "str canary"),
        (bytes, b"bytes canary"),
        (bytearray, b"bytearray canary"),
        (int, 12345678),
        (float, 1234.5678),
        (collections.deque, ["deque canary"]),
        (collections.OrderedDict, {"canary": "ordered canary"}),
        (collections.defaultdict, {}),
    ):
        without = ("__del__", "__setitem__", "__hash__", "__eq__") if base is collections.OrderedDict else ("__del__",)
        cls = type(f"My{base.__name__}", (base,), _body(without=without))
        value = base.__new__(cls) if base in (dict, list, set, bytearray, collections.deque) else None
        if value is None:
            value = (
                base.__new__(cls)
                if base in (collections.OrderedDict, collections.defaultdict)
                else base.__new__(cls, args)
            )
        if base is dict:
            dict.update(value, args)
        elif base is list:
            list.extend(value, args)
        elif base is set:
            set.update(value, args)
        elif base is bytearray:
            bytearray.extend(value, args)
        elif base is collections.deque:
            collections.deque.extend(value, args)
        elif base is collections.OrderedDict:
            collections.OrderedDict.__setitem__(value, "canary", "ordered canary")
        things[base.__name__] = value

    class Odd(Exception):
        __str__ = _tell("Exception.__str__")
        __repr__ = _tell("Exception.__repr__")
        args = property(_tell("Exception.args"))
        __traceback__ = property(_tell("Exception.__traceback__"))
        __cause__ = property(_tell("Exception.__cause__"))
        __notes__ = property(_tell("Exception.__notes__"))

    things["exception"] = Odd

    class Color(enum.Enum):
        RED = "enum canary"
        __repr__ = _tell("Enum.__repr__")

    things["enum"] = Color.RED

    colliding = type("Key", (), {"__hash__": lambda self: hash("canary"), "__eq__": _tell("Key.__eq__")})
    things["colliding"] = {colliding(): 1}
    ran.clear()
    return things


def fail(things):
    """Raise with everything in locals."""
    every = [value for name, value in dict.items(things) if name != "exception"]
    error = things["exception"]("odd canary", *every[:0])
    raise error
