"""Measure the training step against the plain loop and against its matrix products alone, side by side.

    python scripts/bench_train.py [--rounds 15] [--steps 4] [--task DIR]

One thread. Every round runs a few steps of each contestant in turn, so that whatever else the machine does hits all
of them; the figures are medians over all steps. Prints a table and one JSON line.

`plain` runs every token again at each sampling step, then teacher-forces with autograd, and scores the reward model
at every step: `Policy.forward` and `RewardModel.forward` as they are defined. `fast` is `rlhf.run.ReinforceRun` with
the default configuration: with the wrapper `raw` every step needs the reward model, with `label_quality` only logged
steps do. `floor` is the products of the linear layers that `fast` runs, in the same shapes, and nothing else: no
attention, no softmax.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rlhf.config import RunConfig
from rlhf.data import Prompts, read_prompts
from rlhf.policy import Policy, load_policy
from rlhf.reinforce import group_advantage, mean_entropy, policy_loss, sequence_kl, taken_logp
from rlhf.reward_model import load_reward_model
from rlhf.run import ReinforceRun
from rlhf.taskdir import find_task_dir, resolve_path
from rlhf.transformer import ModelConfig
from rlhf.vocab import load_vocab

Step = Callable[[], object]


def plain_logp(policy: Policy, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return log probabilities (B, resp_len, n_content) of whole sequences (B, seq_len)."""
    logits = policy(ids)[:, policy.config.prompt_len - 1 : -1] / temperature
    return torch.log_softmax(logits, -1)[..., policy.vocab.first_content_id :]


def plain_loop(config: RunConfig, task: Path, prompts: Prompts) -> Step:
    """Return the published step: nothing cached, nothing shared, nothing left out."""
    vocab = load_vocab(task)
    policy, reference = (load_policy(resolve_path(config.policy_ref, task), vocab) for _ in range(2))
    reward_model = load_reward_model(resolve_path(config.reward_model, task), vocab)
    adam = torch.optim.Adam(policy.parameters(), lr=config.lr)
    pool, first, group = prompts.tokens(vocab), vocab.first_content_id, config.samples_per_prompt

    def step() -> None:
        chosen = torch.randint(len(pool), (config.batch_prompts,))
        ids = pool[chosen].repeat_interleave(group, 0)
        with torch.no_grad():
            for _ in range(vocab.resp_len):
                probabilities = torch.softmax(policy(ids)[:, -1] / config.temperature, -1)
                ids = torch.cat([ids, torch.multinomial(probabilities, 1)], 1)
            responses = ids[:, vocab.prompt_len :] - first
            ref = taken_logp(plain_logp(reference, ids, config.temperature), responses)
            rewards = reward_model(ids)
        logp = plain_logp(policy, ids, config.temperature)
        taken = taken_logp(logp, responses)
        shaped = rewards - config.kl_coef * sequence_kl(taken.detach(), ref)
        loss = policy_loss(group_advantage(shaped, group=group), taken)
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm)
        adam.step()
        _ = [value.item() for value in (shaped.mean(), loss, norm, mean_entropy(logp.detach()))]

    return step


def fast_loop(config: RunConfig, task: Path, prompts: Prompts) -> Step:
    run = ReinforceRun(config, task, prompts=prompts)

    def step() -> None:
        for _ in run.advance(run.step + 1):
            pass

    return step


def products(config: ModelConfig, columns: int, *, after: int | None = None) -> list[tuple[int, int, int]]:
    """Return (outputs, inputs, columns) of every linear layer inside the blocks, the first block's projection left out.

    `after` is how many columns go on behind the last block's attention, where not all do.
    """
    K, F = config.d_model, config.d_ff
    shapes = []
    for n in range(config.n_layers):
        going_on = columns if after is None or n + 1 < config.n_layers else after
        shapes += [(3 * K, K, columns)] if n else []
        shapes += [(K, K, going_on), (F, K, going_on), (K, F, going_on)]
    return shapes


def floor_loop(config: RunConfig, task: Path, *, reward_model: bool) -> Step:
    """Return a step that runs only the products of one training step."""
    vocab = load_vocab(task)
    policy = load_policy(resolve_path(config.policy_ref, task), vocab)
    size, N, B = policy.config, config.batch_prompts, config.batch_prompts * config.samples_per_prompt
    steps, V, K = size.resp_len - 1, vocab.n_content, size.d_model
    prompt_columns, all_columns, predictions = N * size.prompt_len, N * size.prompt_len + steps * B, N + steps * B
    table = (3 * K, K, policy.folded().table.x.shape[1])  # the first block's projection of whatever may come
    shapes = [table, *products(size, prompt_columns, after=N)]
    shapes += [*products(size, B), (V, K, B)] * steps + [(V, K, N)]  # sample
    for outputs, inputs, columns in [table, *products(size, all_columns, after=predictions), (V, K, predictions)]:
        shapes += [(outputs, columns, inputs), (inputs, outputs, columns)]  # backward: by weights, by inputs
    shapes += [*products(size, all_columns, after=predictions), (V, K, predictions)]  # the reference
    if reward_model:
        model = load_reward_model(resolve_path(config.reward_model, task), vocab).config
        shapes += [*products(model, B * model.seq_len), (model.d_model, model.d_model, B), (1, model.d_model, B)]
    operands = [(torch.randn(m, k), torch.randn(k, n), torch.empty(m, n)) for m, k, n in shapes]

    def step() -> None:
        for left, right, out in operands:
            torch.mm(left, right, out=out)

    return step


def medians_ms(contestants: dict[str, Step], *, rounds: int, steps: int) -> dict[str, float]:
    """Run the contestants in turn; the first round is a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for round_number in range(rounds + 1):
        for name, step in contestants.items():
            for _ in range(steps):
                started = time.perf_counter()
                step()
                if round_number:
                    times[name].append(time.perf_counter() - started)
    return {name: 1000 * statistics.median(values) for name, values in times.items()}


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the training step against the plain loop and its products.")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of all contestants (default 15)")
    parser.add_argument("--steps", type=int, default=4, help="steps of each contestant a round (default 4)")
    parser.add_argument("--task", help="task directory")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    task = find_task_dir(args.task)
    config = RunConfig(steps=1_000_000)
    prompts = read_prompts(resolve_path(config.prompt_file, task), load_vocab(task))
    blind = RunConfig(steps=1_000_000, reward_wrapper="label_quality")
    ms = medians_ms(
        {
            "plain": plain_loop(config, task, prompts),
            "fast, raw": fast_loop(config, task, prompts),
            "floor, raw": floor_loop(config, task, reward_model=True),
            "fast, label_quality": fast_loop(blind, task, prompts),
            "floor, label_quality": floor_loop(config, task, reward_model=False),
        },
        rounds=args.rounds, steps=args.steps,
    )  # fmt: skip
    report = {
        "machine": cpu_model(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "batch": [config.batch_prompts, config.samples_per_prompt],
        "ms": ms,
        "speedup": {name: ms["plain"] / value for name, value in ms.items()},
        "over_floor": {name: ms[name] / ms[name.replace("fast", "floor")] for name in ms if name.startswith("fast")},
    }
    print(table(report))
    print(json.dumps(report))


def table(report: dict[str, Any]) -> str:
    lines = [
        f"{report['machine']}, {report['threads']} thread, torch {report['torch']}, "
        f"{report['batch'][0]} prompts x {report['batch'][1]} responses",
        f"{'':<22}{'ms a step':>10}{'steps/s':>9}{'x plain':>9}{'x floor':>9}",
    ]
    for name, value in report["ms"].items():
        ratio = f"{report['over_floor'][name]:>9.2f}" if name in report["over_floor"] else ""
        lines.append(f"{name:<22}{value:>10.2f}{1000 / value:>9.1f}{report['speedup'][name]:>9.2f}{ratio}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
