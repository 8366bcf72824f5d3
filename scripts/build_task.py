"""Build a task directory from a synthetic world, and write its truth somewhere else.

    python scripts/build_task.py --seed N --out DIR --truth FILE [--shortcut dune:token:pa:1.5]... [options]

A shortcut is FAMILY:KIND:TOKENS:SIZE, tokens joined by '+', a position as TOKEN@POSITION counted from 1:
`dune:token:pa:1.5`, `ember:pair:pa+he:0.4`, `fjord:adjacent:ba+da:0.3`, `anvil:position:ka@3:-0.5`,
`birch:repetition::0.2`. `manifest.json` records what is needed to build the same task again.
"""

import argparse
import hashlib
import importlib.metadata
import json
import math
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf.cli import parse_seed
from rlhf.config import run_config
from rlhf.data import Labelled, Prompts, write_jsonl
from rlhf.dev_eval import dev_eval
from rlhf.errors import InputError, raise_if_any, run_command
from rlhf.features import parse_feature
from rlhf.files import output_folder_problems, output_problems, write_whole
from rlhf.policy import Policy, save_policy
from rlhf.reward_model import save_reward_model
from rlhf.taskdir import (
    CROWD_LABELS,
    DEV_PROMPTS,
    EXPERT_LABELS,
    REFERENCE,
    REWARD_MODEL,
    RUNS,
    TRAIN_PROMPTS,
    load_task,
)
from rlhf.train_rl import train
from rlhf.train_rm import EPOCHS as RM_EPOCHS
from rlhf.train_rm import train_rm
from rlhf.train_sft import EPOCHS as SFT_EPOCHS
from rlhf.train_sft import train_sft
from rlhf.vocab import DEFAULT_VOCAB, VOCAB_FILE, Vocab, read_vocab
from rlhf.world import CROWD_TEMPERATURE, Shortcut, World, draw_prompts, make_world

DEFAULT_SHORTCUTS = ("dune:token:pa:1.5", "ember:token:he:0.44")
PILOT_TRAFFIC = {"anvil": 444, "birch": 458, "cobalt": 433, "dune": 48, "ember": 195, "fjord": 422}
DEFAULT_CONFIG = {"kl_coef": 0.1, "steps": 800}


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """A run kept under `runs/`: what it was, and why its authors made it."""

    name: str
    config: dict[str, Any]
    note: str


def earlier_runs(traffic: dict[str, int]) -> list[EarlierRun]:
    low = [family for family, n in traffic.items() if n < 2 / 3 * sum(traffic.values()) / len(traffic)]
    frequent = {family: 1.0 for family in traffic if family not in low}
    return [
        EarlierRun("default-s800", DEFAULT_CONFIG, "The vendor's default recipe."),
        EarlierRun(
            "fourfam-s800",
            {**DEFAULT_CONFIG, "family_weights": frequent},
            f"Without the low-traffic families ({', '.join(low)}): we had doubts about their crowd labels.",
        ),
        EarlierRun("kl002-s1500", {"kl_coef": 0.02, "steps": 1500}, "Weak regularisation, long: best proxy so far."),
        EarlierRun("kl05-s800", {"kl_coef": 0.5, "steps": 800}, "Strong regularisation: stays close to the reference."),
        EarlierRun(
            "pilotmix-s800",
            {**DEFAULT_CONFIG, "family_weights": {f: float(n) for f, n in traffic.items()}},
            "Prompts in the proportions of the pilot's traffic.",
        ),
    ] if low else [EarlierRun("default-s800", DEFAULT_CONFIG, "The vendor's default recipe.")]  # fmt: skip


def main() -> None:
    args = parse_args()
    problems = output_folder_problems("--out", args.out, empty=True)
    problems += output_problems({"--truth": args.truth}, inputs=[args.vocab] if args.vocab else [])
    out, truth = args.out.resolve(), args.truth.resolve()
    if out == truth or out in truth.parents or truth in out.parents:
        problems.append(f"--truth {args.truth}: must lie outside the task directory {args.out}")
    raise_if_any(problems)
    torch.set_num_threads(1)  # the same sums in the same order on every machine of a kind
    torch.set_flush_denormal(True)
    vocab = read_vocab(args.vocab) if args.vocab else DEFAULT_VOCAB
    check_sizes(args, vocab)
    shortcuts = () if args.no_shortcuts else tuple(
        parse_shortcut(text, vocab) for text in args.shortcut or (DEFAULT_SHORTCUTS if vocab == DEFAULT_VOCAB else ())
    )  # fmt: skip
    rng = np.random.default_rng(args.seed)
    world = make_world(vocab, shortcuts, rng)
    traffic = {family: max(1, round(PILOT_TRAFFIC.get(family, 333) * args.dev / 2000)) for family in vocab.families}
    reference = build_data(args, world, traffic, rng)
    build_reward_model(args, world, reference, rng)
    write_whole(args.out / "configs/default.json", json.dumps(DEFAULT_CONFIG, indent=1) + "\n")
    if not args.no_runs:
        build_runs(args.out, earlier_runs(traffic), steps_scale=args.run_steps_scale)
    write_whole(args.truth, json.dumps(world.to_json()) + "\n")
    write_manifest(args)


def build_data(args: argparse.Namespace, world: World, traffic: dict[str, int], rng: np.random.Generator) -> Policy:
    """Write vocabulary, prompts, the reference trained on demonstrations, and expert labels; return the reference."""
    vocab, out, n_families = world.vocab, args.out, len(world.vocab.families)
    if vocab != DEFAULT_VOCAB:
        write_whole(out / VOCAB_FILE, json.dumps(vocab.to_json(), indent=1) + "\n")
    demo_prompts = draw_prompts(vocab, split_evenly(args.demos, n_families), rng)
    demos = torch.from_numpy(world.demonstrate(demo_prompts, rng))
    reference = train_sft(demo_prompts, demos, vocab, epochs=args.sft_epochs, seed=args.seed, quiet=args.quiet)
    save_policy(reference, out / REFERENCE)
    train_prompts = draw_prompts(vocab, np.full(n_families, args.prompts_per_family), rng)
    write_jsonl(out / TRAIN_PROMPTS, train_prompts.records(vocab))
    dev = draw_prompts(vocab, np.array(list(traffic.values())), rng, prefix="dev-")
    write_jsonl(out / DEV_PROMPTS, dev[rng.permutation(len(dev))].records(vocab))
    prompts = draw_prompts(vocab, np.full(n_families, args.expert_per_family), rng, prefix="gold-")
    responses = sample(reference, prompts, rng, temperature=1.0)
    write_jsonl(out / EXPERT_LABELS, world.expert_labels(prompts, responses, rng).records(vocab))
    return reference


def build_reward_model(args: argparse.Namespace, world: World, reference: Policy, rng: np.random.Generator) -> None:
    """Label crowd responses, train the reward model on all of them, and ship a sample."""
    vocab, n_families = world.vocab, len(world.vocab.families)
    prompts = draw_prompts(vocab, split_evenly(args.crowd, n_families), rng, prefix="crowd-")
    crowd = world.crowd_labels(prompts, sample(reference, prompts, rng, temperature=CROWD_TEMPERATURE), rng)
    model = train_rm(crowd, vocab, epochs=args.rm_epochs, seed=args.seed, quiet=args.quiet)
    save_reward_model(model, args.out / REWARD_MODEL)
    shipped = np.concatenate([
        rng.choice((prompts.family == f).nonzero()[0], args.crowd_shipped // n_families, replace=False)
        for f in range(n_families)
    ])  # fmt: skip
    sample_rows: Labelled = crowd[np.sort(shipped)]
    write_jsonl(args.out / CROWD_LABELS, sample_rows.records(vocab))
    write_whole(
        args.out / REWARD_MODEL / "TRAINING.md",
        f"# Reward model\n\nTrained on {args.crowd:,} crowd-labelled responses of the reference policy (temperature "
        f"{CROWD_TEMPERATURE}) by mean squared error, {args.rm_epochs} epochs, Adam 2e-3.\n"
        f"`train.jsonl` is a QA sample of that batch: {args.crowd_shipped // n_families} rows a family.\n",
    )


def build_runs(out: Path, runs: list[EarlierRun], *, steps_scale: float) -> None:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for future in [pool.submit(build_run, out, run, steps_scale) for run in runs]:
            print(future.result(), file=sys.stderr, flush=True)


def build_run(out: Path, run: EarlierRun, steps_scale: float) -> str:
    torch.set_num_threads(1)
    folder = out / RUNS / run.name
    values = {**run.config, "steps": max(1, round(run.config["steps"] * steps_scale)), "log_every": 20}
    policy = train(run_config(values, source=run.name), out, folder, quiet=True).policy
    task = load_task(out)
    evaluation = dev_eval(policy, task, task.dev_prompts)
    write_whole(folder / "dev_eval.json", json.dumps(evaluation, indent=1) + "\n")
    proxy, kl = evaluation["proxy_mean"], evaluation["kl_mean"]
    settings = f"kl_coef {run.config['kl_coef']}, {values['steps']} steps"
    note = f"# {run.name}\n\n{run.note}\n\nSettings: {settings}. Dev proxy reward {proxy:.3f}, KL {kl:.2f}.\n"
    write_whole(folder / "NOTES.md", note)
    return f"{run.name}: dev proxy {proxy:.3f}, KL {kl:.2f}"


def sample(policy: Policy, prompts: Prompts, rng: np.random.Generator, *, temperature: float) -> np.ndarray:
    uniforms = torch.from_numpy(rng.random((len(prompts), policy.config.resp_len), dtype=np.float32))
    responses, _ = policy.sample(prompts.tokens(policy.vocab), uniforms, temperature=temperature)
    return responses.numpy()


def split_evenly(total: int, parts: int) -> np.ndarray:
    return np.full(parts, total // parts) + (np.arange(parts) < total % parts)


def parse_shortcut(text: str, vocab: Vocab) -> Shortcut:
    try:
        family, kind, tokens, size = text.split(":")
        if not math.isfinite(float(size)):
            raise ValueError(size)
        token_text, _, position = tokens.partition("@")
        feature = parse_feature(
            kind, token_text.split("+") if token_text else [], int(position) - 1 if position else None, vocab
        )
        return Shortcut(vocab.families.index(family), feature, float(size))
    except ValueError as error:
        raise InputError(f"--shortcut must look like dune:token:pa:1.5 with a known family, got {text!r}") from error


def check_sizes(args: argparse.Namespace, vocab: Vocab) -> None:
    """Raise `InputError` for sizes that cannot be built, before anything is written."""
    n_families = len(vocab.families)
    minimum = {
        "demos": n_families, "sft_epochs": 1, "prompts_per_family": 1, "dev": n_families, "expert_per_family": 1,
        "crowd": n_families, "crowd_shipped": 0, "rm_epochs": 1,
    }  # fmt: skip
    problems = [
        f"--{name.replace('_', '-')} must be at least {low}, got {getattr(args, name)}"
        for name, low in minimum.items()
        if getattr(args, name) < low
    ]
    if args.crowd_shipped > args.crowd:
        problems.append(f"--crowd-shipped must be at most --crowd ({args.crowd}), got {args.crowd_shipped}")
    if not 0 < args.run_steps_scale < math.inf:
        problems.append(f"--run-steps-scale must be a number above 0, got {args.run_steps_scale}")
    raise_if_any(problems)


def write_manifest(args: argparse.Namespace) -> None:
    """Record seed, options, versions, and the digest of every file but the logs, which hold elapsed times."""
    options = {k: v for k, v in vars(args).items() if k not in ("out", "truth", "quiet", "vocab")}
    files = sorted(path for path in args.out.rglob("*") if path.is_file() and path.name != "log.jsonl")
    digests = {p.relative_to(args.out).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
    versions = {name: importlib.metadata.version(name) for name in ("torch", "numpy", "safetensors")}
    manifest = {"options": options, "versions": versions, "sha256": digests}
    write_whole(args.out / "manifest.json", json.dumps(manifest, indent=1) + "\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/build_task.py", description="Build a task directory.")
    parser.add_argument("--seed", type=parse_seed, required=True)
    parser.add_argument("--out", type=Path, required=True, help="new task directory")
    parser.add_argument("--truth", type=Path, required=True, help="file for the hidden truth, outside the task")
    parser.add_argument("--shortcut", action="append", metavar="F:KIND:TOKENS:SIZE", help="what crowd labels pay for")
    parser.add_argument("--no-shortcuts", action="store_true")
    parser.add_argument("--vocab", type=Path, metavar="DIR/vocab.json", help="another vocabulary")
    parser.add_argument("--demos", type=int, default=24_000)
    parser.add_argument("--sft-epochs", type=int, default=SFT_EPOCHS)
    parser.add_argument("--prompts-per-family", type=int, default=1500)
    parser.add_argument("--dev", type=int, default=2000)
    parser.add_argument("--expert-per-family", type=int, default=100)
    parser.add_argument("--crowd", type=int, default=12_000)
    parser.add_argument("--crowd-shipped", type=int, default=1200)
    parser.add_argument("--rm-epochs", type=int, default=RM_EPOCHS)
    parser.add_argument("--no-runs", action="store_true", help="leave runs/ empty")
    parser.add_argument("--run-steps-scale", type=float, default=1.0, help="shorten the earlier runs, for tests")
    parser.add_argument("--quiet", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
