"""The command lines of `rlhf`: train_sft, train_rm, train_rl, dev_eval, bon."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlhf import bon, dev_eval, train_rl, train_rm, train_sft
from rlhf.data import read_labelled, read_prompts, write_jsonl
from rlhf.policy import load_policy
from rlhf.reward_model import load_reward_model, save_reward_model
from rlhf.vocab import DEFAULT_VOCAB, load_vocab

Command = Callable[..., int]
LOG_KEYS = {"step", "proxy_reward", "kl", "shaped_reward", "entropy", "loss", "elapsed_s"}
Capture = pytest.CaptureFixture[str]


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_config(path: Path, **values: object) -> Path:
    path.write_text(json.dumps({"steps": 4, "batch_prompts": 2, "log_every": 2, **values}))
    return path


# --- train_rl ---------------------------------------------------------------------------------------------


def test_train_rl_writes_a_run_directory(command: Command, small_task: Path, tmp_path: Path, capsys: Capture) -> None:
    config, out = write_config(tmp_path / "c.json", save_every=3), tmp_path / "deep/run"
    overrides = ["--override", "steps=5", "--override", 'reward_wrapper="clip"']
    assert command(train_rl.main, "--config", config, "--out", out, "--task", small_task, *overrides) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert [line.split("  ")[0] for line in shown.err.splitlines()] == ["step 2/5", "step 4/5", "step 5/5"]
    resolved = json.loads((out / "run_config.json").read_text())
    assert len(resolved) == 16
    assert (resolved["policy_init"], resolved["policy_ref"]) == ("policy", "policy")
    assert (resolved["steps"], resolved["reward_wrapper"], resolved["kl_coef"]) == (5, "clip", 0.1)
    rows = rows_of(out / "log.jsonl")
    assert [row["step"] for row in rows] == [2, 4, 5]
    assert all(row.keys() >= LOG_KEYS for row in rows)
    assert sorted(path.name for path in out.glob("step_*")) == ["step_3", "step_5"]
    vocab = load_vocab(small_task)
    final = load_policy(out, vocab).state_dict()
    at_3, at_5 = (load_policy(out / f"step_{step}", vocab).state_dict() for step in (3, 5))
    assert all(torch.equal(final[name], at_5[name]) for name in final)
    assert not torch.equal(final["head.weight"], at_3["head.weight"])


def test_a_run_directory_reproduces_itself(command: Command, small_task: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.json", seed=3)
    for source, out in ((config, "one"), (tmp_path / "one/run_config.json", "two")):
        assert command(train_rl.main, "--config", source, "--out", tmp_path / out, "--task", small_task, "--quiet") == 0
    one, two = ((tmp_path / name / "policy.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two


def test_quiet_is_quiet_and_the_task_comes_from_the_variable(
    command: Command, small_task: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASK", str(small_task))
    config = write_config(tmp_path / "c.json")
    assert command(train_rl.main, "--config", config, "--out", tmp_path / "run", "--quiet") == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kl": 0.1}, "c.json: unknown config key 'kl'"),
        ({"steps": "many"}, "c.json: steps must be a whole number from 1 to 2147483647, got 'many'"),
        ({"lr": math.nan}, "c.json: lr must be a number above 0, got nan"),
        ({"family_weights": {"granite": 1}}, "family_weights: unknown family 'granite'; known: p, q"),
        ({"reward_wrapper": "none.py"}, "got 'none.py'"),
        ({"policy_init": "nowhere"}, "nowhere/config.json: cannot be read"),
    ],
)
def test_train_rl_refuses_bad_input_and_writes_nothing(
    command: Command, small_task: Path, capsys: Capture, values: dict[str, object], message: str
) -> None:
    config, out = write_config(small_task / "c.json", **values), small_task / "run"
    assert command(train_rl.main, "--config", config, "--out", out, "--task", small_task) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_train_rl_neither_overwrites_a_run_nor_resumes_nothing(
    command: Command, small_task: Path, tmp_path: Path, capsys: Capture
) -> None:
    arguments = ["--config", write_config(tmp_path / "c.json"), "--out", tmp_path / "run", "--task", small_task]
    assert command(train_rl.main, *arguments, "--resume") == 2
    assert "holds no saved state to resume from" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert command(train_rl.main, *arguments, "--quiet") == 0
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    assert command(train_rl.main, *arguments) == 2
    assert "already holds log.jsonl, run_config.json, policy.safetensors, config.json" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_a_run_that_can_be_resumed_says_so(command: Command, small_task: Path, tmp_path: Path, capsys: Capture) -> None:
    config = write_config(tmp_path / "c.json", save_every=2)
    arguments = ["--config", config, "--out", tmp_path / "run", "--task", small_task, "--quiet"]
    assert command(train_rl.main, *arguments) == 0
    assert command(train_rl.main, *arguments) == 2
    assert "already holds a run; give another folder, or go on with it by --resume" in capsys.readouterr().err
    with (tmp_path / "run/log.jsonl").open("a") as log:
        log.write("{half\n")
    assert command(train_rl.main, *arguments, "--resume") == 2
    assert "log.jsonl: is not the log of a run" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["policy", "reward_model"])
def test_training_never_writes_over_a_model(
    command: Command, small_task: Path, tmp_path: Path, capsys: Capture, name: str
) -> None:
    task = shutil.copytree(small_task, tmp_path / "task")
    before = {path: path.read_bytes() for path in (task / name).iterdir()}
    data = task / "reward_model/train.jsonl"
    for main, option, value in (
        (train_rl.main, "--config", write_config(tmp_path / "c.json")), (train_rm.main, "--data", data),
        (train_sft.main, "--data", data),
    ):  # fmt: skip
        assert command(main, option, value, "--out", task / name, "--task", task) == 2
        assert re.search(r"--out .*: already holds .*config.json; give another folder", capsys.readouterr().err)
    assert {path: path.read_bytes() for path in (task / name).iterdir()} == before


def test_a_loss_that_is_not_finite_saves_no_model(
    command: Command, small_task: Path, tmp_path: Path, capsys: Capture
) -> None:
    rows = rows_of(small_task / "reward_model/train.jsonl")
    write_jsonl(tmp_path / "wild.jsonl", [{**row, "label": 1e300} for row in rows])
    arguments = ["--data", tmp_path / "wild.jsonl", "--out", tmp_path / "rm", "--task", small_task]
    assert command(train_rm.main, *arguments) == 1
    assert "epoch 1: the loss is inf; check the data, or lower --lr" in capsys.readouterr().err
    assert not (tmp_path / "rm").exists()


def test_training_options_data_and_task_are_checked_together(command: Command, tmp_path: Path, capsys: Capture) -> None:
    bad = ["--data", tmp_path / "none", "--out", tmp_path / "new", "--task", tmp_path / "nowhere", "--epochs", 0]
    assert command(train_rm.main, *bad) == 2
    err = capsys.readouterr().err
    assert "--epochs must be at least 1" in err
    assert f"{tmp_path / 'nowhere'}: no such task directory; give one with --task DIR or TASK" in err


# Ends its own process like a machine that loses power, at a chosen call; otherwise the scores, scaled.
KILLER = f"""
import os
calls = int(os.environ.get("CALLS_LEFT", "-1"))

def transform(records, response_tokens, rewards):
    global calls
    if calls == 0:
        os.kill(os.getpid(), {int(signal.SIGKILL)})
    calls -= 1
    return [3 * reward for reward in rewards]
"""


def test_a_killed_run_resumes_to_the_bits_of_an_uninterrupted_one(
    command: Command, small_task: Path, tmp_path: Path
) -> None:
    (small_task / "killer.py").write_text(KILLER)
    values: dict[str, object] = {"steps": 11, "log_every": 3, "save_every": 4, "reward_wrapper": "killer.py"}
    config = write_config(tmp_path / "c.json", policy_init="other_policy", **values)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def run(out: Path, *options: str, **variables: str) -> int:
        train = [sys.executable, "-m", "rlhf.train_rl", "--config", str(config), "--task", str(small_task), "--quiet"]
        return subprocess.run(
            [*train, "--out", str(out), *options], env={**environment, **variables}, check=False
        ).returncode

    assert run(tmp_path / "killed", CALLS_LEFT="7") == -signal.SIGKILL  # at step 8: after the row of step 6
    assert [row["step"] for row in rows_of(tmp_path / "killed/log.jsonl")] == [3, 6]
    assert not (tmp_path / "killed/policy.safetensors").exists()
    assert run(tmp_path / "killed", "--resume") == 0
    assert command(train_rl.main, "--config", config, "--out", tmp_path / "whole", "--task", small_task) == 0
    for name in ("policy.safetensors", "step_4/policy.safetensors", "step_8/policy.safetensors", "run_config.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    killed, whole = (rows_of(tmp_path / out / "log.jsonl") for out in ("killed", "whole"))
    for row in killed + whole:
        del row["elapsed_s"]
    assert [row["step"] for row in whole] == [3, 6, 9, 11]
    assert killed == whole


def test_resuming_under_another_configuration_is_refused(
    command: Command, small_task: Path, tmp_path: Path, capsys: Capture
) -> None:
    config = write_config(tmp_path / "c.json", save_every=2)
    arguments = ["--config", config, "--out", tmp_path / "run", "--task", small_task, "--quiet"]
    assert command(train_rl.main, *arguments) == 0
    before = (tmp_path / "run/run_config.json").read_bytes()
    assert command(train_rl.main, *arguments, "--resume", "--override", "kl_coef=0.7") == 2
    assert "saved with kl_coef = 0.1, cannot go on with 0.7" in capsys.readouterr().err
    assert (tmp_path / "run/run_config.json").read_bytes() == before


def test_resuming_with_fewer_steps_than_were_trained_is_refused(
    command: Command, small_task: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "c.json", save_every=2)
    arguments = ["--config", config, "--out", tmp_path / "run", "--task", small_task, "--quiet"]
    assert command(train_rl.main, *arguments) == 0
    assert command(train_rl.main, *arguments, "--resume", "--override", "steps=2") == 2


# --- train_sft and train_rm -------------------------------------------------------------------------------


def test_train_sft_learns_its_demonstrations(
    command: Command, small_task: Path, tmp_path: Path, capsys: Capture
) -> None:
    vocab = load_vocab(small_task)
    prompts = read_prompts(small_task / "data/prompts_train.jsonl", vocab).records(vocab)
    answers = {"p": ["a", "b", "c"], "q": ["f", "e", "d"]}
    write_jsonl(tmp_path / "demos.jsonl", [{**p, "response": answers[p["family"]]} for p in prompts * 40])
    arguments = ["--data", tmp_path / "demos.jsonl", "--task", small_task, "--epochs", 30]
    assert command(train_sft.main, *arguments, "--out", tmp_path / "policy") == 0
    losses = [float(line.rsplit(" ", 1)[1]) for line in capsys.readouterr().err.splitlines()]
    assert len(losses) == 30
    assert losses[0] > math.log(6) / 2
    assert losses[-1] < 0.1
    policy = load_policy(tmp_path / "policy", vocab)
    sampled, _ = policy.sample(torch.tensor([[2, 4, 4, 1], [3, 7, 5, 1]]), torch.full((2, 3), 0.5))
    assert sampled.tolist() == [[0, 1, 2], [5, 4, 3]]


@pytest.mark.parametrize(("main", "weights"), [(train_sft.main, "policy"), (train_rm.main, "rm")])
def test_supervised_training_depends_on_the_seed_alone_and_can_be_quiet(
    command: Command, small_task: Path, capsys: Capture, main: Callable[[], None], weights: str
) -> None:
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        arguments = ["--data", small_task / "reward_model/train.jsonl", "--out", small_task / name, "--epochs", 2]
        assert command(main, *arguments, "--seed", seed, "--task", small_task, "--quiet") == 0
    assert capsys.readouterr() == ("", "")
    one, same, other = ((small_task / n / f"{weights}.safetensors").read_bytes() for n in ("one", "same", "other"))
    assert one == same
    assert one != other


def test_train_rm_fits_its_labels(command: Command, small_task: Path, tmp_path: Path) -> None:
    vocab = load_vocab(small_task)
    prompts = read_prompts(small_task / "data/prompts_train.jsonl", vocab).records(vocab)
    rng = np.random.default_rng(0)
    rows = []
    for prompt in prompts * 40:
        response = [vocab.content_tokens[token] for token in rng.integers(6, size=3)]
        rows.append({**prompt, "response": response, "label": response.count("b") - 0.5})
    write_jsonl(tmp_path / "rows.jsonl", rows)
    arguments = ["--data", tmp_path / "rows.jsonl", "--out", tmp_path / "rm", "--task", small_task, "--quiet"]
    assert command(train_rm.main, *arguments, "--epochs", 20) == 0
    labelled = read_labelled(tmp_path / "rows.jsonl", vocab)
    scores = load_reward_model(tmp_path / "rm", vocab).score(
        labelled.prompts.tokens(vocab), torch.from_numpy(labelled.responses)
    )
    assert ((scores.numpy() - labelled.labels) ** 2).mean() < 0.1 * labelled.labels.var()


@pytest.mark.parametrize("main", [train_sft.main, train_rm.main])
def test_supervised_training_refuses_bad_rows_and_writes_nothing(
    command: Command, small_task: Path, tmp_path: Path, capsys: Capture, main: Callable[[], None]
) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"id": "p-1", "family": "p", "attrs": [0, 0], "response": ["a"], "label": 1}\n'
    )
    arguments = ["--data", tmp_path / "rows.jsonl", "--out", tmp_path / "model", "--task", small_task]
    assert command(main, *arguments) == 2
    assert f"{tmp_path / 'rows.jsonl'}:1: response must be a list of 3 tokens" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


# --- dev_eval ---------------------------------------------------------------------------------------------


def test_dev_eval_of_the_reference(command: Command, tiny_task: Path, tmp_path: Path, capsys: Capture) -> None:
    arguments = ["--policy", tiny_task / "policy", "--task", tiny_task, "--n", 3, "--out", tmp_path / "deep/eval.json"]
    assert command(dev_eval.main, *arguments) == 0
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert "evaluating" in shown.err
    assert json.loads((tmp_path / "deep/eval.json").read_text()) == document
    assert document["kl_mean"] == pytest.approx(0, abs=1e-5)
    assert document["n_samples"] == 3 * document["n_prompts"]
    assert document["proxy_p50"] <= document["proxy_p90"]
    expert = read_labelled(tiny_task / "data/gold_calib.jsonl", DEFAULT_VOCAB)
    model = load_reward_model(tiny_task / "reward_model", DEFAULT_VOCAB)
    scores = model.score(expert.prompts.tokens(DEFAULT_VOCAB), torch.from_numpy(expert.responses)).double().numpy()
    for name, rows in [
        ("overall", np.ones(len(expert), dtype=bool)),
        *((family, expert.prompts.family == i) for i, family in enumerate(DEFAULT_VOCAB.families)),
    ]:
        x, y = scores[rows] - scores[rows].mean(), expert.labels[rows] - expert.labels[rows].mean()
        pearson = (x * y).sum() / math.sqrt((x * x).sum() * (y * y).sum())
        assert document["rm_expert_pearson"][name] == pytest.approx(pearson, abs=1e-4)


def test_dev_eval_reads_other_prompts_and_measures_kl(
    command: Command, small_task: Path, tmp_path: Path, capsys: Capture
) -> None:
    vocab = load_vocab(small_task)
    prompts = read_prompts(small_task / "data/prompts_train.jsonl", vocab)
    write_jsonl(tmp_path / "two.jsonl", prompts.records(vocab)[:2])
    arguments = ["--prompts", tmp_path / "two.jsonl", "--n", 4000, "--task", small_task, "--quiet"]
    assert command(dev_eval.main, "--policy", small_task / "other_policy", *arguments) == 0
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert shown.err == ""
    assert (document["n_prompts"], document["n_samples"]) == (2, 8000)
    # The exact KL: a sum over all 216 responses.
    policy, reference = (load_policy(small_task / name, vocab) for name in ("other_policy", "policy"))
    responses = torch.cartesian_prod(*[torch.arange(6)] * 3)
    with torch.no_grad():
        tokens = prompts.tokens(vocab)[:2]
        log_pi, log_ref = (
            model.response_logp(tokens, responses.repeat(2, 1))
            .gather(-1, responses.repeat(2, 1)[..., None])
            .sum((1, 2))
            for model in (policy, reference)
        )
    exact = (log_pi.exp() * (log_pi - log_ref)).sum().item() / 2
    spread = math.sqrt((log_pi.exp() * (log_pi - log_ref) ** 2).sum().item() / 2 / 8000)
    assert document["kl_mean"] == pytest.approx(exact, abs=4 * spread)


def test_dev_eval_of_a_constant_reward_model(command: Command, small_task: Path, capsys: Capture) -> None:
    model = load_reward_model(small_task / "reward_model", load_vocab(small_task))
    torch.nn.init.zeros_(model.head[2].weight)
    torch.nn.init.constant_(model.head[2].bias, 0.25)
    save_reward_model(model, small_task / "reward_model")
    assert command(dev_eval.main, "--policy", small_task / "policy", "--task", small_task) == 0
    document = json.loads(capsys.readouterr().out)
    assert [document[f"proxy_{name}"] for name in ("mean", "std", "p50", "p90")] == [0.25, 0, 0.25, 0.25]
    assert document["rm_expert_pearson"] == {"overall": None, "p": None, "q": None}


def test_dev_eval_of_one_response_is_valid_json(
    command: Command, small_task: Path, tmp_path: Path, capsys: Capture
) -> None:
    vocab = load_vocab(small_task)
    prompts = read_prompts(small_task / "data/prompts_train.jsonl", vocab)
    write_jsonl(tmp_path / "one.jsonl", prompts.records(vocab)[:1])
    arguments = ["--policy", small_task / "policy", "--prompts", tmp_path / "one.jsonl", "--task", small_task]
    assert command(dev_eval.main, *arguments) == 0
    assert "NaN" not in capsys.readouterr().out


def test_dev_eval_refuses_to_sample_nothing(command: Command, small_task: Path) -> None:
    assert command(dev_eval.main, "--policy", small_task / "policy", "--task", small_task, "--n", 0) == 2


# --- bon --------------------------------------------------------------------------------------------------


def test_bon_keeps_a_response_the_reward_model_scores_so(
    command: Command, small_task: Path, tmp_path: Path, capsys: Capture
) -> None:
    arguments = [
        "--policy",
        small_task / "policy",
        "--task",
        small_task,
        "--limit",
        6,
        "--out",
        tmp_path / "kept.jsonl",
    ]
    assert command(bon.main, *arguments, "--n", 400) == 0
    summary, rows = json.loads(capsys.readouterr().out), rows_of(tmp_path / "kept.jsonl")
    vocab = load_vocab(small_task)
    model = load_reward_model(small_task / "reward_model", vocab)
    assert [row["id"] for row in rows] == list(read_prompts(small_task / "data/prompts_dev.jsonl", vocab).ids[:6])
    everything = torch.cartesian_prod(*[torch.arange(6)] * 3)
    for row in rows:
        prompt = [2 + vocab.families.index(row["family"]), *(4 + value for value in row["attrs"]), 1]
        response = [8 + vocab.content_tokens.index(word) for word in row["response"]]
        assert row["proxy_reward"] == pytest.approx(model(torch.tensor([prompt + response])).item(), abs=1e-5)
        # Of 400 draws among 216 responses the best is near the top of all of them.
        better = (model.score(torch.tensor([prompt]), everything) > row["proxy_reward"] + 1e-5).double().mean()
        assert better < 0.25
    assert (summary["n"], summary["n_prompts"]) == (400, 6)
    assert summary["best_proxy_mean"] == pytest.approx(sum(row["proxy_reward"] for row in rows) / 6, abs=1e-5)
    assert summary["best_proxy_mean"] > summary["proxy_mean"]
    assert summary["kl_upper_bound"] == pytest.approx(math.log(400) - 399 / 400)


def test_best_of_one_is_plain_sampling(command: Command, small_task: Path, capsys: Capture) -> None:
    assert command(bon.main, "--policy", small_task / "policy", "--task", small_task, "--n", 1, "--quiet") == 0
    shown = capsys.readouterr()
    summary = json.loads(shown.out)
    assert shown.err == ""
    assert summary["best_proxy_mean"] == summary["proxy_mean"]
    assert (summary["kl_upper_bound"], summary["n_prompts"]) == (0, 10)


@pytest.mark.parametrize("options", [["--n", 0], ["--limit", 0], ["--n", -3]])
def test_bon_refuses_to_choose_from_nothing(
    command: Command, small_task: Path, tmp_path: Path, capsys: Capture, options: list[object]
) -> None:
    arguments = ["--policy", small_task / "policy", "--task", small_task, "--out", tmp_path / "kept.jsonl"]
    assert command(bon.main, *arguments, *options) == 2
    assert "--n and --limit must be at least 1" in capsys.readouterr().err
    assert not (tmp_path / "kept.jsonl").exists()


@pytest.mark.parametrize("main", [dev_eval.main, bon.main])
def test_a_policy_of_another_vocabulary_is_refused(
    command: Command, small_task: Path, tiny_task: Path, capsys: Capture, main: Callable[[], None]
) -> None:
    assert command(main, "--policy", tiny_task / "policy", "--task", small_task) == 2
    assert "vocab_size is 40, but the task's vocabulary asks for 14" in capsys.readouterr().err


def test_weights_are_safetensors(small_task: Path) -> None:
    assert load_file(small_task / "policy/policy.safetensors").keys() >= {"tok.weight", "head.weight"}


@pytest.mark.parametrize("module", [dev_eval, bon])
def test_all_that_is_wrong_with_an_evaluation_is_said_at_once(
    command: Command, small_task: Path, tmp_path: Path, capsys: Capture, module: ModuleType
) -> None:
    bad = ["--policy", tmp_path / "nowhere", "--out", tmp_path, "--n", 0]
    assert command(module.main, "--task", small_task, *bad) == 2
    err = capsys.readouterr().err
    for part in ("nowhere", f"--out must name a file, got the folder {tmp_path}", "must be at least 1"):
        assert part in err, part


def test_training_into_a_file_is_refused_before_it_begins(command: Command, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").write_text("kept")
    for main, option in ((train_sft.main, "--data"), (train_rm.main, "--data"), (train_rl.main, "--config")):
        assert command(main, option, tmp_path / "none", "--out", tmp_path / "file") == 2
        assert f"--out {tmp_path / 'file'}: {tmp_path / 'file'} is not a folder" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "kept"
