import copy
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf.config import RunConfig
from rlhf.data import Prompts, read_prompts
from rlhf.fast_grad import Backward, logit_gradient
from rlhf.policy import Policy, init_policy, load_policy
from rlhf.reinforce import group_advantage, policy_loss, sequence_kl, taken_logp
from rlhf.reward_model import load_reward_model
from rlhf.run import ReinforceRun
from rlhf.taskdir import DEFAULT_TASK
from rlhf.vocab import DEFAULT_VOCAB, Vocab
from rlhf.world import load_world

MakePrompts = Callable[..., Prompts]
Case = tuple[Vocab, dict[str, int], int, int, float]
TRUTH = Path(__file__).parents[1] / "data/default_task_truth.json"
VOCAB = Vocab(("p", "q", "r"), n_attrs=2, n_values=3, content_tokens=tuple("abcde"), resp_len=4)
ONE_ATTRIBUTE = Vocab(("p", "q"), n_attrs=1, n_values=4, content_tokens=tuple("abc"), resp_len=1)
SIZE = {"d_model": 12, "n_layers": 2, "n_heads": 3, "d_ff": 20}
CASES = {
    "usual": (VOCAB, SIZE, 3, 2, 1.0),
    "sharp": (VOCAB, SIZE, 2, 3, 0.7),
    "one layer, one head": (VOCAB, {**SIZE, "n_layers": 1, "n_heads": 1}, 2, 2, 1.0),
    "three layers, heads of one": (VOCAB, {**SIZE, "n_layers": 3, "n_heads": 12, "d_ff": 7}, 2, 2, 1.3),
    "one prompt": (VOCAB, SIZE, 1, 5, 1.0),
    "one response each": (VOCAB, SIZE, 5, 1, 1.0),
    "one attribute, one position": (ONE_ATTRIBUTE, SIZE, 3, 2, 0.7),
}


def plain_logp(policy: Policy, prompts: torch.Tensor, responses: torch.Tensor, temperature: float) -> torch.Tensor:
    """Give log probabilities (N * G, R, V) at every prefix, from `Policy.forward` and autograd alone."""
    first = policy.vocab.first_content_id
    ids = torch.cat([prompts.repeat_interleave(len(responses) // len(prompts), 0), responses + first], 1)
    logits = policy(ids)[:, policy.config.prompt_len - 1 : -1] / temperature
    return torch.log_softmax(logits, -1)[..., first:]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_loss_and_gradient_equal_those_of_autograd(case: Case, some_prompts: MakePrompts) -> None:
    vocab, size, n_prompts, group, temperature = case
    policy = init_policy(vocab, seed=1, size=size)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    prompts = some_prompts(vocab, n_prompts).tokens(vocab)[:n_prompts]
    plain = copy.deepcopy(policy)
    rollout = policy.rollout(n_prompts=n_prompts, group=group)
    backward = Backward(policy, rollout)
    for _ in range(2):  # what the first pass leaves in the buffers must not reach the second
        uniforms = torch.rand(n_prompts * group, vocab.resp_len, generator=generator)
        advantage = torch.randn(n_prompts * group, generator=generator)
        with torch.no_grad():
            folded = policy.folded(temperature=temperature)
            responses = rollout.sample(folded, prompts, uniforms)
            fast_loss = policy_loss(advantage, taken_logp(rollout.from_columns(rollout.logp), responses))
        backward(folded, logit_gradient(rollout, advantage), temperature=temperature)
        loss = policy_loss(advantage, taken_logp(plain_logp(plain, prompts, responses, temperature), responses))
        plain.zero_grad()
        loss.backward()
        assert fast_loss.item() == pytest.approx(loss.item(), abs=1e-5)
        assert backward.flat.norm() > 1e-2
        for (name, mine), theirs in zip(policy.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_clip_scales_the_whole_gradient(some_prompts: MakePrompts) -> None:
    policy = init_policy(VOCAB, seed=1, size=SIZE)
    backward = Backward(policy, policy.rollout(n_prompts=1, group=1))
    backward.flat.fill_(2.0)
    norm = 2 * len(backward.flat) ** 0.5
    assert backward.clip(2 * norm) == pytest.approx(norm)
    assert (backward.flat == 2).all()
    assert backward.clip(norm / 4) == pytest.approx(norm)
    assert all(p.grad is not None and torch.allclose(p.grad, torch.tensor(0.5)) for p in policy.parameters())


def plain_run(config: RunConfig, task: Path) -> Policy:
    """Train as `ReinforceRun` does, with the plain forward, autograd, and the same random streams."""
    vocab = DEFAULT_VOCAB
    policy, reference = (load_policy(task / "policy", vocab) for _ in range(2))
    reward_model = load_reward_model(task / "reward_model", vocab)
    pool = read_prompts(task / config.prompt_file, vocab)
    adam, tokens = torch.optim.Adam(policy.parameters(), lr=config.lr), pool.tokens(vocab)
    draw, noise = (torch.Generator().manual_seed(2 * config.seed + k) for k in (0, 1))
    weights = torch.from_numpy(1 / np.bincount(pool.family)[pool.family])
    first = vocab.first_content_id
    for _ in range(config.steps):
        chosen = torch.multinomial(weights, config.batch_prompts, replacement=True, generator=draw)
        prompts = tokens[chosen]
        ids = prompts.repeat_interleave(config.samples_per_prompt, 0)
        uniforms = torch.rand(len(ids), vocab.resp_len, generator=noise)
        with torch.no_grad():
            for u in uniforms.unbind(1):
                cdf = torch.softmax(policy(ids)[:, -1, first:], -1).cumsum(-1)
                token = (cdf <= u[:, None] * cdf[:, -1:]).sum(-1).clamp(max=cdf.shape[-1] - 1)
                ids = torch.cat([ids, token[:, None] + first], 1)
            responses = ids[:, vocab.prompt_len :] - first
            ref = taken_logp(plain_logp(reference, prompts, responses, 1.0), responses)
            rewards = reward_model(ids)
        taken = taken_logp(plain_logp(policy, prompts, responses, 1.0), responses)
        shaped = rewards - config.kl_coef * sequence_kl(taken.detach(), ref)
        adam.zero_grad()
        policy_loss(group_advantage(shaped, group=config.samples_per_prompt), taken).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm)
        adam.step()
    return policy


@pytest.mark.slow
def test_a_long_run_ends_where_the_plain_loop_ends() -> None:
    """200 steps of the default task from the same seed: the two part by rounding alone."""
    world, vocab = load_world(json.loads(TRUTH.read_text())), DEFAULT_VOCAB
    reference = load_policy(DEFAULT_TASK / "policy", vocab)
    pool = read_prompts(DEFAULT_TASK / "data/prompts_dev.jsonl", vocab)
    tokens = pool.tokens(vocab)
    uniforms = torch.rand(len(pool), 8, generator=torch.Generator().manual_seed(7))

    @torch.no_grad()
    def figures(policy: Policy) -> tuple[float, float]:
        responses, logp = policy.sample(tokens, uniforms)
        kl = (logp.exp() * (logp - reference.response_logp(tokens, responses))).sum((1, 2)).mean()
        return world.quality(pool, responses.numpy()).mean(), kl.item()

    config = RunConfig(steps=200, lr=1e-3)
    fast = ReinforceRun(config, DEFAULT_TASK)
    list(fast.advance(200))
    (quality, kl), (plain_quality, plain_kl) = figures(fast.policy), figures(plain_run(config, DEFAULT_TASK))
    assert plain_kl > 2  # it went somewhere
    assert quality == pytest.approx(plain_quality, abs=0.02)
    assert kl == pytest.approx(plain_kl, rel=0.1)
