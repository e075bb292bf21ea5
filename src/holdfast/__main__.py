"""``python -m holdfast``: the command line where no ``holdfast`` script is on the path."""

from __future__ import annotations

import sys

from holdfast.cli import main

if __name__ == "__main__":
    sys.exit(main())
