"""A search space: distributions over run settings, a default budget, and anchor points tried first.

Optuna is used for its distribution types only; searching is the business of `sweep`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    distribution_to_json,
)

STEPS = "steps"


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Describe what a sweep may vary. A user's own space is a Python file that sets `SPACE` to one of these.

    `fixed` settings hold for every trial. `anchors` give a value for each distribution and are tried first.
    Each trial is judged at `rungs` evenly spaced steps of `max_steps`, and at its own last step. Raises
    `ValueError` naming every range of one value and every anchor outside its distribution.
    """

    name: str
    distributions: Mapping[str, BaseDistribution]
    anchors: tuple[Mapping[str, Any], ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    trials: int = 24
    max_steps: int = 800
    rungs: int = 4
    workload: str = "rlhf"

    def __post_init__(self) -> None:
        problems = [
            f"{name} has only one value to choose, {distribution!r}; give it at least two, or move it to fixed"
            for name, distribution in self.distributions.items()
            if distribution.single()
        ]
        problems += [
            f"the choices of {name} are single letters {distribution.choices!r}; a tuple of one text is ('text',)"
            for name, distribution in self.distributions.items()
            if isinstance(distribution, CategoricalDistribution) and _are_letters(distribution.choices)
        ]
        if not self.distributions:
            problems.append("distributions is empty; a sweep needs at least one setting to vary")
        problems += [
            f"{name} must be a whole number of at least 1, got {getattr(self, name)!r}"
            for name in ("trials", "max_steps", "rungs")
            if not _is_whole(getattr(self, name))
        ]
        steps = self.distributions.get(STEPS)
        if steps is not None and not isinstance(steps, IntDistribution):
            problems.append(f"steps must be an IntDistribution, so that it can be capped, got {steps!r}")
        if STEPS in self.fixed and not _is_whole(self.fixed[STEPS]):
            problems.append(f"fixed steps must be a whole number of at least 1, got {self.fixed[STEPS]!r}")
        if not isinstance(self.name, str) or not self.name or "/" in self.name:
            problems.append(f"name must be text without '/', got {self.name!r}")
        both = sorted(self.distributions.keys() & self.fixed.keys())
        if both:
            problems.append(f"{', '.join(both)} cannot be both varied and fixed")
        for number, anchor in enumerate(self.anchors, start=1):
            problems += [f"anchor {number}: {problem}" for problem in _anchor_problems(anchor, self.distributions)]
        if problems:
            raise ValueError("; ".join(problems))

    def capped(self, max_steps: int) -> "SearchSpace":
        """Return the space with no trial longer than `max_steps`; a range that closes up becomes fixed."""
        steps = self.distributions.get(STEPS)
        fixed, distributions = dict(self.fixed), dict(self.distributions)
        if steps is None:
            fixed[STEPS] = min(fixed.get(STEPS, max_steps), max_steps)
        elif isinstance(steps, IntDistribution):
            capped = _capped_range(steps, max_steps)
            if capped is None:
                del distributions[STEPS]
                fixed[STEPS] = min(steps.low, max_steps)
            else:
                distributions[STEPS] = capped
        anchors = tuple(_capped_anchor(anchor, distributions) for anchor in self.anchors)
        return SearchSpace(
            name=self.name, distributions=distributions, anchors=anchors, fixed=fixed,
            trials=self.trials, max_steps=max_steps, rungs=self.rungs, workload=self.workload,
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return everything the space says, distributions in Optuna's own JSON form."""
        return {
            "name": self.name,
            "workload": self.workload,
            "distributions": {name: json.loads(distribution_to_json(d)) for name, d in self.distributions.items()},
            "anchors": [dict(anchor) for anchor in self.anchors],
            "fixed": dict(self.fixed),
            "trials": self.trials,
            "max_steps": self.max_steps,
            "rungs": self.rungs,
        }

    def choices(self, name: str) -> list[Any]:
        """Return every value a named setting can take, if that is a list: its choices, or the one it is fixed at."""
        if name in self.fixed:
            return [self.fixed[name]]
        return list(getattr(self.distributions.get(name), "choices", ()))

    def corners(self) -> list[dict[str, Any]]:
        """Return settings that between them try both ends of every range and every choice."""
        low = {name: _ends(distribution)[0] for name, distribution in self.distributions.items()}
        corners = [low] + [
            {**low, name: value}
            for name, distribution in self.distributions.items()
            for value in _ends(distribution)[1:]
        ]
        return [{**self.fixed, **corner} for corner in corners]

    def rung_steps(self, steps: int) -> list[int]:
        """Return the steps at which a trial of `steps` steps is judged.

        >>> SearchSpace("s", {"lr": FloatDistribution(0, 1)}, max_steps=800).rung_steps(500)
        [200, 400, 500]
        """
        every = -(-self.max_steps // self.rungs)
        return [*range(every, steps, every), steps]


def _are_letters(choices: tuple[Any, ...]) -> bool:
    return len(choices) > 2 and all(isinstance(choice, str) and len(choice) == 1 for choice in choices)


def _ends(distribution: BaseDistribution) -> list[Any]:
    if isinstance(distribution, CategoricalDistribution):
        return list(distribution.choices)
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    return [distribution.low, distribution.high]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _anchor_problems(anchor: Mapping[str, Any], distributions: Mapping[str, BaseDistribution]) -> list[str]:
    problems = [f"{name} is not part of the space" for name in anchor if name not in distributions]
    problems += [f"{name} has no value" for name in distributions if name not in anchor]
    for name in anchor.keys() & distributions.keys():
        if not contains(distributions[name], anchor[name]):
            problems.append(f"{name} = {anchor[name]!r} lies outside {distributions[name]!r}")
    return problems


def contains(distribution: BaseDistribution, value: Any) -> bool:
    """Say whether a value can be drawn from a distribution: in its range and on its grid."""
    if isinstance(distribution, CategoricalDistribution):
        return value in distribution.choices
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if isinstance(distribution, IntDistribution):
        low, high, step = distribution.low, distribution.high, distribution.step
        return isinstance(value, int) and low <= value <= high and (value - low) % step == 0
    assert isinstance(distribution, FloatDistribution)
    return distribution.low <= value <= distribution.high


def _capped_range(steps: IntDistribution, max_steps: int) -> IntDistribution | None:
    """Return the part of a range up to `max_steps`, on its own grid; None if at most one value is left."""
    if max_steps < steps.low + steps.step:
        return None
    high = min(steps.high, max_steps)
    return IntDistribution(steps.low, high - (high - steps.low) % steps.step, log=steps.log, step=steps.step)


def _capped_anchor(anchor: Mapping[str, Any], distributions: Mapping[str, BaseDistribution]) -> dict[str, Any]:
    capped = {name: value for name, value in anchor.items() if name in distributions}
    steps = distributions.get(STEPS)
    if isinstance(steps, IntDistribution):
        capped[STEPS] = min(capped[STEPS], steps.high)
    return capped
