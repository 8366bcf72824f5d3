"""Small vocabularies, models and task directories for the tests of `rlhf`."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf.data import Prompts, write_jsonl
from rlhf.errors import run_command
from rlhf.policy import Policy, init_policy, save_policy
from rlhf.reward_model import RewardModel, init_reward_model, save_reward_model
from rlhf.vocab import Vocab
from rlhf.world import draw_prompts, make_world

SMALL_MODEL = {"d_model": 16, "n_layers": 2, "n_heads": 2, "d_ff": 24}
# Odd sizes: one attribute, one response position, one family, two tokens; and a middling one.
ODD_VOCABS = {
    "one_of_each": Vocab(("solo",), n_attrs=1, n_values=1, content_tokens=("x", "y"), resp_len=1),
    "one_attribute": Vocab(("left", "right"), n_attrs=1, n_values=3, content_tokens=tuple("abcde"), resp_len=4),
    "one_position": Vocab(("p", "q", "r"), n_attrs=3, n_values=2, content_tokens=tuple("abcdefg"), resp_len=1),
    "middling": Vocab(("p", "q"), n_attrs=2, n_values=4, content_tokens=tuple("abcdef"), resp_len=3),
}


@pytest.fixture(params=ODD_VOCABS)
def odd_vocab(request: pytest.FixtureRequest) -> Vocab:
    return ODD_VOCABS[request.param]


@pytest.fixture(scope="session")
def middling_vocab() -> Vocab:
    return ODD_VOCABS["middling"]


@pytest.fixture(scope="session")
def make_policy() -> Callable[..., Policy]:
    """Make a small policy whose distributions are far from uniform and whose every parameter matters."""

    def make(vocab: Vocab, *, seed: int = 0, spread: float = 0.15) -> Policy:
        policy = init_policy(vocab, seed=seed, size=SMALL_MODEL)
        _shake(policy, seed=seed, spread=spread)
        return policy

    return make


@pytest.fixture(scope="session")
def make_reward_model() -> Callable[..., RewardModel]:
    def make(vocab: Vocab, *, seed: int = 0) -> RewardModel:
        model = init_reward_model(vocab, seed=seed, size={**SMALL_MODEL, "n_heads": 4})
        _shake(model, seed=seed + 100, spread=0.3)
        return model

    return make


@pytest.fixture(scope="session")
def some_prompts() -> Callable[..., Prompts]:
    def make(vocab: Vocab, per_family: int = 2, *, seed: int = 0) -> Prompts:
        return draw_prompts(vocab, np.full(len(vocab.families), per_family), np.random.default_rng(seed))

    return make


@pytest.fixture(scope="session")
def make_task(
    make_policy: Callable[..., Policy],
    make_reward_model: Callable[..., RewardModel],
    some_prompts: Callable[..., Prompts],
) -> Callable[..., Path]:
    """Write a task directory of untrained models; `other_policy/` holds a second policy to start from."""

    def make(root: Path, vocab: Vocab, *, per_family: int = 5) -> Path:
        (root / "data").mkdir(parents=True)
        (root / "vocab.json").write_text(json.dumps(vocab.to_json()))
        save_policy(make_policy(vocab, seed=1), root / "policy")
        save_policy(make_policy(vocab, seed=2), root / "other_policy")
        save_reward_model(make_reward_model(vocab, seed=3), root / "reward_model")
        prompts, rng = some_prompts(vocab, per_family), np.random.default_rng(4)
        world = make_world(vocab, (), rng)
        responses = rng.integers(vocab.n_content, size=(len(prompts), vocab.resp_len))
        write_jsonl(root / "data/prompts_train.jsonl", prompts.records(vocab))
        write_jsonl(root / "data/prompts_dev.jsonl", prompts.records(vocab))
        write_jsonl(root / "data/gold_calib.jsonl", world.expert_labels(prompts, responses, rng).records(vocab))
        write_jsonl(root / "reward_model/train.jsonl", world.crowd_labels(prompts, responses, rng).records(vocab))
        return root

    return make


@pytest.fixture
def small_task(tmp_path: Path, make_task: Callable[..., Path], middling_vocab: Vocab) -> Path:
    """Write a task of the middling vocabulary that the test may change."""
    return make_task(tmp_path / "small_task", middling_vocab)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run a command's `main` in this process as `python -m` would, and return its exit status."""

    def run(main: Callable[[], int | None], *arguments: object) -> int:
        monkeypatch.setattr("sys.argv", ["command", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_info:
            run_command(main)
        status = exit_info.value.code
        assert isinstance(status, int)
        return status

    return run


def _shake(model: torch.nn.Module, *, seed: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed + 7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(spread * torch.randn(parameter.shape, generator=generator))
