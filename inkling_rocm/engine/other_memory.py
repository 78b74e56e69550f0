"""What an engine takes beside weights, pages and rings: told before anything of it is allocated, so
that a plan leaves room for it and names it."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from inkling_rocm.config import TextConfig
from inkling_rocm.engine.args import EngineArgs
from inkling_rocm.engine.buckets import SHORT_ROW, captured_prompts, captured_sizes
from inkling_rocm.engine.free_memory import GIB

# A captured kernel on the device, assumed; what a capture takes is logged beside the plan.
NODE_BYTES = 32 << 10
NODES_A_LAYER, NODES_A_STEP = 10, 24
# Of ops/rel_attention_triton.py and triton_attn, which import Triton.
SPLIT_PARTS, RAGGED_SPLIT_BYTES = 128, 1 << 29
BIAS_BLOCK, BIAS_BYTES = 128, 160 << 20
# torch's allocator keeps blocks that fit no later request: 1.36 times what the shapes say was
# reserved on an H200 (Inkling-Small's width, chunks of 8,192 tokens, prompts from graphs).
SLACK = 1.5


@dataclass(frozen=True, kw_only=True)
class OtherMemory:
    """Bytes on one device.

    Attributes:
        token_counts: of penalised sequences. draft_logits: what drafts were drawn from, for
            rejection sampling; both exact. split_keys: partial results of attention that is split
            along the keys, of the largest batch.
        forward: temporaries of the largest forward and its logits; graphs: of the largest captured
            one, and the graphs themselves; both estimated from shapes. 0 on a CPU, whose free
            memory the default share leaves mostly alone.
    """

    token_counts: int = 0
    draft_logits: int = 0
    split_keys: int = 0
    forward: int = 0
    graphs: int = 0

    @property
    def kept(self) -> int:
        """Allocated once, like pages and rings."""
        return self.token_counts + self.draft_logits + self.split_keys

    @property
    def total(self) -> int:
        return self.kept + self.forward + self.graphs

    def __str__(self) -> str:
        parts = [(f.name.replace("_", " "), getattr(self, f.name)) for f in fields(self)]
        return ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in parts if size) or "none"


NOTHING = OtherMemory()


def other_memory(
    text: TextConfig,
    args: EngineArgs,
    *,
    chunk: int,
    max_running: int,
    dtype: torch.dtype,
    device: torch.device,
    draft_depths: int,
    block_drafts: int,
) -> OtherMemory:
    """Args: as plan_memory has them. chunk: most prompt tokens of a forward."""
    drafts = draft_depths + block_drafts
    slots, vocabulary = max_running + 1, text.unpadded_vocab_size
    draft_logits = 0
    if args.speculative_use_rejection_sampling:
        draft_logits = slots * drafts * vocabulary * 4
    if device.type == "cpu":
        return OtherMemory(draft_logits=draft_logits)
    size = dtype.itemsize
    verified = max_running * (1 + drafts)
    forward = forward_bytes(text, args, chunk + verified, size)
    forward += logit_bytes(text, args, verified, size) + bias_bytes(text, chunk, max_running, size)
    graphs = 0
    if not (args.disable_cuda_graph or block_drafts):  # a draft model of its own has none
        sizes = captured_sizes(args, max_running)
        rounds = draft_depths if args.speculative_adaptive else 1
        tokens = sizes[-1] * max(1 + drafts, 2 * draft_depths)  # verified, or the blocks' window
        graphs = forward_bytes(text, args, tokens, size) + logit_bytes(text, args, tokens, size)
        prompts = captured_prompts(args, chunk=chunk, max_running=max_running)
        if prompts:
            graphs += forward_bytes(text, args, prompts[-1], size)
            graphs += bias_bytes(text, prompts[-1], max_running, size)
        nodes = NODES_A_LAYER * text.num_layers + NODES_A_STEP * (1 + draft_depths)
        graphs += (len(sizes) * rounds + 2 * len(prompts)) * nodes * NODE_BYTES
    return OtherMemory(
        token_counts=slots * vocabulary * 2,
        draft_logits=draft_logits,
        split_keys=split_bytes(text, max_running, draft_depths, drafts),
        forward=int(forward * SLACK),
        graphs=int(graphs * SLACK),
    )


def split_bytes(text: TextConfig, requests: int, draft_depths: int, drafts: int) -> int:
    """What ops/rel_attention_triton.py keeps for rows of a few tokens: decode, verification and the
    window of draft blocks, or the largest ragged batch that it splits."""
    heads, head_dim = 0, 0
    for layer in range(text.num_layers):
        attention = text.attention(layer)
        heads = max(heads, attention.num_heads)
        head_dim = max(head_dim, _power_of_two(attention.head_dim))
    each = 4 * heads * SPLIT_PARTS * (head_dim + 2)  # of a token
    rows = _power_of_two(requests)
    uniform = rows * _power_of_two(max(1 + drafts, 2 * draft_depths)) * each
    ragged = [n * rows * each for n in (2, 4, 8, SHORT_ROW)]
    return max(uniform, *(min(size, RAGGED_SPLIT_BYTES) for size in ragged))


def _power_of_two(n: int) -> int:
    """The next one."""
    return 1 << (n - 1).bit_length()


def bias_bytes(text: TextConfig, chunk: int, rows: int, size: int) -> int:
    """Rows of the relative bias that a prompt's attention has at a time."""
    widest = max(
        attention.num_heads * (attention.extent + BIAS_BLOCK)
        for attention in map(text.attention, range(text.num_layers))
    )
    return min((chunk + BIAS_BLOCK * rows) * widest * size, BIAS_BYTES)


def forward_bytes(text: TextConfig, args: EngineArgs, tokens: int, size: int) -> int:
    """Temporaries of one forward at their peak: the residual stream as it goes through a half of a
    layer, and the widest half. Args: text: as one rank sees it. size: of an element."""
    hidden, widest = text.hidden_size, 0
    for layer in range(text.num_layers):
        attention = text.attention(layer)
        query = attention.num_heads * (attention.head_dim + attention.d_rel)
        keys = attention.num_kv_heads * attention.head_dim
        widest = max(widest, 2 * query + 2 * keys + attention.num_heads * attention.head_dim)
        if text.layer_is_moe[layer]:
            assert text.moe is not None
            # Whole experts of a rank may get all choices; experts split by width always do.
            width = text.moe.intermediate_size // (1 if args.ep_size > 1 else args.ranks)
            chosen = text.moe.top_k + text.moe.num_shared_experts
            widest = max(widest, chosen * (width + hidden))
        else:
            widest = max(widest, 3 * text.dense_intermediate_size // args.ranks)
    return tokens * (4 * hidden + widest) * size


def logit_bytes(text: TextConfig, args: EngineArgs, rows: int, size: int) -> int:
    """fp32 logits, before them the model dtype's, which ranks gather in a buffer and then join."""
    copies = 1 if args.ranks == 1 else 3
    return rows * text.vocab_size * (4 + copies * size)
