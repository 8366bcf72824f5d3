"""Command line: fit label-inferred quality and say how far it can be trusted.

python -m objectives.fit_quality [--task DIR] [--out F] [--json] [--quiet]
"""

import argparse
from pathlib import Path

from objectives.label_gibbs import CROWD, EXPERT
from objectives.quality_cache import load_quality
from objectives.quality_model import QualityModel
from rlhf.cli import add_report_options, say, write_json
from rlhf.errors import collected, raise_if_any, run_command
from rlhf.files import output_problems
from rlhf.taskdir import find_task_dir, load_task, task_files


def format_fit(model: QualityModel) -> str:
    """Lay the fit out as a table for a terminal."""
    header = f"{'family':<12}{'held-out RMSE':>14}{'correlation':>13}{'expert noise':>14}{'crowd noise':>13}"
    lines = [header + "  what only the crowd pays for"]
    for f, family in enumerate(model.vocab.families):
        bonuses = [f"{s.feature.label(model.vocab)} {s.size:+.3f}" for s in model.shortcuts if s.family == f]
        lines.append(
            f"{family:<12}{model.checks.family_rmse[f]:>14.4f}{model.checks.correlation[f]:>13.3f}"
            f"{model.noise[f, EXPERT]:>14.4f}{model.noise[f, CROWD]:>13.4f}  {', '.join(bonuses) or '-'}"
        )
    lines.append(f"held-out expert labels overall: RMSE {model.checks.rmse:.4f}; R-hat {model.checks.rhat.max():.3f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m objectives.fit_quality", description="Fit label-inferred quality.")
    parser.add_argument("--out", type=Path, help="write the JSON here")
    add_report_options(parser)
    args = parser.parse_args()
    task_dir = find_task_dir(args.task)
    problems = output_problems({"--out": args.out}, inputs=task_files(task_dir))
    with collected(problems):
        task = load_task(task_dir)
    raise_if_any(problems)
    say(f"fitting {len(task.expert)} expert and {len(task.crowd)} crowd labels", quiet=args.quiet)
    model = load_quality(task.root)
    write_json(model.to_json(), args.out, show=args.json)
    if not args.json:
        print(format_fit(model))
        print(model.caveats)


if __name__ == "__main__":
    run_command(main)
