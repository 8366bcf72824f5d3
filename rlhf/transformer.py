"""Pre-LayerNorm transformer blocks, shared by the policy (causal) and the reward model (not causal).

Left out on purpose: dropout and weight tying. The models are small and trained on fresh samples.
"""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from rlhf.errors import raise_if_any

_MAX_LAYERS, _MAX_SIZE = 1000, 1_000_000  # a configuration is believed before its weights are read


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Size a transformer. `prompt_len + resp_len == seq_len`; `n_heads` divides `d_model`."""

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    d_ff: int
    seq_len: int
    prompt_len: int
    resp_len: int

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be a whole number from 1 to {most}, got {size!r}"
            for name, size in asdict(self).items()
            for most in [_MAX_LAYERS if name == "n_layers" else _MAX_SIZE]
            if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= most
        ]
        if not problems and self.d_model % self.n_heads:
            problems.append(f"n_heads must divide d_model, got {self.n_heads} and {self.d_model}")
        if not problems and self.prompt_len + self.resp_len != self.seq_len:
            problems.append(
                f"seq_len must be prompt_len + resp_len, got {self.seq_len}, {self.prompt_len}, {self.resp_len}"
            )
        raise_if_any(problems)

    @property
    def least_weights(self) -> int:
        """Return how many numbers the matrices of tokens, attention and feed-forward hold: nearly all of a model."""
        block = 4 * self.d_model**2 + 2 * self.d_model * self.d_ff
        return self.n_layers * block + self.vocab_size * self.d_model

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class KeyValue(NamedTuple):
    """Cache one layer's attention keys and values, each (B, H, T, head_dim)."""

    keys: torch.Tensor
    values: torch.Tensor

    def repeat(self, times: int) -> "KeyValue":
        """Repeat each row `times` in place: (B, ...) -> (B * times, ...)."""
        return KeyValue(self.keys.repeat_interleave(times, 0), self.values.repeat_interleave(times, 0))


class Attention(nn.Module):
    """Multi-head attention with one fused projection, laid out as (3, heads, head_dim)."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x: torch.Tensor, *, causal: bool, past: KeyValue | None) -> tuple[torch.Tensor, KeyValue]:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        mask = None
        if past is not None:
            k, v = torch.cat([past.keys, k], 2), torch.cat([past.values, v], 2)
            if causal and length > 1:  # query t sees all of the past and the block up to t
                seen = past.keys.shape[2]
                mask = torch.ones(length, seen + length, dtype=torch.bool).tril(seen)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal and past is None)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width)), KeyValue(k, v)


class Block(nn.Module):
    """Attention and feed-forward, each normalised first and added to the residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(config.d_model)
        self.attn = Attention(config.d_model, config.n_heads)
        self.ln2 = nn.LayerNorm(config.d_model)
        self.ff = nn.Sequential(
            nn.Linear(config.d_model, config.d_ff), nn.GELU(), nn.Linear(config.d_ff, config.d_model)
        )

    def forward(self, x: torch.Tensor, *, causal: bool, past: KeyValue | None) -> tuple[torch.Tensor, KeyValue]:
        mixed, cache = self.attn(self.ln1(x), causal=causal, past=past)
        x = x + mixed
        return x + self.ff(self.ln2(x)), cache


class Trunk(nn.Module):
    """Embed tokens at their positions and run the blocks: ids (B, T) -> (B, T, d_model)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tok = nn.Embedding(config.vocab_size, config.d_model)
        self.pos = nn.Embedding(config.seq_len, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.ln = nn.LayerNorm(config.d_model)

    def hidden(
        self, ids: torch.Tensor, *, causal: bool, past: list[KeyValue] | None = None
    ) -> tuple[torch.Tensor, list[KeyValue]]:
        """Return final hidden states (B, T, d_model) and each layer's cache; `past` holds earlier positions."""
        start = past[0].keys.shape[2] if past else 0
        x = self.tok(ids) + self.pos.weight[start : start + ids.shape[1]]
        caches = []
        for layer, block in enumerate(self.blocks):
            x, cache = block(x, causal=causal, past=past[layer] if past else None)
            caches.append(cache)
        return self.ln(x), caches
