"""Three tiny models, their prompts and the forwards that every target runs.

Weights are `checkpoint.dummy`'s: a function of seed, name and index, the same on every device.
"""

from __future__ import annotations

from dataclasses import dataclass

from inkling_rocm.config import AttentionConfig, InklingConfig, MoEConfig, TextConfig


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One model and what is run on it.

    Attributes:
        seed: of the weights. prompts: token ids of each request.
        chunks: prompt tokens of each request in each prefill forward; they add up to the prompts.
        decode_steps: forwards of one token a request after the prompts.
    """

    name: str
    config: InklingConfig
    seed: int
    prompts: tuple[tuple[int, ...], ...]
    chunks: tuple[tuple[int, ...], ...]
    decode_steps: int

    @property
    def continuations(self) -> tuple[tuple[int, ...], ...]:
        """The tokens fed after each prompt, decode_steps of them."""
        return tuple(_prompt(20 + i, self.decode_steps) for i in range(len(self.prompts)))


def _attention(heads, kv_heads, head_dim, d_rel, extent, window, floor=None) -> AttentionConfig:
    return AttentionConfig(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, d_rel=d_rel, extent=extent,
        window=window, log_floor=floor, log_alpha=0.3,
    )  # fmt: skip


def _config(
    local: AttentionConfig,
    glob: AttentionConfig,
    is_local: tuple[bool, ...],
    is_moe: tuple[bool, ...],
    moe: MoEConfig,
    *,
    hidden: int,
    dense: int,
    taps: int,
    mup: float,
) -> InklingConfig:
    text = TextConfig(
        hidden_size=hidden,
        num_layers=len(is_local),
        vocab_size=160,
        unpadded_vocab_size=150,
        context_length=256,
        rms_norm_eps=1e-6,
        conv_taps=taps,
        dense_intermediate_size=dense,
        mup_multiplier=mup,
        local_attention=local,
        global_attention=glob,
        layer_is_local=is_local,
        layer_is_moe=is_moe,
        moe=moe,
    )
    return InklingConfig(
        text=text, mtp=None, audio=None, vision=None, dtype="float32", eos_token_ids=(2,)
    )


def _prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple((37 * i * i + 11 * i + 53 * seed + 3) % 150 for i in range(length))


def _moe(experts, top_k, shared, width, scale) -> MoEConfig:
    return MoEConfig(
        num_experts=experts, top_k=top_k, num_shared_experts=shared, intermediate_size=width,
        route_scale=scale,
    )  # fmt: skip


PROBLEMS: dict[str, Problem] = {
    problem.name: problem
    for problem in (
        # A window shorter than the prompt, grouped heads, the log scaling in reach.
        Problem(
            name="dense-moe",
            config=_config(
                _attention(4, 2, 16, 4, 7, 7),
                _attention(4, 1, 16, 4, 12, 0, 6),
                (True, False),
                (False, True),
                _moe(6, 2, 2, 16, 2.0),
                hidden=32,
                dense=48,
                taps=4,
                mup=2.0,
            ),
            seed=1,
            prompts=(_prompt(1, 11), _prompt(2, 4)),
            chunks=((7, 0), (4, 4)),
            decode_steps=2,
        ),
        # Every layer sparse, more experts than tokens, top-3 of 9 with one shared, wide heads.
        Problem(
            name="sparse",
            config=_config(
                _attention(2, 2, 32, 16, 5, 5),
                _attention(6, 2, 16, 16, 33, 0),
                (False, True),
                (True, True),
                _moe(9, 3, 1, 24, 2.5),
                hidden=48,
                dense=48,
                taps=4,
                mup=3.0,
            ),
            seed=4,
            prompts=(_prompt(3, 9), _prompt(4, 1), _prompt(5, 3)),
            chunks=((9, 1, 3),),
            decode_steps=2,
        ),
        # Three taps, one kv head for eight, an extent shorter than the context.
        Problem(
            name="grouped",
            config=_config(
                _attention(8, 1, 8, 1, 16, 16),
                _attention(8, 1, 8, 4, 5, 0, 1),
                (True, False),
                (True, False),
                _moe(4, 1, 3, 16, 8.0),
                hidden=64,
                dense=40,
                taps=3,
                mup=1.0,
            ),
            seed=3,
            prompts=(_prompt(6, 12),),
            chunks=((1,), (11,)),
            decode_steps=3,
        ),
    )
}


def problem_named(name: str) -> Problem:
    """Raises: ValueError: no such problem; the message lists those there are."""
    if name not in PROBLEMS:
        raise ValueError(f"unknown parity problem {name!r}; there are: {', '.join(PROBLEMS)}")
    return PROBLEMS[name]
