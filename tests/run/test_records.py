"""Records: what is written comes back, and nothing else is taken for one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.codec.blocks import digest_of
from holdfast.codec.values import encode
from holdfast.errors import CorruptValue, HoldfastError
from holdfast.run import records as rec
from holdfast.store.changes import NewRecord, chained
from holdfast.store.rows import BEGINNING

values = st.one_of(st.none(), st.binary(max_size=40), st.binary(min_size=32, max_size=32).map(lambda digest: [digest]))
texts = st.text(st.characters(codec=None), max_size=8)
BY_TYPE = {
    "int": st.integers(0, 2**62),
    "str": texts,
    "bytes": st.binary(max_size=40),
    "bytes | int": st.binary(max_size=40) | st.integers(1, 2**62),
    "bool": st.booleans(),
    "Value": values,
    "list[bytes] | None": st.none() | st.lists(st.binary(max_size=16), max_size=3),
    "list[str]": st.lists(texts, max_size=3),
    "list[int]": st.lists(st.integers(1, 99), max_size=3),
    "list[list[Any]] | None": st.none()
    | st.lists(st.tuples(st.lists(texts), st.binary(), st.integers()).map(list), max_size=2),
    "list[tuple[str, str, int]]": st.lists(st.tuples(texts, texts, st.integers(0, 2**62)), max_size=3),
    "Fault | None": st.none() | st.tuples(texts, texts, texts, values),
}


@st.composite
def any_record(draw):
    kind = draw(st.sampled_from(list(rec.KINDS)))
    types = {name: text for part in kind.__mro__ for name, text in vars(part).get("__annotations__", {}).items()}
    return kind(**{name: draw(BY_TYPE[types[name]]) for name in kind.__struct_fields__})


@given(any_record())
def test_a_record_comes_back_as_it_was(record):
    assert rec.decode_record(record.encode()) == record
    assert len(record.refs) % 32 == 0


@given(st.binary(max_size=60))
def test_other_bytes_give_a_declared_error(data):
    with pytest.raises(HoldfastError):
        rec.decode_record(data)


@pytest.mark.parametrize(
    "body",
    [
        {"t": "future", "at": 1},
        {"t": "end", "at": 1, "run": "r", "how": "finished", "new": 1},
        {"t": "end", "at": 1, "run": "r"},
        {"t": "end", "at": "1", "run": "r", "how": "finished"},
        {"t": "end", "at": 1, "run": "r", "how": "finished", "v": [b"short"]},
        {"t": "end", "at": 1, "run": "r", "how": "failed", "e": ["", "x"]},
        {"t": "end", "at": 1, "run": "r", "how": "waiting", "waits": [["signal", "go"]]},
        [1, 2],
        {"t": ["end"]},
    ],
)
def test_what_is_unknown_is_never_skipped(body):
    with pytest.raises(CorruptValue):
        rec.decode_record(encode(body))


def test_the_chain_depends_on_every_record_and_their_order():
    lines = (b"one", b"two"), (b"two", b"one"), (b"one", b"one"), (b"onet", b"wo")
    assert len({chained(BEGINNING, [NewRecord(0, b"", body) for body in line]) for line in lines}) == 4


def test_a_key_differs_by_branch_incarnation_run_and_path():
    first = (b"a" * 16, b"b" * 16, 1, "r", "0")
    others = [
        (b"x" * 16, *first[1:]),
        (first[0], b"x" * 16, *first[2:]),
        (*first[:2], 2, *first[3:]),
        (*first[:3], "s", "0"),
        (*first[:4], "1"),
    ]
    assert len({rec.key_of(*parts) for parts in (first, *others)}) == 6


@given(st.binary(max_size=16), st.integers(0, 2**40), st.text(), st.text() | st.just("\ud800"))
def test_a_key_is_the_digest_of_what_the_format_says(uuid, incarnation, run, path):
    data = encode([uuid, uuid, incarnation, run, path])
    assert rec.key_of(uuid, uuid, incarnation, run, path) == digest_of("holdfast.key", data).hex()[:32]
