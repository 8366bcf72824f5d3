"""The front: candidates that no other candidate beats in quality, worst-family gain and KL together."""

from collections.abc import Sequence

import moocore
import numpy as np

MAXIMISED = (True, True, False)  # balanced quality, worst-family gain, KL


def front_mask(values: np.ndarray) -> np.ndarray:
    """Say which rows of values (N, 3) no other row dominates; of equal rows, all stay.

    Columns: balanced quality (maximised), worst-family gain (maximised), KL (minimised).

    >>> front_mask(np.array([[0.5, 0.1, 2.0], [0.4, 0.1, 2.0], [0.3, 0.2, 1.0]])).tolist()
    [True, False, True]
    """
    if len(values) == 0:
        return np.zeros(0, dtype=bool)
    mask: np.ndarray = moocore.is_nondominated(values, maximise=list(MAXIMISED), keep_weakly=True)
    return mask


def knee_height(kl: Sequence[float], quality: Sequence[float]) -> np.ndarray:
    """Return each point's height above the chord from the lowest-KL to the highest-quality point: the knee is highest.

    Both axes are scaled to [0, 1] first, so units do not matter (Das 1999, "On characterizing the knee of the
    Pareto curve"). Where there is no chord, quality decides.
    """
    x, y = np.asarray(kl, dtype=float), np.asarray(quality, dtype=float)
    start, end = int(x.argmin()), int(y.argmax())
    width, height = x[end] - x[start], y[end] - y[start]
    if width <= 0 or height <= 0:
        return y
    return (y - y[start]) / height - (x - x[start]) / width
