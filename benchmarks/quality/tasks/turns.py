"""Multi-turn recall: facts planted in the first turn are asked for in later turns, each at a different old place.

Only the first turn is prefilled; the later turns are decode steps, so nothing that looks at the prompt's end, as SnapKV
does, can know what will be asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from benchmarks.quality.tasks.data import MissingData, sentences
from benchmarks.quality.tasks.haystack import hide, new_number, prose
from benchmarks.quality.tasks.items import Item, Maker, Task
from benchmarks.quality.tasks.records import conversations

PEOPLE = (
    "Alice",
    "Bernard",
    "Clara",
    "Daniel",
    "Edith",
    "Frank",
    "Grace",
    "Henry",
    "Irene",
    "Jacob",
    "Laura",
    "Martin",
)
ASKED = 4


def multi_turn(maker: Maker) -> Iterator[Item]:
    for rng in maker.rngs("multi_turn"):
        people = rng.sample(PEOPLE, 8)
        codes = {person: new_number(rng, 5) for person in people}
        prompt = maker.encoder.start(_first_turn(maker, codes, rng))
        forced, answers = prompt[-1:], []
        for person in rng.sample(people, ASKED):
            forced = forced + maker.encoder.ids(
                f" USER: What is the access code of {person}?\n ASSISTANT: The access code of {person} is"
            )
            answer = maker.encoder.ids(f" {codes[person]}")
            answers.append((len(forced), len(forced) + len(answer)))
            forced = forced + answer + maker.encoder.ids(".\n")
        yield Item(prompt[:-1], forced[: answers[-1][1]], answers)


def _first_turn(maker: Maker, codes: dict[str, str], rng: Random) -> str:
    places = [0.95 * (index + rng.random()) / len(codes) for index in range(len(codes))]
    needles = [
        (p, f"The access code of {who} is {code}.") for p, (who, code) in zip(places, codes.items(), strict=True)
    ]
    head = " USER: I will tell you access codes between other things. Remember them, I will ask for them later. "
    tail = "\n ASSISTANT: I have read everything and remember the access codes.\n"
    room = maker.length - len(maker.encoder.start(head + hide([], needles) + tail)) - 192
    return head + hide(_talk(maker, room, rng), needles) + tail


def _talk(maker: Maker, tokens: int, rng: Random) -> list[str]:
    """Filler: conversations where the data has them, else prose."""
    try:
        talk = sentences(conversations(maker.data))
    except MissingData:
        return prose(maker, tokens, rng)
    counts = maker.encoder.counts([f" {sentence}" for sentence in talk])
    first, taken = rng.randrange(len(talk)), []
    while (tokens := tokens - counts[at := (first + len(taken)) % len(talk)]) >= 0:
        taken.append(talk[at])
    return taken


TASKS = [Task("multi_turn", multi_turn)]
