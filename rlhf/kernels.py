"""Loops of the fast passes, compiled: attention, GELU, normalisation and sampling over contiguous columns.

Arrays are (features, columns), as in `rlhf.fast_policy`; the innermost loop runs over columns, which the compiler turns
into vector instructions. Each pass over a head's keys and values stays in the second-level cache. Arrays are whole
and contiguous, with the first column to work on beside them: of a slice the compiler would not know the stride.

`exp` is written out because the system's is not vectorised. All arithmetic is in 32 bits; the order of sums is as
written, and NaN and infinities are respected: a step that diverges must be seen to.

Left out: matrix products, which PyTorch does as well as can be, and threads: a trial has one.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

Array = np.ndarray[Any, np.dtype[Any]]
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"contract", "nsz"}}
_inline: Callable[..., Any] = njit(inline="always", **_OPTIONS)


def _kernel(function: Callable[..., None]) -> Callable[..., None]:
    """Compile at the first call, and once a machine: kept beside the sources, else in the user's cache folder."""
    compiled: Callable[..., None]
    try:
        compiled = njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:  # Numba: neither folder can be written; each process compiles for itself
        compiled = njit(**_OPTIONS)(function)
    return compiled


_f = np.float32
_ZERO, _HALF, _ONE = _f(0), _f(0.5), _f(1)
_LOG2_E, _LN2_HIGH, _LN2_LOW = _f(1.44269504), _f(0.693359375), _f(-2.12194440e-4)
_LOWEST = _f(-75)  # below, exp is zero, so that no denormal numbers come out
# exp(r) on |r| <= ln(2) / 2 and erfc: Cephes `expf`; Abramowitz and Stegun 7.1.26.
_E0, _E1, _E2 = _f(1.9875691500e-4), _f(1.3981999507e-3), _f(8.3334519073e-3)
_E3, _E4, _E5 = _f(4.1665795894e-2), _f(1.6666665459e-1), _f(5.0000001201e-1)
_A0, _A1, _A2 = _f(0.254829592), _f(-0.284496736), _f(1.421413741)
_A3, _A4, _AP = _f(-1.453152027), _f(1.061405429), _f(0.3275911)
_ROOT_HALF, _PEAK = _f(0.5**0.5), _f((2 * np.pi) ** -0.5)


@_inline
def _exp(x):  # type: ignore[no-untyped-def]
    """Return exp(x) for x <= 0 to a relative 1e-7: 2^n e^r, r = x - n ln 2."""
    low = x < _LOWEST
    x = _LOWEST if low else x
    n = np.int32(x * _LOG2_E - _HALF)
    r = (x - _f(n) * _LN2_HIGH) - _f(n) * _LN2_LOW
    p = ((((_E0 * r + _E1) * r + _E2) * r + _E3) * r + _E4) * r + _E5
    power = np.int32((n + np.int32(127)) << np.int32(23)).view(np.float32)
    return _ZERO if low else (p * r * r + r + _ONE) * power


@_kernel
def softmax(scores: Array, n: int) -> None:
    """Take the softmax of the first n rows (n, B), in place."""
    B = scores.shape[1]
    peak, total = np.empty(B, _f), np.zeros(B, _f)
    peak[:] = scores[0]
    for s in range(1, n):
        row = scores[s]
        for b in range(B):
            peak[b] = row[b] if row[b] > peak[b] else peak[b]
    for s in range(n):
        row = scores[s]
        for b in range(B):
            row[b] = _exp(row[b] - peak[b])
        for b in range(B):
            total[b] += row[b]
    for b in range(B):
        total[b] = _ONE / total[b]
    for s in range(n):
        row = scores[s]
        for b in range(B):
            row[b] *= total[b]


@_kernel
def attend(qkv: Array, probs: Array, mixed: Array, base: int, first: int, last: int) -> None:
    """Mix values at positions first <= t < last, each seeing the positions up to itself.

    qkv: (3, H, D, T, B), queries scaled. Writes probs[t, :, : t + 1] (T, H, T, B), and position t's mixture into the
    columns base + t B of `mixed` (H D or more, C).
    """
    _, H, D, _, B = qkv.shape
    for h in range(H):
        for t in range(first, last):
            start = base + t * B
            for s in range(t + 1):
                score = probs[t, h, s]
                score[:] = _ZERO
                for d in range(D):
                    query, key = qkv[0, h, d, t], qkv[1, h, d, s]
                    for b in range(B):
                        score[b] += query[b] * key[b]
            softmax(probs[t, h], t + 1)
            for d in range(D):
                out = mixed[h * D + d, start : start + B]
                out[:] = _ZERO
                for s in range(t + 1):
                    p, value = probs[t, h, s], qkv[2, h, d, s]
                    for b in range(B):
                        out[b] += p[b] * value[b]


@_kernel
def attend_backward(qkv: Array, probs: Array, dmixed: Array, dqkv: Array, base: int, first: int, last: int) -> None:
    """Write the gradients by queries, keys and values (3, H, D, T, B), given those by what `attend` mixed (H D, C).

    Queries' gradients are written at first <= t < last, keys' and values' everywhere.
    """
    _, H, D, T, B = qkv.shape
    dscores, mean = np.empty((T, B), _f), np.empty(B, _f)
    for h in range(H):
        dqkv[1, h] = _ZERO
        dqkv[2, h] = _ZERO
        for t in range(first, last):
            start = base + t * B
            mean[:] = _ZERO
            for s in range(t + 1):
                dscore, p = dscores[s], probs[t, h, s]
                dscore[:] = _ZERO
                for d in range(D):
                    dout, value = dmixed[h * D + d, start : start + B], qkv[2, h, d, s]
                    for b in range(B):
                        dscore[b] += dout[b] * value[b]
                for b in range(B):
                    dscore[b] *= p[b]
                    mean[b] += dscore[b]
            for s in range(t + 1):
                dscore, p = dscores[s], probs[t, h, s]
                for b in range(B):
                    dscore[b] -= p[b] * mean[b]
            for d in range(D):
                dout, query, dquery = dmixed[h * D + d, start : start + B], qkv[0, h, d, t], dqkv[0, h, d, t]
                dquery[:] = _ZERO
                for s in range(t + 1):
                    dscore, p, key = dscores[s], probs[t, h, s], qkv[1, h, d, s]
                    dkey, dvalue = dqkv[1, h, d, s], dqkv[2, h, d, s]
                    for b in range(B):
                        dquery[b] += dscore[b] * key[b]
                        dkey[b] += dscore[b] * query[b]
                        dvalue[b] += p[b] * dout[b]


@_kernel
def add_members(dqkv: Array, dprompt: Array) -> None:
    """Add keys' and values' gradients (3, H, D, T, G N), over the group that shares a prompt, to (3, H, D, P, N)."""
    _, H, D, P, N = dprompt.shape
    for part in range(1, 3):
        for h in range(H):
            for d in range(D):
                for s in range(P):
                    out, members = dprompt[part, h, d, s], dqkv[part, h, d, s].reshape(-1, N)
                    for g in range(len(members)):
                        member = members[g]
                        for n in range(N):
                            out[n] += member[n]


@_kernel
def gelu(inner: Array, active: Array, start: int, stop: int) -> None:
    """Write x Phi(x) to columns start <= c < stop of `active`, and its derivative Phi(x) + x phi(x) over x in `inner`.

    inner: (F, C), active: (F or more, C).
    """
    for f in range(len(inner)):
        xs, out = inner[f, start:stop], active[f, start:stop]
        for c in range(len(xs)):
            x = xs[c]
            z = abs(x) * _ROOT_HALF
            density, t = _exp(-z * z), _ONE / (_ONE + _AP * z)
            tail = _HALF * density * t * (_A0 + t * (_A1 + t * (_A2 + t * (_A3 + t * _A4))))
            phi = tail if x < _ZERO else _ONE - tail
            out[c] = x * phi
            xs[c] = phi + x * (density * _PEAK)


@_kernel
def normalise(x: Array, x_start: int, norm: Array, rstd: Array, start: int, stop: int, eps: float) -> None:
    """Divide columns of x (K, X) from x_start on by their root mean square, into columns of `norm` (K or more, C)."""
    K, n = len(x), stop - start
    r = rstd[0, start:stop]
    r[:] = _ZERO
    for k in range(K):
        row = x[k, x_start : x_start + n]
        for c in range(n):
            r[c] += row[c] * row[c]
    scale, shift = _ONE / _f(K), _f(eps)
    for c in range(n):
        r[c] = _ONE / np.sqrt(r[c] * scale + shift)
    for k in range(K):
        row, out = x[k, x_start : x_start + n], norm[k, start:stop]
        for c in range(n):
            out[c] = row[c] * r[c]


@_kernel
def add_norm_gradient(dx: Array, start: int, dnorm: Array, norm: Array, norm_start: int, rstd: Array) -> None:
    """Add r (dn - n mean(dn n)) to dx (K, C) from column `start` on; there begin those of dnorm (K, C) as well.

    norm: (K or more, M), rstd: (1, M), from column `norm_start` on.
    """
    K, n = len(dx), dx.shape[1] - start
    r, mean = rstd[0, norm_start : norm_start + n], np.zeros(n, _f)
    for k in range(K):
        dn, row = dnorm[k, start:], norm[k, norm_start : norm_start + n]
        for c in range(n):
            mean[c] += dn[c] * row[c]
    scale = _ONE / _f(K)
    for c in range(n):
        mean[c] *= scale
    for k in range(K):
        out, dn, row = dx[k, start:], dnorm[k, start:], norm[k, norm_start : norm_start + n]
        for c in range(n):
            out[c] += r[c] * (dn[c] - row[c] * mean[c])


@_kernel
def look_up(table: Array, entries: Array, out: Array, start: int) -> None:
    """Copy the given columns (n,) of a table (F, E) to columns of `out` (F, C) from `start` on."""
    for f in range(len(table)):
        source, row = table[f], out[f, start : start + len(entries)]
        for c in range(len(entries)):
            row[c] = source[entries[c]]


@_kernel
def draw(logp: Array, uniform: Array, tokens: Array) -> None:
    """Invert the cumulative distribution of log probabilities (V, B) at (B,): token v where cdf[v - 1] <= u < cdf[v].

    A uniform that rounds up to the total still gives the last token.
    """
    V, B = logp.shape
    cdf, total = np.empty((V, B), _f), np.zeros(B, _f)
    for v in range(V):
        row, below = logp[v], cdf[v]
        for b in range(B):
            total[b] += _exp(row[b])
            below[b] = total[b]
    count = np.zeros(B, np.int32)
    for b in range(B):
        total[b] *= uniform[b]
    for v in range(V - 1):
        below = cdf[v]
        for b in range(B):
            count[b] += np.int32(below[b] <= total[b])
    for b in range(B):
        tokens[b] = count[b]
