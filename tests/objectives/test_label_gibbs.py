from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from objectives.label_gibbs import CROWD, EXPERT, LabelRows, LabelSampler
from objectives.quality_model import QualityModel, label_rows
from rlhf.data import Labelled, Prompts
from rlhf.features import Feature, all_features
from rlhf.taskdir import Task
from rlhf.world import Shortcut, World

N_CHAINS = 10_000
N_ROWS, N_FEATURES = 14, 12


def tiny_rows(rng: np.random.Generator) -> LabelRows:
    """One family, two positions, two values, three tokens; the last row is padding."""
    crowd = np.arange(N_ROWS) >= 7
    present = np.arange(N_ROWS) < N_ROWS - 1
    features = rng.integers(3, size=(1, N_FEATURES, N_ROWS)) * (crowd & present)
    return LabelRows(
        labels=rng.normal(0.5, 0.3, (1, N_ROWS)),
        crowd=crowd[None],
        present=present[None],
        cell=rng.integers(2, size=(1, 2, N_ROWS)),
        token=rng.integers(3, size=(1, 2, N_ROWS)),
        features=features.astype(np.float32),
    )


def tiny_sampler(seed: int, *, crowd_on: bool = True) -> LabelSampler:
    """Many chains over the same tiny rows, all at the same offsets, noise and shortcut sizes."""
    rng = np.random.default_rng(seed)
    rows = tiny_rows(rng)
    log_prior = np.log(rng.dirichlet(np.ones(3), size=(1, 2, 2)))
    used = np.ones((N_CHAINS, 1, N_ROWS), dtype=bool)
    used[:, :, 3] = False  # an expert row held out
    used[:, :, 9] = False  # a crowd row held out
    sampler = LabelSampler(rows, log_prior, used, rng)
    sampler._crowd_on = crowd_on
    state = sampler.state
    state.shortlist[0] = np.arange(10)
    state.sizes[:, 0, :2] = (0.3, -0.2)
    state.offsets[:] = (0.1, -0.15)
    state.variance[:] = (0.25**2, 0.35**2)
    sampler._refresh()
    return sampler


def active(sampler: LabelSampler) -> np.ndarray:
    """Return which of the tiny rows take part."""
    keep = np.arange(N_ROWS) < N_ROWS - 1
    keep[[3, 9]] = False
    return keep if sampler._crowd_on else keep & ~sampler._rows.crowd[0]


def residual_of(sampler: LabelSampler, table: np.ndarray, *, offsets: bool = True, skip_slot: int | None = None):
    """Return labels minus what one chain's parameters explain, row by row, and each row's sd."""
    rows, state = sampler._rows, sampler.state
    left, sd = [], []
    for r in np.flatnonzero(active(sampler)):
        crowd = bool(rows.crowd[0, r])
        value = rows.labels[0, r] - sum(table[p, rows.cell[0, p, r]] == rows.token[0, p, r] for p in range(2)) / 2
        if offsets:
            value -= state.offsets[0, 0, 0] + crowd * state.offsets[0, 0, 1]
        for slot in range(10):
            if slot != skip_slot:
                value -= state.sizes[0, 0, slot] * rows.features[0, state.shortlist[0, slot], r]
        left.append(value)
        sd.append(np.sqrt(state.variance[0, 0, CROWD if crowd else EXPERT]))
    return np.array(left), np.array(sd)


def log_normal(residual: np.ndarray, covariance: np.ndarray) -> float:
    _, log_det = np.linalg.slogdet(2 * np.pi * covariance)
    return float(-0.5 * (log_det + residual @ np.linalg.solve(covariance, residual)))


def same_table(sampler: LabelSampler) -> np.ndarray:
    """Put every chain at the first chain's table."""
    sampler.state.table[:] = sampler.state.table[:1]
    sampler._refresh()
    return sampler.state.table[0, 0]


@pytest.mark.parametrize("crowd_on", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
def test_tables_follow_the_enumerated_posterior(seed: int, crowd_on: bool) -> None:
    sampler = tiny_sampler(seed, crowd_on=crowd_on)
    for _ in range(25):
        for position in range(2):
            sampler._draw_table(position)
    prior = np.exp(sampler._log_prior[0, 0])
    log_posterior = {}
    for tokens in product(range(3), repeat=4):
        table = np.array(tokens).reshape(2, 2)
        residual, sd = residual_of(sampler, table)
        log_prior = sum(np.log(prior[p, v, table[p, v]]) for p, v in product(range(2), repeat=2))
        log_posterior[tokens] = log_prior + log_normal(residual, np.diag(sd**2))
    weight = np.exp(np.array(list(log_posterior.values())) - max(log_posterior.values()))
    expected = weight / weight.sum()
    drawn = sampler.state.table[:, 0].reshape(N_CHAINS, 4) @ (27, 9, 3, 1)
    frequency = np.bincount(drawn, minlength=81) / N_CHAINS
    assert expected.max() < 0.9  # otherwise there is little to tell apart
    np.testing.assert_array_less(np.abs(frequency - expected), 5 * np.sqrt(expected / N_CHAINS) + 5 / N_CHAINS)


@pytest.mark.parametrize("crowd_on", [True, False])
def test_offsets_follow_bayesian_linear_regression(crowd_on: bool) -> None:
    sampler = tiny_sampler(2, crowd_on=crowd_on)
    residual, sd = residual_of(sampler, same_table(sampler), offsets=False)
    design = np.stack([np.ones(N_ROWS), sampler._rows.crowd[0]], 1)[active(sampler)] / sd[:, None]
    covariance = np.linalg.inv(design.T @ design + np.eye(2) / 0.5**2)
    mean = covariance @ design.T @ (residual / sd)
    sampler._draw_offsets()
    drawn = sampler.state.offsets[:, 0]
    np.testing.assert_array_less(np.abs(drawn.mean(0) - mean), 5 * np.sqrt(np.diag(covariance) / N_CHAINS))
    np.testing.assert_allclose(np.cov(drawn.T), covariance, rtol=0.06, atol=0.03 * covariance.max())


@pytest.mark.parametrize("slot", [0, 1, 5])
def test_size_follows_spike_and_slab(slot: int) -> None:
    sampler = tiny_sampler(3)
    table = same_table(sampler)
    residual, sd = residual_of(sampler, table, skip_slot=slot)
    feature = sampler._rows.features[0, slot][active(sampler)].astype(float)
    noise, slab = np.diag(sd**2), 0.5**2
    chance = 0.5 / N_FEATURES
    log_odds = (
        np.log(chance / (1 - chance))
        + log_normal(residual, noise + slab * np.outer(feature, feature))
        - log_normal(residual, noise)
    )
    probability = 1 / (1 + np.exp(-log_odds))
    precision = (feature**2 / sd**2).sum() + 1 / slab
    sampler._draw_size(slot)
    drawn = sampler.state.sizes[:, 0, slot]
    on = drawn != 0
    assert 0.001 < probability < 0.999
    assert abs(on.mean() - probability) < 5 * np.sqrt(probability * (1 - probability) / N_CHAINS)
    mean = (feature * residual / sd**2).sum() / precision
    assert abs(drawn[on].mean() - mean) < 5 / np.sqrt(precision * on.sum())
    if on.sum() > 1000:
        assert drawn[on].var() == pytest.approx(1 / precision, rel=6 * np.sqrt(2 / on.sum()))


def test_variance_follows_the_inverse_gamma_conditional() -> None:
    sampler = tiny_sampler(4)
    residual, sd = residual_of(sampler, same_table(sampler))
    is_expert = sd == sd.min()
    sampler._draw_variance()
    for source, rows in ((EXPERT, is_expert), (CROWD, ~is_expert)):
        shape, scale = 2.0 + rows.sum() / 2, 0.01 + (residual[rows] ** 2).sum() / 2
        precision = 1 / sampler.state.variance[:, 0, source]
        assert precision.mean() == pytest.approx(shape / scale, rel=5 / np.sqrt(shape * N_CHAINS))
        assert precision.var() == pytest.approx(shape / scale**2, rel=0.1)


def test_expert_rows_alone_decide_until_the_crowd_is_on() -> None:
    first, second = tiny_sampler(5, crowd_on=False), tiny_sampler(5, crowd_on=False)
    second._rows.labels[second._rows.crowd] += 100.0
    for sampler in (first, second):
        sampler.sweep()
    np.testing.assert_array_equal(first.state.table, second.state.table)
    np.testing.assert_array_equal(first.state.offsets, second.state.offsets)


def small_rows(task: Task, world: World) -> LabelRows:
    return label_rows(task.expert, task.crowd, world.attribute, all_features(world.vocab))


def posterior(
    rows: LabelRows, log_prior: np.ndarray, *, seed: int = 0, n_chains: int = 4, used: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Return posterior means: cell probabilities (F, L, n_values, V), offsets (F, 2), size of every feature (F, K)."""
    if used is None:
        used = np.ones((n_chains, *rows.labels.shape), dtype=bool)
    sampler = LabelSampler(rows, log_prior, used, np.random.default_rng(seed))
    sampler.anneal(25)
    sizes = np.zeros(rows.features.shape[:2])
    tables, offsets, variances = [], [], []
    for _ in range(100):
        sampler.sweep()
        tables.append(sampler.state.table.copy())
        offsets.append(sampler.state.offsets.mean(0))
        variances.append(sampler.state.variance.mean(0))
        for family, listed in enumerate(sampler.state.shortlist):
            sizes[family, listed] += sampler.state.sizes[:, family].mean(0) / 100
    drawn = np.concatenate(tables)
    return {
        "correct": np.stack([(drawn == t).mean(0) for t in range(log_prior.shape[-1])], -1),
        "offsets": np.mean(offsets, 0),
        "sizes": sizes,
        "sd": np.sqrt(np.mean(variances, 0)),
    }


def assert_alike(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> None:
    """Within Monte Carlo noise: several times what two seeds differ by."""
    assert np.abs(first["correct"] - second["correct"]).max() < 0.15
    assert np.abs(first["offsets"] - second["offsets"]).max() < 0.02
    assert np.abs(first["sizes"] - second["sizes"]).max() < 0.03
    assert np.abs(first["sd"] - second["sd"]).max() < 0.01


def test_published_sizes_recover_the_cells(default_world: World, fitted: QualityModel) -> None:
    likeliest = fitted.correct.argmax(-1)
    assert (likeliest == default_world.correct).mean() >= 0.98
    in_truth = np.take_along_axis(fitted.correct, default_world.correct[..., None], -1)
    assert in_truth.mean() >= 0.95


def test_published_sizes_find_both_shortcuts_and_no_others(default_world: World, fitted: QualityModel) -> None:
    truth = {(shortcut.family, shortcut.feature): shortcut.size for shortcut in default_world.shortcuts}
    found = {(shortcut.family, shortcut.feature): shortcut.size for shortcut in fitted.shortcuts}
    assert found.keys() == truth.keys()
    for key, size in truth.items():
        assert found[key] == pytest.approx(size, abs=0.06)


@pytest.mark.parametrize(
    ("feature", "size"),
    [
        (Feature("token", (2,)), 0.5),
        (Feature("token", (2,)), -0.5),
        (Feature("pair", (1, 4)), 0.6),
        (Feature("adjacent", (3, 5)), 0.8),
        (Feature("position", (6,), 1), 0.6),
        (Feature("repetition"), -0.4),
    ],
    ids=lambda value: value.kind if isinstance(value, Feature) else f"{value:+}",
)
def test_every_kind_of_shortcut_is_found(
    feature: Feature, size: float, small_task: Callable[..., tuple[World, Task]]
) -> None:
    world, task = small_task(Shortcut(1, feature, size), seed=20, n_crowd=300)
    result = posterior(small_rows(task, world), np.log(world.shares))
    expected = np.zeros_like(result["sizes"])
    expected[1, all_features(world.vocab).index(feature)] = size
    np.testing.assert_allclose(result["sizes"], expected, atol=0.08)


def test_no_shortcut_is_found_where_there_is_none(small_task: Callable[..., tuple[World, Task]]) -> None:
    world, task = small_task(seed=30)
    result = posterior(small_rows(task, world), np.log(world.shares))
    assert np.abs(result["sizes"]).max() < 0.03
    np.testing.assert_allclose(result["sd"], [[0.045, 0.10]] * 2, rtol=0.2)
    np.testing.assert_allclose(result["offsets"], 0, atol=0.04)


def test_row_order_does_not_matter(small_task: Callable[..., tuple[World, Task]]) -> None:
    world, task = small_task(Shortcut(0, Feature("token", (2,)), 0.5), seed=40)
    order = np.random.default_rng(0).permutation
    shuffled = replace(
        task, expert=task.expert[order(len(task.expert))], crowd=task.crowd[order(len(task.crowd))]
    )  # fmt: skip
    first = posterior(small_rows(task, world), np.log(world.shares), seed=0)
    second = posterior(small_rows(shuffled, world), np.log(world.shares), seed=1)
    assert_alike(first, second)


def test_relabelling_families_only_relabels_the_answer(small_task: Callable[..., tuple[World, Task]]) -> None:
    world, task = small_task(Shortcut(0, Feature("token", (2,)), 0.5), seed=41)
    first = posterior(small_rows(task, world), np.log(world.shares), seed=0)

    def turned(part: Labelled) -> Labelled:
        prompts = Prompts(part.prompts.ids, 1 - part.prompts.family, part.prompts.attrs)
        return Labelled(prompts, part.responses, part.labels)

    rows = label_rows(turned(task.expert), turned(task.crowd), world.attribute[::-1], all_features(world.vocab))
    second = posterior(rows, np.log(world.shares[::-1]), seed=1)
    assert_alike(first, {name: value[::-1] for name, value in second.items()})


@pytest.mark.parametrize("shift", [0.3, -0.25])
def test_a_shift_of_all_labels_moves_intercepts_only(
    shift: float, small_task: Callable[..., tuple[World, Task]]
) -> None:
    world, task = small_task(Shortcut(0, Feature("token", (2,)), 0.5), seed=42)
    rows = small_rows(task, world)
    first = posterior(rows, np.log(world.shares), seed=0)
    second = posterior(replace(rows, labels=rows.labels + shift), np.log(world.shares), seed=1)
    second["offsets"] = second["offsets"] - (shift, 0.0)
    assert_alike(first, second)


def test_a_shift_of_crowd_labels_moves_the_crowd_offset_only(small_task: Callable[..., tuple[World, Task]]) -> None:
    world, task = small_task(Shortcut(0, Feature("token", (2,)), 0.5), seed=43)
    rows = small_rows(task, world)
    first = posterior(rows, np.log(world.shares), seed=0)
    second = posterior(replace(rows, labels=rows.labels + 0.3 * rows.crowd), np.log(world.shares), seed=1)
    second["offsets"] = second["offsets"] - (0.0, 0.3)
    assert_alike(first, second)


def test_labels_of_rows_switched_off_are_never_looked_at(small_task: Callable[..., tuple[World, Task]]) -> None:
    world, task = small_task(Shortcut(0, Feature("token", (2,)), 0.5), seed=44)
    rows = small_rows(task, world)
    used = np.random.default_rng(0).random((1, *rows.labels.shape)) < 0.8
    spoilt = replace(rows, labels=np.where(used[0], rows.labels, 1e6))
    first = posterior(rows, np.log(world.shares), used=used)
    second = posterior(spoilt, np.log(world.shares), used=used)
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name], err_msg=name)


def test_padding_is_never_looked_at(small_task: Callable[..., tuple[World, Task]]) -> None:
    world, task = small_task(seed=45)
    shorter = replace(task, crowd=task.crowd[np.arange(len(task.crowd) - 50)])  # the second family has fewer rows
    rows = small_rows(shorter, world)
    assert not rows.present[1, -50:].any()
    spoilt = replace(rows, labels=np.where(rows.present, rows.labels, 1e6))
    first, second = (posterior(given, np.log(world.shares)) for given in (rows, spoilt))
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name], err_msg=name)


def test_one_familys_labels_do_not_touch_another(small_task: Callable[..., tuple[World, Task]]) -> None:
    world, task = small_task(Shortcut(0, Feature("token", (2,)), 0.5), seed=46)
    rows = small_rows(task, world)
    noisy = rows.labels.copy()
    noisy[1] = np.random.default_rng(0).normal(0, 3, noisy[1].shape)  # nothing the model explains
    first = posterior(rows, np.log(world.shares), seed=0)
    second = posterior(replace(rows, labels=noisy), np.log(world.shares), seed=1)
    assert_alike({n: v[:1] for n, v in first.items()}, {n: v[:1] for n, v in second.items()})
    assert second["sd"][1].min() > 1


def test_label_noise_is_learnt_so_that_bad_crowd_labels_do_no_harm(
    small_task: Callable[..., tuple[World, Task]],
) -> None:
    world, task = small_task(seed=47)
    rows = small_rows(task, world)
    noisy = rows.labels + rows.crowd * np.random.default_rng(0).normal(0, 2, rows.labels.shape)
    result = posterior(replace(rows, labels=noisy), np.log(world.shares))
    assert (result["correct"].argmax(-1) == world.correct).mean() >= 0.95
    assert result["sd"][:, CROWD].min() > 1.5
    assert result["sd"][:, EXPERT].max() < 0.07


def test_rank_weights_follow_their_enumerated_posterior() -> None:
    """Three tokens: the weights of the second and third rank on a grid; no token has a fourth rank, so its is prior."""
    sampler = tiny_sampler(6)
    table = same_table(sampler)
    prior = np.exp(sampler._ranks._log_prior[0])
    by_rank = np.sort(prior, -1)[..., ::-1]
    chosen = np.array([
        [(prior[p, v] > prior[p, v, table[p, v]]).sum() for v in range(2)] for p in range(2)
    ])  # fmt: skip
    grid = np.linspace(-9, 9, 361)
    second, third = np.meshgrid(grid, grid, indexing="ij")
    weights = np.stack([np.zeros_like(second), second, third])
    log_density = -(second**2 + third**2) / (2 * 2.0**2)
    for p, v in product(range(2), repeat=2):
        normaliser = np.log(np.einsum("r,rij->ij", by_rank[p, v], np.exp(weights)))
        log_density += weights[chosen[p, v]] - normaliser
    density = np.exp(log_density - log_density.max())
    density /= density.sum()
    for _ in range(40):
        sampler._draw_rank_weight()
    drawn = sampler.state.rank_weight[:, 0]
    assert not drawn[:, 0].any()
    for rank, values in ((1, second), (2, third)):
        mean = (density * values).sum()
        sd = np.sqrt((density * (values - mean) ** 2).sum())
        assert abs(drawn[:, rank].mean() - mean) < 5 * sd / np.sqrt(N_CHAINS)
        assert drawn[:, rank].std() == pytest.approx(sd, rel=0.05)
    assert drawn[:, 3].std() == pytest.approx(2.0, rel=0.06)


def test_rank_weights_change_the_prior_of_their_rank() -> None:
    sampler = tiny_sampler(7)
    sampler._draw_rank_weight()
    prior, weight = sampler._ranks._log_prior[0], sampler.state.rank_weight[:, 0]
    rank = (-prior).argsort(-1).argsort(-1)
    np.testing.assert_allclose(sampler._log_prior[:, 0], prior + weight[:, rank], rtol=1e-12)


def test_third_choices_that_are_never_correct_are_learnt(small_task: Callable[..., tuple[World, Task]]) -> None:
    world, task = small_task(seed=48, n_expert=40, n_crowd=40)
    log_prior = np.log(world.shares)
    third = np.argsort(-log_prior, -1)[..., 2:3]
    result = posterior(small_rows(task, world), log_prior)
    assert np.take_along_axis(result["correct"], third, -1).mean() < 0.1  # the reference says 0.2


def test_duplicated_rows_sharpen_what_single_rows_say(small_task: Callable[..., tuple[World, Task]]) -> None:
    world, task = small_task(Shortcut(0, Feature("token", (2,)), 0.5), seed=49, n_expert=40, n_crowd=80)
    twice = replace(
        task, expert=task.expert[np.repeat(np.arange(80), 2)], crowd=task.crowd[np.repeat(np.arange(160), 2)]
    )  # fmt: skip
    first, second = (posterior(small_rows(given, world), np.log(world.shares)) for given in (task, twice))
    assert second["correct"].max(-1).mean() >= first["correct"].max(-1).mean()
    agreed = first["correct"].max(-1) > 0.95
    assert (first["correct"].argmax(-1) == second["correct"].argmax(-1))[agreed].mean() > 0.98
    np.testing.assert_allclose(second["offsets"], first["offsets"], atol=0.05)
    np.testing.assert_allclose(second["sizes"], first["sizes"], atol=0.06)
