"""Many-shot classification: as many labelled examples as fit, then one without its label."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from benchmarks.quality.tasks.items import Item, Maker, Task


def many_shot(name: str, file: str) -> Task:
    def make(maker: Maker) -> Iterator[Item]:
        records = maker.data.records(f"icl/{file}")
        train = [record for record in records if record["split"] == "train"]
        test = [record for record in records if record["split"] == "test"]
        counts = [count + 1 for count in maker.encoder.counts([_shot(record) for record in train])]
        for rng in maker.rngs(name):
            yield _item(maker, train, counts, rng.choice(test), rng)

    return Task(name, make)


def _shot(record: dict) -> str:
    return f"Text: {record['text']}\nLabel: {_label(record)}\n\n"


def _label(record: dict) -> str:
    return record["label"].replace("_", " ")


def _item(maker: Maker, train: list[dict], counts: list[int], asked: dict, rng: Random) -> Item:
    """Examples in random order that fill the length, two of the asked label among them."""
    order = rng.sample(range(len(train)), len(train))
    own = [index for index in order if train[index]["label"] == asked["label"]][:2]
    question = f"Text: {asked['text']}\nLabel:"
    room, taken = maker.length - len(maker.encoder.start(question)) - 24, []
    for index in own + [index for index in order if index not in own]:
        room -= counts[index]
        if room < 0:
            break
        taken.append(train[index])
    rng.shuffle(taken)
    ids = maker.encoder.start("".join(_shot(record) for record in taken) + question)
    return Item.asked(ids, maker.encoder.ids(f" {_label(asked)}"), shots=len(taken))


TASKS = [
    many_shot("banking77", "banking77.jsonl"),
    many_shot("clinc150", "clinc150.jsonl"),
    many_shot("subjectivity", "subjectivity.jsonl"),
]
