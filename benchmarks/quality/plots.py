"""Pictures of rows; importing this module needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

Row = dict[str, Any]
COLOURS = plt.get_cmap("tab20").colors


def plot_budgets(rows: list[Row], path: Path) -> list[Path]:
    """KL against the budget, a panel a task, a line a method."""
    rows = [row for row in rows if row["method"] != "full" and "(" not in row["method"]]
    return _panels(rows, sorted({row["task"] for row in rows}), path, _budget_panel)


def _budget_panel(axes: Any, rows: list[Row], methods: list[str]) -> None:
    for method in methods:
        mine = sorted((row for row in rows if row["method"] == method), key=lambda row: row["budget"] or 0)
        if not mine:
            continue
        kl = [row["metrics"]["kl"] for row in mine]
        if mine[0]["budget"] is None:
            axes.axhline(kl[0][0], **_style(method, methods), linestyle=":")
            continue
        budgets = [row["budget"] for row in mine]
        mean, low, high = zip(*kl, strict=True)
        axes.plot(budgets, mean, marker="o", markersize=3, **_style(method, methods))
        axes.fill_between(budgets, low, high, alpha=0.12, color=_style(method, methods)["color"])
    axes.set(xlabel="budget (tokens a KV head)", ylabel="KL to the full cache", xscale="log", yscale="log")


def plot_positions(rows: list[Row], path: Path) -> list[Path]:
    """KL by distance from the prompt's end, a panel a text and budget."""
    rows = [row for row in rows if row.get("by_position") and row["method"] != "full" and "(" not in row["method"]]
    budgets = sorted({row["budget"] for row in rows if row["budget"]})
    panels = [(task, budget) for task in sorted({row["task"] for row in rows}) for budget in budgets]
    return _panels(rows, panels, path, _position_panel)


def _position_panel(axes: Any, rows: list[Row], methods: list[str]) -> None:
    for method in methods:
        for row in rows:
            if row["method"] == method:
                places = [(bucket["from"] + bucket["to"]) / 2 for bucket in row["by_position"]]
                kl = [bucket["kl"] for bucket in row["by_position"]]
                axes.plot(places, kl, marker="o", markersize=3, **_style(method, methods))
    axes.set(xlabel="tokens after the prompt", ylabel="KL to the full cache", xscale="log", yscale="log")


def _panels(rows: list[Row], panels: list[Any], path: Path, draw: Any) -> list[Path]:
    """A figure with a panel for each task, or task and budget."""
    if not panels:
        return []
    methods = sorted({row["method"] for row in rows})
    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    figure, all_axes = plt.subplots(lines, columns, figsize=(4.2 * columns, 3.4 * lines), squeeze=False)
    for axes, panel in zip(all_axes.flat, panels, strict=False):
        task, budget = panel if isinstance(panel, tuple) else (panel, None)
        draw(axes, [row for row in rows if row["task"] == task and budget in (None, row["budget"])], methods)
        axes.set_title(task if budget is None else f"{task}, budget {budget}", fontsize=9)
        axes.grid(alpha=0.3)
    for axes in all_axes.flat[len(panels) :]:
        axes.axis("off")
    handles = [plt.Line2D([], [], **_style(method, methods)) for method in methods]
    figure.legend(handles, methods, loc="lower center", ncol=min(6, len(methods)), fontsize=8)
    figure.tight_layout(rect=(0, 0.12 / lines + 0.02, 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return [path]


def _style(method: str, methods: list[str]) -> dict[str, Any]:
    is_ours = method.startswith("ours")
    return {
        "color": "black" if is_ours else COLOURS[methods.index(method) % len(COLOURS)],
        "linewidth": 2.2 if is_ours else 1.1,
        "label": method,
    }
