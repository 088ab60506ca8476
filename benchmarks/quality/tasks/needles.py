"""Needles in haystacks: pass key, RULER's single, multi-key, multi-value and multi-query needles, variable tracking."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator
from itertools import pairwise
from random import Random

from benchmarks.quality.tasks.haystack import fill, hide, new_key, new_number, noise, prose
from benchmarks.quality.tasks.items import Item, Maker, Task

PASSKEY = (
    "There is an important piece of information hidden inside a lot of irrelevant text. Find it and memorize it."
    " I will quiz you about it.\n\n{}\n\nWhat is the pass key?"
)
NEEDLE = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize them. I will quiz you about"
    " the numbers afterwards.\n{}\nWhat are all the special magic numbers for {} mentioned in the provided text?"
)


def passkey(maker: Maker) -> Iterator[Item]:
    for rng, depth in zip(maker.rngs("passkey"), maker.depths("passkey"), strict=True):
        number = new_number(rng, 5)
        needle = f"The pass key is {number}. Remember it. {number} is the pass key."
        yield _item(maker, [(depth, needle)], PASSKEY.format, "The pass key is", f" {number}", None)


def _item(
    maker: Maker,
    needles: list[tuple[float, str]],
    request: Callable[[str], str],
    opening: str,
    answer: str,
    prose_rng: Random | None,
) -> Item:
    """Grow filler around the needles until the request has the length asked for."""
    ids = maker.encoder.ids(answer)
    room = fill(maker, maker.encoder.ask(request(hide([], needles)), opening), ids)
    filler = noise(maker, room) if prose_rng is None else prose(maker, room, prose_rng)
    question = maker.encoder.ask(request(hide(filler, needles)), opening)
    return Item.asked(question, ids, depth=round(min(depth for depth, _ in needles), 3))


def _needle(key: str, number: str) -> str:
    return f"One of the special magic numbers for {key} is: {number}."


def _asked(keys: list[str]) -> str:
    return keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"


def _listed(numbers: list[str]) -> str:
    return f" {numbers[0]}" if len(numbers) == 1 else f" {', '.join(numbers[:-1])}, and {numbers[-1]}"


def niah(name: str, *, in_prose: bool, distractors: int = 0, values: int = 1, queries: int = 1) -> Task:
    """A needle task.

    Args:
        in_prose: Hide in a book's sentences, not in repeated noise.
        distractors: Needles with other keys that nobody asks for.
        values: Numbers of each key.
        queries: Keys that are asked for.
    """

    def make(maker: Maker) -> Iterator[Item]:
        for rng, depth in zip(maker.rngs(name), maker.depths(name), strict=True):
            taken: set[str] = set()
            keys = [new_key(rng, taken) for _ in range(queries)]
            numbers = {key: [new_number(rng) for _ in range(values)] for key in keys}
            wanted = [(key, number) for key in keys for number in numbers[key]]
            places = sorted([depth, *(rng.uniform(0, 0.95) for _ in wanted[1:])])
            needles = [(place, _needle(*pair)) for place, pair in zip(places, wanted, strict=True)]
            others = [(rng.uniform(0, 0.95), _needle(new_key(rng, taken), new_number(rng))) for _ in range(distractors)]
            opening = f"The special magic numbers for {_asked(keys)} mentioned in the provided text are"
            if len(wanted) == 1:
                opening = f"The special magic number for {keys[0]} mentioned in the provided text is"
            answer = _listed([number for _, number in wanted])
            item = _item(
                maker, needles + others, lambda text, keys=keys: NEEDLE.format(text, _asked(keys)), opening, answer,
                rng if in_prose else None,
            )  # fmt: skip
            yield Item(item.prompt, item.forced, item.answers, meta={"depth": round(depth, 3)})

    return Task(name, make)


def variable_tracking(maker: Maker) -> Iterator[Item]:
    """A chain of assignments in noise; which variables hold the value?"""
    for rng in maker.rngs("vt"):
        names = ["".join(rng.choices(string.ascii_uppercase, k=5)) for _ in range(5)]
        value = new_number(rng, 5)
        links = [f"VAR {names[0]} = {value}."]
        links += [f"VAR {later} = VAR {earlier}." for earlier, later in pairwise(names)]
        places = sorted(rng.uniform(0, 0.95) for _ in links)
        opening = f"Answer: The variables that are assigned the value {value} are"
        item = _item(
            maker, list(zip(places, links, strict=True)),
            lambda text, value=value: _vt_request(text, value), opening, f" {', '.join(names)}", None,
        )  # fmt: skip
        yield item


def _vt_request(text: str, value: str) -> str:
    example = (
        "VAR QWERT = 11111. VAR ASDFG = VAR QWERT. Which variables hold 11111?"
        " The variables that are assigned the value 11111 are QWERT, ASDFG."
    )
    return (
        f"Memorize and track the chain of variable assignments hidden in the text.\nExample: {example}\n\n{text}\n\n"
        f"Question: Find all variables that are assigned the value {value} in the text above."
    )


TASKS = [
    Task("passkey", passkey),
    niah("niah_single", in_prose=True),
    niah("niah_noise", in_prose=False),
    niah("niah_multikey", in_prose=True, distractors=15),
    niah("niah_multivalue", in_prose=True, values=4),
    niah("niah_multiquery", in_prose=True, queries=4),
    Task("variable_tracking", variable_tracking),
]
