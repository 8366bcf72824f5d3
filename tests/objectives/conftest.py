"""Worlds with a known truth and tasks made from them in memory: no network is trained here."""

import json
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from objectives import quality_cache
from objectives.fit_checks import FitChecks
from objectives.quality_model import QualityModel, fit_quality
from rlhf.data import Prompts, write_jsonl
from rlhf.features import Feature
from rlhf.policy import Policy, init_policy, save_policy
from rlhf.reward_model import init_reward_model, save_reward_model
from rlhf.taskdir import Task
from rlhf.vocab import DEFAULT_VOCAB, Vocab
from rlhf.world import Shortcut, World, draw_prompts, make_world

SMALL_VOCAB = Vocab(
    families=("ash", "oak"), n_attrs=2, n_values=4, content_tokens=tuple("abcdefgh"), resp_len=4
)  # fmt: skip


class DemonstratingReference:
    """A perfectly trained reference: its next-token distribution is the world's demonstration shares."""

    def __init__(self, world: World) -> None:
        self.vocab, self._world = world.vocab, world

    def sample(self, prompts: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        vocab = self.vocab
        family = prompts[:, 0].numpy() - vocab.family_id(0)
        read = Prompts(tuple(map(str, family)), family, prompts[:, 1:-1].numpy() - vocab.first_value_id)
        shares = self._world.shares[family[:, None], np.arange(vocab.resp_len), self._world.cells(read)]
        responses = (shares.cumsum(-1) <= uniforms.numpy()[..., None]).sum(-1).clip(max=vocab.n_content - 1)
        return torch.from_numpy(responses), torch.from_numpy(np.log(shares)).float()


def task_of(world: World, *, n_expert: int, n_crowd: int, seed: int) -> Task:
    """Draw prompts and labels, so many rows a family, into a task without files."""
    rng, vocab = np.random.default_rng(seed), world.vocab
    n_families = len(vocab.families)
    n_prompts = min(500, vocab.n_values**vocab.n_attrs)
    train = draw_prompts(vocab, np.full(n_families, n_prompts), rng)
    dev = draw_prompts(vocab, np.full(n_families, min(100, n_prompts)), rng, prefix="dev-")
    gold = draw_prompts(vocab, np.full(n_families, n_expert), rng, prefix="gold-")
    crowd = draw_prompts(vocab, np.full(n_families, n_crowd), rng, prefix="crowd-")
    return Task(
        root=Path("no-such-folder"),
        vocab=vocab,
        reference=DemonstratingReference(world),  # type: ignore[arg-type]
        reward_model=init_reward_model(vocab, seed=seed, size={"d_model": 8, "n_layers": 1, "n_heads": 1, "d_ff": 8}),
        train_prompts=train,
        dev_prompts=dev,
        expert=world.expert_labels(gold, world.demonstrate(gold, rng), rng),
        crowd=world.crowd_labels(crowd, world.demonstrate(crowd, rng), rng),
        digest=secrets.token_hex(32),  # what is cached for one task is not another's
    )


@pytest.fixture(scope="session")
def default_world() -> World:
    """The default vocabulary with the default shortcuts: dune pays for `pa`, ember for `he`."""
    vocab = DEFAULT_VOCAB
    shortcuts = tuple(
        Shortcut(vocab.families.index(family), Feature("token", (vocab.content_tokens.index(token),)), size)
        for family, token, size in (("dune", "pa", 1.5), ("ember", "he", 0.44))
    )
    return make_world(vocab, shortcuts, np.random.default_rng(11))


@pytest.fixture(scope="session")
def default_world_task(default_world: World) -> Task:
    """A task of the published sizes: 100 expert and 200 crowd rows a family."""
    return task_of(default_world, n_expert=100, n_crowd=200, seed=12)


@pytest.fixture(scope="session")
def fitted(default_world_task: Task) -> QualityModel:
    return fit_quality(default_world_task, seed=0)


@pytest.fixture(scope="session")
def small_task() -> Callable[..., tuple[World, Task]]:
    """Build a small world and its task: fits in a fraction of a second."""

    def build(*shortcuts: Shortcut, seed: int = 0, n_expert: int = 100, n_crowd: int = 200) -> tuple[World, Task]:
        world = make_world(SMALL_VOCAB, shortcuts, np.random.default_rng(seed))
        return world, task_of(world, n_expert=n_expert, n_crowd=n_crowd, seed=seed + 1)

    return build


@pytest.fixture(scope="session")
def network_task() -> Task:
    """A task whose reference is an untrained network of which every probability can be enumerated."""
    vocab = Vocab(families=("ash", "oak", "elm"), n_attrs=3, n_values=8, content_tokens=("a", "b", "c"), resp_len=3)
    task = task_of(make_world(vocab, (), np.random.default_rng(3)), n_expert=20, n_crowd=20, seed=4)
    reference = init_policy(vocab, seed=5, size={"d_model": 16, "n_layers": 1, "n_heads": 2, "d_ff": 16})
    return Task(
        task.root, vocab, reference, task.reward_model, task.train_prompts, task.dev_prompts,
        task.expert, task.crowd, task.digest,
    )  # fmt: skip


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Point the cache of fitted models at an empty folder, and forget those in memory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    quality_cache._in_memory.clear()
    yield tmp_path / "cache" / "rlhf-sweep"
    quality_cache._in_memory.clear()


@pytest.fixture
def task_folder(network_task: Task, tmp_path: Path) -> Path:
    """Write the network task to disk, without earlier runs."""
    task, root = network_task, tmp_path / "task"
    root.mkdir()
    (root / "vocab.json").write_text(json.dumps(task.vocab.to_json()))
    save_policy(task.reference, root / "policy")
    save_reward_model(task.reward_model, root / "reward_model")
    write_jsonl(root / "data/prompts_train.jsonl", task.train_prompts.records(task.vocab))
    write_jsonl(root / "data/prompts_dev.jsonl", task.dev_prompts.records(task.vocab))
    write_jsonl(root / "data/gold_calib.jsonl", task.expert.records(task.vocab))
    write_jsonl(root / "reward_model/train.jsonl", task.crowd.records(task.vocab))
    return root


@pytest.fixture(scope="session")
def one_token_policy(network_task: Task) -> Callable[[int], Policy]:
    """Make policies that write one token only."""

    def build(token: int) -> Policy:
        vocab = network_task.vocab
        policy = init_policy(vocab, seed=0, size={"d_model": 16, "n_layers": 1, "n_heads": 2, "d_ff": 16})
        with torch.no_grad():
            policy.ln.weight.zero_()
            policy.ln.bias.fill_(1.0)
            policy.head.weight.zero_()
            policy.head.weight[vocab.first_content_id + token] = 10.0  # logit 160 against 0
        return policy

    return build


@pytest.fixture(scope="session")
def one_token_is_correct(network_task: Task) -> Callable[..., QualityModel]:
    """Make quality models that are sure: one token is correct everywhere in a family."""

    def build(*token_by_family: int) -> QualityModel:
        vocab = network_task.vocab
        shape = (len(vocab.families), vocab.resp_len, vocab.n_values)
        table = np.broadcast_to(np.array(token_by_family)[:, None, None], shape)
        ones = np.ones(len(vocab.families))
        return QualityModel(
            vocab=vocab,
            attribute=np.zeros(shape[:2], dtype=np.int64),
            correct=np.eye(vocab.n_content)[table],
            reward_correct=np.eye(vocab.n_content)[table],
            draws=table[None].astype(np.int16),
            noise=np.ones((len(vocab.families), 2)),
            shortcuts=(),
            checks=FitChecks(
                rmse=0.045,
                family_rmse=0.045 * ones,
                correlation=ones,
                n_expert=100 * ones,
                interaction_p=ones,
                rhat=ones,
            ),
        )

    return build
