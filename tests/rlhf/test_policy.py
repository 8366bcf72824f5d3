import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from rlhf.data import Prompts
from rlhf.policy import MASKED_LOGIT, Policy, init_policy, load_policy, save_policy
from rlhf.vocab import DEFAULT_VOCAB, Vocab

MakePolicy = Callable[..., Policy]
MakePrompts = Callable[..., Prompts]


def plain_logp(policy: Policy, prompts: torch.Tensor, responses: torch.Tensor, temperature: float) -> torch.Tensor:
    """Re-run every token of every sequence at each step: the definition that the fast paths must agree with."""
    group, first = len(responses) // len(prompts), policy.vocab.first_content_id
    rows = []
    for row, response in enumerate(responses):
        steps = []
        for t in range(policy.vocab.resp_len):
            ids = torch.cat([prompts[row // group], response[:t] + first])
            steps.append(torch.log_softmax(policy(ids[None])[0, -1] / temperature, -1)[first:])
        rows.append(torch.stack(steps))
    return torch.stack(rows)


@torch.no_grad()
def numpy_logits(policy: Policy, ids: list[int]) -> np.ndarray:
    """Write the transformer of DESIGN section 3 again from its tensor names, head by head and query by query."""
    w = {name: tensor.double().numpy() for name, tensor in policy.state_dict().items()}
    config, d_head = policy.config, policy.config.d_model // policy.config.n_heads

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    erf = np.vectorize(math.erf)
    x = w["tok.weight"][ids] + w["pos.weight"][: len(ids)]
    for layer in range(config.n_layers):
        name = f"blocks.{layer}"
        fused = linear(norm(x, f"{name}.ln1"), f"{name}.attn.qkv").reshape(len(ids), 3, config.n_heads, d_head)
        mixed = np.zeros((len(ids), config.n_heads, d_head))
        for head in range(config.n_heads):
            q, k, v = fused[:, 0, head], fused[:, 1, head], fused[:, 2, head]
            for t in range(len(ids)):
                weights = np.exp(k[: t + 1] @ q[t] / np.sqrt(d_head))
                mixed[t, head] = weights @ v[: t + 1] / weights.sum()
        x = x + linear(mixed.reshape(len(ids), -1), f"{name}.attn.out")
        inner = linear(norm(x, f"{name}.ln2"), f"{name}.ff.0")
        x = x + linear(inner * (1 + erf(inner / np.sqrt(2))) / 2, f"{name}.ff.2")
    logits: np.ndarray = norm(x, "ln") @ w["head.weight"].T
    logits[:, : policy.vocab.first_content_id] = MASKED_LOGIT
    return logits


def test_forward_equals_a_numpy_transformer(make_policy: MakePolicy, middling_vocab: Vocab) -> None:
    policy = make_policy(middling_vocab, seed=5)
    ids = [2, 5, 4, 1, 9, 8, 10]
    torch.testing.assert_close(
        policy(torch.tensor([ids]))[0].double(), torch.from_numpy(numpy_logits(policy, ids)), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("group", [1, 3])
def test_sample_and_response_logp_equal_the_plain_forward(
    odd_vocab: Vocab, make_policy: MakePolicy, some_prompts: MakePrompts, group: int, temperature: float
) -> None:
    policy = make_policy(odd_vocab, seed=group)
    prompts = some_prompts(odd_vocab, 1 if odd_vocab.n_values == 1 else 2).tokens(odd_vocab)
    uniforms = torch.rand(len(prompts) * group, odd_vocab.resp_len, generator=torch.Generator().manual_seed(1))
    responses, logp = policy.sample(prompts, uniforms, temperature=temperature)
    plain = plain_logp(policy, prompts, responses, temperature)
    scored = policy.response_logp(prompts, responses, temperature=temperature)
    assert plain.shape == (len(prompts) * group, odd_vocab.resp_len, odd_vocab.n_content)
    torch.testing.assert_close(logp, plain.detach(), atol=1e-5, rtol=0)
    torch.testing.assert_close(scored, plain, atol=1e-5, rtol=0)


def test_fast_scoring_has_the_gradient_of_the_plain_forward(
    make_policy: MakePolicy, some_prompts: MakePrompts, middling_vocab: Vocab
) -> None:
    policy = make_policy(middling_vocab)
    prompts = some_prompts(middling_vocab).tokens(middling_vocab)
    generator = torch.Generator().manual_seed(2)
    responses = torch.randint(middling_vocab.n_content, (2 * len(prompts), 3), generator=generator)
    direction = torch.randn(2 * len(prompts), 3, middling_vocab.n_content, generator=generator)
    fast = torch.autograd.grad((policy.response_logp(prompts, responses) * direction).sum(), list(policy.parameters()))
    plain = torch.autograd.grad(
        (plain_logp(policy, prompts, responses, 1.0) * direction).sum(), list(policy.parameters())
    )
    for got, want in zip(fast, plain, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_the_shipped_sizes_agree_too(tiny_task: Path) -> None:
    policy = load_policy(tiny_task / "policy", DEFAULT_VOCAB)
    prompts = torch.tensor([[2, 8, 9, 10, 11, 1], [5, 15, 8, 8, 12, 1]])
    responses, logp = policy.sample(prompts, torch.rand(6, 8, generator=torch.Generator().manual_seed(3)))
    plain = plain_logp(policy, prompts, responses, 1.0)
    torch.testing.assert_close(logp, plain.detach(), atol=1e-5, rtol=0)
    torch.testing.assert_close(policy.response_logp(prompts, responses), plain, atol=1e-5, rtol=0)


def test_only_content_tokens_can_follow_and_no_token_sees_the_future(
    make_policy: MakePolicy, middling_vocab: Vocab
) -> None:
    policy, first = make_policy(middling_vocab), middling_vocab.first_content_id
    ids = torch.tensor([[2, 4, 5, 1, 8, 9, 10]])
    logits = policy(ids)
    assert (logits[..., :first] == MASKED_LOGIT).all()
    assert (torch.softmax(logits, -1)[..., :first] == 0).all()
    for t in range(1, ids.shape[1]):
        changed = ids.clone()
        changed[0, t] = 8 if ids[0, t] != 8 else 9
        after = policy(changed)
        torch.testing.assert_close(after[:, :t], logits[:, :t], atol=1e-6, rtol=0)
        assert (after[:, t] - logits[:, t])[..., first:].abs().max() > 1e-3


def test_a_uniform_inside_a_tokens_interval_gives_that_token(
    odd_vocab: Vocab, make_policy: MakePolicy, some_prompts: MakePrompts
) -> None:
    policy, first = make_policy(odd_vocab, seed=4), odd_vocab.first_content_id
    prompt = some_prompts(odd_vocab, 1).tokens(odd_vocab)[:1]
    wanted: list[int] = []
    uniforms: list[float] = []
    for t in range(odd_vocab.resp_len):
        ids = torch.cat([prompt[0], torch.tensor(wanted, dtype=torch.long) + first])
        cdf = torch.softmax(policy(ids[None])[0, -1, first:].double(), -1).cumsum(-1).tolist()
        token = (3 * t + 1) % odd_vocab.n_content
        wanted.append(token)
        uniforms.append((cdf[token] + (cdf[token - 1] if token else 0)) / 2)
    responses, _ = policy.sample(prompt, torch.tensor([uniforms]))
    assert responses.tolist() == [wanted]


@given(st.lists(st.floats(0, 1, exclude_max=True, width=32), min_size=1, max_size=20))
def test_every_uniform_inverts_the_plain_distribution(
    make_policy: MakePolicy, middling_vocab: Vocab, values: list[float]
) -> None:
    policy, first = make_policy(middling_vocab, seed=6), middling_vocab.first_content_id
    prompt = torch.tensor([[3, 4, 6, 1]])
    cdf = torch.softmax(policy(prompt)[0, -1, first:].double(), -1).cumsum(-1).detach().numpy()
    uniforms = torch.tensor(values)[:, None].expand(-1, 3)
    tokens = policy.sample(prompt, uniforms)[0][:, 0].numpy()
    low = np.searchsorted(cdf, np.array(values) - 1e-6, side="right")  # rounding may move an edge by this much
    high = np.searchsorted(cdf, np.array(values) + 1e-6, side="right")
    assert ((low <= tokens) & (tokens <= np.minimum(high, len(cdf) - 1))).all()


def test_samples_follow_the_plain_distribution(make_policy: MakePolicy) -> None:
    vocab = Vocab(("f",), n_attrs=1, n_values=2, content_tokens=tuple("abc"), resp_len=2)
    policy, n = make_policy(vocab, seed=8), 20_000
    prompt = torch.tensor([[2, 4, 1]])
    pairs = torch.tensor([[a, b] for a in range(3) for b in range(3)])
    logp = plain_logp(policy, prompt.expand(9, -1), pairs, 1.0).detach().double()
    expected = logp.gather(-1, pairs[..., None]).squeeze(-1).sum(-1).exp()
    uniforms = torch.rand(n, 2, generator=torch.Generator().manual_seed(9))
    responses, _ = policy.sample(prompt, uniforms)
    counts = torch.bincount(responses[:, 0] * 3 + responses[:, 1], minlength=9)
    assert expected.sum().item() == pytest.approx(1, abs=1e-6)
    assert chisquare(counts.numpy(), (expected / expected.sum() * n).numpy()).pvalue > 1e-3


def test_temperature_sharpens_the_samples(make_policy: MakePolicy, middling_vocab: Vocab) -> None:
    policy, prompt = make_policy(middling_vocab, seed=6), torch.tensor([[3, 4, 6, 1]])
    uniforms = torch.rand(500, 3, generator=torch.Generator().manual_seed(1))
    likeliest = policy(prompt)[0, -1, middling_vocab.first_content_id :].argmax()
    shares = [
        (policy.sample(prompt, uniforms, temperature=temperature)[0][:, 0] == likeliest).double().mean().item()
        for temperature in (3.0, 1.0, 0.05)
    ]
    assert shares == sorted(shares)
    assert shares[0] < shares[2]


def test_the_same_uniforms_give_the_same_tokens_whatever_the_grouping(
    make_policy: MakePolicy, some_prompts: MakePrompts, middling_vocab: Vocab
) -> None:
    policy = make_policy(middling_vocab)
    prompts = some_prompts(middling_vocab).tokens(middling_vocab)
    uniforms = torch.rand(3 * len(prompts), 3, generator=torch.Generator().manual_seed(5))
    grouped, logp = policy.sample(prompts, uniforms)
    again, logp_again = policy.sample(prompts, uniforms)
    assert torch.equal(grouped, again)
    assert torch.equal(logp, logp_again)
    assert torch.equal(grouped, policy.sample(prompts.repeat_interleave(3, 0), uniforms)[0])
    assert not torch.equal(grouped, policy.sample(prompts, 1 - uniforms)[0])


def test_extreme_uniforms_never_give_an_impossible_token(make_policy: MakePolicy, middling_vocab: Vocab) -> None:
    policy, first = make_policy(middling_vocab), middling_vocab.first_content_id
    with torch.no_grad():  # only the third token keeps any probability
        policy.ln.weight.zero_()
        policy.ln.bias.fill_(1)
        policy.head.weight[first:] = -100
        policy.head.weight[first + 2] = 100
    uniforms = torch.tensor([[0.0, 0.5, 1 - 2**-24]])
    assert policy.sample(torch.tensor([[2, 4, 4, 1]]), uniforms)[0].tolist() == [[2, 2, 2]]


def test_initial_weights_depend_on_the_seed_alone(middling_vocab: Vocab) -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    one = init_policy(middling_vocab, seed=3).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    same, other = init_policy(middling_vocab, seed=3).state_dict(), init_policy(middling_vocab, seed=4).state_dict()
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["head.weight"], other["head.weight"])


def test_a_policy_folder_round_trips(tmp_path: Path, make_policy: MakePolicy, odd_vocab: Vocab) -> None:
    policy = make_policy(odd_vocab)
    save_policy(policy, tmp_path / "policy")
    loaded = load_policy(tmp_path / "policy", odd_vocab)
    assert loaded.config == policy.config
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in policy.state_dict().items())


def test_tensor_names_are_the_public_ones(middling_vocab: Vocab) -> None:
    layer = ["ln1.weight", "ln1.bias", "attn.qkv.weight", "attn.qkv.bias", "attn.out.weight", "attn.out.bias"]
    layer += ["ln2.weight", "ln2.bias", "ff.0.weight", "ff.0.bias", "ff.2.weight", "ff.2.bias"]
    names = ["tok.weight", "pos.weight", "ln.weight", "ln.bias", "head.weight"]
    names += [f"blocks.{n}.{name}" for n in range(2) for name in layer]
    assert sorted(init_policy(middling_vocab, seed=0).state_dict()) == sorted(names)
