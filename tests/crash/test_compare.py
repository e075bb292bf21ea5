"""`holdfast dump diff`: another failure, parting stacks, growth and changed surroundings are told; noise is not."""

from __future__ import annotations

import json

import pytest

from holdfast.crash import open_dump
from holdfast.crash.pages import compare
from tests.crash import trip_program


@pytest.fixture
def changed(honest, tmp_path):
    """``changed(heap=function)``: the same dump, with a part made anew from what it was."""

    def make(**parts):
        file = tmp_path / "changed.hfdump"
        chunks = [(kind, parts[kind](payload) if kind in parts else payload) for kind, payload in honest]
        file.write_bytes(trip_program.sealed(chunk for chunk in chunks if chunk[1] is not None))
        return file

    return make


def compared(old, new):
    with open_dump(old) as before, open_dump(new) as after:
        found = compare(before, after)
    told = found.as_json() | {"differs": found.differs()}
    json.dumps(told, allow_nan=False)
    return told, "\n".join(line.text for line in found.lines())


def test_a_dump_does_not_differ_from_itself(path):
    found, text = compared(path, path)
    assert not found["differs"]
    assert "The same failure" in text
    assert [key for key, value in found.items() if isinstance(value, list) and value] == []


def test_the_same_failure_at_another_time_is_recognised(path, tmp_path):
    found, text = compared(path, trip_program.failed(tmp_path))
    assert found["same_failure"]
    assert found["stack"] == []
    assert "The same failure" in text


def test_another_exception_is_another_failure(path, changed):
    def other(payload):
        payload = json.loads(json.dumps(payload))
        if "chain" in payload:  # the other chunks of this kind are frames of its exceptions
            payload["chain"][0]["type"] = "ValueError"
        return payload

    found, text = compared(path, changed(excp=other))
    assert not found["same_failure"]
    assert found["differs"]
    assert "Another failure." in text


def test_stacks_show_where_they_part(path, changed):
    def shorter(payload):
        if not payload["failing"]:
            return payload
        return {**payload, "frames": [*payload["frames"][:4], {"file": "x.py", "function": "elsewhere", "mine": True}]}

    found, text = compared(path, changed(stck=shorter))
    assert ["+", "elsewhere (x.py)"] in found["stack"]
    assert ["-", "plan (trip.py)"] in found["stack"]
    assert "  + elsewhere (x.py)" in text


def test_types_that_grew_are_named_the_most_bytes_first(path, changed):
    def grown(payload):
        return {**payload, "objects": payload["objects"] + 900_000,
                "types": [["app.Offer", 900_000, 50_000_000], ["tuple", 10**6, 10**9], *payload["types"]]}  # fmt: skip

    found, text = compared(path, changed(heap=grown))
    assert [row[0] for row in found["types"]][:2] == ["tuple", "app.Offer"]
    assert "app.Offer: 0 -> 900,000, 0 B -> 47.7 MiB" in text
    assert "heap objects" in text


def test_places_that_allocated_more_are_named(path, changed, tmp_path):
    old = tmp_path / "old.hfdump"
    changed(heap=lambda payload: {**payload, "places": [["trip.py:12", 10, 1000]]}).rename(old)
    found, text = compared(old, changed(heap=lambda payload: {**payload, "places": [["trip.py:12", 500, 90_000]]}))
    assert found["places"] == [["trip.py:12", 10, 500, 1000, 90_000]]
    assert "Places that allocated more" in text


def test_values_packages_environment_and_parts_that_changed(path, changed):
    def local(payload):
        if not payload["failing"]:
            return payload
        last = payload["frames"][-1]
        values = list(last["locals"])
        values[values.index("to") + 1] = "elsewhere"
        return {**payload, "frames": [*payload["frames"][:-1], {**last, "locals": values}]}

    new = changed(
        stck=local,
        mods=lambda payload: {**payload, "distributions": {**payload["distributions"], "rich": "99.0"}},
        envr=lambda payload: {**payload, "values": {**payload["values"], "TZ": "Mars/Olympus"}},
        logs=lambda payload: None,
        indx=lambda payload: None,
    )
    found, text = compared(path, new)
    assert ["to", "'dumps'", "'elsewhere'"] in found["locals"]
    assert [row[2] for row in found["packages"] if row[0] == "rich"] == ["99.0"]
    assert ["TZ", "Mars/Olympus"] in [[row[0], row[2]] for row in found["environment"]]
    assert ["log records", "whole", "absent"] in found["parts"]
    assert "Mars/Olympus" in text


def test_what_one_of_them_lacks_is_not_compared(path, changed):
    found, _ = compared(path, changed(heap=lambda payload: None, mods=lambda payload: None, envr=lambda payload: None))
    assert found["types"] == found["packages"] == found["environment"] == []
    assert "heap objects" not in [row[0] for row in found["figures"]]
