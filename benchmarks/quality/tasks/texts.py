"""Running texts: perplexity and fidelity on long documents and code, copying, and long generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

from benchmarks.quality.tasks.data import Data, python_help, python_source
from benchmarks.quality.tasks.haystack import prose
from benchmarks.quality.tasks.items import Item, Maker, Task

COPIED, CUE = 160, 32
"""Tokens of the passage that returns, and of its beginning that the prompt repeats."""

GENERATED = 4096
"""Tokens of a long generation."""


def continuation(name: str, read: Callable[[Data, int], str]) -> Task:
    """The end of a long excerpt, given its beginning.

    Args:
        read: The text for item number i.
    """

    def make(maker: Maker) -> Iterator[Item]:
        for index, rng in enumerate(maker.rngs(name)):
            ids = _excerpt(maker, read(maker.data, index), maker.length + 1, rng)
            cut = len(ids) - min(maker.steps, maker.length // 4) - 1
            yield Item(ids[:cut], ids[cut:], [(1, len(ids) - cut)])

    return Task(name, make, is_text=True)


def _excerpt(maker: Maker, text: str, tokens: int, rng: Random) -> list[int]:
    """``tokens`` tokens from a random place, or from the beginning of a text that is hardly long enough."""
    wanted = tokens * 6  # characters: more than any tokenizer here needs
    first = rng.randrange(max(1, len(text) - wanted))
    paragraph = text.rfind("\n", max(0, first - 2000), first)
    first = first if paragraph < 0 else paragraph + 1
    return maker.encoder.start(text[first : first + wanted])[:tokens]


BOOKS = ("katrine", "jack_sheppard", "middlemarch", "austen_emma")
ESSAYS = ("critical_historical_essays", "pianoforte_sonata")


def _book(data: Data, index: int) -> str:
    return data.prose(f"text/book_{BOOKS[index % len(BOOKS)]}.txt")


def _essay(data: Data, index: int) -> str:
    return data.prose(f"text/book_{ESSAYS[index % len(ESSAYS)]}.txt")


def _manual(data: Data, index: int) -> str:
    return data.text("text/manual_sqlite.txt")


def _code(data: Data, index: int) -> str:
    name = ("click_8.5.1", "accelerate_1.15.0")[index % 2]
    return "\n\n".join(f"# {record['path']}\n{record['text']}" for record in data.records(f"code/{name}.jsonl"))


def _python(data: Data, index: int) -> str:
    return (python_help, python_source)[index % 2]()


def copying(maker: Maker) -> Iterator[Item]:
    """A passage, long filler, the passage's beginning again: does the rest follow?"""
    for rng, depth in zip(maker.rngs("copying"), maker.depths("copying"), strict=True):
        passage = maker.encoder.ids(" ".join(prose(maker, 3 * COPIED, rng)))[:COPIED]
        room = maker.length - COPIED - CUE
        filler = maker.encoder.ids(" ".join(prose(maker, room + 64, rng)))[:room]
        at = round(depth * 0.5 * len(filler))
        question = maker.encoder.opening + filler[:at] + passage + filler[at:] + passage[:CUE]
        yield Item.asked(question, passage[CUE:], depth=round(depth * 0.5, 3))


def long_generation(maker: Maker) -> Iterator[Item]:
    """The full cache's own greedy continuation of a book, fed to every method: how does fidelity age?"""
    for index, rng in enumerate(maker.rngs("long_generation")):
        ids = _excerpt(maker, _book(maker.data, index), max(256, maker.length - GENERATED), rng)
        yield Item(ids[:-1], ids[-1:], [], greedy=GENERATED, score_every=8)


TASKS = [
    continuation("ppl_books", _book),
    continuation("ppl_essays", _essay),
    continuation("ppl_manual", _manual),
    continuation("ppl_code", _code),
    continuation("ppl_python", _python),
    Task("copying", copying),
    Task("long_generation", long_generation, is_text=True),
]
