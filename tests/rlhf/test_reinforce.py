import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf.reinforce import group_advantage, mean_entropy, policy_loss, sequence_kl, taken_logp

NUMBER = st.floats(-100, 100, width=32)


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_advantage_subtracts_each_prompts_mean(n: int, group: int, data: st.DataObject) -> None:
    rewards = data.draw(st.lists(NUMBER, min_size=n * group, max_size=n * group))
    advantage = group_advantage(torch.tensor(rewards), group=group)
    for prompt in range(n):
        mine = rewards[prompt * group : (prompt + 1) * group]
        expected = [reward - sum(mine) / group for reward in mine]
        assert advantage[prompt * group : (prompt + 1) * group].tolist() == pytest.approx(expected, abs=1e-4)


@given(st.lists(NUMBER, min_size=6, max_size=6), NUMBER)
def test_a_constant_added_to_a_prompts_rewards_changes_nothing(rewards: list[float], constant: float) -> None:
    plain = group_advantage(torch.tensor(rewards), group=3)
    shifted = group_advantage(torch.tensor(rewards) + torch.tensor([constant] * 3 + [0.0] * 3), group=3)
    torch.testing.assert_close(plain, shifted, atol=1e-4, rtol=0)


def test_advantage_is_leave_one_out_times_a_constant() -> None:
    rewards = [0.3, -1.0, 2.0, 0.5]
    leave_one_out = [r - (sum(rewards) - r) / 3 for r in rewards]
    advantage = group_advantage(torch.tensor(rewards), group=4)
    assert (advantage * 4 / 3).tolist() == pytest.approx(leave_one_out, abs=1e-6)


def test_taken_logp_kl_and_loss_equal_plain_sums() -> None:
    generator = torch.Generator().manual_seed(0)
    logp, ref = (torch.log_softmax(torch.randn(4, 3, 5, generator=generator), -1) for _ in range(2))
    responses = torch.randint(5, (4, 3), generator=generator)
    advantage = torch.randn(4, generator=generator)
    loss = 0.0
    for row in range(4):
        taken = [logp[row, t, responses[row, t]].item() for t in range(3)]
        ref_taken = [ref[row, t, responses[row, t]].item() for t in range(3)]
        assert taken_logp(logp, responses)[row].tolist() == taken
        kl = sequence_kl(taken_logp(logp, responses), taken_logp(ref, responses))[row].item()
        assert kl == pytest.approx(sum(taken) - sum(ref_taken), abs=1e-5)
        loss -= advantage[row].item() * sum(taken) / 4
    assert policy_loss(advantage, taken_logp(logp, responses)).item() == pytest.approx(loss, abs=1e-6)


def test_kl_estimator_is_unbiased() -> None:
    """Summed over all sequences with their probabilities, the estimator is the exact KL divergence."""
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    pairs = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    kl = sequence_kl(p.log()[pairs], q.log()[pairs])
    exact = 2 * sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    assert (p[pairs].prod(1) * kl).sum().item() == pytest.approx(exact, abs=1e-6)
    assert kl.min() < 0


def test_entropy_closed_forms() -> None:
    assert mean_entropy(torch.full((3, 4), 0.25).log()).item() == pytest.approx(math.log(4), abs=1e-6)
    two = torch.tensor([[0.9, 0.1], [0.5, 0.5]])
    exact = (-0.9 * math.log(0.9) - 0.1 * math.log(0.1) + math.log(2)) / 2
    assert mean_entropy(two.log()).item() == pytest.approx(exact, abs=1e-6)
