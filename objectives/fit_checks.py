"""Does the label model explain the expert labels? What certification needs to know before it believes the posterior.

Four ways in which it may not: labels that carry no signal (shuffled, or a wrong task), too few labels, positions that
interact, chains that have not converged. Each is a number here and a threshold in one place.
"""

from dataclasses import dataclass

import numpy as np
from scipy.special import chdtrc  # type: ignore[import-untyped]

from objectives.label_gibbs import LabelRows
from rlhf.correlation import pearson

MIN_HELD_OUT_CORRELATION = 0.75
MIN_EXPERT_LABELS = 20
MIN_INTERACTION_P = 0.001
MAX_RHAT = 1.05
_PERMUTATIONS = 9999  # the smallest p-value, 1 / 10,000, must lie under the threshold for many families


@dataclass(frozen=True, slots=True)
class FitChecks:
    """Hold the checks of a fit.

    rmse: held-out expert labels, all families. By family (F,): `family_rmse`, `correlation` of held-out expert labels
    with their prediction (NaN where it is undefined), `n_expert`, `interaction_p` (small: positions interact), `rhat`
    of the chains.
    """

    rmse: float
    family_rmse: np.ndarray
    correlation: np.ndarray
    n_expert: np.ndarray
    interaction_p: np.ndarray
    rhat: np.ndarray

    def refusals(self, families: tuple[str, ...]) -> tuple[str, ...]:
        """Return every reason not to certify anything by this fit, with its number; empty if there is none."""
        reasons = []
        for f, name in enumerate(families):
            if self.n_expert[f] < MIN_EXPERT_LABELS:
                reasons.append(f"{name}: {self.n_expert[f]} expert labels, at least {MIN_EXPERT_LABELS} are needed")
            if np.isnan(self.correlation[f]):
                reasons.append(f"{name}: the correlation of expert labels with their prediction is undefined")
            elif self.correlation[f] < MIN_HELD_OUT_CORRELATION:
                reasons.append(
                    f"{name}: held-out expert labels correlate {self.correlation[f]:.2f} with their prediction, "
                    f"at least {MIN_HELD_OUT_CORRELATION} is needed: more labels, or labels of another kind"
                )
            if self.interaction_p[f] < MIN_INTERACTION_P / len(families):  # Bonferroni over families
                reasons.append(
                    f"{name}: positions interact (p = {self.interaction_p[f]:.4f}); an additive quality does not "
                    "explain its expert labels"
                )
            if not self.rhat[f] <= MAX_RHAT:
                reasons.append(f"{name}: the chains have not converged (R-hat {self.rhat[f]:.3f} above {MAX_RHAT})")
        with np.errstate(divide="ignore"):  # Fisher's combination: a weak interaction in every family
            together = float(chdtrc(2 * len(families), -2 * np.log(self.interaction_p).sum()))
        if together < MIN_INTERACTION_P:
            reasons.append(
                f"all families together: positions interact (p = {together:.2g}); an additive quality does not explain "
                "the expert labels"
            )
        return tuple(reasons)


def check_fit(
    rows: LabelRows, unseen: np.ndarray, correct: np.ndarray, traces: np.ndarray, *, rng: np.random.Generator
) -> FitChecks:
    """Check a fit.

    unseen: (F, R) predictions of each row by a chain that did not see it. correct: (F, L, n_values, V) posterior
    probability that a token is correct. traces: (C, D, F, K) scalars of each chain to be compared by R-hat.
    """
    expert = rows.present & ~rows.crowd
    error = np.where(expert, rows.labels - unseen, 0.0)
    families = range(len(expert))
    return FitChecks(
        rmse=float(np.sqrt((error**2).sum() / expert.sum())),
        family_rmse=np.sqrt((error**2).sum(1) / expert.sum(1)),
        correlation=np.array([_correlation(rows.labels[f][expert[f]], unseen[f][expert[f]]) for f in families]),
        n_expert=expert.sum(1),
        interaction_p=np.array(
            [
                interaction_p_value(error[f][expert[f]], _match_probability(rows, correct, f)[:, expert[f]], rng=rng)
                for f in families
            ]
        ),
        rhat=family_rhat(traces),
    )


def interaction_p_value(residuals: np.ndarray, matches: np.ndarray, *, rng: np.random.Generator) -> float:
    """Test whether residuals (n,) go with products of match probabilities (L, n): a permutation p-value.

    Four statistics of the correlations with all pairs of positions look for one strong pair, for many, for all alike
    and for neighbours; the most surprising counts. Under an additive quality residuals are exchangeable.
    """
    if len(residuals) < 3 or len(matches) < 2:
        return 1.0
    centred = matches - matches.mean(1, keepdims=True)
    first, second = np.triu_indices(len(matches), 1)
    products = centred[first] * centred[second]
    sums = np.stack([products.sum(0), products[second == first + 1].sum(0)])
    directions = np.concatenate([_unit_rows(products), _unit_rows(sums)]).T
    permuted = rng.permuted(np.tile(residuals, (_PERMUTATIONS, 1)), axis=1)
    pairs, together = np.split(np.concatenate([residuals[None], permuted]) @ directions, [len(first)], axis=1)
    statistics = np.column_stack([np.abs(pairs).max(1), (pairs**2).sum(1), np.abs(together)])
    chance = statistics[1:]
    surprise = (statistics - chance.mean(0)) / np.maximum(chance.std(0), 1e-300)
    largest = surprise.max(1)
    return float((1 + (largest[1:] >= largest[0]).sum()) / (1 + _PERMUTATIONS))


def _unit_rows(values: np.ndarray) -> np.ndarray:
    """Centre and scale rows (K, n) to length 1; rows that do not vary become 0."""
    centred = values - values.mean(1, keepdims=True)
    norms = np.sqrt((centred**2).sum(1, keepdims=True))
    return np.divide(centred, norms, out=np.zeros_like(centred), where=norms > 1e-9)


def _correlation(labels: np.ndarray, predicted: np.ndarray) -> float:
    """Correlate labels with predictions; NaN where either does not vary."""
    value = pearson(labels, predicted)
    return float("nan") if value is None else value


def _match_probability(rows: LabelRows, correct: np.ndarray, family: int) -> np.ndarray:
    """Return the probability that each row's token is correct at each position: (L, R)."""
    positions = np.arange(rows.cell.shape[1])[:, None]
    return correct[family][positions, rows.cell[family], rows.token[family]]


def family_rhat(traces: np.ndarray) -> np.ndarray:
    """Return each family's largest R-hat (F,) of traces (C, D, F, K)."""
    return np.array([_worst_rhat(traces[:, :, f]) for f in range(traces.shape[2])])


def _worst_rhat(traces: np.ndarray) -> float:
    """Return the largest rank-normalised split R-hat (Vehtari et al. 2021) of traces (C, D, K); 1 if nothing moves."""
    from arviz_stats.base.array import array_stats  # slow to import, and only a fit needs it

    moving = traces[..., np.ptp(traces, axis=(0, 1)) > 0]
    if moving.size == 0:
        return 1.0
    rhat = array_stats.rhat(moving.transpose(2, 0, 1), chain_axis=-2, draw_axis=-1)
    return float(np.nan_to_num(rhat, nan=np.inf).max())
