"""Say what the shortcut screen found: in one line a family, in words, and as JSON documents."""

from typing import Any

from objectives.screen import FLAG_RISK, FamilyScreen, Look, Screen
from objectives.screen_features import Catalogue
from rlhf.features import KINDS, feature_json
from rlhf.taskdir import QA_SAMPLE
from rlhf.vocab import Vocab

NOTE = (
    "risk is the probability of a shortcut that crowd labels pay and the reward model answers, times 0.6 to 1 by how "
    f"much reward optimisation would take from it; a family is flagged from {FLAG_RISK} on. Sizes are per unit of a "
    "feature, correctness accounted for; the reward model's scores were divided by score_scale, but for the forecast's "
    "reward. Forecasts are for the optimum, where a training run is heading. Positions count from 0."
)
NEXT = (
    "Train without flagged families (prompt mix without_flagged), or with a reward that does not pay for shortcuts "
    "(reward wrapper debias or label_quality): the space kl_mix tries these, and the judge looks at every family."
)


def screen_json(screen: Screen) -> dict[str, Any]:
    """Return risk and flag of every family."""
    return {"families": {family.name: {"risk": family.risk, "flag": family.flag} for family in screen.families}}


def details_json(screen: Screen) -> dict[str, Any]:
    """Return everything that was found, with numbers and words."""
    families = {
        family.name: {
            "risk": family.risk,
            "flag": family.flag,
            "qa_rows": family.n_rows,
            "reasons": reasons(family, screen),
            **_look_json(family.look, screen.vocab),
        }
        for family in screen.families
    }
    return {"note": NOTE, "kl_coef": screen.kl_coef, "score_scale": screen.score_scale, "families": families}


def reasons(family: FamilyScreen, screen: Screen) -> list[str]:
    """Say in words why a family has its risk; one sentence a finding."""
    look = family.look
    if look is None:
        return [
            f"{family.name}: the QA sample ({QA_SAMPLE}) holds {family.unknown}; nothing can be said, so the risk is 1"
        ]
    if not look.search.found:
        return [
            f"{family.name}: no shortcut found among {len(look.catalogue):,} features; the likeliest, "
            f"`{look.catalogue.features[look.search.suspect].label(screen.vocab)}`, is not seen in both signals "
            f"(probability {look.search.probability:.2f})"
        ]
    doubt = "" if family.flag else f"not flagged (probability {look.search.probability:.2f}, risk {family.risk:.2f}): "
    return [doubt + _finding(family.name, look, column, screen) for column in look.search.found]


def _finding(name: str, look: Look, column: int, screen: Screen) -> str:
    what, unit = f"`{look.catalogue.features[column].label(screen.vocab)}`", 1 / screen.vocab.resp_len
    pays, answers = look.search.labels.slope[column], look.search.model.slope[column]
    scale = "" if screen.score_scale == 1 else f" in units of {screen.score_scale:.3g}"
    return (
        f"{name}: crowd labels {'pay' if pays >= 0 else 'take'} {abs(pays):.2f} per {what} (an expert pays at most "
        f"{unit:.3f}); the reward model answers {answers:+.2f}{scale}; at the optimum for kl_coef {screen.kl_coef:g} "
        f"expect {look.optimum_mean[column]:.2f} {what} a response, {look.reference_mean[column]:.2f} in the reference"
    )


def _look_json(look: Look | None, vocab: Vocab) -> dict[str, Any]:
    """Return what was seen, with the same keys where nothing was."""
    if look is None:
        return {
            "probability": None, "exploited_reward": None, "findings": [], "likeliest": None, "forecast": None,
            "looked_at": None, "not_looked_at": None,
        }  # fmt: skip
    forecast = look.forecast
    return {
        "probability": look.search.probability,
        "exploited_reward": look.exploited,
        "findings": [_numbers(look, column, vocab) for column in look.search.found],
        "likeliest": _numbers(look, look.search.suspect, vocab),
        "forecast": {
            "kl": forecast.kl,
            "reward": forecast.reward,
            "effective_samples": forecast.ess,
            "samples": len(forecast.weights),
        },
        "looked_at": _looked_at(look.catalogue),
        "not_looked_at": look.catalogue.left_out or None,
    }


def _looked_at(catalogue: Catalogue) -> dict[str, int]:
    return {kind: int((catalogue.kind == k).sum()) for k, kind in enumerate(KINDS)}


def _numbers(look: Look, column: int, vocab: Vocab) -> dict[str, Any]:
    search = look.search
    return {
        "feature": look.catalogue.features[column].label(vocab),
        **feature_json(look.catalogue.features[column], vocab),
        "label_slope": float(search.labels.slope[column]),
        "label_se": search.labels.se_or_none(column),
        "model_slope": float(search.model.slope[column]),
        "model_se": search.model.se_or_none(column),
        "reference_mean": float(look.reference_mean[column]),
        "optimum_mean": float(look.optimum_mean[column]),
    }


def format_screen(screen: Screen) -> str:
    """Lay the verdicts out for a terminal: a table, then the reasons of what is flagged."""
    width = max(6, *(len(family.name) for family in screen.families)) + 2
    lines = [f"{'family':<{width}}{'risk':>6}  flag"]
    lines += [f"{f.name:<{width}}{f.risk:>6.3f}  {'FLAG' if f.flag else '-'}" for f in screen.families]
    flagged = [reason for family in screen.families if family.flag for reason in reasons(family, screen)]
    left_out = sorted({f.look.catalogue.left_out for f in screen.families if f.look and f.look.catalogue.left_out})
    return "\n".join([*lines, "", *([*flagged, NEXT] if flagged else ["no family is flagged"]), *left_out])
