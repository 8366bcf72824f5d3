from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch

from objectives.limit import Limit, front_share, limit_curve, position_dependence, task_limit, tilted_position
from objectives.quality_model import QualityModel
from objectives.score import Judge
from rlhf.policy import init_policy
from rlhf.taskdir import Task

TRAINED = (  # quality, KL, and the limit at that KL of REINFORCE policies on a built world with true quality as reward
    (0.602, 1.53, 0.608), (0.839, 4.97, 0.841), (0.944, 7.64, 0.949), (0.979, 8.66, 0.980), (0.986, 8.94, 0.987),
    (0.994, 9.36, 0.996),
)  # fmt: skip


@pytest.mark.parametrize("beta", [2.0, 0.3, 0.1, 0.02])
def test_the_closed_form_is_the_enumeration_of_all_sequences(beta: float) -> None:
    rng = np.random.default_rng(0)
    length, n_tokens = 4, 3
    p, c = rng.dirichlet(np.ones(n_tokens), size=length), rng.random((length, n_tokens))
    sequences = np.array(list(product(range(n_tokens), repeat=length)))
    reference = np.prod(p[np.arange(length), sequences], 1)
    quality = c[np.arange(length), sequences].mean(1)
    optimum = reference * np.exp(quality / beta)
    optimum /= optimum.sum()
    kl, by_position = tilted_position(p, c, strength=1 / (length * beta))
    assert kl.sum() == pytest.approx((optimum * np.log(optimum / reference)).sum(), rel=1e-9)
    assert by_position.mean() == pytest.approx((optimum * quality).sum(), rel=1e-12)


def test_no_policy_lies_above_the_limit() -> None:
    """Random policies with dependent positions, all sequences enumerated."""
    rng = np.random.default_rng(1)
    p, c = rng.dirichlet(np.ones(3), size=3), rng.random((3, 3))
    sequences = np.array(list(product(range(3), repeat=3)))
    reference, quality = np.prod(p[np.arange(3), sequences], 1), c[np.arange(3), sequences].mean(1)
    limit = limit_curve(p[None], c[None], np.zeros(1, dtype=int))
    for sharpness in rng.uniform(0, 30, 300):
        policy = reference * np.exp(sharpness * (quality + rng.normal(0, 0.1, len(quality))))
        policy /= policy.sum()
        kl = (policy * np.log(policy / reference)).sum()
        assert (policy * quality).sum() <= limit.at(kl) + 1e-4  # the limit is interpolated


def test_hard_correctness_is_the_formula_of_one_correct_token() -> None:
    p0, beta = 0.33, 0.05
    tilt = np.exp(1 / (8 * beta))
    expected = p0 * tilt / (1 + p0 * (tilt - 1))
    kl, quality = tilted_position(np.array([p0, 0.5, 0.17]), np.array([1.0, 0, 0]), strength=1 / (8 * beta))
    assert quality == pytest.approx(expected)
    assert kl == pytest.approx(expected * np.log(expected / p0) + (1 - expected) * np.log((1 - expected) / (1 - p0)))


def world_limit() -> Limit:
    """The limit of a world whose reference is its demonstrations: correct tokens have 0.33 or 0.30."""
    p = np.stack([[0.33, 0.67], [0.30, 0.70]])[np.arange(8) % 2]
    return limit_curve(p[None], np.tile([1.0, 0.0], (1, 8, 1)), np.zeros(1, dtype=int))


def test_trained_policies_lie_just_below_the_limit() -> None:
    limit = world_limit()
    for quality, kl, published in TRAINED:
        assert quality <= limit.at(kl) + 0.002, kl
        assert limit.at(kl) == pytest.approx(published, abs=0.02)


def test_more_kl_buys_more_quality_and_ever_less_of_it() -> None:
    rng = np.random.default_rng(2)
    limit = limit_curve(
        rng.dirichlet(np.ones(5), size=(20, 3)), rng.dirichlet(np.ones(5), size=(20, 3)), np.arange(20) % 2
    )
    assert limit.kl[0] == 0
    assert np.diff(limit.kl).min() >= 0
    assert np.diff(limit.quality).min() >= -1e-12
    moving = np.diff(limit.kl) > 1e-6
    slope = np.diff(limit.quality)[moving] / np.diff(limit.kl)[moving]
    assert np.diff(slope).max() < 1e-6


def test_families_weigh_alike_whatever_their_number_of_prompts() -> None:
    rng = np.random.default_rng(3)
    p, c = rng.dirichlet(np.ones(3), size=(2, 2)), rng.random((2, 2, 3))
    rows = np.array([0, 0, 0, 1])
    once, often = limit_curve(p, c, np.arange(2)), limit_curve(p[rows], c[rows], rows)
    np.testing.assert_allclose(often.quality, once.quality)
    np.testing.assert_allclose(often.kl, once.kl)


def test_a_token_the_reference_never_writes_is_out_of_reach() -> None:
    kl, quality = tilted_position(np.array([0.0, 1.0]), np.array([1.0, 0.2]), strength=1e4)
    assert (kl, quality) == (0.0, 0.2)


def test_share_of_a_front_on_the_limit_is_all_of_it() -> None:
    limit = world_limit()
    kl = np.linspace(0, 6, 3000)
    assert front_share(kl, limit.at(kl), limit) == pytest.approx(1, abs=0.002)


def test_share_of_one_step_is_its_rectangle() -> None:
    limit = Limit(np.array([0.0, 4.0]), np.array([0.2, 1.0]))  # a triangle: area 1.6 up to KL 4
    assert front_share(np.array([1.0, 4.0]), np.array([0.3, 0.4]), limit) == pytest.approx(3 * 0.1 / 1.6, rel=0.002)
    below = front_share(np.array([1.0, 2.0, 4.0]), np.array([0.3, 0.1, 0.4]), limit)
    assert below == pytest.approx(3 * 0.1 / 1.6, rel=0.002)


def test_a_front_at_kl_0_has_no_share() -> None:
    assert np.isnan(front_share(np.array([0.0]), np.array([0.2]), world_limit()))


def test_dependence_is_0_for_independent_positions(network_task: Task) -> None:
    vocab = network_task.vocab
    constant = init_policy(vocab, seed=0, size={"d_model": 16, "n_layers": 1, "n_heads": 2, "d_ff": 16})
    with torch.no_grad():
        constant.ln.weight.zero_()
    tokens = network_task.train_prompts.tokens(vocab)[:50]
    assert np.abs(position_dependence(constant, tokens, n_samples=4, seed=0)).max() < 1e-6


@torch.no_grad()
def test_dependence_is_the_total_correlation_of_all_sequences(network_task: Task) -> None:
    vocab = network_task.vocab
    policy = init_policy(vocab, seed=1, size={"d_model": 16, "n_layers": 1, "n_heads": 2, "d_ff": 16})
    policy.head.weight *= 4
    responses = torch.tensor(list(product(range(3), repeat=3)))
    tokens = network_task.train_prompts.tokens(vocab)[:3]
    found = position_dependence(policy, tokens, n_samples=4000, seed=0)
    for row in range(3):
        logp = policy.response_logp(tokens[row : row + 1], responses).gather(-1, responses[..., None])[..., 0].sum(1)
        joint = logp.exp().double().numpy().reshape(3, 3, 3)
        marginals = [joint.sum(tuple(axis for axis in range(3) if axis != position)) for position in range(3)]
        product_of_marginals = np.einsum("i,j,k->ijk", *marginals)
        expected = (joint * np.log(joint / product_of_marginals)).sum()
        assert expected > 0.005
        assert found[row] == pytest.approx(expected, rel=0.1)


def test_a_tasks_limit_starts_at_its_reference(
    network_task: Task, one_token_is_correct: Callable[..., QualityModel]
) -> None:
    judge = Judge(network_task, one_token_is_correct(0, 1, 2))
    limit = task_limit(judge)
    assert limit.quality[0] == pytest.approx(judge.score(network_task.reference).balanced_quality, abs=0.005)
    assert limit.quality[-1] == pytest.approx(1, abs=1e-3)
