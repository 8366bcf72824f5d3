import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from rlhf import kernels

# Heads, features a head, keys, positions before the first query, columns: odd, and one of each.
SHAPES = {
    "usual": (2, 4, 5, 2, 16),
    "odd": (3, 5, 7, 3, 37),
    "one head": (1, 6, 4, 0, 9),
    "heads of one": (4, 1, 3, 1, 8),
    "one position": (2, 3, 1, 0, 5),
    "one column": (2, 3, 4, 2, 1),
    "one of each": (1, 1, 1, 0, 1),
}
Shape = tuple[int, int, int, int, int]
UNTOUCHED = -7.0


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def attention(qkv: torch.Tensor, first: int) -> torch.Tensor:
    """Mix values (H, D, T - first, B) from (3, H, D, T, B), each query seeing positions up to itself."""
    query, keys, values = qkv
    scores = torch.einsum("hdtb,hdsb->htsb", query[:, :, first:], keys)
    future = torch.ones(scores.shape[1:3], dtype=torch.bool).triu(first + 1)
    probs = torch.softmax(scores.masked_fill(future[..., None], float("-inf")), 2)
    return torch.einsum("htsb,hdsb->hdtb", probs, values)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_attention_and_its_gradient_equal_the_closed_form(shape: Shape) -> None:
    H, D, T, first, B = shape
    qkv, offset, steps = normal(3, H, D, T, B).requires_grad_(), 3, T - first
    mixed = torch.full((H * D + 1, offset + steps * B + 2), UNTOUCHED)
    probs, base = torch.full((T, H, T, B), float("nan")), offset - first * B
    kernels.attend(qkv.detach().numpy(), probs.numpy(), mixed.numpy(), base, first, T)
    expected = attention(qkv, first)
    torch.testing.assert_close(mixed[:-1, offset:-2].view(H, D, steps, B), expected.detach(), atol=1e-6, rtol=1e-5)
    mixed[:-1, offset:-2] = UNTOUCHED
    assert (mixed == UNTOUCHED).all()

    dmixed = normal(*mixed.shape, seed=1)[:-1].contiguous()
    dqkv = torch.full((3, H, D, T, B), UNTOUCHED)
    for _ in range(2):  # what the first pass leaves must not reach the second
        kernels.attend_backward(qkv.detach().numpy(), probs.numpy(), dmixed.numpy(), dqkv.numpy(), base, first, T)
    expected.backward(dmixed[:, offset:-2].reshape(H, D, steps, B))
    assert qkv.grad is not None
    torch.testing.assert_close(dqkv[1:], qkv.grad[1:], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(dqkv[0, :, :, first:], qkv.grad[0, :, :, first:], atol=1e-5, rtol=1e-5)
    assert (dqkv[0, :, :, :first] == UNTOUCHED).all()


def test_positions_one_at_a_time_equal_all_at_once() -> None:
    H, D, T, first, B = SHAPES["odd"]
    qkv = normal(3, H, D, T, B).numpy()
    once, stepped = (np.zeros((H * D, (T - first) * B), np.float32) for _ in range(2))
    probs = np.empty((T, H, T, B), np.float32)
    kernels.attend(qkv, probs, once, -first * B, first, T)
    for t in range(first, T):
        kernels.attend(qkv, probs, stepped, -first * B, t, t + 1)
    assert (once == stepped).all()  # to the bit, and so from run to run


@pytest.mark.parametrize(("group", "n_prompts"), [(1, 1), (3, 5), (1, 4), (4, 1)])
def test_add_members_sums_over_the_group(group: int, n_prompts: int) -> None:
    many, few = normal(3, 2, 3, 6, group * n_prompts), normal(3, 2, 3, 4, n_prompts, seed=1)
    expected = few.clone()
    expected[1:] += many[1:, :, :, :4].unflatten(4, (group, n_prompts)).sum(4)
    kernels.add_members(many.numpy(), few.numpy())
    torch.testing.assert_close(few, expected)


@given(st.lists(st.floats(-80, 80, width=32), min_size=1, max_size=40), st.integers(1, 3))
@settings(deadline=None)
def test_softmax_equals_torch_and_leaves_rows_behind_n(values: list[float], columns: int) -> None:
    scores = torch.tensor(values)[:, None].repeat(1, columns) * torch.linspace(0.1, 1, columns)
    n, mine = (len(values) + 1) // 2, scores.clone()
    kernels.softmax(mine.numpy(), n)
    torch.testing.assert_close(mine[:n], torch.softmax(scores[:n], 0), atol=1e-32, rtol=2e-6)
    assert not ((mine[:n] > 0) & (mine[:n] < torch.finfo().tiny)).any()  # nothing denormal
    assert torch.equal(mine[n:], scores[n:])


def test_gelu_and_its_derivative() -> None:
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([0.0, -0.0, 1e-30, -60, 60, 1e19, -1e19])])
    inner, active = x.repeat(2, 1), torch.full((3, len(x)), UNTOUCHED)
    kernels.gelu(inner.numpy(), active.numpy(), 1, len(x) - 1)
    exact = x.double().requires_grad_()
    F.gelu(exact).sum().backward()
    assert exact.grad is not None
    for row in range(2):
        torch.testing.assert_close(active[row, 1:-1].double(), F.gelu(exact)[1:-1].detach(), atol=1e-6, rtol=2e-7)
        torch.testing.assert_close(inner[row, 1:-1].double(), exact.grad[1:-1], atol=1e-6, rtol=2e-7)
    assert (active[2] == UNTOUCHED).all()
    assert (active[:, [0, -1]] == UNTOUCHED).all()
    assert torch.equal(inner[:, [0, -1]], x[[0, -1]].repeat(2, 1))


@pytest.mark.parametrize(("K", "n"), [(1, 1), (7, 33), (64, 8)])
def test_normalise_and_its_gradient(K: int, n: int) -> None:
    x, eps = normal(K, n + 4).requires_grad_(), 1e-5
    norm, rstd = torch.full((K + 1, n + 3), UNTOUCHED), torch.full((1, n + 3), UNTOUCHED)
    kernels.normalise(x.detach().numpy(), 4, norm.numpy(), rstd.numpy(), 2, n + 2, eps)
    part = x[:, 4:]
    expected = part * (part.square().mean(0) + eps).rsqrt()
    torch.testing.assert_close(norm[:-1, 2:-1], expected.detach(), atol=1e-6, rtol=1e-5)

    dnorm, dx = normal(K, n + 4, seed=1), normal(K, n + 4, seed=2)
    before = dx.clone()
    kernels.add_norm_gradient(dx.numpy(), 4, dnorm.numpy(), norm.numpy(), 2, rstd.numpy())
    expected.backward(dnorm[:, 4:])
    assert x.grad is not None
    torch.testing.assert_close(dx - before, x.grad, atol=2e-5, rtol=1e-4)
    norm[:-1, 2:-1] = UNTOUCHED
    assert (norm == UNTOUCHED).all()


def test_look_up_copies_columns() -> None:
    table, out = normal(3, 5), torch.full((3, 9), UNTOUCHED)
    entries = torch.tensor([4, 0, 4, 2])
    kernels.look_up(table.numpy(), entries.numpy(), out.numpy(), 2)
    assert torch.equal(out[:, 2:6], table[:, entries])
    assert (out[:, [0, 1, 6, 7, 8]] == UNTOUCHED).all()


@pytest.mark.parametrize("n_tokens", [1, 2, 9])
def test_draw_inverts_the_cumulative_distribution(n_tokens: int) -> None:
    n = 4000
    logp = torch.log_softmax(2 * normal(n_tokens, 1), 0).repeat(1, n)
    uniforms = (torch.arange(n) + 0.5) / n
    tokens = torch.empty(n, dtype=torch.long)
    kernels.draw(logp.numpy(), uniforms.numpy(), tokens.numpy())
    assert (tokens.diff() >= 0).all()
    shares = torch.bincount(tokens, minlength=n_tokens) / n
    torch.testing.assert_close(shares, logp[:, 0].exp(), atol=1.5 / n, rtol=0)


def test_draw_gives_the_last_token_to_a_uniform_that_rounds_up_to_the_total() -> None:
    logp, tokens = torch.tensor([[0.0], [-80.0], [-80.0]]), torch.empty(1, dtype=torch.long)
    kernels.draw(logp.numpy(), np.array([1 - 2**-24], np.float32), tokens.numpy())
    assert tokens.item() in (0, 2)
    kernels.draw(logp.numpy(), np.ones(1, np.float32), tokens.numpy())
    assert tokens.item() == 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_visible(bad: float) -> None:
    """Fast arithmetic must not hide that a run has diverged."""
    qkv = normal(3, 1, 4, 3, 20).numpy()
    probs, mixed = np.zeros((3, 1, 3, 20), np.float32), np.zeros((4, 60), np.float32)
    qkv[0, 0, 1, 2, 5] = bad
    kernels.attend(qkv, probs, mixed, 0, 0, 3)
    assert np.isnan(mixed[:, 45]).all()
    assert np.isfinite(np.delete(mixed, 45, 1)).all()
    dqkv = np.zeros_like(qkv)
    kernels.attend_backward(qkv, probs, np.ones_like(mixed), dqkv, 0, 0, 3)
    assert not np.isfinite(dqkv[..., 5]).all()
    x = normal(4, 20).numpy()
    x[2, 5] = bad
    norm, rstd = np.zeros((4, 20), np.float32), np.zeros((1, 20), np.float32)
    kernels.normalise(x, 0, norm, rstd, 0, 20, 1e-5)
    assert np.isnan(norm[2, 5])
    dx = np.zeros_like(x)
    kernels.add_norm_gradient(dx, 0, np.ones_like(x), norm, 0, rstd)
    assert np.isnan(dx[:, 5]).all()
    if bad != float("-inf"):
        active = np.zeros_like(x)
        kernels.gelu(x, active, 0, 20)
        assert not np.isfinite(active[2, 5])
