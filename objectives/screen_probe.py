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
from rlhf.features import Feature
from rlhf.policy import Policy
from rlhf.reward_model import RewardModel
from rlhf.vocab import Vocab

PROBES = 2560  # a family
INSERTED = 256  # responses for each feature that is put in
_REPLACED = 0.5


@dataclass(frozen=True, slots=True)
class Probe:
    """Hold what was asked of one family's reward model, and what the reference says about the family.

    attrs (N, n_attrs), responses (N, L), scores (N,): randomised responses. reference_responses (N, L): what they were
    made from. attribute (L,) decides each position; log_prior (L, n_values, V) is the reference there.
    """

    attrs: np.ndarray
    responses: np.ndarray
    scores: np.ndarray
    reference_responses: np.ndarray
    attribute: np.ndarray
    log_prior: np.ndarray


def probe_family(
    reward_model: RewardModel, reference: Policy, family: int, attrs: np.ndarray, *, n_probes: int = PROBES
) -> Probe:
    """Sample, intervene and score. `attrs` (M, n_attrs) are the family's prompts, different and sorted.

    Random numbers follow from `attrs` alone: not from the family's name or place, nor from any folder.
    """
    rng = content_rng(attrs)
    vocab = reference.vocab
    drawn = attrs[rng.integers(len(attrs), size=n_probes)]
    prompts = family_prompts(family, drawn, vocab)
    uniforms = torch.from_numpy(rng.random((n_probes, vocab.resp_len), dtype=np.float32))
    sampled, logp = reference.sample(prompts, uniforms)
    replaced = rng.random(sampled.shape) < _REPLACED
    responses = np.where(replaced, rng.integers(vocab.n_content, size=sampled.shape), sampled.numpy())
    scores = reward_model.score(prompts, torch.from_numpy(responses)).numpy().astype(np.float64)
    attribute, log_prior = cells_of_family(logp.exp().numpy(), drawn, vocab.n_values)
    return Probe(drawn, responses, scores, sampled.numpy(), attribute, log_prior)


def insert_features(probe: Probe, features: list[Feature], *, each: int = INSERTED) -> tuple[np.ndarray, np.ndarray]:
    """Put features into reference responses, where the reference would most likely have written their tokens.

    Returns attrs (M, n_attrs) and responses (M, L), `each` rows a feature.
    """
    rng = content_rng(probe.attrs[::-1])
    likely = np.exp(probe.log_prior).mean(1)  # (L, V)
    rows = rng.integers(len(probe.attrs), size=(len(features), each))
    responses = probe.reference_responses[rows]
    for feature, some in zip(features, responses, strict=True):
        places = _places(feature, likely)
        weight = np.array(
            [np.prod([likely[p, t] for p, t in zip(place, feature.tokens, strict=True)]) for place in places]
        )
        chosen = rng.choice(len(places), each, p=weight / weight.sum())
        for column, token in enumerate(feature.tokens):
            some[np.arange(each), np.array(places)[chosen, column]] = token
    return probe.attrs[rows].reshape(-1, probe.attrs.shape[1]), responses.reshape(-1, responses.shape[2])


def _places(feature: Feature, likely: np.ndarray) -> list[tuple[int, ...]]:
    """List where a feature's tokens can stand: a position for each."""
    length = len(likely)
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


def sorted_rows(rows: Labelled) -> Labelled:
    """Put rows into an order that depends on their content alone."""
    keys = np.concatenate([rows.prompts.attrs, rows.responses], 1)
    return rows[np.lexsort((rows.labels, *keys.T[::-1]))]
