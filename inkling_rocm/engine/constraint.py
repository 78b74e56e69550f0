"""Structured output: a grammar decides which tokens may come next (llguidance, imported lazily).

While the grammar is unfinished the turn cannot end; once it is complete, and only then, the turn's
end ids and the block's end id are permitted; after a block end only the turn end is. Rows beyond
the tokenizer's vocabulary are never permitted.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from inkling_rocm.engine.request import RequestError, SamplingParams
from inkling_rocm.engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

ANY_JSON_OBJECT = '{"type": "object"}'
# One space, or a new line with its indentation: enough for every common layout, and a model cannot
# fill its budget with white space.
JSON_WHITE_SPACE = r" |\r?\n[ \t]{0,64}"
# Compiling takes time in proportion to the square of a schema's properties: at this size, some
# thousand of them, 2 s of one core, at the 16 MB that a request may have hours. It cannot be ended.
MAX_GRAMMAR_BYTES = 256 * 1024


def why_too_large(text: str) -> str | None:
    """Why a schema, regex or grammar is not compiled; None = it is."""
    size = len(text.encode(errors="surrogatepass"))  # what is no text is refused elsewhere
    if size <= MAX_GRAMMAR_BYTES:
        return None
    return f"{size} bytes; at most {MAX_GRAMMAR_BYTES} are compiled, leave out what need not hold"


def brief(problem: str) -> str:
    """What llguidance says, without the state and the whole grammar that it adds. What is wrong
    with a regex stands on a line of its own."""
    lines = problem.partition("\n<state>")[0].splitlines() or ["not accepted"]
    why = next((line for line in lines[1:] if line.startswith("error: ")), "error: ")
    return f"{lines[0][:300]} {why.removeprefix('error: ')[:300]}".strip() or "not accepted"


class Constraint:
    """The grammar state of one continuation.

    Args:
        matcher: fresh state of the compiled grammar.
        start_ids: the grammar begins after one of these was generated; empty = at once.
        turn_end_ids: what may follow once a block end was generated.
        vocabulary: length of the masks: the model's real rows.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        *,
        start_ids: tuple[int, ...],
        turn_end_ids: tuple[int, ...],
        block_end_ids: tuple[int, ...],
        vocabulary: int,
    ):
        self._matcher = matcher
        self._start_ids = frozenset(start_ids)
        self._active = not start_ids
        self._turn_end = turn_end_ids
        self._block_end = frozenset(block_end_ids)
        self._closed = False
        self._vocabulary = vocabulary

    def copy(self) -> Constraint:
        """The same state for another continuation."""
        twin = object.__new__(Constraint)
        twin.__dict__.update(self.__dict__)
        twin._matcher = self._matcher.deep_copy()
        return twin

    def add(self, token: int) -> str | None:
        """Follow a generated token. Returns: why the grammar cannot continue, or None."""
        if not self._active:
            self._active = token in self._start_ids
            return None
        if self._closed or token in self._turn_end:
            return None
        if not self._matcher.consume_token(token):
            return f"no token can follow token {token}: {brief(self._matcher.get_error())}"
        self._closed = token in self._block_end
        return None

    @property
    def fault(self) -> str | None:
        """What broke the grammar, if something did."""
        return brief(self._matcher.get_error()) if self._matcher.is_error() else None

    def allowed(self) -> NDArray | None:
        """bool [vocabulary] of permitted next tokens; None while the constraint has not begun."""
        if not self._active:
            return None
        mask = np.zeros(self._vocabulary, bool)
        if self._closed:
            mask[list(self._turn_end)] = True
            return mask
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():  # a limit of the parser was hit: nothing may follow
            return mask
        known = np.unpackbits(bits, bitorder="little")[: self._vocabulary]
        mask[: len(known)] = known
        return mask


class ConstraintCompiler:
    """Compiles the constraints of requests for one tokenizer.

    Args:
        turn_end_ids: ids that end a turn. vocabulary: the model's real rows.
    """

    def __init__(self, tokenizer: Tokenizer, turn_end_ids: tuple[int, ...], vocabulary: int):
        self._tokenizer = tokenizer
        self._turn_end = turn_end_ids
        self._block_end = tuple(i for i in tokenizer.block_end_ids if i < vocabulary)
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._tables: dict[tuple[int, ...], LLTokenizer] = {}

    def compile(self, params: SamplingParams) -> Constraint | None:
        """The constraint of a request, or None.

        Raises: RequestError: "invalid_schema": the schema or regex is wrong or not supported.
        """
        wanted = {
            "json_schema": params.json_schema,
            "regex": params.regex,
            "json_object": ANY_JSON_OBJECT if params.json_object else None,
            "grammar": params.grammar,
        }
        given = [(name, text) for name, text in wanted.items() if text is not None]
        if not given:
            return None
        if len(given) > 1:
            names = " and ".join(name for name, _ in given)
            raise RequestError(f"{names} exclude each other", param=given[1][0])
        if not self._turn_end:
            raise RequestError("the model has no end-of-turn id, which constraints need")
        from llguidance import LLMatcher

        (name, text), *_ = given
        if too_large := why_too_large(text):
            raise RequestError(f"{name}: {too_large}", code="invalid_schema", param=name)
        try:
            if name == "grammar":
                grammar = LLMatcher.grammar_from_lark(text)
            elif name == "regex":
                grammar = LLMatcher.grammar_from_regex(text)
            else:
                grammar = LLMatcher.grammar_from_json_schema(
                    text, defaults={"whitespace_pattern": JSON_WHITE_SPACE}
                )
        except ValueError as error:
            raise RequestError(f"{name}: {error}", code="invalid_schema", param=name) from error
        # A grammar over tokens names the block ends itself: there they do not end the text.
        block_end = () if name == "grammar" else self._block_end
        matcher = LLMatcher(self._token_table(block_end), grammar, log_level=0)
        if matcher.is_error():
            message = f"{name}: {brief(matcher.get_error())}"
            raise RequestError(message, code="invalid_schema", param=name)
        return Constraint(
            matcher,
            start_ids=params.constraint_start_ids,
            turn_end_ids=self._turn_end,
            block_end_ids=block_end,
            vocabulary=self._vocabulary,
        )

    def _token_table(self, block_end: tuple[int, ...]) -> LLTokenizer:
        """llguidance's view of the tokenizer; made on first use (about a second)."""
        from llguidance import LLTokenizer, TokenizerWrapper

        with self._lock:
            if block_end not in self._tables:
                ends = [*self._turn_end, *block_end]
                source = _TokenTable(self._tokenizer, self._vocabulary, ends[0])
                size = len(source.tokens)
                table = LLTokenizer(TokenizerWrapper(source), n_vocab=size, eos_token=ends)
                self._tables[block_end] = table
            return self._tables[block_end]


class _TokenTable:
    """The attributes `llguidance.TokenizerWrapper` reads. Special tokens start with byte 0xFF, so
    that no grammar over text ever matches one."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, eos_token_id: int):
        size = min(vocabulary, tokenizer.vocab_size)
        self.eos_token_id = eos_token_id
        self.special_token_ids = [i for i in range(size) if tokenizer.is_special(i)]
        special = set(self.special_token_ids)
        self.tokens = [
            b"\xff[%d]" % i if i in special else tokenizer.token_bytes(i) for i in range(size)
        ]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode())
