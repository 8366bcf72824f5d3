from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from objectives.fit_checks import FitChecks
from objectives.quality_cache import remember_quality
from objectives.quality_model import FittedShortcut, QualityModel
from rlhf.config import run_config
from rlhf.data import Prompts, decode, read_labelled, read_prompts
from rlhf.features import Feature
from rlhf.taskdir import task_digest
from rlhf.vocab import DEFAULT_VOCAB, Vocab
from rlhf.wrappers import RewardWrapper, load_wrapper

Batch = tuple[Prompts, np.ndarray, np.ndarray]

SHORTCUTS = (
    FittedShortcut(0, Feature("token", (10,)), 1.5, 1.0),
    FittedShortcut(0, Feature("pair", (2, 3)), -0.25, 1.0),
    FittedShortcut(3, Feature("adjacent", (4, 5)), 0.75, 1.0),
    FittedShortcut(3, Feature("position", (6,), 7), 0.5, 1.0),
    FittedShortcut(5, Feature("repetition"), 0.125, 1.0),
)


def naive_bonus(family: int, response: list[int]) -> float:
    """Add up what the shortcuts pay for one response, written out by hand."""
    if family == 0:
        return 1.5 * response.count(10) - 0.25 * (2 in response and 3 in response)
    if family == 3:
        follows = sum(response[i] == 4 and response[i + 1] == 5 for i in range(7))
        return 0.75 * follows + 0.5 * (response[7] == 6)
    if family == 5:
        return 0.125 * (8 - len(set(response)))
    return 0.0


@pytest.fixture
def quality(tiny_task: Path, empty_cache: Path) -> QualityModel:
    """Give the tiny task a known model, as if it had been fitted."""
    vocab, rng = DEFAULT_VOCAB, np.random.default_rng(0)
    shape = (6, 8)
    model = QualityModel(
        vocab=vocab,
        attribute=rng.integers(4, size=shape),
        correct=rng.dirichlet(np.full(24, 0.1), size=(*shape, 8)),
        reward_correct=rng.dirichlet(np.full(24, 0.1), size=(*shape, 8)),
        draws=np.zeros((1, *shape, 8), dtype=np.int16),
        noise=np.ones((6, 2)),
        shortcuts=SHORTCUTS,
        checks=FitChecks(0.0, *[np.zeros(6)] * 5),
    )
    remember_quality(model, task_digest(tiny_task))
    return model


@pytest.fixture
def batch(tiny_task: Path) -> Batch:
    """Prompts, responses with few different tokens so that every shortcut occurs, and rewards."""
    prompts = read_prompts(tiny_task / "data/prompts_train.jsonl", DEFAULT_VOCAB)
    rng = np.random.default_rng(1)
    return prompts, rng.choice([2, 3, 4, 5, 6, 10, 20], size=(len(prompts), 8)), rng.normal(size=len(prompts))


def prepared(name: str, task: Path) -> RewardWrapper:
    wrapper = load_wrapper(name, task)
    wrapper.prepare(task, run_config({"reward_wrapper": name}, source="test"))
    return wrapper


def call(wrapper: RewardWrapper, batch: Batch, vocab: Vocab = DEFAULT_VOCAB) -> list[float]:
    prompts, responses, rewards = batch
    return wrapper(prompts.records(vocab), decode(responses, vocab), rewards.tolist())


def test_label_quality_is_what_the_withheld_labels_leave(tiny_task: Path, quality: QualityModel, batch: Batch) -> None:
    prompts, responses, _ = batch
    found = call(prepared("label_quality", tiny_task), batch)
    by_reward = replace(quality, correct=quality.reward_correct)
    np.testing.assert_allclose(found, by_reward.quality(prompts, responses), rtol=1e-12)
    assert np.std(found) > 0.01
    assert np.abs(found - quality.quality(prompts, responses)).max() > 0.1


def test_label_quality_looks_at_no_reward(tiny_task: Path, quality: QualityModel, batch: Batch) -> None:
    prompts, responses, rewards = batch
    wrapper = prepared("label_quality", tiny_task)
    assert not wrapper.uses_rewards
    assert call(wrapper, batch) == call(wrapper, (prompts, responses, np.zeros_like(rewards)))


def test_debias_subtracts_what_only_the_crowd_pays(tiny_task: Path, quality: QualityModel, batch: Batch) -> None:
    prompts, responses, rewards = batch
    wrapper = prepared("debias", tiny_task)
    assert wrapper.uses_rewards
    bonus = [naive_bonus(f, r) for f, r in zip(prompts.family.tolist(), responses.tolist(), strict=True)]
    np.testing.assert_allclose(call(wrapper, batch), rewards - bonus, atol=1e-12)
    for family in (0, 3, 5):
        assert np.any(np.array(bonus)[prompts.family == family])


def test_debias_leaves_families_without_shortcuts_alone(tiny_task: Path, quality: QualityModel, batch: Batch) -> None:
    untouched = np.isin(batch[0].family, (1, 2, 4))
    found = call(prepared("debias", tiny_task), batch)
    assert np.array(found)[untouched].tolist() == batch[2][untouched].tolist()


@pytest.mark.parametrize("name", ["debias", "label_quality"])
def test_row_order_does_not_matter(name: str, tiny_task: Path, quality: QualityModel, batch: Batch) -> None:
    prompts, responses, rewards = batch
    order = np.random.default_rng(2).permutation(len(prompts))
    wrapper = prepared(name, tiny_task)
    shuffled = call(wrapper, (prompts[order], responses[order], rewards[order]))
    assert shuffled == np.array(call(wrapper, batch))[order].tolist()


@pytest.mark.parametrize("name", ["debias", "label_quality"])
def test_a_batch_of_one_family_works(name: str, tiny_task: Path, quality: QualityModel, batch: Batch) -> None:
    prompts, responses, rewards = batch
    rows = np.flatnonzero(prompts.family == 3)[:1]
    wrapper = prepared(name, tiny_task)
    assert call(wrapper, (prompts[rows], responses[rows], rewards[rows])) == [call(wrapper, batch)[rows[0]]]


@pytest.mark.parametrize("name", ["debias", "label_quality"])
def test_inputs_are_left_alone(name: str, tiny_task: Path, quality: QualityModel, batch: Batch) -> None:
    prompts, responses, rewards = batch
    records, words, given = prompts.records(DEFAULT_VOCAB), decode(responses, DEFAULT_VOCAB), rewards.tolist()
    prepared(name, tiny_task)(records, words, given)
    assert records == prompts.records(DEFAULT_VOCAB)
    assert words == decode(responses, DEFAULT_VOCAB)
    assert given == rewards.tolist()


@pytest.mark.usefixtures("quality")
def test_two_runs_in_one_process_do_not_mix(
    tiny_task: Path, batch: Batch, task_folder: Path, one_token_is_correct: Callable[..., QualityModel]
) -> None:
    first = {name: prepared(name, tiny_task) for name in ("debias", "label_quality")}
    before = {name: call(wrapper, batch) for name, wrapper in first.items()}
    other = replace(one_token_is_correct(0, 1, 2), shortcuts=(FittedShortcut(1, Feature("token", (1,)), 9.0, 1.0),))
    remember_quality(other, task_digest(task_folder))
    second = {name: prepared(name, task_folder) for name in first}
    vocab = other.vocab
    prompts = read_prompts(task_folder / "data/prompts_train.jsonl", vocab)
    its_batch = prompts, np.array([[0, 0, 1]] * len(prompts)), np.zeros(len(prompts))
    assert call(second["label_quality"], its_batch, vocab) == pytest.approx(
        [(2 / 3, 1 / 3, 0.0)[f] for f in prompts.family]
    )
    assert call(second["debias"], its_batch, vocab) == [-9.0 if f == 1 else 0.0 for f in prompts.family]
    assert {name: call(wrapper, batch) for name, wrapper in first.items()} == before


def test_without_shortcuts_debias_changes_nothing(
    task_folder: Path, empty_cache: Path, one_token_is_correct: Callable[..., QualityModel]
) -> None:
    model = one_token_is_correct(0, 1, 2)
    remember_quality(model, task_digest(task_folder))
    crowd = read_labelled(task_folder / "reward_model/train.jsonl", model.vocab)
    found = call(prepared("debias", task_folder), (crowd.prompts, crowd.responses, crowd.labels), model.vocab)
    assert found == crowd.labels.tolist()
