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

from rlhf.fast_policy import Attend, Folded, FoldedLayer, LayerBuffers, Rollout, attention_views


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
        self._product = torch.empty(config.d_model, max(n_columns, n_entries))
        self._dtable_x, self._dtable = (
            torch.empty(config.d_model, n_entries),
            torch.empty(3 * config.d_model, n_entries),
        )
        self._dinner = torch.empty(config.d_ff, n_columns)
        self._dprompt = torch.empty_like(rollout.layers[0].prompt_qkv)
        self._dcache = torch.empty_like(rollout.layers[0].cache)
        self._dlogits = torch.empty(rollout.logp.shape[1], rollout.final.shape[1])
        self._mean = torch.full((1, config.d_model), 1 / config.d_model)
        self._dheads = self._dread.view(config.n_heads, -1, n_columns)
        self._step_views = self._views_of_steps()

    @torch.no_grad()
    def __call__(self, folded: Folded, dlogits: torch.Tensor, *, temperature: float) -> None:
        """Write the parameters' gradients for dlogits (R, V, B); both arguments as `fold` and the rollout had them."""
        rollout, N = self._rollout, self._rollout.n_prompts
        start = self._n_prompt_columns - N  # only the last of a prompt's columns predicts, and for the whole group
        torch.sum(dlogits[0].unflatten(1, (-1, N)), 1, out=self._dlogits[:, :N])
        self._dlogits[:, N:].unflatten(1, (-1, dlogits.shape[2])).copy_(dlogits[1:].transpose(0, 1))
        self._dx.zero_()
        dread = torch.mm(folded.head[:, :-1].t(), self._dlogits, out=self._dread[:, start:])
        self._add_norm_gradient(self._dx[:, start:], dread, rollout.final[:-1], rollout.final_rstd)
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
        torch.ops.aten.gelu_backward.grad_input(dinner, after.inner, grad_input=dinner)
        self._unfold_reader(f"{name}.ln2", f"{name}.ff.0", _weight_gradient(dinner, after.read2))
        torch.mm(weights.up[:, :-1].t(), dinner, out=dread)
        self._add_norm_gradient(dx, dread, after.norm2, after.rstd2)
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
        self._add_norm_gradient(self._dx, dread, buffers.read1[:-1], buffers.rstd1)
        return dqkv

    def _table(self, folded: Folded, dprompt: torch.Tensor, drest: torch.Tensor) -> torch.Tensor:
        """Do for the first block what `_layer_projection` does for others, on the table's columns: `_dtable_x`."""
        table, entries, split = folded.table, self._rollout.entries, self._n_prompt_columns
        dtable = self._dtable.zero_().index_add_(1, entries[:split], dprompt).index_add_(1, entries[split:], drest)
        dx = self._dtable_x.zero_().index_add_(1, entries, self._dx)
        self._add_norm_gradient(dx, folded.layers[0].qkv[:, :-1].t() @ dtable, table.read[:-1], table.rstd)
        return _weight_gradient(dtable, table.read)

    def _views_of_steps(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return for each response position the gradients by its mixture, its query, and the keys and values it saw."""
        config, B, split = self._rollout.config, self._rollout.tokens.shape[1], self._n_prompt_columns
        P, steps = config.prompt_len, config.resp_len - 1
        dcache = self._dcache.view(3, config.n_heads, -1, P + steps, B)
        dmixed = self._dheads[:, :, None, split:].unflatten(3, (steps, B)).unbind(3)
        return [(dmixed[t], *attention_views(dcache, P + t)) for t in range(steps)]

    def _attention(self, buffers: LayerBuffers) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients by (queries, keys, values) of prompts and of responses, given `_dread` by mixtures."""
        config, N, B = self._rollout.config, self._rollout.n_prompts, self._rollout.tokens.shape[1]
        H, P, split = config.n_heads, config.prompt_len, self._n_prompt_columns
        dcache, dprompt = self._dcache.view(3, H, -1, P + len(buffers.steps), B), self._dprompt.view(3, H, -1, P, N)
        for t, (dmixed, dquery, dkeys, dvalues) in reversed(list(enumerate(self._step_views))):
            views = buffers.attend[t]
            dscores = _score_gradient(views, dmixed)
            torch.mul(dscores, views.keys, out=views.work)
            torch.sum(views.work, 2, keepdim=True, out=dquery)
            if t + 1 == len(buffers.steps):  # the last position sees all keys: its gradient comes first
                torch.mul(dscores, views.query, out=dkeys)
                torch.mul(views.probs, dmixed, out=dvalues)
            else:
                dkeys.addcmul_(dscores, views.query)
                dvalues.addcmul_(views.probs, dmixed)
        views, dmixed = buffers.attend_prompt, self._dheads[:, :, buffers.start : split].unflatten(2, (-1, 1, N))
        dscores, unread = _score_gradient(views, dmixed), buffers.start // N
        dprompt[0, :, :, :unread] = 0  # queries of positions that the last layer leaves out
        factors = (dscores, views.keys, 3), (dscores, views.query, 2), (views.probs, dmixed, 2)
        gradients = dprompt[0, :, :, unread:], dprompt[1], dprompt[2]
        for gradient, (left, right, dim) in zip(gradients, factors, strict=True):
            torch.sum(torch.mul(left, right, out=views.work), dim, out=gradient)
        if buffers.steps:
            dprompt[1:] += dcache[1:, :, :, :P].unflatten(4, (-1, N)).sum(4)
        return self._dprompt, self._dcache[:, P * B :]

    def _add_norm_gradient(self, dx: torch.Tensor, dnorm: torch.Tensor, norm: torch.Tensor, rstd: torch.Tensor) -> None:
        """Add r (dn - n mean(dn n)) to dx, all (K, C). Overwrites dnorm."""
        product = torch.mul(dnorm, norm, out=self._product[:, : dx.shape[1]])
        dx.addcmul_(dnorm.addcmul_(norm, torch.mm(self._mean, product), value=-1), rstd)

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


def _score_gradient(views: Attend, dmixed: torch.Tensor) -> torch.Tensor:
    """Return p (dp - sum_s p_s dp_s), shaped like `views.probs`. Overwrites the scores."""
    torch.mul(views.values, dmixed, out=views.work)
    weighted = torch.sum(views.work, 1, keepdim=True, out=views.scores).mul_(views.probs)
    return weighted.addcmul_(views.probs, weighted.sum(-2, keepdim=True), value=-1)
