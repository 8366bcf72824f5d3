"""What the reference tells about the hidden tables: which attribute decides a position, which tokens are likely.

The reference imitates demonstrations in which the correct token is frequent, but so are distractors. So its
conditional probabilities propose candidates; only labels decide among them.
"""

from dataclasses import dataclass

import numpy as np
import torch

from rlhf.data import Prompts
from rlhf.policy import Policy

_PROMPTS_PER_FAMILY = 512
_FLOOR = 1e-4


@dataclass(frozen=True, slots=True)
class CandidateTokens:
    """Hold `attribute` (F, L), the deciding attribute, and `log_prior` (F, L, n_values, V) over correct tokens."""

    attribute: np.ndarray
    log_prior: np.ndarray


@torch.inference_mode()
def propose_candidates(reference: Policy, prompts: Prompts, *, seed: int) -> CandidateTokens:
    """Average the reference's next-token distribution by each attribute's value at each position.

    The deciding attribute is the one whose value moves that distribution most (between-group variance). The prior
    over correct tokens is the distribution itself: a token demonstrated twice as often is twice as likely correct.
    """
    vocab, rng = reference.vocab, np.random.default_rng(seed)
    shape = (len(vocab.families), vocab.resp_len)
    attribute = np.zeros(shape, dtype=np.int64)
    log_prior = np.zeros((*shape, vocab.n_values, vocab.n_content))
    for family in range(len(vocab.families)):
        rows = np.flatnonzero(prompts.family == family)
        chosen = prompts[rng.choice(rows, min(len(rows), _PROMPTS_PER_FAMILY), replace=False)]
        uniforms = torch.from_numpy(rng.random((len(chosen), vocab.resp_len), dtype=np.float32))
        probability = reference.sample(chosen.tokens(vocab), uniforms)[1].exp().numpy()  # (N, L, V)
        attribute[family], log_prior[family] = cells_of_family(probability, chosen.attrs, vocab.n_values)
    return CandidateTokens(attribute, log_prior)


def cells_of_family(probability: np.ndarray, attrs: np.ndarray, n_values: int) -> tuple[np.ndarray, np.ndarray]:
    """Return one family's deciding attributes (L,) and log prior (L, n_values, V).

    probability: (N, L, V), at each position of N sampled responses. attrs: (N, n_attrs), of their prompts.
    """
    by_attr = np.stack([_mean_by_value(probability, values, n_values) for values in attrs.T])  # (A, n_values, L, V)
    spread = np.stack([_between_group_variance(means, probability.mean(0), values)
                       for means, values in zip(by_attr, attrs.T, strict=True)])  # (A, L)  # fmt: skip
    attribute = spread.argmax(0)
    chosen = np.stack([by_attr[attr, :, position] for position, attr in enumerate(attribute)])
    return attribute, np.log(chosen + _FLOOR)


def _mean_by_value(probability: np.ndarray, values: np.ndarray, n_values: int) -> np.ndarray:
    """Return the mean of probability (N, L, V) in each value's group, the overall mean where a group is empty."""
    overall = probability.mean(0)
    groups = [probability[values == v] for v in range(n_values)]
    return np.stack([group.mean(0) if len(group) else overall for group in groups])


def _between_group_variance(group_means: np.ndarray, overall: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return sum over values of share * |group mean - overall|^2 at each position: (L,)."""
    share = np.bincount(values, minlength=len(group_means)) / len(values)
    return np.einsum("v,vlt->l", share, (group_means - overall) ** 2)
