"""One agent's history: naming checkpoints, reading the past, moving through it, and never losing any of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest

import holdfast
from holdfast.agent import branch as sealing
from holdfast.errors import BadName, BadOption, NothingToUndo, ReadOnly, Stale, UnknownAgent, UnknownRevision
from tests.conftest import unsaved

NAMES = [
    "plain",
    "user@example.com",
    "tenant:42",
    "a#1",
    "path/to/agent",
    "~2",
    "id:abcd",
    "ünïcode 🙂",
    "a@b@c",
    "#17",
]


@pytest.fixture
def agent(store):
    return store.agent("a")


def steps(agent, *labels):
    """One checkpoint per label; the state is the list of labels so far."""
    return [step(agent, label) for label in labels]


def step(agent, label):
    agent.state.setdefault("steps", []).append(label)
    return agent.checkpoint(label)


def seen(state):
    return list(state["steps"])


# -- names and revisions --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_any_text_can_name_an_agent_a_branch_a_tag_and_a_label(store, name):
    agent = store.agent(name)
    first = step(agent, name)
    second = step(agent, "second")
    assert store.resolve(name) == (name, "")
    assert store.resolve(f"{name}@second") == (name, "second")
    assert store.resolve(f"{name}@~1") == (name, "~1")
    agent.tag(f"t {name}".replace("@", "-"), first)
    assert agent.at(f"t {name}".replace("@", "-")) == first
    branch = agent.branch(f"b {name}".replace("@", "-"), at=first)
    assert agent.at(f"b {name}".replace("@", "-")) == first
    assert branch.branch_name == f"b {name}".replace("@", "-")
    assert agent.at(f"id:{second.id[:8]}") == second
    if not name.startswith(("~", "#", "id:")):
        assert agent.at(name) == first


def test_an_agents_full_name_wins_over_a_revision(store):
    step(store.agent("user"), "example.com")
    step(store.agent("user@example.com"), "x")
    assert store.resolve("user@example.com") == ("user@example.com", "")
    assert store.resolve("user@example.com@x") == ("user@example.com", "x")
    assert store.resolve("user@other") == ("user", "other")
    with pytest.raises(UnknownAgent, match="usr"):
        store.resolve("usr@other")
    with pytest.raises(UnknownAgent, match="Did you mean 'user'"):
        store.agent("usr", create=False)


@pytest.mark.parametrize("bad", ["", " ", " a", "a ", "a\nb", "\x00", "x" * 1025, "\ud800", None, 3])
def test_names_that_could_not_be_found_again_are_refused(store, agent, bad):
    step(agent, "one")
    for call in (lambda: store.agent(bad), lambda: agent.tag(bad), lambda: agent.branch(bad)):
        with pytest.raises(BadName):
            call()


def test_revisions_in_all_forms(agent):
    made = steps(agent, "one", "two", "three", "two", "five")
    assert agent.at() == agent.at("") == agent.at(None) == made[4]
    assert agent.at("~0") == made[4]
    assert agent.at("~4") == made[0]
    assert agent.at("two") == made[3], "the newest such label"
    assert agent.at("two~1") == made[2]
    assert agent.at("#1") == made[0]
    assert agent.at("#5") == made[4]
    assert agent.at("#5~3") == made[1]
    assert agent.at("main") == made[4]
    assert agent.at("main~2") == made[2]
    assert agent.at(f"id:{made[2].id}") == made[2]
    assert agent.at(f"id:{made[2].id[:8]}~1") == made[1]
    assert agent.at(f"id:{made[2].id[:8].upper()}") == made[2]
    assert agent.at(made[1]) == made[1]
    agent.tag("here", "#2")
    assert agent.at("here~1") == made[0]
    side = agent.branch("side", at="three")
    extra = step(side, "six")
    assert agent.at("side") == extra
    assert agent.at("side~1") == made[2]
    assert side.at("#4") == extra
    assert agent.at("#4") == made[3]
    with pytest.raises(UnknownRevision):
        agent.at("six")  # a label on another branch


@pytest.mark.parametrize("bad", ["nothing", "~5", "#0", "#6", "main~5", "id:ab", "id:zzzz", "~-1", "~x", "id:"])
def test_revisions_that_name_nothing(agent, bad):
    steps(agent, "one", "two", "three", "four", "five")
    with pytest.raises(UnknownRevision):
        agent.at(bad)


def test_branch_then_tag_then_label(agent):
    made = steps(agent, "x", "y", "z")
    assert agent.at("y") == made[1]
    agent.tag("y", made[2])
    assert agent.at("y") == made[2]
    with pytest.raises(BadName):
        agent.branch("y")
    agent.branch("b", at=made[0])
    with pytest.raises(BadName):
        agent.tag("b")
    with pytest.raises(BadName):
        agent.branch("b")
    step(agent, "b")
    assert agent.at("b") == made[0], "the branch, not the label"


@pytest.mark.parametrize("name", ["~1", "#1", "id:abcd", "id:"])
def test_what_a_revision_says_by_itself_is_no_name(store, agent, name):
    """Otherwise the checkpoint that it means could not be named any more."""
    made = steps(agent, "one", name, "three")
    calls = (
        lambda: agent.tag(name),
        lambda: agent.branch(name),
        lambda: store.tag(agent.name, name),
        lambda: store.branch(agent.name, name),
    )
    for call in calls:
        with pytest.raises(BadName):
            call()
    if name in {"~1", "#1"}:
        assert agent.at(name) == made[1 if name == "~1" else 0], "not the label"


def test_a_label_with_a_tilde(agent):
    made = steps(agent, "zero", "one", "one~1", "two~1")
    assert agent.at("one~1") == made[0], "one before the label"
    assert agent.at("two~1") == made[3], "there is no two"


def test_a_revision_of_an_agent_without_checkpoints(agent):
    assert agent.head is None
    assert agent.log() == []
    assert list(agent.changes()) == []
    for call in (agent.at, lambda: agent.tag("t"), lambda: agent.branch("b"), lambda: agent.rollback("~0")):
        with pytest.raises(UnknownRevision):
            call()
    for call in (agent.undo, agent.redo):
        with pytest.raises(NothingToUndo):
            call()


def test_a_checkpoint_of_another_agent_is_refused(store, agent):
    step(agent, "one")
    other = store.agent("other")
    foreign = step(other, "foreign")
    for call in (lambda: agent.at(foreign), lambda: agent.rollback(foreign), lambda: agent.branch("b", at=foreign)):
        with pytest.raises(UnknownRevision):
            call()
    with pytest.raises(UnknownRevision):
        agent.at(f"id:{foreign.id}")


# -- reading the past -----------------------------------------------------------------------------------


def test_log_newest_first_with_limit(agent):
    made = steps(agent, "one", "two", "three")
    assert agent.log() == made[::-1]
    assert agent.log(limit=2) == [made[2], made[1]]
    assert [c.depth for c in agent.log()] == [3, 2, 1]
    assert [c.parent_id for c in agent.log()] == [made[1].id, made[0].id, ""]
    assert all(c.branch == "main" for c in agent.log())


@unsaved
def test_at_reads_any_state_without_moving(agent, monkeypatch):
    monkeypatch.setattr(sealing, "SEAL_CHECKPOINTS", 4)
    made = steps(agent, *map(str, range(13)))
    agent.state["steps"].append("not saved")
    for number, checkpoint in enumerate(made):
        past = agent.at(checkpoint).state
        assert seen(past) == [str(n) for n in range(number + 1)]
        with pytest.raises(ReadOnly):
            past["steps"].append("x")
        with pytest.raises(ReadOnly):
            past["new"] = 1
    assert seen(agent.state)[-1] == "not saved"
    assert agent.head == made[-1]
    assert agent.dirty


def test_checkpoints_describe_themselves(agent):
    before = datetime.now(UTC)
    step(agent, "one")
    made = step(agent, "two")
    assert made.label == "two"
    assert abs(made.time - before) < timedelta(minutes=30)  # no more: the clock may be set
    assert made.time.tzinfo is not None
    assert made.kind == "checkpoint"
    assert made.target_id == ""
    assert len(made.id) == 64
    assert made.short_id == made.id[:12]
    assert list(made.sections) == ["steps"]
    assert made.digest == agent.digest
    assert made.operations == 1
    assert made.size_bytes > 0
    data = json.loads(json.dumps(made.to_json()))
    assert data["id"] == made.id
    assert data["parent"] == agent.at("one").id
    assert [change.where for change in made.changes()] == ["state.steps[1]"]
    assert "two" in repr(made)


def test_digest_is_equal_exactly_when_states_are(agent):
    first = step(agent, "one")
    agent.state["steps"].append("two")
    second = agent.checkpoint()
    agent.state["steps"].pop()
    third = agent.checkpoint()
    assert first.digest == third.digest != second.digest
    assert first.id != third.id


def test_diff_between_any_two(agent):
    steps(agent, "one", "two")
    agent.state["n"] = {"a": 1, "b": [1, 2, 3]}
    agent.checkpoint("three")
    agent.state["n"]["a"] = 2
    del agent.state["n"]["b"][0]
    found = agent.diff("one", "three")
    assert [(c.where, c.kind) for c in found] == [("state.steps[1]", "added"), ("state.n", "added")]
    live = agent.diff()
    assert {c.where for c in live} == {"state.n.a", "state.n.b[0]"}
    assert "- state.n.a: 1" in str(live)
    assert "+ state.n.a: 2" in str(live)
    assert not agent.diff("two", "two")
    assert str(agent.diff("two", "two")) == "no differences"
    assert {c.kind for c in agent.diff("three", "one")} == {"removed"}
    assert json.dumps(found.to_json())
    agent.checkpoint("four")
    assert len(agent.diff()) == 0


def test_changes_are_the_mutation_log(agent, monkeypatch):
    monkeypatch.setattr(sealing, "SEAL_CHECKPOINTS", 3)
    steps(agent, "one", "two", "three", "four", "five", "six", "seven")
    agent.state["n"] = 1
    agent.state["n"] = "a long value " * 20
    del agent.state["steps"][0]
    agent.checkpoint("eight")
    changes = list(agent.changes())
    assert [c.where for c in changes[:3]] == ["state.steps", "state.steps[1]", "state.steps[2]"]
    assert [(c.where, c.old, c.new) for c in changes[-2:]] == [  # what the checkpoint amounts to
        ("state.steps[0]", "one", holdfast.MISSING),
        ("state.n", holdfast.MISSING, "a long value " * 20),
    ]
    assert changes[-1].label == "eight"
    assert changes[-1].checkpoint == agent.head.id
    times = [c.when for c in changes]
    assert all(when.tzinfo is not None for when in times)
    assert abs(times[-1] - agent.head.time) < timedelta(minutes=30)
    assert [c.where for c in agent.changes(since="seven")] == [c.where for c in changes[-2:]]
    assert list(agent.changes(since="eight")) == []
    assert [c.where for c in agent.changes(since="#6")][:1] == ["state.steps[6]"]


# -- moving --------------------------------------------------------------------------------------------


def test_rollback_keeps_the_abandoned_future_in_sight(agent):
    made = steps(agent, "one", "two", "three")
    preview = agent.plan_rollback("one")
    assert preview.target == made[0]
    assert preview.abandons == [made[2], made[1]]
    assert len(preview.diff) == 2
    assert agent.rollback("one") == made[0]
    assert seen(agent.state) == ["one"]
    assert agent.log() == [made[0]]
    assert agent.log(all=True) == made[::-1]
    assert agent.abandoned() == [made[2]]
    assert agent.info().abandoned == 1
    assert seen(agent.at(made[2]).state) == ["one", "two", "three"]
    other = step(agent, "other")
    assert other.depth == 2
    assert other.parent_id == made[0].id
    saved = agent.branch("saved", at=made[2])
    assert seen(saved.state) == ["one", "two", "three"]
    assert agent.abandoned() == []
    agent.rollback(made[2])
    assert seen(agent.state) == ["one", "two", "three"]
    assert agent.abandoned() == [other]
    assert [event["what"] for event in agent.events(limit=3)] == ["rollback", "open", "branch"]


@pytest.mark.parametrize("seal", [2, 3, 256])
def test_rollback_to_every_checkpoint_and_back(store_path, monkeypatch, seal):
    monkeypatch.setattr(sealing, "SEAL_CHECKPOINTS", seal)
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        made = steps(agent, *map(str, range(8)))
        for number in (3, 7, 0, 5, 7, 1):
            agent.rollback(made[number])
            assert seen(agent.state) == [str(n) for n in range(number + 1)]
            assert agent.digest == made[number].digest
            assert not agent.dirty
            assert store.verify().ok
        step(agent, "on")
        assert store.verify().ok
    with holdfast.open(store_path) as store:
        assert seen(store.agent("a").state) == ["0", "1", "on"]


@pytest.mark.parametrize("kind", ["list", "set", "dict", "text"])
@pytest.mark.parametrize("move", ["rollback", "undo"])
def test_going_back_to_where_a_large_section_was_of_another_kind(agent, move, kind):
    """What is known of the keys of a large dict says nothing of a list or a set."""
    before = {"list": list(range(3_000)), "set": set(range(3_000)), "dict": dict.fromkeys(range(3_000)), "text": "t"}
    agent.state["s"] = before[kind]
    agent.checkpoint("before")
    agent.state["s"] = {f"k{number}": "x" * 50 for number in range(2_000)}
    if move == "rollback":
        agent.checkpoint("a dict")
    agent.state["s"]["k5"] = 1
    agent.checkpoint("one of its keys")
    agent.state["s"]["k6"] = 1
    agent.checkpoint("another one")
    if move == "rollback":
        agent.rollback("before")
    else:
        agent.undo()
        agent.undo()
    assert holdfast.plain(agent.state["s"]) == before[kind]
    agent.state["on"] = True
    agent.checkpoint("on")
    assert holdfast.plain(agent.at("on").state["s"]) == before[kind]


@pytest.mark.parametrize("move", ["rollback", "undo", "branch"])
def test_unsaved_changes_are_saved_first(agent, move):
    steps(agent, "one", "two")
    agent.state["steps"].append("unsaved")
    if move == "rollback":
        agent.rollback("one")
        assert seen(agent.state) == ["one"]
    elif move == "undo":
        agent.undo()
        assert seen(agent.state) == ["one", "two"]
    else:
        side = agent.branch("side")
        assert seen(side.state) == ["one", "two", "unsaved"]
    third = next(c for c in agent.log(all=True) if c.depth == 3)
    assert seen(third.state) == ["one", "two", "unsaved"]


@unsaved
def test_a_branch_at_a_revision_leaves_unsaved_changes_alone(agent):
    steps(agent, "one", "two")
    agent.state["steps"].append("unsaved")
    side = agent.branch("side", at="one")
    assert seen(side.state) == ["one"]
    assert seen(agent.state) == ["one", "two", "unsaved"]
    assert agent.dirty


def test_branches_are_lines_of_their_own(store, agent):
    steps(agent, "one", "two")
    side = agent.branch("side", at="one")
    assert store.agent("a", branch="side") is side
    step(side, "left")
    step(agent, "right")
    assert seen(side.state) == ["one", "left"]
    assert seen(agent.state) == ["one", "two", "right"]
    assert agent.branches() == ["main", "side"]
    assert [c.label for c in side.log()] == ["left", "one"]
    assert [c.branch for c in side.log()] == ["side", "main"]
    assert [c.label for c in agent.log(all=True)] == ["right", "left", "two", "one"]
    deeper = side.branch("deeper")
    step(deeper, "down")
    assert [c.label for c in deeper.log()] == ["down", "left", "one"]
    with pytest.raises(UnknownRevision, match="no branch"):
        store.agent("a", branch="none")
    assert store.verify().ok


def test_tags_move_and_go(agent):
    made = steps(agent, "one", "two")
    agent.tag("t", "one")
    assert made[0].tags == ["t"]
    agent.tag("t")
    assert agent.tags() == {"t": made[1]}
    assert made[0].tags == []
    agent.untag("t")
    assert agent.tags() == {}
    with pytest.raises(UnknownRevision):
        agent.untag("t")
    assert [event["what"] for event in agent.events()][:3] == ["untag", "tag", "tag"]


def test_undo_and_redo(agent):
    made = steps(agent, "one", "two", "three")
    undone = agent.undo()
    assert (undone.kind, undone.target_id) == ("undo", made[2].id)
    assert seen(agent.state) == ["one", "two"]
    assert agent.undo().target_id == made[1].id
    assert seen(agent.state) == ["one"]
    redone = agent.redo()
    assert (redone.kind, redone.target_id) == ("redo", made[1].id)
    assert seen(agent.state) == ["one", "two"]
    assert agent.redo().target_id == made[2].id
    assert seen(agent.state) == ["one", "two", "three"]
    with pytest.raises(NothingToUndo):
        agent.redo()
    assert agent.undo().target_id == made[2].id, "what was done again can be undone again"
    assert agent.undo().target_id == made[1].id
    assert agent.undo().target_id == made[0].id
    assert dict(agent.state) == {}
    with pytest.raises(NothingToUndo):
        agent.undo()
    for number in range(3):
        assert agent.redo().target_id == made[number].id
    assert seen(agent.state) == ["one", "two", "three"]
    assert len(agent.log()) == 3 + 10, "nothing is rewritten"


def test_a_new_checkpoint_ends_redo(agent):
    steps(agent, "one", "two")
    agent.undo()
    step(agent, "other")
    with pytest.raises(NothingToUndo):
        agent.redo()
    assert seen(agent.state) == ["one", "other"]
    agent.undo()
    agent.undo()
    assert "steps" not in agent.state
    agent.redo()
    agent.redo()
    assert seen(agent.state) == ["one", "other"]


def test_undo_survives_reopening_and_sealing(store_path, monkeypatch):
    monkeypatch.setattr(sealing, "SEAL_CHECKPOINTS", 3)
    with holdfast.open(store_path) as store:
        steps(store.agent("a"), *map(str, range(7)))
    for expected in range(6, 0, -1):
        with holdfast.open(store_path) as store:
            agent = store.agent("a")
            agent.undo()
            assert seen(agent.state) == [str(n) for n in range(expected)]
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        for expected in range(2, 8):
            agent.redo()
            assert seen(agent.state) == [str(n) for n in range(expected)]
        assert store.verify().ok


@unsaved
def test_nodes_that_a_rollback_removed_are_stale_and_others_live_on(agent):
    agent.state["kept"] = {"list": [1]}
    kept = agent.state["kept"]["list"]
    agent.checkpoint("one")
    agent.state["gone"] = {"x": 1}
    gone = agent.state["gone"]
    kept.append(2)
    agent.checkpoint("two")
    agent.rollback("one")
    assert list(kept) == [1]
    kept.append(3)
    assert agent.state["kept"]["list"] == [1, 3]
    with pytest.raises(Stale):
        gone["x"] = 2


def test_validity(agent):
    made = steps(agent, "one", "two")
    assert made[0].validity == "good"
    agent.mark("one", "suspect", "odd answer")
    assert (made[0].validity, made[0].validity_reason) == ("suspect", "odd answer")
    agent.mark(made[0], "corrupt")
    assert (made[0].validity, made[0].validity_reason) == ("corrupt", "")
    agent.mark("#1", "good", "looked again")
    assert made[0].validity == "good"
    with pytest.raises(BadOption):
        agent.mark("one", "fine")
    judged = [event["validity"] for event in agent.events() if event["what"] == "validity"]
    assert judged == ["good", "corrupt", "suspect"]
    assert agent._store.verify().ok


# -- metadata ------------------------------------------------------------------------------------------


@dataclass
class LateType:
    x: int


def test_metadata_is_stored_once_per_change(store_path):
    with holdfast.open(store_path) as store:
        agent = store.agent("a", config={"model": "x", "temperature": 0.5})
        made = steps(agent, "one", "two", "three")
        data = made[0].metadata
        assert data["holdfast"]
        assert data["python"].startswith("3.")
        assert data["format"] == 1
        assert data["dependencies"]["apsw"]
        assert len(data["config"]) == 64
        assert made[2].metadata == data
        assert store.stats()["counts"]["node"] == 2, "what is the same for the process, and the line that asked"
        step(store.agent("b", config={"model": "x", "temperature": 0.5}), "another agent")
        assert store.stats()["counts"]["node"] == 2
    with holdfast.open(store_path) as store:
        other = step(store.agent("a", config={"model": "y"}), "other configuration")
        assert other.metadata["config"] != data["config"]
        assert store.stats()["counts"]["node"] == 4
        assert store.agent("a").at("one").metadata == data


def test_types_that_are_registered_later_show_in_metadata(store_path):
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        first = step(agent, "one")
        holdfast.open(store_path, types=[LateType])
        agent.state["late"] = LateType(3)
        second = agent.checkpoint("two")
        assert not any("LateType" in name for name in first.metadata["types"])
        assert any("LateType" in name for name in second.metadata["types"])


# -- handles -------------------------------------------------------------------------------------------


def test_context_managers_and_one_handle_per_branch(store_path):
    with holdfast.open(store_path) as store, store.agent("a") as agent:
        assert store.agent("a") is agent
        step(agent, "one")
    assert agent.closed
    assert store.closed
    with holdfast.open(store_path) as store:
        assert [info.name for info in store.agents()] == ["a"]
        info = store.agents()[0]
        assert (info.branches, info.checkpoints, info.head.label, info.abandoned) == (["main"], 1, "one", 0)
        assert info.updated >= info.head.time
        assert info.updated - info.created > timedelta(minutes=-30)  # the clock may be set back


def test_readonly_handles_change_nothing(store_path):
    with holdfast.open(store_path) as store:
        steps(store.agent("a"), "one", "two")
    with holdfast.open(store_path, readonly=True) as store:
        agent = store.agent("a")
        before = agent.digest
        calls = [
            agent.checkpoint, agent.undo, agent.redo, lambda: agent.rollback("one"), lambda: agent.branch("b"),
            lambda: agent.tag("t"), lambda: agent.untag("t"), lambda: agent.mark("one", "suspect"),
            lambda: agent.state["steps"].append(1), lambda: agent.state.update(x=1),
            lambda: store.tag("a", "t"), lambda: store.branch("a", "b"), lambda: store.mark("a", "one", "suspect"),
            lambda: store.untag("a", "t"),
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(ReadOnly):
                call()
        with pytest.raises(UnknownAgent):
            store.agent("new")
        assert agent.digest == before
        assert not agent.dirty
        assert [c.label for c in agent.log()] == ["two", "one"]
        assert seen(agent.at("~1").state) == ["one"]
        assert len(agent.diff("one", "two")) == 1


def test_replacing_the_whole_state(agent):
    step(agent, "one")
    agent.state = {"new": {"x": (1, 2)}, "steps": ["y"]}
    agent.checkpoint("two")
    assert agent.at("two").state == {"steps": ["y"], "new": {"x": (1, 2)}}
    agent.rollback("one")
    assert agent.state == {"steps": ["one"]}


@unsaved
def test_html_is_escaped(store):
    nasty = "<script>alert(1)</script>"
    evil = store.agent(nasty)
    evil.state[nasty] = [nasty]
    made = evil.checkpoint(nasty)
    evil.state[nasty].append(nasty)
    for html in (evil._repr_html_(), store._repr_html_(), made._repr_html_(), evil.diff()._repr_html_()):
        assert "<script>" not in html
        assert "&lt;script&gt;" in html


def test_awkward_section_names_and_keys(store_path):
    names = ["", " ", "a.b", "\ud800", "0", "ünï", "x" * 5_000]
    keys = [None, 1, "1", (1, "x"), True + 1, b"k", "\udfff", 2.5, frozenset({1})]
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        for name in names:
            agent.state[name] = {"name": name}
        agent.checkpoint("names")
        for name in names:
            for key in keys:
                agent.state[name][key] = [key]
                agent.state[name][key].append({key: "inside"})
        agent.checkpoint("keys")
        for name in names:
            for key in keys[::2]:
                del agent.state[name][key]
        agent.checkpoint("less")
        assert store.verify().ok
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        assert list(agent.state) == names
        assert list(agent.at("keys").state[""]) == ["name", *keys]
        assert list(agent.state["\ud800"]) == ["name", *keys[1::2]]
        agent.undo()
        assert list(agent.state["\ud800"]) == ["name", *keys]
        assert len(list(agent.changes())) > len(names) * len(keys)
        assert agent.diff("names", "less")
        assert store.verify().ok


def test_empty_checkpoints_are_kept(agent):
    first = step(agent, "one")
    second = agent.checkpoint("nothing new")
    assert second.parent_id == first.id
    assert second.digest == first.digest
    assert second.operations == 0
