"""Prefix hits of a tensor-parallel engine: the followers get page tables, ring copies and snapshots
with the steps."""

from tests.engine.test_tensor_parallel import GREEDY, engine, folder  # noqa: F401

PROMPT = [(11 * i + 3) % 150 for i in range(70)]
PROMPTS = [PROMPT, PROMPT, PROMPT[:40] + PROMPT[:20], PROMPT]


def answers(running):
    found = []
    for turn, prompt in enumerate(PROMPTS):
        if turn == 3:
            prompt = PROMPT + found[0][0] + PROMPT[:5]
        updates = list(running.submit(prompt, GREEDY))
        assert updates[-1].error is None, updates[-1].error
        tokens = [token for update in updates for token in update.token_ids]
        found.append((tokens, updates[-1].cached_tokens))
    return found


def test_ranks_agree_with_one_that_has_no_cache(folder):  # noqa: F811
    with engine(folder, disable_radix_cache=True) as running:
        want = answers(running)
    with engine(folder, tp_size=2) as running:
        found = answers(running)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in want]
    assert [cached for _, cached in found] == [0, 64, 32, 80]
