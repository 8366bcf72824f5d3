"""The main space: how strongly to hold on to the reference, how long, on which prompts, with which reward."""

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from search_spaces.space import SearchSpace

PROMPT_MIXES = ("balanced", "pilot", "no_low_traffic", "weakest", "without_flagged")
REWARD_WRAPPERS = ("raw", "clip", "debias", "label_quality")


def _recipe(kl_coef: float, steps: int, prompt_mix: str, reward_wrapper: str = "raw") -> dict[str, object]:
    return {"kl_coef": kl_coef, "steps": steps, "prompt_mix": prompt_mix, "reward_wrapper": reward_wrapper}


SPACE = SearchSpace(
    name="kl_mix",
    distributions={
        "kl_coef": FloatDistribution(0.005, 0.5, log=True),
        "steps": IntDistribution(200, 1500, step=50),
        "prompt_mix": CategoricalDistribution(PROMPT_MIXES),
        "reward_wrapper": CategoricalDistribution(REWARD_WRAPPERS),
    },
    # The recipes of earlier runs, so that a sweep starts from what is known.
    anchors=(
        _recipe(0.1, 800, "balanced"),
        _recipe(0.02, 800, "balanced", "label_quality"),
        _recipe(0.1, 800, "no_low_traffic"),
        _recipe(0.02, 1500, "balanced"),
        _recipe(0.5, 800, "balanced"),
        _recipe(0.1, 800, "pilot"),
    ),
    trials=24,
    max_steps=800,
)
