"""Where texts come from: the project's evaluation data, and texts that every Python has."""

from __future__ import annotations

import json
import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"


class MissingData(Exception):
    """A file that a task needs is not there; the task is skipped and says so."""


class Data:
    """The evaluation data's folder.

    Args:
        root: The folder; by default ``TIERED_KV_DATA``, and else ``../shared/data`` beside the checkout.
    """

    def __init__(self, root: Path | str | None = None) -> None:
        self.root = Path(root or os.environ.get("TIERED_KV_DATA") or SHARED)

    def path(self, name: str) -> Path:
        path = self.root / name
        if not path.exists():
            raise MissingData(f"{path} is not there (set --data or TIERED_KV_DATA)")
        return path

    def text(self, name: str) -> str:
        return self.path(name).read_text(encoding="utf-8")

    def records(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text(name).splitlines() if line.strip()]

    def prose(self, name: str) -> str:
        """A book with its line wraps joined."""
        return unwrapped(self.text(name))

    def any_prose(self) -> str:
        """Some long English text: a book, or Python's own help texts where there is no data."""
        for name in ("text/book_austen_persuasion.txt", "text/book_katrine.txt"):
            if (self.root / name).exists():
                return self.prose(name)
        return python_help()


def unwrapped(text: str) -> str:
    """Paragraphs on one line each."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", text.replace("\r", ""))


@lru_cache(maxsize=1)
def python_help() -> str:
    """The language reference that ``help()`` shows: half a million characters of technical English."""
    from pydoc_data.topics import topics

    return unwrapped("\n\n".join(topics[name] for name in sorted(topics)))


@lru_cache(maxsize=1)
def python_source() -> str:
    """Source of a few large modules of the standard library."""
    import argparse
    import inspect
    import tarfile
    import typing

    return "\n\n".join(inspect.getsource(module) for module in (argparse, inspect, tarfile, typing))


def sentences(prose: str) -> list[str]:
    """Prose cut after sentence ends."""
    return [s.strip() for s in re.split(r"(?<=[.!?])\s+", prose) if s.strip()]
