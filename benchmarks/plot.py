"""The README's plots and tables, drawn from the rows that the benchmarks wrote.

    python -m benchmarks.plot                # PNG files and a markdown table, from benchmarks/results/*.jsonl
    python -m benchmarks.plot --run 1a2b3c4d # only one run's rows

Of equal measurements the newest counts. Rows that lost are in the table like any other.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks import rows
from benchmarks.quality.rows import RESULTS

Row = dict[str, Any]
KEY = (
    "benchmark", "what", "shape", "model", "batch", "context", "cap_gib", "miss_target", "trace", "piece_kib", "mib",
    "spread", "gpu_cache_size", "peer",
)  # fmt: skip
COLUMNS: dict[str, tuple[str, ...]] = {
    "decode": (
        "what", "batch", "context", "cap_gib", "gpu_cache_size", "miss_rate", "ms", "ms_p10", "ms_p90",
        "tokens_per_s", "peer", "ratio", "bar", "won", "note",
    ),
    "prefill": (
        "what", "batch", "context", "cap_gib", "ms", "ms_p10", "ms_p90", "peak_gib", "ratio", "bar", "won", "note",
    ),
    "recall": ("what", "piece_kib", "mib", "gbps", "gbps_p10", "gbps_p90", "ratio", "bar", "won"),
    "memory": ("batch", "context", "spread", "gpu_cache_size", "share", "bar", "won"),
    "small_models": ("model", "what", "context", "ms", "ms_p10", "ms_p90", "miss_rate", "peer", "ratio", "won", "note"),
}  # fmt: skip
NAMES = {
    "floor": "floor (128 tokens)",
    "full_graph": "full KV, SDPA, graph",
    "static_graph": "HF StaticCache, graph",
    "dynamic": "HF DynamicCache, eager",
    "offloaded": "HF offloaded",
}
COLOURS = {
    "ours": "#1b7837",
    "floor": "#999999",
    "full_graph": "#2166ac",
    "static_graph": "#67a9cf",
    "dynamic": "#ef8a62",
    "offloaded": "#b2182b",
}


def newest(found: Iterable[Row]) -> list[Row]:
    """The last of the rows that measured the same."""
    by_key = {tuple(str(row.get(name)) for name in KEY): row for row in found}
    return list(by_key.values())


def label(row: Row) -> str:
    if row["what"] != "ours":
        return NAMES[row["what"]]
    return f"ours, {row['miss_rate']:.0%} missed"


def decode_plot(found: list[Row], axes_of: Callable[[int], Any]) -> None:
    """A panel for each batch and context: milliseconds a token on a log axis, with their spread."""
    timed = [r for r in found if r["what"] in ("ours", *NAMES) and "ms" in r and not r.get("cap_gib")]
    places = sorted({(row["batch"], row["context"]) for row in timed})
    for axis, place in zip(axes_of(len(places)), places, strict=True):
        here = [row for row in timed if (row["batch"], row["context"]) == place]
        _dots(axis, sorted(here, key=lambda row: row["ms"]), f"{place[0]} x {place[1] // 1024}k tokens")


def _dots(axis: Any, here: list[Row], title: str) -> None:
    for place, row in enumerate(here):
        spread = [[row["ms"] - row["ms_p10"]], [row["ms_p90"] - row["ms"]]]
        axis.errorbar(row["ms"], place, xerr=spread, fmt="o", color=COLOURS[row["what"]], capsize=3)
        axis.annotate(f"{row['ms']:.1f}", (row["ms"], place), (8, 5), textcoords="offset points", fontsize=8)
    times = [row["ms"] for row in here]
    axis.set(title=title, xscale="log", xlabel="ms a token (log)", xlim=(min(times) / 1.5, max(times) * 2.5))
    axis.set_yticks(range(len(here)), [label(row) for row in here])
    axis.grid(axis="x", alpha=0.3)
    axis.invert_yaxis()


def throughput_plot(found: list[Row], axes_of: Callable[[int], Any]) -> None:
    """Tokens a second under a memory cap, each at its best batch."""
    here = [row for row in found if row.get("cap_gib") and "tokens_per_s" in row]
    if not here:
        return
    (axis,) = axes_of(1)
    here.sort(key=lambda row: -row["tokens_per_s"])
    names = [f"{label(row)}, batch {row['batch']}" for row in here]
    bars = axis.barh(names, [row["tokens_per_s"] for row in here], color=[COLOURS[row["what"]] for row in here])
    axis.bar_label(bars, fontsize=8)
    axis.set(title=f"{here[0]['context'] // 1024}k contexts in {here[0]['cap_gib']:g} GiB", xlabel="tokens a second")
    axis.invert_yaxis()


def recall_plot(found: list[Row], axes_of: Callable[[int], Any]) -> None:
    """Bandwidth by bytes moved, a line for each piece size and one for the copy."""
    if not found:
        return
    (axis,) = axes_of(1)
    for piece in sorted({row.get("piece_kib") or 0 for row in found}):
        line = sorted((row["mib"], row["gbps"]) for row in found if (row.get("piece_kib") or 0) == piece)
        name = f"recall, pieces of {piece:g} KiB" if piece else "one pinned copy"
        axis.plot(*zip(*line, strict=True), marker="o", label=name, color=None if piece else "black")
    axis.set(xscale="log", xlabel="MiB", ylabel="GB/s", ylim=(0, None), title="host to GPU")
    axis.legend(fontsize=8)


PLOTS: dict[str, tuple[str, Callable[[list[Row], Callable[[int], Any]], None]]] = {
    "decode": ("decode", decode_plot),
    "throughput": ("decode", throughput_plot),
    "recall": ("recall", recall_plot),
}


def draw(found: list[Row], folder: Path) -> list[Path]:
    """Every plot that there are rows for."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    made = []
    for name, (benchmark, plot) in PLOTS.items():
        figures: list[Any] = []
        plot([row for row in found if row["benchmark"] == benchmark], lambda n, f=figures: _axes(pyplot, n, f))
        for figure in figures:
            made.append(folder / f"{name}.png")
            figure.savefig(made[-1], dpi=150)
            pyplot.close(figure)
    return made


def _axes(pyplot: Any, panels: int, figures: list[Any]) -> Any:
    if not panels:
        return []
    figure, axes = pyplot.subplots(1, panels, figsize=(5.5 * panels, 3.4), squeeze=False, layout="constrained")
    figures.append(figure)
    return axes[0]


def tables(found: list[Row]) -> str:
    """A markdown table for each benchmark, and where its rows come from."""
    parts = []
    for benchmark, columns in COLUMNS.items():
        here = [row for row in found if row["benchmark"] == benchmark]
        if here:
            sources = sorted({f"{row['machine']}, commit {row['commit']}, {row['date'][:10]}" for row in here})
            parts.append(f"### {benchmark}\n\n{rows.table(here, columns)}\n\n" + "\n".join(sources))
    return "\n\n".join(parts)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    parser.add_argument("--out", type=Path, help="folder for the plots; default that of the rows")
    parser.add_argument("--run", help="name of one run, as in its rows")
    parser.add_argument("--no-plots", action="store_true", help="the tables alone")
    options = parser.parse_args(arguments)
    found = [row for row in rows.read_rows(options.results) if row.get("benchmark") in COLUMNS and "run" in row]
    found = newest(row for row in found if options.run in (None, row["run"]))
    if not options.no_plots:
        for path in draw(found, options.out or options.results):
            print(path)
    print(tables(found))


if __name__ == "__main__":
    main()
