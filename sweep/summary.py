"""What a finished sweep leaves behind for its reader: the front as a table, its plot, its headline figures."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from objectives.quality_model import ESTIMATE_NOTE
from objectives.release import MIN_BALANCED_GAIN
from search_spaces.space import STEPS
from sweep.candidate import Candidate, front, is_feasible
from sweep.plot import plot_candidates
from sweep.progress import describe
from sweep.tracking import Ledger, SweepRecord

FRONT_PLOT = "front.html"
FRONT_TABLE = "front.json"


def write_summary(ledger: Ledger, sweep: SweepRecord, candidates: Sequence[Candidate], *, max_harm: float) -> None:
    """Log the front's table and plot, and the sweep's figures, to the parent run."""
    ledger.add_text(sweep, FRONT_PLOT, plot_candidates(candidates, title=f"Sweep {sweep.name}", max_harm=max_harm))
    best = front(candidates, max_harm=max_harm)
    if best:
        ledger.add_table(sweep, FRONT_TABLE, _columns(best))
    figures = {
        "candidates": float(len(candidates)),
        "feasible_candidates": float(sum(is_feasible(c, max_harm=max_harm) for c in candidates)),
        "front_size": float(len(best)),
    }
    if best:
        figures["best_balanced_quality"] = max(c.quality for c in best)
        figures["best_worst_family_gain"] = max(c.worst_gain for c in best)
    ledger.add_summary(sweep, figures)


def wide_console() -> Console:
    """Return a console on standard error that does not break table rows where there is no terminal to fit."""
    console = Console(stderr=True)
    return console if console.is_terminal else Console(stderr=True, width=120)


def print_front(candidates: Sequence[Candidate], *, max_harm: float, console: Console) -> None:
    """Print the front, lowest KL first."""
    best = front(candidates, max_harm=max_harm)
    if not candidates:
        console.print("No checkpoint was judged.", highlight=False)
        return
    if not best:
        console.print(f"No candidate is feasible: every one harms a family by more than {max_harm}.", highlight=False)
        return
    table = Table(title=f"Front: {len(best)} of {len(candidates)} candidates", title_justify="left", box=None)
    for heading in ("trial", "step", "KL", "quality", "gain", "worst family", "settings"):
        table.add_column(heading, justify="left" if heading == "settings" else "right", no_wrap=heading != "settings")
    for c in best:
        settings = describe({name: value for name, value in c.params.items() if name != STEPS})
        figures = (f"{c.kl:.2f}", f"{c.quality:.3f}", f"{c.gain:+.3f}", f"{c.worst_gain:+.3f}")
        table.add_row(str(c.trial), str(c.step), *figures, settings)
    console.print(table)
    console.print(
        f"Quality and gain are balanced over families; the reference has {best[0].quality - best[0].gain:.3f}. "
        f"To ship, a gain of {MIN_BALANCED_GAIN:+.2f} is needed too.",
        highlight=False,
    )
    console.print(ESTIMATE_NOTE, highlight=False)


def _columns(candidates: Sequence[Candidate]) -> dict[str, list[object]]:
    return {
        "trial": [c.trial for c in candidates],
        "step": [c.step for c in candidates],
        "kl": [c.kl for c in candidates],
        "balanced_quality": [c.quality for c in candidates],
        "balanced_gain": [c.gain for c in candidates],
        "worst_family_gain": [c.worst_gain for c in candidates],
        "worst_family_harm": [c.harm for c in candidates],
        "settings": [describe(c.params) for c in candidates],
        "model_id": [c.model_id for c in candidates],
    }
