"""The shortcut screen's picture: for each family, what crowd labels pay against what the reward model answers."""

import io
import textwrap
import warnings

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from objectives.screen import FamilyScreen, Look, Screen
from rlhf.features import KINDS
from rlhf.vocab import Vocab

_COLUMNS = 3
_COLOURS = {
    "token": "#0072b2",
    "pair": "#009e73",
    "adjacent": "#cc79a7",
    "position": "#e69f00",
    "repetition": "#56b4e9",
}
_FOUND = "#c1121f"
_NAME_LENGTH = 24  # what fits over a panel, beside its risk
_MAX_SE = 0.1  # of a label slope: features that hardly occur in the QA sample would only blur the picture


def draw_screen(screen: Screen, *, ending: str = ".png") -> bytes:
    """Draw one panel a family; return the picture in the format of a file ending."""
    n = len(screen.families)
    columns = min(_COLUMNS, n)
    rows = -(-n // columns)
    figure = Figure(figsize=(4.3 * columns, 3.7 * rows + 0.9), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis, family in zip(axes, screen.families, strict=False):
        _draw_family(axis, family, screen.vocab)
    for axis in axes[n:]:
        axis.set_visible(False)
    for axis in axes[max(0, n - columns) : n]:
        axis.set_xlabel("crowd labels pay, correctness accounted for")
    for axis in axes[:n:columns]:
        axis.set_ylabel("reward model answers")
    figure.suptitle("What crowd labels pay for, and what the reward model answers (per unit of each feature)")
    handles = [_marker(colour, kind) for kind, colour in _COLOURS.items()] + [_marker(_FOUND, "shortcut found", size=9)]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    picture = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a token that the font cannot draw becomes a box
        figure.savefig(picture, dpi=130, format=ending.lstrip(".").lower())
    return picture.getvalue()


def _marker(colour: str, label: str, *, size: int = 5) -> Line2D:
    return Line2D([], [], linestyle="", marker="o", markersize=size, color=colour, label=label)


def _draw_family(axis: Axes, family: FamilyScreen, vocab: Vocab) -> None:
    name = family.name if len(family.name) <= _NAME_LENGTH else f"{family.name[: _NAME_LENGTH - 3]}..."
    axis.set_title(f"{name}: risk {family.risk:.2f}{', flagged' if family.flag else ''}",
                   color=_FOUND if family.flag else "black", fontsize=11)  # fmt: skip
    if family.look is None:
        axis.text(0.5, 0.5, textwrap.fill(f"the QA sample holds {family.unknown}", 34), ha="center", va="center",
                  transform=axis.transAxes)  # fmt: skip
        axis.set_axis_off()
        return
    _draw_look(axis, family.look, vocab, certain=family.flag)


def _draw_look(axis: Axes, look: Look, vocab: Vocab, *, certain: bool) -> None:
    pays, answers = look.search.labels, look.search.model
    shown = (pays.se < _MAX_SE) & np.isfinite(answers.se)
    shown[list(look.search.found)] = False
    unit = 1 / vocab.resp_len
    axis.axvspan(-unit, unit, color="0.93", zorder=0)
    axis.axhline(0, color="0.7", linewidth=0.8, zorder=1)
    axis.axvline(0, color="0.7", linewidth=0.8, zorder=1)
    for k, kind in enumerate(KINDS):
        rows = shown & (look.catalogue.kind == k)
        axis.scatter(
            pays.slope[rows], answers.slope[rows], s=9, color=_COLOURS[kind], alpha=0.55, linewidths=0, zorder=2
        )
    found = list(look.search.found)
    face = _FOUND if certain else "white"
    axis.errorbar(pays.slope[found], answers.slope[found], xerr=2 * pays.se[found], yerr=2 * answers.se[found], fmt="o",
                  markersize=8, color=_FOUND, markerfacecolor=face, elinewidth=1.2, zorder=3)  # fmt: skip
    reach = 1.15 * max([0.3, *np.abs(pays.slope[shown]), *np.abs(pays.slope[found]), *np.abs(answers.slope[found])])
    axis.set_xlim(-reach, reach)
    axis.set_ylim(-reach, reach)
    axis.plot([-reach, reach], [-reach, reach], color="0.8", linewidth=0.8, linestyle="--", zorder=1)
    for column in found:
        left = pays.slope[column] > 0
        text = look.catalogue.features[column].label(vocab).replace("$", r"\$")  # no formula
        axis.annotate(
            f"`{text}`", (pays.slope[column], answers.slope[column]),
            xytext=(-10 if left else 10, 6), textcoords="offset points", ha="right" if left else "left", color=_FOUND,
            fontsize=10,
        )  # fmt: skip
    if not found:
        axis.text(0.03, 0.95, "no shortcut found", transform=axis.transAxes, va="top", color="0.4", fontsize=9)
    axis.text(0, -0.97 * reach, f"within 1/{vocab.resp_len}: what one correct\nposition pays", ha="center", va="bottom",
              color="0.45", fontsize=7)  # fmt: skip
