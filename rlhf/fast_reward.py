"""The reward model's forward pass by hand: weights folded, and attention laid out so that its softmax vectorises.

Layout and folding are those of `rlhf.fast_policy`; a column is (sequence, position). Softmax over a last dimension of
14 entries takes eighteen times as long as over the one before it when the last is a multiple of 16: scores are laid out
(keys, queries), the queries padded.
"""

import torch
from torch import nn

from rlhf import kernels
from rlhf.fast_policy import fold, normalise, table_starts, with_ones
from rlhf.transformer import Trunk


class FastReward:
    """Score responses with the weights that the model has now; later changes of them are not seen.

    Sequences are scored `batch` at a time, in buffers made once: memory fresh from the system costs more than
    the arithmetic done in it.
    """

    @torch.no_grad()
    def __init__(self, trunk: Trunk, head: nn.Sequential, *, first_content_id: int, batch: int) -> None:
        config, first, last = trunk.config, head[0], head[2]
        K, H, T, n_columns = config.d_model, config.n_heads, config.seq_len, batch * config.seq_len
        D, padded = K // H, -(-T // 16) * 16
        self._folded = fold(trunk, first.weight, first.bias, first_content_id=first_content_id)  # type: ignore[arg-type]
        self._last, self._batch, self._shape = last, batch, (H, D, T)
        self._starts = table_starts(config, config.vocab_size - first_content_id)
        self._x, self._rstd = torch.empty(K, n_columns), torch.empty(1, n_columns)
        self._read, self._qkv = with_ones(K, n_columns), torch.empty(3 * K, n_columns)
        self._inner, self._active = torch.empty(config.d_ff, n_columns), with_ones(config.d_ff, n_columns)
        arrays = self._x, self._read, self._rstd, self._qkv, self._inner, self._active
        self._arrays = tuple(buffer.numpy() for buffer in arrays)
        self._query, self._keys_values = torch.zeros(batch, H, D, padded), torch.empty(2, batch, H, D, T)
        self._scores, self._probs = (torch.empty(batch * H, T, padded) for _ in range(2))
        self._mixed = torch.empty(batch * H, D, padded)

    @torch.no_grad()
    def score(self, prompts: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
        """Score responses (N * G, resp_len) of content-token indices against prompts (N, prompt_len): (N * G,)."""
        group = responses.shape[0] // prompts.shape[0]
        in_prompt, in_response = self._starts
        entries = torch.cat([(prompts + in_prompt).repeat_interleave(group, 0), responses + in_response], 1)
        return torch.cat([self._score(chunk.flatten()) for chunk in entries.split(self._batch)])

    def _score(self, entries: torch.Tensor) -> torch.Tensor:
        """Score B sequences given as entries (B * T,) of the table of embedded tokens."""
        C, columns, table = len(entries), entries.numpy(), self._folded.table
        buffers = self._x, self._read, self._qkv, self._inner, self._active
        x, read, qkv, inner, active = (buffer[:, :C] for buffer in buffers)
        x_array, read_array, rstd, qkv_array, inner_array, active_array = self._arrays
        kernels.look_up(table.x, columns, x_array, 0)
        for n, weights in enumerate(self._folded.layers):
            if n == 0:
                kernels.look_up(table.qkv, columns, qkv_array, 0)
            else:
                normalise(x_array, read_array, rstd, 0, C)
                torch.mm(weights.qkv, read, out=qkv)
            self._attend(qkv, read[:-1])
            x.addmm_(weights.out, read)
            normalise(x_array, read_array, rstd, 0, C)
            torch.mm(weights.up, read, out=inner)
            kernels.gelu(inner_array, active_array, 0, C)
            x.addmm_(weights.down, active)
        normalise(x_array, read_array, rstd, 0, C)
        pooled = read.unflatten(1, (-1, self._shape[2])).mean(2)  # (K + 1, B): the mean of ones is one
        scores: torch.Tensor = self._last(nn.functional.gelu(self._folded.head @ pooled).t())
        return scores.squeeze(1)

    def _attend(self, qkv: torch.Tensor, out: torch.Tensor) -> None:
        """Mix values, all positions seeing all: (3K, B * T) into (K, B * T)."""
        H, D, T = self._shape
        B = qkv.shape[1] // T
        query, *keys_values = qkv.unflatten(1, (B, T)).unflatten(0, (3, H, D)).permute(0, 3, 1, 2, 4)  # (B, H, D, T)
        self._query[:B, ..., :T] = query
        for mine, theirs in zip(self._keys_values, keys_values, strict=True):
            mine[:B] = theirs
        q, (k, v) = self._query[:B].flatten(0, 1), self._keys_values[:, :B].flatten(1, 2)
        scores, probs, mixed = self._scores[: B * H], self._probs[: B * H], self._mixed[: B * H]
        torch.bmm(k.transpose(1, 2), q, out=scores)  # (B * H, keys, queries)
        torch.softmax(scores, 1, out=probs)
        torch.bmm(v, probs, out=mixed)
        out.unflatten(1, (B, T)).unflatten(0, (H, D)).copy_(mixed.view(B, H, D, -1)[..., :T].permute(1, 2, 0, 3))
