"""Gibbs sampling of the label model: tables, offsets, crowd shortcuts and noise, many chains at once.

    label = matches / L + intercept                                   + N(0, expert sd)     expert rows
    label = matches / L + intercept + offset + sum_k size_k feature_k + N(0, crowd sd)      crowd rows

Every family has its own parameters, so families are independent and one that the model does not explain cannot
spoil another. Each source is weighted by its fitted noise. Shortcut sizes have a spike-and-slab prior, so that a
family without shortcuts gets none. All arrays carry chains C and families F in front and R rows, padded, with
weight 0 where a row is absent or held out: cross-validation folds are chains with rows switched off.
"""

import math
from dataclasses import dataclass
from itertools import combinations

import numpy as np

EXPERT, CROWD = 0, 1
_OFFSET_SD = 0.5  # prior sd of intercept and offset: labels live on a scale of about 1
_SLAB_SD = 0.5  # prior sd of a shortcut's size per unit
_EXPECTED_SHORTCUTS = 0.5  # a priori, in a family
_NOISE_SHAPE, _NOISE_SCALE = 2.0, 0.01  # inverse-gamma prior of both variances: weak, mean 0.1 squared
_SHORTLIST = 10
_RANKS = 4  # of tokens in a cell, by the reference: first, second, third, all others
_RANK_WEIGHT_SD = 2.0  # prior sd of a rank's log weight: a factor of 7 either way
_RANK_STEPS = 4  # Metropolis steps a sweep


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
    rank_weight: np.ndarray  # (C, F, _RANKS) log factor on the prior of tokens of a rank; the first rank's is 0
    shortlist: np.ndarray  # (F, S) feature indices, the same for all chains


class LabelSampler:
    """Run chains over rows. `used` (C, F, R) switches rows on and off by chain.

    What a draw needs of the current state (fit, row weights) is kept up to date rather than computed again.
    """

    def __init__(self, rows: LabelRows, log_prior: np.ndarray, used: np.ndarray, rng: np.random.Generator) -> None:
        self._rows, self._used, self._rng = rows, used & rows.present, rng
        n_chains, n_families, _ = used.shape
        self.length = rows.cell.shape[1]
        self._n_values, self._n_tokens = log_prior.shape[2:]
        block = np.arange(n_chains * n_families).reshape(n_chains, n_families, 1) * self._n_values
        self._cell_slot = [block + rows.cell[:, position] for position in range(self.length)]  # each (C, F, R)
        self._token_slot = [
            slot * self._n_tokens + rows.token[:, position] for position, slot in enumerate(self._cell_slot)
        ]
        self.state = ChainState(
            table=_gumbel_argmax(np.broadcast_to(log_prior, (n_chains, *log_prior.shape)), rng),
            offsets=np.zeros((n_chains, n_families, 2)),
            sizes=np.zeros((n_chains, n_families, _SHORTLIST)),
            variance=np.tile([0.1**2, 0.2**2], (n_chains, n_families, 1)),
            rank_weight=np.zeros((n_chains, n_families, _RANKS)),
            shortlist=np.zeros((n_families, _SHORTLIST), dtype=np.int64),
        )
        self._ranks = _TokenRanks(log_prior)
        self._log_prior = np.broadcast_to(log_prior, (n_chains, *log_prior.shape))
        self._pairs = [_pairs_of_one_attribute(cells) for cells in rows.cell]
        self._crowd_on = False
        self._refresh()

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
        self._draw_pair()
        self._draw_offsets()
        if self._crowd_on:
            for slot in range(_SHORTLIST):
                self._draw_size(slot)
        self._draw_variance()
        self._draw_rank_weight()

    def predict(self) -> np.ndarray:
        """Return each chain's prediction of every row, shortcuts included: (C, F, R)."""
        return self._fit.copy()

    def _run(self, n_sweeps: int) -> None:
        for _ in range(n_sweeps):
            self.sweep()

    def _refresh(self) -> None:
        """Compute fit and weights from the state, after it was set from outside."""
        self._matches = np.stack([self._match(position) for position in range(self.length)], 2)
        self._listed = np.take_along_axis(self._rows.features, self.state.shortlist[..., None], axis=1)  # (F, S, R)
        shortcuts = np.einsum("cfs,fsr->cfr", self.state.sizes, self._listed)
        self._fit = self._matches.sum(2) / self.length + self._offset_terms() + shortcuts
        self._reweigh()

    def _reweigh(self) -> None:
        """Set each row's precision (C, F, R): 0 where it is switched off."""
        expert, crowd = 1 / self.state.variance[..., :1], float(self._crowd_on) / self.state.variance[..., 1:]
        self._weight = np.where(self._rows.crowd, crowd, expert) * self._used

    def _match(self, position: int) -> np.ndarray:
        """Return 1 where a row's token is the table's at a position: (C, F, R)."""
        wanted = self.state.table[:, :, position].ravel().take(self._cell_slot[position])
        return (wanted == self._rows.token[:, position]).astype(float)

    def _offset_terms(self) -> np.ndarray:
        return self.state.offsets[..., :1] + self.state.offsets[..., 1:] * self._rows.crowd

    def _draw_table(self, position: int) -> None:
        """Draw one position's tokens for all values: rows of different values do not share a cell.

        A row of residual e gains `weight * (e / L - 1 / (2 L^2))` in log likelihood if its token is correct.
        """
        matched = self._matches[:, :, position]
        residual = self._rows.labels - self._fit + matched / self.length
        gain = self._weight * (residual / self.length - 0.5 / self.length**2)
        shape = (*matched.shape[:2], self._n_values, self._n_tokens)
        added = _scatter(self._token_slot[position], gain, shape)
        self.state.table[:, :, position] = _gumbel_argmax(self._log_prior[:, :, position] + added, self._rng)
        self._matches[:, :, position] = now = self._match(position)
        self._fit = self._rows.labels - residual + now / self.length

    def _draw_pair(self) -> None:
        """Draw two positions of one attribute together, a random pair in each family that has one.

        Their cells hold the same rows, so a wrong token in one can be propped up by a wrong token in the other; drawn
        one at a time, a chain may stay there for ever. Both matching costs `weight / L^2` beyond the two single gains.
        """
        families, first, second = self._random_pairs()
        if not len(families):
            return
        rows, length, n_tokens = self._rows, self.length, self._n_tokens
        n_chains, n_pairs, n_values = len(self._fit), len(families), self._n_values
        cell = rows.cell[families, first]  # (P, R), the same for both positions
        tokens = rows.token[families, first], rows.token[families, second]
        matched = self._matches[:, families, first] + self._matches[:, families, second]
        residual = rows.labels[families] - self._fit[:, families] + matched / length
        weight = self._weight[:, families]
        gain = weight * (residual / length - 0.5 / length**2)
        slot = np.arange(n_chains * n_pairs).reshape(n_chains, n_pairs, 1) * n_values + cell
        single = [
            self._log_prior[:, families, position]
            + _scatter(slot * n_tokens + token, gain, (n_chains, n_pairs, n_values, n_tokens))
            for position, token in zip((first, second), tokens, strict=True)
        ]
        both = (slot * n_tokens + tokens[0]) * n_tokens + tokens[1]
        overlap = _scatter(both, weight / length**2, (n_chains, n_pairs, n_values, n_tokens, n_tokens))
        drawn_first = _gumbel_argmax(single[0] + _log_sum_second(single[1], overlap, both), self._rng)
        given = single[1] - np.take_along_axis(overlap, drawn_first[..., None, None], axis=-2)[..., 0, :]
        self.state.table[:, families, first] = drawn_first
        self.state.table[:, families, second] = _gumbel_argmax(given, self._rng)
        for position, token in zip((first, second), tokens, strict=True):
            wanted = np.take_along_axis(
                self.state.table[:, families, position], np.broadcast_to(cell, residual.shape), axis=-1
            )
            self._matches[:, families, position] = wanted == token
        matched = self._matches[:, families, first] + self._matches[:, families, second]
        self._fit[:, families] = rows.labels[families] - residual + matched / length

    def _random_pairs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Choose a pair of positions that share an attribute in each family that has one: (P,) each."""
        chosen = [(f, *pairs[self._rng.integers(len(pairs))]) for f, pairs in enumerate(self._pairs) if pairs]
        families, first, second = np.array(chosen, dtype=np.int64).reshape(-1, 3).T
        return families, first, second

    def _draw_offsets(self) -> None:
        """Draw intercept and crowd offset together: two-column Bayesian linear regression."""
        without = self._fit - self._offset_terms()
        pull = self._weight * (self._rows.labels - without)
        crowd = self._rows.crowd.astype(float)
        total, of_crowd = self._weight.sum(-1), (self._weight * crowd).sum(-1)
        precision = np.stack([np.stack([total, of_crowd], -1), np.stack([of_crowd, of_crowd], -1)], -2)
        covariance = np.linalg.inv(precision + np.eye(2) / _OFFSET_SD**2)
        mean = np.einsum("cfij,cfj->cfi", covariance, np.stack([pull.sum(-1), (pull * crowd).sum(-1)], -1))
        noise = self._rng.standard_normal(mean.shape)
        self.state.offsets = mean + np.einsum("cfij,cfj->cfi", np.linalg.cholesky(covariance), noise)
        self._fit = without + self._offset_terms()

    def _draw_size(self, slot: int) -> None:
        """Draw whether one shortlisted feature pays, and how much (George & McCulloch 1993, spike at zero)."""
        feature = self._listed[:, slot]  # (F, R)
        without = self._fit - self.state.sizes[..., slot, None] * feature
        weighted = self._weight * feature
        pull = (weighted * (self._rows.labels - without)).sum(-1)
        precision = (weighted * feature).sum(-1) + 1 / _SLAB_SD**2
        chance = _EXPECTED_SHORTCUTS / self._rows.features.shape[1]
        log_odds = np.log(chance / (1 - chance)) - np.log(_SLAB_SD**2 * precision) / 2 + pull**2 / (2 * precision)
        on = self._rng.random(log_odds.shape) < 1 / (1 + np.exp(-np.clip(log_odds, -500, 500)))
        size = pull / precision + self._rng.standard_normal(pull.shape) / np.sqrt(precision)
        self.state.sizes[..., slot] = np.where(on, size, 0.0)
        self._fit = without + self.state.sizes[..., slot, None] * feature

    def _draw_variance(self) -> None:
        squared = (self._rows.labels - self._fit) ** 2
        for source, of_source in ((EXPERT, ~self._rows.crowd), (CROWD, self._rows.crowd)):
            if source == CROWD and not self._crowd_on:
                continue
            used = self._used & of_source
            shape = _NOISE_SHAPE + used.sum(-1) / 2
            scale = _NOISE_SCALE + (squared * used).sum(-1) / 2
            self.state.variance[..., source] = scale / self._rng.gamma(shape)
        self._reweigh()

    def _draw_rank_weight(self) -> None:
        """Draw how much likelier than the reference says tokens of each rank are to be correct (random walk).

        The reference says how often a token is demonstrated. Whether its third choice is ever correct, labels know
        better, and a family has cells enough to learn it; without this, unsure cells are drawn to wrong tokens.
        """
        weight, counts = self.state.rank_weight, self._ranks.counts(self.state.table)
        now = self._ranks.log_density(weight, counts)
        for _ in range(_RANK_STEPS):
            proposal = weight + self._rng.standard_normal(weight.shape) * self._rng.choice([0.2, 1.0])
            proposal[..., 0] = 0.0
            then = self._ranks.log_density(proposal, counts)
            accept = np.log(1 - self._rng.random(now.shape)) < then - now
            weight, now = np.where(accept[..., None], proposal, weight), np.where(accept, then, now)
        self.state.rank_weight = weight
        self._log_prior = self._ranks.weighted(weight)

    def _find_shortlist(self) -> None:
        """Pick the features that best explain crowd residuals, one after another (orthogonal matching pursuit).

        Residuals are averaged over chains, folds included, whose tables have seen expert rows: which features are
        listed at all has seen every row, held out or not. How much a listed feature pays, each chain decides for
        itself. The first pass uses tables fitted to expert rows alone.
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
        self._refresh()


class _TokenRanks:
    """Know the rank of every token in its cell, by the reference: log_prior (F, L, n_values, V)."""

    def __init__(self, log_prior: np.ndarray) -> None:
        order = np.argsort(-log_prior, axis=-1, kind="stable")
        ranks = np.broadcast_to(np.minimum(np.arange(log_prior.shape[-1]), _RANKS - 1), order.shape)
        self._log_prior = log_prior
        self._rank = np.empty_like(order)
        np.put_along_axis(self._rank, order, ranks, -1)
        prior = np.exp(log_prior - log_prior.max(-1, keepdims=True))
        by_rank = [np.where(self._rank == r, prior, 0.0).sum(-1) for r in range(_RANKS)]
        share = np.stack(by_rank, -1) / prior.sum(-1)[..., None]
        self._share = share.reshape(len(share), -1, _RANKS)  # (F, cells, _RANKS)

    def counts(self, table: np.ndarray) -> np.ndarray:
        """Count the cells of each table (C, F, L, n_values) whose token has a rank: (C, F, _RANKS)."""
        index = table[..., None]
        ranks = np.take_along_axis(np.broadcast_to(self._rank, (*table.shape, self._rank.shape[-1])), index, -1)[..., 0]
        return np.stack([(ranks == r).sum((2, 3)) for r in range(_RANKS)], -1)

    def log_density(self, weight: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Return the log density of rank weights (C, F, _RANKS) given the counts: (C, F)."""
        normaliser = np.log(np.exp(weight)[:, :, None] @ self._share.transpose(0, 2, 1)).sum((2, 3))
        prior = -0.5 * (weight**2).sum(-1) / _RANK_WEIGHT_SD**2
        return (weight * counts).sum(-1) - normaliser + prior

    def weighted(self, weight: np.ndarray) -> np.ndarray:
        """Return the prior under rank weights (C, F, _RANKS), not normalised: (C, F, L, n_values, V)."""
        n_chains, n_families, _ = weight.shape
        slot = np.arange(n_families).reshape(-1, 1, 1, 1) * _RANKS + self._rank
        return self._log_prior + weight.reshape(n_chains, -1)[:, slot]


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


def _pairs_of_one_attribute(cells: np.ndarray) -> list[tuple[int, int]]:
    """List the pairs of positions whose cells (L, R) are the same in every row."""
    return [(p, q) for p, q in combinations(range(len(cells)), 2) if (cells[p] == cells[q]).all()]


def _log_sum_second(single: np.ndarray, overlap: np.ndarray, shared: np.ndarray) -> np.ndarray:
    """Return log sum over u of exp(single[..., u] - overlap[..., t, u]): single (..., V), overlap (..., V, V) >= 0.

    shared: flat indices where overlap may not be 0. Few token pairs share a row, so that spares most exponentials.
    """
    peak = single.max(-1, keepdims=True)
    kept = np.ones_like(overlap)
    kept.ravel()[shared.ravel()] = np.exp(-overlap.ravel()[shared.ravel()])
    total = (kept @ np.exp(single - peak)[..., None])[..., 0]
    return peak + np.log(np.maximum(total, 1e-300))


def _scatter(slots: np.ndarray, weights: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Add up weights by slot, a flat index into `shape`."""
    return np.bincount(slots.ravel(), weights=weights.ravel(), minlength=math.prod(shape)).reshape(shape)


def _gumbel_argmax(log_weights: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw an index along the last axis with probability proportional to exp(log_weights)."""
    uniform = rng.random(log_weights.shape)
    drawn: np.ndarray = (log_weights - np.log(-np.log(np.maximum(uniform, 1e-300)))).argmax(-1)
    return drawn
