"""A token list reads like the list it stands for, and keeps no copy of the prompt."""

import pytest

from inkling_rocm.engine import SamplingParams
from inkling_rocm.engine.sequence import Request, Sequence
from inkling_rocm.engine.token_list import TokenList


@pytest.mark.parametrize("prompt", [0, 1, 4])
@pytest.mark.parametrize("own", [0, 1, 3])
def test_it_reads_like_a_list(prompt, own):
    whole = [10 + i for i in range(prompt + own)]
    tokens = TokenList(whole[:prompt])
    for token in whole[prompt:]:
        tokens.append(token)
    assert len(tokens) == len(whole)
    assert list(tokens) == whole
    ends = [None, *range(-9, 10)]
    assert all(tokens[i:j] == whole[i:j] for i in ends for j in ends)
    for at in range(-9, 10):
        if -len(whole) <= at < len(whole):
            assert tokens[at] == whole[at]
        else:
            with pytest.raises(IndexError):
                tokens[at]


def test_continuations_share_the_prompt():
    prompt = [1, 2, 3]
    request = Request(
        rid="r", prompt_ids=prompt, params=SamplingParams(n=2), handle=None, stop_ids=frozenset()
    )
    first, second = (Sequence(request, index, None) for index in range(2))
    first.add(4, None)
    assert first.tokens.prompt is second.tokens.prompt is prompt
    assert [*first.tokens] == [1, 2, 3, 4]
    assert [*second.tokens] == prompt == [1, 2, 3]
    assert (first.length, second.length) == (4, 3)
