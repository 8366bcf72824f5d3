"""The REINFORCE estimator as pure functions: advantage, KL, loss.

Shapes: N prompts, G responses each, L positions, V content tokens.
"""

import torch


def taken_logp(logp: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
    """Pick each taken token's log probability: (N * G, L, V), (N * G, L) -> (N * G, L)."""
    return logp.gather(-1, responses[..., None]).squeeze(-1)


def sequence_kl(logp: torch.Tensor, ref_logp: torch.Tensor) -> torch.Tensor:
    """Sum `log pi - log pi_ref` of the taken tokens over a sequence: (N * G, L) -> (N * G,), in nats.

    The k1 estimator (Schulman 2020, "Approximating KL divergence"): unbiased under the policy's own samples,
    and it can be negative for one sequence.
    """
    return (logp - ref_logp).sum(-1)


def group_advantage(rewards: torch.Tensor, *, group: int) -> torch.Tensor:
    """Subtract each prompt's mean reward: (N * G,) -> (N * G,).

    RLOO's leave-one-out baseline (Ahmadian et al. 2024) is this times G / (G - 1): a learning-rate rescale.

    >>> group_advantage(torch.tensor([1.0, 3.0, 5.0, 5.0]), group=2).tolist()
    [-1.0, 1.0, 0.0, 0.0]
    """
    per_prompt = rewards.view(-1, group)
    return (per_prompt - per_prompt.mean(1, keepdim=True)).flatten()


def policy_loss(advantage: torch.Tensor, logp: torch.Tensor) -> torch.Tensor:
    """Return `-(advantage * sum_t log pi).mean()` for advantage (N * G,) and taken logp (N * G, L)."""
    return -(advantage * logp.sum(-1)).mean()


def mean_entropy(logp: torch.Tensor) -> torch.Tensor:
    """Return the mean entropy of the next token in nats, for log probabilities (..., V)."""
    return -(logp.exp() * logp).sum(-1).mean()
