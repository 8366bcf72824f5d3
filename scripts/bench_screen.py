"""Measure the shortcut screen on a suite of reward models with known shortcuts, and on clean ones.

    python scripts/bench_screen.py [--cache DIR] [--part seen|held-out|all] [--build-only]

The suite is built once, two minutes of one core a model, and kept in the cache folder.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rlhf.data import Prompts, write_jsonl
from rlhf.features import KINDS, Feature, feature_values
from rlhf.policy import Policy, load_policy, save_policy
from rlhf.reward_model import save_reward_model
from rlhf.taskdir import DEFAULT_TASK, REFERENCE
from rlhf.train_rm import train_rm
from rlhf.train_sft import train_sft
from rlhf.vocab import DEFAULT_VOCAB, Vocab
from rlhf.world import CROWD_TEMPERATURE, Shortcut, World, draw_prompts, load_world, make_world

DEFAULT_TRUTH = Path(__file__).parents[1] / "tests/data/default_task_truth.json"
DEFAULT_CACHE = Path("~/.cache/rlhf-sweep/screen-suite").expanduser()
CROWD, SHIPPED, DEMOS = 2000, 200, 4000  # a family
SIZES = {"seen": (0.15, 0.25, 0.4, 0.8, 1.5), "held-out": (0.15, 0.3, 0.6)}
MIN_SHARE = {"seen": 0.0, "held-out": 0.01}  # of crowd responses that hold the feature; 0: tokens drawn at random
CLEAN = {"seen": 1, "held-out": 1}
WORLD_SEEDS = {"seen": None, "held-out": 101}  # None: the default task's world and reference


@dataclass(frozen=True, slots=True)
class Member:
    """One reward model of the suite: its name, and what its crowd paid for."""

    name: str
    part: str
    seed: int
    shortcuts: tuple[Shortcut, ...]


def suite(part: str, reference: Policy) -> list[Member]:
    """List the members of a part: every kind at every size, signs in turn, two families a model, then clean ones."""
    vocab = reference.vocab
    rng = np.random.default_rng([2026, len(part)])
    rows = [
        (kind, size * (-1 if (k + s) % 3 == 2 else 1))
        for s, size in enumerate(SIZES[part])
        for k, kind in enumerate(KINDS)
    ]
    rows = [rows[i] for i in rng.permutation(len(rows))]
    members = []
    for first in range(0, len(rows), 2):
        families = rng.permutation(len(vocab.families))
        shortcuts = tuple(
            Shortcut(int(families[i]), draw_feature(kind, int(families[i]), reference, MIN_SHARE[part], rng), size)
            for i, (kind, size) in enumerate(rows[first : first + 2])
        )
        members.append(Member(f"{part}-{len(members):02d}", part, 1000 * len(part) + len(members), shortcuts))
    for _ in range(CLEAN[part]):
        members.append(Member(f"{part}-{len(members):02d}", part, 1000 * len(part) + len(members), ()))
    return members


def draw_feature(
    kind: str, family: int, reference: Policy, min_share: float, rng: np.random.Generator
) -> Feature:
    """Draw a feature of a kind until at least `min_share` of the family's crowd responses hold it."""
    vocab = reference.vocab
    n_tokens = {"token": 1, "pair": 2, "adjacent": 2, "position": 1, "repetition": 0}[kind]
    counts = np.where(np.arange(len(vocab.families)) == family, CROWD, 0)
    looks = np.random.default_rng(family)
    responses = sample_crowd(reference, draw_prompts(vocab, counts, looks), looks) if min_share else None
    while True:
        tokens = tuple(sorted(int(token) for token in rng.choice(vocab.n_content, n_tokens, replace=False)))
        feature = Feature(kind, tokens, int(rng.integers(vocab.resp_len)) if kind == "position" else None)
        if responses is None or (feature_values(feature, responses) > 0).mean() >= min_share:
            return feature


def build_world(part: str, cache: Path) -> tuple[World, Policy, Path]:
    """Return a part's world, its reference, and the folder that holds `policy/` and `prompts.jsonl`."""
    folder = cache / part
    seed = WORLD_SEEDS[part]
    if seed is None:
        world = load_world(json.loads(DEFAULT_TRUTH.read_text()))
        reference = load_policy(DEFAULT_TASK / REFERENCE, world.vocab)
    else:
        rng = np.random.default_rng(seed)
        world = make_world(DEFAULT_VOCAB, (), rng)
        if not (folder / REFERENCE / "policy.safetensors").exists():
            prompts = draw_prompts(world.vocab, np.full(len(world.vocab.families), DEMOS), rng)
            demos = torch.from_numpy(world.demonstrate(prompts, rng))
            save_policy(train_sft(prompts, demos, world.vocab, seed=seed), folder / REFERENCE)
        reference = load_policy(folder / REFERENCE, world.vocab)
    save_policy(reference, folder / REFERENCE)
    counts = np.array([444, 458, 433, 48, 195, 422])  # the default task's dev prompts
    write_jsonl(folder / "prompts.jsonl", draw_prompts(world.vocab, counts, np.random.default_rng(1)).records(world.vocab))
    return world, reference, folder


def build_member(member: Member, world: World, reference: Policy, folder: Path) -> None:
    """Train a reward model as the default task's was, on a crowd that pays for the member's shortcuts."""
    vocab, rng = world.vocab, np.random.default_rng(member.seed)
    paying = World(vocab, world.attribute, world.correct, world.shares, member.shortcuts)
    prompts = draw_prompts(vocab, np.full(len(vocab.families), CROWD), rng, prefix="crowd-")
    crowd = paying.crowd_labels(prompts, sample_crowd(reference, prompts, rng), rng)
    model = train_rm(crowd, vocab, seed=member.seed, quiet=True)
    shipped = np.concatenate([rng.choice((prompts.family == f).nonzero()[0], SHIPPED, replace=False)
                              for f in range(len(vocab.families))])  # fmt: skip
    write_jsonl(folder / "train.jsonl", crowd[np.sort(shipped)].records(vocab))
    (folder / "truth.json").write_text(json.dumps(paying.to_json()["shortcuts"]))
    save_reward_model(model, folder)


def sample_crowd(reference: Policy, prompts: Prompts, rng: np.random.Generator) -> np.ndarray:
    uniforms = torch.from_numpy(rng.random((len(prompts), reference.config.resp_len), dtype=np.float32))
    responses, _ = reference.sample(prompts.tokens(reference.vocab), uniforms, temperature=CROWD_TEMPERATURE)
    return responses.numpy()


def build_part(part: str, cache: Path) -> list[tuple[Member, Path]]:
    """Build what is missing of a part; return its members with their folders."""
    members = [(member, cache / part / member.name) for member in suite(part)]
    if any(not (folder / "rm.safetensors").exists() for _, folder in members):
        world, reference, _ = build_world(part, cache)
        for member, folder in members:
            if not (folder / "rm.safetensors").exists():
                build_member(member, world, reference, folder)
                print(f"built {folder}", flush=True)
    return members


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench_screen.py", description="Measure the shortcut screen.")
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="folder for the suite")
    parser.add_argument("--part", choices=[*SIZES, "all"], default="all")
    parser.add_argument("--build-only", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    for part in SIZES if args.part == "all" else [args.part]:
        build_part(part, args.cache)


if __name__ == "__main__":
    main()
