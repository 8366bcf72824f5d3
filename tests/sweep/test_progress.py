import io

from rich.console import Console

from sweep.candidate import Candidate
from sweep.progress import Progress, describe


def candidate(trial: int, *, quality: float, worst: float) -> Candidate:
    metrics = {
        "balanced_quality": quality, "worst_family_gain": worst, "worst_family_harm": max(0.0, -worst), "kl": 2.0
    }  # fmt: skip
    return Candidate(trial, 50, {}, metrics, "m")


def watch(*, terminal: bool) -> tuple[Progress, io.StringIO]:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=120)
    return Progress("s", n_trials=4, max_harm=0.03, console=console), stream


def test_summary_counts_and_best_is_feasible() -> None:
    progress, _ = watch(terminal=False)
    for number in range(3):
        progress.started(number, {"kl_coef": 0.1}, steps=100)
    progress.judged(candidate(0, quality=0.6, worst=0.2))
    progress.judged(candidate(1, quality=0.9, worst=-0.2))
    progress.ended(0, "FINISHED", None)
    progress.ended(1, "FAILED", "broke")
    summary = progress.summary()
    assert "1/4 trials done, 1 running, 1 failed" in summary
    assert "quality 0.600, worst-family gain +0.200" in summary


def test_lines_without_a_terminal_have_no_control_codes() -> None:
    progress, stream = watch(terminal=False)
    with progress:
        progress.started(0, {"kl_coef": 0.1}, steps=100)
        progress.judged(candidate(0, quality=0.9, worst=-0.2))
        progress.ended(0, "FAILED", "it broke")
    assert "\x1b" not in stream.getvalue()
    assert "harms a family" in stream.getvalue()
    assert "trial 0 FAILED: it broke" in stream.getvalue()


def test_live_table_on_a_terminal_shows_running_trials() -> None:
    progress, stream = watch(terminal=True)
    with progress:
        progress.started(7, {"kl_coef": 0.123456}, steps=100)
        progress.judged(candidate(7, quality=0.61, worst=0.2))
        progress._live.refresh()
    assert "0.610" in stream.getvalue()
    assert "kl_coef 0.123" in stream.getvalue()


def test_describe_is_short() -> None:
    assert describe({"kl_coef": 0.0123456, "steps": 800, "reward_wrapper": "raw"}) == ("kl_coef 0.0123, steps 800, raw")
