"""Names of a package that are loaded when they are first used, so that a program pays for what it uses."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def names(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """The package's ``__getattr__``. For each name its home: a module, or ``module:name`` if it has another one there.

    ``module:`` alone is the module itself.
    """

    def load(name: str) -> object:
        if name not in homes:
            msg = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(msg)
        module, colon, there = homes[name].partition(":")
        collects = gc.isenabled() and module not in sys.modules
        try:
            if collects:
                gc.disable()  # all that is loaded stays: looking for garbage in it takes a tenth of the time
            value: object = import_module(module)
        finally:
            if collects:
                if not gc.get_freeze_count():  # what is loaded counts as old at once: nobody looks through it now
                    gc.freeze()
                    gc.unfreeze()
                gc.enable()
        if there or not colon:
            value = getattr(value, there or name)
        vars(sys.modules[package])[name] = value
        return value

    return load
