"""What loading must produce, written out by hand: the packing, de-interleaving and sharding that
the weight table describes, without the weight table."""

from __future__ import annotations

import torch

from tests.checkpoint import tiny


def gates_then_ups(w13: torch.Tensor) -> torch.Tensor:
    """Rows g0,u0,g1,u1,... of the second to last axis -> all g, then all u."""
    pairs = w13.unflatten(-2, (-1, 2))
    return torch.cat((pairs[..., 0, :], pairs[..., 1, :]), dim=-2)


def block(tensors: dict, name: str, released: str, dense: bool) -> dict:
    """Parameters of a layer under `name`, whole, from released tensors under `released`."""
    t = {key.removeprefix(released): value for key, value in tensors.items()}
    a, m = "attn.", "mlp."
    out = {
        "attn_norm": t["attn_norm.weight"],
        "mlp_norm": t["mlp_norm.weight"],
        "attn_conv": t["attn_sconv.weight"][:, 0].t().float(),
        "mlp_conv": t["mlp_sconv.weight"][:, 0].t().float(),
        "attn.qkvr": torch.cat(
            [t[a + f"{x}.weight"] for x in ("wq_du", "wk_dv", "wv_dv", "wr_du")]
        ),
        "attn.k_conv": t[a + "k_sconv.weight"][:, 0].t().float(),
        "attn.v_conv": t[a + "v_sconv.weight"][:, 0].t().float(),
        "attn.q_norm": t[a + "q_norm.weight"],
        "attn.k_norm": t[a + "k_norm.weight"],
        "attn.rel_proj": t[a + "rel_logits_proj.proj"],
        "attn.o_proj": t[a + "wo_ud.weight"],
    }
    if dense:
        out |= {
            "mlp.gate_up": gates_then_ups(t[m + "w13_dn.weight"]),
            "mlp.down": t[m + "w2_md.weight"],
            "mlp.global_scale": t[m + "global_scale"].float(),
        }
    else:
        shared = m + "shared_experts.shared_"
        out |= {
            "moe.gate_weight": t[m + "gate.weight"],
            "moe.gate_bias": t[m + "gate.bias"].float(),
            "moe.global_scale": t[m + "gate.global_scale"].float(),
            "moe.w13": gates_then_ups(t[m + "experts.w13_weight"]),
            "moe.w2": t[m + "experts.w2_weight"],
            "moe.shared_w13": gates_then_ups(t[shared + "w13_weight"]),
            "moe.shared_w2": t[shared + "w2_weight"],
        }
    return {name + key: value for key, value in out.items()}


def parameters(tensors: dict) -> dict:
    """Every text and MTP parameter of the tiny checkpoint, whole."""
    out = {
        "embed": tensors["model.llm.embed.weight"],
        "embed_norm": tensors["model.llm.embed_norm.weight"],
        "final_norm": tensors["model.llm.norm.weight"],
        "lm_head": tensors["model.llm.unembed.weight"],
    }
    for i in range(tiny.L):
        out |= block(tensors, f"layers.{i}.", f"model.llm.layers.{i}.", i < tiny.NUM_DENSE)
    for m in range(tiny.MTP_BLOCKS):
        released = f"model.mtp.layers.{m}."
        for key in ("embed_norm", "hidden_norm", "input_proj"):
            out[f"mtp.{m}.{key}"] = tensors[f"{released}{key}.weight"]
        out |= block(tensors, f"mtp.{m}.block.", released + "transformer_block.", True)
    return out


def _is_local(name: str) -> bool:
    index = int(name.split(".")[1])
    return index in (tiny.MTP_LOCAL_IDS if name.startswith("mtp") else tiny.LOCAL_IDS)


def _distinct_kv(parts: list[torch.Tensor], kv_heads: int) -> list[torch.Tensor]:
    """One part of each run of ranks that hold the same kv head; they must be equal."""
    copies = max(1, len(parts) // kv_heads)
    for i, part in enumerate(parts):
        assert torch.equal(part, parts[i - i % copies])
    return parts[::copies]


def reassemble(name: str, shards: list[torch.Tensor]) -> torch.Tensor:
    """The whole parameter from one shard a rank."""
    last = name.rsplit(".", 1)[-1]
    n = len(shards)
    if last in ("embed", "lm_head") and "." not in name:
        return torch.cat(shards)
    if last in ("o_proj", "down", "w2", "shared_w2"):
        return torch.cat(shards, dim=-1)
    if last in ("gate_up", "w13", "shared_w13"):
        halves = [shard.chunk(2, dim=-2) for shard in shards]
        return torch.cat([g for g, _ in halves] + [u for _, u in halves], dim=-2)
    if last in ("qkvr", "k_conv", "v_conv"):
        kv_heads = tiny.LOCAL_KV if _is_local(name) else tiny.KV
        kv_rows = max(1, kv_heads // n) * tiny.D
        if last != "qkvr":
            assert all(shard.shape[1] == kv_rows for shard in shards)
            return torch.cat(_distinct_kv(shards, kv_heads), dim=1)
        heads = tiny.HEADS // n
        rows = [heads * tiny.D, kv_rows, kv_rows, heads * tiny.R]
        q, k, v, r = (list(x) for x in zip(*(s.split(rows) for s in shards), strict=True))
        return torch.cat([*q, *_distinct_kv(k, kv_heads), *_distinct_kv(v, kv_heads), *r])
    assert all(torch.equal(shard, shards[0]) for shard in shards)
    return shards[0]
