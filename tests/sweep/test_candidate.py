from sweep.candidate import PREFERENCES, Candidate, front, nearest, ranked


def candidate(*, quality=0.5, gain=0.2, worst=0.1, kl=1.0, trial=0) -> Candidate:
    metrics = {
        "balanced_quality": quality, "balanced_gain": gain, "worst_family_gain": worst,
        "worst_family_harm": max(0.0, -worst), "kl": kl,
    }  # fmt: skip
    return Candidate(trial, 100, {}, metrics, f"m-{trial}")


def test_a_harmful_candidate_never_reaches_the_front() -> None:
    harmful = candidate(quality=0.9, worst=-0.0301)
    fine = candidate(quality=0.4, worst=-0.03)
    assert front([harmful, fine], max_harm=0.03) == [fine]


def test_front_is_sorted_by_kl_and_drops_the_dominated() -> None:
    far, near, worse = candidate(quality=0.9, kl=5), candidate(quality=0.5, kl=1), candidate(quality=0.4, kl=2)
    assert front([far, near, worse], max_harm=0.03) == [near, far]


def test_ranked_puts_each_preference_first() -> None:
    low = candidate(quality=0.5, kl=1.0, trial=1)
    knee = candidate(quality=0.88, kl=2.0, trial=2)
    high = candidate(quality=0.9, kl=9.0, trial=3)
    orders = {prefer: ranked([low, knee, high], prefer=prefer, max_harm=0.03) for prefer in PREFERENCES}
    assert orders == {"quality": [high, knee, low], "knee": [knee, low, high], "low-kl": [low, knee, high]}


def test_ranked_needs_the_release_rule_not_only_feasibility() -> None:
    reference_like = candidate(quality=0.31, gain=0.029, worst=0.0, kl=0.0)
    assert ranked([reference_like], prefer="low-kl", max_harm=0.03) == []
    assert ranked([], prefer="knee", max_harm=0.03) == []


def test_a_lax_max_harm_does_not_let_harm_ship() -> None:
    harmful = candidate(quality=0.9, worst=-0.2)
    assert front([harmful], max_harm=0.5) == [harmful]
    assert ranked([harmful], prefer="quality", max_harm=0.5) == []


def test_nearest_misses_the_rule_by_least() -> None:
    close, far = candidate(gain=0.02, worst=-0.04, trial=1), candidate(gain=0.5, worst=-0.2, trial=2)
    assert nearest([far, close], max_harm=0.03) == close
    assert nearest([], max_harm=0.03) is None
