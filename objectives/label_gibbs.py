"""Gibbs sampling of the label model: tables, offsets, crowd shortcuts and noise, many chains at once.

    label = matches / L + intercept                                   + N(0, expert sd)     expert rows
    label = matches / L + intercept + offset + sum_k size_k feature_k + N(0, crowd sd)      crowd rows

Every family has its own parameters, so families are independent and one that the model does not explain cannot
spoil another. Each source is weighted by its fitted noise. Shortcut sizes have a spike-and-slab prior, so that a
family without shortcuts gets none. All arrays carry chains C and families F in front and R rows, padded, with
weight 0 where a row is absent or held out: cross-validation folds are chains with rows switched off.
"""

from dataclasses import dataclass

import numpy as np

EXPERT, CROWD = 0, 1
_OFFSET_SD = 0.5  # prior sd of intercept and offset: labels live on a scale of about 1
_SLAB_SD = 0.5  # prior sd of a shortcut's size per unit
_EXPECTED_SHORTCUTS = 0.5  # a priori, in a family
_NOISE_SHAPE, _NOISE_SCALE = 2.0, 0.01  # inverse-gamma prior of both variances: weak, mean 0.1 squared
_SHORTLIST = 10


@dataclass(frozen=True, slots=True)
class LabelRows:
    """Hold padded rows: labels (F, R), `crowd` (F, R) bool, `cell` and `token` (F, L, R).

    `features` (F, K, R) are 0 on expert rows, so that shortcuts act on crowd rows only.
    """

    labels: np.ndarray
    crowd: np.ndarray
    present: np.ndarray
    cell: np.ndarray
    token: np.ndarray
    features: np.ndarray


@dataclass(slots=True)
class ChainState:
    """Hold the current draw of every chain."""

    table: np.ndarray  # (C, F, L, n_values) correct token
    offsets: np.ndarray  # (C, F, 2) intercept, crowd offset
    sizes: np.ndarray  # (C, F, S) of shortlisted features; 0 when switched off
    variance: np.ndarray  # (C, F, 2) expert, crowd
    shortlist: np.ndarray  # (F, S) feature indices, the same for all chains


class LabelSampler:
    """Run chains over rows. `used` (C, F, R) switches rows on and off by chain."""

    def __init__(self, rows: LabelRows, log_prior: np.ndarray, used: np.ndarray, rng: np.random.Generator) -> None:
        self._rows, self._log_prior, self._used, self._rng = rows, log_prior, used & rows.present, rng
        n_chains, n_families, _ = used.shape
        self.length = rows.cell.shape[1]
        table = _gumbel_argmax(np.broadcast_to(log_prior, (n_chains, *log_prior.shape)), rng)
        self.state = ChainState(
            table=table,
            offsets=np.zeros((n_chains, n_families, 2)),
            sizes=np.zeros((n_chains, n_families, _SHORTLIST)),
            variance=np.tile([0.1**2, 0.2**2], (n_chains, n_families, 1)),
            shortlist=np.zeros((n_families, _SHORTLIST), dtype=np.int64),
        )
        self._crowd_on = False
        self._matches = self._match()

    def anneal(self, n_sweeps: int) -> None:
        """Burn in: expert rows alone first, then crowd rows with shortcuts found from what is left unexplained."""
        self._run(n_sweeps)
        for _ in range(2):
            self._find_shortlist()
            self._crowd_on = True
            self._run(n_sweeps)

    def sweep(self) -> None:
        """Draw every parameter once from its conditional distribution."""
        for position in range(self.length):
            self._draw_table(position)
        self._draw_offsets()
        if self._crowd_on:
            for slot in range(_SHORTLIST):
                self._draw_size(slot)
        self._draw_variance()

    def predict(self) -> np.ndarray:
        """Return each chain's prediction of every row, shortcuts included: (C, F, R)."""
        return self._matches.sum(2) / self.length + self._offset_terms() + self._shortcut_terms()

    def _run(self, n_sweeps: int) -> None:
        for _ in range(n_sweeps):
            self.sweep()

    def _weights(self) -> np.ndarray:
        """Return each row's precision (C, F, R), 0 where it is switched off."""
        precision = np.where(
            self._rows.crowd, float(self._crowd_on) / self.state.variance[..., 1:], 1 / self.state.variance[..., :1]
        )
        return precision * self._used

    def _match(self) -> np.ndarray:
        """Return 1 where a row's token is the table's: (C, F, L, R)."""
        shape = (*self.state.table.shape[:3], self._rows.cell.shape[-1])
        wanted = np.take_along_axis(self.state.table, np.broadcast_to(self._rows.cell, shape), axis=-1)
        return (wanted == self._rows.token).astype(float)

    def _offset_terms(self) -> np.ndarray:
        return self.state.offsets[..., :1] + self.state.offsets[..., 1:] * self._rows.crowd

    def _listed_features(self) -> np.ndarray:
        return np.take_along_axis(self._rows.features, self.state.shortlist[..., None], axis=1)  # (F, S, R)

    def _shortcut_terms(self) -> np.ndarray:
        return np.einsum("cfs,fsr->cfr", self.state.sizes, self._listed_features())

    def _draw_table(self, position: int) -> None:
        """Draw one position's tokens for all values: rows of different values do not share a cell.

        A row of residual e gains `weight * (e / L - 1 / (2 L^2))` in log likelihood if its token is correct.
        """
        rows, state = self._rows, self.state
        residual = rows.labels - self.predict() + self._matches[:, :, position] / self.length
        gain = self._weights() * (residual / self.length - 0.5 / self.length**2)
        score = np.broadcast_to(self._log_prior[:, position], (len(gain), *self._log_prior[:, position].shape))
        n_families, n_values, n_tokens = score.shape[1:]
        slot = (np.arange(n_families)[:, None] * n_values + rows.cell[:, position]) * n_tokens + rows.token[:, position]
        chain_slot = np.arange(len(gain))[:, None, None] * (n_families * n_values * n_tokens) + slot
        added = np.bincount(chain_slot.ravel(), weights=gain.ravel(), minlength=score.size).reshape(score.shape)
        state.table[:, :, position] = _gumbel_argmax(score + added, self._rng)
        wanted = np.take_along_axis(
            state.table[:, :, position], np.broadcast_to(rows.cell[:, position], gain.shape), axis=-1
        )
        self._matches[:, :, position] = wanted == rows.token[:, position]

    def _draw_offsets(self) -> None:
        """Draw intercept and crowd offset together: two-column Bayesian linear regression."""
        residual = self._rows.labels - self.predict() + self._offset_terms()
        weight = self._weights()
        crowd = self._rows.crowd.astype(float)
        total, of_crowd = weight.sum(-1), (weight * crowd).sum(-1)
        precision = np.stack([np.stack([total, of_crowd], -1), np.stack([of_crowd, of_crowd], -1)], -2)
        precision = precision + np.eye(2) / _OFFSET_SD**2
        target = np.stack([(weight * residual).sum(-1), (weight * residual * crowd).sum(-1)], -1)
        covariance = np.linalg.inv(precision)
        mean = np.einsum("cfij,cfj->cfi", covariance, target)
        noise = self._rng.standard_normal(mean.shape)
        self.state.offsets = mean + np.einsum("cfij,cfj->cfi", np.linalg.cholesky(covariance), noise)

    def _draw_size(self, slot: int) -> None:
        """Draw whether one shortlisted feature pays, and how much (George & McCulloch 1993, spike at zero)."""
        feature = self._listed_features()[:, slot]  # (F, R)
        weight = self._weights()
        residual = self._rows.labels - self.predict() + self.state.sizes[..., slot, None] * feature
        pull = (weight * residual * feature).sum(-1)
        precision = (weight * feature**2).sum(-1) + 1 / _SLAB_SD**2
        chance = _EXPECTED_SHORTCUTS / self._rows.features.shape[1]
        log_odds = np.log(chance / (1 - chance)) - np.log(_SLAB_SD**2 * precision) / 2 + pull**2 / (2 * precision)
        on = self._rng.random(log_odds.shape) < 1 / (1 + np.exp(-np.clip(log_odds, -500, 500)))
        size = pull / precision + self._rng.standard_normal(pull.shape) / np.sqrt(precision)
        self.state.sizes[..., slot] = np.where(on, size, 0.0)

    def _draw_variance(self) -> None:
        squared = (self._rows.labels - self.predict()) ** 2
        for source, of_source in ((EXPERT, ~self._rows.crowd), (CROWD, self._rows.crowd)):
            if source == CROWD and not self._crowd_on:
                continue
            used = self._used & of_source
            shape = _NOISE_SHAPE + used.sum(-1) / 2
            scale = _NOISE_SCALE + (squared * used).sum(-1) / 2
            self.state.variance[..., source] = scale / self._rng.gamma(shape)

    def _find_shortlist(self) -> None:
        """Pick the features that best explain crowd residuals, one after another (orthogonal matching pursuit).

        Residuals are averaged over chains, folds included: which features are listed at all has seen every crowd row,
        but no expert row. The first pass uses tables fitted to expert rows alone.
        """
        rows = self._rows
        unexplained = rows.labels - (self._matches.sum(2) / self.length + self._offset_terms())
        n_used = self._used.sum(0)
        mean_residual = (unexplained * self._used).sum(0) / np.maximum(n_used, 1)
        self.state.sizes[:] = 0
        for family in range(len(rows.labels)):
            active = rows.crowd[family] & (n_used[family] > 0)
            features = rows.features[family][:, active]  # (K, n)
            self.state.shortlist[family] = _matching_pursuit(features, mean_residual[family][active], _SHORTLIST)


def _matching_pursuit(features: np.ndarray, target: np.ndarray, n_chosen: int) -> np.ndarray:
    """Choose `n_chosen` rows of features (K, n) greedily by how much each explains of what is left of target (n,)."""
    if target.size < 3:
        return np.arange(n_chosen) % len(features)
    centred = features - features.mean(1, keepdims=True)
    norm = np.sqrt((centred**2).sum(1))
    usable = norm > 0
    residual = target - target.mean()
    chosen: list[int] = []
    for _ in range(n_chosen):
        gain = np.where(usable, np.abs(centred @ residual) / np.maximum(norm, 1e-12), -1.0)
        gain[chosen] = -2.0
        chosen.append(int(gain.argmax()))
        basis = centred[chosen].T
        coefficients, *_ = np.linalg.lstsq(basis, target - target.mean(), rcond=None)
        residual = target - target.mean() - basis @ coefficients
    return np.array(chosen)


def _gumbel_argmax(log_weights: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw an index along the last axis with probability proportional to exp(log_weights)."""
    uniform = rng.random(log_weights.shape)
    drawn: np.ndarray = (log_weights - np.log(-np.log(np.maximum(uniform, 1e-300)))).argmax(-1)
    return drawn
