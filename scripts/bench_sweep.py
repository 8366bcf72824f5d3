"""Measure what a sweep costs beyond training and judging: time a trial, driver memory, idle cores.

    python scripts/bench_sweep.py [--idle-trials 200] [--trials 24] [--max-steps 800] [--task DIR]

Two processes, one after the other, on two CPUs with one torch thread a trial:

`idle`  runs trials that do nothing: search, judging, saving and recording with files are all that they take.
`real`  runs the default space. What its cores did not spend on training or judging is overhead.

A trial that does nothing is judged and saved at the rungs of a real one, with as many figures. Memory is the driver's
private memory, and its growth is measured after the first tenth of the trials. Prints a table and one JSON line.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlhf.taskdir import find_task_dir
from search_spaces.kl_mix import SPACE
from search_spaces.space import SearchSpace

CPUS = 2
_RUNGS = 4
_OTHER_FIGURES = 43  # by family, and standard errors: six families have 48 figures in all
_PARTS = ("idle", "real")
_FIGURES = ("balanced_quality", "balanced_gain", "worst_family_gain", "worst_family_harm", "kl")


@dataclass
class Marks:
    """Note time and private memory of the driver whenever a trial is suggested."""

    times: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)

    def note(self) -> None:
        self.times.append(time.time())
        self.memory.append(private_bytes())

    def figures(self) -> dict[str, float]:
        """Return seconds and KB a trial after the first tenth, and how the second half compares with the first."""
        start, end = len(self.times) // 10, len(self.times) - 1
        middle = (start + end) // 2
        first, second = (self._seconds(start, middle), self._seconds(middle, end))
        slope = np.polyfit(np.arange(start, end + 1), self.memory[start:], 1)[0]
        return {
            "s_a_trial": self._seconds(start, end), "s_a_trial_first_half": first, "s_a_trial_second_half": second,
            "driver_kb_a_trial": slope / 1e3, "driver_mb": self.memory[-1] / 1e6,
        }  # fmt: skip

    def _seconds(self, start: int, end: int) -> float:
        return (self.times[end] - self.times[start]) / (end - start)


def private_bytes() -> int:
    """Return the resident memory that this process shares with no other (Linux)."""
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * 4096


@dataclass
class IdleRun:
    """Train nothing; report figures that depend on the settings only by chance."""

    rng: np.random.Generator
    step: int = 0

    def advance(self, until_step: int) -> list[dict[str, float]]:
        self.step = until_step
        return [{"step": until_step, "kl": 0.0, "loss": 0.0}]

    def judge(self) -> dict[str, float]:
        gain = self.rng.normal(0.1, 0.1)
        figures = dict(zip(_FIGURES, (0.3 + gain, gain, gain, max(0.0, -gain), self.rng.uniform(0, 5)), strict=True))
        return {**figures, **{f"figure/{number}": self.rng.random() for number in range(_OTHER_FIGURES)}}

    def save(self, folder: Path) -> None:
        for name in ("model", "state"):
            (folder / name).mkdir(parents=True)
            (folder / name / "weights").write_bytes(bytes(1000))

    def load(self, folder: Path) -> None:
        self.step = 0


@dataclass
class IdleWorkload:
    digest: str = "idle"

    def check(self, space: SearchSpace) -> None: ...

    def warnings(self) -> tuple[str, ...]:
        return ()

    def documents(self) -> dict[str, bytes]:
        return {}

    def config(self, params: Mapping[str, Any], *, seed: int) -> dict[str, Any]:
        MARKS.note()
        return {**params, "seed": seed}

    def start(self, config: Mapping[str, Any]) -> IdleRun:
        return IdleRun(np.random.default_rng(config["seed"]))


@dataclass
class TimedRun:
    """Pass everything on to a real trial, and report what its training and judging took."""

    run: Any
    started_at: float
    busy_s: float = 0.0

    @property
    def step(self) -> int:
        return int(self.run.step)

    def advance(self, until_step: int) -> list[dict[str, float]]:
        return self._timed(lambda: self.run.advance(until_step))

    def judge(self) -> dict[str, float]:
        scores = self._timed(self.run.judge)
        return {**scores, "busy_s": self.busy_s, "started_at": self.started_at, "judged_at": time.time()}

    def save(self, folder: Path) -> None:
        self.run.save(folder)

    def load(self, folder: Path) -> None:
        self.run.load(folder)

    def _timed(self, call: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = call()
        self.busy_s += time.perf_counter() - started
        return result


@dataclass
class TimedWorkload:
    workload: Any

    @property
    def digest(self) -> str:
        return str(self.workload.digest)

    def check(self, space: SearchSpace) -> None:
        self.workload.check(space)

    def warnings(self) -> tuple[str, ...]:
        return ()

    def documents(self) -> Mapping[str, bytes]:
        return {}

    def config(self, params: Mapping[str, Any], *, seed: int) -> Mapping[str, Any]:
        MARKS.note()
        return self.workload.config(params, seed=seed)

    def start(self, config: Mapping[str, Any]) -> TimedRun:
        return TimedRun(self.workload.start(config), started_at=time.time())


MARKS = Marks()


def idle(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    from sweep.recording import Recording
    from sweep.search import ConstrainedSearch

    recording = time_spent(Recording, "start_trial", "add_candidate", "finish_trial")
    searching = time_spent(ConstrainedSearch, "suggest", "on_trial_result", "on_trial_complete")
    space = SearchSpace(name="idle", distributions=SPACE.distributions, max_steps=args.max_steps, rungs=_RUNGS)
    candidates, total_s = sweep(space, IdleWorkload(), args.idle_trials, args, folder)
    return {
        **MARKS.figures(), "recording_s_a_trial": sum(recording) / args.idle_trials,
        "searching_s_a_trial": sum(searching) / args.idle_trials, "trials": args.idle_trials,
        "checkpoints": len(candidates), "total_s": total_s,
    }  # fmt: skip


def time_spent(owner: type, *methods: str) -> list[float]:
    """Make a class note what every call of these methods takes, in seconds, in the list returned."""
    spent: list[float] = []

    def noting(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                spent.append(time.perf_counter() - started)

        return call

    for name in methods:
        setattr(owner, name, noting(getattr(owner, name)))
    return spent


def real(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    from sweep.workload import open_workload

    space = SPACE.capped(args.max_steps)
    workload = TimedWorkload(open_workload(space.workload, find_task_dir(args.task), space))
    candidates, total_s = sweep(space, workload, args.trials, args, folder)
    last = {candidate.trial: candidate.metrics for candidate in candidates}  # in the order of steps
    busy_s = sum(metrics["busy_s"] for metrics in last.values())
    core_s = CPUS * (max(metrics["judged_at"] for metrics in last.values()) - MARKS.times[0])
    ends = [sorted(metrics[name] for metrics in last.values()) for name in ("started_at", "judged_at")]
    start_s = sum(ends[0][:CPUS]) - CPUS * MARKS.times[0]
    idle_s = CPUS * ends[1][-1] - sum(ends[1][-CPUS:])
    return {
        "trials": args.trials, "checkpoints": len(candidates), "total_s": total_s, "search_s": core_s / CPUS,
        "busy_share": busy_s / core_s, "worker_start_core_s": start_s, "last_trials_idle_core_s": idle_s,
        "overhead_core_s_a_trial": (core_s - start_s - idle_s - busy_s) / args.trials,
    }  # fmt: skip


def sweep(
    space: SearchSpace, workload: Any, trials: int, args: argparse.Namespace, folder: Path
) -> tuple[list[Any], float]:
    """Run one sweep; return its candidates and how long it took from start to end."""
    from sweep.options import SweepOptions
    from sweep.run import Plan, run_sweep
    from sweep.tracking import Ledger

    uri = f"sqlite:///{folder}/mlflow.db"
    options = SweepOptions(
        space=space.name, name="bench", task_dir=find_task_dir(args.task), tracking_uri=uri, concurrency=CPUS,
        storage_path=str(folder / "ray"),
    )  # fmt: skip
    started = time.monotonic()
    record = run_sweep(options, Plan(space, workload, trials))
    return Ledger(uri).candidates(record), time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what a sweep costs beyond training and judging.")
    parser.add_argument("--idle-trials", type=int, default=200, help="trials that do nothing (default: %(default)s)")
    parser.add_argument("--trials", type=int, default=24, help="trials of the default space (default: %(default)s)")
    parser.add_argument("--max-steps", type=int, default=800, help="their longest (default: %(default)s)")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS, help="which to run (default: all)")
    parser.add_argument("--task", help="task directory")
    parser.add_argument("--inside", choices=_PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        with tempfile.TemporaryDirectory(prefix="bench-sweep-") as folder:
            print(json.dumps({"idle": idle, "real": real}[args.inside](args, Path(folder))))
        return
    results = {part: _run_apart(part) for part in _PARTS if part in args.parts}
    print(f"{CPUS} CPUs, 1 thread a trial, {platform.machine()}")
    print(table(results))
    document: dict[str, Any] = {"cpus": CPUS, "threads_a_trial": 1, "machine": platform.machine(), **results}
    if {"stock", "idle"} <= results.keys():
        document["stock_over_idle"] = results["stock"]["s_a_trial"] / results["idle"]["s_a_trial"]
        print(
            f"a trial that does nothing takes {document['stock_over_idle']:.2f} times as long with Ray Tune's own parts"
        )
    print(json.dumps(document))


def table(results: Mapping[str, Mapping[str, float]]) -> str:
    """Lay figures out as rows, parts as columns."""
    names = dict.fromkeys(name for figures in results.values() for name in figures)
    lines = [f"{'':<26}" + "".join(f"{part:>10}" for part in results)]
    for name in names:
        cells = [f"{figures[name]:.4g}" if name in figures else "-" for figures in results.values()]
        lines.append(f"{name:<26}" + "".join(f"{cell:>10}" for cell in cells))
    return "\n".join(lines)


def _run_apart(part: str) -> dict[str, float]:
    """Run one part in a process of its own, so that none inherits another's memory."""
    command = [sys.executable, __file__, *sys.argv[1:], "--inside", part]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"part {part} failed:\n{done.stderr[-4000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    main()
