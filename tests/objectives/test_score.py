import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from objectives import score
from objectives.fit_checks import FitChecks
from objectives.quality_model import QualityModel
from objectives.score import Judge, Scores, format_scores
from objectives.split import Part, split_prompts
from objectives.token_mass import prompt_quality
from rlhf.data import Prompts
from rlhf.errors import InputError
from rlhf.policy import Policy, init_policy
from rlhf.taskdir import Task
from rlhf.vocab import Vocab


def model_with_random_tables(vocab: Vocab, seed: int) -> QualityModel:
    """A posterior that is sure of nothing: every cell is a distribution over tokens."""
    rng = np.random.default_rng(seed)
    shape = (len(vocab.families), vocab.resp_len)
    nothing = np.zeros(len(vocab.families))
    attribute = rng.integers(vocab.n_attrs, size=shape)
    correct = rng.dirichlet(np.full(vocab.n_content, 0.3), size=(*shape, vocab.n_values))
    return QualityModel(
        vocab=vocab,
        attribute=attribute,
        correct=correct,
        reward_correct=correct,
        draws=np.zeros((1, *shape, vocab.n_values), dtype=np.int16),
        noise=np.ones((len(vocab.families), 2)),
        shortcuts=(),
        checks=FitChecks(0.0, *[nothing] * 5),
    )


def peaked_policy(vocab: Vocab, seed: int) -> Policy:
    policy = init_policy(vocab, seed=seed, size={"d_model": 16, "n_layers": 1, "n_heads": 2, "d_ff": 16})
    with torch.no_grad():
        policy.head.weight *= 4  # far from uniform, so that prefixes matter
    return policy


@torch.no_grad()
def enumerated(policy: Policy, task: Task, quality: QualityModel, prompts: Prompts) -> dict[str, np.ndarray]:
    """Return exact expected quality, KL and proxy reward of every prompt, over all possible responses."""
    vocab = task.vocab
    responses = torch.tensor(list(product(range(vocab.n_content), repeat=vocab.resp_len)))
    result: dict[str, list[float]] = {"quality": [], "kl": [], "proxy_reward": []}
    for row in range(len(prompts)):
        prompt = prompts[np.array([row])]
        ids = prompt.tokens(vocab)
        log_p, log_ref = (
            model.response_logp(ids, responses).gather(-1, responses[..., None])[..., 0].sum(1).double().numpy()
            for model in (policy, task.reference)
        )
        p = np.exp(log_p)
        assert p.sum() == pytest.approx(1, abs=1e-5)
        family, attrs = prompt.family[0], prompt.attrs[0]
        expected = 0.0
        for weight, response in zip(p, responses.numpy(), strict=True):
            for position, token in enumerate(response):
                value = attrs[quality.attribute[family, position]]
                expected += weight * quality.correct[family, position, value, token] / vocab.resp_len
        result["quality"].append(expected)
        result["kl"].append((p * (log_p - log_ref)).sum())
        result["proxy_reward"].append((p * task.reward_model.score(ids, responses).double().numpy()).sum())
    return {name: np.array(values) for name, values in result.items()}


Exact = tuple[Prompts, dict[str, dict[str, np.ndarray]]]  # prompts; policy or reference -> figure -> by prompt


@pytest.fixture(scope="module")
def quality(network_task: Task) -> QualityModel:
    return model_with_random_tables(network_task.vocab, 0)


@pytest.fixture(scope="module")
def policy(network_task: Task) -> Policy:
    return peaked_policy(network_task.vocab, 8)


@pytest.fixture(scope="module")
def scores(network_task: Task, quality: QualityModel, policy: Policy) -> Scores:
    return Judge(network_task, quality).score(policy)


@pytest.fixture(scope="module")
def exact(network_task: Task, quality: QualityModel, policy: Policy) -> Exact:
    prompts = split_prompts(network_task, "selection")
    assert np.bincount(prompts.family).max() < 450  # so the judge takes all of them
    both = {"policy": policy, "reference": network_task.reference}
    return prompts, {name: enumerated(given, network_task, quality, prompts) for name, given in both.items()}


def family_means(prompts: Prompts, values: np.ndarray) -> np.ndarray:
    return np.array([values[prompts.family == f].mean() for f in range(3)])


@pytest.mark.parametrize("name", ["quality", "kl", "proxy_reward"])
def test_scores_agree_with_the_enumeration_of_all_responses(name: str, scores: Scores, exact: Exact) -> None:
    prompts, figures = exact
    error = np.abs(getattr(scores, name) - family_means(prompts, figures["policy"][name]))
    # The standard error covers prompts as well as responses; here the prompts are the same, so it is an upper limit.
    np.testing.assert_array_less(error, 4 * getattr(scores, f"{name}_se"))


def test_gain_agrees_with_the_enumeration(scores: Scores, exact: Exact) -> None:
    prompts, figures = exact
    expected = family_means(prompts, figures["policy"]["quality"] - figures["reference"]["quality"])
    np.testing.assert_array_less(np.abs(scores.gain - expected), 4 * scores.gain_se)
    assert (np.abs(expected) > 2 * scores.gain_se).any()  # there is a gain to be seen


def test_quality_is_unbiased_and_less_noisy_than_counting_drawn_tokens(
    network_task: Task, quality: QualityModel, policy: Policy, exact: Exact
) -> None:
    """Prompt by prompt, what is left after subtracting the exact value is sampling error alone."""
    prompts, figures = exact
    uniforms = torch.from_numpy(np.random.default_rng(0).random((len(prompts), 3), dtype=np.float32))
    responses, _ = policy.sample(prompts.tokens(network_task.vocab), uniforms)
    counted_error = quality.quality(prompts, responses.numpy()) - figures["policy"]["quality"]
    judge = Judge(network_task, quality)
    by_prompt = dict(
        zip(judge.prompts.ids, prompt_quality(judge.sample(policy).probability, judge.position_quality), strict=True)
    )
    error = np.array([by_prompt[id_] for id_ in prompts.ids]) - figures["policy"]["quality"]
    assert abs(error.mean()) < 4 * error.std() / np.sqrt(len(error))
    assert error.std() < 0.7 * counted_error.std()


def test_the_reference_gains_exactly_nothing(network_task: Task, quality: QualityModel) -> None:
    scores = Judge(network_task, quality).score(network_task.reference)
    assert scores.gain.tolist() == [0.0] * 3
    assert scores.gain_se.tolist() == [0.0] * 3
    assert np.abs(scores.kl).max() < 1e-6
    assert scores.worst_family_harm == 0.0


def test_kl_is_never_negative_beyond_rounding(network_task: Task, quality: QualityModel) -> None:
    judge = Judge(network_task, quality)
    for seed in range(3):
        assert judge.score(peaked_policy(network_task.vocab, seed)).kl.min() > 0


def test_the_same_policy_has_the_same_scores_twice(
    network_task: Task, quality: QualityModel, policy: Policy, scores: Scores
) -> None:
    judge = Judge(network_task, quality)
    judge.score(network_task.reference)  # what was scored before does not matter
    assert judge.score(policy).metrics() == scores.metrics()


def test_certification_uses_other_prompts_and_random_numbers(network_task: Task, quality: QualityModel) -> None:
    parts: tuple[Part, ...] = ("selection", "certification")
    first, second = (Judge(network_task, quality, part=part) for part in parts)
    assert not set(first.prompts.ids) & set(second.prompts.ids)
    n = min(len(first._uniforms), len(second._uniforms))
    assert (first._uniforms[:n] != second._uniforms[:n]).float().mean() > 0.99


def test_selection_draws_as_many_prompts_of_each_family(
    network_task: Task, quality: QualityModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(score, "_PROMPTS_PER_FAMILY", 40)
    judge = Judge(network_task, quality)
    assert np.bincount(judge.prompts.family).tolist() == [40, 40, 40]
    assert len(set(judge.prompts.ids)) == 120
    assert set(judge.prompts.ids) <= set(split_prompts(network_task, "selection").ids)


def test_standard_errors_shrink_with_the_root_of_n(
    network_task: Task, quality: QualityModel, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = []
    for n in (25, 100):
        monkeypatch.setattr(score, "_PROMPTS_PER_FAMILY", n)
        errors.append(Judge(network_task, quality).score(policy))
    for name in ("quality_se", "gain_se", "kl_se"):
        few, many = (getattr(scores, name) for scores in errors)
        np.testing.assert_allclose((few / many).mean(), 2.0, rtol=0.25, err_msg=name)


def test_weights_that_are_not_numbers_raise(network_task: Task, quality: QualityModel) -> None:
    broken = peaked_policy(network_task.vocab, 1)
    with torch.no_grad():
        broken.head.weight[-1] = float("nan")
    with pytest.raises(InputError, match=r"quality, gain, kl.* not finite; its weights cannot be judged"):
        Judge(network_task, quality).score(broken)


def test_a_reward_model_that_gives_infinity_raises(network_task: Task, quality: QualityModel, policy: Policy) -> None:
    class Infinite:
        def score(self, prompts: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
            return torch.full((len(responses),), math.inf)

    task = replace(network_task, reward_model=Infinite())  # type: ignore[arg-type]
    with pytest.raises(InputError, match="gives proxy_reward that are not finite"):
        Judge(task, quality).score(policy)


def test_a_family_with_one_prompt_never_gives_figures_that_are_not_finite(
    network_task: Task, quality: QualityModel, policy: Policy
) -> None:
    """One prompt has no standard error: such a task is refused, or the figure is finite."""
    selection = split_prompts(network_task, "selection")
    only = selection.ids[int(np.flatnonzero(selection.family == 0)[0])]
    train, dev = network_task.train_prompts, network_task.dev_prompts
    kept = [family != 0 or id_ == only for id_, family in zip(train.ids, train.family, strict=True)]
    task = replace(network_task, train_prompts=train[np.array(kept)], dev_prompts=dev[dev.family != 0])
    with contextlib.suppress(InputError):
        metrics = Judge(task, quality).score(policy).metrics()
        assert [name for name, value in metrics.items() if not math.isfinite(value)] == []


def test_every_family_counts_alike_however_many_prompts_it_has(
    network_task: Task, quality: QualityModel, policy: Policy
) -> None:
    fewer = network_task.train_prompts[
        (network_task.train_prompts.family != 0) | (np.arange(len(network_task.train_prompts)) % 5 == 0)
    ]
    dev = network_task.dev_prompts[network_task.dev_prompts.family != 0]
    scores = Judge(replace(network_task, train_prompts=fewer, dev_prompts=dev), quality).score(policy)
    assert scores.balanced_quality == pytest.approx(scores.quality.sum() / 3, rel=1e-12)
    assert scores.balanced_gain == pytest.approx(scores.gain.sum() / 3, rel=1e-12)
    assert scores.quality_se[0] > scores.quality_se[1:].max()


def known_scores() -> Scores:
    columns = {
        "quality": [0.5, 0.7], "quality_se": [0.03, 0.04], "gain": [-0.1, 0.3], "gain_se": [0.06, 0.08],
        "kl": [1.0, 2.0], "kl_se": [0.3, 0.4], "proxy_reward": [0.2, 0.6], "proxy_reward_se": [0.0, 0.2],
    }  # fmt: skip
    return Scores(("ash", "oak"), **{name: np.array(values) for name, values in columns.items()})


def test_metrics_in_closed_form() -> None:
    assert known_scores().metrics() == pytest.approx({
        "balanced_quality": 0.6, "balanced_quality_se": 0.025, "balanced_gain": 0.1, "balanced_gain_se": 0.05,
        "worst_family_gain": -0.1, "worst_family_gain_se": 0.06,
        "worst_family_harm": 0.1, "worst_family_harm_se": 0.06,
        "kl": 1.5, "kl_se": 0.25, "proxy_reward": 0.4, "proxy_reward_se": 0.1,
        "quality/ash": 0.5, "quality/ash_se": 0.03, "quality/oak": 0.7, "quality/oak_se": 0.04,
        "gain/ash": -0.1, "gain/ash_se": 0.06, "gain/oak": 0.3, "gain/oak_se": 0.08,
        "kl/ash": 1.0, "kl/ash_se": 0.3, "kl/oak": 2.0, "kl/oak_se": 0.4,
    })  # fmt: skip


def test_harm_is_zero_where_every_family_gains() -> None:
    scores = replace(known_scores(), gain=np.array([0.1, 0.0]))
    assert scores.worst_family_gain == 0.0
    assert scores.worst_family_harm == 0.0


def test_the_table_has_a_line_a_family_and_one_for_all() -> None:
    lines = format_scores(known_scores()).splitlines()
    assert [line.split()[0] for line in lines] == ["family", "ash", "oak", "balanced"]
    assert lines[1].split()[1:] == ["0.500", "-0.100", "0.060", "1.00", "0.200"]
    assert lines[3].split()[1:] == ["0.600", "+0.100", "0.050", "1.50", "0.400"]


def test_a_policy_that_writes_one_token_only_is_scored_without_error(
    network_task: Task, one_token_policy: Callable[[int], Policy]
) -> None:
    quality = model_with_random_tables(network_task.vocab, 2)
    prompts = split_prompts(network_task, "selection")
    expected = quality.quality(prompts, np.ones((len(prompts), 3), dtype=np.int64))
    scores = Judge(network_task, quality).score(one_token_policy(1))
    np.testing.assert_allclose(scores.quality, family_means(prompts, expected), rtol=1e-9)
