"""From logits to tokens, all rows of a step together.

Every row's result is a function of its own logits, parameters, seed and position: nothing is drawn
from a shared generator, and no reduction runs across rows.

Random rows use the Gumbel-max trick with hashed noise (engine/random.py). A single uniform and the
inverse CDF would be cheaper still, but over 200k nearly equal probabilities a rounding error of
1e-7 in the logits moves every later border of the CDF and so the token; the arg-max changes only
when two perturbed logits nearly tie. Without top-k or top-p the choice is made in two levels (which
block of BLOCK tokens, by its log-sum-exp; which token in it), which draws from the same
distribution with V / BLOCK + BLOCK numbers instead of V.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inkling_rocm.engine.logit_edits import LogitEdits, apply_edits
from inkling_rocm.engine.random import gumbel, row_key
from inkling_rocm.engine.request import SamplingParams

BLOCK = 128
HEAD_WIDTHS = (128, 4096)  # top-k and top-p look at this many before they sort all
GREEDY_BELOW = 1e-6  # temperatures under this are greedy, as in SGLang
BLOCK_STREAM, TOKEN_STREAM = 1, 2


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One token to draw: position is the absolute position the token will have."""

    params: SamplingParams
    seed: int
    position: int
    edits: LogitEdits

    @property
    def greedy(self) -> bool:
        return self.params.temperature < GREEDY_BELOW or self.params.top_k == 1


def sample(logits_nV: Tensor, rows: Sequence[SampleRow], *, keep_logits: bool) -> list[int | None]:
    """Draw one token a row.

    Args:
        logits_nV: fp32 [n, V], the model's.
        keep_logits: logits_nV must survive (log probabilities are still to be taken from it).
    Returns: token ids; None where the row has no finite logit left (a NaN from the model, or masks
        that exclude each other).
    """
    edits = [(i, row.edits) for i, row in enumerate(rows) if row.edits.active]
    if edits:
        logits_nV = logits_nV.clone() if keep_logits else logits_nV
        apply_edits(logits_nV, edits)
    drawn = [i for i, row in enumerate(rows) if not row.greedy]
    if len(drawn) == len(rows):
        return _draw(logits_nV, rows)
    if not drawn:
        return _greedy(logits_nV)
    tokens = _greedy(logits_nV)
    for i, token in zip(drawn, _draw(logits_nV[drawn], [rows[i] for i in drawn]), strict=True):
        tokens[i] = token
    return tokens


def kept_logits(logits_nV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Logits over temperature, with -inf outside top-k, top-p and min-p: `sample` draws random rows
    from their softmax.

    Args:    logits_nV: fp32 [n, V], edited.
    Returns: fp32 [n, V].
    """
    V = logits_nV.shape[1]
    temperature = torch.tensor([p.temperature for p in params], device=logits_nV.device)
    x_nbx = _in_blocks(logits_nV, temperature)
    cut = [i for i, p in enumerate(params) if p.top_k > 0 or p.top_p < 1.0]
    kept = _above_min_p(x_nbx, params).flatten(1)
    if cut:
        some = torch.full((len(cut), kept.shape[1]), float("-inf"), device=kept.device)
        for done, values, ids in _heads(x_nbx[cut], [params[i] for i in cut]):
            some[done[:, None], ids] = values
        kept[cut] = some
    return kept[:, :V]


def pick_largest(noisy_nm: Tensor, ids_nm: Tensor) -> list[int | None]:
    """The id of the largest number of every row; None where that is not finite.

    Args: ids_nm: int64 [n, m] or [m].
    """
    best, at = noisy_nm.max(-1)
    return _checked(ids_nm.expand_as(noisy_nm).gather(1, at[:, None])[:, 0], best)


def _greedy(logits_nV: Tensor) -> list[int | None]:
    if logits_nV.device.type == "cpu":
        # numpy's arg-max is vectorised, torch's is not: 0.5 ms against 4.4 ms for [16, 200058].
        ids = torch.from_numpy(logits_nV.numpy().argmax(axis=1))
    else:
        ids = logits_nV.argmax(-1)
    best = logits_nV.gather(1, ids[:, None])[:, 0]
    return _checked(ids, best)


def _checked(ids_n: Tensor, best_n: Tensor) -> list[int | None]:
    finite = torch.isfinite(best_n).tolist()
    return [token if ok else None for token, ok in zip(ids_n.tolist(), finite, strict=True)]


def _draw(logits_nV: Tensor, rows: Sequence[SampleRow]) -> list[int | None]:
    """Random rows: scale, cut, choose."""
    device = logits_nV.device
    keys_n = torch.tensor([row_key(r.seed, r.position) for r in rows], device=device)
    temperature = torch.tensor([r.params.temperature for r in rows], device=device)
    scaled_nbx = _in_blocks(logits_nV, temperature)
    cut = [i for i, r in enumerate(rows) if r.params.top_k > 0 or r.params.top_p < 1.0]
    tokens: list[int | None] = [None] * len(rows)
    whole = [i for i in range(len(rows)) if i not in cut]
    if whole:
        some = scaled_nbx if not cut else scaled_nbx[whole]
        chosen = _draw_whole(some, keys_n[whole], [rows[i].params for i in whole])
        for i, token in zip(whole, chosen, strict=True):
            tokens[i] = token
    if cut:
        some = scaled_nbx if not whole else scaled_nbx[cut]
        chosen = _draw_cut(some, keys_n[cut], [rows[i].params for i in cut])
        for i, token in zip(cut, chosen, strict=True):
            tokens[i] = token
    return tokens


def _in_blocks(logits_nV: Tensor, temperature_n: Tensor) -> Tensor:
    """Logits over temperature as [n, blocks, BLOCK], the rest of the last block -inf."""
    n, V = logits_nV.shape
    padded = -(-V // BLOCK) * BLOCK
    scaled = torch.empty(n, padded, dtype=torch.float32, device=logits_nV.device)
    torch.div(logits_nV, temperature_n[:, None], out=scaled[:, :V])
    scaled[:, V:] = float("-inf")
    return scaled.view(n, -1, BLOCK)


def _block_logsumexp(x_nbx: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum and log-sum-exp of every block, [n, blocks] each; -inf for empty blocks."""
    most = x_nbx.amax(-1)
    shift = most.clamp(min=torch.finfo(torch.float32).min)
    return most, shift + (x_nbx - shift[..., None]).exp_().sum(-1).log()


def _log_min_p(params: Sequence[SamplingParams], device: torch.device) -> Tensor:
    """How far below the largest scaled logit min_p lets others be, [n]."""
    values = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
    return torch.tensor(values, device=device)


def _draw_whole(x_nbx: Tensor, keys_n: Tensor, params: Sequence[SamplingParams]) -> list:
    """Sample rows without top-k and top-p, in two levels."""
    n, blocks, _ = x_nbx.shape
    x_nbx = _above_min_p(x_nbx, params)
    _, block_lse = _block_logsumexp(x_nbx)
    counter = torch.arange(blocks, device=x_nbx.device)
    noisy = block_lse.double() + gumbel(keys_n, counter, stream=BLOCK_STREAM)
    block_n = noisy.argmax(-1)
    first_n = block_n * BLOCK
    inner = x_nbx[torch.arange(n, device=x_nbx.device), block_n]
    counter = first_n[:, None] + torch.arange(BLOCK, device=x_nbx.device)
    noisy = inner.double() + gumbel(keys_n, counter, stream=TOKEN_STREAM)
    return pick_largest(noisy, counter)


def _above_min_p(x_nbx: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """-inf where min_p excludes a token."""
    if not any(p.min_p > 0 for p in params):
        return x_nbx
    floor_n = x_nbx.amax((1, 2)) + _log_min_p(params, x_nbx.device)
    return x_nbx.masked_fill(x_nbx < floor_n[:, None, None], float("-inf"))


def _draw_cut(x_nbx: Tensor, keys_n: Tensor, params: Sequence[SamplingParams]) -> list:
    """Sample rows with top-k or top-p."""
    tokens: list = [None] * len(params)
    for done, kept, ids in _heads(x_nbx, params):
        noisy = kept.double() + gumbel(keys_n[done], ids, stream=TOKEN_STREAM)
        for i, token in zip(done.tolist(), pick_largest(noisy, ids), strict=True):
            tokens[i] = token
    return tokens


def _heads(
    x_nbx: Tensor, params: Sequence[SamplingParams]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """What top-k, top-p and min-p keep: the head of the sorted distribution.

    The `width` largest values lie in the `width` blocks with the largest maxima. Rows whose head is
    longer than one width try the next; the last sorts the whole vocabulary.

    Yields: some of the rows int64 [m], each once; their values in descending order, -inf where not
        kept, fp32 [m, width]; the values' ids, int64.
    """
    device = x_nbx.device
    vocabulary = x_nbx.shape[1] * BLOCK
    block_max, block_lse = _block_logsumexp(x_nbx)
    total = block_lse.double().logsumexp(-1)
    limits = [p.top_k if 0 < p.top_k < vocabulary else vocabulary for p in params]
    top_k = torch.tensor(limits, device=device)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)
    log_min_p = _log_min_p(params, device)
    rows = torch.arange(len(params), device=device)
    for width in (*HEAD_WIDTHS, vocabulary):
        values, ids = _largest(x_nbx[rows], block_max[rows], min(width, vocabulary))
        mass = (values.double() - total[rows, None]).exp().sum(-1)
        by_rank = top_k[rows] <= values.shape[1]
        by_mass = (top_k[rows] >= vocabulary) & (mass >= top_p[rows])
        # The whole row is always enough, even if rounding leaves its mass below top_p.
        enough = by_rank | by_mass | (values.shape[1] == vocabulary)
        done = rows[enough]
        if len(done):
            kept = _keep_head(
                values[enough], total[done], top_k[done], top_p[done], log_min_p[done], vocabulary
            )
            yield done, kept, ids[enough]
        rows = rows[~enough]
        if not len(rows):
            break


def _largest(x_nbx: Tensor, block_max_nb: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` largest values of every row in descending order, equal ones by id ascending, and
    their ids, [n, width]."""
    blocks = x_nbx.shape[1]
    if width >= blocks:  # no block can be left out
        return _ordered_topk(x_nbx.flatten(1), width)
    # Ascending blocks keep candidates in the order of their ids.
    top_blocks = _ordered_topk(block_max_nb, width)[1].sort(-1).values
    candidates = x_nbx.gather(1, top_blocks[..., None].expand(-1, -1, BLOCK)).flatten(1)
    values, at = _ordered_topk(candidates, width)
    return values, top_blocks.gather(1, at // BLOCK) * BLOCK + at % BLOCK


def _ordered_topk(x_nm: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """torch.topk with a defined order among equal values: the lower index first."""
    if width == x_nm.shape[1]:
        ordered = x_nm.sort(dim=-1, descending=True, stable=True)
        return ordered.values, ordered.indices
    bits = (x_nm + 0.0).view(torch.int32)  # -0 becomes 0
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).masked_fill_(x_nm.isnan(), 0x7FFFFFFF).long()
    index = torch.arange(x_nm.shape[1], device=x_nm.device)
    at = ((order << 32) - index).topk(width, dim=-1).indices
    return x_nm.gather(1, at), at


def _keep_head(
    values_nm: Tensor,
    total_n: Tensor,
    top_k_n: Tensor,
    top_p_n: Tensor,
    log_min_p_n: Tensor,
    vocabulary: int,
) -> Tensor:
    """Descending values with everything outside top-k, then top-p (of what top-k left), then min_p
    set to -inf. total_n: log-sum-exp of the whole rows."""
    rank = torch.arange(values_nm.shape[1], device=values_nm.device)
    values_nm = values_nm.masked_fill(rank >= top_k_n[:, None], float("-inf"))
    limited = top_k_n < vocabulary
    total_n = torch.where(limited, values_nm.double().logsumexp(-1), total_n)
    probs = (values_nm.double() - total_n[:, None]).exp()
    before = probs.cumsum(-1) - probs
    outside = (before >= top_p_n[:, None]) & (rank > 0)
    outside |= values_nm < (values_nm[:, 0] + log_min_p_n)[:, None]
    return values_nm.masked_fill(outside, float("-inf"))
