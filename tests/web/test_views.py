"""The views' data: right, bounded whatever a store holds, and the same in windows as in one piece."""

from __future__ import annotations

import json
import random
import re
import shlex
import shutil
import sys
import tempfile
from contextlib import closing, suppress
from html import unescape
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast import crash
from holdfast.agent import crashes
from holdfast.errors import BadOption, HoldfastError, NotInDump, RollbackBlocked, UnknownRevision
from holdfast.schemas import effect_json
from holdfast.travel import Held, Look, parse_path
from holdfast.web import agents, app, back, dumps, export, health, runs, state, timeline, why, words
from holdfast.web.asked import Asked
from holdfast.web.brief import brief, change_brief
from holdfast.web.question import QUESTIONS
from tests import warm
from tests.cli.conftest import FORMS, PAGE
from tests.conftest import SOAK, from_outside_nothing
from tests.web.conftest import ROOT, serving
from tests.web.sample import BIDI, SCRIPT

AGENTS = ("trip-7", "trip-8", "hostile")
VIEWS = (
    timeline.timeline, timeline.marks, timeline.series, timeline.numbers, state.state, state.items, state.diff,
    runs.runs, runs.history, back.back, dumps.dumps,
)  # fmt: skip
BOUND = 300_000
"""Bytes of what one view gives of the sample, whose largest text has ten million."""


def ask(view, store, **fields):
    """What a view gives, after a look at whether it can be sent."""
    found = view(store, Asked(query={name: str(value) for name, value in fields.items()}))
    assert len(json.dumps(found, allow_nan=False)) < BOUND, view.__name__
    return found


def rendered(template, view, path="/", place="", *, changes=True):
    """The page that the house would make of it."""
    return words.page(
        template, view=view, asked=Asked(), path=path, here=lambda **_: "", place=place, navigation=[], tabs=[],
        changes=changes, csrf="", who="",
    ).decode()  # fmt: skip


def act(action, store, **fields):
    with store.acting_as("ada"):
        return action(store, Asked(form={name: str(value) for name, value in fields.items()}), "ada")


@pytest.fixture(scope="module")
def looked(made):
    with holdfast.open(made, create=False, readonly=True, inert=True) as store:
        yield store


@pytest.fixture
def changed(made, tmp_path):
    """A copy of the sample that may be changed, as the page opens it."""
    shutil.copytree(made, tmp_path / "store")
    with holdfast.open(tmp_path / "store", create=False, inert=True) as store:
        yield store


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
def test_every_view_is_bounded_json_whatever_the_agent_holds(looked, view):
    for agent in AGENTS:
        ask(view, looked, agent=agent)


def test_every_twin_is_documented_with_its_keys(looked):
    rows = re.findall(r"^\| `(/api/[^`?]*)[^`]*` \| `([^`]*)` \|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    told = {path.removesuffix("/NAME"): (form, set(re.findall(r"`(\w+)`", keys))) for path, form, keys in rows}
    run, file = looked.runs("trip-7")[0].id, crash.dumps(Path(looked.place, "dumps"))[0].name
    fields = {"agent": "trip-7", "path": "messages", "at": "main", "id": run, "file": file}
    assert len(told) == len(app.VIEWS)
    for view in app.VIEWS:
        form, keys = told[f"/api{view.base}" if view.base != "/" else "/api/agents"]
        assert form == view.schema
        known = FORMS.get(form, {}).keys() - {"schema"}
        more = {"q": "a"} if view.base == "/search" else {}
        assert view.read(looked, Asked(query={**fields, **more})).keys() == known | keys, view.path


# -- timeline ---------------------------------------------------------------------------------------------------------


def history(store, seed):
    """Some history with branches, rollbacks and tags."""
    dice = random.Random(seed)
    names = ["main"]
    with closing(store.agent("a", when=None)) as agent:
        agent.state["n"] = 0
        agent.checkpoint("first")
    for _ in range(dice.randint(3, 25)):
        with closing(store.agent("a", branch=dice.choice(names), when=None)) as agent:
            for _ in range(dice.randint(1, 3)):
                agent.state["n"] += 1
                agent.checkpoint()
            if dice.random() < 0.4:
                agent.rollback(dice.choice(agent.log()))
            if dice.random() < 0.3:
                names.append(f"b{len(names)}")
                store.branch("a", names[-1], f"id:{dice.choice(agent.log(all=True)).id}")
            if dice.random() < 0.2:
                store.tag("a", f"t{dice.randint(0, 3)}", f"id:{dice.choice(agent.log(all=True)).id}")


@pytest.mark.parametrize("seed", range(200 if SOAK else 4))
def test_windows_of_a_history_are_the_history(tmp_path, seed):
    with holdfast.open(tmp_path / "store") as store:
        history(store, seed)
        whole = ask(timeline.timeline, store, agent="a", n=1000)["checkpoints"]
        agent = store.agent("a", create=False, readonly=True)
        assert [one["id"] for one in whole] == [one.id for one in agent.log(all=True)]
        parts, page = [], 1
        while True:
            window = ask(timeline.timeline, store, agent="a", n=10, page=page)
            parts += window["checkpoints"]
            page += 1
            if not window["more"]:
                break
        place = ("id", "lane", "previous", "abandoned")
        assert [[one[name] for name in place] for one in parts] == [[one[name] for name in place] for one in whole]
        line, at = [], f"id:{agent.head.id}"
        while at:
            window = ask(timeline.timeline, store, agent="a", n=10, at=at)
            line += window["checkpoints"]
            at = f"id:{window['older']}" if window["older"] else ""
        assert [one["id"] for one in line] == [one.id for one in agent.log()]
        assert {(one["lane"], one["abandoned"]) for one in line} == {(0, False)}
        reached = {one.id for name in agent.branches() for one in store.agent("a", branch=name, readonly=True).log()}
        assert {one["id"] for one in whole if one["abandoned"]} == {one["id"] for one in whole} - reached
        at = {one["id"]: number for number, one in enumerate(whole)}
        for number, one in enumerate(whole):  # a line that goes down its lane meets nobody before its parent
            between = whole[number + 1 : at.get(one["previous"], len(whole))]
            assert one["lane"] not in {other["lane"] for other in between if one["previous"]}


def test_the_first_lane_is_mains_and_a_rollback_is_told(looked):
    told = ask(timeline.timeline, looked, agent="trip-7")
    lanes = {one["label"]: one["lane"] for one in told["checkpoints"]}
    assert lanes["mail tried"] == lanes["began"] == 0
    assert lanes["hostel chosen"] != 0 != lanes["complaint"]
    (gone,) = told["rollbacks"]
    ids = {one["id"]: one["label"] for one in told["checkpoints"]}
    assert (ids[gone["from"]], ids[gone["to"]]) == ("complaint", "before the mistake")


def test_a_figure_is_that_of_each_checkpoint(looked):
    agent = looked.agent("trip-7", create=False, readonly=True)
    values = ask(timeline.series, looked, agent="trip-7", of="state.budget")["values"]
    assert values == {one.id: one.state["budget"] for one in agent.log(all=True)}
    values = ask(timeline.series, looked, agent="trip-7", of="len(messages)")["values"]
    assert values == {one.id: len(one.state["messages"]) for one in agent.log(all=True)}
    assert ask(timeline.series, looked, agent="trip-7", of="size")["values"][agent.head.id] == agent.head.size_bytes
    assert set(ask(timeline.series, looked, agent="trip-7", of="nothing.there")["values"].values()) == {None}
    assert "budget" in ask(timeline.numbers, looked, agent="trip-7")["paths"]
    assert ask(timeline.series, looked, agent="hostile", of="len(huge)")["values"].popitem()[1] == 10_000_000
    for written in ("__import__('os')", "budget * 2", "sum(i for i in messages)", "len(budget * 2)"):
        with pytest.raises(BadOption):  # nothing is evaluated in the page's own process
            ask(timeline.series, looked, agent="trip-7", of=written)


def test_what_no_branch_was_looked_at_for_is_not_called_abandoned(looked, monkeypatch):
    before = ask(timeline.timeline, looked, agent="trip-7")["checkpoints"]
    assert any(one["abandoned"] for one in before)
    assert not any(one["unknown"] for one in before)
    monkeypatch.setattr(timeline, "BRANCHES_MOST", 1)
    told = ask(timeline.timeline, looked, agent="trip-7")
    assert told["unseen_branches"] == 1
    assert not any(one["abandoned"] for one in told["checkpoints"])
    assert next(one["unknown"] for one in told["checkpoints"] if one["label"] == "hostel chosen")
    assert not next(one["unknown"] for one in told["checkpoints"] if one["label"] == "mail tried")


# -- state ------------------------------------------------------------------------------------------------------------

keys = st.text(max_size=6) | st.sampled_from([SCRIPT, BIDI, "]'\"", "a b", "[0]"])
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=5)
)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(keys | st.integers(), inner, max_size=5)
)


@settings(max_examples=1_000 if SOAK else 10, deadline=None)
@given(values, st.integers(1, 4))
def test_a_tree_of_pages_is_the_state(value, size):
    with tempfile.TemporaryDirectory() as folder, holdfast.open(f"{folder}/store") as store:
        with closing(store.agent("a", when=None)) as agent:
            agent.state = {"it": value, "large": [{"n": at, "inner": value} for at in range(120)]}
            agent.checkpoint()
            look = Look.of(agent.head.state)
        assert _rebuilt(look, parse_path("it"), size) == value
        assert _rebuilt(look, parse_path("state.large[119].inner"), size) == value
        assert look.items(("large",), 100, 102).pairs[1][0] == 101
        with pytest.raises(BadOption):
            look.items(("large", 120), 0, 1)


def _rebuilt(look, path, size):
    """What a person sees who opens everything, page by page."""
    found, start = look.items(path, 0, size), 0
    if not found.kind:
        return found.pairs[0][1]
    pairs = []
    while start < found.count:
        page = look.items(path, start, start + size)
        for key, value in page.pairs:
            inside = isinstance(value, Held | dict | list)
            pairs.append((key, _rebuilt(look, (*path, key), size) if inside else value))
        start += size
    return dict(pairs) if found.kind == "dict" else [value for _, value in pairs]


def test_every_line_of_the_tree_leads_to_its_place(looked):
    seen, waiting = 0, ["state"]
    while waiting and seen < 300:
        told = ask(state.items, looked, agent="hostile", path=waiting.pop(), n=20)
        for node in told["items"]:
            seen += 1
            if node["open"]:
                waiting.append(node["path"])
            elif node["path"]:
                assert ask(state.text, looked, agent="hostile", path=node["path"])["text"][:100]
                (alone,) = ask(state.items, looked, agent="hostile", path=node["path"])["items"]
                assert (alone["name"], alone["path"]) == (node["name"], node["path"])
    assert seen > 20


def test_keys_that_read_alike_are_told_apart(tmp_path):
    with holdfast.open(tmp_path / "store") as store:
        with store.agent("a", when=None) as agent:
            agent.state["keys"] = {1: "number", "1": "text", None: "none", "": "empty"}
            agent.checkpoint()
        found = ask(state.items, store, agent="a", path="keys")["items"]
        assert [one["name"] for one in found] == ["[1]", "1", "[None]", "''"]
        for one in found:
            assert ask(state.text, store, agent="a", path=one["path"])["text"] == one["text"]


def test_a_number_that_is_cut_can_be_read_whole(tmp_path):
    with holdfast.open(tmp_path / "store") as store:
        with store.agent("a", when=None) as agent:
            agent.state["product"] = 7**1_000
            agent.checkpoint()
        (node,) = ask(state.items, store, agent="a")["items"]
        assert (len(node["text"]) < 300, node["rest"]) == (True, True)
        assert ask(state.text, store, agent="a", path=node["path"])["text"] == str(7**1_000)


def test_a_long_text_comes_in_parts(looked):
    first = ask(state.text, looked, agent="hostile", path="huge")
    assert first["count"] == 10_000_000
    assert first["text"] == "x" * len(first["text"])
    last = ask(state.text, looked, agent="hostile", path="huge", **{"from": 9_999_990})
    assert last["text"] == "x" * 10


def test_bookkeeping_is_hidden_until_somebody_asks(looked):
    names = [one["name"] for one in ask(state.state, looked, agent="hostile")["items"]["items"]]
    assert "__kept__" not in names
    assert "__kept__" in [one["name"] for one in ask(state.items, looked, agent="hostile", bookkeeping=1)["items"]]
    assert ask(state.diff, looked, agent="hostile")["hidden"] == 1
    assert ask(state.diff, looked, agent="hostile", bookkeeping=1)["hidden"] == 0


def test_pages_of_the_state_without_bookkeeping_have_each_section_once(looked):
    whole = [one["name"] for one in ask(state.items, looked, agent="hostile")["items"]]
    found, start = [], 0
    while start is not None:
        page = ask(state.items, looked, agent="hostile", n=1, **{"from": start})
        found += [one["name"] for one in page["items"]]
        start = page["next"]
    assert found == whole
    assert len(found) == page["count"] == 5


@pytest.mark.parametrize("path", ["[{[]:1}]", "[[1]]", "state[{}]", "messages[{1: {}}]", "notes[(1, [])]"])
def test_a_key_that_cannot_be_one_is_refused(looked, path):
    for view in (state.items, state.text, state.conversation):
        with pytest.raises(BadOption):
            ask(view, looked, agent="hostile", path=path)


def test_json_on_a_page_is_written_as_json():
    said = words.environment().from_string("<pre>{{ it | plain }}</pre>").render(it={"a": "it's <b>"})
    assert said == "<pre>{&#34;a&#34;: &#34;it&#39;s &lt;b&gt;&#34;}</pre>"


def test_what_is_no_list_is_no_conversation_and_a_form_says_what_it_lacks(looked, changed):
    with pytest.raises(BadOption, match=r"state\.budget is no list of messages"):
        ask(state.conversation, looked, agent="trip-7", path="budget")
    with pytest.raises(BadOption, match="name is missing in the form"):
        act(back.tag, changed, agent="trip-7")
    with pytest.raises(BadOption, match="agent is missing in the address"):
        ask(state.conversation, looked)


def test_messages_are_a_conversation_and_search_finds_them(looked):
    told = ask(state.conversation, looked, agent="trip-7", path="state.messages")
    assert [one["role"] for one in told["messages"]] == ["system", "user", "assistant"]
    (hit, *_) = ask(state.search, looked, agent="trip-7", q="TWO NIGHTS in")["hits"]
    assert hit["path"] == "state.messages[1].content"
    assert any(SCRIPT in one["text"] for one in ask(state.search, looked, agent="hostile", q="onerror")["hits"])


def test_a_diff_marks_words_and_opens_no_file(looked, made):
    told = ask(state.diff, looked, agent="trip-7", old="before the mistake", new="answer corrected")
    (one,) = told["changes"]
    assert ["-", " 182"] in one["words"]
    assert ["+", " 189"] in one["words"]
    dump = next(Path(made, "dumps").iterdir())
    with pytest.raises(UnknownRevision):
        ask(state.diff, looked, agent="trip-7", old=str(dump), new="main")
    with pytest.raises(UnknownRevision):
        ask(state.diff, looked, agent="trip-7", old="main", new="/etc/passwd")


def test_of_the_first_checkpoint_everything_is_new(looked):
    told = ask(state.diff, looked, agent="trip-7", new="began")
    assert (told["old"], told["new"]["label"]) == (None, "began")
    assert {(one["where"], one["kind"]) for one in told["changes"]} == {
        (f"state.{name}", "added") for name in ("budget", "messages", "preferences")
    }
    assert ask(state.diff, looked, agent="trip-7", other="trip-8")["old"]["label"] == "mail tried"


def test_an_instance_in_a_diff_reads_as_its_class_and_its_fields():
    value = {"$type": "trip.Place", "$version": 1, "$data": {"file": "here", "line": 3}}
    made = words.environment().from_string('{% from "parts.html" import text %}{{ text(value) }}').render(value=value)
    assert unescape(made) == 'trip.Place({"file": "here", "line": 3})'


def test_an_array_is_its_type_and_shape(tmp_path):
    numpy = pytest.importorskip("numpy")
    with holdfast.open(tmp_path / "store") as store:
        with store.agent("a", when=None) as agent:
            agent.state["weights"] = numpy.zeros((3, 224), dtype="float32")
            agent.state["large"] = numpy.zeros((1_000, 200), dtype="float32")
            agent.state["too large to look at"] = numpy.zeros((1_000, 2_000), dtype="float32")
            agent.checkpoint()
        found = ask(state.state, store, agent="a")["items"]["items"]
        told = ["float32, 3 by 224", "float32, 1000 by 200", "a large value, 7.6 MiB"]
        assert [node["text"] for node in found] == told
        for node in found:
            assert "dtype=float32" in ask(state.text, store, agent="a", path=node["path"])["text"]
        assert brief(numpy.zeros((2, 2)))["$text"] == "float64, 2 by 2"


@given(values)
@settings(max_examples=2_000 if SOAK else 50, deadline=None)
def test_what_is_cut_is_json_and_bounded(value):
    told = brief([value] * 100, 10, 5)
    assert len(json.dumps(told, allow_nan=False)) < 20_000
    made = holdfast.Change(("a", value if isinstance(value, str) else 1), "changed", value, [value])
    json.dumps(change_brief(made), allow_nan=False)


def test_no_key_hides_another_or_poses_as_a_mark():
    assert brief({1: "int", "1": "str"}) == {"$type": "dict", "$items": [[1, "int"], ["1", "str"]]}
    long = brief({"k" * 300 + end: end for end in "ab"})
    assert [value for _, value in long["$items"]] == ["a", "b"]
    for posing in ({"$text": "nothing", "$type": "more"}, {"…": {"$type": "more"}}):
        assert brief([posing])[0]["$type"] == "dict"
    many = brief({at: at for at in range(100)})
    assert len(many["$items"]) + many["$more"] == 100
    assert brief({"a": {"$type": "int", "$text": "0x1"}}, marked=True) == {"a": {"$type": "int", "$text": "0x1"}}


def test_an_integer_that_browsers_would_round_is_text():
    assert brief([2**53, 2**53 + 1, -(2**60)]) == [
        2**53, {"$type": "int", "$text": "9007199254740993"}, {"$type": "int", "$text": str(-(2**60))},
    ]  # fmt: skip


def test_an_edit_is_a_branch_and_leaves_the_rest_as_it_is(changed):
    before = changed.agent("trip-7", create=False, readonly=True).head
    way = act(
        state.edit,
        changed,
        agent="trip-7",
        at="asked",
        path="state.preferences['window seat']",
        value="false",
        branch="aisle",
    )
    assert way.startswith("/diff/trip-7?")
    made = changed.agent("trip-7", branch="aisle", create=False, readonly=True)
    assert made.state["preferences"]["window seat"] is False
    assert made.head.label.startswith("ada ")  # which is cut at its end
    assert changed.agent("trip-7", create=False, readonly=True).head == before
    deep, nested = ({"value": "[" * depth + "]" * depth} for depth in (100_000, 200))
    for fields in (
        {"value": "{"},
        {"value": "[NaN]"},
        deep,
        nested,
        {"path": "state"},
        {"path": "nowhere.at.all"},
        {"branch": "aisle"},
    ):
        with pytest.raises(HoldfastError):
            act(state.edit, changed, **{"agent": "trip-7", "path": "budget", "value": "1", "branch": "b", **fields})
    assert "b" not in changed.agent("trip-7", create=False, readonly=True).branches()


# -- runs, going back -------------------------------------------------------------------------------------------------


def test_calls_of_a_run_are_told_with_how_long_they_took(looked):
    (info,) = ask(runs.runs, looked, agent="trip-7")["runs"]
    told = ask(runs.run, looked, agent="trip-7", id=info["id"])
    assert [one["tool"] for one in told["effects"]] == ["search_flights", "book_flight", "book_hotel"]
    assert all(0.01 < one["took_s"] < 60 for one in told["effects"])
    with pytest.raises(BadOption):
        ask(runs.run, looked, agent="trip-7", id="another")


def test_a_run_of_many_large_calls_is_paged(tmp_path, monkeypatch):
    @holdfast.tool()
    def chat_at_length(messages):
        return messages

    def many(agent):
        for number in range(130):
            chat_at_length([{"role": "user", "content": f"{number} " + "m" * 2_000}] * 40)

    monkeypatch.setattr(export, "BYTES_MOST", 100_000)
    with holdfast.open(tmp_path / "store") as store:
        with store.agent("a", when=None) as agent:
            agent.run(holdfast.durable(many))
        (info,) = ask(runs.runs, store, agent="a")["runs"]
        pages = [ask(runs.run, store, agent="a", id=info["id"], page=page) for page in (1, 2, 3)]
        numbers = [one["number"] for page in pages for one in page["effects"]]
        assert len(set(numbers)) == len(numbers) == pages[0]["total"] == 130
        assert [page["more"] for page in pages] == [70, 10, 0]
        opened = ask(runs.run, store, agent="a", id=info["id"], call=numbers[125])
        assert (opened["page"], opened["call"]) == (3, numbers[125])
        (shown,) = [one for one in opened["effects"] if one["number"] == numbers[125]]
        assert len(shown["args"]["messages"]) == 40
        assert shown["args"]["messages"][0]["content"].endswith("m" * 1_000)
        assert len(rendered("run.html", pages[0], "/run/a")) < BOUND
        assert len(json.dumps(export.collected(store, "a"))) < 300_000


def test_the_history_of_a_run_is_given_whole_in_parts(tmp_path, monkeypatch):
    @holdfast.tool()
    def think(about):
        return {"about": about, 7: "seven"}

    def many(agent):
        for number in range(25):
            think(f"{number} " + "m" * 5_000)
        return "r" * 5_000

    def told(store, after=0):
        return runs.effects(store, Asked(query={"agent": "a", "id": "7", "after": str(after)}))

    with holdfast.open(tmp_path / "store") as store:
        with store.agent("a", when=None) as agent:
            agent.run(holdfast.durable(many).options(id="7"))
            by_verb = [effect_json(one, full=True) for one in agent.effects(run="7")]
        whole = told(store)
        assert (whole["more"], whole["next"], whole["run"]["result"]) == (0, None, "r" * 5_000)
        monkeypatch.setattr(runs, "WHOLE_BYTES", 40_000)
        parts, after = [], 0
        while after is not None:
            part = told(store, after)
            assert len(json.dumps(part)) < 60_000
            assert ("run" in part, "events" in part) == (not after, not after)
            parts += part["effects"]
            after = part["next"]
        assert parts == whole["effects"]
        assert [{name: value for name, value in one.items() if name != "attempts"} for one in parts] == by_verb
        monkeypatch.setattr(runs, "ONE_BYTES", 2_000)
        assert {one["cut"] for one in told(store)["effects"]} == {True}


def test_every_attempt_of_a_call_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(holdfast.run.resilience.CLOCK, "sleep", lambda _: None)
    tries = []

    @holdfast.tool(name="attempts.pay", retries=3, probe=lambda _effect: holdfast.Absent())
    def pay():
        tries.append(1)
        if len(tries) == 1:
            raise holdfast.FailedBeforeEffect("no connection")
        if len(tries) == 2:
            raise TimeoutError("no answer")
        return "paid"

    @holdfast.tool(name="attempts.once")
    def once():
        return 1

    @holdfast.durable(name="attempts.both")
    def both(agent):
        once()
        return pay()

    with holdfast.open(tmp_path / "store") as store:
        with store.agent("a", when=None) as agent:
            assert agent.run(both.options(id="7")) == "paid"
        first, second = ask(runs.run, store, agent="a", id="7")["effects"]
        assert (first["attempts"], second["attempt"]) == ([], 3)
        assert [(one["number"], one["how"]) for one in second["attempts"]] == [
            (1, "not done"), (2, "not done"), (3, "done"),
        ]  # fmt: skip
        assert second["attempts"][1]["why"] == "the probe found nothing"
        times = [time for one in second["attempts"] for time in (one["at"], one["ended"])]
        assert times == sorted(times)


def test_a_doubt_is_decided_with_a_reason_and_a_name(changed):
    (doubt,) = ask(runs.runs, changed, agent="trip-7")["in_doubt"]
    fields = {
        "agent": "trip-7",
        "effect": doubt["id"],
        "decision": "done",
        "result": '"sent"',
        "why": "it is in the outbox",
    }
    deep = {"result": "[" * 100_000}
    for missing in ({"why": " "}, {"decision": ""}, {"result": "sent"}, {"result": "-Infinity"}, deep):
        with pytest.raises(BadOption):
            act(runs.resolve, changed, **{**fields, **missing})
    act(runs.resolve, changed, **fields)
    assert not ask(runs.runs, changed, agent="trip-7")["in_doubt"]
    said = next(one for one in ask(runs.history, changed, agent="trip-7")["events"] if one["what"] == "decision")
    assert (said["by"], said["why"]) == ("ada", "it is in the outbox")


def test_a_signal_is_sent_and_a_run_cancelled_by_whoever_is_at_the_page(changed):
    (info,) = ask(runs.runs, changed, agent="trip-8")["runs"]
    act(runs.signal, changed, agent="trip-8", signal="approved", value="[1]", run=info["id"])
    (sent,) = ask(runs.run, changed, agent="trip-8", id=info["id"])["signals"]
    assert (sent["value"], sent["by"], sent["status"]) == ([1], "ada", "pending")
    act(runs.cancel, changed, agent="trip-8", run=info["id"])
    assert ask(runs.run, changed, agent="trip-8", id=info["id"])["run"]["status"] == "cancelled"


def test_a_call_that_several_branches_have_is_told_once(changed):
    before = [(one["number"], one["branch"]) for one in ask(timeline.marks, changed, agent="trip-7")["effects"]]
    for name in ("one", "other"):
        changed.branch("trip-7", name)
    assert [(one["number"], one["branch"]) for one in ask(timeline.marks, changed, agent="trip-7")["effects"]] == before
    recent = ask(runs.runs, changed, agent="trip-7")["effects"]
    assert [(one["number"], one["branch"]) for one in recent] == before
    exported = export.collected(changed, "trip-7")["effects"]
    assert len(exported) == 3 * len(before)
    assert [(one["number"], one["branch"]) for one in exported if not one["again"]] == before


def test_a_fork_waits_on_its_branch_for_a_worker(changed):
    (info,) = ask(runs.runs, changed, agent="trip-7")["runs"]
    way = act(runs.fork, changed, agent="trip-7", run=info["id"], position="book:0/0", new="again")
    assert "branch=again" in way
    assert "again" in changed.agent("trip-7", create=False, readonly=True).branches()


def test_going_back_needs_the_name_and_the_plan_that_was_shown(changed):
    shown = ask(back.back, changed, agent="trip-7", to="before the mistake")
    assert [one["tool"] for one in shown["plan"]["blocked"]] == ["send_mail"]
    fields = {
        "agent": "trip-7",
        "to": f"id:{shown['plan']['target']['id']}",
        "head": shown["head"]["id"],
        "plan": shown["plan"]["digest"],
        "typed": "trip-7",
    }
    with pytest.raises(RollbackBlocked):
        act(back.rollback, changed, **fields)
    accept = shown["plan"]["blocked"][0]["id"]
    again = ask(back.back, changed, agent="trip-7", to="before the mistake", accept=accept)
    assert not again["plan"]["blocked"]
    fields["plan"] = again["plan"]["digest"]
    for wrong in ({"typed": "trip"}, {"head": "0" * 64}, {"plan": shown["plan"]["digest"]}):
        with pytest.raises(BadOption):
            act(back.rollback, changed, **{**fields, "accept": accept, **wrong})
    act(back.rollback, changed, **fields, accept=accept)
    agent = changed.agent("trip-7", create=False, readonly=True)
    assert agent.head.label == "before the mistake"
    assert next(one["by"] for one in agent.events() if one["what"] == "rollback") == "ada"


def test_going_back_names_the_files_that_will_change(tmp_path, monkeypatch):
    monkeypatch.setattr(back, "FILES", 2)
    root = tmp_path / "work"
    root.mkdir()
    with holdfast.open(tmp_path / "store") as store, store.agent("a", when=None, workspace=root) as agent:
        agent.checkpoint("began")
        for name in ("one", "three", "two"):
            (root / name).write_text("x")
        agent.checkpoint("done")
        plan = ask(back.back, store, agent="a", to="began")["plan"]
    assert [(one["path"], one["kind"]) for one in plan["files"]] == [("one", "removed"), ("three", "removed")]
    assert plan["more_files"] == 1


def test_a_diff_shows_the_lines_of_files_with_their_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(state, "FILE_LINES", 9)
    root = tmp_path / "work"
    root.mkdir()
    (root / "app.py").write_text("".join(f"line {number}\n" for number in range(1, 41)))
    (root / "data").write_bytes(b"\0one")
    with holdfast.open(tmp_path / "store") as store, store.agent("a", when=None, workspace=root) as agent:
        agent.checkpoint("before")
        (root / "app.py").write_text((root / "app.py").read_text().replace("line 5\n", "five\n<b>\n"))
        (root / "data").write_bytes(b"\0two")
        agent.checkpoint("after")
        found = ask(state.diff, store, agent="a", old="before", new="after")
    with serving(tmp_path / "store") as page, page.browser() as visitor:
        assert "<ins>&lt;b&gt;</ins>" in visitor.get("/diff/a?old=before&new=after").text
    app, data = found["files"]
    assert (app["path"], app["kind"], app["more_lines"], data["lines"]) == ("app.py", "changed", 1, [])
    assert app["lines"][:2] == [["@", None, None, ""], [" ", 2, 2, "line 2"]]
    assert app["lines"][4:] == [
        ["-", 5, None, "line 5"], ["+", None, 5, "five"], ["+", None, 6, "<b>"], [" ", 6, 7, "line 6"],
        [" ", 7, 8, "line 7"],
    ]  # fmt: skip
    assert found["more_files"] == 0


def test_no_call_is_undone_that_the_plan_did_not_show(tmp_path):
    undone = []

    @holdfast.tool(compensate=lambda effect: undone.append(effect.args))
    def rent_a_car(at):
        return at

    with holdfast.open(tmp_path / "store") as store:
        with store.agent("a", when=None) as agent:
            agent.checkpoint("began")
            rent_a_car("shown")
            agent.checkpoint("done")
        fields = {"agent": "a", "to": "began", "typed": "a"}
        shown = ask(back.back, store, agent="a", to="began")
        with store.agent("a", when=None):
            rent_a_car("not shown")
        again = ask(back.back, store, agent="a", to="began")
        assert again["head"] == shown["head"]
        fields["head"] = shown["head"]["id"]
        with pytest.raises(BadOption):
            act(back.rollback, store, **fields, plan=shown["plan"]["digest"])
        assert undone == []
        act(back.rollback, store, **fields, plan=again["plan"]["digest"])
        assert len(undone) == 2


def test_branches_and_tags_are_set_and_taken_away(changed):
    act(back.branch, changed, agent="trip-7", name="other", at="asked")
    act(back.tag, changed, agent="trip-7", name="kept", at="began")
    told = ask(back.back, changed, agent="trip-7")
    assert {"other"} <= {one["name"] for one in told["branches"]}
    assert {"kept", "baseline"} == {one["name"] for one in told["tags"]}
    act(back.tag, changed, agent="trip-7", name="kept", remove="1")
    assert {"baseline"} == {one["name"] for one in ask(back.back, changed, agent="trip-7")["tags"]}


# -- dumps ------------------------------------------------------------------------------------------------------------


def test_dumps_of_one_fault_are_one_group_that_comes_back(changed):
    told = ask(dumps.dumps, changed)
    assert sorted((one["cause"], one["count"], one["state"]) for one in told["groups"]) == [
        ("ValueError", 1, "open"), ("ZeroDivisionError", 2, "open"),
    ]  # fmt: skip
    key = next(one["key"] for one in told["groups"] if one["count"] == 2)
    act(dumps.resolve, changed, key=key, why="guests are counted now")
    group = next(one for one in ask(dumps.dumps, changed)["groups"] if one["key"] == key)
    assert (group["state"], group["resolved"]["by"]) == ("resolved", "ada")
    file = Path(changed.place, "dumps", dumps.SAID)
    old = json.loads(file.read_text()) | {"at": "2020-01-01T00:00:00+00:00"}
    file.write_text(f'{json.dumps(old)}\n{json.dumps(old | {"at": "once"})}\n{{"cut sho')
    assert next(one for one in ask(dumps.dumps, changed)["groups"] if one["key"] == key)["state"] == "came back"


def test_dumps_that_are_no_crash_belong_to_the_agents_that_they_name(looked, made):
    """Captured, or taken by a watchpoint: no history tells of them, and they do."""
    listed = {one["name"]: one["dumps"] for one in ask(agents.agents, looked)["agents"]}
    files = [path.name for path in crash.dumps(Path(made, "dumps"))]
    assert listed["trip-7"] == len(files) > 0
    told = [one for one in ask(timeline.timeline, looked, agent="trip-7")["crashes"] if one["branch"] == "main"]
    assert [one["dump"] for one in told] == files
    assert {one["what"] for one in told} == {"dump"}
    assert {one["checkpoint"] for one in told} <= {
        one.id for one in looked.agent("trip-7", readonly=True).log(all=True)
    }
    assert "ZeroDivisionError" in rendered("timeline.html", ask(timeline.timeline, looked, agent="trip-7"))


def test_what_failed_can_be_asked_for_where_something_has(tmp_path):
    @holdfast.durable
    def fails(agent):
        raise ValueError("no")

    with holdfast.open(tmp_path / "store") as store, store.agent("a", when=None) as agent:
        agent.checkpoint()
        assert 'data-status="failed"' not in rendered("agents.html", ask(agents.agents, store))
        with suppress(ValueError):
            agent.run(fails)
        view = ask(agents.agents, store)
        assert view["failed"]
        assert 'data-status="failed">Failed' in rendered("agents.html", view)


def test_a_dump_that_a_crash_has_noted_is_told_once(tmp_path):
    with holdfast.open(tmp_path / "store") as store, store.agent("a", when=None) as agent:
        agent.checkpoint("began")
        path = Path(crash.capture(to=f"{store.place}/dumps"))
        told = ask(timeline.timeline, store, agent="a")["crashes"]
        assert [(one["what"], one["checkpoint"]) for one in told] == [("dump", agent.head.id)]
        body = {"what": "crash", "error": "E", "branch": "main", "checkpoint": agent.head.id, "dump": str(path)}
        crashes.note(store, store._agent_row("a"), body)
        assert [one["what"] for one in ask(timeline.timeline, store, agent="a")["crashes"]] == ["crash"]
        assert ask(agents.agents, store)["agents"][0]["dumps"] == 1


def test_a_dump_is_read_by_its_name_in_the_folder_alone(looked, made):
    for file in crash.dumps(Path(made, "dumps")):
        told = ask(dumps.dump, looked, file=file.name)
        assert told["frames"][-1]["function"] == "divide"
        assert told["commands"]["debug"] == f"holdfast dump open {file.name} --store {made}"
    for name in ("../store.db", "/etc/passwd", str(file), "", "."):
        with pytest.raises((NotInDump, BadOption)):
            ask(dumps.dump, looked, file=name)


def test_threads_and_tasks_of_a_dump_are_opened_one_by_one(tmp_path):
    with from_outside_nothing():
        warm.run([sys.executable, "-m", "tests.web.sample", str(tmp_path / "store"), "crowd"], cwd=ROOT, check=True)
    with holdfast.open(tmp_path / "store") as store:
        (file,) = crash.dumps(tmp_path / "store" / "dumps")
        told = ask(dumps.dump, store, file=file.name)
        by_name = {one["name"]: one for one in told["stacks"]}
        assert {"sleeper", "porter", "guest"} <= by_name.keys()
        assert "for porter" in by_name["guest"]["note"]
        assert told["stack"] is told["object"] is None

        def values(name):
            opened = ask(dumps.dump, store, file=file.name, stack=by_name[name]["stack"])["stack"]
            return {one[0]: one for frame in opened["frames"] for one in frame["locals"]}

        assert values("sleeper")["cargo"][1] == "{'apples': 3}"
        inside = ask(dumps.dump, store, file=file.name, object=values("porter")["bags"][2])["object"]
        assert (inside["type"], [one[0] for one in inside["locals"]]) == ("list", ["[0]", "[1]"])
        (way,) = ask(dumps.dump, store, file=file.name, object=inside["locals"][1][2])["object"]["locals"]
        long = ask(dumps.dump, store, file=file.name, object=way[2])["object"]
        assert len(long["locals"]) + long["more_locals"] == 1_000
        for wrong in ({"stack": "thread:999"}, {"stack": "x"}):
            with pytest.raises(NotInDump):
                ask(dumps.dump, store, file=file.name, **wrong)
        assert ask(dumps.dump, store, file=file.name, object=2**50)["object"]["reason"]
        hostile = bytearray(file.read_bytes())
        dice = random.Random(7)
        for _ in range(20):
            at = dice.randrange(len(hostile))
            hostile[at] ^= 1 << dice.randrange(8)
            file.write_bytes(hostile)
            with suppress(HoldfastError):
                listed = ask(dumps.dump, store, file=file.name)["stacks"]
                for one in listed[:3]:
                    ask(dumps.dump, store, file=file.name, stack=one["stack"], object=dice.randrange(500))


def test_every_command_names_the_store_that_is_shown(looked, tmp_path):
    """Whoever copies it may stand in a directory that has another store, with an agent of the same name."""
    (file, *_) = crash.dumps(crash.folder_of(looked.place))
    (run,) = {one["id"] for one in ask(runs.runs, looked, agent="trip-7")["runs"]}
    views = {
        "back.html": ask(back.back, looked, agent="trip-7", to="asked"),
        "runs.html": ask(runs.runs, looked, agent="trip-7"),
        "run.html": ask(runs.run, looked, agent="trip-7", id=run),
        "dump.html": ask(dumps.dump, looked, file=file.name),
        "health.html": ask(health.health, looked),
    }
    pages = {name: unescape(rendered(name, view, place=looked.place, changes=False)) for name, view in views.items()}
    for name, page in pages.items():
        told = re.findall(r"<code[^>]*>(holdfast (?!ui)[^<]*)</code>", page)
        assert told, name
        assert all(one.endswith(f" --store {looked.place}") for one in told), told
    spaced = tmp_path / "a store"
    holdfast.open(spaced).close()
    with holdfast.open(spaced, create=False) as store:
        store.agent("a b").checkpoint()
        command = ask(back.back, store, agent="a b", to="~0")["command"]
    assert shlex.split(command)[-2:] == ["--store", str(spaced)]


# -- why --------------------------------------------------------------------------------------------------------------


def answered(store, **fields):
    for _ in range(200):
        job = ask(why.why, store, agent="trip-7", **fields)["job"]
        if job["state"] != "running":
            return job
    raise AssertionError(job)


def test_questions_are_answered_by_a_process_of_their_own(looked):
    found = answered(looked, ask="bisect", when="budget < 500")
    assert found["answer"]["first_bad"]["label"] == "hotel booked"
    assert found["progress"]["done"] == found["progress"]["total"] > 0
    wrong = answered(looked, ask="bisect", when="open('/etc/passwd')")
    assert wrong["state"] == "failed"
    assert "not part of the language" in wrong["error"]["message"]


def test_the_page_says_of_a_bisection_all_that_the_command_says(tmp_path):
    """What qualifies an answer stands on the page in the command's words, and nothing there is surer than it."""
    with holdfast.open(tmp_path / "store", durability="batched") as store:

        def history(name, budgets, after=lambda agent: None):
            with store.agent(name, when=None) as agent:
                for number, budget in enumerate(budgets):
                    agent.state["n"], agent.state["budget"] = number, budget
                    agent.checkpoint(f"c{number}")
                after(agent)

        def forget(agent):
            agent.tag("first", "c0")
            store.retain(holdfast.Policy(last=3))

        def spoil(agent):
            for name in ("c3", "c4"):
                agent.mark(name, "corrupt", "a test")

        history("forgotten", [1] * 7 + [-1] * 9, forget)
        history("text", ["much"] * 4 + [4, 5])
        history("typo", [1, 2, 3])
        history("corrupt", [1] * 5 + [-1] * 3, spoil)
        history("again", [1, 1, -1, -1, 2, 3])
        history("long", [1, -1, *[1] * 1_000])
        for name, when, said in (
            ("forgotten", "budget < 0", ("one of 12 checkpoints that were forgotten", "Perhaps the first bad")),
            ("text", "budget < 0", ("4 could not be checked", "None was found to be bad")),
            ("typo", "bugdet < 0", ("state.bugdet is in no checkpoint that was looked at",)),
            ("corrupt", "budget < 0", ("one of 2 checkpoints before it that cannot be checked",)),
            ("long", "budget < 0", ("only the ends were checked; --all looks at", "None was found to be bad")),
            ("again", "budget < 0", ("#4 c3, then good again", "state.budget  (a state with only this never existed)")),
        ):
            found = store.agent(name, readonly=True).bisect(when=when, fresh=True)
            asked = {"agent": name, "ask": "bisect", "when": when}
            view = ask(why.why, store, **asked)
            while view["job"]["state"] == "running":
                view = ask(why.why, store, **asked)
            page = unescape(rendered("why.html", view))
            told = found.to_json()
            facts = told["answer"] + told["notes"][:-1]  # how often the check was asked: now it is known
            texts = [one["text"] for one in facts if one["name"] not in {"first bad", "last good"}]
            assert all(text in page and text in str(found) for text in texts), (name, texts)
            assert all(text in page for text in said), name
        told = QUESTIONS["bisect"](store, {"agent": "long", "when": "budget < 0", "every": "1"}, lambda *_: None)
        assert (told["first_bad"]["label"], told["exact"]) == ("c1", True)


def test_every_question_has_an_answer(looked):
    def told(ask, **fields):
        return QUESTIONS[ask](looked, {"agent": "trip-7", **fields}, lambda *_: None)

    assert told("blame", path="budget")["checkpoint"]["label"] == "hotel booked"
    assert told("check", rules="budget > 0\nlen(messages) < 3")["total"] > 0
    assert told("drift", baseline="baseline", paths="budget")["drift"] is True
    same = answered(looked, ask="drift", baseline="~0")
    page = unescape(rendered("why.html", ask(why.why, looked, agent="trip-7", ask="drift", baseline="~0")))
    assert same["answer"]["drift"] is False
    assert "Nothing was found that no rule allows" in page
    assert "not followed by statistics, which need 82 values" in page
    assert told("explain")["agent"] == "trip-7"
    with pytest.raises(BadOption):
        told("check", rules=" ")


def test_a_question_is_cancelled_and_at_most_some_are_asked_at_once(looked, monkeypatch):
    monkeypatch.setattr(why, "FIRST_S", 0.0)
    for number in range(why.AT_ONCE):
        assert (
            ask(why.why, looked, agent="trip-7", ask="explain", check=f"budget > {number}")["job"]["state"] == "running"
        )
    with pytest.raises(BadOption):
        ask(why.why, looked, agent="trip-7", ask="explain", check="budget > 99")
    jobs = [one for one in why._jobs.values() if one.state == "running"]
    for number in range(why.AT_ONCE):
        told = ask(why.why, looked, agent="trip-7", ask="explain", check=f"budget > {number}", cancel=1)
        assert told["job"]["state"] in {"ended", "done"}
    for job in jobs:
        job.wait(60)
        assert job._process.poll() is not None


# -- export -----------------------------------------------------------------------------------------------------------


def test_what_looks_secret_is_not_in_an_export(tmp_path):
    secret, other = "sk-proj-4fA9xQ2LmN8vB3kT7wZ1yC5r", "correct-horse-battery"
    with holdfast.open(tmp_path / "store") as store:
        with store.agent("a", when=None) as agent:
            agent.state = {"api_key": other, "notes": [f"use {other} there", "x" * 1_995 + secret], "budget": 3}
            agent.checkpoint(f"with {secret}")
            agent.state["notes"].append({"password": "hunter2-hunter2"})
            agent.state["api_key"] = f"{other}-2"
            agent.checkpoint("two")
        text = json.dumps(export.collected(store, "a"))
    assert "budget" in text
    for hidden in (secret, secret[:12], other, "hunter2"):
        assert hidden not in text


def test_a_secret_is_left_out_of_an_export_wherever_it_stands(tmp_path):
    deep = {"password": {"a": {"b": {"c": {"d": [{"e": "hunter2-deep"}]}}}}}
    with holdfast.open(tmp_path / "store") as store:
        with store.agent("a", when=None) as agent:
            agent.state = {
                "auth": {"password": 12345678}, "password": 87654321, "copies": {"n": 12345678, "of": 3},
                "before": "y" * 990 + "learnt-later " + "hunter2-deep", "z" * 195 + "hunter2-deep": 1,
            }  # fmt: skip
            agent.checkpoint("one: hunter2-deep, 12345678")
            agent.state["deep"] = deep
            agent.checkpoint("two")
            del agent.state["deep"]
            agent.state["auth"]["password"] = 23456789
            agent.state["headers"] = [["Authorization", "learnt-later"]]
            agent.checkpoint("three")
        told = export.collected(store, "a")
    text = json.dumps(told)
    assert "copies.of" in told["series"]
    for hidden in ("12345678", "23456789", "87654321", "hunter2", "learnt"):
        assert hidden not in text
