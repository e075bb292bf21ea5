"""Schedules: each time becomes one run, whoever works, whatever is killed, and whatever the clocks do."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import psycopg
import pytest

import holdfast
from holdfast import errors
from holdfast.run import cron, schedule
from holdfast.run.durables import DURABLES
from tests import warm
from tests.conftest import SOAK
from tests.limits import limits
from tests.lives import worker
from tests.run import working

US = 1_000_000
MINUTE, HOUR, DAY = 60 * US, 3600 * US, 86400 * US


def at(text: str) -> int:
    """Microseconds of a time in UTC."""
    return round(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()) * US


def shown(instants) -> list[str]:
    return [cron.id_of(one) for one in instants]


# -- when the times are -------------------------------------------------------------------------------------------

# Lisbon and New York by an hour at night, Lord Howe by half an hour, São Paulo at midnight (until 2019), Kolkata never,
# and Apia once by a whole day.
PLACES = {
    "Europe/Lisbon": ["2026-03-29", "2026-10-25", "1996-03-31", "1992-09-27"],
    "America/New_York": ["2026-03-08", "2026-11-01", "2006-04-02"],
    "America/Sao_Paulo": ["2017-10-15", "2018-02-18", "2026-03-01"],
    "Asia/Kolkata": ["2026-03-29"],
    "Australia/Lord_Howe": ["2026-04-05", "2026-10-04"],
    "Pacific/Apia": ["2011-12-30"],
}


class Model:
    """The same by another way: the minutes of the world go by, and whoever looks at the clock on the wall sees which of
    its times are over that were not before."""

    def __init__(self, minutes, hours, days, zone):
        self.fits = lambda local: (
            local.minute in minutes and local.hour in hours and local.isoweekday() % 7 in {day % 7 for day in days}
        )
        self.zone = ZoneInfo(zone)

    def between(self, first: int, last: int) -> list[int]:
        found = []
        now = datetime.fromtimestamp(first // US // 60 * 60, UTC) - timedelta(days=2)
        high = now.astimezone(self.zone).replace(tzinfo=None)
        while (us := round(now.timestamp()) * US) <= last:
            local = now.astimezone(self.zone).replace(tzinfo=None)
            came = False
            while high < local:
                high += timedelta(minutes=1)
                came = came or self.fits(high)
            if came and us >= first:
                found.append(us)
            now += timedelta(minutes=1)
        return found


def some(chosen: random.Random, most: int, often: int) -> tuple[str, set[int]]:
    """One field of cron, and what it means. ``often``: what is chosen most is not above this."""
    kind, high = chosen.randrange(4), often if chosen.random() < 0.7 else most
    if kind == 0:
        return "*", set(range(most + 1))
    if kind == 1:
        step = chosen.randint(2, 9)
        return f"*/{step}", set(range(0, most + 1, step))
    if kind == 2:
        first = chosen.randint(0, high)
        last = chosen.randint(first, high)
        return f"{first}-{last}", set(range(first, last + 1))
    several = {chosen.randint(0, high) for _ in range(chosen.randint(1, 4))}
    return ",".join(map(str, several)), several


@pytest.mark.parametrize("zone", PLACES)
def test_times_are_those_of_the_clock_on_the_wall_each_once(zone):
    chosen = random.Random(zone)
    for day in PLACES[zone]:
        for _ in range(50 if SOAK else 1):
            (minute, minutes), (hour, hours), (week, days) = (
                some(chosen, *limits) for limits in ((59, 59), (23, 3), (7, 7))
            )
            made = cron.declared(f"{minute} {hour} * * {week}", zone, "each", "queue")
            first = at(day) - 20 * HOUR + chosen.randrange(3 * 3600) * US
            last = first + 2 * DAY
            wanted = Model(minutes, hours, days, zone).between(first, last)
            assert made.between(first, last, 10**6) == wanted, made
            assert made.between(first, last, 7) == wanted[-7:]
            found, now = [], first - 1
            while (now := made.after(now)) <= last:
                found.append(now)
            assert found == wanted, made
            for _ in range(10):  # from anywhere, both passes of a doubled hour included
                now = chosen.randint(first, last)
                assert made.after(now) == next((one for one in wanted if one > now), made.after(last))
                assert made.between(first, now, 10**6) == [one for one in wanted if one <= now]


def test_a_time_in_the_gap_is_at_its_end_and_a_doubled_hour_comes_once():
    made = cron.declared("30 1 * * *", "Europe/Lisbon", "once", "skip")
    assert shown([made.after(at("2026-03-28T12:00"))]) == ["2026-03-29T01:00:00Z"]
    assert shown(made.between(at("2026-10-24T12:00"), at("2026-10-26T12:00"), 9)) == [
        "2026-10-25T00:30:00Z", "2026-10-26T01:30:00Z",
    ]  # fmt: skip
    often = cron.declared("*/30 * * * *", "Europe/Lisbon", "once", "skip")
    assert shown(often.between(at("2026-10-24T23:45"), at("2026-10-25T02:15"), 9)) == [
        "2026-10-25T00:00:00Z", "2026-10-25T00:30:00Z", "2026-10-25T02:00:00Z",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": "0 8 * *"}, "five fields"),
        ({"every": "0 8 * * * *"}, "five fields"),
        ({"every": "61 8 * * *"}, "Bad minute"),
        ({"every": "0 0 30 2 *"}, "0 0 30 2"),
        ({"every": "0 0 30 2 1#6"}, "0 0 30 2"),
        ({"every": ""}, "every is a text"),
        ({"every": 5}, "every is a text"),
        ({"every": "9" * 5000 + " * * * *"}, "every is a text"),
        ({"every": "0 8 * * *", "zone": "Lisbon"}, "no time zone"),
        ({"every": "0 8 * * *", "zone": "../../etc/passwd"}, "no time zone"),
        ({"every": "0 8 * * *", "zone": "Europe"}, "no time zone"),
        ({"every": "0 8 * * *", "zone": None}, "zone is a text"),
        ({"every": "0 8 * * *", "missed": "all"}, "missed='all'"),
        ({"every": "0 8 * * *", "overlap": ["skip"]}, "overlap="),
        ({"zone": "Europe/Lisbon"}, "say more about a schedule"),
    ],
)
def test_what_is_no_schedule_is_refused_where_it_is_declared(options, said):
    with pytest.raises(errors.BadOption, match=said.replace("[", r"\[")):
        holdfast.durable(**options)(lambda agent: None)


def test_a_scheduled_function_takes_the_agent_and_its_time_at_most():
    def two(agent, one, two): ...
    def named(agent, *, one): ...
    def fine(agent, when, other=1, *more, **rest): ...

    def none(): ...

    for wrong in (two, named, none):
        with pytest.raises(errors.BadOption, match="wants something else"):
            holdfast.durable(every="0 8 * * *")(wrong)
    with declaring():
        assert holdfast.durable(every="0 8 * * *")(fine).durable.timed


@contextmanager
def declaring():
    """Functions that are declared inside are forgotten afterwards."""
    before = DURABLES.copy()
    try:
        yield
    finally:
        DURABLES.clear()
        DURABLES.update(before)


def test_without_its_package_a_schedule_says_what_to_install():
    code = (
        "import sys; sys.modules['cronsim'] = None; import holdfast\n"
        "try: holdfast.durable(every='0 8 * * *')(lambda agent: 0)\n"
        "except holdfast.errors.Incompatible as error: print(error)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "holdfast[schedule]" in said


# -- what becomes of a time ---------------------------------------------------------------------------------------


class Clock:
    """What time workers believe it is."""

    def __init__(self, text: str) -> None:
        self.us = at(text)

    def __call__(self) -> int:
        return self.us

    def to(self, text: str) -> None:
        self.us = at(text)


@pytest.fixture
def clock(monkeypatch):
    made = Clock("2026-11-16T07:30")
    monkeypatch.setattr(schedule, "now_us", made)
    return made


RAN: list[str] = []


@pytest.fixture
def report():
    """Declares ``report``, which waits for the signal ``go`` when it is told to."""
    RAN.clear()
    waits: list[bool] = []

    def declare(**options):
        def report(agent, when):
            RAN.append(f"{when:%d %H:%M}")
            if waits:
                agent.wait_for("go")

        made = holdfast.durable(**{"every": "0 * * * *", **options})(report)
        made.waits = waits
        return made

    with declaring():
        yield declare


def work(store):
    store.worker().run(drain=True)


def test_the_first_time_is_after_the_declaration_and_each_becomes_one_run(place, clock, report):
    with holdfast.open(place) as store:
        report()
        work(store)
        assert RAN == []
        assert shown([store.schedules()[0].next.timestamp() * US]) == ["2026-11-16T08:00:00Z"]
        for text in ("07:59:59", "08:00", "08:00:30", "08:20", "09:00"):
            clock.to(f"2026-11-16T{text}")
            work(store)
            work(store)
        assert RAN == ["16 08:00", "16 09:00"]
        found = sorted((run.agent, run.id) for run in store.runs())
        assert found == [(f"report/{id}", id) for id in ("2026-11-16T08:00:00Z", "2026-11-16T09:00:00Z")]
        assert store.runs()[0].args == {"when": datetime(2026, 11, 16, 9, tzinfo=UTC)}


@pytest.mark.parametrize(
    ("missed", "ran"),
    [("skip", []), ("once", ["16 11:00"]), ("each", ["16 08:00", "16 09:00", "16 10:00", "16 11:00"])],
)
def test_what_was_missed_is_made_up_for_as_declared_and_decided_once(place, clock, report, missed, ran):
    with holdfast.open(place) as store:
        report(missed=missed)
        work(store)
        clock.to("2026-11-16T11:30")
        for _ in range(3):
            work(store)
        assert ran == RAN
        clock.to("2026-11-16T12:00:59")  # a little late is not missed
        work(store)
        assert [*ran, "16 12:00"] == RAN
        skipped = store.schedules()[0].skipped
        assert {"skip": 11, "once": 10}.get(missed) == (skipped.hour if skipped else None)


def test_a_clock_that_jumps_a_year_ahead_makes_no_more_than_so_many_runs_and_comes_back(place, clock, report):
    with holdfast.open(place) as store, limits({"MOST": 5}):
        report(every="*/5 * * * *", missed="each")
        work(store)
        clock.to("2027-11-16T07:32")
        work(store)
        assert RAN == ["16 07:10", "16 07:15", "16 07:20", "16 07:25", "16 07:30"]
        RAN.clear()
        for text in ("07:31", "07:34:59", "07:35", "07:36"):  # as if nothing had been
            clock.to(f"2026-11-16T{text}")
            work(store)
        assert RAN == ["16 07:35"]


def test_a_clock_that_goes_back_a_little_runs_nothing_twice(place, clock, report):
    with holdfast.open(place) as store:
        report()
        work(store)
        for text in ("08:00", "07:59", "08:00", "07:10", "08:00", "05:59", "08:00", "09:00"):
            clock.to(f"2026-11-16T{text}")
            work(store)
        assert RAN == ["16 08:00", "16 09:00"]


def test_a_time_that_comes_while_the_run_before_it_goes_on_is_skipped_or_waits(place, clock, report):
    with holdfast.open(place) as store:
        made = report()
        made.waits.append(True)
        work(store)
        for hour in (8, 9, 10):
            clock.to(f"2026-11-16T{hour:02}:00")
            work(store)
        assert RAN == ["16 08:00"]
        info = store.schedules()[0]
        assert (info.running, info.skipped.hour) == ("report/2026-11-16T08:00:00Z", 10)
        made = report(overlap="queue")
        for hour in (11, 12):
            clock.to(f"2026-11-16T{hour}:00")
            work(store)
        assert [one.hour for one in store.schedules()[0].waiting] == [11, 12]
        store.signal("report/2026-11-16T08:00:00Z", "go")
        work(store)
        assert RAN == ["16 08:00", "16 08:00", "16 11:00"]  # the first one is executed once more, up to where it was
        store.signal("report/2026-11-16T11:00:00Z", "go")
        made.waits.clear()
        work(store)
        assert RAN[-1] == "16 12:00"
        assert store.schedules()[0].waiting == ()
        assert {run.status for run in store.runs()} == {"finished"}


def test_a_run_that_failed_or_was_cancelled_is_not_in_the_way(place, clock):
    with holdfast.open(place) as store, declaring():

        @holdfast.durable(every="0 * * * *")
        def wrong(agent):
            raise ValueError

        work(store)
        for hour in (8, 9):
            clock.to(f"2026-11-16T{hour:02}:00")
            work(store)
        assert [run.status for run in store.runs()] == ["failed", "failed"]


def test_at_most_a_hundred_wait_the_newest_and_it_takes_no_time_to_find_them():
    now = at("2026-11-16T08:00")
    row = schedule.Kept("* * * * *", "Europe/Lisbon", "each", "queue", at=now, next=now + MINUTE)
    for minutes in (1, 50, 60 * 24 * 365 * 3):
        now += minutes * MINUTE
        row = schedule.decide(row, now, runs=True)
    assert row.pending == tuple(now - back * MINUTE for back in reversed(range(100)))
    assert (row.next, row.skipped) == (now + MINUTE, now - 100 * MINUTE)


def test_other_times_begin_anew_and_the_last_to_start_says_which(place, clock, report):
    with holdfast.open(place) as store:
        report()
        old = store.worker()
        old.run(drain=True)
        clock.to("2026-11-16T08:10")
        report(every="15 * * * *")
        work(store)
        assert RAN == []  # what the times before had missed is not made up for
        clock.to("2026-11-16T08:15")
        work(store)
        assert RAN == ["16 08:15"]
        DURABLES["report"].schedule = None  # a program that has it without a schedule
        work(store)
        assert store.schedules() == []


def test_two_programs_that_differ_do_not_contend(place, clock, report):
    """Each is a worker that goes on for long, as two releases do while one replaces the other."""
    with holdfast.open(place) as store:
        old, new = schedule.Schedules(store), schedule.Schedules(store)
        before = report().durable
        old.look()
        after = report(every="*/10 * * * *").durable
        new.look()
        kept = store.schedules()
        for text in ("07:30:20", "07:40", "07:50:01", "08:00"):
            clock.to(f"2026-11-16T{text}")
            DURABLES["report"] = before
            old.look(at_once=True)
            work_only(store)
            DURABLES["report"] = after
            new.look(at_once=True)
            work_only(store)
        assert kept[0].every == store.schedules()[0].every == "*/10 * * * *"
        assert RAN == ["16 07:40", "16 07:50", "16 08:00"]


def work_only(store):
    """What was submitted is executed; nothing is said about schedules."""
    here = store.worker()
    for info in store.runs(status="queued"):
        here.one(info.agent, info.branch, info.id)


def test_a_worker_at_rest_reads_once_a_second_and_writes_nothing(tmp_path, clock, report, monkeypatch):
    with holdfast.open(tmp_path / "store") as store:
        report()
        here = schedule.Schedules(store)
        here.look()
        reads = []
        monkeypatch.setattr(type(store._db.view), "fact", lambda *_: reads.append(1))
        monkeypatch.setattr(store._db, "change", None)
        for _ in range(1000):
            here.look()
        assert len(reads) <= 1


# -- the row ------------------------------------------------------------------------------------------------------


def test_a_backup_has_no_schedule_and_a_store_that_moves_or_gets_another_key_keeps_its_own(tmp_path, clock, report):
    old, new = bytes(range(32)), bytes(range(32, 64))
    with holdfast.open(tmp_path / "a", key=False) as store, holdfast.open(tmp_path / "copy", key=False) as copy:
        report()
        work(store)
        kept = store.schedules()
        store.backup(copy)
        assert copy.schedules() == []
    with holdfast.open(tmp_path / "a", key=False) as store, holdfast.open(tmp_path / "b", key=old) as moved:
        store.move(moved)
        assert moved.schedules() == kept
    holdfast.keys.rotate(tmp_path / "b", new, key=old, full=True, discard_old=True)
    with holdfast.open(tmp_path / "b", key=new) as store:
        assert store.schedules() == kept
        assert store.verify().ok
    for file in (tmp_path / "b").glob("store.db*"):
        assert b"report" not in file.read_bytes()


def test_what_somebody_else_has_changed_meanwhile_is_not_written_over(postgres_url, monkeypatch):
    """On a server: in a directory nobody writes while somebody else does."""
    monkeypatch.setenv("HOLDFAST_ALLOW_UNSAFE_POSTGRES", "1")  # it does not flush
    with holdfast.open(postgres_url) as store, psycopg.connect(postgres_url, autocommit=True) as other:

        def swapping(statement):
            def swap(value):
                other.execute(statement)
                return b"mine"

            return lambda change: change.swap_fact("schedules", swap)

        for statement in (
            "INSERT INTO holdfast.store (name, value, sum) VALUES ('schedules', 'theirs', '')",
            "UPDATE holdfast.store SET value = 'theirs too' WHERE name = 'schedules'",
        ):
            with pytest.raises(errors.Contention):
                store._db.change(swapping(statement))
            store._db.change(lambda change: change.set_fact("schedules", b"sound"))
        store._db.change(swapping("SELECT 1"))
        assert store._db.view.fact("schedules") == b"mine"


def test_repair_keeps_schedules(tmp_path, clock, report):
    with holdfast.open(tmp_path / "a") as store:
        report()
        work(store)
        kept = store.schedules()
    holdfast.repair(tmp_path / "a", to=tmp_path / "b")
    with holdfast.open(tmp_path / "b") as store:
        assert store.schedules() == kept
        assert store.verify().ok


@pytest.mark.parametrize("value", [b"", b"\xc1", b"\x01", b"\x81\xa1f\x80", b"\x81\xa1f\xc0"])
def test_a_damaged_row_says_so(tmp_path, value):
    with holdfast.open(tmp_path / "a") as store:
        store._db.change(lambda change: change.set_fact("schedules", value))
        with pytest.raises(errors.Damaged, match="row schedules"):
            store.schedules()


# -- real workers -------------------------------------------------------------------------------------------------

PROGRAM = '''
"""A function with a schedule, a clock that a file shows, and a death at the point that is named."""
import os, signal, sys
import holdfast
from holdfast.run import schedule
from holdfast.run.store import Store

here = os.environ["HERE"]
points = 0

def now_us():
    with open(here + "/clock") as file:
        return int(file.read())

def point(call):
    def called(*args, **kwargs):
        global points
        points += 1
        if str(points) == os.environ.get("DIE"):
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)
    return called

schedule.now_us = now_us
schedule._changed, Store.submit = point(schedule._changed), point(Store.submit)

@holdfast.tool(effect="write")
def tell(when: str) -> None:
    with open(here + "/told", "a") as file:
        file.write(when + "\\n")

@holdfast.durable(every="* * * * *", missed="each", overlap="queue")
def job(agent, when):
    tell(f"{when:%H:%M}")
'''


@pytest.fixture
def world(place, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "told").touch()
    holdfast.open(place).close()
    return Workers(place, tmp_path)


class Workers:
    def __init__(self, place, path):
        self.place, self.path = place, path

    def clock(self, text: str) -> None:
        new = self.path / "clock.new"
        new.write_text(str(at(text)))
        new.rename(self.path / "clock")

    def worker(self, die: int = 0):
        """Works until there is nothing to do; at its ``die``-th point it is killed."""
        environment = {**os.environ, "HERE": str(self.path), "DIE": str(die)}
        return worker(self.place, self.path / "program.py", "--drain", env=environment)

    def told(self) -> list[str]:
        return (self.path / "told").read_text().split()


def test_a_worker_that_is_killed_anywhere_between_decision_and_run_loses_and_doubles_nothing(world):
    """The points: declaring, deciding, submitting, saying so."""
    world.clock("2026-11-16T08:00:30")
    assert world.worker(die=1).wait() == -signal.SIGKILL  # nothing was declared
    assert world.worker().wait() == 0
    for minute, die in ((2, 1), (4, 2), (6, 3), (8, 4)):
        world.clock(f"2026-11-16T08:{minute:02}:30")
        assert world.worker(die=die).wait() == -signal.SIGKILL
        with holdfast.open(world.place) as store:
            working.freed(store)
    assert world.worker().wait() == 0
    assert world.told() == [f"08:{minute:02}" for minute in range(1, 9)]


def test_two_workers_decide_once(world):
    world.clock("2026-11-16T08:00:30")
    assert world.worker().wait() == 0
    for minute in (1, 9):
        world.clock(f"2026-11-16T08:{minute:02}:30")
        both = [world.worker(), world.worker()]
        assert [one.wait() for one in both] == [0, 0]
    assert world.worker().wait() == 0
    assert world.told() == [f"08:{minute:02}" for minute in range(1, 10)]


SUBMITTING = """
import sys
import holdfast

@holdfast.durable
def job(agent): ...

with holdfast.open(sys.argv[1]) as store:
    print("ready", flush=True)
    for line in sys.stdin:
        store.submit(job.options(id=line.strip()))
        print("done", flush=True)
"""


def test_an_id_that_several_processes_submit_at_the_same_moment_is_one_run(place):
    """What makes the id of a scheduled run enough."""
    holdfast.open(place).close()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    several = [warm.Popen([sys.executable, "-c", SUBMITTING, place], **pipes) for _ in range(3)]
    assert [one.stdout.readline() for one in several] == ["ready\n"] * 3
    for number in range(10):
        for one in several:
            one.stdin.write(f"{number}\n")
        assert [one.stdout.readline() for one in several] == ["done\n"] * 3
    for one in several:
        one.communicate()
    with holdfast.open(place) as store:
        assert sorted(run.id for run in store.runs()) == [str(number) for number in range(10)]
