"""The sweep's picture: balanced quality against KL, coloured by harm, infeasible greyed, the front ringed."""

from collections.abc import Sequence

import plotly.graph_objects as go

from objectives.release import MIN_BALANCED_GAIN
from sweep.candidate import Candidate, front, is_feasible
from sweep.progress import describe

_GREY = "#c8c8c8"


def plot_candidates(candidates: Sequence[Candidate], *, title: str, max_harm: float) -> str:
    """Return one interactive page as HTML that works offline."""
    feasible = [c for c in candidates if is_feasible(c, max_harm=max_harm)]
    harmful = [c for c in candidates if not is_feasible(c, max_harm=max_harm)]
    on_front = front(candidates, max_harm=max_harm)
    figure = go.Figure()
    figure.add_trace(_points(harmful, "harms a family", {"color": _GREY, "size": 8, "symbol": "x"}))
    by_harm = {
        "color": [c.harm for c in feasible], "colorscale": "Viridis", "cmin": 0, "cmax": max_harm, "size": 9,
        "colorbar": {"title": "worst-family harm"},
    }  # fmt: skip
    figure.add_trace(_points(feasible, "feasible", by_harm))
    ring = {"size": 15, "color": "rgba(0,0,0,0)", "line": {"color": "#d62728", "width": 2}}
    figure.add_trace(
        go.Scatter(
            x=[c.kl for c in on_front], y=[c.quality for c in on_front], mode="markers", name="front",
            hoverinfo="skip", marker=ring,
        )
    )  # fmt: skip
    if candidates:
        reference = candidates[0].quality - candidates[0].gain
        for height, text in ((reference, "reference"), (reference + MIN_BALANCED_GAIN, "least to ship")):
            figure.add_hline(y=height, line={"dash": "dot", "width": 1, "color": "#888"}, annotation_text=text)
    figure.update_layout(
        title=title, template="plotly_white", xaxis_title="KL from the reference (nats a sequence)",
        yaxis_title="balanced quality (label-inferred)", legend={"orientation": "h", "y": -0.15},
    )  # fmt: skip
    return str(figure.to_html(include_plotlyjs=True, full_html=True, default_height="95vh"))


def _points(candidates: Sequence[Candidate], name: str, marker: dict[str, object]) -> go.Scatter:
    text = [
        f"trial {c.trial}, step {c.step}<br>{describe(c.params)}<br>quality {c.quality:.4f}, gain {c.gain:+.4f}"
        f"<br>worst-family gain {c.worst_gain:+.4f}, KL {c.kl:.3f}"
        for c in candidates
    ]
    return go.Scatter(
        x=[c.kl for c in candidates], y=[c.quality for c in candidates], mode="markers", name=name,
        marker=marker, text=text, hoverinfo="text",
    )  # fmt: skip
