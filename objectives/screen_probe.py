"""Probe one family of a reward model with randomised interventions: tokens put into reference responses at random.

In half of all places the reference's token is replaced with one drawn evenly from the vocabulary. So every feature of
the catalogue occurs, also where the reference would never write it, and what the reward model answers to it cannot be
confused with what else comes with it. Left out: single insertions one by one, which would ask for a pass a feature.
"""

import hashlib
from dataclasses import dataclass
from itertools import permutations

import numpy as np
import torch

from objectives.candidates import cells_of_family
from rlhf.data import Labelled
from rlhf.errors import raise_if_any
from rlhf.features import Feature
from rlhf.policy import Policy
from rlhf.reward_model import RewardModel
from rlhf.vocab import Vocab

SAMPLED = 1280  # reference responses of a family
INSERTED = 224  # responses for each feature that is put in
SCORES_NOT_FINITE = "reward model: scores must be finite, but some are not; check rm.safetensors for weights too large"
_PROBABILITIES_NOT_FINITE = "reference: probabilities must be finite, but some are not; check policy.safetensors"
_VERSIONS = 2  # of each response, with places replaced: sampling costs half as much as scoring
_REPLACED = 0.5


@dataclass(frozen=True, slots=True)
class Probe:
    """Hold what was asked of one family's reward model, and what the reference says about the family.

    attrs (N, n_attrs), responses (N, L), scores (N,): randomised responses. reference_responses (M, L): what they were
    made from, for the first M of attrs. attribute (L,) decides each position; log_prior (L, n_values, V) is the
    reference there. scale: of the reward model's scores, by which `scores` were divided.
    """

    attrs: np.ndarray
    responses: np.ndarray
    scores: np.ndarray
    reference_responses: np.ndarray
    attribute: np.ndarray
    log_prior: np.ndarray
    scale: float


def probe_family(
    reward_model: RewardModel,
    reference: Policy,
    family: int,
    attrs: np.ndarray,
    *,
    scale: float = 1.0,
    n_sampled: int = SAMPLED,
) -> Probe:
    """Sample, intervene and score. `attrs` (M, n_attrs) are the family's prompts, different and sorted.

    Random numbers follow from `attrs` alone: not from the family's name or place, nor from any folder.
    """
    rng = content_rng(attrs)
    vocab = reference.vocab
    drawn = attrs[rng.integers(len(attrs), size=n_sampled)]
    uniforms = torch.from_numpy(rng.random((n_sampled, vocab.resp_len), dtype=np.float32))
    sampled, logp = reference.sample(family_prompts(family, drawn, vocab), uniforms)
    replaced = rng.random((_VERSIONS, *sampled.shape)) < _REPLACED
    responses = np.where(replaced, rng.integers(vocab.n_content, size=replaced.shape), sampled.numpy())
    responses, asked = np.concatenate(responses), np.tile(drawn, (_VERSIONS, 1))
    scores = score_responses(reward_model, family_prompts(family, asked, vocab), responses) / scale
    raise_if_any([] if torch.isfinite(logp).all() else [_PROBABILITIES_NOT_FINITE])
    attribute, log_prior = cells_of_family(logp.exp().numpy(), drawn, vocab.n_values)
    return Probe(asked, responses, scores, sampled.numpy(), attribute, log_prior, scale)


def score_responses(reward_model: RewardModel, prompts: torch.Tensor, responses: np.ndarray) -> np.ndarray:
    """Score responses (N, L). Raises `InputError` if a score is not finite, whatever the weights."""
    scores = reward_model.score(prompts, torch.from_numpy(responses)).numpy().astype(np.float64)
    raise_if_any([] if np.isfinite(scores).all() else [SCORES_NOT_FINITE])
    return scores


def insert_features(probe: Probe, features: list[Feature], *, each: int = INSERTED) -> tuple[np.ndarray, np.ndarray]:
    """Put features into reference responses.

    Pairs go into the prompts, and to the places, in which the reference would have written them: there crowd responses
    held them, and what a reward model learns of a pair stays close to where it saw it.
    Returns attrs (M, n_attrs) and responses (M, L), `each` rows a feature.
    """
    rng = content_rng(probe.attrs[::-1])
    attrs = probe.attrs[: len(probe.reference_responses)]
    positions = np.arange(len(probe.log_prior))
    likely = np.exp(probe.log_prior)[positions, attrs[:, probe.attribute]]  # (M, L, V)
    asked = []
    for feature in features:
        places = np.array(_places(feature, len(positions)))  # (P, tokens)
        weight = np.ones((len(attrs), len(places)))
        if len(places) > 1:
            weight = likely[:, places, np.array(feature.tokens)].prod(-1)
        cdf = weight.cumsum()
        chosen = np.searchsorted(cdf, rng.random(each) * cdf[-1], side="right")
        rows, place = np.divmod(np.minimum(chosen, weight.size - 1), len(places))
        responses = probe.reference_responses[rows]
        np.put_along_axis(responses, places[place], np.array(feature.tokens)[None], 1)
        asked.append((attrs[rows], responses))
    return np.concatenate([a for a, _ in asked]), np.concatenate([r for _, r in asked])


def _places(feature: Feature, length: int) -> list[tuple[int, ...]]:
    """List where a feature's tokens can stand, a position for each."""
    if feature.kind == "position":
        return [(int(feature.position or 0),)]
    if feature.kind == "adjacent":
        return [(place, place + 1) for place in range(length - 1)]
    return list(permutations(range(length), len(feature.tokens)))


def family_prompts(family: int, attrs: np.ndarray, vocab: Vocab) -> torch.Tensor:
    """Return prompt ids (N, prompt_len) of one family for attributes (N, n_attrs)."""
    ids = np.full((len(attrs), vocab.prompt_len), vocab.sep_id)
    ids[:, 0] = vocab.family_id(family)
    ids[:, 1:-1] = vocab.first_value_id + attrs
    return torch.from_numpy(ids)


def content_rng(values: np.ndarray) -> np.random.Generator:
    """Make a generator whose seed is a hash of whole numbers."""
    digest = hashlib.sha256(np.ascontiguousarray(values, dtype="<i8").tobytes()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little"))


def distinct_rows(rows: Labelled) -> Labelled:
    """Keep one of each row, copies having the same id, in an order that depends on content alone."""
    content = np.concatenate([rows.prompts.attrs, rows.responses, rows.labels[:, None]], 1)
    first = {
        (name, *row): index for index, (name, row) in enumerate(zip(rows.prompts.ids, content.tolist(), strict=True))
    }
    kept = np.array(list(first.values()), dtype=np.int64)
    return rows[kept[np.lexsort(content[kept].T[::-1])]]
