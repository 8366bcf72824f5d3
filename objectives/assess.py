"""Command line: which of a task's earlier runs may ship, and why the others may not.

python -m objectives.assess [--task DIR] [--json] [--quiet]
"""

import argparse
from typing import Any

from objectives.quality_cache import load_quality
from objectives.quality_model import ESTIMATE_NOTE
from objectives.release import Verdict, release_verdict
from objectives.score import Judge, Scores
from rlhf.cli import add_report_options, say, write_json
from rlhf.errors import InputError, collected, raise_if_any, run_command
from rlhf.policy import load_policy
from rlhf.taskdir import RUNS, Task, find_task_dir, load_task


def assess(task: Task) -> dict[str, tuple[Scores, Verdict]]:
    """Score every run under `runs/`. Raises `InputError` if there is none, or naming all that cannot be read."""
    folders = sorted(path for path in (task.root / RUNS).glob("*") if path.is_dir())
    if not folders:
        raise InputError(f"{task.root / RUNS}: holds no run to assess")
    problems: list[str] = []
    policies = {}
    for folder in folders:
        with collected(problems):
            policies[folder.name] = load_policy(folder, task.vocab)
    raise_if_any(problems)
    judge = Judge(task, load_quality(task.root))
    scored = {name: judge.score(policy) for name, policy in policies.items()}
    return {name: (scores, release_verdict(scores)) for name, scores in scored.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m objectives.assess", description="Judge a task's earlier runs.")
    add_report_options(parser)
    args = parser.parse_args()
    task = load_task(find_task_dir(args.task))
    say(f"assessing the runs of {task.root}; fitting labels takes a minute the first time", quiet=args.quiet)
    results = assess(task)
    model = load_quality(task.root)
    if args.json:
        runs = {name: _entry(*result) for name, result in results.items()}
        write_json({"note": ESTIMATE_NOTE, "refusals": list(model.refusals), "runs": runs}, None)
        return
    width = max(map(len, results)) + 2
    print(f"{'run':<{width}}{'quality':>8}{'gain':>9}{'worst family':>21}{'KL':>7}{'proxy':>8}  release?")
    for name, (scores, verdict) in results.items():
        worst = f"{scores.families[int(scores.gain.argmin())]} {scores.worst_family_gain:+.3f}"
        answer = "yes" if verdict.release else "no: " + ", ".join(verdict.reasons)
        print(
            f"{name:<{width}}{scores.balanced_quality:>8.3f}{scores.balanced_gain:>+9.4f}{worst:>21}"
            f"{scores.balanced_kl:>7.2f}{scores.proxy_reward.mean():>8.3f}  {answer}"
        )
    print(model.caveats)


def _entry(scores: Scores, verdict: Verdict) -> dict[str, Any]:
    return {"release": verdict.release, "reasons": list(verdict.reasons), "metrics": scores.metrics()}


if __name__ == "__main__":
    run_command(main)
