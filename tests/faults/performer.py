"""The script of tests/faults/script.py as a program: ``python -m tests.faults.performer FOLDER``.

The store is FOLDER/store. What is acknowledged goes to the standard output, one line each, in one write.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.faults import script


def main() -> None:
    folder = Path(sys.argv[1])
    with script.small():
        script.perform(folder / "store", script.Ledger(told=lambda line: _tell(f"{line}\n")))


def _tell(line: str) -> None:
    os.write(1, line.encode())


if __name__ == "__main__":
    main()
