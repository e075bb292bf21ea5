"""Lists over many agents, from the command line: patterns, pages, what needs somebody, what is in doubt."""

from __future__ import annotations

import functools
from datetime import UTC, datetime

import pytest

import holdfast
from holdfast.cli.text import moment
from holdfast.run import schedule
from holdfast.run.durables import DURABLES
from tests.run.test_fleet import do

AGENTS = 55


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    path = tmp_path_factory.mktemp("fleet") / "store"
    with holdfast.open(path, durability="batched") as store:
        for number in range(AGENTS):
            do(store, f"fine-{number}")
        do(store, "doubt", "doubt")
        do(store, "waits", "wait")
        do(store, "late", "sleep")
        store.signal("waits", "go")
    return path


@pytest.fixture
def hold(cli, fleet):
    return lambda *words: cli(*words, store=fleet)


def table(ended):
    """The first words of the rows."""
    assert ended.code == 0, ended.err
    return [line.split()[0] for line in ended.out.splitlines()[1:]]


def test_lists_are_short_and_say_how_much_more_there_is(hold):
    for verb, more in (
        ("agents", "8 agents not shown; -n 0 shows all"),
        ("runs", "More on up to "),
        ("effects", "More on up to "),
    ):
        ended = hold(verb)
        lines = ended.out.splitlines()
        assert 50 < len(lines) <= 55
        assert more in lines[-1]
        assert len(hold(verb, "-n", "0").out.splitlines()) > 55
        assert hold(verb, "--limit", "3", "--json").json["more"] > 0
        everything = hold(verb, "--json").json
        assert everything["more"] == 0
        assert len(everything[verb]) >= AGENTS
        assert hold(verb, "--limit", "-1").code == 2
        assert hold(verb, "nobody").code == 2
        assert hold(verb, "nobody*").code == 0
    assert "Not ended: 1 in need of attention, 1 able to resume, 2 waiting." in hold("runs").out


def test_a_pattern_chooses_agents(hold):
    assert table(hold("agents", "fine-1?", "--sort", "name", "-n", "2")) == ["fine-10", "fine-11", "8"]
    assert table(hold("runs", "[dw]*")) == ["doubt", "waits"]
    assert table(hold("runs", "doubt@main")) == ["doubt"]
    assert table(hold("effects", "fine-5?")) == ["fine-54", "fine-53", "fine-52", "fine-51", "fine-50"]
    assert hold("agents", "--sort", "size").code == 2


def test_runs_that_need_somebody_stand_first_and_say_why(hold):
    first, *others = hold("runs", "--limit", "3").out.splitlines()[1:4]
    assert "needs attention" in first
    assert "signal go arrived: can resume" in "".join(others)
    assert table(hold("runs", "--sort", "began", "-n", "1"))[0] == "late"
    assert [run["due"] for run in hold("runs", "waits", "--json").json["runs"]] == [True]


def test_what_is_in_doubt_over_all_agents_is_one_list(hold):
    ended = hold("effects", "--in-doubt")
    assert table(ended)[0] == "doubt"
    assert "1 effect is in doubt." in ended.out
    assert "holdfast effects resolve doubt" in ended.out
    entries = hold("effects", "--in-doubt", "--json").json["effects"]
    assert [(one["agent"], one["branch"], one["status"]) for one in entries] == [("doubt", "main", "in doubt")]
    assert hold("effects", "fine-*", "--in-doubt").out == "Nothing is in doubt.\n"
    assert hold("effects", "fine-1", "--in-doubt").out == "Nothing is in doubt.\n"
    assert hold("effects", "--run", "r").code == 2


def test_bringing_or_keeping_many_agents_lists_what_was_done_and_counts_the_rest(cli, fleet, tmp_path):
    source, dest = str(tmp_path / "source"), str(tmp_path / "dest")
    told = cli("push", source, store=fleet).out.splitlines()
    assert 50 < len(told) <= 55
    assert "58 agents: 58 new; --json has all." in told
    assert "58 agents: 58 new; --json has all." in cli("push", dest, store=source).out
    with holdfast.open(source) as store:
        store.agent("late").tag("here")
    told = cli("push", dest, store=source).out.splitlines()
    assert len(told) <= 4
    assert told[1].startswith("late  ")
    assert "58 agents: 1 updated, 57 unchanged; --json has all." in told
    kept = cli("retain", "--last", "1", "--dry-run", store=dest).out.splitlines()
    assert len(kept) == 2 + ("would go" in kept[1])
    assert kept[0].startswith("58 agents: ")


def test_the_next_times_of_schedules_stand_below_the_runs(cli, tmp_path, monkeypatch):
    path, hour = tmp_path / "store", 3600 * 10**6
    now = 1_800_000_000_000_000  # 08:00 in UTC
    monkeypatch.setattr(schedule, "now_us", lambda: now)
    hold = functools.partial(cli, store=path)

    def work():
        with holdfast.open(path) as store:
            store.worker().run(drain=True)

    def at(text):
        return moment(datetime.fromisoformat(text).replace(tzinfo=UTC))

    holdfast.open(path).close()
    assert hold("runs", "--json").json["schedules"] == []
    for name, every in (("hourly", "0 * * * *"), ("daily\x7f\u202e", "30 12 * * *")):
        holdfast.durable(name=name, every=every, zone="Asia/Kolkata")(lambda agent: agent.wait_for("go"))
        monkeypatch.setitem(DURABLES, name, DURABLES.pop(name))
    work()
    shown = hold("runs").out.splitlines()
    assert shown[:2] == ["No runs.", ""]
    assert [" ".join(line.split()) for line in shown[2:]] == [
        "schedule every zone next about",
        f"hourly 0 * * * * Asia/Kolkata {at('2027-01-15T08:30')}",
        rf"daily\x7f\u202e 30 12 * * * Asia/Kolkata {at('2027-01-16T07:00')}",
    ]
    for _ in range(2):
        now += hour
        work()
    line = next(line for line in hold("runs").out.splitlines() if line.startswith("hourly "))
    assert line.endswith(f"hourly/2027-01-15T08:30:00Z has not ended; skipped {at('2027-01-15T09:30')}")
    now += 2 * hour
    assert "overdue: no worker has looked" in hold("runs").out
    told = {one["function"]: one for one in hold("runs", "--json").json["schedules"]}
    assert told["hourly"] == {
        "function": "hourly", "every": "0 * * * *", "zone": "Asia/Kolkata", "missed": "once", "overlap": "skip",
        "next": "2027-01-15T10:30:00+00:00", "overdue": True, "last": "2027-01-15T08:30:00+00:00",
        "skipped": "2027-01-15T09:30:00+00:00", "waiting": [], "running": "hourly/2027-01-15T08:30:00Z",
    }  # fmt: skip
    assert hold("runs", "hourly/*", "--json").json["schedules"] == []
    assert "schedule " not in hold("runs", "--status", "waiting").out
