"""A live view of a running sweep: a small table on a terminal, plain lines anywhere else. On standard error."""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from sweep.candidate import Candidate, is_feasible
from sweep.tracking import FAILED, FINISHED


@dataclass(slots=True)
class _Running:
    params: Mapping[str, Any]
    steps: int
    last: Candidate | None = None


class Progress:
    """Show trials done, running and failed, the best feasible candidate, and the time left."""

    def __init__(self, name: str, *, n_trials: int, max_harm: float, console: Console | None = None) -> None:
        self._name, self._n_trials, self._max_harm = name, n_trials, max_harm
        self._console = console or Console(stderr=True)
        self._running: dict[int, _Running] = {}
        self._ended: Counter[str] = Counter()
        self._best: Candidate | None = None
        self._started_at = time.monotonic()
        self._live = Live(get_renderable=self._table, console=self._console, refresh_per_second=2, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def say(self, message: str) -> None:
        """Print one line above the live view."""
        self._console.print(message, highlight=False, markup=False, soft_wrap=True)

    def started(self, number: int, params: Mapping[str, Any], *, steps: int) -> None:
        self._running[number] = _Running(params, steps)
        if not self._console.is_terminal:
            self.say(f"{self._clock()} trial {number} started: {describe(params)}")

    def judged(self, candidate: Candidate) -> None:
        if running := self._running.get(candidate.trial):
            running.last = candidate
        feasible = is_feasible(candidate, max_harm=self._max_harm)
        if feasible and (self._best is None or candidate.quality > self._best.quality):
            self._best = candidate
        if not self._console.is_terminal:
            harm = "" if feasible else "  harms a family"
            self.say(f"{self._clock()} trial {candidate.trial} step {candidate.step}: {_figures(candidate)}{harm}")

    def ended(self, number: int, status: str, reason: str | None) -> None:
        self._running.pop(number, None)
        self._ended[status] += 1
        if reason:
            self.say(f"{self._clock()} trial {number} {status}: {reason}")
        if not self._console.is_terminal:
            self.say(f"{self._clock()} {self.summary()}")

    def summary(self) -> str:
        """Say where the sweep stands in one line."""
        done, failed = self._ended[FINISHED], self._ended[FAILED]
        best = f"best feasible: {_figures(self._best)}" if self._best else "no feasible candidate yet"
        counts = f"{done}/{self._n_trials} trials done, {len(self._running)} running, {failed} failed"
        return f"{counts}; {best}; {self._time_left()}"

    def _table(self) -> Table:
        table = Table(title=f"{self._name}   {self._clock()}", title_justify="left", caption=self.summary(),
                      caption_justify="left", box=None, pad_edge=False, expand=True)  # fmt: skip
        for heading in ("trial", "step", "quality", "worst gain", "KL", "settings"):
            table.add_column(heading, justify="left" if heading == "settings" else "right", overflow="ellipsis")
        for number, running in sorted(self._running.copy().items()):
            last = running.last
            figures = (f"{last.quality:.3f}", f"{last.worst_gain:+.3f}", f"{last.kl:.2f}") if last else ("-", "-", "-")
            step = f"{last.step if last else 0}/{running.steps}"
            table.add_row(str(number), step, *figures, describe(running.params))
        return table

    def _clock(self) -> str:
        seconds = int(time.monotonic() - self._started_at)
        return f"[{seconds // 60:02d}:{seconds % 60:02d}]"

    def _time_left(self) -> str:
        parts = [running.last.step / running.steps for running in list(self._running.values()) if running.last]
        share = (self._ended.total() + sum(parts)) / self._n_trials
        if share <= 0:
            return "time left: estimating"
        left_s = (time.monotonic() - self._started_at) * (1 - share) / share
        return f"about {left_s / 60:.0f} min left" if left_s >= 90 else f"about {left_s:.0f} s left"


def describe(params: Mapping[str, Any]) -> str:
    """Write settings in one short line: numbers with their names, choices as they are."""
    return ", ".join(
        value if isinstance(value, str) else f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in params.items()
    )


def _figures(candidate: Candidate) -> str:
    return f"quality {candidate.quality:.3f}, worst-family gain {candidate.worst_gain:+.3f}, KL {candidate.kl:.2f}"
