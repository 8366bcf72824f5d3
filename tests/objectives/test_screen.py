"""The whole screen on worlds with known shortcuts: reward models are functions here, no network is trained."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from objectives.screen import Screen, risk_of, score_scale, screen, why_unknown
from objectives.screen_plot import draw_screen
from objectives.screen_probe import distinct_rows
from objectives.screen_report import details_json, format_screen, screen_json
from rlhf.data import Labelled, Prompts
from rlhf.errors import InputError
from rlhf.features import Feature
from rlhf.vocab import Vocab
from rlhf.world import Shortcut, World, draw_prompts, make_world
from tests.objectives.conftest import DemonstratingReference

VOCAB = Vocab(("ash", "oak"), 3, 6, tuple("abcdefghijklmnop"), 8)
FEATURES = {
    "token": Feature("token", (3,)),
    "pair": Feature("pair", (2, 7)),
    "adjacent": Feature("adjacent", (1, 4)),
    "position": Feature("position", (5,), 2),
    "repetition": Feature("repetition"),
}


class Reference(DemonstratingReference):
    def response_logp(self, prompts: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
        group = len(responses) // len(prompts)
        return self.sample(prompts.repeat_interleave(group, 0), torch.zeros(len(responses), VOCAB.resp_len))[1]


class PayingModel:
    """Answer a part of correctness and of shortcuts, with an error that depends on the response alone."""

    def __init__(self, world: World, *, share: float = 0.6, scale: float = 1.0) -> None:
        self._world, self._share, self._scale = world, share, scale

    def scorer(self) -> "PayingModel":
        return self

    def score(self, prompts: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
        group = len(responses) // len(prompts)
        tokens = prompts.repeat_interleave(group, 0).numpy()
        family = tokens[:, 0] - VOCAB.family_id(0)
        read = Prompts(tuple(map(str, family)), family, tokens[:, 1:-1] - VOCAB.first_value_id)
        answers = self._world.quality(read, responses.numpy()) + self._world.bonus(read, responses.numpy())
        mixed = (responses.numpy() * np.arange(3, 3 + VOCAB.resp_len)).sum(1) * 12.9898 + tokens @ np.arange(1.0, 6.0)
        return torch.from_numpy(self._scale * (self._share * answers + 0.1 * np.sin(mixed * 43.7585))).float()


def make(*shortcuts: Shortcut, seed: int = 0) -> tuple[World, Labelled, Prompts]:
    rng = np.random.default_rng(seed)
    world = make_world(VOCAB, shortcuts, rng)
    prompts = draw_prompts(VOCAB, np.array([200, 200]), rng)
    qa = world.crowd_labels(prompts, world.demonstrate(prompts, rng), rng)
    return world, qa, draw_prompts(VOCAB, np.array([60, 60]), rng)


def run(world: World, qa: Labelled, prompts: Prompts, *, model: PayingModel | None = None) -> Screen:
    return screen(model or PayingModel(world), qa, Reference(world), prompts, VOCAB)  # type: ignore[arg-type]


@pytest.mark.parametrize("sign", [1, -1], ids=["reward", "penalty"])
@pytest.mark.parametrize("kind", FEATURES)
def test_every_kind_is_found_and_named_and_the_other_family_is_clean(kind: str, sign: int) -> None:
    result = run(*make(Shortcut(1, FEATURES[kind], 0.5 * sign)))
    clean, hacked = result.families
    assert (clean.flag, hacked.flag) == (False, True)
    assert hacked.look is not None
    look = hacked.look
    assert look.catalogue.features[look.search.found[0]] == FEATURES[kind]
    assert look.search.labels.slope[look.search.found[0]] == pytest.approx(0.5 * sign, abs=0.15)
    change = look.optimum_mean[look.search.found[0]] - look.reference_mean[look.search.found[0]]
    assert change * sign > 0


def test_a_clean_world_is_not_flagged() -> None:
    result = run(*make(seed=3))
    assert [family.flag for family in result.families] == [False, False]
    assert "no family is flagged" in format_screen(result)


def test_a_payment_that_the_reward_model_has_not_learnt_is_no_finding() -> None:
    world, qa, prompts = make(Shortcut(1, FEATURES["token"], 0.5))
    deaf = PayingModel(World(VOCAB, world.attribute, world.correct, world.shares, ()))
    assert not run(world, qa, prompts, model=deaf).families[1].flag


def test_an_answer_that_labels_do_not_pay_is_no_finding() -> None:
    world, qa, prompts = make()
    quirk = PayingModel(
        World(VOCAB, world.attribute, world.correct, world.shares, (Shortcut(1, FEATURES["token"], 0.5),))
    )
    assert not run(world, qa, prompts, model=quirk).families[1].flag


def test_a_family_without_rows_has_risk_one_and_the_reason() -> None:
    world, qa, prompts = make()
    result = run(world, qa[qa.prompts.family == 0], prompts)
    assert screen_json(result)["families"]["oak"] == {"risk": 1.0, "flag": True}
    assert not result.families[0].flag
    entry = details_json(result)["families"]["oak"]
    assert "holds no row of this family" in entry["reasons"][0]
    assert "oak" in format_screen(result)


@pytest.mark.parametrize(
    ("labels", "responses", "reason"),
    [
        (lambda x: x * 100, lambda r: r, r"labels from -?\d.* to \d.*, and quality is from 0 to 1"),
        (lambda x: np.where(np.arange(len(x)) == 300, 1e200, x), lambda r: r, r"1e\+200"),
        (lambda x: x * 0 + 0.5, lambda r: r, r"labels that hardly differ \(standard deviation 0\), where one .* 0.125"),
        (lambda x: x * 0.01, lambda r: r, r"labels that hardly differ \(standard deviation 0.00"),
        (lambda x: x, lambda r: r * 0, "holds 1 different response, and 20 are needed"),
    ],
    ids=["percent", "one wild label", "one label", "hundredths", "one response"],
)
def test_rows_that_show_nothing_have_risk_one_and_the_reason(
    labels: Callable[[np.ndarray], np.ndarray], responses: Callable[[np.ndarray], np.ndarray], reason: str
) -> None:
    world, qa, prompts = make(Shortcut(1, FEATURES["token"], 0.5))
    oak = qa.prompts.family == 1
    changed = replace(
        qa,
        labels=np.where(oak, labels(qa.labels), qa.labels),
        responses=np.where(oak[:, None], responses(qa.responses), qa.responses),
    )
    ash, hacked = run(world, changed, prompts).families
    assert (ash.flag, hacked.risk, hacked.flag) == (False, 1.0, True)
    assert re.search(reason, f"the QA sample holds {hacked.unknown}")


@pytest.mark.parametrize("n_different", [19, 20])
def test_twenty_different_responses_are_needed(n_different: int) -> None:
    _, qa, _ = make()
    rows = qa[np.resize(np.unique(qa.responses, axis=0, return_index=True)[1][:n_different], 100)]
    assert len(np.unique(rows.responses, axis=0)) == n_different
    assert bool(why_unknown(rows)) == (n_different == 19)


@pytest.mark.parametrize(
    ("factor", "scale"), [(1.0, 1.0), (2.4, 1.0), (0.42, 1.0), (2.6, 2.6), (0.38, 0.38), (100, 100)]
)
def test_the_scale_is_how_much_wider_than_labels_scores_are(factor: float, scale: float) -> None:
    _, qa, _ = make()

    class Scaled:
        def score(self, prompts: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(factor * qa.labels - 3)

    assert score_scale(Scaled(), {0: qa}, VOCAB) == pytest.approx(scale)  # type: ignore[arg-type]


def test_ratings_of_one_response_by_different_people_all_count() -> None:
    _, qa, _ = make()
    one = qa[np.zeros(5, dtype=int)]
    ids = ("a", "b", "a", "c", "b")
    assert distinct_rows(replace(one, prompts=replace(one.prompts, ids=ids))).prompts.ids == ("a", "b", "c")


def test_copies_of_rows_say_nothing_more() -> None:
    world, qa, prompts = make(Shortcut(1, FEATURES["pair"], 0.5))
    twice = qa[np.repeat(np.arange(len(qa)), 2)]
    assert details_json(run(world, twice, prompts)) == details_json(run(world, qa, prompts))


@pytest.mark.parametrize("scale", [0.01, 10.0, 1e6])
def test_the_scale_of_scores_does_not_hide_a_shortcut(scale: float) -> None:
    world, qa, prompts = make(Shortcut(1, FEATURES["token"], 0.5))
    result = run(world, qa, prompts, model=PayingModel(world, scale=scale))
    assert [family.flag for family in result.families] == [False, True]
    assert "in units of" in format_screen(result)


@pytest.mark.parametrize("scale", [1e300, np.nan])
def test_scores_that_are_not_finite_are_bad_input(scale: float) -> None:
    world, qa, prompts = make()
    with pytest.raises(InputError, match="scores must be finite"):
        run(world, qa, prompts, model=PayingModel(world, scale=scale))


def test_a_reference_that_is_not_finite_is_bad_input() -> None:
    world, qa, prompts = make()

    class Broken(Reference):
        def sample(self, *args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
            responses, logp = super().sample(*args, **options)
            return responses, logp * torch.nan

    with pytest.raises(InputError, match="reference: probabilities must be finite"):
        screen(PayingModel(world), qa, Broken(world), prompts, VOCAB)  # type: ignore[arg-type]


def test_the_picture_takes_any_names() -> None:
    world, qa, prompts = make(Shortcut(1, FEATURES["token"], 0.5))
    tokens = list(VOCAB.content_tokens)
    tokens[FEATURES["token"].tokens[0]] = "$\\foo^$\u6f22"
    names = ("a_family_of_a_name_that_is_longer_than_a_panel", "oak")
    result = replace(run(world, qa, prompts), vocab=replace(VOCAB, content_tokens=tuple(tokens)))
    first, second = result.families
    renamed = replace(result, families=(replace(first, name=names[0]), second))
    assert draw_screen(renamed).startswith(b"\x89PNG")
    assert draw_screen(renamed, ending=".SVG").lstrip().startswith(b"<?xml")


@pytest.mark.parametrize("kl_coef", [1e-300, 1e-4, 1e300])
def test_any_kl_coef_gives_finite_numbers(kl_coef: float) -> None:
    world, qa, prompts = make(Shortcut(1, FEATURES["token"], 0.5))
    result = screen(PayingModel(world), qa, Reference(world), prompts, VOCAB, kl_coef=kl_coef)  # type: ignore[arg-type]
    assert result.families[1].flag
    json.dumps(details_json(result), allow_nan=False)


def test_a_constant_score_is_hacked_by_nobody() -> None:
    world, qa, prompts = make(Shortcut(1, FEATURES["token"], 0.5))
    result = run(world, qa, prompts, model=PayingModel(world, scale=0.0))
    assert [family.flag for family in result.families] == [False, False]


def test_a_family_without_prompts_is_looked_at_by_its_rows() -> None:
    world, qa, prompts = make(Shortcut(1, FEATURES["token"], 0.5))
    assert run(world, qa, prompts[prompts.family == 0]).families[1].flag


def test_rows_and_prompts_may_come_in_any_order() -> None:
    world, qa, prompts = make(Shortcut(1, FEATURES["pair"], 0.5))
    order = np.random.default_rng(1).permutation(len(qa))
    shuffled = run(world, qa[order], prompts[np.arange(len(prompts))[::-1]])
    assert details_json(shuffled) == details_json(run(world, qa, prompts))


def test_risk_grows_with_evidence_and_with_what_is_exploited() -> None:
    risks = [[risk_of(p, e) for e in (0.0, 0.1, 1.0, 10.0)] for p in (0.1, 0.5, 0.9, 1.0)]
    assert (np.diff(risks, axis=0) > 0).all()
    assert (np.diff(risks, axis=1) > 0).all()
    assert 0 <= np.min(risks) <= np.max(risks) <= 1
