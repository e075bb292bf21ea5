"""One case of the codec's benchmark, in a process of its own: a job comes as JSON, figures go out as JSON.

Owns the cases and the clock, which counts CPU time. Runs with the library of any tree that is first on the path: of the
older documents it knows that a capture had not to be acknowledged, and how their nodes were had. A store is kept in
memory. What always holds: building what is put in, sealing and collecting garbage are not in the time.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import random
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import islice
from time import process_time_ns
from typing import Any

import msgspec
import ormsgpack
import pydantic
from material import realistic

from holdfast.codec.document import Document
from holdfast.codec.types import Registry

Figures = dict[str, Any]
SEED = 11
BLOCKS = 5
RANDOM_READS = 1_000
LOAD_MESSAGES = 10_000


@dataclasses.dataclass
class Note:
    role: str
    content: str
    tags: list[str] = dataclasses.field(default_factory=list)


class Said(pydantic.BaseModel):
    role: str
    content: str
    tags: list[str] = []


class Memory:
    """A store of one line, in memory; the source of documents."""

    def __init__(self) -> None:
        self.types = Registry()
        self.kept: dict[bytes, bytes] = {}
        self.base: dict[str, bytes] = {}
        self.sections: list[tuple[str, bytes]] = []

    def nodes(self, digests: list[bytes]) -> dict[bytes, bytes]:
        return {digest: self.kept[digest] for digest in digests}

    def bulk(self, digests: list[bytes]) -> bytes:
        raise NotImplementedError(digests)

    def operations(self, section: str) -> list[Any]:  # noqa: ARG002 - all states are sealed
        return []

    def again(self) -> bool:
        return False

    def seal(self, document: Any) -> None:
        captured = document.capture()
        if hasattr(document, "written"):
            document.seal(captured)
            self.kept.update(captured.nodes)
            document.written(captured, sealed=True)
        else:
            self.kept.update(captured.nodes)
            self.kept.update(document.unstored()[0])
        self.sections, self.base = captured.sections, dict(captured.sections)


def save(document: Any) -> None:
    """What a checkpoint asks of a document."""
    captured = document.capture()
    if hasattr(document, "written"):
        document.written(captured)


def each_us(change: Callable[[int], None], document: Any, times: int, blocks: int = BLOCKS) -> Figures:
    """CPU time of one change with its capture: the best block of several; and of the first one after the seal."""
    best = first = float("inf")
    at = 0
    save(document)  # what was put in at the start is let go of here
    for _ in range(blocks):
        gc.collect()
        began = process_time_ns()
        for number in range(at, at + times):
            change(number)
            save(document)
            if not number:
                first = (process_time_ns() - began) / 1e3
        best = min(best, (process_time_ns() - began) / times / 1e3)
        at += times
    return {"us": best, "first_us": first}


def encode_us(item: Any) -> float:
    """One ormsgpack encode of an item."""
    packb, best = ormsgpack.packb, float("inf")
    for _ in range(20):
        began = process_time_ns()
        for _ in range(1_000):
            packb(item)
        best = min(best, (process_time_ns() - began) / 1e6)
    return best


def started(**sections: Any) -> tuple[Any, Memory]:
    memory = Memory()
    document = Document(memory.types)
    for name, value in sections.items():
        document[name] = value
    memory.seal(document)
    return document, memory


def messages() -> Iterator[dict[str, Any]]:
    return realistic(random.Random(SEED))


def append(length: int) -> Figures:
    found = list(islice(messages(), length + BLOCKS * 200 + 1))
    document, _ = started(messages=found[:length])
    coming, example = found[length:-1], found[-1]
    del found
    listed = document["messages"]
    return {**each_us(lambda _: listed.append(coming.pop()), document, 200), "encode_us": encode_us(example)}


def _typed(kind: str) -> tuple[list[type], Callable[[dict[str, Any]], Any], Callable[[Any], Any]]:
    """The classes to register, how an instance is made, and what of it an encoder without classes sees."""
    if kind == "dataclass":
        return [Note], lambda said: Note(said["role"], str(said["content"])), dataclasses.asdict
    if kind == "pydantic":
        return [Said], lambda said: Said(role=said["role"], content=str(said["content"])), Said.model_dump
    from langchain_core.messages import AIMessage

    return [AIMessage], lambda said: AIMessage(str(said["content"]), id=said["id"]), AIMessage.model_dump


def typed(kind: str, read: str, length: int) -> Figures:
    classes, make, dump = _typed(kind)
    times = 50 if read == "nobody" else 10
    memory = Memory()
    for one in classes:
        memory.types.register(one)
    document = Document(memory.types)
    found = [make(said) for said in islice(messages(), length + BLOCKS * times + 1)]
    document["messages"] = found[:length]
    memory.seal(document)
    coming, example = found[length:-1], dump(found[-1])
    del found
    listed = document["messages"]

    def read_all() -> None:
        for _ in listed:
            pass

    def change(_: int) -> None:
        if read == "each":
            read_all()
        listed.append(coming.pop())

    if read != "nobody":
        read_all()
        for number in range(2):  # what was read is found to be let go of
            document["other"] = number
            save(document)
    blocks = 3 if read == "each" else BLOCKS
    return {**each_us(change, document, times, blocks), "encode_us": encode_us(example)}


def names(count: int) -> list[str]:
    rng = random.Random(SEED)
    return [f"{rng.getrandbits(64):016x}" for _ in range(count)]


def set_add(length: int) -> Figures:
    found = names(length + 100)
    document, _ = started(names=set(found[:length]))
    held, coming = document["names"], found[length:]
    return {**each_us(lambda _: held.add(coming.pop()), document, 20), "encode_us": encode_us(found[0])}


def new_key(length: int) -> Figures:
    found = names(length + 250)
    document, _ = started(table=dict(zip(found[:length], range(length), strict=True)))
    table, coming = document["table"], found[length:]

    def change(number: int) -> None:
        table[coming.pop()] = number

    return {**each_us(change, document, 50), "encode_us": encode_us({found[0]: 1})}


def sort(length: int) -> Figures:
    document, memory = started(messages=list(islice(messages(), length)))
    listed = document["messages"]
    fields = "id", "content"

    def change(number: int) -> None:
        field = fields[number % 2]
        listed.sort(key=lambda said: str(said[field]))

    change(1)
    memory.seal(document)
    encode = encode_us([dict(said) for said in listed[:100]]) * length / 100
    return {**each_us(change, document, 2), "encode_us": encode}


def edit(length: int) -> Figures:
    document, _ = started(messages=list(islice(messages(), length)))
    listed = document["messages"]
    rng = random.Random(SEED)

    def change(number: int) -> None:
        listed[rng.randrange(length)]["edited"] = number

    for _ in listed:
        pass
    return {**each_us(change, document, 100), "encode_us": encode_us(dict(listed[0]))}


def load(length: int) -> Figures:
    found = list(islice(messages(), length))
    data = msgspec.msgpack.encode(found)
    _, memory = started(messages=found)
    del found
    decode = msgspec.msgpack.Decoder().decode
    best: dict[str, float] = {}

    def took(name: str, began: int) -> int:
        now = process_time_ns()
        best[name] = min(best.get(name, float("inf")), (now - began) / 1e3)
        return now

    for _ in range(BLOCKS):
        gc.collect()
        began = process_time_ns()
        decoded = decode(data)
        took("decode_us", began)
        del decoded
        gc.collect()
        began = process_time_ns()
        document = Document(memory.types, memory)
        listed = document["messages"]
        took("load_us", began)
        for said in listed:
            for _ in said.values():
                pass
        took("us", began)
        del document, listed, said
    rng = random.Random(SEED)
    places = [rng.randrange(length) for _ in range(RANDOM_READS)]
    for _ in range(BLOCKS):
        listed = Document(memory.types, memory)["messages"]
        gc.collect()
        began = process_time_ns()
        for at in places:
            listed[at]
        took("all_reads_us", began)
        del listed
    return {
        **best,
        "bytes": len(data),
        "random_read_us": best["all_reads_us"] / RANDOM_READS,
        "encode_us": best["decode_us"],
    }


def memory(length: int) -> Figures:
    """What told bytes take: by how much less is in use without them."""
    found = list(islice(messages(), length + 1_000))
    _, store = started(messages=found[:length])
    size, more = sum(map(len, store.kept.values())), found[length:]
    del found
    results: Figures = {}
    for name, count in (("loaded", 0), ("appended", 1_000)):
        gc.collect()
        tracemalloc.start()
        document = Document(store.types, store)
        listed = document["messages"]
        for said in more[:count]:
            listed.append(dict(said))
            save(document)
        if count:
            store.seal(document)
            size = sum(map(len, store.kept.values()))
        gc.collect()
        whole, kept = tracemalloc.get_traced_memory()[0], len(store.kept)
        if not hasattr(document, "told"):
            tracemalloc.stop()
            return {}
        document.told = listed._told = None  # noqa: SLF001 - this is what is weighed
        gc.collect()
        results[name] = (whole - tracemalloc.get_traced_memory()[0]) / size
        tracemalloc.stop()
        if len(store.kept) != kept:
            raise AssertionError("the store has changed meanwhile")
    return results


CASES: dict[str, Callable[..., Figures]] = {
    "append": append, "typed": typed, "set": set_add, "key": new_key,
    "sort": sort, "edit": edit, "load": load, "memory": memory,
}  # fmt: skip


def main() -> None:
    job = json.loads(sys.argv[1])
    print(json.dumps(CASES[job["case"]](*job["arguments"])))


if __name__ == "__main__":
    main()
