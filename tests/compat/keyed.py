"""What an encrypted store holds: section 8 of docs/format.md for the independent reader. Must not import holdfast."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, AESSIV
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id
from msgspec import msgpack

from tests.compat.reader import Broken, Plain, digest, expect

OPEN_FACTS = {"format", "uuid", "created"}


class Keyed(Plain):
    """What is stored, as it was. ``key`` is a passphrase, or 32 bytes; ``block`` the list of keys."""

    overhead = 40

    def __init__(self, block: bytes, key: str | bytes) -> None:
        size = int.from_bytes(block[8:12])
        expect(block[:8] == b"HFKEYS01" and len(block) == 12 + size + 32, "list of keys")
        expect(digest("holdfast.keys", block[:-32]) == block[-32:], "digest of the keys")
        version, self.uuid, revision, slots, check = msgpack.decode(block[12:-32])
        self.master = b""
        for number, kind, _, salt, cost, wrapped in slots:
            if kind == "key" and isinstance(key, bytes):
                opens = blake3(salt + key, derive_key_context="holdfast 2026 key slot").digest(64)
            elif kind == "passphrase" and isinstance(key, str):
                memory, iterations, lanes = cost
                kdf = Argon2id(salt=salt, length=64, iterations=iterations, lanes=lanes, memory_cost=memory)
                opens = kdf.derive(key.encode())
            else:
                continue
            with suppress(InvalidTag):
                about = msgpack.encode(["holdfast.slot", self.uuid, number, kind, salt, cost])
                self.master = AESSIV(opens).decrypt(wrapped, [about])
        expect(version == 1 and self.master, "a key that opens the store")
        proof = blake3(msgpack.encode([revision, slots]), key=self.derived("keys")).digest()
        expect(proof == check, "check of the keys")

    @classmethod
    def of(cls, master: bytes, uuid: bytes) -> Keyed:
        made = cls.__new__(cls)
        made.master, made.uuid = master, uuid
        return made

    def derived(self, purpose: str, length: int = 32) -> bytes:
        return blake3(self.master + self.uuid, derive_key_context=f"holdfast 2026 store {purpose}").digest(length)

    def total(self, table: str, covered: list[Any]) -> bytes:
        if table == "slot":
            return Plain.total(table, covered)
        return blake3(msgpack.encode([table, *covered]), key=self.derived("sums")).digest(16)

    def name(self, table: str, scope: int, data: bytes) -> bytes:
        cipher = AESSIV(self.derived("names", 64))
        return cipher.decrypt(data, [table.encode(), scope.to_bytes(8)]) if data else data

    def box(self, kind: str, place: Any, data: bytes) -> bytes:
        if not data or (kind == "store.value" and place[0] in OPEN_FACTS):
            return data
        try:
            cipher = AESGCM(blake3(data[:12], key=self.derived("content")).digest())
            return cipher.decrypt(data[12:24], data[24:], msgpack.encode([kind, place]))
        except (InvalidTag, ValueError):
            raise Broken(f"box {kind} {place}") from None
