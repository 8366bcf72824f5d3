"""Predict from a reward model alone which families will be hacked: the shortcut screen.

    python -m objectives.diagnose --rm-dir DIR --policy-dir DIR --prompts F --out F
        [--details F] [--plot F.png] [--kl-coef 0.1] [--vocab F] [--json] [--quiet]

Reads the reward model, the QA sample of its crowd labels (`train.jsonl` in its folder), the reference and prompts: no
expert label, no fitted table. `--out` holds {"families": {name: {"risk": 0 to 1, "flag": bool}}}; a family is flagged
from risk 0.5 on. `--details` says what was found, in words and numbers. Exit status: 0 also where families are flagged.
"""

import argparse
import math
from pathlib import Path

from objectives.forecast import DEFAULT_KL_COEF
from objectives.screen import screen
from objectives.screen_report import details_json, format_screen, screen_json
from rlhf.cli import add_quiet_option, say, write_json
from rlhf.data import Labelled, Prompts, read_labelled, read_prompts
from rlhf.errors import InputError, collected, raise_if_any, run_command
from rlhf.files import output_problems, write_whole
from rlhf.policy import Policy, load_policy
from rlhf.reward_model import RewardModel, load_reward_model
from rlhf.taskdir import QA_SAMPLE
from rlhf.vocab import DEFAULT_VOCAB, VOCAB_FILE, Vocab, read_vocab

PICTURE_ENDINGS = (".png", ".svg", ".pdf")


def main() -> None:
    args = parse_args()
    reward_model, qa, reference, prompts = read_inputs(args)
    say(f"screening {args.rm_dir}", quiet=args.quiet)
    result = screen(reward_model, qa, reference, prompts, reference.vocab, kl_coef=args.kl_coef)
    if args.plot:
        from objectives.screen_plot import draw_screen  # a second of start-up that nobody else should wait for

        write_whole(args.plot, draw_screen(result, ending=args.plot.suffix))
    if args.details:
        write_json(details_json(result), args.details, show=False)
    write_json(screen_json(result), args.out, show=args.json)
    if not args.json:
        print(format_screen(result))


def read_inputs(args: argparse.Namespace) -> tuple[RewardModel, Labelled, Policy, Prompts]:
    """Read everything. Raises `InputError` with the problems of options and all files together."""
    labels = args.rm_dir / QA_SAMPLE
    inputs = (args.prompts, args.vocab, *args.rm_dir.glob("*"), *args.policy_dir.glob("*"),
              *vocab_places(rm_dir=args.rm_dir, policy_dir=args.policy_dir))  # fmt: skip
    outputs = {"--out": args.out, "--details": args.details, "--plot": args.plot}
    problems = output_problems(outputs, inputs=[path for path in inputs if path])
    if args.plot and args.plot.suffix.lower() not in PICTURE_ENDINGS:
        problems.append(f"--plot must end in {', '.join(PICTURE_ENDINGS)}, got {args.plot}")
    if not 0 < args.kl_coef < math.inf:
        problems.append(f"--kl-coef must be a number above 0, got {args.kl_coef}")
    vocab = None
    with collected(problems):
        vocab = find_vocab(args.vocab, rm_dir=args.rm_dir, policy_dir=args.policy_dir)
    if vocab is None:
        raise InputError(problems)
    with collected(problems):
        reward_model = load_reward_model(args.rm_dir, vocab)
    with collected(problems):
        qa = read_labelled(labels, vocab)
    with collected(problems):
        reference = load_policy(args.policy_dir, vocab)
    with collected(problems):
        prompts = read_prompts(args.prompts, vocab)
    raise_if_any(problems)
    return reward_model, qa, reference, prompts


def find_vocab(given: Path | None, *, rm_dir: Path, policy_dir: Path) -> Vocab:
    """Read the vocabulary: the file given, else `vocab.json` in or beside the model folders, else the default one.

    Raises `InputError` if such files differ.
    """
    if given is not None:
        return read_vocab(given)
    found = {path: read_vocab(path) for path in vocab_places(rm_dir=rm_dir, policy_dir=policy_dir)}
    if len(set(found.values())) > 1:
        raise InputError(f"vocabularies must be the same, but these differ: {', '.join(map(str, found))}; use --vocab")
    return next(iter(found.values()), DEFAULT_VOCAB)


def vocab_places(*, rm_dir: Path, policy_dir: Path) -> list[Path]:
    """List the vocabulary files in and beside the model folders, and the folders that they are links to."""
    models = [place for folder in (policy_dir, rm_dir) for place in (folder.absolute(), folder.resolve())]
    paths = dict.fromkeys(folder / VOCAB_FILE for model in models for folder in (model, model.parent))
    return [path for path in paths if path.exists()]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m objectives.diagnose", description="Predict which families optimising a reward model will hack."
    )
    parser.add_argument("--rm-dir", required=True, type=Path, help=f"reward model, with its QA sample {QA_SAMPLE}")
    parser.add_argument("--policy-dir", required=True, type=Path, help="reference policy")
    parser.add_argument("--prompts", required=True, type=Path, help="JSON lines of prompts")
    parser.add_argument("--out", required=True, type=Path, help="JSON file for each family's risk and flag")
    parser.add_argument("--details", type=Path, help="JSON file for what was found, in words and numbers")
    parser.add_argument("--plot", type=Path, metavar="F.png", help="picture of labels against reward model")
    parser.add_argument(
        "--kl-coef", type=float, default=DEFAULT_KL_COEF, help="forecast for this (default: %(default)s)"
    )
    parser.add_argument("--vocab", type=Path, help=f"vocabulary (default: {VOCAB_FILE} in or beside the model folders)")
    parser.add_argument("--json", action="store_true", help="print what --out holds instead of a table")
    add_quiet_option(parser)
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
