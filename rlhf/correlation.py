"""Correlation of two samples, and when there is none."""

import numpy as np


def pearson(x: np.ndarray, y: np.ndarray) -> float | None:
    """Correlate two samples (N,); None where either does not vary.

    >>> pearson(np.array([0.0, 1.0, 2.0]), np.array([1.0, 3.0, 5.0]))
    1.0
    """
    if len(x) < 2 or x.std() == 0 or y.std() == 0:
        return None
    return float(np.corrcoef(x, y)[0, 1])
