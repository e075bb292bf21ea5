"""The file ``keys``: the store's master key, wrapped once for every key that opens the store.

Owns the file (format.md section 9), its slots, and how a passphrase or a raw key becomes the key of a slot. Knows
nothing of what the master key encrypts. Always true: the file is replaced as a whole, so it holds the old slots or the
new ones; it is written twice over, so one damaged block does not cost the store; what it says about a slot is bounded
before it is believed; and who has no key can neither add nor change a slot that is then accepted.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3
from msgspec import Struct
from msgspec.structs import replace
from ormsgpack import packb

from holdfast.codec.values import decode, encode
from holdfast.errors import BadOption, Damaged, HoldfastError, NotAuthentic, StoreFailed, WrongKey
from holdfast.store.catalog import digest
from holdfast.store.cipher import derive
from holdfast.store.files import fsync_directory, unavailable

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESSIV

NAME = "keys"
MASTER_BYTES = 32
RAW_BYTES = 32
SALT_BYTES = 16

BLOCK_BYTES = 8192
"""Each of the two copies: room for the most slots that there can be."""

SLOTS_MAX = 16
"""Keys that can open one store. A passphrase is tried on each, so more would make a wrong one slow."""

MEMORY_KIB = 64 * 1024
ITERATIONS = 3
LANES = 4
"""Argon2id as RFC 9106 recommends it where 2 GiB are too much: about a third of a second here."""

MEMORY_MAX_KIB = 256 * 1024
WORK_MAX_KIB = 1024 * 1024
LANES_MAX = 16
"""A file from elsewhere may not ask for more memory, passes over memory, or lanes than this."""

PASSPHRASE = "passphrase"  # noqa: S105  a kind of slot
RAW = "key"

_MAGIC = b"HFKEYS01"
_MARKING = os.urandom(32)


class Secret:
    """What somebody gave to open a store: a passphrase, or a key of 32 random bytes."""

    __slots__ = ("data", "kind")

    def __init__(self, kind: str, data: bytes) -> None:
        self.kind = kind
        self.data = data

    def __repr__(self) -> str:  # it must not get into a log or a traceback
        return f"Secret({self.kind})"

    def mark(self) -> bytes:
        """What tells it from others in this process, and gives nothing away."""
        return blake3(self.kind.encode() + self.data, key=_MARKING).digest()

    def same(self, mark: bytes) -> bool:
        from hmac import compare_digest

        return compare_digest(self.mark(), mark)


def secret_of(given: str | bytes) -> Secret:
    """A text is a passphrase, unless it is 64 hexadecimal digits; these, and 32 bytes, are a key."""
    if isinstance(given, bytes):
        if len(given) != RAW_BYTES:
            raise BadOption(
                f"a key of {len(given)} bytes",
                hint=f"Give {RAW_BYTES} random bytes, 64 hexadecimal digits, or a passphrase as text.",
            )
        return Secret(RAW, given)
    if len(given) == 2 * RAW_BYTES and all(c in "0123456789abcdefABCDEF" for c in given):
        return Secret(RAW, bytes.fromhex(given))
    if not given:
        raise BadOption("an empty passphrase", hint="Give a passphrase, or a key of 64 hexadecimal digits.")
    import unicodedata

    try:
        # The same passphrase typed on another keyboard may be composed otherwise.
        return Secret(PASSPHRASE, unicodedata.normalize("NFC", given).encode())
    except UnicodeEncodeError as error:
        raise BadOption("a passphrase that is not valid text", hint="Type it again.") from error


class Slot(Struct, frozen=True):
    """One way to the master key. ``created`` is in microseconds; ``cost`` is memory in KiB, iterations and lanes."""

    number: int
    kind: str
    created: int
    salt: bytes
    cost: tuple[int, int, int]
    wrapped: bytes

    def fields(self) -> list[object]:
        return [self.number, self.kind, self.created, self.salt, list(self.cost), self.wrapped]


_CHECK_IT = "Check it, and where it comes from: key=, HOLDFAST_KEY, HOLDFAST_KEY_FILE or HOLDFAST_KEY_COMMAND."
_UNDER_WAY = (
    "The store is being encrypted with another key. If that was interrupted, it goes on when it is done again with the "
    "new key as the one in use (HOLDFAST_KEY_FILE and the like): `holdfast key rotate --full`."
)


class Keys(Struct, frozen=True):
    """What the file says. ``epoch`` counts master keys; ``previous`` is the one before, wrapped, while rows have it."""

    uuid: bytes
    epoch: int
    slots: tuple[Slot, ...]
    previous: bytes = b""
    check: bytes = b""

    def signed(self, master: bytes) -> Keys:
        return replace(self, check=self._check(master))

    def verify(self, master: bytes) -> None:
        """Raise unless whoever wrote this had the master key."""
        from hmac import compare_digest

        if not compare_digest(self._check(master), self.check):
            raise NotAuthentic(
                "keys: the list of keys was changed by somebody without one", what=(NAME,), hint="Use a backup of it."
            )

    def _check(self, master: bytes) -> bytes:
        body = packb([self.epoch, [slot.fields() for slot in self.slots], self.previous])
        return blake3(body, key=derive("keys", master, self.uuid)).digest()

    def unlock(self, secret: Secret) -> tuple[bytes, Slot]:
        """The master key, and the slot that gave it."""
        found = self._opened(secret)
        if found is not None:
            self.verify(found[0])
            return found
        raise WrongKey(
            f"this {secret.kind} does not open the store; nothing was changed",
            hint=_UNDER_WAY if self.previous else _CHECK_IT,
        )

    def with_slot(self, master: bytes, secret: Secret, created: int) -> tuple[Keys, Slot]:
        """One more key that opens the store."""
        if len(self.slots) >= SLOTS_MAX:
            raise BadOption(f"the store has {SLOTS_MAX} keys already", hint="Remove one: `holdfast key remove`.")
        self.refuse_known(secret)
        number = max((slot.number for slot in self.slots), default=0) + 1
        slot = _wrap(number, secret, master, self.uuid, self.epoch, created)
        return replace(self, slots=(*self.slots, slot)).signed(master), slot

    def refuse_known(self, secret: Secret) -> None:
        """A key with two slots would still open the store when one of them is removed."""
        found = self._opened(secret)
        if found is not None:
            raise BadOption(f"this is key {found[1].number}, which opens the store already", hint="Give another one.")

    def _opened(self, secret: Secret) -> tuple[bytes, Slot] | None:
        for slot in self.slots:
            if slot.kind == secret.kind:
                master = _unwrap(slot, secret, self.uuid, self.epoch)
                if master is not None:
                    return master, slot
        return None

    def without(self, master: bytes, number: int) -> Keys:
        left = tuple(slot for slot in self.slots if slot.number != number)
        if len(left) == len(self.slots):
            raise BadOption(f"there is no key number {number}", hint="`holdfast key list` shows them.")
        if not left:
            raise BadOption("the last key cannot be removed: nobody could open the store any more")
        return replace(self, slots=left).signed(master)


def new_keys(uuid: bytes, secret: Secret, created: int, epoch: int = 1) -> tuple[Keys, bytes]:
    """A new master key, and the one slot that leads to it."""
    master = os.urandom(MASTER_BYTES)
    keys, _ = Keys(uuid, epoch, ()).with_slot(master, secret, created)
    return keys, master


# -- slots ------------------------------------------------------------------------------------------------


def _wrap(number: int, secret: Secret, master: bytes, uuid: bytes, epoch: int, created: int) -> Slot:
    cost = (MEMORY_KIB, ITERATIONS, LANES) if secret.kind == PASSPHRASE else (0, 0, 0)
    slot = Slot(number, secret.kind, created, os.urandom(SALT_BYTES), cost, b"")
    return replace(slot, wrapped=_slot_cipher(slot, secret).encrypt(master, [_about(slot, uuid, epoch)]))


def _unwrap(slot: Slot, secret: Secret, uuid: bytes, epoch: int) -> bytes | None:
    from cryptography.exceptions import InvalidTag

    try:
        return _slot_cipher(slot, secret).decrypt(slot.wrapped, [_about(slot, uuid, epoch)])
    except InvalidTag:
        return None


def _slot_cipher(slot: Slot, secret: Secret) -> AESSIV:
    from cryptography.hazmat.primitives.ciphers.aead import AESSIV

    if secret.kind == RAW:
        key = blake3(slot.salt + secret.data, derive_key_context="holdfast 2026 key slot").digest(64)
    else:
        from cryptography.hazmat.primitives.kdf.argon2 import Argon2id

        memory, iterations, lanes = slot.cost
        kdf = Argon2id(salt=slot.salt, length=64, iterations=iterations, lanes=lanes, memory_cost=memory)
        key = kdf.derive(secret.data)
    return AESSIV(key)


def _about(slot: Slot, uuid: bytes, epoch: int) -> bytes:
    return packb(["holdfast.slot", uuid, epoch, slot.number, slot.kind, slot.salt, list(slot.cost)])


# -- the file ---------------------------------------------------------------------------------------------


def block(keys: Keys) -> bytes:
    """One of the two copies."""
    body = encode([1, keys.uuid, keys.epoch, [slot.fields() for slot in keys.slots], keys.previous, keys.check])
    data = _MAGIC + len(body).to_bytes(4, "big") + body
    return (data + digest(b"holdfast.keys", data)).ljust(BLOCK_BYTES, b"\0")


def content(keys: Keys) -> bytes:
    """The bytes of the file."""
    return block(keys) * 2


def parse(block: bytes) -> Keys:
    """What a copy says, within limits. Only ``unlock`` proves who wrote it."""
    size = int.from_bytes(block[8:12], "big")
    end = 12 + size
    if block[:8] != _MAGIC or len(block) != BLOCK_BYTES or end + 32 > BLOCK_BYTES:
        raise Damaged("keys: not a list of keys", what=(NAME,))
    if digest(b"holdfast.keys", block[:end]) != block[end : end + 32] or any(block[end + 32 :]):
        raise Damaged("keys: its content does not match its sum", what=(NAME,))
    try:
        version, uuid, epoch, slots, previous, check = decode(block[12:end])
        if version != 1:
            raise Damaged(f"keys: version {version!r} is not known", what=(NAME,))
        found = tuple(_slot(fields) for fields in slots)
        keys = Keys(bytes(uuid), int(epoch), found, bytes(previous), bytes(check))
    except (TypeError, ValueError) as error:
        raise Damaged("keys: its content does not follow the format", what=(NAME,)) from error
    if not 0 < len(found) <= SLOTS_MAX or len(keys.uuid) != 16 or keys.epoch < 1 or len(keys.check) != 32:
        raise Damaged("keys: its content does not follow the format", what=(NAME,))
    return keys


def _slot(fields: Sequence[Any]) -> Slot:
    number, kind, created, salt, cost, wrapped = fields
    memory, iterations, lanes = cost
    numbers = (number, created, memory, iterations, lanes)
    if not all(type(one) is int and one >= 0 for one in numbers) or kind not in {PASSPHRASE, RAW}:
        raise ValueError("a slot's fields")
    if type(salt) is not bytes or len(salt) != SALT_BYTES or type(wrapped) is not bytes or len(wrapped) != 48:
        raise ValueError("a slot's lengths")
    if kind == PASSPHRASE and not (
        1 <= lanes <= LANES_MAX and 8 * lanes <= memory <= MEMORY_MAX_KIB and 1 <= iterations * memory <= WORK_MAX_KIB
    ):
        raise ValueError("a slot's cost")
    return Slot(number, kind, created, salt, (memory, iterations, lanes), wrapped)


def read_keys(folder: Path) -> Keys | None:
    """The keys of the store in ``folder``; None when it has no such file. One good copy of the two is enough."""
    content = _content(folder)
    if content is None:
        return None
    first: HoldfastError | None = None
    for start in (0, BLOCK_BYTES):
        try:
            return parse(content[start : start + BLOCK_BYTES])
        except HoldfastError as error:
            first = first or error
    raise Damaged(
        f"{folder / NAME}: both copies of the list of keys are damaged",
        what=(NAME,),
        hint="Put the file back from a backup: without it nothing in the store can be read.",
    ) from first


def problems(folder: Path) -> list[str]:
    """What is wrong with the file although it can be used: one line each."""
    content = _content(folder)
    if content is None:
        return []
    found = [] if len(content) == 2 * BLOCK_BYTES else [f"keys: {len(content)} bytes instead of {2 * BLOCK_BYTES}"]
    blocks = []
    for number, start in enumerate((0, BLOCK_BYTES)):
        try:
            blocks.append(parse(content[start : start + BLOCK_BYTES]))
        except HoldfastError:
            found.append(f"keys: copy {number} is damaged")
    if len(blocks) == 2 and blocks[0] != blocks[1]:
        found.append("keys: its two copies differ")
    return found


def _content(folder: Path) -> bytes | None:
    try:
        fd = os.open(folder / NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return os.read(fd, 2 * BLOCK_BYTES + 1)
        finally:
            os.close(fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreFailed(f"{folder / NAME}: cannot be read ({error.strerror})") from error


def write_keys(folder: Path, keys: Keys) -> None:
    """Replace the file: afterwards it holds these keys, after a crash these or the ones before."""
    temporary = folder / f"{NAME}.new"
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            left = memoryview(content(keys))
            while left:
                left = left[os.write(fd, left) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, folder / NAME)
        fsync_directory(folder)
    except OSError as error:
        raise unavailable(error, f"writing {folder / NAME}") from error
