"""Other values for limits of the library, while something runs."""

from __future__ import annotations

import sys
from contextlib import contextmanager


@contextmanager
def limits(values: dict[str, int]):
    """Other values for named limits, in every module that knows them."""
    before = [
        (module, name, getattr(module, name))
        for module_name, module in list(sys.modules.items())
        for name in values
        if module_name.startswith("holdfast.") and hasattr(module, name)
    ]
    missing = set(values) - {name for _, name, _ in before}
    assert not missing, f"no module has {missing}"
    try:
        for module, name, _ in before:
            setattr(module, name, values[name])
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
