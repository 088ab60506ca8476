"""Questions about what was read: bAbI facts scattered in a book, and many documents of which one answers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

from benchmarks.quality.tasks.haystack import fill, hide, prose
from benchmarks.quality.tasks.items import Item, Maker, Task


class Story(NamedTuple):
    """bAbI facts in order, and a question about them with a one-word answer."""

    facts: list[str]
    question: str
    answer: str


def read_babi(text: str) -> list[Story]:
    """Every question of a bAbI file with the facts before it. Columns are split by tabs, in some copies by bars."""
    stories, facts = [], []
    for line in text.splitlines():
        number, _, rest = line.partition(" ")
        if number == "1":
            facts = []
        question, *answer = re.split(r"\s*[|\t]\s*", rest)
        if answer:
            stories.append(Story(list(facts), question.strip(), answer[0]))
        else:
            facts.append(rest.strip())
    return stories


def babi(name: str, file: str) -> Task:
    """Facts in order between a book's sentences; three solved examples come first."""

    def make(maker: Maker) -> Iterator[Item]:
        stories = read_babi(maker.data.text(f"qa/{file}"))
        for rng in maker.rngs(name):
            examples, story = rng.sample(stories, 3), rng.choice(stories)
            head = "\n\n".join(_solved(example) for example in examples)
            yield _scattered(maker, head, story, rng)

    return Task(name, make)


def _solved(story: Story) -> str:
    return f"Facts: {' '.join(story.facts)}\nQuestion: {story.question}\nAnswer: {story.answer}"


def _scattered(maker: Maker, head: str, story: Story, rng: Random) -> Item:
    needles = list(zip(sorted(rng.uniform(0, 0.95) for _ in story.facts), story.facts, strict=True))
    answer = maker.encoder.ids(f" {story.answer}")

    def question(filler: list[str]) -> list[int]:
        text = hide(filler, needles)
        return maker.encoder.start(
            f"Facts are hidden in a text. Answer the question by the facts.\n\n{head}\n\n"
            f"Facts: {text}\nQuestion: {story.question}\nAnswer:"
        )

    filler = prose(maker, fill(maker, question([]), answer), rng)
    return Item.asked(question(filler), answer, facts=len(story.facts))


def documents(maker: Maker) -> Iterator[Item]:
    """Natural Questions: the gold passage among other questions' passages."""
    records = maker.data.records("qa/nq_open_oracle_1500.jsonl")
    counts = maker.encoder.counts([_document(0, record) for record in records])
    for rng, depth in zip(maker.rngs("documents"), maker.depths("documents"), strict=True):
        gold = rng.choice([index for index, record in enumerate(records) if len(record["answers"][0]) < 40])
        chosen, room = [], maker.length - 160 - counts[gold]
        for index in rng.sample(range(len(records)), len(records)):
            if index != gold and counts[index] <= room:
                chosen.append(index)
                room -= counts[index] + 4
        chosen.insert(round(depth * len(chosen)), gold)
        text = "\n\n".join(_document(number, records[index]) for number, index in enumerate(chosen, 1))
        request = f"Answer the question from the documents below.\n\n{text}\n\nQuestion: {records[gold]['question']}?"
        answer = maker.encoder.ids(f" {records[gold]['answers'][0]}")
        yield Item.asked(
            maker.encoder.ask(request, "The answer is"), answer, depth=round(depth, 3), documents=len(chosen)
        )


def _document(number: int, record: dict) -> str:
    return f"Document {number} (Title: {record['title']}): {record['text']}"


TASKS = [
    babi("babi_qa1", "babi_qa1_single-supporting-fact_test.txt"),
    babi("babi_qa2", "babi_qa2_two-supporting-facts_test.txt"),
    Task("documents", documents),
]
