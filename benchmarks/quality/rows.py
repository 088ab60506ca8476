"""Result rows: JSON lines with everything needed to read and repeat them, and a key that makes runs resumable."""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import json
import os
import platform
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"
KEY_FIELDS = (
    "model", "model_sha256", "dtype", "task", "length", "items", "steps", "seed", "method", "settings", "budget",
    "schedule",
)  # fmt: skip


def row_key(row: dict[str, Any]) -> str:
    """Short hash of what was measured; equal keys are the same measurement."""
    facts = json.dumps([row.get(name) for name in KEY_FIELDS], sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows of a file, the newest of each key; none where there is no file. A torn last line is passed over."""
    newest: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        newest[row["key"]] = row
    return list(newest.values())


def append_row(path: Path, row: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # several processes may write to one file
        file.write(json.dumps({"key": row_key(row), **row, **environment()}) + "\n")


@lru_cache(maxsize=1)
def environment() -> dict[str, Any]:
    """Commit, date, machine and versions."""
    import torch
    import transformers

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    return {
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": f"{device}; {platform.processor() or platform.machine()}",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def _commit() -> str:
    command = ["git", "-C", str(RESULTS.parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("TIERED_KV_COMMIT", "unknown")
