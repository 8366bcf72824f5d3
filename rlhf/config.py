"""The configuration of one training run: keys, defaults, ranges, and where it may come from.

A config file is a JSON object with any of the keys of `RunConfig`; `--override key=json` replaces one.
Relative paths are looked for in the task directory first, then from the current folder.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rlhf.errors import collected, raise_if_any
from rlhf.json_values import is_number, read_json_object
from rlhf.taskdir import REFERENCE, REWARD_MODEL, TRAIN_PROMPTS

_MAX_WHOLE = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Configure a KL-regularised REINFORCE run. Checked as a whole: `InputError` names every bad key."""

    policy_init: str | None = None  # None: the same as policy_ref
    policy_ref: str = REFERENCE
    reward_model: str = REWARD_MODEL
    prompt_file: str = TRAIN_PROMPTS
    family_weights: Mapping[str, float] | None = None  # None: all families equally often
    kl_coef: float = 0.1
    steps: int = 800
    batch_prompts: int = 16
    samples_per_prompt: int = 8
    lr: float = 3e-4
    temperature: float = 1.0
    seed: int = 0
    log_every: int = 20
    save_every: int = 0  # 0: only at the end
    reward_wrapper: str | None = None  # None: raw
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        problems: list[str] = []
        for name, low in (("steps", 1), ("batch_prompts", 1), ("samples_per_prompt", 2), ("log_every", 1),
                          ("save_every", 0), ("seed", 0)):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= _MAX_WHOLE:
                problems.append(f"{name} must be a whole number from {low} to {_MAX_WHOLE}, got {value!r}")
        for name in ("kl_coef", "lr", "temperature", "max_grad_norm"):
            value = getattr(self, name)
            if not is_number(value) or value < 0 or (value == 0 and name != "kl_coef"):
                rule = "a number of at least 0" if name == "kl_coef" else "a number above 0"
                problems.append(f"{name} must be {rule}, got {value!r}")
        for name in ("policy_init", "policy_ref", "reward_model", "prompt_file", "reward_wrapper"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (value is None and name in ("policy_init", "reward_wrapper")):
                problems.append(f"{name} must be a string, got {value!r}")
        problems += _weight_problems(self.family_weights)
        raise_if_any(problems)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run_config(values: Mapping[str, Any], *, source: str) -> RunConfig:
    """Make a `RunConfig` from plain values; `source` names where they came from in every message."""
    known = [field.name for field in fields(RunConfig)]
    unknown = [key for key in values if key not in known]
    problems = [f"unknown config key {key!r}; known keys: {', '.join(known)}" for key in unknown]
    with collected(problems):
        config = RunConfig(**{key: value for key, value in values.items() if key in known})
    raise_if_any([f"{source}: {problem}" for problem in problems])
    return config


def read_run_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a config file and apply `key=json` overrides."""
    values = read_json_object(path)
    problems = []
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator:
            problems.append(f"--override must look like key=json, got {override!r}")
            continue
        try:
            values[key] = json.loads(text)
        except ValueError as error:
            hint = f"""to give text, quote it: --override '{key}="{text}"'"""
            problems.append(f"--override {key}: {text!r} is not JSON ({error}); {hint}")
    raise_if_any(problems)
    return run_config(values, source=str(path) if not overrides else f"{path} with its overrides")


def _weight_problems(weights: Any) -> list[str]:
    if weights is None:
        return []
    if not isinstance(weights, Mapping):
        return [f"family_weights must be an object of family: weight, or null, got {weights!r}"]
    problems = [
        f"family_weights: the weight of {family} must be a number of at least 0, got {weight!r}"
        for family, weight in weights.items()
        if not is_number(weight) or weight < 0
    ]
    if not problems and sum(weights.values()) <= 0:
        problems.append(f"family_weights must hold at least one weight above 0, got {dict(weights)!r}")
    return problems
