import json
from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pytest

from objectives.fit_checks import FitChecks
from objectives.label_gibbs import CROWD, EXPERT
from objectives.quality_model import (
    ESTIMATE_NOTE,
    FittedShortcut,
    QualityModel,
    fit_quality,
    label_rows,
)
from rlhf.data import Prompts
from rlhf.features import Feature, all_features
from rlhf.taskdir import Task
from rlhf.world import Shortcut, World


def naive_quality(model: QualityModel, prompts: Prompts, responses: np.ndarray) -> list[float]:
    """Average over positions, one prompt and one table entry at a time."""
    result = []
    for family, attrs, response in zip(prompts.family, prompts.attrs, responses, strict=True):
        total = 0.0
        for position, token in enumerate(response):
            attribute = model.attribute[family, position]
            total += model.correct[family, position, attrs[attribute], token]
        result.append(total / len(response))
    return result


def assert_same_model(first: QualityModel, second: QualityModel) -> None:
    assert first.vocab == second.vocab
    assert first.shortcuts == second.shortcuts
    for name in ("attribute", "correct", "reward_correct", "draws", "noise"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name), err_msg=name)
    for field in fields(FitChecks):
        mine, other = (getattr(model.checks, field.name) for model in (first, second))
        np.testing.assert_array_equal(mine, other, err_msg=field.name)


def test_quality_is_the_naive_loop(fitted: QualityModel, default_world_task: Task) -> None:
    crowd = default_world_task.crowd[np.arange(0, 1200, 7)]
    expected = naive_quality(fitted, crowd.prompts, crowd.responses)
    np.testing.assert_allclose(fitted.quality(crowd.prompts, crowd.responses), expected, rtol=1e-12)


def test_quality_is_close_to_the_truth(fitted: QualityModel, default_world: World, default_world_task: Task) -> None:
    crowd = default_world_task.crowd
    error = fitted.quality(crowd.prompts, crowd.responses) - default_world.quality(crowd.prompts, crowd.responses)
    assert np.sqrt((error**2).mean()) < 0.02
    for family in range(6):
        assert abs(error[crowd.prompts.family == family].mean()) < 0.01


def test_shortcuts_do_not_enter_quality(fitted: QualityModel, default_world: World, default_world_task: Task) -> None:
    dune = 3
    pa = default_world.vocab.content_tokens.index("pa")
    prompts = default_world_task.train_prompts[default_world_task.train_prompts.family == dune]
    responses = np.full((len(prompts), 8), pa)
    error = fitted.quality(prompts, responses) - default_world.quality(prompts, responses)
    assert np.abs(error).max() < 0.1
    assert fitted.quality(prompts, responses).max() <= 1.0


def test_every_cell_is_a_distribution_over_tokens(fitted: QualityModel) -> None:
    np.testing.assert_allclose(fitted.correct.sum(-1), 1.0, atol=1e-12)
    assert fitted.correct.min() >= 0


def test_cell_probabilities_are_the_frequencies_of_the_draws(fitted: QualityModel) -> None:
    n_draws, *shape = fitted.draws.shape
    counted = np.zeros((*shape, fitted.vocab.n_content))
    for table in fitted.draws:
        np.add.at(counted, (*np.indices(shape), table), 1 / n_draws)
    np.testing.assert_allclose(fitted.correct, counted, atol=1e-9)


def test_uncertain_cells_say_so(fitted: QualityModel, default_world: World) -> None:
    """Cells decided with 0.99 and more are right about as often; the wrong ones are among the unsure."""
    likeliest = fitted.correct.argmax(-1)
    sure = fitted.correct.max(-1) >= 0.99
    assert sure.mean() > 0.8
    assert (likeliest == default_world.correct)[sure].mean() >= 0.99


def test_held_out_error_is_near_the_noise_floor(fitted: QualityModel) -> None:
    assert 0.04 < fitted.checks.rmse < 0.055
    assert fitted.checks.family_rmse.max() < 0.065
    assert fitted.checks.correlation.min() > 0.9
    np.testing.assert_allclose(fitted.checks.rmse, np.sqrt((fitted.checks.family_rmse**2).mean()), rtol=1e-12)


def test_noise_of_both_sources_is_found(fitted: QualityModel) -> None:
    np.testing.assert_allclose(fitted.noise[:, EXPERT], 0.045, atol=0.012)
    np.testing.assert_allclose(fitted.noise[:, CROWD], 0.10, atol=0.015)


def test_held_out_error_shows_labels_that_cannot_be_predicted(small_task: Callable[..., tuple[World, Task]]) -> None:
    _, task = small_task(seed=50)
    rng = np.random.default_rng(0)
    labels = np.where(task.expert.prompts.family == 1, rng.permutation(task.expert.labels), task.expert.labels)
    model = fit_quality(replace(task, expert=replace(task.expert, labels=labels)))
    spread = labels[task.expert.prompts.family == 1].std()
    assert model.checks.family_rmse[1] > 0.9 * spread
    assert abs(model.checks.correlation[1]) < 0.4
    assert model.checks.family_rmse[0] < 0.06


def test_a_label_is_held_out_from_its_own_prediction(small_task: Callable[..., tuple[World, Task]]) -> None:
    """The only label of a family is predicted from the prior, which expects 0 to 1, however odd the label is."""
    _, task = small_task(seed=53)
    expert = task.expert[np.arange(101)]  # one row of the second family
    expert.labels[100] = 3.0
    model = fit_quality(replace(task, expert=expert, crowd=task.crowd[task.crowd.prompts.family == 0]))
    assert 1.8 < model.checks.family_rmse[1] < 3.2
    assert np.isnan(model.checks.correlation[1])
    assert model.to_json()["families"]["oak"]["held_out_expert_correlation"] is None
    assert any("undefined" in reason for reason in model.refusals)


def test_the_same_seed_gives_the_same_fit(small_task: Callable[..., tuple[World, Task]]) -> None:
    _, task = small_task(Shortcut(0, Feature("token", (2,)), 0.5), n_expert=30, n_crowd=60)
    assert_same_model(fit_quality(task, seed=3), fit_quality(task, seed=3))


def test_a_family_without_crowd_rows_is_fitted_from_expert_rows(small_task: Callable[..., tuple[World, Task]]) -> None:
    world, task = small_task(seed=51)
    model = fit_quality(replace(task, crowd=task.crowd[task.crowd.prompts.family == 0]))
    assert (model.correct.argmax(-1) == world.correct)[1].mean() >= 0.9
    assert model.shortcuts == ()


def test_few_expert_rows_leave_cells_unsure(small_task: Callable[..., tuple[World, Task]]) -> None:
    _, few = small_task(seed=52, n_expert=5, n_crowd=5)
    _, many = small_task(seed=52)
    assert fit_quality(few).correct.max(-1).mean() < 0.9 < fit_quality(many).correct.max(-1).mean()


def test_label_rows_put_every_row_where_it_belongs(small_task: Callable[..., tuple[World, Task]]) -> None:
    world, task = small_task(n_expert=7, n_crowd=5)
    uneven = task.expert[np.arange(len(task.expert) - 3)]  # 7 rows of the first family, 4 of the second
    features = all_features(world.vocab)
    rows = label_rows(uneven, task.crowd, world.attribute, features)
    assert rows.present.sum(1).tolist() == [12, 9]
    assert rows.crowd.sum(1).tolist() == [5, 5]
    assert not rows.features[~np.broadcast_to(rows.crowd[:, None], rows.features.shape)].any()
    for family in range(2):
        r = 0
        for part in (uneven, task.crowd):
            for i in np.flatnonzero(part.prompts.family == family):
                assert rows.labels[family, r] == part.labels[i]
                assert rows.token[family, :, r].tolist() == part.responses[i].tolist()
                wanted = [part.prompts.attrs[i, world.attribute[family, p]] for p in range(4)]
                assert rows.cell[family, :, r].tolist() == wanted
                if part is task.crowd:
                    token_counts = [(part.responses[i] == t).sum() for t in range(8)]
                    assert rows.features[family, 1:9, r].tolist() == token_counts
                r += 1


def a_model(fitted: QualityModel) -> QualityModel:
    """Give a fitted model shortcuts of every kind."""
    shortcuts = (
        *fitted.shortcuts,
        FittedShortcut(0, Feature("position", (3,), 0), 0.25, 0.75),
        FittedShortcut(1, Feature("pair", (3, 5)), -0.5, 1.0),
        FittedShortcut(1, Feature("repetition"), 0.125, 0.5),
    )
    return replace(fitted, shortcuts=shortcuts)


def test_the_document_names_tables_and_shortcuts(fitted: QualityModel) -> None:
    model = a_model(fitted)
    document = json.loads(json.dumps(model.to_json()))
    assert document["note"] == ESTIMATE_NOTE
    assert document["held_out"]["expert_rmse"] == fitted.checks.rmse
    dune = document["families"]["dune"]
    assert dune["crowd_shortcuts"][0]["tokens"] == ["pa"]
    assert dune["crowd_shortcuts"][0]["size"] == pytest.approx(1.5, abs=0.06)
    assert document["families"]["anvil"]["crowd_shortcuts"] == [
        {
            "kind": "position",
            "tokens": [model.vocab.content_tokens[3]],
            "position": 0,
            "size": 0.25,
            "probability": 0.75,
        }
    ]
    token = model.vocab.content_tokens.index(dune["tables"][2][5])
    assert token == model.correct[3, 2, 5].argmax()
    assert dune["cell_probability"][2][5] == pytest.approx(model.correct[3, 2, 5, token], abs=5e-5)
