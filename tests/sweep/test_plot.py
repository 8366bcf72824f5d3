"""The plot is one page that works offline and holds every candidate."""

import re

from sweep.candidate import Candidate
from sweep.plot import plot_candidates


def candidate(trial: int, *, quality: float, worst: float) -> Candidate:
    metrics = {
        "balanced_quality": quality, "balanced_gain": quality - 0.3, "worst_family_gain": worst,
        "worst_family_harm": max(0.0, -worst), "kl": 2.0 + trial,
    }  # fmt: skip
    return Candidate(trial, 50, {"kl_coef": 0.1, "reward_wrapper": "raw"}, metrics, "m")


def test_page_is_whole_and_says_each_candidate() -> None:
    page = plot_candidates(
        [candidate(1, quality=0.6, worst=0.2), candidate(2, quality=0.9, worst=-0.2)], title="Sweep s", max_harm=0.03
    )
    assert not re.search(r"<script[^>]+src=|<link[^>]+href=", page)  # nothing to be fetched
    assert "trial 1, step 50" in page
    assert "trial 2, step 50" in page
    assert "least to ship" in page
    assert "harms a family" in page


def test_a_sweep_without_candidates_still_has_a_page() -> None:
    assert "Sweep s" in plot_candidates([], title="Sweep s", max_harm=0.03)
