"""Label-inferred quality: a posterior over the tables of correct tokens, fitted from expert and crowd labels.

An estimate, not the truth: `held_out` says how well it predicts expert labels it has not seen.
"""

import functools
import json
import os
import tempfile
import zipfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from objectives.candidates import propose_candidates
from objectives.label_gibbs import CROWD, EXPERT, LabelRows, LabelSampler
from rlhf.data import Labelled, Prompts
from rlhf.dev_eval import pearson
from rlhf.features import Feature, all_features, feature_json, feature_values
from rlhf.taskdir import Task, load_task, task_digest
from rlhf.vocab import Vocab

ESTIMATE_NOTE = "Label-inferred quality is an estimate fitted to labels, not the true quality."
_CHAINS = 4
_FOLDS = 5
_BURN_IN_SWEEPS = 60
_KEPT_SWEEPS = 200
_SHORTCUT_IN_USE = 0.5  # posterior probability from which a shortcut is reported and subtracted by `debias`
_FORMAT = "quality-1"  # part of the cache key: raise it when the fit changes


@dataclass(frozen=True, slots=True)
class FittedShortcut:
    """A feature that crowd labels pay for: `size` a unit, `probability` that it pays at all."""

    family: int
    feature: Feature
    size: float
    probability: float


@dataclass(frozen=True, slots=True)
class HeldOut:
    """How well held-out expert labels are predicted: overall RMSE, and RMSE and Pearson correlation by family (F,)."""

    rmse: float
    family_rmse: np.ndarray
    family_correlation: np.ndarray


@dataclass(frozen=True, slots=True)
class QualityModel:
    """Hold the posterior.

    attribute: (F, L) deciding attribute. correct: (F, L, n_values, V) probability that a token is correct.
    draws: (D, F, L, n_values) tables. noise: (F, 2) sd of expert and crowd labels.
    """

    vocab: Vocab
    attribute: np.ndarray
    correct: np.ndarray
    draws: np.ndarray
    noise: np.ndarray
    shortcuts: tuple[FittedShortcut, ...]
    held_out: HeldOut

    def position_quality(self, prompts: Prompts) -> np.ndarray:
        """Return the probability that each content token is correct at each position: (N, L, V)."""
        return self.correct[prompts.family[:, None], np.arange(self.vocab.resp_len), self.cells(prompts)]

    def cells(self, prompts: Prompts) -> np.ndarray:
        """Return the deciding attribute's value at each position: (N, L)."""
        return np.take_along_axis(prompts.attrs, self.attribute[prompts.family], axis=1)

    def quality(self, prompts: Prompts, responses: np.ndarray) -> np.ndarray:
        """Return the expected fraction of correct positions: responses (N, L) -> (N,)."""
        return np.take_along_axis(self.position_quality(prompts), responses[..., None], -1)[..., 0].mean(1)

    def to_json(self) -> dict[str, Any]:
        """Describe the fit for people and programs; `tables` gives each cell's likeliest token and its probability."""
        vocab = self.vocab
        best = self.correct.argmax(-1)
        return {
            "note": ESTIMATE_NOTE,
            "held_out": {"expert_rmse": self.held_out.rmse},
            "families": {
                name: {
                    "expert_noise_sd": float(self.noise[f, EXPERT]),
                    "crowd_noise_sd": float(self.noise[f, CROWD]),
                    "held_out_expert_rmse": float(self.held_out.family_rmse[f]),
                    "held_out_expert_correlation": float(self.held_out.family_correlation[f]),
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
    """Fit the posterior by Gibbs sampling; the folds of a cross-validation run beside the main chains."""
    vocab, rng = task.vocab, np.random.default_rng(seed)
    candidates = propose_candidates(task.reference, task.train_prompts, seed=seed)
    features = all_features(vocab)
    rows = label_rows(task.expert, task.crowd, candidates.attribute, features)
    folds = _stratified_folds(rows, rng)
    used = np.concatenate([
        np.ones((_CHAINS, *rows.labels.shape), dtype=bool),
        np.stack([folds != fold for fold in range(_FOLDS)]),
    ])  # fmt: skip
    sampler = LabelSampler(rows, candidates.log_prior, used, rng)
    sampler.anneal(_BURN_IN_SWEEPS)
    state = sampler.state
    draws, sizes, variances = [], [], []
    predicted = np.zeros((len(used), *rows.labels.shape))
    for _ in range(_KEPT_SWEEPS):
        sampler.sweep()
        draws.append(state.table[:_CHAINS].astype(np.int16))
        sizes.append(state.sizes[:_CHAINS].copy())
        variances.append(state.variance[:_CHAINS].copy())
        predicted += sampler.predict() / _KEPT_SWEEPS
    tables = np.concatenate(draws)
    return QualityModel(
        vocab=vocab,
        attribute=candidates.attribute,
        correct=np.stack([(tables == token).mean(0) for token in range(vocab.n_content)], -1),
        draws=tables,
        noise=np.sqrt(np.concatenate(variances).mean(0)),
        shortcuts=_fitted_shortcuts(np.concatenate(sizes), state.shortlist, features),
        held_out=_held_out(rows, folds, predicted[_CHAINS:]),
    )


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


def load_quality(task_dir: Path) -> QualityModel:
    """Return a task's fitted model: from memory, from the cache folder, or by fitting it now."""
    return _load_quality(task_dir, task_digest(task_dir))


@functools.lru_cache(maxsize=4)
def _load_quality(task_dir: Path, digest: str) -> QualityModel:
    path = _cache_path(digest)
    try:
        return read_quality(path)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):  # absent, or damaged: the cache may be lost any time
        save_quality(fit_quality(load_task(task_dir)), path)
        return read_quality(path)


def remember_quality(model: QualityModel, digest: str) -> None:
    """Put a fitted model in this machine's cache, under the digest of its task."""
    path = _cache_path(digest)
    if not path.exists():
        save_quality(model, path)


def _cache_path(digest: str) -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlhf-sweep"
    return folder / f"{_FORMAT}-{digest}.npz"


_ARRAYS = ("attribute", "correct", "draws", "noise")


def save_quality(model: QualityModel, path: Path) -> None:
    """Write a fitted model in one atomic step, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shortcuts = [
        [s.family, s.feature.kind, s.feature.tokens, s.feature.position, s.size, s.probability] for s in model.shortcuts
    ]
    document = json.dumps({"vocab": model.vocab.to_json(), "shortcuts": shortcuts})
    held_out = {field.name: getattr(model.held_out, field.name) for field in fields(HeldOut)}
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".npz", delete=False) as file:
        np.savez_compressed(file, document=document, **{n: getattr(model, n) for n in _ARRAYS}, **held_out)
    Path(file.name).replace(path)


def read_quality(path: Path) -> QualityModel:
    with np.load(path, allow_pickle=False) as stored:
        document = json.loads(str(stored["document"]))
        vocab = Vocab.from_json(document["vocab"])
        shortcuts = tuple(
            FittedShortcut(family, Feature(kind, tuple(tokens), position), size, probability)
            for family, kind, tokens, position, size, probability in document["shortcuts"]
        )
        held_out = HeldOut(float(stored["rmse"]), stored["family_rmse"], stored["family_correlation"])
        return QualityModel(vocab, **{n: stored[n] for n in _ARRAYS}, shortcuts=shortcuts, held_out=held_out)


def _stratified_folds(rows: LabelRows, rng: np.random.Generator) -> np.ndarray:
    """Deal each family's expert rows and crowd rows evenly into folds: (F, R); -1 where no row is."""
    folds = np.full(rows.labels.shape, -1)
    for family in range(len(folds)):
        for of_source in (~rows.crowd[family], rows.crowd[family]):
            index = rng.permutation(np.flatnonzero(rows.present[family] & of_source))
            folds[family, index] = np.arange(len(index)) % _FOLDS
    return folds


def _held_out(rows: LabelRows, folds: np.ndarray, predicted: np.ndarray) -> HeldOut:
    """Compare each expert label with the prediction of the fold chain that did not see it."""
    unseen = np.take_along_axis(predicted, np.maximum(folds, 0)[None], 0)[0]
    expert = rows.present & ~rows.crowd
    error = np.where(expert, rows.labels - unseen, 0.0)
    correlation = [pearson(rows.labels[f][expert[f]], unseen[f][expert[f]]) or 0.0 for f in range(len(expert))]
    return HeldOut(
        rmse=float(np.sqrt((error**2).sum() / expert.sum())),
        family_rmse=np.sqrt((error**2).sum(1) / expert.sum(1)),
        family_correlation=np.array(correlation),
    )


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
