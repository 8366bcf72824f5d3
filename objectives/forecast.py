"""Forecast without training what optimising a reward model does to a family's responses, at a given kl_coef.

The optimum of reward minus kl_coef times KL is pi*(y|x) ~ pi_ref(y|x) exp(r(x, y) / kl_coef) (Korbak et al. 2022,
arXiv:2205.11275). Reference samples reweighted by exp(r / kl_coef) collapse at 0.1: one in hundreds carries all weight.
So responses are proposed position by position from the reference tilted by what the reward model answers to each
token there, and weights correct for the difference, dependence between positions included (population Monte Carlo,
Cappe et al. 2004). A training run stops before the optimum: the forecast is where it is heading.
"""

from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import log_softmax, logsumexp, softmax  # type: ignore[import-untyped]

from objectives.screen_probe import SCORES_NOT_FINITE, Probe, content_rng, family_prompts
from rlhf.config import RunConfig
from rlhf.errors import raise_if_any
from rlhf.policy import Policy
from rlhf.reward_model import RewardModel

DEFAULT_KL_COEF = RunConfig().kl_coef
PROMPTS, PARTICLES = 8, 32
_ROUNDS = 2
_DEFENSIVE = 0.1  # share of proposals that only follow the reference
_MAX_TILT = 500.0  # nats, of a token: more is certain already
_LEAST_KL_COEF = 1e-12  # below, only the best of the proposed responses counts
_SMOOTHING = 2.0  # particles' worth of the last proposal in the next one


@dataclass(frozen=True, slots=True)
class Forecast:
    """Hold weighted responses (N, L) from the optimum: `weights` (N,) sum to 1.

    ess: effective sample size of the weights, out of N, summed over prompts. kl: of the optimum from the reference, in
    nats a response; reward: mean score there.
    """

    responses: np.ndarray
    weights: np.ndarray
    ess: float
    kl: float
    reward: float

    def mean(self, values: np.ndarray) -> np.ndarray:
        """Return the optimum's mean of values (N, ...) of the responses."""
        return np.tensordot(self.weights, values, 1)


@torch.no_grad()
def forecast_optimum(
    reward_model: RewardModel, reference: Policy, family: int, probe: Probe, effects: np.ndarray, *, kl_coef: float
) -> Forecast:
    """Sample the optimum of one family. `effects` (L, n_values, V): the score's answer to a token in a cell."""
    rng = content_rng(probe.attrs[:PROMPTS])
    attrs = probe.attrs[:PROMPTS]
    prompts = family_prompts(family, attrs, reference.vocab)
    cells = attrs[:, probe.attribute]  # (P, L)
    positions = np.arange(cells.shape[1])
    base = log_softmax(probe.log_prior, -1)[positions, cells]  # (P, L, V)
    tilted = log_softmax(base + np.clip(effects[positions, cells] * probe.scale / kl_coef, -_MAX_TILT, _MAX_TILT), -1)
    scorer = reward_model.scorer()
    for _ in range(_ROUNDS):
        proposal = np.logaddexp(np.log1p(-_DEFENSIVE) + tilted, np.log(_DEFENSIVE) + base)
        responses = _draw(proposal, rng)  # (P, G, L)
        flat = torch.from_numpy(responses.reshape(-1, responses.shape[2]))
        score = scorer.score(prompts, flat).numpy().astype(float).reshape(responses.shape[:2])
        raise_if_any([] if np.isfinite(score).all() else [SCORES_NOT_FINITE])
        logp = reference.response_logp(prompts, flat).numpy().astype(float)
        log_ref = np.take_along_axis(logp, flat.numpy()[..., None], -1).sum((1, 2)).reshape(score.shape)
        log_q = np.take_along_axis(proposal[:, None], responses[..., None], -1)[..., 0].sum(-1)
        lost = (score - score.max(1, keepdims=True)) / max(kl_coef, _LEAST_KL_COEF)
        log_weight = log_ref + lost - log_q
        weight = softmax(log_weight, 1)  # each prompt has its own normaliser
        tilted = _adapt(tilted, base, responses, weight)
    log_normaliser = logsumexp(log_weight, 1) - np.log(PARTICLES)
    weights = weight.ravel() / len(attrs)
    return Forecast(
        responses=responses.reshape(-1, responses.shape[2]),
        weights=weights,
        ess=float((1 / (weight**2).sum(1)).sum()),
        kl=float(((weight * lost).sum(1) - log_normaliser).mean()),
        reward=float((weight * score).sum(1).mean()),
    )


def _draw(log_probability: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw PARTICLES responses of independent positions for each prompt: (P, L, V) -> (P, G, L)."""
    cdf = np.exp(log_probability).cumsum(-1)
    uniforms = rng.random((len(cdf), PARTICLES, cdf.shape[1], 1)) * cdf[:, None, :, -1:]
    return (cdf[:, None] <= uniforms).sum(-1)


def _adapt(tilted: np.ndarray, base: np.ndarray, responses: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Raise or lower each token at each position, in all prompts (P, L, V) alike, towards the weighted responses."""
    one_hot = np.eye(tilted.shape[2])[responses]
    smoothing = np.maximum(_SMOOTHING * np.exp(tilted).mean(0), 1e-300)
    ratio = (np.einsum("pg,pglv->lv", weight, one_hot) + smoothing) / (one_hot.mean(1).sum(0) + smoothing)
    return log_softmax(tilted + np.log(ratio), -1)
