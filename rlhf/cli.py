"""What the command lines share: the task option, quiet progress, one JSON document on standard output."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rlhf.files import write_whole
from rlhf.json_values import finite_json
from rlhf.vocab import TASK_VARIABLE


def add_task_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--task", metavar="DIR", help=f"task directory (default: ${TASK_VARIABLE}, then the built-in)")


def add_quiet_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="no progress lines")


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """Add what every report on a task takes: the task, JSON instead of a table, no progress lines."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_quiet_option(parser)
    add_task_option(parser)


def add_seed_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=parse_seed, default=0, help="decides all random numbers (default: 0)")


def parse_seed(text: str) -> int:
    """Read a seed that every generator takes, as an argument's type."""
    seed = int(text)
    if not 0 <= seed < 2**31:
        raise argparse.ArgumentTypeError(f"must be from 0 to {2**31 - 1}, got {seed}")
    return seed


def say(message: str, *, quiet: bool = False) -> None:
    """Print progress on standard error, so that standard output holds only the answer."""
    if not quiet:
        print(message, file=sys.stderr, flush=True)


def write_json(document: dict[str, Any], out: Path | None, *, show: bool = True) -> None:
    """Write a document to `out` if given, and print it if `show`."""
    text = json.dumps(finite_json(document), indent=2)
    if out:
        write_whole(out, text + "\n")
    if show:
        print(text)
