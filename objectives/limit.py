"""The limit: the best quality that any policy can have at a given KL from the reference, under the quality model.

Quality minus beta times KL is largest for pi*(y) ~ pi_ref(y) exp(q(y) / beta) (Korbak et al. 2022, arXiv:2205.11275).
Quality is a mean over the L positions, so if positions are independent given the prompt under the reference, pi* is
too: p*(t) ~ p(t) exp(c(t) / (L beta)) at each position, c(t) the probability that token t is correct there.
`position_dependence` measures how far that holds. Left out: references with dependent positions, which have no closed
form.
"""

from dataclasses import dataclass

import moocore
import numpy as np
import torch
from scipy.special import rel_entr  # type: ignore[import-untyped]

from objectives.score import Judge
from objectives.token_mass import mean_by_family
from rlhf.policy import Policy

_BETAS = np.geomspace(10.0, 1e-4, 200)
_PREFIXES = 8  # sampled for each prompt
_STEPS = 2000  # of the staircase whose hypervolume stands for the area under the limit


@dataclass(frozen=True, slots=True)
class Limit:
    """Hold balanced `kl` (B,) and `quality` (B,), both increasing; the first point is the reference's, at KL 0."""

    kl: np.ndarray
    quality: np.ndarray

    def at(self, kl: np.ndarray | float) -> np.ndarray:
        """Return the best quality at each KL in nats, interpolated; flat beyond the last point."""
        return np.interp(kl, self.kl, self.quality)


def task_limit(judge: Judge, *, seed: int = 0) -> Limit:
    """Return the limit on a judge's prompts, from the reference's token probabilities there.

    They are averaged over what the reference may have written before: with one prefix a prompt the limit of the default
    task came out lower, by up to 0.004.
    """
    reference = _by_prefix(judge.task.reference, judge.prompts.tokens(judge.task.vocab), _PREFIXES, seed).mean(1)
    return limit_curve(reference, judge.position_quality, judge.prompts.family)


def limit_curve(probability: np.ndarray, correct: np.ndarray, family: np.ndarray) -> Limit:
    """Sweep beta and average over prompts, then families.

    probability, correct: (N, L, V), the reference's token probabilities and each token's probability of being correct.
    family: (N,), each of 0 to its largest at least once.
    """
    length, n_families = probability.shape[1], int(family.max()) + 1
    reference = mean_by_family((probability * correct).sum(-1).mean(1), family, n_families)[0].mean()
    points = [(0.0, reference)]
    for beta in _BETAS:
        kl, quality = tilted_position(probability, correct, strength=1 / (length * beta))
        by_family = (mean_by_family(values, family, n_families)[0] for values in (kl.sum(1), quality.mean(1)))
        points.append(tuple(values.mean() for values in by_family))
    kl, quality = np.array(points).T
    return Limit(kl, quality)


def tilted_position(probability: np.ndarray, correct: np.ndarray, *, strength: float) -> tuple[np.ndarray, np.ndarray]:
    """Return KL and quality (...,) of p* ~ p exp(strength * c) for p and c (..., V); strength is 1 / (L beta)."""
    best = np.where(probability > 0, correct, -np.inf).max(-1, keepdims=True)
    weight = probability * np.exp(np.minimum(strength * (correct - best), 0.0))
    tilted = weight / weight.sum(-1, keepdims=True)
    return rel_entr(tilted, probability).sum(-1), (tilted * correct).sum(-1)


def front_share(front_kl: np.ndarray, front_quality: np.ndarray, limit: Limit) -> float:
    """Return the front's hypervolume as a share of the limit's, in the plane of KL (min) and quality (max).

    The reference point is (largest KL of the front, quality of the reference): what a front gains beyond that KL does
    not count, and its last point only closes it. NaN for a front at KL 0, which has no area to take a share of.
    """
    front_kl, front_quality = np.asarray(front_kl, dtype=float), np.asarray(front_quality, dtype=float)
    kl = np.linspace(0.0, front_kl.max(), _STEPS + 1)
    worst = np.array([front_kl.max(), limit.quality[0]])
    areas = [
        moocore.hypervolume(np.column_stack(points), ref=worst, maximise=[False, True])
        for points in ((front_kl, front_quality), (kl, limit.at(kl)))
    ]
    return float(areas[0] / areas[1]) if areas[1] > 0 else float("nan")


def position_dependence(policy: Policy, prompts: torch.Tensor, *, n_samples: int, seed: int) -> np.ndarray:
    """Estimate how dependent a policy's positions are given the prompt: total correlation in nats, (N,).

    It is the sum over positions of the mutual information of a token and what was written before it: the mean KL of
    next-token distributions from their mean over `n_samples` sampled prefixes. 0 if positions are independent.
    """
    probability = _by_prefix(policy, prompts, n_samples, seed)
    mean = probability.mean(1, keepdims=True)
    information = rel_entr(probability, mean).sum((2, 3)).mean(1)
    return information * n_samples / (n_samples - 1)  # each sample is in its own mean


def _by_prefix(policy: Policy, prompts: torch.Tensor, n_samples: int, seed: int) -> np.ndarray:
    """Return token probabilities after sampled prefixes: (N, n_samples, L, V)."""
    generator = torch.Generator().manual_seed(seed)
    uniforms = torch.rand(len(prompts) * n_samples, policy.vocab.resp_len, generator=generator)
    probability = policy.sample(prompts, uniforms)[1].exp().double().numpy()
    return probability.reshape(len(prompts), n_samples, *probability.shape[1:])
