"""The policy's forward pass by hand: features lead, rows trail, keys and values are kept, a prompt runs once a group.

At these sizes a plain forward spends its time in softmax over a dozen entries, LayerNorm over 64 and the module
system. Here every tensor is (features, columns): whatever is not a matrix product runs over long contiguous columns.
A column is one token: first the prompts' (position, prompt), then the responses' (position, member, prompt).

Weights are folded once a step (`fold`): LayerNorm's gain and bias, the softmax scale and the temperature go into the
matrix that reads the normalised values; biases are one more matrix column, met by a row of ones. The residual stream
is read only through LayerNorm, which subtracts its mean; so its writers are centred instead, and LayerNorm becomes
division by the root mean square.

What the first block reads is decided by a token and its position, so it is projected once for every token where it can
stand (`Table`: 288 columns in place of 992) and looked up. With vocabularies of hundreds of tokens the table outgrows
the batch and costs more than it saves; the results stay the same. The last block computes only what is read later: of
a prompt, its last position, and the keys and values of the others.

Left out: autograd. `rlhf.fast_grad` is the backward pass over what `Rollout` keeps.
"""

from typing import NamedTuple

import torch
from torch import nn

from rlhf import kernels
from rlhf.kernels import Array
from rlhf.transformer import Block, ModelConfig, Trunk

LN_EPS = 1e-5


class FoldedLayer(NamedTuple):
    """Hold one block's matrices, each with its bias as last column; K = d_model."""

    qkv: torch.Tensor  # (3K, K + 1), query rows divided by sqrt(head_dim)
    out: torch.Tensor  # (K, K + 1), columns of mean zero
    up: torch.Tensor  # (d_ff, K + 1)
    down: torch.Tensor  # (K, d_ff + 1), columns of mean zero


class Table(NamedTuple):
    """Hold the first block's input and projection for every token where it can stand, in E = P * F + R * V columns.

    First each position of the prompt by the F tokens before the content tokens, then each of the response by the V
    content tokens.
    """

    x: Array  # (K, E): embedded, of mean zero
    read: torch.Tensor  # (K + 1, E): normalised, and ones
    rstd: Array  # (1, E)
    qkv: Array  # (3K, E)


class Folded(NamedTuple):
    """Hold a transformer's weights as the fast pass reads them."""

    table: Table
    layers: list[FoldedLayer]
    head: torch.Tensor  # (outputs, K + 1)


def fold(trunk: Trunk, head: torch.Tensor, head_bias: torch.Tensor | None = None, *, first_content_id: int) -> Folded:
    """Fold weights; `head` (outputs, K) is what reads the final LayerNorm."""
    layers = [_fold_block(block) for block in trunk.blocks]  # type: ignore[arg-type]
    return Folded(_table(trunk, layers[0].qkv, first_content_id), layers, _reader(trunk.ln, head, head_bias))


def _table(trunk: Trunk, qkv: torch.Tensor, first_content_id: int) -> Table:
    tok, pos = (w.weight.t() - w.weight.mean(1) for w in (trunk.tok, trunk.pos))  # (K, vocab), (K, seq_len)
    P, first = trunk.config.prompt_len, first_content_id
    n_prompt, n_response = P * first, trunk.config.resp_len * (trunk.config.vocab_size - first)
    x = tok.new_empty(len(tok), n_prompt + n_response)
    torch.add(pos[:, :P, None], tok[:, None, :first], out=x[:, :n_prompt].unflatten(1, (P, first)))
    torch.add(pos[:, P:, None], tok[:, None, first:], out=x[:, n_prompt:].unflatten(1, (trunk.config.resp_len, -1)))
    embedded, read, rstd = x.numpy(), with_ones(*x.shape), x.new_empty(1, x.shape[1]).numpy()
    normalise(embedded, read.numpy(), rstd, 0, x.shape[1])
    return Table(embedded, read, rstd, (qkv @ read).numpy())


def table_starts(config: ModelConfig, n_content: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the table's columns of token 0 at each prompt position (P,), of content token 0 at each other (R,)."""
    first = config.vocab_size - n_content
    return torch.arange(config.prompt_len) * first, config.prompt_len * first + torch.arange(
        config.resp_len
    ) * n_content


def _fold_block(block: Block) -> FoldedLayer:
    attn, ff = block.attn, block.ff
    qkv = _reader(block.ln1, attn.qkv.weight, attn.qkv.bias)
    width = qkv.shape[1] - 1
    qkv[:width] *= (width // attn.n_heads) ** -0.5
    return FoldedLayer(
        qkv=qkv,
        out=_writer(attn.out.weight, attn.out.bias),
        up=_reader(block.ln2, ff[0].weight, ff[0].bias),  # type: ignore[arg-type]
        down=_writer(ff[2].weight, ff[2].bias),  # type: ignore[arg-type]
    )


def _reader(norm: nn.LayerNorm, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Fold `W (g * x + b) + bias` into `[W * g | W b + bias]`."""
    shift = torch.mv(weight, norm.bias) if bias is None else torch.addmv(bias, weight, norm.bias)
    return torch.cat([weight * norm.weight, shift[:, None]], 1)


def _writer(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Fold a product that is added to the residual stream, its mean over features removed."""
    both = torch.cat([weight, bias[:, None]], 1)
    return both - both.mean(0)


class Part(NamedTuple):
    """Hold one layer's values on columns start <= c < stop; views made once: slicing costs as much as computing."""

    start: int
    stop: int
    read1: torch.Tensor  # (K + 1, C): normalised input of attention, and ones
    qkv: torch.Tensor  # (3K, C)
    qkv_array: Array  # what `qkv` is a part of
    qkv_start: int  # its first column there
    mixed: torch.Tensor  # (K + 1, C): attention's mixture of values, and ones
    read2: torch.Tensor  # (K + 1, C): normalised input of the feed-forward, and ones
    inner: torch.Tensor  # (d_ff, C): before GELU; after it, GELU's derivative
    active: torch.Tensor  # (d_ff + 1, C): after GELU, and ones


class Arrays(NamedTuple):
    """Hold all of a layer's columns as the kernels take them."""

    read1: Array  # as in `Part`, and so on
    rstd1: Array  # (1, C)
    mixed: Array
    read2: Array
    rstd2: Array  # (1, C)
    inner: Array
    active: Array
    prompt_qkv: Array  # (3, H, D, P, N)
    prompt_probs: Array  # (P, H, P, N): by query, head and key
    cache: Array  # (3, H, D, T, B)
    probs: Array  # (T, H, T, B): of the queries in responses


class Stream(NamedTuple):
    """Hold the residual stream of the columns that run at once."""

    x: torch.Tensor  # (K, C)
    array: Array  # what x is the last columns of
    start: int  # x's first column in it


class Predict(NamedTuple):
    """Hold the views with which one response position is predicted."""

    start: int  # the first of its columns, and the one behind the last
    stop: int
    entries: torch.Tensor  # (B,): the token before it, as a column of the table
    entries_array: Array  # the same
    read: torch.Tensor  # (K + 1, B): normalised hidden state, and ones
    logits: torch.Tensor  # (V, B): shared scratch
    logp: torch.Tensor  # (V, B)


class LayerBuffers:
    """Keep one layer's activations of a batch: N prompts of P tokens, G responses each, R response tokens.

    The last response token is never an input. `cache` holds the responses' queries, keys and values behind the
    prompt's keys and values, which are written out for each of the group: the kernels run over whole columns.

    `after` are the columns that run on behind attention; in the last layer that leaves out all but the prompts' last.
    """

    def __init__(self, config: ModelConfig, n_prompts: int, group: int, *, last: bool) -> None:
        K, H, P, N, B = config.d_model, config.n_heads, config.prompt_len, n_prompts, n_prompts * group
        D, steps = K // H, config.resp_len - 1
        split, n_columns, T = P * N, P * N + steps * B, P + steps
        self.first_query = P - 1 if last else 0
        self.start, self.base = self.first_query * N, split - P * B  # `base`: where response columns would have begun
        self.read1, self.read2, self.mixed = (with_ones(K, n_columns) for _ in range(3))
        self.inner, self.active = torch.empty(config.d_ff, n_columns), with_ones(config.d_ff, n_columns)
        self.prompt_qkv, self.cache = torch.empty(3 * K, split), torch.empty(3 * K, T * B)
        self.prompt = self._part(0, split, self.prompt_qkv, 0)
        self.prompt_after = self._part(self.start, split, self.prompt_qkv, self.start)
        self.after = self._part(self.start, n_columns, self.prompt_qkv, self.start)
        self.rest = self._part(split, n_columns, self.cache, P * B)
        self.steps = [self._part(split + t * B, split + t * B + B, self.cache, (P + t) * B) for t in range(steps)]
        self.cached_prompt = self.cache.view(3 * K, T, group, N)[K:, :P]
        self.prompt_to_cache = self.prompt_qkv.view(3 * K, P, 1, N)[K:]
        self.arrays = Arrays(
            self.read1.numpy(), torch.empty(1, n_columns).numpy(), self.mixed.numpy(),
            self.read2.numpy(), torch.empty(1, n_columns).numpy(), self.inner.numpy(), self.active.numpy(),
            self.prompt_qkv.view(3, H, D, P, N).numpy(), torch.empty(P, H, P, N).numpy(),
            self.cache.view(3, H, D, T, B).numpy(), torch.empty(T, H, T, B).numpy(),
        )  # fmt: skip

    def _part(self, start: int, stop: int, qkv: torch.Tensor, qkv_start: int) -> Part:
        full, part = (self.mixed, self.read2, self.inner, self.active), qkv[:, qkv_start : qkv_start + stop - start]
        views = (values[:, start:stop] for values in full)
        return Part(start, stop, self.read1[:, start:stop], part, qkv.numpy(), qkv_start, *views)


def with_ones(rows: int, columns: int) -> torch.Tensor:
    """Return a buffer (rows + 1, columns) whose last row is ones: where the next product's biases are met."""
    full = torch.empty(rows + 1, columns)
    full[-1] = 1
    return full


def normalise(x: Array, read: Array, rstd: Array, start: int, stop: int, *, x_start: int = 0) -> None:
    """Divide columns of x (K, X) by their root mean square into columns of the upper rows of `read` (K + 1, C)."""
    kernels.normalise(x, x_start, read, rstd, start, stop, LN_EPS)


class Rollout:
    """Run a folded policy over N prompts with G responses each, in buffers made once.

    With `keep`, every layer keeps its activations, as sampling and a backward pass need; without, one layer's
    buffers serve all but the last. Columns (B = G * N) are ordered (member, prompt).
    """

    def __init__(self, config: ModelConfig, *, n_prompts: int, group: int, n_content: int, keep: bool = True) -> None:
        K, P, N, B, R = config.d_model, config.prompt_len, n_prompts, n_prompts * group, config.resp_len
        V, steps = n_content, R - 1
        self.config, self.n_prompts, self.group, self.first_id = config, N, group, config.vocab_size - V
        self._prompt_starts, self._response_starts = table_starts(config, V)
        self.layers: list[LayerBuffers] = []
        for n in range(config.n_layers):
            last = n + 1 == config.n_layers
            new = keep or last or not n
            self.layers.append(LayerBuffers(config, N, group, last=last) if new else self.layers[0])
        self.entries = torch.empty(P * N + steps * B, dtype=torch.long)  # each column's column in the table
        self.final = with_ones(K, N + steps * B)  # normalised; a column for each prediction, the first by prompt
        self.final_array, self.final_rstd = self.final.numpy(), torch.empty(1, N + steps * B).numpy()
        self.tokens = torch.empty(R, B, dtype=torch.long)  # content-token indices
        self.logp = torch.empty(R, V, B)
        self._x_prompt, self._x_step, self._x_rest = (stream(K, n) for n in (P * N, B, steps * B))
        self._x_last = Stream(self._x_prompt.x[:, -N:], self._x_prompt.array, P * N - N)
        self._prompt_entries = self.entries[: P * N].numpy()
        self._first = self._predict_views(0, N, torch.empty(V, N))
        self._rest = self._predict_views(N, N + steps * B, torch.empty(V, steps * B))
        self._steps = [
            self._predict_views(N + start, N + start + B, self.logp[1 + start // B]) for start in range(0, steps * B, B)
        ]
        self._first_logp = self.logp[0].view(V, group, N)
        self._token_rows, self._draws = (
            list(self.tokens),
            list(zip(self.logp.numpy(), self.tokens.numpy(), strict=True)),
        )

    def _predict_views(self, start: int, stop: int, logp: torch.Tensor) -> Predict:
        read, shift = self.final[:, start:stop], len(self.entries) - self.final.shape[1]
        entries = self.entries[shift + start : shift + stop]
        return Predict(start, stop, entries, entries.numpy(), read, torch.empty_like(logp), logp)

    def sample(self, folded: Folded, prompts: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        """Sample responses (N * G, R) for prompts (N, P) by inverting the cumulative distribution at (N * G, R).

        Leaves them in `tokens` (R, B), and in `logp` (R, V, B) the log probabilities they were drawn from.
        """
        self._embed_prompts(folded, prompts)
        for n in range(len(self.layers)):
            self._prompt_block(folded, n)
        self._predict_first(folded)
        for t, (uniform, (logp, tokens)) in enumerate(zip(self.to_columns(uniforms).numpy(), self._draws, strict=True)):
            if t:
                self._step(folded, t - 1)
            kernels.draw(logp, uniform, tokens)
        return self.from_columns(self.tokens)

    def score(self, folded: Folded, prompts: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return log probabilities (R, V, B) at every prefix of given tokens (R, B). The result is overwritten."""
        self._embed_prompts(folded, prompts)
        self._embed_rest(folded, tokens)
        for n, buffers in enumerate(self.layers):
            self._prompt_block(folded, n)
            if buffers.steps:
                self._project(folded, n, buffers.rest, self._x_rest, self._rest.entries_array)
                self._attend(buffers, 0, len(buffers.steps))
                self._finish(folded.layers[n], buffers, buffers.rest, self._x_rest)
        self._predict_first(folded)
        if self._steps:
            self._predict(folded, self._rest, self._x_rest)
            by_position = self._rest.logp.unflatten(1, (-1, tokens.shape[1]))  # (V, R - 1, B)
            self.logp[1:] = by_position.transpose(0, 1)
        return self.logp

    def to_columns(self, rows: torch.Tensor) -> torch.Tensor:
        """Reorder (N * G, R), the G of each prompt side by side, to (R, G * N)."""
        return rows.view(self.n_prompts, self.group, -1).permute(2, 1, 0).reshape(rows.shape[1], -1)

    def from_columns(self, columns: torch.Tensor) -> torch.Tensor:
        """Reorder (R, G * N) or (R, V, G * N) to (N * G, R) or (N * G, R, V). Always a copy: buffers are used again."""
        full = columns.unflatten(-1, (self.group, self.n_prompts))
        order = (-1, -2, *range(columns.ndim - 1))
        return full.permute(order).clone(memory_format=torch.contiguous_format).flatten(0, 1)

    def _embed_prompts(self, folded: Folded, prompts: torch.Tensor) -> None:
        entries = self.entries[: prompts.numel()]
        torch.add(prompts.t(), self._prompt_starts[:, None], out=entries.view(-1, len(prompts)))
        kernels.look_up(folded.table.x, self._prompt_entries, self._x_prompt.array, 0)

    def _embed_rest(self, folded: Folded, tokens: torch.Tensor) -> None:
        entries = self._rest.entries
        torch.add(tokens[:-1], self._response_starts[:-1, None], out=entries.view(len(tokens) - 1, tokens.shape[1]))
        kernels.look_up(folded.table.x, self._rest.entries_array, self._x_rest.array, 0)

    def _step(self, folded: Folded, t: int) -> None:
        """Run response token t through all layers and predict the next."""
        x, views = self._x_step, self._steps[t]
        torch.add(self._token_rows[t], self._response_starts[t], out=views.entries)
        kernels.look_up(folded.table.x, views.entries_array, x.array, 0)
        for n, buffers in enumerate(self.layers):
            self._project(folded, n, buffers.steps[t], x, views.entries_array)
            self._attend(buffers, t, t + 1)
            self._finish(folded.layers[n], buffers, buffers.steps[t], x)
        self._predict(folded, views, x)

    def _prompt_block(self, folded: Folded, n: int) -> None:
        buffers = self.layers[n]
        self._project(folded, n, buffers.prompt, self._x_prompt, self._prompt_entries)
        arrays, P = buffers.arrays, self.config.prompt_len
        kernels.attend(arrays.prompt_qkv, arrays.prompt_probs, arrays.mixed, 0, buffers.first_query, P)
        buffers.cached_prompt.copy_(buffers.prompt_to_cache)
        x = self._x_last if buffers.start else self._x_prompt
        self._finish(folded.layers[n], buffers, buffers.prompt_after, x)

    def _attend(self, buffers: LayerBuffers, first: int, last: int) -> None:
        """Let response positions first <= t < last attend to the prompt and to those before them."""
        arrays, P = buffers.arrays, self.config.prompt_len
        kernels.attend(arrays.cache, arrays.probs, arrays.mixed, buffers.base, P + first, P + last)

    def _project(self, folded: Folded, n: int, part: Part, stream: Stream, entries: Array) -> None:
        """Compute block n's queries, keys and values from the residual stream, or look up the first's."""
        if n == 0:
            kernels.look_up(folded.table.qkv, entries, part.qkv_array, part.qkv_start)
        else:
            arrays = self.layers[n].arrays
            normalise(stream.array, arrays.read1, arrays.rstd1, part.start, part.stop, x_start=stream.start)
            torch.mm(folded.layers[n].qkv, part.read1, out=part.qkv)

    def _finish(self, weights: FoldedLayer, buffers: LayerBuffers, part: Part, stream: Stream) -> None:
        """Add attention's and the feed-forward's output to the residual stream."""
        arrays, x = buffers.arrays, stream.x
        x.addmm_(weights.out, part.mixed)
        normalise(stream.array, arrays.read2, arrays.rstd2, part.start, part.stop, x_start=stream.start)
        torch.mm(weights.up, part.read2, out=part.inner)
        kernels.gelu(arrays.inner, arrays.active, part.start, part.stop)
        x.addmm_(weights.down, part.active)

    def _predict_first(self, folded: Folded) -> None:
        self._predict(folded, self._first, self._x_last)
        self._first_logp.copy_(self._first.logp[:, None])

    def _predict(self, folded: Folded, views: Predict, stream: Stream) -> None:
        normalise(stream.array, self.final_array, self.final_rstd, views.start, views.stop, x_start=stream.start)
        torch.mm(folded.head, views.read, out=views.logits)
        torch.log_softmax(views.logits, 0, out=views.logp)


def stream(n_features: int, n_columns: int) -> Stream:
    x = torch.empty(n_features, n_columns)
    return Stream(x, x.numpy(), 0)
