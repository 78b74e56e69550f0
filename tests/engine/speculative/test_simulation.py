"""Simulated acceptance: about the share that was asked for, at every depth."""

import pytest
import torch

from inkling_rocm.engine.speculative.simulation import simulate_acceptance

B, N = 20_000, 4
DRAFTS = torch.arange(B * N).view(B, N) + 100
TOKENS = torch.cat([torch.arange(B)[:, None], torch.full((B, N), -1)], 1)
KEYS = torch.arange(B) * 7919 - 5


@pytest.mark.parametrize("probability", [0.0, 0.3, 0.7, 1.0])
def test_share_by_depth(probability):
    given = torch.tensor(probability)
    _, accepted = simulate_acceptance(TOKENS, DRAFTS, KEYS, probability=given)
    for depth in range(N):
        reached = accepted >= depth
        if reached.sum() > 100:
            share = (accepted[reached] > depth).double().mean().item()
            spread = 4 * (probability * (1 - probability) / reached.sum().item()) ** 0.5
            assert abs(share - probability) <= spread


def test_tokens_are_the_accepted_drafts_and_one_more():
    tokens, accepted = simulate_acceptance(TOKENS, DRAFTS, KEYS, probability=0.6)
    for row in range(200):
        n = accepted[row].item()
        wanted = [*DRAFTS[row, :n].tolist(), row, *[-1] * (N - n)]
        assert tokens[row].tolist() == wanted


def test_repeats_by_key_whatever_the_batch():
    whole = simulate_acceptance(TOKENS, DRAFTS, KEYS, probability=0.5)[1]
    part = simulate_acceptance(TOKENS[5:9], DRAFTS[5:9], KEYS[5:9], probability=0.5)[1]
    assert part.tolist() == whole[5:9].tolist()
    other = simulate_acceptance(TOKENS, DRAFTS, KEYS + 1, probability=0.5)[1]
    assert (other != whole).any()


def test_nothing_is_accepted_that_is_not_there():
    drafts = DRAFTS[:3].clone()
    drafts[0, 2] = -1
    tokens = TOKENS[:3].clone()
    tokens[1] = -1
    found, accepted = simulate_acceptance(tokens, drafts, KEYS[:3], probability=1.0)
    assert accepted.tolist() == [2, 0, N]
    assert found[1].tolist() == [-1] * (N + 1)
    assert found[0].tolist() == [*drafts[0, :2].tolist(), 0, -1, -1]
