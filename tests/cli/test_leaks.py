"""`holdfast leaks`: over the dumps of an agent, types and places that grow are named."""

from __future__ import annotations

import pytest

import holdfast
from holdfast.crash import Limits, capture, dumpfile, kinds
from holdfast.crash.redaction import Redactor


class Leaked:
    pass


hoard: list[Leaked] = []
LIMITS = Limits(deadline_s=600, part_s=300, objects=1_000, source_bytes=1_000)


@pytest.fixture
def leaky(filled):
    """The store, with three dumps of `trip-7` between which something grew, and one of another agent."""
    with holdfast.open(filled) as store:
        agent = store.agent("trip-7")
        for _ in range(3):
            hoard.extend(Leaked() for _ in range(200))
            capture("heap", to=filled / "dumps", limits=LIMITS)
        agent.close()
        store.agent("user@example.com")
        capture("heap", to=filled / "dumps", limits=LIMITS)
    yield filled
    hoard.clear()


def test_types_and_places_that_grow_are_named(cli, leaky):
    ended = cli("leaks", "trip-7")
    assert ended.code == 0
    assert ended.out.startswith("3 dumps of trip-7 over ")
    assert "of one process." in ended.out
    row = next(line for line in ended.out.splitlines() if line.endswith("test_leaks.Leaked"))
    assert row.split()[:2] == ["200", "600"]
    assert "test_leaks.hoard  holds " in ended.out
    assert cli("leaks", "trip-7", "--exit-code").code == 1
    found = cli("leaks", "trip-7", "--json").json
    assert found["schema"] == "holdfast.leaks/1"
    assert len(found["files"]) == len(found["at"]) == 3
    assert found["one_process"]
    kinds_of = {trend["name"].rpartition(".")[2]: trend["kind"] for trend in found["trends"]}
    assert kinds_of["Leaked"] == "type"
    assert kinds_of["hoard"] == "container"
    hoarded = next(trend for trend in found["trends"] if trend["name"].endswith("test_leaks.hoard"))
    assert hoarded["counts"] == [200, 400, 600]
    assert hoarded["holds"].endswith("Leaked")


def test_too_few_dumps_say_what_to_do(cli, leaky):
    ended = cli("leaks", "user@example.com")
    assert ended.code == 2
    assert "two dumps of 'user@example.com'" in ended.err
    assert "holdfast.crash.capture" in ended.err
    assert "There are dumps of trip-7, user@example.com." in cli("leaks", "nobody").err
    # A dump without a heap, or a broken one, is passed over.
    folder = leaky / "dumps"
    writer = dumpfile.Writer(folder / "outside.hfdump", Redactor(), limit_bytes=1 << 20)
    writer.add(kinds.HEAD, {"format": 1, "at": 1.0})
    writer.add(kinds.AGENT, {"name": "trip-7@main", "data": {"agent": "trip-7"}})
    writer.finish({})
    writer.close()
    (folder / "broken.hfdump").write_bytes(b"not a dump")
    assert "3 dumps of trip-7" in (told := cli("leaks", "trip-7").out)
    assert "1 of other processes or without a heap summary are left out" in told


def test_names_from_a_dump_cannot_act_on_a_terminal(screen, filled):
    evil = "\x1b]0;owned\x07"
    (filled / "dumps").mkdir()
    for number in (1, 2):
        writer = dumpfile.Writer(filled / "dumps" / f"{number}.hfdump", Redactor(), limit_bytes=1 << 20)
        writer.add(kinds.HEAD, {"format": 1, "at": 3600.0 * number, "pid": 1})
        writer.add(kinds.AGENT, {"name": "trip-7@main", "data": {"agent": "trip-7"}})
        rows = {"types": [[evil, number * 100, number]], "holders": [[evil, "list", 1, number * 100, 5, evil]]}
        writer.add(kinds.HEAP, rows)
        writer.finish({})
        writer.close()
    ended = screen("leaks", "trip-7")
    assert ended.code == 0
    assert "\x1b" not in ended.out
    assert "owned" in ended.out
