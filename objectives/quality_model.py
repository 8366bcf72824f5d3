"""Label-inferred quality: a posterior over the tables of correct tokens, fitted from expert and crowd labels.

An estimate, not the truth: `checks` says how well it predicts expert labels it has not seen, and whether to believe it.
"""

import hashlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from objectives.candidates import CandidateTokens, propose_candidates
from objectives.fit_checks import MAX_RHAT, FitChecks, check_fit, family_rhat
from objectives.label_gibbs import CROWD, EXPERT, LabelRows, LabelSampler
from rlhf.data import Labelled, Prompts
from rlhf.features import Feature, all_features, feature_json, feature_values
from rlhf.json_values import finite_or_none
from rlhf.taskdir import Task
from rlhf.vocab import Vocab

ESTIMATE_NOTE = "Label-inferred quality is an estimate fitted to labels, not the true quality."
_CHAINS = 4
_FOLDS = 5
_BURN_IN_SWEEPS = 60
_KEPT_SWEEPS = 200
_THINNING = (1, 2, 4)  # sweeps a kept draw, round by round, as long as the chains have not converged
_SHORTCUT_IN_USE = 0.5  # posterior probability from which a shortcut is reported and subtracted by `debias`
_REWARD_CHAINS = 2
_WITHHELD_SHARE = 0.25  # of expert labels, from the chains that rewards are made of


@dataclass(frozen=True, slots=True)
class FittedShortcut:
    """A feature that crowd labels pay for: `size` a unit, `probability` that it pays at all."""

    family: int
    feature: Feature
    size: float
    probability: float


@dataclass(frozen=True, slots=True)
class QualityModel:
    """Hold the posterior.

    attribute: (F, L) deciding attribute. correct: (F, L, n_values, V) probability that a token is correct.
    reward_correct: the same, from chains that did not see the withheld expert labels: what rewards are made of, so that
    the judge of a checkpoint has seen labels that its reward did not.
    draws: (D, F, L, n_values) tables. noise: (F, 2) sd of expert and crowd labels.
    """

    vocab: Vocab
    attribute: np.ndarray
    correct: np.ndarray
    reward_correct: np.ndarray
    draws: np.ndarray
    noise: np.ndarray
    shortcuts: tuple[FittedShortcut, ...]
    checks: FitChecks

    def position_quality(self, prompts: Prompts) -> np.ndarray:
        """Return the probability that each content token is correct at each position: (N, L, V)."""
        return self.correct[prompts.family[:, None], np.arange(self.vocab.resp_len), self.cells(prompts)]

    def cells(self, prompts: Prompts) -> np.ndarray:
        """Return the deciding attribute's value at each position: (N, L)."""
        return np.take_along_axis(prompts.attrs, self.attribute[prompts.family], axis=1)

    def quality(self, prompts: Prompts, responses: np.ndarray) -> np.ndarray:
        """Return the expected fraction of correct positions: responses (N, L) -> (N,)."""
        return np.take_along_axis(self.position_quality(prompts), responses[..., None], -1)[..., 0].mean(1)

    @property
    def refusals(self) -> tuple[str, ...]:
        """Return every reason not to believe the fit; empty if there is none."""
        return self.checks.refusals(self.vocab.families)

    @property
    def caveats(self) -> str:
        """Say, for a terminal, how far what was estimated can be believed."""
        return "\n".join([*(f"NOT TO BE BELIEVED: {reason}" for reason in self.refusals), ESTIMATE_NOTE])

    def to_json(self) -> dict[str, Any]:
        """Describe the fit for people and programs; `tables` gives each cell's likeliest token and its probability."""
        vocab = self.vocab
        best = self.correct.argmax(-1)
        return {
            "note": ESTIMATE_NOTE,
            "held_out": {"expert_rmse": self.checks.rmse},
            "refusals": list(self.refusals),
            "families": {
                name: {
                    "expert_noise_sd": float(self.noise[f, EXPERT]),
                    "crowd_noise_sd": float(self.noise[f, CROWD]),
                    "held_out_expert_rmse": float(self.checks.family_rmse[f]),
                    "held_out_expert_correlation": finite_or_none(self.checks.correlation[f]),
                    "interaction_p": float(self.checks.interaction_p[f]),
                    "rhat": float(self.checks.rhat[f]),
                    "crowd_shortcuts": [
                        {**feature_json(s.feature, vocab), "size": s.size, "probability": s.probability}
                        for s in self.shortcuts
                        if s.family == f
                    ],
                    "attribute": self.attribute[f].tolist(),
                    "tables": [[vocab.content_tokens[t] for t in row] for row in best[f].tolist()],
                    "cell_probability": self.correct[f].max(-1).round(4).tolist(),
                }
                for f, name in enumerate(vocab.families)
            },
        }


def fit_quality(task: Task, *, seed: int = 0) -> QualityModel:
    """Fit a task's labels."""
    candidates = propose_candidates(task.reference, task.train_prompts, seed=seed)
    return fit_labels(task.expert, task.crowd, candidates, task.vocab, seed=seed)


def fit_labels(
    expert: Labelled, crowd: Labelled, candidates: CandidateTokens, vocab: Vocab, *, seed: int = 0
) -> QualityModel:
    """Fit the posterior by Gibbs sampling.

    Beside the main chains run those of a cross-validation and those that rewards are made of; each is a chain with
    some rows switched off.
    """
    rng = np.random.default_rng(seed)
    features = all_features(vocab)
    rows = label_rows(expert, crowd, candidates.attribute, features)
    folds = _stratified_folds(rows, rng)
    used = np.concatenate(
        [
            np.ones((_CHAINS, *rows.labels.shape), dtype=bool),
            np.stack([folds != fold for fold in range(_FOLDS)]),
            np.stack([~_withheld(rows, expert)] * _REWARD_CHAINS),
        ]
    )
    sampler = LabelSampler(rows, candidates.log_prior, used, rng)
    sampler.anneal(_BURN_IN_SWEEPS)
    main = slice(0, _CHAINS)
    kept, traces = _sample(sampler, np.exp(candidates.log_prior), main)
    tables = np.stack([draw.table for draw in kept])  # (D, C, F, L, n_values)
    correct = _token_share(tables[:, main], vocab.n_content)
    return QualityModel(
        vocab=vocab,
        attribute=candidates.attribute,
        correct=correct,
        reward_correct=_token_share(tables[:, _CHAINS + _FOLDS :], vocab.n_content),
        draws=tables[:, main].reshape(-1, *tables.shape[2:]),
        noise=np.sqrt(np.mean([draw.variance[main] for draw in kept], axis=(0, 1))),
        shortcuts=_fitted_shortcuts(
            np.concatenate([draw.sizes[main] for draw in kept]), sampler.state.shortlist, features
        ),
        checks=check_fit(
            rows,
            unseen=_unseen(folds, np.mean([draw.predicted[_CHAINS : _CHAINS + _FOLDS] for draw in kept], axis=0)),
            correct=correct,
            traces=traces,
            rng=rng,
        ),
    )


class _Kept(NamedTuple):
    """One kept draw of every chain; shapes as in `ChainState`."""

    table: np.ndarray
    sizes: np.ndarray
    offsets: np.ndarray
    variance: np.ndarray
    predicted: np.ndarray


def _sample(sampler: LabelSampler, reference: np.ndarray, main: slice) -> tuple[list[_Kept], np.ndarray]:
    """Return kept draws and their traces (C, D, F, K), going on until the main chains agree or patience ends.

    What was drawn before is then burn-in, and each round draws twice as long as the last, thinned to as many draws.
    """
    for thin in _THINNING:
        kept = [_kept(sampler, thin) for _ in range(_KEPT_SWEEPS)]
        traces = np.stack([_trace(draw, reference, main) for draw in kept], axis=1)
        if family_rhat(traces).max() <= MAX_RHAT:
            break
    return kept, traces


def _kept(sampler: LabelSampler, thin: int) -> _Kept:
    for _ in range(thin):
        sampler.sweep()
    state = sampler.state
    return _Kept(
        state.table.astype(np.int16), state.sizes.copy(), state.offsets.copy(), state.variance.copy(), sampler.predict()
    )


def _token_share(tables: np.ndarray, n_tokens: int) -> np.ndarray:
    """Return how often each token is in each cell: tables (D, C, F, L, n_values) -> (F, L, n_values, V)."""
    return np.stack([(tables == token).mean((0, 1)) for token in range(n_tokens)], -1)


def _trace(draw: _Kept, reference: np.ndarray, chains: slice) -> np.ndarray:
    """Return what R-hat compares: quality of the reference, noise and offsets, (C, F, 5)."""
    table = draw.table[chains].astype(np.int64)
    shares = np.take_along_axis(np.broadcast_to(reference, (len(table), *reference.shape)), table[..., None], -1)
    quality = shares[..., 0].mean((2, 3))
    return np.concatenate([quality[..., None], np.log(draw.variance[chains]), draw.offsets[chains]], -1)


def _withheld(rows: LabelRows, expert: Labelled) -> np.ndarray:
    """Say which rows rewards may not be made of: a quarter of the expert labels, by a hash of what was labelled."""
    withheld = np.zeros(rows.labels.shape, dtype=bool)
    for family in range(len(withheld)):
        index = np.flatnonzero(expert.prompts.family == family)
        keys = np.concatenate([expert.prompts.attrs[index], expert.responses[index]], axis=1)
        hashes = [hashlib.sha256(key.tobytes()).digest()[0] for key in keys]
        withheld[family, : len(index)] = np.array(hashes) < 256 * _WITHHELD_SHARE
    return withheld


def _unseen(folds: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """Take each row's prediction from the fold chain that did not see it: (K, F, R) -> (F, R)."""
    return np.take_along_axis(predicted, np.maximum(folds, 0)[None], 0)[0]


def label_rows(expert: Labelled, crowd: Labelled, attribute: np.ndarray, features: list[Feature]) -> LabelRows:
    """Pack labelled responses by family, padded to the longest: see `LabelRows` for shapes."""
    n_families, length = attribute.shape
    by_family = []
    for family in range(n_families):
        parts = [part[np.flatnonzero(part.prompts.family == family)] for part in (expert, crowd)]
        responses = np.concatenate([part.responses for part in parts])
        attrs = np.concatenate([part.prompts.attrs for part in parts])
        by_family.append((parts, responses, attrs))
    n_rows = max(len(responses) for _, responses, _ in by_family)
    shape = (n_families, n_rows)
    rows = LabelRows(
        labels=np.zeros(shape), crowd=np.zeros(shape, dtype=bool), present=np.zeros(shape, dtype=bool),
        cell=np.zeros((n_families, length, n_rows), dtype=np.int64),
        token=np.zeros((n_families, length, n_rows), dtype=np.int64),
        features=np.zeros((n_families, len(features), n_rows), dtype=np.float32),
    )  # fmt: skip
    for family, (parts, responses, attrs) in enumerate(by_family):
        n = len(responses)
        rows.labels[family, :n] = np.concatenate([part.labels for part in parts])
        rows.crowd[family, len(parts[0]) : n] = True
        rows.present[family, :n] = True
        rows.cell[family, :, :n] = attrs[:, attribute[family]].T
        rows.token[family, :, :n] = responses.T
        for k, feature in enumerate(features):
            rows.features[family, k, len(parts[0]) : n] = feature_values(feature, parts[1].responses)
    return rows


def _stratified_folds(rows: LabelRows, rng: np.random.Generator) -> np.ndarray:
    """Deal each family's expert rows and crowd rows evenly into folds: (F, R); -1 where no row is."""
    folds = np.full(rows.labels.shape, -1)
    for family in range(len(folds)):
        for of_source in (~rows.crowd[family], rows.crowd[family]):
            index = rng.permutation(np.flatnonzero(rows.present[family] & of_source))
            folds[family, index] = np.arange(len(index)) % _FOLDS
    return folds


def _fitted_shortcuts(sizes: np.ndarray, shortlist: np.ndarray, features: list[Feature]) -> tuple[FittedShortcut, ...]:
    """Keep the features that pay in at least half of the draws; sizes (D, F, S) are 0 where switched off."""
    found = []
    for family, listed in enumerate(shortlist):
        for slot, feature in enumerate(listed):
            drawn = sizes[:, family, slot]
            on = drawn != 0
            if on.mean() >= _SHORTCUT_IN_USE:
                found.append(FittedShortcut(family, features[feature], float(drawn[on].mean()), float(on.mean())))
    return tuple(found)
