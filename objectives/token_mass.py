"""How much probability a policy puts on each token in each cell: quality under any table is linear in it.

One pass over the prompts gives the mass, (F, L, n_values, V); the quality under every posterior draw of the tables
then costs a look-up, with no prompt touched again.
"""

import numpy as np


def token_mass(probability: np.ndarray, family: np.ndarray, cells: np.ndarray, *, shape: tuple[int, ...]) -> np.ndarray:
    """Average token probabilities over each family's prompts, apart by cell.

    probability: (N, L, V), the policy's at sampled prefixes. family: (N,). cells: (N, L), the deciding attribute's
    value. shape: (F, L, n_values, V) of the result, whose sum over a family's values and tokens at a position is 1;
    all 0 for a family without prompts.
    """
    mass = np.zeros(shape)
    np.add.at(mass, (family[:, None], np.arange(shape[1]), cells), probability)
    n_prompts = np.bincount(family, minlength=shape[0])
    return mass / np.maximum(n_prompts, 1)[:, None, None, None]


def quality_by_table(mass: np.ndarray, tables: np.ndarray) -> np.ndarray:
    """Return each family's quality if a table (D, F, L, n_values) of correct tokens were true: (D, F)."""
    index = tables[..., None].astype(np.int64)
    return np.take_along_axis(mass[None], index, -1)[..., 0].sum(-1).mean(-1)


def quality_by_probability(mass: np.ndarray, correct: np.ndarray) -> np.ndarray:
    """Return each family's expected quality for correctness probabilities (F, L, n_values, V): (F,)."""
    return (mass * correct).sum((-2, -1)).mean(-1)


def prompt_quality(probability: np.ndarray, position_quality: np.ndarray) -> np.ndarray:
    """Return each prompt's expected quality: both (N, L, V) -> (N,)."""
    return (probability * position_quality).sum(-1).mean(1)


def mean_by_family(values: np.ndarray, family: np.ndarray, n_families: int) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard error of values (N,) in each family: (F,) each; one value has an infinite error."""
    groups = [values[family == f] for f in range(n_families)]
    means = np.array([group.mean() for group in groups])
    errors = [group.std(ddof=1) / np.sqrt(len(group)) if len(group) > 1 else float("inf") for group in groups]
    return means, np.array(errors)
