"""The keys of KV blocks, by which equal content is found.

A full block is known by its key: a hash over the pair that computed it, a salt, all tokens before
it and its own. So two blocks of one key hold the same content at the same positions, computed by
the same models for sequences that may share. The hash is 256 bits of BLAKE2b: a wrong hit would be
a collision that nobody can find.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

_KEY_BYTES = 32


class Chain:
    """The keys of one sequence's leading blocks, computed as far as they are asked for."""

    def __init__(
        self, identity: Sequence[object], salt: str, block_size: int, ahead: int = 0
    ) -> None:
        """`identity`: what else than tokens decides the KV; with another one, or another `salt`, no
        block is shared. `ahead`: tokens behind a block that its content depends on, too; 0 for what
        sees only tokens before it."""
        root = repr((tuple(identity), salt)).encode()
        self._last = blake2b(root, digest_size=_KEY_BYTES).digest()
        self._block_size = block_size
        self._ahead = ahead
        self._keys: list[bytes] = []

    def keys(self, content: Sequence[int], blocks: int) -> list[bytes]:
        """Of the first `blocks` blocks, all full; the content must only ever grow at its end."""
        size, ahead = self._block_size, self._ahead
        most = (len(content) - ahead) // size
        assert blocks <= max(most, 0), "a block that is not full has no key"
        for index in range(len(self._keys), blocks):
            begin = index * size + ahead if index else 0
            tokens = array("q", content[begin : (index + 1) * size + ahead]).tobytes()
            self._last = blake2b(self._last + tokens, digest_size=_KEY_BYTES).digest()
            self._keys.append(self._last)
        return self._keys[:blocks]
