"""One parser, fed by atheris: ``python -m tests.faults.guided PARSER FOLDER -runs=1000 ...``.

A process of its own, because Holdfast has to be imported under atheris's eyes, so that it sees which lines an input
reaches. ``FOLDER/corpus`` keeps inputs that reached new ones, for the next process; what was wrong is appended to
``FOLDER/wrong``, one line of JSON each. The other arguments are libFuzzer's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["holdfast"], enable_loader_override=False):
    from holdfast.crash import dumpfile, kinds, open_dump, records  # noqa: F401  loaded late otherwise
    from tests.faults import hostile
    from tests.faults.campaign import quiet, remembering
    from tests.faults.parsers import PARSERS
    from tests.memory import memory


def main() -> None:
    name, place, *options = sys.argv[1:]
    parser = next(parser for parser in PARSERS if parser.name == name)
    folder = Path(place)
    corpus = folder / "corpus"
    corpus.mkdir(exist_ok=True)
    for number, seed in enumerate(parser.seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)
    known: set[str] = set()
    with memory() as scratch, remembering(scratch / "state"), quiet(), hostile.bounded():

        def one(data: bytes) -> None:
            outcome = hostile.one(parser, data, scratch)
            if outcome.startswith("!") and outcome not in known:
                known.add(outcome)
                with (folder / "wrong").open("a") as file:
                    file.write(json.dumps([outcome, data[:300].hex()]) + "\n")

        atheris.Setup([sys.argv[0], *options, str(corpus)], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
