from collections.abc import Callable

import pytest
import torch

from rlhf.data import Prompts
from rlhf.fast_policy import Rollout
from rlhf.policy import Policy, init_policy
from rlhf.vocab import Vocab

MakePrompts = Callable[..., Prompts]

# Sizes that an off-by-one or a swapped dimension would not survive.
VOCAB = Vocab(("p", "q", "r"), n_attrs=2, n_values=3, content_tokens=tuple("abcde"), resp_len=4)
ONE_OF_EACH = Vocab(("solo",), n_attrs=1, n_values=1, content_tokens=("x",), resp_len=1)
ONE_POSITION = Vocab(("p", "q"), n_attrs=1, n_values=4, content_tokens=tuple("abc"), resp_len=1)
SIZE = {"d_model": 12, "n_layers": 2, "n_heads": 3, "d_ff": 20}
CASES = {
    "usual": (VOCAB, SIZE, 3, 2, 1.0),
    "sharp": (VOCAB, SIZE, 2, 3, 0.7),
    "one layer": (VOCAB, {**SIZE, "n_layers": 1}, 2, 2, 1.0),
    "three layers": (VOCAB, {**SIZE, "n_layers": 3, "d_ff": 7}, 2, 2, 1.0),
    "one head": (VOCAB, {**SIZE, "n_heads": 1}, 2, 2, 1.3),
    "heads of one": (VOCAB, {**SIZE, "n_heads": 12}, 2, 2, 1.0),
    "one prompt": (VOCAB, SIZE, 1, 5, 1.0),
    "one response each": (VOCAB, SIZE, 5, 1, 1.0),
    "one position": (ONE_POSITION, SIZE, 3, 2, 0.7),
    "one of each": (ONE_OF_EACH, SIZE, 1, 2, 1.0),
    "width one": (VOCAB, {"d_model": 1, "n_layers": 1, "n_heads": 1, "d_ff": 1}, 2, 2, 1.0),
}


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request: pytest.FixtureRequest, some_prompts: MakePrompts) -> tuple[Policy, torch.Tensor, int, float]:
    """Give a policy whose every parameter matters, prompts (N, P), group and temperature."""
    vocab, size, n_prompts, group, temperature = request.param
    policy = init_policy(vocab, seed=1, size=size)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.4 * torch.randn(parameter.shape, generator=generator))
        policy.tok.weight.add_(3)  # a residual stream far from mean zero
    prompts = some_prompts(vocab, n_prompts).tokens(vocab)
    order = torch.randperm(len(prompts), generator=generator)
    return policy, prompts[order[:n_prompts]], group, temperature


def plain_logp(policy: Policy, prompts: torch.Tensor, responses: torch.Tensor, temperature: float) -> torch.Tensor:
    """Give log probabilities (N * G, R, V) at every prefix, from `Policy.forward` alone."""
    first = policy.vocab.first_content_id
    ids = torch.cat([prompts.repeat_interleave(len(responses) // len(prompts), 0), responses + first], 1)
    logits = policy(ids)[:, policy.config.prompt_len - 1 : -1] / temperature
    return torch.log_softmax(logits, -1)[..., first:].detach()


def sampled(case: tuple[Policy, torch.Tensor, int, float]) -> tuple[Rollout, torch.Tensor, torch.Tensor]:
    policy, prompts, group, temperature = case
    rollout = policy.rollout(n_prompts=len(prompts), group=group)
    uniforms = torch.rand(
        len(prompts) * group, policy.config.resp_len, generator=torch.Generator().manual_seed(3)
    )  # fmt: skip
    with torch.no_grad():
        responses = rollout.sample(policy.folded(temperature=temperature), prompts, uniforms)
    return rollout, responses, uniforms


def test_samples_have_the_log_probabilities_of_the_plain_forward(case: tuple[Policy, torch.Tensor, int, float]) -> None:
    policy, prompts, _, temperature = case
    rollout, responses, _ = sampled(case)
    plain = plain_logp(policy, prompts, responses, temperature)
    torch.testing.assert_close(rollout.from_columns(rollout.logp), plain, atol=1e-5, rtol=1e-5)


def test_uniforms_give_the_tokens_of_the_plain_definition(case: tuple[Policy, torch.Tensor, int, float]) -> None:
    policy, prompts, _, temperature = case
    _, responses, uniforms = sampled(case)
    cdf = plain_logp(policy, prompts, responses, temperature).double().exp().cumsum(-1)
    upper = cdf.gather(-1, responses[..., None]).squeeze(-1)
    lower = torch.where(responses > 0, cdf.gather(-1, (responses - 1).clamp(min=0)[..., None]).squeeze(-1), 0)
    assert ((uniforms > lower - 1e-5) & (uniforms < upper + 1e-5)).all()


def test_the_largest_uniform_gives_a_token(case: tuple[Policy, torch.Tensor, int, float]) -> None:
    """Its product with the distribution's total may round up to the total, beyond which there is no token."""
    policy, prompts, group, temperature = case
    largest = torch.full((len(prompts) * group, policy.config.resp_len), 1 - 2**-24)
    responses, _ = policy.sample(prompts, largest, temperature=temperature)
    assert responses.min() >= 0
    assert responses.max() < policy.vocab.n_content


@pytest.mark.parametrize("keep", [True, False])
def test_scoring_equals_sampling(case: tuple[Policy, torch.Tensor, int, float], keep: bool) -> None:
    policy, prompts, group, temperature = case
    rollout, responses, _ = sampled(case)
    scorer = policy.rollout(n_prompts=len(prompts), group=group, keep=keep)
    with torch.no_grad():
        for _ in range(2):  # buffers are used again
            logp = scorer.score(policy.folded(temperature=temperature), prompts, scorer.to_columns(responses))
    torch.testing.assert_close(logp, rollout.logp, atol=1e-5, rtol=1e-5)


def test_columns_are_members_by_prompts() -> None:
    policy = init_policy(ONE_POSITION, seed=0, size=SIZE)
    rollout = policy.rollout(n_prompts=2, group=3)
    rows = torch.tensor([[10], [11], [12], [20], [21], [22]])
    columns = rollout.to_columns(rows)
    assert columns.tolist() == [[10, 20, 11, 21, 12, 22]]
    assert torch.equal(rollout.from_columns(columns), rows)


@pytest.mark.parametrize("group", [1, 3])
def test_more_prompts_than_fit_at_once_are_taken_in_parts(group: int, some_prompts: MakePrompts) -> None:
    """With one response each, the parts were views of a buffer that the next part wrote to."""
    policy = init_policy(VOCAB, seed=4, size=SIZE)
    few = some_prompts(VOCAB, 9).tokens(VOCAB)
    prompts = few.repeat(-(-600 // len(few)), 1)  # two full parts and a rest
    generator = torch.Generator().manual_seed(5)
    responses, logp = policy.sample(prompts, torch.rand(group * len(prompts), 4, generator=generator), temperature=0.8)
    assert len(responses.unique(dim=0)) > 100
    differentiable = policy.response_logp(prompts, responses, temperature=0.8)
    assert differentiable.requires_grad
    torch.testing.assert_close(logp, differentiable.detach(), atol=1e-5, rtol=1e-5)
    with torch.inference_mode():
        scored = policy.response_logp(prompts, responses, temperature=0.8)
    torch.testing.assert_close(scored, logp, atol=1e-5, rtol=1e-5)
