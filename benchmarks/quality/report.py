"""Tables and plots from rows: what a budget costs, by task and method."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.quality.rows import read_rows

Row = dict[str, Any]


def write_report(rows_path: Path, out: Path) -> list[Path]:
    """Write ``quality.md`` and the plots beside it.

    Returns:
        The files written; no plots where matplotlib is not installed.
    """
    rows = read_rows(rows_path)
    out.mkdir(parents=True, exist_ok=True)
    table = out / "quality.md"
    table.write_text(markdown(rows))
    return [table, *_plots(rows, out)]


def markdown(rows: list[Row]) -> str:
    """All tables, a section for each model and length."""
    parts = ["# Quality by method and budget", "", LEGEND]
    for (model, length), group in sorted(_grouped(rows, "model", "length").items()):
        parts += ["", f"## {model}, prompts of {length} tokens", "", _provenance(group)]
        parts += ["", "### Differences from the full cache, by task", "", *_overview(group)]
        for task, of_task in sorted(_grouped(group, "task").items()):
            parts += ["", f"### {task[0]}", "", *_task_table(of_task)]
    return "\n".join(parts) + "\n"


LEGEND = """\
Every method attends to the same sinks and window and, of the tokens between them, to as many as the budget says, per KV
head (`oracle_q`, `quest`, `infinigen` and `clusterkv`: per query head). Tokens are forced one at a time through real
decode steps after an exact prefill. KL is from the full cache's next-token distribution, mean over scored steps; top-1
the share of steps with the same most likely token; recovered the share of the answer NLL that sinks and recent tokens
alone lose at the same budget and the method regains. Brackets are 95 % bootstrap intervals over answers, or over blocks
of 32 steps of running text. `kivi` has no budget: it attends to all tokens, quantised. kvpress (0.5.5) is not here: it
pins transformers below 5.3, and its hooks read `cache_position`, which 5.17 no longer passes."""


def _provenance(rows: list[Row]) -> str:
    def all_of(get: Callable[[Row], str]) -> str:
        return ", ".join(sorted({get(row) for row in rows}))

    versions = all_of(lambda row: f"torch {row['versions']['torch']}, transformers {row['versions']['transformers']}")
    return (
        f"{all_of(lambda row: row['dtype'])}; {all_of(lambda row: row['machine'])}; {versions};"
        f" commit {all_of(lambda row: row['commit'])}; {all_of(lambda row: row['date'][:10])}"
    )


def _overview(rows: list[Row]) -> list[str]:
    """One line a method and budget: mean KL and answer accuracy over tasks that all lines have."""
    cells = {(row["method"], row["budget"], row["task"]): row for row in rows}
    lines = sorted({(row["method"], row["budget"]) for row in rows}, key=_line_order)
    tasks = sorted({row["task"] for row in rows})
    table = [["method", "budget", "tasks", "mean KL", *tasks]]
    for method, budget in lines:
        mine = {task: cells.get((method, budget, task)) for task in tasks}
        kls = [row["metrics"]["kl"][0] for row in mine.values() if row]
        shown = [_number(row["metrics"]["kl"][0]) if row else "" for row in mine.values()]
        table.append([method, _budget(budget), str(len(kls)), _number(sum(kls) / len(kls)), *shown])
    return ["KL, by task:", "", *_markdown_table(table)]


def _task_table(rows: list[Row]) -> list[str]:
    rows = sorted(rows, key=lambda row: _line_order((row["method"], row["budget"])))
    is_text = rows[0]["is_text"]
    first = rows[0]
    head = ["method", "budget", "KL", "top-1", "NLL change"]
    head += ["perplexity"] if is_text else ["exact", "tokens right", "recovered"]
    table = [head]
    for row in rows:
        line = [
            row["method"],
            _budget(row["budget"]),
            _interval(row["metrics"]["kl"]),
            f"{row['metrics']['top1'][0]:.3f}",
        ]
        line.append(_interval(row["change"]["nll"], "+"))
        table.append(line + (_text_cells(row) if is_text else _answer_cells(row)))
    unit = "blocks of 32 steps" if is_text else "answers"
    full = next((row for row in rows if row["method"] == "full"), first)
    return [f"{first['items']} items, {full['units']} {unit}; full cache: NLL {full['metrics']['nll'][0]:.3f}", "",
            *_markdown_table(table)]  # fmt: skip


def _text_cells(row: Row) -> list[str]:
    return [f"{row['ppl_change_percent'][0]:+.2f} %"]


def _answer_cells(row: Row) -> list[str]:
    recovered = row.get("recovered")
    share = "" if recovered is None else f"{recovered:.2f}"
    return [_interval(row["metrics"]["exact"]), f"{row['metrics']['token_accuracy'][0]:.3f}", share]


def _line_order(line: tuple[str, int | None]) -> tuple[int, str, int]:
    """The full cache first, ours last, budgets ascending."""
    method, budget = line
    rank = 0 if method == "full" else 2 if method.startswith("ours") else 1
    return rank, method, budget or 0


def _budget(budget: int | None) -> str:
    return "all" if budget is None else str(budget)


def _number(x: float) -> str:
    return f"{x:.4f}" if abs(x) < 0.1 else f"{x:.2f}"


def _interval(values: list[float], sign: str = "") -> str:
    mean, low, high = values
    digits = 4 if abs(mean) < 0.1 else 2
    return f"{mean:{sign}.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def _markdown_table(table: list[list[str]]) -> list[str]:
    lines = [f"| {' | '.join(row)} |" for row in table]
    return [lines[0], f"|{' --- |' * len(table[0])}", *lines[1:]]


def _grouped(rows: Iterable[Row], *names: str) -> dict[tuple, list[Row]]:
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[name] for name in names)].append(row)
    return groups


def _plots(rows: list[Row], out: Path) -> list[Path]:
    try:
        from benchmarks.quality.plots import plot_budgets, plot_positions
    except ImportError:
        return []
    paths = []
    for (model, length), group in sorted(_grouped(rows, "model", "length").items()):
        name = f"{str(model).strip('/').replace('/', '_')}_{length}"
        paths += plot_budgets(group, out / f"quality_{name}_budgets.png")
        paths += plot_positions(group, out / f"quality_{name}_positions.png")
    return paths
