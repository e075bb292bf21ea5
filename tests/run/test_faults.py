"""What a tool raises is what its caller gets, the first time and when the run is executed again."""

from __future__ import annotations

import json

import pytest

import holdfast
from holdfast import errors
from holdfast.run.arguments import secret
from holdfast.run.tools import tool
from tests.run.bench import Bench, Crash, Quick


class Http(Exception):
    """With a constructor that wants more than what ends up in ``args``."""

    made = 0

    def __init__(self, status, *, body):
        super().__init__(f"HTTP {status}")
        Http.made += 1
        self.status, self.body = status, body


class TooMany(Http):
    """Not declared itself, but what it derives from."""


class Sold(errors.FailedBeforeEffect):
    def __init__(self, flight, left):
        super().__init__(f"{flight} is sold out, {left} left")
        self.flight, self.left = flight, left


class Bare(errors.FailedBeforeEffect):
    """Does not call the constructor of its base."""

    def __init__(self, flight):
        self.flight = flight


class Slotted(Exception):
    __slots__ = ("place", "unset")

    def __init__(self, place):
        super().__init__()
        self.place = place


class Both(ValueError, OSError):
    """Two bases, of which the second has fields."""

    def __init__(self, why):
        super().__init__(5, why)
        self.why = why


class Odd(Exception):
    """Made in a way of its own."""

    def __new__(cls, one, two):
        return super().__new__(cls, one + two)

    def __init__(self, one, two):
        self.one, self.two = one, two


def noted():
    error = ValueError("x")
    error.add_note("look at the page")
    return error


def missing():
    try:
        open("/nonexistent/file")  # noqa: SIM115, PTH123
    except OSError as error:
        return error


def undecodable():
    try:
        b"\xff".decode()
    except UnicodeError as error:
        return error


def not_json():
    try:
        json.loads("{")
    except ValueError as error:
        return error


def look(error):
    """Everything that a handler may look at."""
    slots = ("errno", "strerror", "filename", "encoding", "object", "start", "end", "reason", "place", "name", "path")
    return {
        "type": type(error),
        "str": str(error),
        "args": error.args,
        "attributes": vars(error),
        "slots": {name: getattr(error, name) for name in slots if hasattr(error, name)},
    }


@pytest.mark.parametrize(
    ("raises", "make"),
    [
        ((Http,), lambda: Http(404, body={"why": ["gone"]})),
        ((Http,), lambda: TooMany(429, body="x")),
        ((Sold,), lambda: Sold("TP1", 0)),
        ((Bare,), lambda: Bare("TP1")),
        ((Slotted,), lambda: Slotted("here")),
        ((Both,), lambda: Both("closed")),
        ((Odd,), lambda: Odd("a", "b")),
        ((OSError,), missing),
        ((OSError,), lambda: BlockingIOError(11, "again", 3)),
        ((UnicodeError,), undecodable),
        ((json.JSONDecodeError,), not_json),
        ((ValueError,), noted),
        ((LookupError,), lambda: KeyError(("a", 1))),
        ((ImportError,), lambda: ImportError("no such", name="gone", path="/x")),
        ((SyntaxError,), lambda: SyntaxError("bad", ("f.py", 1, 2, "x y"))),
        ((errors.UnknownAgent,), lambda: errors.UnknownAgent("nobody", hint="look again")),
    ],
)
def test_a_declared_exception_is_raised_as_it_was_live_and_again(raises, make):
    asked = []

    @tool(effect="read", raises=raises)
    def ask():
        asked.append(make())
        raise asked[-1]

    seen = []

    def work(agent):
        try:
            ask()
        except raises as error:
            seen.append((look(error), error))
        if len(seen) == 1:
            raise Crash
        return "done"

    bench = Bench()
    with pytest.raises(Crash):
        bench.run(work)
    bench.ledger.flush()
    made = Http.made
    assert bench.crashed().run(work) == "done"
    assert len(asked) == 1
    assert Http.made == made  # no constructor runs
    (live, error), (again, _) = seen
    assert live == again == look(asked[0])
    assert error.__cause__ is asked[0]
    assert asked[0].__traceback__ is not None


def test_what_cannot_be_saved_of_an_exception_is_missing_both_times():
    asked = []

    @tool(effect="read", raises=(Http,))
    def ask():
        asked.append(1)
        error = Http(404, body=object())
        error.answer = {"text": "the token is hunter2hunter2"}
        raise error

    seen = []

    def work(agent):
        try:
            ask()
        except Http as error:
            seen.append(vars(error))
        if len(seen) == 1:
            raise Crash

    bench = Bench()
    secret(bench, "token", "hunter2hunter2")
    with pytest.raises(Crash):
        bench.run(work)
    bench.ledger.flush()
    bench.crashed().run(work)
    assert seen[0] == seen[1] == {"status": 404, "answer": {"text": "the token is <secret token>"}}
    assert len(asked) == 1


def test_a_group_of_exceptions_is_no_answer():
    with pytest.raises(errors.BadOption, match="A group is no answer"):

        @tool(raises=(ExceptionGroup,))
        def ask(): ...

    @tool(effect="read", raises=(Exception,))
    def check():
        raise ExceptionGroup("g", [ValueError(1)])

    with pytest.raises(errors.ToolFailed, match="check failed: ExceptionGroup: g"):
        Bench().run(lambda agent: check())


def test_two_declared_classes_of_one_name_are_told_apart():
    def another():
        class Full(Exception):
            pass

        Full.__qualname__ = "Full"
        return Full

    first, second = another(), another()
    second.__module__ = "elsewhere"

    @tool(effect="read", raises=(first, second))
    def ask(which):
        raise (first, second)[which]

    def work(agent):
        seen = []
        for which in (0, 1):
            try:
                ask(which)
            except first:
                seen.append("first")
            except second:
                seen.append("second")
        return seen

    assert Bench().run(work) == ["first", "second"]


def test_a_run_that_ends_by_a_declared_exception_has_failed(tmp_path):
    @tool(raises=(Sold,))
    def book(flight):
        raise Sold(flight, 0)

    @holdfast.durable
    def travel(agent):
        return book("TP1")

    with holdfast.open(tmp_path) as store:
        agent = store.agent("a")
        for _ in range(2):
            with pytest.raises(Sold) as caught:
                agent.run(travel)
            assert (caught.value.flight, caught.value.left) == ("TP1", 0)
            assert caught.value.message == "TP1 is sold out, 0 left"
            (run,) = agent.runs()
            assert (run.status, run.error) == ("failed", "Sold: TP1 is sold out, 0 left")


class Speechless(Exception):
    def __str__(self):
        raise ValueError("no words")

    __repr__ = __str__


@pytest.mark.parametrize("raises", [(), (Speechless,)])
@pytest.mark.parametrize("kind", ["read", "idempotent", "write", "local"])
def test_an_exception_without_words_ends_a_run_as_any_other(tmp_path, kind, raises):
    @tool(effect=kind, raises=raises if kind != "write" else ())
    def ask():
        raise Speechless

    @holdfast.durable
    def work(agent):
        return ask()

    expected = {"write": errors.InDoubt, "local": Speechless}.get(kind, Speechless if raises else errors.ToolFailed)
    with holdfast.open(tmp_path) as store:
        agent = store.agent("a")
        with pytest.raises(expected):
            agent.run(work)
        (run,) = agent.runs()
        assert run.status == ("needs attention" if kind == "write" else "failed")
        assert "<exception str() failed>" in run.error


def test_a_probe_and_a_compensation_without_words(tmp_path):
    def mute(effect):
        raise Speechless

    @tool(probe=mute)
    def act():
        raise ConnectionError

    @tool(compensate=mute)
    def book():
        return 1

    with holdfast.open(tmp_path) as store:
        with store.agent("a"), pytest.raises(errors.InDoubt, match=r"the probe failed: Speechless: <exception"):
            act()
        agent = store.agent("b")
        with agent:
            agent.checkpoint("start")
            book()
        agent = store.agent("b")
        agent._host.clock = Quick()
        with pytest.raises(errors.RollbackBlocked, match=r"Speechless: <exception.*; 1 effect remains to be undone"):
            agent.rollback("start")


def test_a_run_s_own_result_is_named_when_it_cannot_be_saved(tmp_path):
    @tool(effect="read")
    async def ask(question):
        return question

    @holdfast.durable
    def forgets(agent):
        return ask("why?")

    @holdfast.durable
    def stops(agent):
        return next(iter(()))

    with holdfast.open(tmp_path) as store:
        with pytest.raises(errors.Unencodable) as caught:
            store.agent("a").run(forgets)
        assert str(caught.value).startswith("the result of forgets: a coroutine cannot be saved\nask is async: `await`")
        with pytest.raises(RuntimeError, match=r"^stops raised StopIteration$"):
            store.agent("b").run(stops)
