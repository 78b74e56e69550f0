"""DFlash's draft forward from its definition: numpy in float64, one loop an index, nothing shared.

`fault` makes it wrong in one way, which a comparison with it must notice.
"""

import math

import numpy as np

FAULTS = (
    "no rope",
    "block at position zero",
    "block masked the other way",
    "block unseen",
    "window one short",
    "no q norm",
    "no k norm",
    "context normed by the layer",
    "features swapped",
    "gate and up swapped",
)


def rms(x, weight, eps):
    return np.asarray(x) / math.sqrt(np.mean(np.square(x)) + eps) * weight


def silu(x):
    return x / (1 + np.exp(-x))


def rope(x, position, theta):
    """Head vector x turned: component i with component i + D/2."""
    half, out = len(x) // 2, np.array(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        a, b = x[i], x[i + half]
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def block_hidden(config, tensors, features, embeds, fault=None):
    """Hidden states of one block.

    Args:
        tensors: released name -> array. features: [n, layers * H] at positions 0 .. n-1.
        embeds: [M, H] at positions n ...
    Returns: [M, H] after the final norm.
    """
    t = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
    eps, D = config["rms_norm_eps"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    n = len(features)
    if fault == "features swapped":
        features = np.roll(features, config["hidden_size"], axis=1)
    context = [rms(t["fc.weight"] @ f, t["hidden_norm.weight"], eps) for f in features]
    x = np.array(embeds, np.float64)

    def turned(v, position):
        if fault == "no rope":
            return v
        if fault == "block at position zero" and position >= n:
            position -= n
        return rope(v, position, config["rope_theta"])

    for layer in range(config["num_hidden_layers"]):
        w = {k.removeprefix(f"layers.{layer}."): v for k, v in t.items()}
        sliding = config["layer_types"][layer] == "sliding_attention"
        causal = config.get("is_causal", sliding)
        window = config["sliding_window"] if sliding else math.inf
        window -= fault == "window one short"
        inputs = [rms(row, w["input_layernorm.weight"], eps) for row in x]
        past = context
        if fault == "context normed by the layer":
            past = [rms(c, w["input_layernorm.weight"], eps) for c in context]
        keys, values = [], []
        for position, y in enumerate([*past, *inputs]):
            k = (w["self_attn.k_proj.weight"] @ y).reshape(kv_heads, D)
            if fault != "no k norm":
                k = [rms(head, w["self_attn.k_norm.weight"], eps) for head in k]
            keys.append([turned(head, position) for head in k])
            values.append((w["self_attn.v_proj.weight"] @ y).reshape(kv_heads, D))
        result = []
        for i, y in enumerate(inputs):
            outs = []
            for h, q in enumerate((w["self_attn.q_proj.weight"] @ y).reshape(heads, D)):
                if fault != "no q norm":
                    q = rms(q, w["self_attn.q_norm.weight"], eps)
                q, g = turned(q, n + i), h // (heads // kv_heads)
                scores, seen = [], []
                for p in range(n + len(x)):
                    in_block = p >= n
                    hidden_later = causal != (fault == "block masked the other way")
                    if in_block and hidden_later and p > n + i:
                        continue
                    if in_block and fault == "block unseen" and p != n + i:
                        continue
                    if n + i - p >= window:
                        continue
                    seen.append(values[p][g])
                    scores.append(float(np.dot(q, keys[p][g])) / math.sqrt(D))
                weights = np.exp(np.array(scores) - max(scores))
                outs.append(weights @ np.array(seen) / weights.sum())
            result.append(x[i] + w["self_attn.o_proj.weight"] @ np.concatenate(outs))
        x = np.array(result)
        for i, row in enumerate(result):
            y = rms(row, w["post_attention_layernorm.weight"], eps)
            gate, up = w["mlp.gate_proj.weight"] @ y, w["mlp.up_proj.weight"] @ y
            if fault == "gate and up swapped":
                gate, up = up, gate
            x[i] = row + w["mlp.down_proj.weight"] @ (silu(gate) * up)
    return np.array([rms(row, t["norm.weight"], eps) for row in x])
