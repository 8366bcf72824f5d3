from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from search_spaces import kl_mix, smoke
from search_spaces.space import SearchSpace

KL = FloatDistribution(0.005, 0.5, log=True)
STEPS = IntDistribution(200, 1500, step=50)
MIX = CategoricalDistribution(("balanced", "pilot"))
ANCHOR = {"kl_coef": 0.1, "steps": 800, "mix": "pilot"}


def space(**changes: Any) -> SearchSpace:
    values: dict[str, Any] = {
        "name": "s", "distributions": {"kl_coef": KL, "steps": STEPS, "mix": MIX}, "anchors": (ANCHOR,),
    }  # fmt: skip
    return SearchSpace(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distributions": {}, "anchors": ()}, "distributions is empty"),
        (
            {"distributions": {"lr": FloatDistribution(0.1, 0.1)}, "anchors": ()},
            "lr has only one value to choose, Float",
        ),
        (
            {"distributions": {"n": IntDistribution(3, 3)}, "anchors": ()},
            "n has only one value to choose, IntDistribution",
        ),
        (
            {"distributions": {"mix": CategoricalDistribution(("a",))}, "anchors": ()},
            "mix has only one value to choose,",
        ),
        ({"trials": 0}, "trials must be a whole number of at least 1, got 0"),
        ({"max_steps": 10.5}, "max_steps must be a whole number of at least 1, got 10.5"),
        ({"rungs": -1}, "rungs must be a whole number of at least 1, got -1"),
        ({"fixed": {"kl_coef": 0.1, "lr": 1}}, "kl_coef cannot be both varied and fixed"),
        ({"anchors": (ANCHOR, {**ANCHOR, "kl_coef": 0.6})}, "anchor 2: kl_coef = 0.6 lies outside FloatDistribution"),
        ({"anchors": ({**ANCHOR, "kl_coef": float("nan")},)}, "anchor 1: kl_coef = nan lies outside"),
        ({"anchors": ({**ANCHOR, "steps": 199},)}, "anchor 1: steps = 199 lies outside IntDistribution"),
        ({"anchors": ({**ANCHOR, "steps": "800"},)}, "anchor 1: steps = '800' lies outside IntDistribution"),
        (
            {"anchors": ({**ANCHOR, "mix": "weakest"},)},
            "anchor 1: mix = 'weakest' lies outside Categorical",
        ),
        ({"anchors": ({**ANCHOR, "lr": 1},)}, "anchor 1: lr is not part of the space"),
        ({"anchors": ({"kl_coef": 0.1, "mix": "pilot"},)}, "anchor 1: steps has no value"),
    ],
)
def test_a_bad_space_says_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    space()  # without the change it is a good one
    with pytest.raises(ValueError, match=message):
        space(**changes)


@pytest.mark.parametrize(("kind", "low", "high"), [(FloatDistribution, 0.5, 0.1), (IntDistribution, 9, 3)])
def test_a_reversed_range_cannot_be_written_down(kind: type[BaseDistribution], low: float, high: float) -> None:
    with pytest.raises(ValueError, match="low <= high"):
        SearchSpace("s", {"lr": kind(low, high)})


def test_all_problems_are_reported_together() -> None:
    with pytest.raises(ValueError, match="only one value") as caught:
        SearchSpace("s", {"lr": FloatDistribution(1, 1)}, anchors=({"lr": 2},), fixed={"lr": 1}, trials=0, rungs=0)
    assert len(str(caught.value).split("; ")) == 6  # the empty range's remedy follows a semicolon too


def test_rungs_are_evenly_spaced_and_end_at_the_last_step() -> None:
    assert space(max_steps=800, rungs=4).rung_steps(800) == [200, 400, 600, 800]
    assert space(max_steps=800, rungs=4).rung_steps(650) == [200, 400, 600, 650]
    assert space(max_steps=800, rungs=4).rung_steps(150) == [150]
    assert space(max_steps=800, rungs=1).rung_steps(800) == [800]
    assert space(max_steps=3, rungs=10).rung_steps(3) == [1, 2, 3]


@given(st.integers(1, 2000), st.integers(1, 50), st.integers(1, 2000))
def test_rungs_rise_and_every_trial_is_judged_at_its_end(max_steps: int, rungs: int, steps: int) -> None:
    found = space(max_steps=max_steps, rungs=rungs).rung_steps(steps)
    assert found == sorted(set(found))
    assert found[0] >= 1
    assert found[-1] == steps
    every = -(-max_steps // rungs)
    assert found[:-1] == [step for step in range(1, steps) if step % every == 0]


def test_capping_shortens_range_and_anchors_and_keeps_the_rest() -> None:
    capped = space(fixed={"lr": 1e-3}, trials=7, rungs=3, workload="other").capped(530)
    assert capped.distributions == {"kl_coef": KL, "steps": IntDistribution(200, 500, step=50), "mix": MIX}
    assert capped.anchors == ({**ANCHOR, "steps": 500},)
    assert (capped.name, capped.trials, capped.max_steps, capped.rungs) == ("s", 7, 530, 3)
    assert (capped.fixed, capped.workload) == ({"lr": 1e-3}, "other")


@pytest.mark.parametrize("max_steps", [1, 120, 200])
def test_a_range_that_closes_up_becomes_fixed(max_steps: int) -> None:
    capped = space().capped(max_steps)
    assert capped.fixed == {"steps": max_steps}
    assert capped.distributions == {"kl_coef": KL, "mix": MIX}
    assert capped.anchors == ({"kl_coef": 0.1, "mix": "pilot"},)


def test_fixed_or_absent_steps_are_capped_too() -> None:
    without = {"distributions": {"kl_coef": KL}, "anchors": ()}
    assert space(**without, fixed={"steps": 900}).capped(100).fixed == {"steps": 100}
    assert space(**without, fixed={"steps": 50}).capped(100).fixed == {"steps": 50}
    assert space(**without).capped(100).fixed == {"steps": 100}


def test_capping_leaves_the_original_alone() -> None:
    original = space()
    original.capped(100)
    assert original == space()


def test_capping_to_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="max_steps must be a whole number of at least 1, got 0"):
        space().capped(0)


@pytest.mark.parametrize("module", [kl_mix, smoke])
def test_built_in_spaces_carry_their_modules_name_and_survive_capping(module: Any) -> None:
    found = module.SPACE
    assert found.name == module.__name__.rsplit(".")[-1]
    assert found.anchors
    for max_steps in (50, 250, 1500):
        capped = found.capped(max_steps)
        longest = capped.fixed["steps"] if "steps" in capped.fixed else capped.distributions["steps"].high
        assert longest <= max_steps


def test_the_main_space_varies_what_the_design_names() -> None:
    assert set(kl_mix.SPACE.distributions) == {"kl_coef", "steps", "prompt_mix", "reward_wrapper"}


@pytest.mark.parametrize("max_steps", [201, 220, 249])
def test_a_cap_inside_the_first_step_becomes_fixed(max_steps: int) -> None:
    assert space().capped(max_steps).fixed == {"steps": 200}


def test_capping_keeps_a_logarithmic_range_logarithmic() -> None:
    distributions = {"kl_coef": KL, "steps": IntDistribution(10, 1000, log=True)}
    capped = space(distributions=distributions, anchors=()).capped(500)
    assert capped.distributions["steps"] == IntDistribution(10, 500, log=True)


def test_steps_must_be_a_range_that_can_be_capped() -> None:
    distributions = {"kl_coef": KL, "steps": CategoricalDistribution((100, 200, 1000))}
    with pytest.raises(ValueError, match="steps must be an IntDistribution"):
        space(distributions=distributions, anchors=())


@pytest.mark.parametrize("steps", [825, 800.5])
def test_an_anchor_off_the_grid_is_outside(steps: float) -> None:
    with pytest.raises(ValueError, match="anchor 1: steps"):
        space(anchors=({**ANCHOR, "steps": steps},))
