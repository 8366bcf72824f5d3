"""The policy's backward pass by hand, over what a `Rollout` kept: all positions at once, no second forward pass.

Same layout as `rlhf.fast_policy`: (features, columns). With d for the gradient of the loss:

    Y = W X                          dW = dY X'       dX = W' dY
    n = x r, r = rsqrt(mean(x x))    dx = r (dn - n mean(dn n))
    o = sum_s p_s v_s                dv_s = p_s do    dp_s = do . v_s
    p = softmax(z), z_s = q . k_s    dz = p (dp - sum_s p_s dp_s)    dq = sum_s dz_s k_s    dk_s = dz_s q
"""

from collections.abc import Mapping

import torch
from torch import nn

from rlhf import kernels
from rlhf.fast_policy import Folded, FoldedLayer, LayerBuffers, Rollout
from rlhf.kernels import Array


def logit_gradient(rollout: Rollout, advantage: torch.Tensor) -> torch.Tensor:
    """Return the gradient (R, V, B) of `-(advantage * sum_t log pi).mean()` by the logits over temperature.

    For token v it is advantage (pi_v - [v was taken]) / B. advantage: (N * G,), the G of each prompt side by side.
    """
    gradient = rollout.logp.exp()
    gradient.scatter_add_(1, rollout.tokens[:, None], torch.full_like(gradient[:, :1], -1))
    return gradient.mul_(rollout.to_columns(advantage[:, None]) / len(advantage))


class Backward:
    """Turn the gradient by a rollout's logits into those by the policy's parameters, in buffers made once.

    All gradients lie side by side in `flat`, and every parameter's `.grad` is a view of it: clipping is one norm. So do
    the parameters: the policy's become views of `parameter`, and an optimiser has a single tensor to update.
    """

    def __init__(self, policy: nn.Module, rollout: Rollout) -> None:
        named, config, n_columns = dict(policy.named_parameters()), rollout.config, len(rollout.entries)
        self.parameter = nn.Parameter(torch.cat([p.detach().flatten() for p in named.values()]))
        self.flat = self.parameter.grad = torch.zeros_like(self.parameter)
        self._weights, self._grads = (_views(flat, named) for flat in (self.parameter.detach(), self.flat))
        for name, parameter in named.items():
            parameter.data, parameter.grad = self._weights[name], self._grads[name]
        self._rollout, self._n_prompt_columns = rollout, config.prompt_len * rollout.n_prompts
        n_entries = config.prompt_len * rollout.first_id + config.resp_len * len(rollout.logp[0])
        self._dx, self._dread = (torch.empty(config.d_model, n_columns) for _ in range(2))
        self._dtable_x, self._dtable = (
            torch.empty(config.d_model, n_entries),
            torch.empty(3 * config.d_model, n_entries),
        )
        self._dinner = torch.empty(config.d_ff, n_columns)
        self._dprompt = torch.empty_like(rollout.layers[0].prompt_qkv)
        self._dcache = torch.empty_like(rollout.layers[0].cache)
        self._dlogits = torch.empty(rollout.logp.shape[1], rollout.final.shape[1])
        self._dx_array, self._dread_array = self._dx.numpy(), self._dread.numpy()
        P, H, N, B = config.prompt_len, config.n_heads, rollout.n_prompts, rollout.tokens.shape[1]
        self._dprompt_array = self._dprompt.view(3, H, -1, P, N).numpy()
        self._dcache_array = self._dcache.view(3, H, -1, P + config.resp_len - 1, B).numpy()

    @torch.no_grad()
    def __call__(self, folded: Folded, dlogits: torch.Tensor, *, temperature: float) -> None:
        """Write the parameters' gradients for dlogits (R, V, B); both arguments as `fold` and the rollout had them."""
        rollout, N = self._rollout, self._rollout.n_prompts
        start = self._n_prompt_columns - N  # only the last of a prompt's columns predicts, and for the whole group
        torch.sum(dlogits[0].unflatten(1, (-1, N)), 1, out=self._dlogits[:, :N])
        self._dlogits[:, N:].unflatten(1, (-1, dlogits.shape[2])).copy_(dlogits[1:].transpose(0, 1))
        self._dx.zero_()
        torch.mm(folded.head[:, :-1].t(), self._dlogits, out=self._dread[:, start:])
        self._add_norm_gradient(rollout.final_array, rollout.final_rstd, columns_from=start)
        dhead = _weight_gradient(self._dlogits, rollout.final).div_(temperature)
        self._unfold_reader("ln", "head", dhead, rows=slice(rollout.first_id, None))
        for n in reversed(range(len(folded.layers))):
            self._block(folded, n)
        self._embeddings()

    def clip(self, max_norm: float) -> float:
        """Scale all gradients down to a joint norm of `max_norm`, and return the norm that they had."""
        norm = self.flat.norm().item()
        if norm > max_norm:
            self.flat.mul_(max_norm / (norm + 1e-6))
        return norm

    def _block(self, folded: Folded, n: int) -> None:
        """Take `_dx` (K, C) from behind a block to before it, and write the block's gradients."""
        name, weights, buffers = f"blocks.{n}", folded.layers[n], self._rollout.layers[n]
        after, dx, dread = buffers.after, self._dx[:, buffers.start :], self._dread[:, buffers.start :]
        dinner = self._dinner[:, buffers.start :]
        self._unfold_writer(f"{name}.ff.2", _weight_gradient(dx, after.active))
        torch.mm(weights.down[:, :-1].t(), dx, out=dinner)
        dinner *= after.inner  # holds GELU's derivative
        self._unfold_reader(f"{name}.ln2", f"{name}.ff.0", _weight_gradient(dinner, after.read2))
        torch.mm(weights.up[:, :-1].t(), dinner, out=dread)
        arrays = buffers.arrays
        self._add_norm_gradient(arrays.read2, arrays.rstd2, columns_from=buffers.start, norm_from=buffers.start)
        self._unfold_writer(f"{name}.attn.out", _weight_gradient(dx, after.mixed))
        torch.mm(weights.out[:, :-1].t(), dx, out=dread)
        dprompt, drest = self._attention(buffers)
        dqkv = self._layer_projection(weights, buffers, dprompt, drest) if n else self._table(folded, dprompt, drest)
        dqkv[: len(dx)] *= (len(dx) // self._rollout.config.n_heads) ** -0.5
        self._unfold_reader(f"{name}.ln1", f"{name}.attn.qkv", dqkv)

    def _layer_projection(
        self, weights: FoldedLayer, buffers: LayerBuffers, dprompt: torch.Tensor, drest: torch.Tensor
    ) -> torch.Tensor:
        """Take `_dx` through a block's first LayerNorm and projection; return the folded weight's gradient."""
        dread, split = self._dread, self._n_prompt_columns
        dqkv = _weight_gradient(dprompt, buffers.prompt.read1)
        torch.mm(weights.qkv[:, :-1].t(), dprompt, out=dread[:, :split])
        if buffers.steps:
            dqkv += _weight_gradient(drest, buffers.rest.read1)
            torch.mm(weights.qkv[:, :-1].t(), drest, out=dread[:, split:])
        self._add_norm_gradient(buffers.arrays.read1, buffers.arrays.rstd1)
        return dqkv

    def _table(self, folded: Folded, dprompt: torch.Tensor, drest: torch.Tensor) -> torch.Tensor:
        """Do for the first block what `_layer_projection` does for others, on the table's columns: `_dtable_x`."""
        table, entries, split = folded.table, self._rollout.entries, self._n_prompt_columns
        dtable = self._dtable.zero_().index_add_(1, entries[:split], dprompt).index_add_(1, entries[split:], drest)
        dx = self._dtable_x.zero_().index_add_(1, entries, self._dx)
        dread = folded.layers[0].qkv[:, :-1].t() @ dtable
        kernels.add_norm_gradient(dx.numpy(), 0, dread.numpy(), table.read.numpy(), 0, table.rstd)
        return _weight_gradient(dtable, table.read)

    def _attention(self, buffers: LayerBuffers) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients by (queries, keys, values) of prompts and of responses, given `_dread` by mixtures."""
        arrays, P, B = buffers.arrays, self._rollout.config.prompt_len, self._rollout.tokens.shape[1]
        dmixed, dprompt, dcache = self._dread_array, self._dprompt_array, self._dcache_array
        dprompt[0, :, :, : buffers.first_query] = 0  # queries of positions that the last layer leaves out
        kernels.attend_backward(arrays.prompt_qkv, arrays.prompt_probs, dmixed, dprompt, 0, buffers.first_query, P)
        if buffers.steps:
            T = P + len(buffers.steps)
            kernels.attend_backward(arrays.cache, arrays.probs, dmixed, dcache, buffers.base, P, T)
            kernels.add_members(dcache, dprompt)
        return self._dprompt, self._dcache[:, P * B :]

    def _add_norm_gradient(self, norm: Array, rstd: Array, *, columns_from: int = 0, norm_from: int = 0) -> None:
        """Take `_dread` through a normalisation and add it to `_dx`."""
        kernels.add_norm_gradient(self._dx_array, columns_from, self._dread_array, norm, norm_from, rstd)

    def _unfold_reader(self, norm: str, linear: str, folded: torch.Tensor, rows: slice = slice(None)) -> None:
        """Undo `[W g | W b + bias]`: dW = dW' g + db' b', dg = sum(dW' W), db = W' db'. `rows` of W were folded."""
        weight, gradient, (body, shift) = self._weights[f"{linear}.weight"][rows], self._grads, _halves(folded)
        gain, offset = self._weights[f"{norm}.weight"], self._weights[f"{norm}.bias"]
        torch.mul(body, gain, out=gradient[f"{linear}.weight"][rows]).addr_(shift, offset)
        if f"{linear}.bias" in gradient:
            gradient[f"{linear}.bias"].copy_(shift)
        torch.sum(body * weight, 0, out=gradient[f"{norm}.weight"])
        torch.mv(weight.t(), shift, out=gradient[f"{norm}.bias"])

    def _unfold_writer(self, linear: str, folded: torch.Tensor) -> None:
        body, shift = _halves(folded - folded.mean(0))
        self._grads[f"{linear}.weight"].copy_(body)
        self._grads[f"{linear}.bias"].copy_(shift)

    def _embeddings(self) -> None:
        P, first, n_content = self._rollout.config.prompt_len, self._rollout.first_id, self._rollout.logp.shape[1]
        tok, pos = self._grads["tok.weight"], self._grads["pos.weight"]
        parts = self._dtable_x.split([P * first, self._dtable_x.shape[1] - P * first], 1)
        prompt, response = parts[0].unflatten(1, (-1, first)), parts[1].unflatten(1, (-1, n_content))
        torch.sum(prompt, 1, out=tok[:first].t())
        torch.sum(prompt, 2, out=pos[:P].t())
        torch.sum(response, 1, out=tok[first:].t())
        torch.sum(response, 2, out=pos[P:].t())
        tok -= tok.mean(1, keepdim=True)
        pos -= pos.mean(1, keepdim=True)


def _views(flat: torch.Tensor, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cut a flat tensor into views shaped as the named tensors, in their order."""
    parts = flat.split([tensor.numel() for tensor in like.values()])
    return {name: part.view_as(like[name]) for name, part in zip(like, parts, strict=True)}


def _halves(folded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return folded[:, :-1], folded[:, -1]


def _weight_gradient(dy: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
    """Return dY X' (outputs, inputs + 1) for dy (outputs, C) and read (inputs + 1, C), whose last row is ones.

    The sum in place of the last column: a product with an odd number of rows costs a fifth more.
    """
    gradient = dy.new_empty(len(dy), len(read))
    torch.mm(dy, read[:-1].t(), out=gradient[:, :-1])
    torch.sum(dy, 1, out=gradient[:, -1])
    return gradient
