"""Filler of a given length in tokens, with things hidden in it."""

from __future__ import annotations

from functools import lru_cache
from random import Random

from benchmarks.quality.tasks.data import sentences
from benchmarks.quality.tasks.items import Maker

NOISE = (
    "The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.",
)  # fmt: skip

ADJECTIVES = """
amber brave calm dusty eager faint gentle hollow icy jolly keen lively mellow narrow odd pale quiet rapid silent tender
upper vivid weary young zesty ancient bitter clever distant early
"""
NOUNS = """
anchor basket candle desert engine feather garden hammer island jacket kettle ladder meadow needle orchard pencil quarry
river saddle temple umbrella valley window yard zebra bridge castle dragon eagle forest
"""


def new_key(rng: Random, taken: set[str]) -> str:
    """An adjective and a noun that were not taken before."""
    while (key := f"{rng.choice(ADJECTIVES.split())}-{rng.choice(NOUNS.split())}") in taken:
        pass
    taken.add(key)
    return key


def new_number(rng: Random, digits: int = 7) -> str:
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def noise(maker: Maker, tokens: int) -> list[str]:
    """The same five sentences over and over."""
    size = sum(maker.encoder.counts([f" {sentence}" for sentence in NOISE]))
    return list(NOISE) * max(0, tokens // size)


def prose(maker: Maker, tokens: int, rng: Random) -> list[str]:
    """Consecutive sentences from a random place of a book."""
    all_sentences, counts = _counted(maker)
    first, taken = rng.randrange(len(all_sentences)), []
    while tokens > 0:
        at = (first + len(taken)) % len(all_sentences)
        tokens -= counts[at]
        if tokens >= 0:
            taken.append(all_sentences[at])
    return taken


def hide(filler: list[str], needles: list[tuple[float, str]], joint: str = " ") -> str:
    """The filler as one text with each needle at its depth, a share of the sentences."""
    pieces = [(index / max(1, len(filler)), sentence) for index, sentence in enumerate(filler)]
    return joint.join(text for _, text in sorted([*needles, *pieces], key=lambda piece: piece[0]))


def fill(maker: Maker, question: list[int], answer: list[int]) -> int:
    """Tokens left for filler beside a question built without it, with a little to spare."""
    return maker.length - len(question) - len(answer) - 16


def _counted(maker: Maker) -> tuple[list[str], list[int]]:
    return _count_sentences(maker.data.any_prose(), maker.encoder)


@lru_cache(maxsize=2)
def _count_sentences(text: str, encoder) -> tuple[list[str], list[int]]:
    found = sentences(text)
    return found, encoder.counts([f" {sentence}" for sentence in found])
