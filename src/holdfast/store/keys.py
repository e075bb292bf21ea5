"""The store's master key, wrapped once for every key that opens the store; and where such a key comes from.

Owns the table ``slot``, how a passphrase or a raw key becomes the key of a slot, the beginning of an encrypted bundle,
and the variables ``HOLDFAST_KEY``, ``HOLDFAST_KEY_FILE`` and ``HOLDFAST_KEY_COMMAND``. Knows nothing of what the master
key encrypts. What always holds: the list of keys is written twice over, so one damaged row does not cost the store;
what it says about a slot is bounded before it is believed; who has no key can neither add nor change a slot that is
then accepted; a key is never taken from two places at once, and never shown in an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from blake3 import blake3
from ormsgpack import packb, unpackb

from holdfast.errors import BadOption, Damaged, Incompatible, KeyNeeded, NotAuthentic, WrongKey
from holdfast.store.catalog import View
from holdfast.store.changes import Change
from holdfast.store.cipher import PLAIN, Keyed, derive, digest
from holdfast.store.engine import Refused
from holdfast.store.tables import TABLES

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESSIV

COPIES = ("keys", "keys again")
"""The names of the two rows. Both hold the same."""

MASTER_BYTES = 32
RAW_BYTES = 32
SALT_BYTES = 16
UUID_BYTES = 16
WRAPPED_BYTES = MASTER_BYTES + 16

SLOTS_MAX = 16
"""Keys that can open one store. A passphrase is tried on each, so more would make a wrong one slow."""

LIST_MAX_BYTES = 8192
"""More than the most slots that there can be take."""

MEMORY_KIB = 64 * 1024
ITERATIONS = 3
LANES = 4
"""Argon2id as RFC 9106 recommends it where 2 GiB are too much: about a third of a second here."""

MEMORY_MAX_KIB = 256 * 1024
WORK_MAX_KIB = 1024 * 1024
LANES_MAX = 16
"""A list from elsewhere may not ask for more memory, passes over memory, or lanes than this."""

KEY_MAX_BYTES = 4096
"""A file or an output that is longer is not a key: somebody gave the wrong path."""

COMMAND_WAIT_S = 120.0
"""A command may ask a person, or a password manager that does."""

PASSPHRASE = "passphrase"  # noqa: S105  a kind of slot
RAW = "key"
VARIABLES = ("HOLDFAST_KEY", "HOLDFAST_KEY_FILE", "HOLDFAST_KEY_COMMAND")

_MAGIC = b"HFKEYS01"
_START_BYTES = len(_MAGIC) + 4
_SUM_BYTES = 32


def require_cryptography() -> None:
    try:
        import_module("cryptography.hazmat.primitives.kdf.argon2")
    except ImportError as error:
        raise Incompatible(
            "encrypted stores need the package cryptography, 44 or newer", hint="pip install 'holdfast[crypto]'"
        ) from error


# -- what somebody gives ------------------------------------------------------------------------------------


class Secret:
    """What somebody gave to open a store: a passphrase, or a key of 32 random bytes."""

    __slots__ = ("data", "kind")

    def __init__(self, kind: str, data: bytes) -> None:
        self.kind = kind
        self.data = data

    def __repr__(self) -> str:  # it must not get into a log or a traceback
        return f"Secret({self.kind})"


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


ask: Callable[[str], Secret] | None = None
"""How a person is asked for the key of a place that turned out to be encrypted; the command line sets it."""

Key = str | bytes | Secret | Literal[False] | None
"""A passphrase or key; None: whatever the environment says; False: none, whatever the environment says."""


def find_secret(key: Key) -> Secret | None:
    if key is False:
        return None
    if isinstance(key, Secret):
        return key
    if key is not None:
        return secret_of(key)
    given = [name for name in VARIABLES if os.environ.get(name)]
    if not given:
        return None
    if len(given) > 1:
        raise BadOption(f"{' and '.join(given)} are set", hint="Set one of them, or give key=.")
    value = os.environ[given[0]]
    if given[0] == "HOLDFAST_KEY":
        return secret_of(value)
    return from_file(value) if given[0] == "HOLDFAST_KEY_FILE" else from_command(value)


def from_environment(name: str) -> Secret:
    """The key in a variable."""
    value = os.environ.get(name)
    if not value:
        raise BadOption(f"the variable {name} is not set")
    return secret_of(value)


def from_file(path: str | os.PathLike[str]) -> Secret:
    """The key in a file: its only line."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(KEY_MAX_BYTES + 1)
    except OSError as error:
        raise BadOption(f"the key file {os.fspath(path)} cannot be read ({error.strerror})") from error
    return _from_bytes(data, f"the key file {os.fspath(path)}")


def from_command(command: str) -> Secret:
    """The key that a command prints. No shell is involved."""
    import shlex
    import subprocess

    try:
        done = subprocess.run(  # noqa: S603  the person's own command
            shlex.split(command), stdout=subprocess.PIPE, timeout=COMMAND_WAIT_S, check=False
        )
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        raise BadOption(f"the key command could not be run ({type(error).__name__})", hint="Try it by hand.") from error
    if done.returncode:
        raise BadOption(f"the key command ended with {done.returncode}", hint="Try it by hand.")
    return _from_bytes(done.stdout, "what the key command printed")


def _from_bytes(data: bytes, what: str) -> Secret:
    if len(data) > KEY_MAX_BYTES:
        raise BadOption(f"{what} is longer than a key can be")
    try:
        text = data.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise BadOption(f"{what} is not text", hint="A key is 64 hexadecimal digits, or a passphrase.") from error
    if "\n" in text or not text:
        raise BadOption(f"{what} is not one line", hint="A key is 64 hexadecimal digits, or a passphrase.")
    return secret_of(text)


# -- slots --------------------------------------------------------------------------------------------------


class Slot(NamedTuple):
    """One way to the master key. ``created`` is in microseconds; ``cost`` is memory in KiB, iterations and lanes."""

    number: int
    kind: str
    created: int
    salt: bytes
    cost: tuple[int, int, int]
    wrapped: bytes

    @staticmethod
    def wrap(number: int, secret: Secret, master: bytes, uuid: bytes, created: int) -> Slot:
        cost = (MEMORY_KIB, ITERATIONS, LANES) if secret.kind == PASSPHRASE else (0, 0, 0)
        slot = Slot(number, secret.kind, created, os.urandom(SALT_BYTES), cost, b"")
        return slot._replace(wrapped=slot._cipher(secret).encrypt(master, [slot._about(uuid)]))

    def unwrap(self, secret: Secret, uuid: bytes) -> bytes | None:
        """The master key, if this is the slot of that secret."""
        cipher = self._cipher(secret)
        from cryptography.exceptions import InvalidTag

        try:
            return cipher.decrypt(self.wrapped, [self._about(uuid)])
        except InvalidTag:
            return None

    def _cipher(self, secret: Secret) -> AESSIV:
        require_cryptography()
        from cryptography.hazmat.primitives.ciphers.aead import AESSIV
        from cryptography.hazmat.primitives.kdf.argon2 import Argon2id

        if secret.kind == RAW:
            return AESSIV(blake3(self.salt + secret.data, derive_key_context="holdfast 2026 key slot").digest(64))
        memory, iterations, lanes = self.cost
        kdf = Argon2id(salt=self.salt, length=64, iterations=iterations, lanes=lanes, memory_cost=memory)
        return AESSIV(kdf.derive(secret.data))

    def _about(self, uuid: bytes) -> bytes:
        return packb(("holdfast.slot", uuid, self.number, self.kind, self.salt, self.cost))

    @staticmethod
    def read(fields: Sequence[Any]) -> Slot:
        """A slot as somebody wrote it, within the limits; raises ValueError or TypeError."""
        number, kind, created, salt, (memory, iterations, lanes), wrapped = fields
        numbers = (number, created, memory, iterations, lanes)
        if not all(type(one) is int and one >= 0 for one in numbers) or kind not in {PASSPHRASE, RAW}:
            raise ValueError("a slot's fields")
        if [type(salt), type(wrapped)] != [bytes, bytes] or (len(salt), len(wrapped)) != (SALT_BYTES, WRAPPED_BYTES):
            raise ValueError("a slot's lengths")
        if kind == PASSPHRASE and not (
            1 <= lanes <= LANES_MAX
            and 8 * lanes <= memory <= MEMORY_MAX_KIB
            and 1 <= iterations * memory <= WORK_MAX_KIB
        ):
            raise ValueError("a slot's cost")
        return Slot(number, kind, created, salt, (memory, iterations, lanes), wrapped)


class Keys(NamedTuple):
    """The list of keys. ``revision`` rises with each change of it; ``check`` proves that who made it had a key."""

    uuid: bytes
    revision: int
    slots: tuple[Slot, ...]
    check: bytes = b""

    def unlock(self, secret: Secret) -> tuple[bytes, Slot]:
        """The master key, and the slot that gave it."""
        found = self._opened(secret)
        if found is None:
            raise WrongKey(
                f"this {secret.kind} does not open the store; nothing was changed",
                hint=f"Check it, and where it comes from: key=, {', '.join(VARIABLES[:-1])} or {VARIABLES[-1]}.",
            )
        from hmac import compare_digest  # slow to load, and only encrypted stores need it

        if not compare_digest(self._check(found[0]), self.check):
            raise NotAuthentic(
                "slot: the list of keys was changed by somebody without one",
                what=("table slot",),
                hint="Put the store back from a backup.",
            )
        return found

    def with_slot(
        self, master: bytes, secret: Secret, created: int, instead_of: Slot | None = None
    ) -> tuple[Keys, Slot]:
        """One more key that opens the store, or one in the place of another."""
        left = tuple(slot for slot in self.slots if slot != instead_of)
        if len(left) >= SLOTS_MAX:
            raise BadOption(f"the store has {SLOTS_MAX} keys already", hint="Remove one: `holdfast key remove`.")
        known = self._opened(secret)
        if known is not None:  # with two slots it would still open the store when one of them is removed
            raise BadOption(f"this is key {known[1].number}, which opens the store already", hint="Give another one.")
        number = max((slot.number for slot in self.slots), default=0) + 1
        slot = Slot.wrap(number, secret, master, self.uuid, created)
        return self._changed(master, (*left, slot)), slot

    def without(self, master: bytes, number: int) -> Keys:
        left = tuple(slot for slot in self.slots if slot.number != number)
        if len(left) == len(self.slots):
            raise BadOption(f"there is no key number {number}", hint="`holdfast key` shows them.")
        if not left:
            raise BadOption("the last key cannot be removed: nobody could open the store any more")
        return self._changed(master, left)

    def _opened(self, secret: Secret) -> tuple[bytes, Slot] | None:
        for slot in self.slots:
            if slot.kind == secret.kind:
                master = slot.unwrap(secret, self.uuid)
                if master is not None:
                    return master, slot
        return None

    def _changed(self, master: bytes, slots: tuple[Slot, ...]) -> Keys:
        new = Keys(self.uuid, self.revision + 1, slots)
        return new._replace(check=new._check(master))

    def _check(self, master: bytes) -> bytes:
        body = packb((self.revision, [tuple(slot) for slot in self.slots]))
        return blake3(body, key=derive("keys", master, self.uuid)).digest()

    # The bytes say where they end, and prove themselves: a bundle begins with them, and they can be found in the pages
    # of a damaged database.

    def encode(self) -> bytes:
        body = packb((1, self.uuid, self.revision, [tuple(slot) for slot in self.slots], self.check))
        data = _MAGIC + len(body).to_bytes(4, "big") + body
        return data + digest(b"keys", data)

    @staticmethod
    def decode(data: bytes) -> Keys:
        """A list of keys within the limits. Only ``unlock`` proves who wrote it."""
        end = Keys.length(data) - _SUM_BYTES
        if len(data) != end + _SUM_BYTES or digest(b"keys", data[:end]) != data[end:]:
            raise _damaged("its content does not match its sum")
        try:
            version, uuid, revision, slots, check = unpackb(data[_START_BYTES:end])
            found = tuple(Slot.read(fields) for fields in slots)
        except (TypeError, ValueError) as error:
            raise _damaged("its content does not follow the format") from error
        if (
            [type(one) for one in (version, uuid, revision, check)] != [int, bytes, int, bytes]
            or (version, len(uuid), len(check)) != (1, UUID_BYTES, 32)
            or not (0 < len(found) <= SLOTS_MAX and revision > 0)
        ):
            raise _damaged("its content does not follow the format")
        return Keys(uuid, revision, found, check)

    @staticmethod
    def length(start: bytes) -> int:
        """How many bytes a list has that begins so."""
        size = int.from_bytes(start[len(_MAGIC) : _START_BYTES], "big")
        if start[: len(_MAGIC)] != _MAGIC or len(start) < _START_BYTES or size > LIST_MAX_BYTES:
            raise _damaged("not a list of keys")
        return _START_BYTES + size + _SUM_BYTES


def _damaged(text: str) -> Damaged:
    return Damaged(f"slot: {text}", what=("table slot",))


def new_keys(uuid: bytes, secret: Secret, created: int) -> tuple[Keys, bytes]:
    """A new master key, and the one slot that leads to it."""
    master = os.urandom(MASTER_BYTES)
    keys, _ = Keys(uuid, 0, ()).with_slot(master, secret, created)
    return keys, master


# -- the table ----------------------------------------------------------------------------------------------


def read_slots(view: View) -> Keys | None:
    """The keys of a store; None when it is not encrypted. Needs no key. One good row of the two is enough."""
    found = [_copy(view, name) for name in COPIES]
    good = [one for one in found if isinstance(one, Keys)]
    if good:
        return max(good, key=lambda one: one.revision)
    failures = [one for one in found if isinstance(one, Damaged)]
    if not failures:
        return None
    raise Damaged(
        "slot: both copies of the list of keys are damaged",
        what=("table slot",),
        hint="Put the store back from a backup, or let `holdfast repair` look for the list: nothing else leads to the "
        "master key, without which nothing in the store can be read.",
    ) from failures[0]


def _copy(view: View, name: str) -> Keys | Damaged | None:
    try:
        for row in view.reader.run(f"SELECT {TABLES['slot'].listed} FROM slot WHERE name = ?", (name,)):
            return Keys.decode(PLAIN.loaded("slot", row)[1])
    except Damaged as error:
        return error
    return None


def write_slots(change: Change, keys: Keys, over: Keys | None = None) -> None:
    """Let these be the keys, if those that were there are still ``over``; None: there were none."""
    if read_slots(change) != over:
        raise Refused("the keys of the store were changed by somebody else meanwhile; nothing was written")
    change.tx.erasing()  # a key that was removed must not open what somebody carves out of unused parts of pages
    for name in COPIES:
        change.tx.do("DELETE FROM slot WHERE name = ?", (name,))
        change.put("slot", name, keys.encode())


def problems(view: View) -> list[str]:
    """What is wrong with the keys of an encrypted store although it can be used: one line each."""
    found = [_copy(view, name) for name in COPIES]
    bad = [f"slot: the row {name!r} is damaged" for name, one in zip(COPIES, found, strict=True) if one is None]
    bad += [one.message for one in found if isinstance(one, Damaged)]
    return bad or (["slot: the two copies of the list of keys differ"] if found[0] != found[1] else [])


def carved(content: bytes) -> list[Keys]:
    """Lists of keys in the bytes of a damaged database, newest first. A long one may lie in pieces, and be missed."""
    found = set()
    at = content.find(_MAGIC)
    while at >= 0:
        with suppress(Damaged):
            found.add(Keys.decode(content[at : at + Keys.length(content[at : at + _START_BYTES])]))
        at = content.find(_MAGIC, at + 1)
    return sorted(found, key=lambda one: one.revision, reverse=True)


# -- bundles ------------------------------------------------------------------------------------------------


class BundleKeys(NamedTuple):
    """What an encrypted bundle begins with. No two bundles are encrypted with the same key, and none as rows are."""

    keys: Keys
    uuid: bytes

    @staticmethod
    def of_store(view: View, cipher: Keyed) -> tuple[BundleKeys, Keyed]:
        """For a bundle that opens with every key that opens an encrypted store now."""
        found = read_slots(view)
        if found is None:
            raise BadOption("the store has no keys of its own")
        uuid = os.urandom(UUID_BYTES)
        return BundleKeys(found, uuid), cipher.bundle(uuid)

    @staticmethod
    def of_secret(secret: Secret, created: int) -> tuple[BundleKeys, Keyed]:
        """For a bundle that this opens, and nothing else."""
        uuid = os.urandom(UUID_BYTES)
        made, master = new_keys(uuid, secret, created)
        return BundleKeys(made, uuid), Keyed(master, uuid).bundle(uuid)

    def encode(self) -> bytes:
        return self.keys.encode() + self.uuid

    @staticmethod
    def read(read: Callable[[int], bytes]) -> BundleKeys:
        """The next bytes of a file, which ``read`` gives."""
        start = read(_START_BYTES)
        rest = read(Keys.length(start) - _START_BYTES + UUID_BYTES)
        if len(rest) < UUID_BYTES:
            raise _damaged("not a list of keys")
        return BundleKeys(Keys.decode(start + rest[:-UUID_BYTES]), rest[-UUID_BYTES:])

    def open(self, secret: Secret | None) -> Keyed:
        """What the frames of the bundle are encrypted with."""
        if secret is None:
            raise KeyNeeded(
                "the bundle is encrypted",
                hint="Give the key of the store that it is from, or the one that it was exported with.",
            )
        try:
            master, _ = self.keys.unlock(secret)
        except WrongKey as error:
            raise WrongKey(
                f"this {secret.kind} does not open the bundle; nothing was imported",
                hint="It needs a key of the store that it is from, or the one that it was exported with.",
            ) from error
        return Keyed(master, self.keys.uuid).bundle(self.uuid)
