"""The tokens of a continuation: the prompt, which all of a request share, then its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload


class TokenList(Sequence[int]):
    """Reads like a list of both.

    Attributes:
        prompt: shared, never changed. own: what was generated.
    """

    def __init__(self, prompt: list[int]):
        self.prompt = prompt
        self._border = len(prompt)
        self.own: list[int] = []

    def append(self, token: int) -> None:
        """Add a generated token."""
        self.own.append(token)

    def __len__(self) -> int:
        return self._border + len(self.own)

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> list[int]: ...

    def __getitem__(self, at: int | slice) -> int | list[int]:
        border = self._border
        if isinstance(at, slice):
            start, stop = at.start, at.stop
            if stop is not None and start is not None and start >= 0 and 0 <= stop <= border:
                return self.prompt[at]  # most are pages of the prompt, and there are many
            start, stop, step = at.indices(len(self))
            assert step == 1
            if start >= border:
                return self.own[start - border : max(stop - border, 0)]
            return self.prompt[start:stop] + self.own[: max(stop - border, 0)]
        at = at + len(self) if at < 0 else at
        if at < 0:
            raise IndexError(f"of {len(self)} tokens")
        return self.prompt[at] if at < border else self.own[at - border]
