"""Rows of the speed benchmarks: what was measured, with what spread, where, and how it is appended and shown."""

from __future__ import annotations

import argparse
import json
import statistics
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.quality.rows import RESULTS, environment

RUN = uuid.uuid4().hex[:8]
"""Name of this process's run: rows that share it were measured side by side."""

MEASUREMENTS = 6
MOST_MS = 400.0
"""A measurement of a slow peer takes fewer steps than asked for, so that it lasts about this long."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds a step, one number for each measurement of ``steps`` steps."""

    samples: list[float]
    steps: int

    @property
    def ms(self) -> float:
        return statistics.median(self.samples)

    def fields(self) -> dict[str, Any]:
        """Median and spread, as they stand in a row."""
        deciles = (
            statistics.quantiles(self.samples, n=10, method="inclusive") if len(self.samples) > 1 else self.samples
        )
        return {
            "ms": round(self.ms, 4),
            "ms_p10": round(deciles[0], 4),
            "ms_p90": round(deciles[-1], 4),
            "measurements": len(self.samples),
            "steps": self.steps,
        }


def time_steps(
    step: Callable[[], Any],
    steps: int = 20,
    measurements: int = MEASUREMENTS,
    warmup: int = 3,
    most_ms: float = MOST_MS,
) -> Timing:
    """Time ``step`` by CUDA events around several calls in a row, on the CPU by the clock."""
    for _ in range(warmup):
        step()
    pace = elapsed(step, 1)
    steps = max(1, min(steps, int(most_ms / max(pace, 1e-3))))
    return Timing([elapsed(step, steps) / steps for _ in range(measurements)], steps)


def elapsed(step: Callable[[], Any], steps: int) -> float:
    """Milliseconds that ``steps`` calls take."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - start) * 1e3
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    for _ in range(steps):
        step()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last)


def captured(call: Callable[[], Any], warmup: int = 2) -> Callable[[], Any]:
    """``call`` as a CUDA graph's replay; on the CPU ``call`` itself."""
    if not torch.cuda.is_available():
        return call
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmup):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


class Rows:
    """Appends rows to a file as they come, so that a run that is cut short loses none, and keeps them for the table."""

    def __init__(self, benchmark: str, out: Path | None) -> None:
        self.benchmark, self.out = benchmark, out
        self.rows: list[dict[str, Any]] = []

    def add(self, **facts: Any) -> dict[str, Any]:
        row = {"benchmark": self.benchmark, "run": RUN, **facts}
        self.rows.append(row)
        print(_short(row), flush=True)
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            with self.out.open("a") as file:
                file.write(json.dumps(row | about()) + "\n")
        return row


def about() -> dict[str, Any]:
    """Commit, date, machine and versions, Triton's and CUDA's among them."""
    facts = dict(environment())
    try:
        import triton

        facts["versions"] = facts["versions"] | {"triton": triton.__version__, "cuda": torch.version.cuda}
    except ImportError:
        pass
    return facts


def read_rows(folder: Path = RESULTS, pattern: str = "*.jsonl") -> list[dict[str, Any]]:
    """Every row of every file, in the order they were written; torn lines are passed over."""
    rows = []
    for path in sorted(folder.glob(pattern)):
        for line in path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return rows


def _short(row: dict[str, Any]) -> str:
    facts = {k: v for k, v in row.items() if k not in ("benchmark", "run", "settings", "stats", "variants", "counters")}
    return "  " + "  ".join(f"{name}={_figure(value)}" for name, value in facts.items() if value is not None)


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def table(rows: Iterable[dict[str, Any]], columns: Sequence[str]) -> str:
    """Rows as a markdown table; what a row lacks is left blank."""
    lines = [list(columns)]
    lines += [["" if row.get(c) is None else _figure(row[c]) for c in columns] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    padded = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in lines]
    return "\n".join([padded[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *padded[1:]])


def verdict(ratio: float, bar: float | None, most: bool = True) -> dict[str, Any]:
    """A ratio beside its bar: won where it is at most (or at least) the bar, or 1 where there is none."""
    limit = 1.0 if bar is None else bar
    return {"ratio": round(ratio, 4), "bar": bar, "won": bool(ratio <= limit if most else ratio >= limit)}


def arguments(doc: str | None, name: str, parser_class: type = argparse.ArgumentParser) -> argparse.ArgumentParser:
    """A parser with what every speed benchmark takes."""
    parser = parser_class(
        prog=f"python -m benchmarks.{name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--smoke", action="store_true", help="a tiny shape, in seconds, also on the CPU; writes no rows"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.jsonl", help="JSON-lines file rows are added to")
    return parser


def open_rows(name: str, options: argparse.Namespace) -> Rows:
    """Rows of a run; a smoke test's numbers mean nothing and are not kept."""
    return Rows(name, None if options.smoke else options.out)


def device_of(options: argparse.Namespace) -> torch.device:
    """The GPU; the CPU for smoke tests alone.

    Raises:
        SystemExit: There is no GPU, and this is no smoke test.
    """
    if torch.cuda.is_available():
        return torch.device("cuda")
    if not options.smoke:
        raise SystemExit("this benchmark needs a CUDA GPU; --smoke runs a tiny shape on the CPU")
    torch.set_num_threads(1)
    return torch.device("cpu")


def set_cap(gib: float | None) -> None:
    """Let this process take at most ``gib`` GiB of GPU memory, as a smaller GPU would."""
    if gib is not None and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / total))
