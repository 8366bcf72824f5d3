"""Command line: train one policy.

    python -m rlhf.train_rl --config C --out DIR [--override key=json]... [--task DIR] [--resume] [--quiet]

Writes `run_config.json`, `log.jsonl`, `policy.safetensors` + `config.json`, and `step_N/` every `save_every`
steps. `--resume` goes on from the last saved state in DIR, to the same bits as an uninterrupted run.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

from rlhf.cli import add_quiet_option, add_task_option, say
from rlhf.config import RunConfig, read_run_config
from rlhf.errors import InputError, collected, raise_if_any, run_command
from rlhf.files import output_folder_problems, write_whole
from rlhf.policy import POLICY_WEIGHTS, save_policy
from rlhf.run import STATE_FILE, ReinforceRun
from rlhf.taskdir import find_task_dir
from rlhf.weights import CONFIG_FILE

STATE_FOLDER = "state"
LOG_FILE = "log.jsonl"
_CONFIG_FILE = "run_config.json"
_WRITTEN = (LOG_FILE, _CONFIG_FILE, POLICY_WEIGHTS, CONFIG_FILE)


def train(config: RunConfig, task_dir: Path, out: Path, *, resume: bool = False, quiet: bool = False) -> ReinforceRun:
    """Train to `config.steps`, writing a run directory. Raises `InputError` if `out` holds a run, unless to resume."""
    state = out / STATE_FOLDER
    if not resume and (state / STATE_FILE).exists():
        raise InputError(f"{out}: already holds a run; give another folder, or go on with it by --resume")
    if resume and not (state / STATE_FILE).exists():
        raise InputError(f"{out}: holds no saved state to resume from; start afresh in another folder")
    raise_if_any(output_folder_problems("--out", out, new=() if resume else _WRITTEN))
    run = ReinforceRun(config, task_dir)
    if resume:
        run.load_state(state)
    out.mkdir(parents=True, exist_ok=True)
    if not resume:
        (out / LOG_FILE).touch(exist_ok=False)  # two runs that start together do not share a folder
    resolved = replace(config, policy_init=config.policy_init or config.policy_ref)
    write_whole(out / _CONFIG_FILE, json.dumps(resolved.to_json(), indent=1) + "\n")
    _drop_rows_after(out / LOG_FILE, run.step)
    every = config.save_every or config.steps
    with (out / LOG_FILE).open("a") as log:
        while run.step < config.steps:
            for row in run.advance((run.step // every + 1) * every):
                log.write(json.dumps(row) + "\n")
                log.flush()
                say(_progress(row, config.steps), quiet=quiet)
            if config.save_every:
                save_policy(run.policy, out / f"step_{run.step}")
                run.save_state(state)
    save_policy(run.policy, out)
    return run


def _drop_rows_after(log: Path, step: int) -> None:
    """Remove rows that a killed run logged after its last saved state; they will be logged again."""
    if log.exists():
        whole = log.read_text().split("\n")[:-1]  # a killed run may have left half a line
        try:
            kept = [line + "\n" for line in whole if json.loads(line)["step"] <= step]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{log}: is not the log of a run ({error}); remove the lines that are none") from error
        write_whole(log, "".join(kept))


def _progress(row: dict[str, float], steps: int) -> str:
    proxy = f"{row['proxy_reward']:.3f}" if "proxy_reward" in row else "-"
    return f"step {row['step']}/{steps}  proxy reward {proxy}  KL {row['kl']:.2f}  {row['elapsed_s']:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rlhf.train_rl", description="Train one policy with REINFORCE.")
    parser.add_argument("--config", required=True, type=Path, help="JSON file with any of the run's keys")
    parser.add_argument("--out", required=True, type=Path, help="folder for the run")
    parser.add_argument("--override", action="append", default=[], metavar="KEY=JSON", help="replace one config key")
    parser.add_argument("--resume", action="store_true", help="go on from the state saved in --out")
    add_quiet_option(parser)
    add_task_option(parser)
    args = parser.parse_args()
    problems = output_folder_problems("--out", args.out)
    with collected(problems):
        config = read_run_config(args.config, args.override)
    raise_if_any(problems)
    torch.set_flush_denormal(True)  # tiny Adam moments would slow a long run down
    train(config, find_task_dir(args.task), args.out, resume=args.resume, quiet=args.quiet)


if __name__ == "__main__":
    run_command(main)
