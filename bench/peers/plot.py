"""The bench as a picture: a row a scenario, a dot a policy, the bound at the left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from qreward_plugins.simulation import SCENARIOS

from . import POLICIES
from .results import Run, mean

COLOURS = {
    "ours": "#0b6e4f",
    "ours-warm": "#3fbf8f",
    "litellm": "#d1495b",
    "qreward": "#edae49",
    "verl": "#30638e",
    "slime": "#8d6a9f",
    "curator": "#8c5e3c",
    "tenacity": "#7d8597",
}
INK, GREY = "#222222", "#b8bec4"
TICKS = (1, 1.5, 2, 3, 5, 10, 20, 50, 100)


def draw(runs: Sequence[Run], path: Path) -> None:
    """Write the picture to `path`; its ending says the format."""
    sizes = sorted({run.samples for run in runs})
    policies = [name for name in POLICIES if any(run.policy == name for run in runs)]
    scenarios = [name for name in SCENARIOS if any(run.scenario == name for run in runs)]
    rows = [*scenarios, "mean"]
    figure, axes = pyplot.subplots(
        1,
        len(sizes),
        figsize=(max(8.0, 2.6 + 4.2 * len(sizes)), 1.9 + 0.34 * len(rows)),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    ratios = {
        (size, row, name): mean(
            run.ratio for run in runs if run.samples == size and run.policy == name and (row in ("mean", run.scenario))
        )
        for size in sizes
        for row in rows
        for name in policies
    }
    longest = max(ratio for ratio in ratios.values() if ratio == ratio)
    for column, (axis, size) in enumerate(zip(axes[0], sizes, strict=True)):
        axis.set_xscale("log")
        axis.set_xlim(0.8, max(6.0, 1.25 * longest))
        axis.axvline(1.0, color=INK, linewidth=1)
        axis.axhspan(len(rows) - 1.5, len(rows) - 0.5, color="#f0f2f4", linewidth=0)
        for y, row in enumerate(rows):
            here = {name: ratios[size, row, name] for name in policies}
            axis.plot([min(here.values()), max(here.values())], [y, y], color=GREY, linewidth=1, zorder=1)
            for name in reversed(policies):
                own = name.startswith("ours")
                axis.scatter(
                    here[name], y, s=74 if own else 36, color=COLOURS[name], edgecolor="white", linewidth=0.8,
                    zorder=3 if own else 2, label=name if column == 0 and y == 0 else None,
                )  # fmt: skip
        axis.set_title(f"{size} samples", loc="left", fontsize=11, color=INK)
        axis.xaxis.set_major_locator(FixedLocator([tick for tick in TICKS if tick <= axis.get_xlim()[1]]))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
        axis.set_yticks(range(len(rows)), [*scenarios, "mean of all"])
        axis.tick_params(length=0, labelsize=9)
        axis.invert_yaxis() if column == 0 else None
        for side in ("top", "right", "left", "bottom"):
            axis.spines[side].set_visible(False)
        axis.grid(axis="x", color="#e6e9ec", linewidth=0.8)
        axis.set_axisbelow(True)
    handles, labels = axes[0][0].get_legend_handles_labels()
    shown = dict(zip(labels, handles, strict=True))
    figure.legend(
        [shown[name] for name in policies],
        [POLICIES[name].title for name in policies],
        loc="outside lower center", ncols=min(2 + len(sizes), len(policies)), frameon=False, fontsize=9,
    )  # fmt: skip
    figure.suptitle(
        "How long a batch takes, as a multiple of the shortest time it could take", x=0.01, ha="left", fontsize=13,
        color=INK,
    )  # fmt: skip
    figure.savefig(path, dpi=160)
    pyplot.close(figure)


__all__ = ["draw"]
