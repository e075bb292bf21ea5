"""`holdfast dump export`: JSON has everything, text and HTML are safe to look at, whatever the dump holds."""

from __future__ import annotations

import base64
import html.parser
import json

from holdfast.crash import Limits, capture, kinds, open_dump
from holdfast.crash.pages import FORMATS
from holdfast.errors import HoldfastError
from tests.crash import trip_program

# The process that runs the tests is large, and the machine may do much else.
FEW = Limits(deadline_s=600, part_s=300, census_objects=1_000, objects=5_000)


def exported(path, form):
    with open_dump(path) as dump:
        return "".join(FORMATS[form](dump))


def test_json_has_every_thread_task_object_and_part(path):
    text = exported(path, "json")
    assert text.isascii()
    data = json.loads(text)
    assert data["schema"] == "holdfast.dump/1"
    with open_dump(path) as dump:
        assert [one["type_name"] for one in data["exceptions"]] == [one.type_name for one in dump.exceptions]
        assert [one["name"] for one in data["threads"]] == [one.name for one in dump.threads]
        assert [one["name"] for one in data["tasks"]] == [one.name for one in dump.tasks]
        assert [one["number"] for one in data["objects"]] == [one.number for one in dump.objects()]
        assert data["process_and_machine"] == dump.part(kinds.PROCESS)
        assert data["agent"] == dump.extras(kinds.AGENT)
        assert {one["file"] for one in data["sources"]} == set(dump.sources)
        assert data["head"]["id"] == dump.head["id"]
        assert data["complete"] is True


def test_json_follows_references_and_says_what_is_gone(path):
    data = json.loads(exported(path, "json"))
    plan = data["threads"][0]["frames"][-1]
    values = dict(plan["locals"])
    desk = data["objects"][values["desk"]["ref"]]
    assert desk["number"] == values["desk"]["ref"]
    assert desk["type_name"].endswith("Desk")
    assert "offers" in dict(desk["attributes"])


def test_values_that_json_lacks_have_a_form_of_their_own(tmp_path):
    raw, nothing, endless = b"\x00\xff", float("nan"), float("inf")
    dump = capture("odd", to=tmp_path, limits=FEW)
    data = json.loads(exported(dump, "json"))
    frame = next(one for one in data["threads"][0]["frames"] if one["function"].startswith("test_values_that_json"))
    values = dict(frame["locals"])
    assert base64.b64decode(values["raw"]["bytes"]) == raw
    assert values["nothing"] == {"float": repr(nothing)}
    assert values["endless"] == {"float": repr(endless)}


def test_text_begins_with_the_page_and_has_every_stack(path):
    text = exported(path, "text")
    assert text.startswith("ExceptionGroup (2 exceptions): planning failed\n")
    for words in ("Thread worker-0", "Task price-Rome", "wait_for_price", "process and machine", "trip: starting for"):
        assert words in text
    assert all(line.isprintable() for line in text.split("\n"))


class Page(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags = set()
        self.attributes = set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


def test_html_runs_and_loads_nothing(tmp_path):
    evil = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'</style></title>&amp;"
    try:
        raise ValueError(evil)
    except ValueError as error:
        path = capture(evil, error=error, to=tmp_path, limits=FEW)
    text = exported(path.rename(tmp_path / "<b>&\"x'.hfdump"), "html")
    page = Page()
    page.feed(text)
    assert page.tags == {"html", "head", "meta", "title", "style", "body", "div"}
    assert page.attributes == {"lang", "charset", "http-equiv", "content", "class"}
    assert "default-src 'none'" in text
    assert "&lt;script&gt;" in text


def test_deeply_nested_data_is_cut_instead_of_failing(path, tmp_path):
    deep = {}
    for _ in range(200):
        deep = {"in": deep}
    file = tmp_path / "deep.hfdump"
    file.write_bytes(trip_program.sealed([("head", deep), ("proc", deep), ("agnt", {"name": "x", "data": deep})]))
    for form in FORMATS:
        try:
            exported(file, form)
        except HoldfastError:
            continue
