"""What LangGraph puts into a thread comes back exact, or is refused by name; the official serializer stands beside."""

from __future__ import annotations

import datetime as dt
import logging
import re
import subprocess
import sys
import threading
from collections import defaultdict, deque
from typing import Any

import msgspec
import numpy as np
import ormsgpack
import pytest
from langchain_core import messages as lc
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.types import Interrupt, Send

from holdfast import errors
from holdfast.codec import wire
from holdfast.codec.types import REGISTRY, Registry
from holdfast.codec.values import decode, encode
from holdfast.contrib.langgraph.types import MAX_ERROR_CHARS, allow, registry_for
from tests.codec.kinds import fields_of
from tests.contrib import langgraph_values as kinds
from tests.contrib.langgraph_values import ERRORS, EXACT, INEXACT, REFUSED, TYPES, VALUES


@pytest.fixture
def registry() -> Registry:
    return registry_for(REGISTRY, TYPES)


def same(x: Any, y: Any) -> bool:
    """Whether types and values are the same, all the way down."""
    if type(x) is not type(y):
        return False
    if type(x) in {list, tuple, deque}:
        limits = (x.maxlen, y.maxlen) if type(x) is deque else (0, 0)
        return limits[0] == limits[1] and len(x) == len(y) and all(map(same, x, y))
    if isinstance(x, dict):
        factories = (x.default_factory, y.default_factory) if type(x) is defaultdict else (0, 0)
        return factories[0] is factories[1] and same(list(x.items()), list(y.items()))
    if type(x) in {set, frozenset}:
        return x == y and same(sorted(x, key=repr), sorted(y, key=repr))
    if isinstance(x, np.ndarray):
        return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
    if isinstance(x, float):
        return repr(x) == repr(y)
    if isinstance(x, dt.datetime | dt.time):
        return x == y and x.fold == y.fold and same(x.tzinfo, y.tzinfo)
    if isinstance(x, re.Pattern):
        return (x.pattern, x.flags) == (y.pattern, y.flags)
    fields = fields_of(x)
    if fields is not None and not type(x).__module__.startswith(
        ("decimal", "fractions", "uuid", "pathlib", "ipaddress")
    ):
        return same(list(fields), list(fields_of(y) or ()))
    return bool(x == y) or repr(x) == repr(y)


# --- what comes back ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_with_its_types_and_values(registry, name):
    value, _ = VALUES[name]
    data = encode(value, registry)
    # Another registry, as in another process: nothing may depend on what the first one has met.
    result = decode(data, registry_for(REGISTRY, TYPES))
    assert same(value, result), (value, result)
    assert encode(result, registry) == data


@pytest.mark.parametrize("name", VALUES)
def test_the_official_serializer_gives_what_the_table_says(name, monkeypatch):
    # Where it gives something else, a thread that moves here gets more back than before, never less.
    monkeypatch.setattr(logging.getLogger("langgraph.checkpoint.serde.jsonplus"), "disabled", True)
    value, expected = VALUES[name]
    serializer = JsonPlusSerializer()
    try:
        found = EXACT if same(value, serializer.loads_typed(serializer.dumps_typed(value))) else INEXACT
    except Exception:
        found = REFUSED
    assert found == expected


def test_models_keep_which_fields_were_set_and_no_validator_runs(registry):
    value = kinds.Strict(amount=3)
    result = decode(encode(value, registry), registry)
    assert (result.amount, result.model_fields_set) == (6, {"amount"})
    assert result.model_dump(exclude_unset=True) == {"amount": 6}
    result = decode(encode(kinds.loose(), registry), registry)
    assert (result.model_extra, result._seen) == ({"colour": "red", "size": (1, 2)}, 5)
    assert result == kinds.loose()


def test_an_object_that_stands_twice_is_one_object_again(registry):
    message = lc.HumanMessage("x")
    first, second = decode(encode((message, [message]), registry), registry)
    assert second[0] is first


def test_a_field_that_a_library_adds_or_drops_is_not_lost(registry):
    # A message of a library that had a field more: it is still there, as the extra field that a message may have.
    data = encode(lc.HumanMessage("x", id="1"), registry)
    code, payload = _extension(data)
    name, version, form, (fields, extra, names, private) = msgspec.msgpack.decode(payload)
    older = _instance(name, version, form, [{**fields, "example": True}, extra, [*names, "example"], private], code)
    result = decode(older, registry)
    assert (result.content, result.example, result.model_extra) == ("x", True, {"example": True})
    # And the other way round: what was extra then is a field now.
    del fields["name"]
    newer = _instance(name, version, form, [fields, {"name": "ann"}, [*names, "name"], private], code)
    result = decode(newer, registry)
    assert (result.name, result.model_extra) == ("ann", {})
    assert result == lc.HumanMessage("x", id="1", name="ann")


# --- exceptions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ERRORS)
def test_an_exception_comes_back_as_the_text_that_the_official_serializer_gives(registry, name):
    error = ERRORS[name]
    serializer = JsonPlusSerializer()
    for value in (error, {"deep": [error]}):
        official = serializer.loads_typed(serializer.dumps_typed(value))
        assert decode(encode(value, registry), registry_for(REGISTRY)) == official


def test_an_exception_is_recorded_whatever_it_carries(registry):
    class Hostile(Exception):
        def __repr__(self):
            raise RuntimeError("no")

    lock = threading.Lock()
    itself: list[Any] = []
    itself.append(itself)
    error = ValueError("text", lock, itself)
    error.__cause__ = error
    assert decode(encode(error, registry), registry) == repr(error)
    assert "Hostile without text: RuntimeError" in decode(encode(Hostile(), registry), registry)
    long = decode(encode(ValueError("x" * 10 * MAX_ERROR_CHARS), registry), registry)
    assert len(long) < 2 * MAX_ERROR_CHARS
    assert "100,014 characters" in long


def test_an_exception_that_the_program_registers_comes_back_as_one():
    parent = REGISTRY.child()
    parent.register(kinds.Refused, save=lambda error: error.code, load=lambda code: kinds.Refused(code, "again"))
    registry = registry_for(parent)
    assert type(decode(encode(kinds.Refused(404, "gone"), registry), registry)) is kinds.Refused


# --- what is known, and how more becomes known ----------------------------------------------------------------------


@pytest.mark.parametrize("name", kinds.UNKNOWN)
def test_what_can_never_be_saved_is_refused(registry, name):
    with pytest.raises(errors.Unencodable):
        encode({"x": kinds.UNKNOWN[name]}, registry)


def test_types_may_be_modules_their_names_and_classes():
    value = [kinds.Leg("a"), kinds.Trip(name="t"), kinds.Old()]
    for types in ([kinds], kinds, kinds.__name__, TYPES, [*TYPES, re.Pattern, lc.HumanMessage, ValueError]):
        registry = registry_for(REGISTRY, types)
        assert same(decode(encode(value, registry), registry), value)


def test_what_the_program_registered_for_all_stores_counts():
    parent = REGISTRY.child()
    parent.register(kinds.Point, name="point")
    parent.register(lc.HumanMessage, name="human", save=lambda value: value.content, load=lc.HumanMessage)
    registry = registry_for(parent)
    value = [kinds.Point(1), lc.HumanMessage("x")]
    data = encode(value, registry)
    assert b"langchain" not in data
    assert decode(data, registry) == value


def test_an_allowlist_makes_imported_classes_known(registry):
    registry = registry_for(REGISTRY)
    module = kinds.__name__
    names = {(module, kind.__name__) for kind in TYPES}
    odd = {("builtins", "set"), ("re", "compile"), ("no.such.module", "Thing"), (module, "nothing"), ("io", "BytesIO")}
    allow(registry, names | odd | {("langchain_core.messages.human", "HumanMessage")})
    assert "no.such.module" not in sys.modules
    for name, (value, _) in VALUES.items():
        assert same(decode(encode(value, registry), registry), value), name


def test_a_class_that_is_only_called_like_a_known_one_is_not_taken_for_it(registry):
    impostor = type("Send", (), {"__module__": "langgraph.types", "__slots__": ("node", "arg", "timeout")})()
    with pytest.raises(errors.Unencodable, match=r"langgraph\.types\.Send is not registered"):
        encode(impostor, registry)
    pattern = type("Pattern", (), {})()
    with pytest.raises(errors.Unencodable, match="Pattern is not registered"):
        encode(pattern, registry)
    human = type("HumanMessage", (kinds.Trip,), {"__module__": "langchain_core.messages.human"})(name="x")
    with pytest.raises(errors.Unencodable, match="HumanMessage is not registered"):
        encode(human, registry)


# --- hostile data ---------------------------------------------------------------------------------------------------


def _extension(data: bytes) -> tuple[int, bytes]:
    found = msgspec.msgpack.decode(data)
    return found.code, bytes(found.data)


def _instance(name: str, version: int, form: str, content: Any, code: int = wire.INSTANCE) -> bytes:
    return ormsgpack.packb(ormsgpack.Ext(code, ormsgpack.packb([name, version, form, content])))


_HUMAN = "langchain_core.messages.human.HumanMessage"
_SEND = "langgraph.types.Send"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (_instance("os.system", 1, "value", "true"), errors.UnknownType),
        (_instance("antigravity.Thing", 1, "fields", {}), errors.UnknownType),
        (_instance("builtins.eval", 1, "value", {"args": ["1"]}), errors.UnknownType),
        (_instance("builtins.object", 1, "fields", {}), errors.UnknownType),
        (_instance("langgraph.types.interrupt", 1, "value", 1), errors.UnknownType),
        (_instance("langchain_core.messages.ai.os", 1, "value", 1), errors.UnknownType),
        (_instance(_HUMAN, 2, "pydantic", [{}, {}, [], None]), errors.SchemaMismatch),
        (_instance(_HUMAN, 0, "pydantic", [{}, {}, [], None]), errors.SchemaMismatch),
        (_instance(_HUMAN, 1, "fields", {"content": "x"}), errors.SchemaMismatch),
        (_instance(_HUMAN, 1, "value", "x"), errors.SchemaMismatch),
        (_instance(_HUMAN, 1, "pydantic", [{}, {}, []]), errors.CorruptValue),
        (_instance(_HUMAN, 1, "pydantic", [{}, {}, [1], None]), errors.CorruptValue),
        (_instance(_HUMAN, 1, "pydantic", [[], {}, [], None]), errors.CorruptValue),
        (_instance(_HUMAN, 1, "pydantic", [None, {}, [], None]), errors.CorruptValue),
        (_instance(_HUMAN, 1, "pydantic", [{"content": "x"}, [], [], None]), errors.CorruptValue),
        (_instance(_HUMAN, 1, "pydantic", {"content": "x"}), errors.CorruptValue),
        (_instance(_SEND, 1, "fields", {"node": "n", "arg": 1, "timeout": None, "more": 1}), errors.SchemaMismatch),
        (_instance(_SEND, 1, "fields", [1, 2]), errors.CorruptValue),
        (_instance("langgraph.types.Overwrite", 1, "fields", {}), errors.SchemaMismatch),
        (_instance("langgraph.types.PregelTask", 1, "fields", {"id": "1"}), errors.SchemaMismatch),
        (_instance("re.Pattern", 1, "value", ["(", 0]), errors.SchemaMismatch),
        (_instance("re.Pattern", 1, "value", "abc"), errors.SchemaMismatch),
        (_instance("ipaddress.IPv4Address", 1, "value", "::1"), errors.SchemaMismatch),
        (_instance("ipaddress.IPv4Address", 1, "fields", {"_ip": 1}), errors.SchemaMismatch),
        (_instance("langchain_core.runnables.utils.AddableDict", 1, "value", [["a", 1]]), errors.SchemaMismatch),
        (_instance("langchain_core.messages.base.TextAccessor", 1, "value", 3), errors.SchemaMismatch),
        (_instance("builtins.ValueError", 1, "value", {"args": ["x"]}), errors.UnknownType),
        (_instance("holdfast.langgraph.Error", 1, "value", ["a"]), errors.SchemaMismatch),
        (_instance("holdfast.langgraph.Error", 1, "fields", {"args": []}), errors.SchemaMismatch),
    ],
)
def test_forged_data_is_refused_with_a_typed_error_and_imports_nothing(registry, data, expected):
    encode([Send("n", 1), Interrupt(1)], registry)
    before = set(sys.modules)
    with pytest.raises(expected):
        decode(data, registry)
    assert set(sys.modules) == before


def test_an_unknown_type_can_be_looked_at_without_its_class():
    data = encode(kinds.Leg("Porto"), registry_for(REGISTRY, TYPES)).replace(b"values.Leg", b"values.Gel")
    record = decode(data, registry_for(REGISTRY), inert=True)
    assert (record.type_name, record.data["start"]) == ("tests.contrib.langgraph_values.Gel", "Porto")


def test_damaged_bytes_never_become_another_value_without_an_error(registry):
    for name in ("ai", "send-timeout", "model-extra-private", "command"):
        data = encode(VALUES[name][0], registry)
        for place in range(len(data)):
            for flip in (1, 0x80):
                changed = data[:place] + bytes([data[place] ^ flip]) + data[place + 1 :]
                try:
                    decode(changed, registry)
                except errors.HoldfastError:
                    continue
        for end in range(len(data)):
            with pytest.raises(errors.HoldfastError):
                decode(data[:end], registry)


# --- weight and speed -----------------------------------------------------------------------------------------------


def test_langgraph_proper_is_only_imported_for_data_that_needs_it():
    program = """
import sys
from holdfast.codec.types import REGISTRY
from holdfast.codec.values import decode, encode
from holdfast.contrib.langgraph.types import registry_for
from langchain_core.messages import HumanMessage
registry = registry_for(REGISTRY)
assert decode(encode(HumanMessage("x"), registry), registry) == HumanMessage("x")
assert "langgraph.types" not in sys.modules, "without need"
assert "langgraph.pregel" not in sys.modules, "without need"
send = decode(bytes.fromhex(sys.argv[1]), registry)
assert (type(send).__module__, send.node) == ("langgraph.types", "n")
"""
    data = encode(Send("n", 1), registry_for(REGISTRY)).hex()
    done = subprocess.run([sys.executable, "-c", program, data], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
