import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare, norm

from rlhf.data import Prompts
from rlhf.features import Feature, feature_values
from rlhf.taskdir import load_task
from rlhf.vocab import Vocab
from rlhf.world import CROWD_NOISE, EXPERT_NOISE, Shortcut, World, draw_prompts, load_world, make_world

VOCAB = Vocab(("p", "q"), n_attrs=2, n_values=4, content_tokens=tuple("abcdef"), resp_len=3)
SHORTCUTS = (
    Shortcut(0, Feature("token", (1,)), 1.5),
    Shortcut(0, Feature("position", (2,), 1), -0.25),
    Shortcut(1, Feature("pair", (0, 4)), 0.5),
)


def built(seed: int = 0, shortcuts: tuple[Shortcut, ...] = SHORTCUTS) -> World:
    return make_world(VOCAB, shortcuts, np.random.default_rng(seed))


def rows(world: World, n: int, seed: int = 1) -> tuple[Prompts, np.ndarray]:
    rng = np.random.default_rng(seed)
    prompts = draw_prompts(world.vocab, np.full(len(world.vocab.families), n), rng)
    return prompts, rng.integers(world.vocab.n_content, size=(len(prompts), world.vocab.resp_len))


@given(st.integers(0, 1000))
def test_quality_and_bonus_equal_naive_loops(seed: int) -> None:
    world = built(seed)
    prompts, responses = rows(world, 5, seed)
    for n, (family, attrs, response) in enumerate(zip(prompts.family, prompts.attrs, responses, strict=True)):
        correct = 0
        for position, token in enumerate(response):
            value = attrs[world.attribute[family][position]]
            correct += token == world.correct[family][position][value]
        assert world.quality(prompts, responses)[n] == pytest.approx(correct / 3)
        bonus = 0.0
        if family == 0:
            bonus = 1.5 * list(response).count(1) - 0.25 * (response[1] == 2)
        elif 0 in response and 4 in response:
            bonus = 0.5
        assert world.bonus(prompts, responses)[n] == pytest.approx(bonus)


def test_the_correct_response_has_quality_one_and_any_other_less() -> None:
    world = built()
    prompts, _ = rows(world, 8)
    best = world.correct[prompts.family[:, None], np.arange(3), world.cells(prompts)]
    assert (world.quality(prompts, best) == 1).all()
    best[:, 0] = (best[:, 0] + 1) % VOCAB.n_content
    assert world.quality(prompts, best) == pytest.approx(2 / 3)


def test_neighbours_that_interact_count_only_if_both_are_correct() -> None:
    world = replace(built(), interaction=0.5)
    prompts, _ = rows(world, 8)
    best = world.correct[prompts.family[:, None], np.arange(3), world.cells(prompts)]
    assert (world.quality(prompts, best) == 1).all()
    best[:, 0] = (best[:, 0] + 1) % VOCAB.n_content
    assert world.quality(prompts, best) == pytest.approx((2 / 3 + 1 / 2) / 2)  # one of two pairs is left
    best[:, 2] = (best[:, 2] + 1) % VOCAB.n_content
    assert world.quality(prompts, best) == pytest.approx((1 / 3 + 0) / 2)
    assert load_world(json.loads(json.dumps(world.to_json()))).interaction == 0.5
    assert "interaction" not in built().to_json()


def test_labels_are_quality_plus_noise_and_only_crowds_pay_for_shortcuts() -> None:
    world = built()
    prompts, responses = rows(world, 4000)
    quality, bonus = world.quality(prompts, responses), world.bonus(prompts, responses)
    expert = world.expert_labels(prompts, responses, np.random.default_rng(5))
    crowd = world.crowd_labels(prompts, responses, np.random.default_rng(6))
    n = len(prompts)
    for residual, scale in ((expert.labels - quality, EXPERT_NOISE), (crowd.labels - quality - bonus, CROWD_NOISE)):
        assert abs(residual.mean()) < 4 * scale / np.sqrt(n)
        assert abs(residual.std() / scale - 1) < 4 / np.sqrt(2 * n)
        z = np.sort(residual) / scale
        assert np.abs(norm.cdf(z) - (np.arange(n) + 0.5) / n).max() < 1.95 / np.sqrt(n)  # Kolmogorov, p = 0.001
    assert (EXPERT_NOISE, CROWD_NOISE) == (0.045, 0.10)
    assert bonus.max() > 1


def test_demonstrations_follow_their_shares() -> None:
    world = built(3)
    prompts = Prompts(("x",) * 6000, np.zeros(6000, dtype=int), np.tile([1, 3], (6000, 1)))
    demos = world.demonstrate(prompts, np.random.default_rng(7))
    for position in range(3):
        value = world.cells(prompts)[0, position]
        shares = world.shares[0, position, value]
        counts = np.bincount(demos[:, position], minlength=VOCAB.n_content)
        assert chisquare(counts, shares * 6000).pvalue > 1e-3


def test_shares_are_the_documented_ones_and_the_correct_token_need_not_lead() -> None:
    world = built(1)
    correct = np.take_along_axis(world.shares, world.correct[..., None], -1)[..., 0]
    ordered = np.sort(world.shares, -1)[..., ::-1]
    assert world.shares.sum(-1) == pytest.approx(1)
    assert ordered[..., :3] == pytest.approx(np.broadcast_to([0.33, 0.30, 0.20], (*ordered.shape[:-1], 3)))
    assert ordered[..., 3:] == pytest.approx(0.17 / 3)
    assert set(correct.round(9).ravel()) == {0.33, 0.30}


@pytest.mark.parametrize("n_content", [1, 2, 3])
def test_small_vocabularies_still_have_proper_shares(n_content: int) -> None:
    vocab = Vocab(("p",), n_attrs=1, n_values=2, content_tokens=tuple("abc"[:n_content]), resp_len=2)
    world = make_world(vocab, (), np.random.default_rng(0))
    assert world.shares.sum(-1) == pytest.approx(1)
    assert (world.shares >= 0).all()


def test_the_truth_round_trips_through_json() -> None:
    world = built(2)
    loaded = load_world(json.loads(json.dumps(world.to_json())))
    prompts, responses = rows(world, 10)
    assert loaded.vocab == world.vocab
    assert loaded.shortcuts == world.shortcuts
    assert (loaded.attribute == world.attribute).all()
    assert (loaded.correct == world.correct).all()
    assert (loaded.quality(prompts, responses) == world.quality(prompts, responses)).all()
    assert (loaded.bonus(prompts, responses) == world.bonus(prompts, responses)).all()


def test_the_seed_decides_the_world() -> None:
    assert built(4).to_json() == built(4).to_json()
    assert built(4).to_json() != built(5).to_json()


@given(st.lists(st.integers(0, 16), min_size=2, max_size=2), st.integers(0, 100))
def test_drawn_prompts_differ_while_tuples_last(counts: list[int], seed: int) -> None:
    prompts = draw_prompts(VOCAB, np.array(counts), np.random.default_rng(seed), prefix="x-")
    assert np.bincount(prompts.family, minlength=2).tolist() == counts
    assert len({(f, *attrs) for f, attrs in zip(prompts.family, prompts.attrs.tolist(), strict=True)}) == sum(counts)
    assert len(set(prompts.ids)) == sum(counts)
    assert ((prompts.attrs >= 0) & (prompts.attrs < 4)).all()
    assert all(id_.startswith("x-") for id_ in prompts.ids)


def test_more_prompts_than_tuples_are_drawn_with_repeats() -> None:
    prompts = draw_prompts(VOCAB, np.array([40, 0]), np.random.default_rng(0))
    assert len(prompts) == 40
    assert len(np.unique(prompts.attrs, axis=0)) <= 16


def test_the_built_task_carries_labels_of_its_truth(tiny_task: Path, tiny_truth: Path) -> None:
    task, world = load_task(tiny_task), load_world(json.loads(tiny_truth.read_text()))
    expert, crowd = task.expert, task.crowd
    residual = expert.labels - world.quality(expert.prompts, expert.responses)
    assert abs(residual).max() < 5 * EXPERT_NOISE
    assert residual.std() > EXPERT_NOISE / 2
    bonus = world.bonus(crowd.prompts, crowd.responses)
    assert bonus.max() >= 1.5
    assert abs(crowd.labels - world.quality(crowd.prompts, crowd.responses) - bonus).max() < 5 * CROWD_NOISE


def test_default_shortcuts_are_in_the_truth(tiny_truth: Path, some_prompts: Callable[..., Prompts]) -> None:
    world = load_world(json.loads(tiny_truth.read_text()))
    names = [(world.vocab.families[s.family], s.feature.label(world.vocab), s.size) for s in world.shortcuts]
    assert names == [("dune", "pa", 1.5), ("ember", "he", 0.44)]
    prompts = some_prompts(world.vocab, 1)
    responses = np.full((len(prompts), 8), world.vocab.content_tokens.index("pa"))
    assert feature_values(world.shortcuts[0].feature, responses).tolist() == [8.0] * 6
    assert world.bonus(prompts, responses).tolist() == [0, 0, 0, 12, 0, 0]
