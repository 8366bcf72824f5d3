from collections.abc import Callable
from dataclasses import replace

import numpy as np

from objectives.candidates import propose_candidates
from rlhf.data import Prompts
from rlhf.taskdir import Task
from rlhf.world import World


def test_a_perfect_reference_reveals_attributes_and_shares(default_world: World, default_world_task: Task) -> None:
    task = default_world_task
    found = propose_candidates(task.reference, task.train_prompts, seed=0)
    np.testing.assert_array_equal(found.attribute, default_world.attribute)
    np.testing.assert_allclose(np.exp(found.log_prior), default_world.shares + 1e-4, rtol=1e-5)


def test_labels_are_needed_the_likeliest_token_is_often_wrong(default_world: World, default_world_task: Task) -> None:
    task = default_world_task
    found = propose_candidates(task.reference, task.train_prompts, seed=0)
    likeliest = found.log_prior.argmax(-1)
    assert 0.4 < (likeliest == default_world.correct).mean() < 0.6
    two_likeliest = np.argsort(found.log_prior, -1)[..., -2:]
    assert (two_likeliest == default_world.correct[..., None]).any(-1).all()


def test_the_same_seed_gives_the_same_candidates(small_task: Callable[..., tuple[World, Task]]) -> None:
    _, task = small_task()
    first, second = (propose_candidates(task.reference, task.train_prompts, seed=7) for _ in range(2))
    np.testing.assert_array_equal(first.attribute, second.attribute)
    np.testing.assert_array_equal(first.log_prior, second.log_prior)


def test_a_value_no_prompt_has_gets_the_overall_mean(small_task: Callable[..., tuple[World, Task]]) -> None:
    world, task = small_task()
    seen = task.train_prompts[(task.train_prompts.attrs != 3).all(1)]
    found = propose_candidates(task.reference, seen, seed=0)
    expected = np.zeros_like(world.shares[:, :, 0])
    for family in range(2):
        rows = seen[seen.family == family]
        cells = rows.attrs[:, found.attribute[family]]
        for position in range(world.vocab.resp_len):
            expected[family, position] = world.shares[family, position, cells[:, position]].mean(0)
    np.testing.assert_array_equal(found.attribute, world.attribute)
    np.testing.assert_allclose(np.exp(found.log_prior[:, :, 3]), expected + 1e-4, rtol=1e-5)
    assert np.isfinite(found.log_prior).all()


def test_an_attribute_that_never_varies_is_not_chosen(small_task: Callable[..., tuple[World, Task]]) -> None:
    world, task = small_task()
    prompts = task.train_prompts
    fixed = Prompts(prompts.ids, prompts.family, prompts.attrs * np.array([1, 0]))
    found = propose_candidates(task.reference, fixed, seed=0)
    deciding = world.attribute == 0
    assert deciding.any()
    assert (found.attribute[deciding] == 0).all()


def test_families_do_not_influence_each_other(small_task: Callable[..., tuple[World, Task]]) -> None:
    world, task = small_task()
    uniform = replace(world, shares=world.shares.copy())
    uniform.shares[1] = 1 / world.vocab.n_content
    other = type(task.reference)(uniform)
    found = propose_candidates(other, task.train_prompts, seed=0)
    np.testing.assert_array_equal(found.attribute[0], world.attribute[0])
    np.testing.assert_allclose(np.exp(found.log_prior[1]), 1 / world.vocab.n_content + 1e-4, rtol=1e-5)
