"""The key of a bundle: a file that leaves an encrypted store, or that somebody gives a key of its own.

Owns the part of such a file that leads from a passphrase or key to what its frames are encrypted with (format.md
section 10). Knows nothing of frames. Always true: no two bundles are encrypted with the same key, and none with that of
a store's rows; what the file says about its keys is bounded before it is believed.
"""

from __future__ import annotations

import os

from holdfast.errors import BadOption, KeyNeeded, WrongKey
from holdfast.store import keys
from holdfast.store.cipher import Cipher, Keyed, derive
from holdfast.store.embedded import Embedded
from holdfast.store.keys import Secret
from holdfast.store.opening import now_us, require_cryptography

UUID_BYTES = 16
HEAD_BYTES = keys.BLOCK_BYTES + UUID_BYTES


def own_key(secret: Secret) -> tuple[bytes, Cipher]:
    """What a bundle begins with that this opens, and nothing else; and what its frames are encrypted with."""
    require_cryptography()
    uuid = os.urandom(UUID_BYTES)
    made, master = keys.new_keys(uuid, secret, now_us())
    return keys.block(made) + uuid, _cipher(master, made.uuid, uuid)


def keys_of_store(store: Embedded) -> tuple[bytes, Cipher]:
    """The same for a bundle that opens with every key that opens an encrypted store now."""
    uuid = os.urandom(UUID_BYTES)
    found = keys.read_keys(store.path)
    if found is None:
        raise BadOption("the store has no keys of its own")
    return keys.block(found) + uuid, store.bundle_cipher(uuid)


def opened(head: bytes, secret: Secret | None) -> Cipher:
    """What the frames of a bundle that begins so are encrypted with."""
    found = keys.parse(head[: keys.BLOCK_BYTES])
    if secret is None:
        raise KeyNeeded(
            "the bundle is encrypted",
            hint="Give the key of the store that it is from, or the one that it was exported with.",
        )
    require_cryptography()
    try:
        master, _ = found.unlock(secret)
    except WrongKey as error:
        raise WrongKey(
            f"this {secret.kind} does not open the bundle; nothing was imported",
            hint="It needs a key of the store that it is from, or the one that it was exported with.",
        ) from error
    return _cipher(master, found.uuid, head[keys.BLOCK_BYTES :])


def _cipher(master: bytes, uuid: bytes, bundle: bytes) -> Cipher:
    return Keyed(derive("bundles", master, uuid), bundle, b"")
