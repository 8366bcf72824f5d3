import copy
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from rlhf.config import RunConfig
from rlhf.data import Prompts
from rlhf.errors import InputError, TrainingError
from rlhf.policy import Policy, load_policy
from rlhf.reward_model import load_reward_model
from rlhf.run import STATE_FILE, LogRow, ReinforceRun
from rlhf.vocab import Vocab, load_vocab
from rlhf.weights import read_tensors, write_tensors

LOG_KEYS = {"step", "proxy_reward", "kl", "shaped_reward", "entropy", "loss", "elapsed_s"}  # DESIGN section 4

# Writes down what a run sampled and was paid, so that a test can compute the step again from the outside.
RECORDER = """
import json
from pathlib import Path

def transform(records, response_tokens, rewards):
    rewards = [2 * reward + 0.1 * len(record["id"]) for record, reward in zip(records, rewards)]
    row = {"records": records, "responses": response_tokens, "rewards": rewards}
    with Path(__file__).with_suffix(".jsonl").open("a") as file:
        file.write(json.dumps(row) + "\\n")
    return rewards
"""
SEEN = "recorder.jsonl"


@pytest.fixture
def recorded(small_task: Path) -> Path:
    (small_task / "recorder.py").write_text(RECORDER)
    return small_task


def seen(task: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (task / SEEN).read_text().splitlines()]


def recording(**changes: object) -> RunConfig:
    values = {
        "policy_init": "other_policy", "reward_wrapper": "recorder.py", "batch_prompts": 3, "samples_per_prompt": 2,
        "steps": 3, "log_every": 1, "kl_coef": 0.3, "max_grad_norm": 1e9,
    }  # fmt: skip
    return RunConfig(**{**values, **changes})  # type: ignore[arg-type]


def weights(run: ReinforceRun) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in run.policy.state_dict().items()}


def assert_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def without_time(rows: list[LogRow]) -> list[LogRow]:
    return [{name: value for name, value in row.items() if name != "elapsed_s"} for row in rows]


def plain_taken_logp(policy: Policy, prompt: list[int], response: list[int], temperature: float) -> list[torch.Tensor]:
    """Log probability of each response token, every token re-run at each step."""
    first = policy.vocab.first_content_id
    ids = prompt + [first + token for token in response]
    return [
        torch.log_softmax(policy(torch.tensor([ids[:t]]))[0, -1] / temperature, -1)[ids[t]]
        for t in range(len(prompt), len(ids))
    ]


def plain_step(policy: Policy, task: Path, config: RunConfig, row: dict[str, Any]) -> dict[str, float]:
    """Compute one step's numbers from DESIGN section 4, leaving its gradient in `policy`. Readable, not fast."""
    vocab, group = policy.vocab, config.samples_per_prompt
    reference, reward_model = load_policy(task / "policy", vocab), load_reward_model(task / "reward_model", vocab)
    shaped, kls, log_pis, proxies = [], [], [], []
    for record, words in zip(row["records"], row["responses"], strict=True):
        prompt = [2 + vocab.families.index(record["family"])]
        prompt += [2 + len(vocab.families) + value for value in record["attrs"]] + [1]
        response = [vocab.content_tokens.index(word) for word in words]
        log_pi = plain_taken_logp(policy, prompt, response, config.temperature)
        with torch.no_grad():
            log_ref = plain_taken_logp(reference, prompt, response, config.temperature)
            kl = sum(pi.item() - ref.item() for pi, ref in zip(log_pi, log_ref, strict=True))
            ids = prompt + [vocab.first_content_id + token for token in response]
            proxy = reward_model(torch.tensor([ids])).item()
        reward = 2 * proxy + 0.1 * len(record["id"])
        shaped.append(reward - config.kl_coef * kl)
        kls.append(kl)
        proxies.append(proxy)
        log_pis.append(torch.stack(log_pi).sum())
    loss = torch.zeros(())
    for start in range(0, len(shaped), group):
        mean = sum(shaped[start : start + group]) / group
        for i in range(start, start + group):
            loss = loss - (shaped[i] - mean) * log_pis[i] / len(shaped)
    policy.zero_grad()
    loss.backward()
    n = len(shaped)
    return {
        "loss": loss.item(), "kl": sum(kls) / n, "shaped_reward": sum(shaped) / n, "proxy_reward": sum(proxies) / n,
    }  # fmt: skip


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("samples", [2, 5])
def test_a_step_equals_the_plain_implementation(recorded: Path, samples: int, temperature: float) -> None:
    config = recording(samples_per_prompt=samples, temperature=temperature)
    run = ReinforceRun(config, recorded)
    for step in range(3):  # the later steps start from weights that training has moved
        before = copy.deepcopy(run.policy)
        (row,) = run.advance(step + 1)
        expected = plain_step(before, recorded, config, seen(recorded)[step])
        assert {name: row[name] for name in expected} == pytest.approx(expected, abs=1e-5, rel=1e-5)
        assert row["grad_norm"] > 1e-3  # otherwise nothing is compared below
        for mine, plain in zip(run.policy.parameters(), before.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, plain.grad, atol=1e-5, rtol=1e-5)


def test_a_step_equals_the_plain_implementation_at_odd_sizes(
    tmp_path: Path, make_task: Callable[..., Path], odd_vocab: Vocab
) -> None:
    task = make_task(tmp_path / "task", odd_vocab, per_family=1)
    (task / "recorder.py").write_text(RECORDER)
    config = recording(batch_prompts=1, samples_per_prompt=8)
    run = ReinforceRun(config, task)
    before = copy.deepcopy(run.policy)
    (row,) = run.advance(1)
    expected = plain_step(before, task, config, seen(task)[0])
    assert row["grad_norm"] > 1e-3
    assert {name: row[name] for name in expected} == pytest.approx(expected, abs=1e-5, rel=1e-5)
    for mine, plain in zip(run.policy.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, plain.grad, atol=1e-5, rtol=1e-5)


def test_the_gradient_is_clipped_and_the_first_adam_step_has_its_closed_form(recorded: Path) -> None:
    run = ReinforceRun(recording(max_grad_norm=0.01, lr=0.02, samples_per_prompt=4), recorded)
    before = weights(run)
    (row,) = run.advance(1)
    gradients = {name: parameter.grad for name, parameter in run.policy.named_parameters()}
    norm = torch.stack([grad.norm() for grad in gradients.values() if grad is not None]).norm().item()
    assert row["grad_norm"] > 0.01
    assert norm == pytest.approx(0.01, rel=1e-3)
    for name, parameter in run.policy.named_parameters():
        grad = gradients[name]
        assert grad is not None
        expected = before[name] - 0.02 * grad / (grad.abs() + 1e-8)
        torch.testing.assert_close(parameter.detach(), expected, atol=1e-5, rtol=1e-5)


def test_at_the_reference_the_kl_is_zero_and_kl_coef_changes_nothing(small_task: Path) -> None:
    rows = []
    for kl_coef in (0.0, 5.0):
        run = ReinforceRun(RunConfig(kl_coef=kl_coef, steps=1, log_every=1, batch_prompts=2), small_task)
        rows += without_time(list(run.advance(1)))
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-5)
    assert rows[1]["loss"] == pytest.approx(rows[0]["loss"], abs=1e-4)


def test_log_rows_have_the_public_keys_and_are_means_since_the_last(small_task: Path) -> None:
    values: dict[str, Any] = {"policy_init": "other_policy", "steps": 8, "batch_prompts": 2}
    every_step = list(ReinforceRun(RunConfig(**values, log_every=1), small_task).advance(8))
    rows = list(ReinforceRun(RunConfig(**values, log_every=3), small_task).advance(8))
    assert all(row.keys() >= LOG_KEYS for row in rows + every_step)
    assert [row["step"] for row in rows] == [3, 6, 8]
    for row, part in zip(rows, (every_step[:3], every_step[3:6], every_step[6:]), strict=True):
        for name in LOG_KEYS - {"step", "elapsed_s"}:
            assert row[name] == pytest.approx(sum(one[name] for one in part) / len(part), rel=1e-9)
    elapsed = [row["elapsed_s"] for row in rows]
    assert elapsed == sorted(elapsed)


def test_the_seed_decides_the_run(small_task: Path) -> None:
    runs = [ReinforceRun(RunConfig(steps=3, batch_prompts=2, seed=seed), small_task) for seed in (4, 4, 5)]
    for run in runs:
        list(run.advance(3))
    assert_same_bits(weights(runs[0]), weights(runs[1]))
    assert not torch.equal(weights(runs[0])["head.weight"], weights(runs[2])["head.weight"])


@pytest.mark.parametrize("wrapper", [None, "clip"])
@pytest.mark.parametrize("stops", [[1], [4], [6], [2, 3, 7]])  # log_every is 3: 1, 2, 4 and 7 lie inside an interval
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(
    small_task: Path, tmp_path: Path, stops: list[int], wrapper: str | None
) -> None:
    config = RunConfig(policy_init="other_policy", steps=8, batch_prompts=2, log_every=3, reward_wrapper=wrapper)
    uninterrupted = ReinforceRun(config, small_task)
    expected = list(uninterrupted.advance(8))
    run, rows = ReinforceRun(config, small_task), []
    for number, stop in enumerate(stops):
        rows += list(run.advance(stop))
        assert run.step == stop
        run.save_state(tmp_path / f"state{number}")
        run = ReinforceRun(config, small_task)
        run.load_state(tmp_path / f"state{number}")
        assert run.step == stop
    rows += list(run.advance(8))
    assert_same_bits(weights(run), weights(uninterrupted))
    assert without_time(rows) == without_time(expected)


def test_saving_does_not_disturb_a_run(small_task: Path, tmp_path: Path) -> None:
    config = RunConfig(steps=4, batch_prompts=2)
    plain, saved = ReinforceRun(config, small_task), ReinforceRun(config, small_task)
    list(plain.advance(4))
    for step in range(1, 5):
        list(saved.advance(step))
        saved.save_state(tmp_path / "state")
    assert_same_bits(weights(plain), weights(saved))


def test_a_finished_run_can_be_extended(small_task: Path, tmp_path: Path) -> None:
    short = ReinforceRun(RunConfig(steps=3, batch_prompts=2), small_task)
    list(short.advance(3))
    short.save_state(tmp_path / "state")
    longer, uninterrupted = (ReinforceRun(RunConfig(steps=5, batch_prompts=2), small_task) for _ in range(2))
    longer.load_state(tmp_path / "state")
    list(longer.advance(5))
    list(uninterrupted.advance(5))
    assert_same_bits(weights(longer), weights(uninterrupted))


def test_a_state_of_another_configuration_names_what_differs(small_task: Path, tmp_path: Path) -> None:
    ReinforceRun(RunConfig(), small_task).save_state(tmp_path / "state")
    run = ReinforceRun(RunConfig(kl_coef=0.2, seed=1), small_task)
    with pytest.raises(InputError) as caught:
        run.load_state(tmp_path / "state")
    assert caught.value.problems == (
        f"{tmp_path / 'state' / STATE_FILE}: saved with kl_coef = 0.1, cannot go on with 0.2",
        f"{tmp_path / 'state' / STATE_FILE}: saved with seed = 0, cannot go on with 1",
    )


@pytest.mark.parametrize("lost", ["stream.prompt", "policy.head.weight", "adam.0.exp_avg"])
def test_a_state_that_lacks_something_is_refused(small_task: Path, tmp_path: Path, lost: str) -> None:
    config = RunConfig(steps=4, batch_prompts=2)
    run = ReinforceRun(config, small_task)
    list(run.advance(1))
    run.save_state(tmp_path)
    tensors, metadata = read_tensors(tmp_path / STATE_FILE)
    write_tensors({name: t for name, t in tensors.items() if name != lost}, tmp_path / STATE_FILE, metadata=metadata)
    with pytest.raises(InputError, match="is not the whole saved state of a run"):
        ReinforceRun(config, small_task).load_state(tmp_path)
    write_tensors(tensors, tmp_path / STATE_FILE, metadata={"counters": "{}"})
    with pytest.raises(InputError, match="is not the whole saved state of a run"):
        ReinforceRun(config, small_task).load_state(tmp_path)


def test_a_kill_while_saving_leaves_the_state_before(
    small_task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig(steps=4, batch_prompts=2)
    run = ReinforceRun(config, small_task)
    list(run.advance(1))
    run.save_state(tmp_path)
    before = (tmp_path / STATE_FILE).read_bytes()
    list(run.advance(3))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        run.save_state(tmp_path)
    assert (tmp_path / STATE_FILE).read_bytes() == before


def test_given_prompts_replace_the_prompt_file(
    recorded: Path, some_prompts: Callable[..., Prompts], middling_vocab: Vocab
) -> None:
    prompts = some_prompts(middling_vocab, 1, seed=9)
    held = Prompts(("only-a", "only-b"), prompts.family, prompts.attrs)
    run = ReinforceRun(recording(prompt_file="data/none.jsonl", batch_prompts=8), recorded, prompts=held)
    list(run.advance(2))
    assert {record["id"] for row in seen(recorded) for record in row["records"]} == {"only-a", "only-b"}


def family_counts(task: Path, **changes: object) -> Counter[str]:
    run = ReinforceRun(recording(batch_prompts=900, steps=1, **changes), task)
    list(run.advance(1))
    return Counter(record["family"] for record in seen(task)[-1]["records"][::2])


def test_families_come_up_by_their_weights_whatever_the_size_of_their_pool(recorded: Path) -> None:
    path = recorded / "data/prompts_train.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:5], lines[5]]) + "\n")  # five prompts of p, one of q
    equal = family_counts(recorded)
    assert chisquare([equal["p"], equal["q"]]).pvalue > 1e-3
    weighted = family_counts(recorded, family_weights={"p": 1, "q": 3})
    assert chisquare([weighted["p"], weighted["q"]], [225, 675]).pvalue > 1e-3
    assert family_counts(recorded, family_weights={"q": 2.0}).keys() == {"q"}


@pytest.mark.parametrize(
    ("family_weights", "message"),
    [
        ({"p": 1, "granite": 1}, "family_weights: unknown family 'granite'; known: p, q"),
        ({"p": 1, "granite": 0}, "family_weights: unknown family 'granite'"),
        ({"q": 1}, "family_weights: q has weight 1, but the prompt file holds none of its prompts"),
    ],
)
def test_a_family_that_cannot_be_drawn_is_refused(
    small_task: Path, family_weights: dict[str, float], message: str
) -> None:
    path = small_task / "data/prompts_train.jsonl"
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines() if '"p"' in line))
    with pytest.raises(InputError, match=re.escape(message)):
        ReinforceRun(RunConfig(family_weights=family_weights), small_task)


def test_weights_that_explode_stop_the_run_with_its_step(small_task: Path) -> None:
    run = ReinforceRun(RunConfig(lr=1e30, steps=5, batch_prompts=2, policy_init="other_policy"), small_task)
    with pytest.raises(TrainingError, match=r"step [2-5]: gradient norm nan; lower lr \(1e\+30\)"):
        list(run.advance(5))


@pytest.mark.parametrize("key", ["policy_init", "policy_ref", "reward_model", "prompt_file", "reward_wrapper"])
def test_a_path_that_is_not_there_is_named(small_task: Path, key: str) -> None:
    with pytest.raises(InputError, match="nowhere"):
        ReinforceRun(RunConfig(**{key: "nowhere"}), small_task)  # type: ignore[arg-type]


def test_a_wrapper_that_ignores_the_scores_is_trained_on_its_own_rewards(small_task: Path) -> None:
    source = "def transform(records, tokens, rewards):\n    return [float(t.count('a')) for t in tokens]\n"
    (small_task / "count.py").write_text(source)
    (small_task / "blind.py").write_text("USES_REWARDS = False\n" + source)
    results = []
    for name in ("count.py", "blind.py"):
        run = ReinforceRun(RunConfig(reward_wrapper=name, steps=6, log_every=3, batch_prompts=2), small_task)
        rows = list(run.advance(6))
        assert all(row.keys() >= LOG_KEYS for row in rows)
        results.append(weights(run))
    assert_same_bits(*results)


def test_the_last_log_row_of_a_blind_wrapper_has_the_proxy_reward(small_task: Path) -> None:
    (small_task / "blind.py").write_text("USES_REWARDS = False\ndef transform(r, t, s):\n    return [1.0] * len(r)\n")
    run = ReinforceRun(RunConfig(reward_wrapper="blind.py", steps=4, log_every=3, batch_prompts=2), small_task)
    assert all(row.keys() >= LOG_KEYS for row in run.advance(4))


def test_training_raises_the_reward_it_is_paid(small_task: Path) -> None:
    (small_task / "count.py").write_text(
        "def transform(records, tokens, rewards):\n    return [float(t.count('a')) for t in tokens]\n"
    )
    config = RunConfig(reward_wrapper="count.py", kl_coef=0.0, steps=60, log_every=2, lr=1e-2, batch_prompts=8)
    run = ReinforceRun(config, small_task)
    rows = list(run.advance(60))
    assert rows[-1]["shaped_reward"] > rows[0]["shaped_reward"] + 0.5
    assert rows[-1]["kl"] > rows[0]["kl"] > 0
    assert rows[-1]["shaped_reward"] <= load_vocab(small_task).resp_len
