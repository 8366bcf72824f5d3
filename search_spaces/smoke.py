"""A small space that ends in about a minute: to see that everything works."""

from optuna.distributions import CategoricalDistribution, FloatDistribution

from search_spaces.space import SearchSpace

SPACE = SearchSpace(
    name="smoke",
    distributions={
        "kl_coef": FloatDistribution(0.01, 0.2, log=True),
        "reward_wrapper": CategoricalDistribution(("raw", "label_quality")),
    },
    anchors=({"kl_coef": 0.02, "reward_wrapper": "label_quality"},),
    fixed={"prompt_mix": "balanced", "lr": 1e-3},
    trials=4,
    max_steps=100,
    rungs=2,
)
