from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from objectives.prompt_mix import prompt_mixes
from rlhf.data import Prompts
from rlhf.taskdir import Task

PILOT = {"anvil": 444, "birch": 458, "cobalt": 433, "dune": 48, "ember": 195, "fjord": 422}


def with_traffic(task: Task, counts: Sequence[int]) -> Task:
    family = np.repeat(np.arange(len(counts)), counts)
    n = len(family)
    return replace(
        task, dev_prompts=Prompts(tuple(map(str, range(n))), family, np.zeros((n, task.vocab.n_attrs), dtype=np.int64))
    )


@pytest.fixture
def pilot_task(default_world_task: Task) -> Task:
    return with_traffic(default_world_task, list(PILOT.values()))


def test_pilot_mirrors_the_dev_prompts(pilot_task: Task) -> None:
    assert prompt_mixes(pilot_task, np.zeros(6), flagged=())["pilot"] == PILOT


def test_balanced_is_equal(pilot_task: Task) -> None:
    balanced = prompt_mixes(pilot_task, np.zeros(6), flagged=())["balanced"]
    assert list(balanced) == list(PILOT)
    assert len(set(balanced.values())) == 1


def test_no_low_traffic_leaves_out_dune_and_ember(pilot_task: Task) -> None:
    expected = {"anvil": 1.0, "birch": 1.0, "cobalt": 1.0, "dune": 0.0, "ember": 0.0, "fjord": 1.0}
    assert prompt_mixes(pilot_task, np.zeros(6), flagged=())["no_low_traffic"] == expected


def test_exactly_two_thirds_of_an_equal_share_is_frequent(default_world_task: Task) -> None:
    # 600 prompts, an equal share is 100; two thirds of 90 are 60.
    task = with_traffic(default_world_task, [60, 59, 90, 90, 120, 121])
    mix = prompt_mixes(task, np.zeros(6), flagged=())["no_low_traffic"]
    assert list(mix.values()) == [1.0, 0.0, 1.0, 1.0, 1.0, 1.0]


def test_equal_traffic_leaves_nobody_out(default_world_task: Task) -> None:
    mix = prompt_mixes(with_traffic(default_world_task, [7] * 6), np.zeros(6), flagged=())["no_low_traffic"]
    assert list(mix.values()) == [1.0] * 6


def test_weakest_weighs_by_rank_from_one_to_three(pilot_task: Task) -> None:
    quality = np.array([0.30, 0.31, 0.90, 0.10, 0.20, 0.32])
    weights = prompt_mixes(pilot_task, quality, flagged=())["weakest"]
    expected = {"cobalt": 1.0, "fjord": 1.4, "birch": 1.8, "anvil": 2.2, "ember": 2.6, "dune": 3.0}
    assert weights == pytest.approx(expected)


def test_without_flagged_leaves_out_what_the_screen_flags(pilot_task: Task) -> None:
    mix = prompt_mixes(pilot_task, np.zeros(6), flagged={"birch"})["without_flagged"]
    assert mix == {family: float(family != "birch") for family in PILOT}


def test_where_every_family_is_flagged_none_is_left_out(pilot_task: Task) -> None:
    mix = prompt_mixes(pilot_task, np.zeros(6), flagged=PILOT)["without_flagged"]
    assert mix == dict.fromkeys(PILOT, 1.0)


def test_weights_are_plain_numbers_and_never_negative(pilot_task: Task) -> None:
    mixes = prompt_mixes(pilot_task, np.linspace(0, 1, 6), flagged=())
    assert set(mixes) == {"balanced", "pilot", "no_low_traffic", "weakest", "without_flagged"}
    for mix in mixes.values():
        assert {type(weight) for weight in mix.values()} == {float}
        assert min(mix.values()) >= 0
        assert sum(mix.values()) > 0


def test_one_family_is_a_mix_of_its_own(network_task: Task) -> None:
    vocab = replace(network_task.vocab, families=("only",))
    task = with_traffic(replace(network_task, vocab=vocab), [5])
    for mix in prompt_mixes(task, np.array([0.4]), flagged=()).values():
        assert list(mix) == ["only"]
        assert mix["only"] > 0
