"""What the pages show of other libraries is what these do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import parse

PAGE = Path(__file__).resolve().parent.parent / "docs" / "guide" / "from-dbos-or-temporal.md"


@pytest.mark.slow
def test_the_program_for_dbos_does_what_ours_does(tmp_path):
    pytest.importorskip("dbos")
    blocks = [block.text for block in parse(PAGE.read_text(encoding="utf-8"))]
    (program,) = [text for text in blocks if text.startswith("from dbos")]
    ours = blocks[next(at for at, text in enumerate(blocks) if "import holdfast" in text) + 1]
    (tmp_path / "theirs.py").write_text(f"{program}DBOS.destroy()\n", encoding="utf-8")
    told = subprocess.run(
        [sys.executable, "theirs.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
    )
    assert told.stdout == ours
