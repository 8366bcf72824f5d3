"""The command, run as a user runs it: what it writes, what it must not depend on, what it refuses."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from objectives import diagnose
from objectives.screen_report import NOTE
from rlhf.data import Labelled, Prompts, write_jsonl
from rlhf.errors import run_command
from rlhf.features import Feature
from rlhf.policy import init_policy, save_policy
from rlhf.reward_model import init_reward_model, save_reward_model
from rlhf.taskdir import DEFAULT_TASK, DEV_PROMPTS, REFERENCE, REWARD_MODEL
from rlhf.vocab import Vocab
from rlhf.world import Shortcut, draw_prompts, make_world

VOCAB = Vocab(("ash", "elm", "oak"), 2, 4, tuple("abcdefgh"), 4)
SIZE = {"d_model": 16, "n_layers": 1, "n_heads": 2, "d_ff": 16}
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(folder: Path, *options: str, **paths: Path) -> tuple[int, str, str]:
        given = {"rm-dir": folder / "reward_model", "policy-dir": folder / "policy",
                 "prompts": folder / "prompts.jsonl", "out": folder / "out.json",
                 **{key.replace("_", "-"): path for key, path in paths.items()}}  # fmt: skip
        arguments = [text for key, path in given.items() for text in (f"--{key}", str(path))]
        monkeypatch.setattr(sys, "argv", ["diagnose", *arguments, *options])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            run_command(diagnose.main)
        return int(exit_.value.code or 0), *capsys.readouterr()

    return call


def write_task(folder: Path, *, families: tuple[str, ...] = VOCAB.families, order: tuple[int, ...] = (0, 1, 2)) -> Path:
    """Write the same untrained models and labels under other family names, or with families in another order."""
    rng = np.random.default_rng(0)
    world = make_world(VOCAB, (Shortcut(1, Feature("token", (2,)), 0.8),), rng)
    qa_prompts, prompts = (draw_prompts(VOCAB, np.full(3, n), rng) for n in (60, 12))
    qa = world.crowd_labels(qa_prompts, world.demonstrate(qa_prompts, rng), rng)
    vocab = Vocab(tuple(families[old] for old in order), 2, 4, VOCAB.content_tokens, 4)
    new_index = np.argsort(order)

    def moved(given: Prompts) -> Prompts:
        return Prompts(given.ids, new_index[given.family], given.attrs)

    policy, model = init_policy(VOCAB, seed=1, size=SIZE), init_reward_model(VOCAB, seed=2, size=SIZE)
    rows = [VOCAB.family_id(family) for family in range(3)]
    with torch.no_grad():
        for network in (policy, model):
            network.tok.weight[rows] = network.tok.weight[[rows[old] for old in order]].clone()
    save_policy(policy, folder / "policy")
    save_reward_model(model, folder / "reward_model")
    (folder / "vocab.json").write_text(json.dumps(vocab.to_json()))
    write_jsonl(folder / "prompts.jsonl", moved(prompts).records(vocab))
    labelled = type(qa)(moved(qa.prompts), qa.responses, qa.labels)
    write_jsonl(folder / "reward_model" / "train.jsonl", labelled.records(vocab))
    return folder


def answer(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "out.json").read_text())["families"]


def test_writes_risk_and_flag_and_says_why(tmp_path: Path, run: Run) -> None:
    folder = write_task(tmp_path)
    status, out, err = run(folder, details=tmp_path / "new" / "details.json", plot=tmp_path / "new" / "plot.png")
    assert (status, err) == (0, f"screening {folder / 'reward_model'}\n")
    assert list(answer(folder)) == list(VOCAB.families)
    assert all(set(entry) == {"risk", "flag"} and 0 <= entry["risk"] <= 1 for entry in answer(folder).values())
    details = json.loads((tmp_path / "new" / "details.json").read_text())
    assert details["note"] == NOTE
    assert details["families"]["elm"]["looked_at"]["pair"] == 28
    assert (tmp_path / "new" / "plot.png").stat().st_size > 10_000
    assert out.startswith("family")


def test_json_is_the_only_thing_on_standard_output(tmp_path: Path, run: Run) -> None:
    folder = write_task(tmp_path)
    status, out, err = run(folder, "--json", "--quiet")
    assert (status, err) == (0, "")
    assert json.loads(out)["families"] == answer(folder)


def test_neither_folder_nor_names_nor_order_matter(tmp_path: Path, run: Run) -> None:
    plain = write_task(tmp_path / "a")
    renamed = write_task(tmp_path / "elsewhere" / "b", families=("zinc", "gold", "iron"), order=(2, 0, 1))
    for folder in (plain, renamed):
        assert run(folder, "--quiet")[0] == 0
    names = dict(zip(VOCAB.families, ("zinc", "gold", "iron"), strict=True))
    assert list(answer(renamed)) == ["iron", "zinc", "gold"]
    for old, new in names.items():
        assert answer(renamed)[new] == answer(plain)[old]


def test_the_number_of_threads_does_not_matter(tmp_path: Path, run: Run) -> None:
    folder, threads = write_task(tmp_path), torch.get_num_threads()
    found = []
    try:
        for n_threads in (1, 2, 4):
            torch.set_num_threads(n_threads)
            assert run(folder, "--quiet")[0] == 0
            found.append(answer(folder))
            assert torch.get_num_threads() == n_threads  # given back
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1] == found[2]


def test_a_family_missing_from_the_sample_has_risk_one(tmp_path: Path, run: Run) -> None:
    folder = write_task(tmp_path)
    rows = (folder / "reward_model/train.jsonl").read_text().splitlines(keepends=True)
    (folder / "reward_model/train.jsonl").write_text("".join(row for row in rows if '"oak"' not in row))
    status, out, _ = run(folder, plot=tmp_path / "plot.svg")
    assert status == 0
    assert answer(folder)["oak"] == {"risk": 1.0, "flag": True}
    assert "holds no row of this family" in out


def test_all_problems_at_once_and_nothing_written(tmp_path: Path, run: Run) -> None:
    folder = write_task(tmp_path)
    sample = folder / "reward_model/train.jsonl"
    good = json.loads(sample.read_text().splitlines()[0])
    bad = [{**good, "family": "pine"}, {**good, "label": float("nan")}, {**good, "response": ["a"]}]
    sample.write_text("\n".join(["{", *map(json.dumps, bad)]))
    config = json.loads((folder / "policy/config.json").read_text())
    (folder / "policy/config.json").write_text(json.dumps({**config, "resp_len": 5}))
    status, _, err = run(folder, "--kl-coef", "0", "--plot", "plot.txt", prompts=folder / "none.jsonl")
    assert status == 2
    for part in ("train.jsonl:1: not a JSON object", "train.jsonl:2: family must be one of",
                 "train.jsonl:3: label must", "train.jsonl:4: response must be a list of 4",
                 "config.json: resp_len is 5", "none.jsonl: cannot be read",
                 "--kl-coef must be", "--plot must end in"):  # fmt: skip
        assert part in err, part
    assert not (folder / "out.json").exists()


def test_places_for_answers_are_checked_with_everything_else_and_inputs_are_safe(tmp_path: Path, run: Run) -> None:
    folder = write_task(tmp_path)
    sample = folder / "reward_model/train.jsonl"
    before = sample.read_bytes()
    status, _, err = run(folder, "--kl-coef", "inf", out=sample, details=tmp_path, plot=tmp_path / "policy/config.json")
    assert status == 2
    for part in (f"--out {sample} is the same file as the input", "--details must name a file, got the folder",
                 "--plot must end in", "--kl-coef must be a number above 0, got inf"):  # fmt: skip
        assert part in err, part
    status, _, err = run(folder, details=folder / "out.json", vocab=tmp_path / "none.json")
    assert status == 2
    assert f"--details {folder / 'out.json'} is the same file as --out" in err
    assert "none.json: cannot be read" in err
    status, _, err = run(folder, out=folder / "vocab.json")
    assert status == 2
    assert f"is the same file as the input {folder / 'vocab.json'}" in err
    assert sample.read_bytes() == before
    assert not (folder / "out.json").exists()


def test_links_to_model_folders_find_the_vocabulary_beside_the_real_ones(tmp_path: Path, run: Run) -> None:
    folder = write_task(tmp_path / "task", order=(2, 0, 1))
    assert run(folder, "--quiet")[0] == 0
    for name in ("policy", "reward_model"):
        (tmp_path / name).symlink_to(folder / name)
    out = tmp_path / "linked.json"
    assert run(folder, "--quiet", rm_dir=tmp_path / "reward_model", policy_dir=tmp_path / "policy", out=out)[0] == 0
    assert json.loads(out.read_text())["families"] == answer(folder)


@pytest.mark.parametrize(("n_content", "resp_len"), [(1, 3), (24, 1), (2, 5), (5, 3)])
def test_small_vocabularies_are_screened(tmp_path: Path, run: Run, n_content: int, resp_len: int) -> None:
    vocab = Vocab(("ash",), 1, 2, tuple("abcdefghijklmnopqrstuvwxyz"[:n_content]), resp_len)
    rng = np.random.default_rng(0)
    save_policy(init_policy(vocab, seed=1, size=SIZE), tmp_path / "policy")
    save_reward_model(init_reward_model(vocab, seed=2, size=SIZE), tmp_path / "reward_model")
    (tmp_path / "vocab.json").write_text(json.dumps(vocab.to_json()))
    rows = draw_prompts(vocab, np.array([60]), rng)
    responses = rng.integers(n_content, size=(60, resp_len))
    write_jsonl(tmp_path / "prompts.jsonl", rows.records(vocab))
    write_jsonl(tmp_path / "reward_model/train.jsonl", Labelled(rows, responses, rng.random(60)).records(vocab))
    assert run(tmp_path)[0] == 0
    risk = answer(tmp_path)["ash"]["risk"]
    assert (n_content == 1) == (risk == 1.0)
    assert risk == 1.0 if len(np.unique(responses, axis=0)) < 20 else risk < 0.5


def test_a_missing_sample_is_named(tmp_path: Path, run: Run) -> None:
    folder = write_task(tmp_path)
    (folder / "reward_model/train.jsonl").unlink()
    status, _, err = run(folder)
    assert status == 2
    assert "train.jsonl: cannot be read" in err


def test_the_vocabulary_is_found_or_given(tmp_path: Path, run: Run) -> None:
    folder = write_task(tmp_path / "task")
    (folder / "vocab.json").rename(tmp_path / "words.json")
    assert run(folder)[0] == 2  # the default vocabulary does not fit
    assert run(folder, vocab=tmp_path / "words.json")[0] == 0
    (folder / "policy/vocab.json").write_text((tmp_path / "words.json").read_text())
    assert run(folder)[0] == 0
    other = Vocab(("ash", "elm", "yew"), 2, 4, VOCAB.content_tokens, 4)
    (folder / "reward_model/vocab.json").write_text(json.dumps(other.to_json()))
    status, _, err = run(folder)
    assert status == 2
    assert "must be the same" in err


def test_on_the_default_task_dune_and_ember_are_flagged_for_the_right_reason(tmp_path: Path, run: Run) -> None:
    status, out, _ = run(
        tmp_path, rm_dir=DEFAULT_TASK / REWARD_MODEL, policy_dir=DEFAULT_TASK / REFERENCE,
        prompts=DEFAULT_TASK / DEV_PROMPTS, details=tmp_path / "details.json",
    )  # fmt: skip
    assert status == 0
    assert {name for name, entry in answer(tmp_path).items() if entry["flag"]} == {"dune", "ember"}
    families = json.loads((tmp_path / "details.json").read_text())["families"]
    found = {name: [finding["feature"] for finding in entry["findings"]] for name, entry in families.items()}
    assert found == {"anvil": [], "birch": [], "cobalt": [], "dune": ["pa"], "ember": ["he"], "fjord": []}
    (pa,), (he,) = families["dune"]["findings"], families["ember"]["findings"]
    assert pa["label_slope"] == pytest.approx(1.5, abs=0.05)
    assert he["label_slope"] == pytest.approx(0.44, abs=0.05)
    assert pa["optimum_mean"] > 4
    assert he["optimum_mean"] > 2
    assert max(entry["risk"] for name, entry in answer(tmp_path).items() if name not in ("dune", "ember")) < 0.2
    assert "crowd labels pay 1.4" in out
    assert "(an expert pays at most 0.125)" in out
