"""The sweep a new user runs, with its defaults: the pick is good in truth, not only by our own judge."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf.data import Prompts
from rlhf.policy import Policy, load_policy
from rlhf.taskdir import DEFAULT_TASK, load_task
from rlhf.world import World, draw_prompts, load_world

TRUTH = Path(__file__).parents[1] / "data/default_task_truth.json"


def true_quality(policy: Policy, world: World, prompts: Prompts) -> np.ndarray:
    """Return each family's true quality: the policy's probability of the correct token along its own samples."""
    uniforms = torch.rand(len(prompts), world.vocab.resp_len, generator=torch.Generator().manual_seed(99))
    _, logp = policy.sample(prompts.tokens(world.vocab), uniforms)
    wanted = world.correct[prompts.family[:, None], np.arange(world.vocab.resp_len), world.cells(prompts)]
    probability = logp.exp().gather(-1, torch.from_numpy(wanted)[..., None])[..., 0].mean(1).numpy()
    return np.array([probability[prompts.family == f].mean() for f in range(len(world.vocab.families))])


@pytest.mark.slow
def test_default_sweep_picks_a_truly_good_checkpoint(place, tmp_path) -> None:
    launched = place.run("sweep.launch", "--space", "kl_mix", "--name", "default", timeout_s=1500)
    assert launched.returncode == 0, launched.stderr
    picked = place.run("sweep.pick", "--name", "default", "--out", str(tmp_path / "picked"), "--json")
    assert picked.returncode == 0, picked.stderr
    assert json.loads(picked.stdout)["picked"]["metrics"]["worst_family_harm"] <= 0.03
    world = load_world(json.loads(TRUTH.read_text()))
    prompts = draw_prompts(world.vocab, np.full(len(world.vocab.families), 400), np.random.default_rng(5))
    quality = true_quality(load_policy(tmp_path / "picked", world.vocab), world, prompts)
    reference = true_quality(load_task(DEFAULT_TASK).reference, world, prompts)
    assert quality.mean() >= 0.95
    assert (quality - reference).min() >= 0
