"""Repository-level completion: the next line of a file, with the package's other files before it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from random import Random

from benchmarks.quality.tasks.items import Item, Maker, Task

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{5,}")
NEAR = 60
"""Lines before the asked one that do not count as far context."""


def next_line(maker: Maker) -> Iterator[Item]:
    files = maker.data.records("code/accelerate_1.15.0.jsonl") + maker.data.records("code/click_8.5.1.jsonl")
    for rng in maker.rngs("next_line"):
        yield _item(maker, files, rng)


def _item(maker: Maker, files: list[dict], rng: Random) -> Item:
    target = rng.choice([file for file in files if file["text"].count("\n") > 3 * NEAR])
    package = target["path"].split("/")[0]
    others = [file for file in files if file["path"].split("/")[0] == package and file is not target]
    rng.shuffle(others)
    context = "".join(f"# {file['path']}\n{file['text']}\n" for file in others)[: 8 * maker.length]
    lines = target["text"].splitlines()
    at = _line_about_far_names(lines, context, rng)
    before = "\n".join(lines[:at])[-2 * maker.length :]
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    room = maker.length - len(maker.encoder.opening)
    near = maker.encoder.ids(f"# {target['path']}\n{before}\n{indent}")[-room:]
    far = maker.encoder.ids(context)[: room - len(near)]
    answer = maker.encoder.ids(lines[at].strip())[:48]
    return Item.asked(maker.encoder.opening + far + near, answer, path=target["path"], line=at + 1)


def _line_about_far_names(lines: list[str], context: str, rng: Random) -> int:
    """A line that uses a name not seen in the lines just before it, but farther back or in other files."""
    for at in rng.sample(range(2 * NEAR, len(lines)), len(lines) - 2 * NEAR):
        near, far = "\n".join(lines[at - NEAR : at]), "\n".join(lines[: at - NEAR]) + context
        line = lines[at].strip()
        is_code = len(line) >= 20 and not line.startswith(("#", '"', "'", "import", "from"))
        if is_code and any(name not in near and name in far for name in NAME.findall(line)):
            return at
    return len(lines) - 1


TASKS = [Task("next_line", next_line)]
