"""The model's tokenizer: o200k_base with 60 special tokens, from `tml_renderers`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer.

    Attributes:
        vocab_size: ids are 0 .. vocab_size-1.
        eos_ids: ids that end a turn. block_end_ids: ids that close a block of a turn, after which
            only the turn end may follow a finished constraint.
    """

    vocab_size: int
    eos_ids: tuple[int, ...]
    block_end_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; the names of special tokens in it are text too."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens by their names, broken UTF-8 as U+FFFD."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """UTF-8 bytes of one token, possibly part of a character."""
        ...

    def is_special(self, token: int) -> bool: ...


class InklingTokenizer:
    """The released tokenizer.

    Raises: ImportError: tml-renderers is not installed.
    """

    def __init__(self):
        from tml_renderers.tokenizers import O200kBaseChatTokenizer

        self.vocab_size = 200058
        self.eos_ids: tuple[int, ...] = (200006, 199999)  # content_model_end_sampling, endoftext
        self.block_end_ids: tuple[int, ...] = (200010,)  # end_message
        self._tokenizer = O200kBaseChatTokenizer()
        names = self._tokenizer.special_tokens()
        self.special_ids = {name: self._tokenizer.encode_special(name) for name in names}
        self._special = frozenset(self.special_ids.values())
        self._bytes: dict[int, bytes] = {}

    @property
    def native(self):
        """The wrapped O200kBaseChatTokenizer, for tml_renderers' own renderer."""
        return self._tokenizer

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode_ordinary(text)

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """Bytes of one token; padded rows of the vocabulary, which are no token, have none."""
        found = self._bytes.get(token)
        if found is None:
            known = 0 <= token < self.vocab_size
            found = self._tokenizer.decode_bytes([token]) if known else b""
            self._bytes[token] = found
        return found

    def is_special(self, token: int) -> bool:
        return token in self._special
