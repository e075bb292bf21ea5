"""Whatever a file holds, every reader of dumps shows what is there or refuses it, within bounds, and harms nothing.

One table: each reader meets each way to spoil a file. The sums of a spoilt file fit, so its content reaches every line.
"""

from __future__ import annotations

import io
import json
import random

import pytest

from holdfast.crash import kinds, open_dump
from holdfast.crash.debugger import explore
from holdfast.crash.dumpfile import MAGIC
from holdfast.crash.pages import FORMATS, compare, page
from holdfast.crash.summary import as_json, collect
from holdfast.errors import HoldfastError
from holdfast.text import clean
from tests.crash import trip_program
from tests.crash.test_debugger import EVERYTHING

MOST = 4_000_000  # characters of an answer; of the text of an honest file it is a tenth


def model(dump, _honest):
    """Everything that can be asked of the model."""
    for name in (
        *("parts", "missing", "exceptions", "threads", "tasks", "sources", "log_records"),
        *("process", "descriptors", "heap", "agents", "death", "waiting", "native"),
    ):
        getattr(dump, name)
    for inert in dump.objects():
        list(inert.children())
    list(dump.search("lisbon"))
    for kind in kinds.PARTS:
        dump.part(kind)
        dump.extras(kind)
    return "\n".join(map(clean, dump.missing))  # the model has texts as they are; whoever shows them cleans them


def shown(dump, _honest):
    return "\n".join(line.text for line in page(collect(dump)))


def shown_as_json(dump, _honest):
    text = json.dumps(as_json(collect(dump)), allow_nan=False)
    assert len(text) < 400_000
    return text


def exported_as_json(dump, _honest):
    text = "".join(FORMATS["json"](dump))
    json.loads(text)
    return text


def exported_as_text(dump, _honest):
    return "".join(FORMATS["text"](dump))


def exported_as_html(dump, _honest):
    return "".join(FORMATS["html"](dump))


def compared(dump, honest):
    found = []
    with open_dump(honest) as other:
        for pair in ((dump, other), (other, dump)):
            told = compare(*pair)
            found += [json.dumps(told.as_json(), allow_nan=False), *(line.text for line in told.lines())]
    assert sum(map(len, found)) < 800_000
    return "\n".join(found)


def debugged(dump, _honest):
    out = io.StringIO()
    explore(dump, commands=io.StringIO(EVERYTHING), out=out, color=False)
    assert out.getvalue().endswith("leave; the end of the input leaves too\n")
    return out.getvalue()


def spoiled(whole, honest, chooser):
    return trip_program.spoiled(honest, chooser, chooser.choice([0.01, 0.04, 0.2]))


def cut(whole, honest, chooser):
    return whole[: chooser.randrange(len(MAGIC), len(whole))]


def flipped(whole, honest, chooser):
    data = bytearray(whole)
    for _ in range(chooser.randrange(1, 20)):
        data[chooser.randrange(len(data))] ^= 1 << chooser.randrange(8)
    return bytes(data)


def noise(whole, honest, chooser):
    return MAGIC + chooser.randbytes(chooser.randrange(400))


READERS = [model, shown, shown_as_json, exported_as_json, exported_as_text, exported_as_html, compared, debugged]
MUTATIONS = {spoiled: (20, 3_000), cut: (10, 1_000), flipped: (5, 1_000), noise: (10, 2_000)}  # rounds, and of a soak
SAYS_WHAT_IS_MISSING = {model: "the file ends", shown: "Not in this dump", debugged: "missing: "}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.__name__)
@pytest.mark.parametrize("reader", READERS, ids=lambda one: one.__name__)
def test_a_spoilt_file_is_shown_or_refused(reader, mutation, path, honest, tmp_path, rounds):
    whole = path.read_bytes()
    file = tmp_path / "x.hfdump"
    for seed in range(rounds(*MUTATIONS[mutation])):
        file.write_bytes(mutation(whole, honest, random.Random(seed)))
        try:
            with open_dump(file) as dump:
                text = reader(dump, path)
        except HoldfastError:
            assert mutation is not cut, seed  # a file that was cut always opens
            continue
        assert len(text) < MOST, seed
        assert [char for char in text if not char.isprintable() and char != "\n"] == [], seed
        if mutation is cut:
            assert SAYS_WHAT_IS_MISSING.get(reader, "") in text, seed
