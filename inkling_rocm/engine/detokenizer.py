"""Text from tokens as they come: whole characters only, stop strings across token borders."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from inkling_rocm.engine.tokenizer import Tokenizer


class Detokenizer:
    """Incremental UTF-8 decoding of one continuation.

    A character whose bytes are spread over tokens comes out with its last one; bytes that cannot
    become a character come out as U+FFFD, exactly as decoding everything at once would give them.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """Text that became final with this token."""
        if self._skip_special and self._tokenizer.is_special(token):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """What an incomplete character at the end turns into."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Finds the first stop string in a growing text and holds back what may begin one.

    Args: keep_match: the stop string stays in the text (no_stop_trim).
    """

    def __init__(self, stop: Sequence[str], *, keep_match: bool):
        self._stop = stop
        self._keep_match = keep_match
        self._held = ""

    def add(self, text: str) -> tuple[str, str | None]:
        """Append text. Returns: (newly final text, the stop string that ended it or None)."""
        if not self._stop:
            return text, None
        self._held += text
        found = [(at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            # The one that begins first; of several at one place the longest, so that the order in
            # which they were given does not matter.
            at, stop = min(found, key=lambda match: (match[0], -len(match[1])))
            return self._held[: at + len(stop) * self._keep_match], stop
        keep = self._possible_start()
        final, self._held = (
            self._held[: len(self._held) - keep],
            self._held[len(self._held) - keep :],
        )
        return final, None

    def finish(self) -> str:
        """The held text, once no more can come."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max(map(len, self._stop)) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0
