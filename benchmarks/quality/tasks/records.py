"""Look-ups in long lists: key-value pairs (Lost in the Middle), numbered lines and topics (LongEval)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from benchmarks.quality.tasks.data import Data
from benchmarks.quality.tasks.items import Item, Maker, Task


def key_value(maker: Maker) -> Iterator[Item]:
    pairs = [pair for r in maker.data.records("retrieval/litm_kv_75.jsonl") for pair in r["ordered_kv_records"]]
    cost = max(maker.encoder.counts([json.dumps(dict([pair])) for pair in pairs[:8]]))
    count = min(len(pairs), (maker.length - 200) // (cost + 1))
    for rng, depth in zip(maker.rngs("key_value"), maker.depths("key_value"), strict=True):
        chosen = rng.sample(pairs, count)
        key, value = chosen[round(depth * (count - 1))]
        table = json.dumps(dict(chosen), indent=1)
        request = (
            f"Extract the value corresponding to the specified key in the JSON object below.\n\n{table}\n\nKey: {key}"
        )
        question = maker.encoder.ask(request, f'The value of "{key}" is "')
        yield Item.asked(question, maker.encoder.ids(value), depth=round(depth, 3))


LINE = re.compile(r"^line (\S+): REGISTER_CONTENT is <(\d+)>$", re.MULTILINE)


def lines(maker: Maker) -> Iterator[Item]:
    files = [f"retrieval/longeval_lines_{size}.jsonl" for size in (680, 400, 200)]
    found = {key: (key, n) for file in files for r in maker.data.records(file) for key, n in LINE.findall(r["prompt"])}
    all_lines = list(found.values())
    texts = [f"line {key}: REGISTER_CONTENT is <{number}>" for key, number in all_lines]
    counts = maker.encoder.counts([f"{text}\n" for text in texts])
    count = min(len(texts), (maker.length - 200) * len(counts) // sum(counts))
    for rng, depth in zip(maker.rngs("lines"), maker.depths("lines"), strict=True):
        chosen = rng.sample(range(len(texts)), count)
        key, number = all_lines[chosen[round(depth * (count - 1))]]
        record = "\n".join(texts[line] for line in chosen)
        request = (
            "Below is a record of lines I want you to remember. Each line begins with 'line <line index>' and contains"
            f" a '<REGISTER_CONTENT>' at its end.\n\n{record}\n\nThe record is over. Tell me what is the"
            f" <REGISTER_CONTENT> in line {key}? I need the number."
        )
        question = maker.encoder.ask(request, f"The <REGISTER_CONTENT> in line {key} is <")
        yield Item.asked(question, maker.encoder.ids(number), depth=round(depth, 3))


def topics(maker: Maker) -> Iterator[Item]:
    records = _longest_topics(maker)
    for record in records[: maker.count]:
        answer = re.sub(r"^the ", "", record["answer"], flags=re.IGNORECASE)
        question = maker.encoder.ask(record["prompt"], "The first topic we discussed was the")
        yield Item.asked(question, maker.encoder.ids(f" {answer}"), depth=0.0, topics=len(record["topics"]))


def _longest_topics(maker: Maker) -> list[dict]:
    """The conversations with most topics that fit."""
    for size in (20, 10, 5):
        records = maker.data.records(f"retrieval/longeval_topics_{size}.jsonl")
        counts = maker.encoder.counts([record["prompt"] for record in records])
        fitting = [record for record, count in zip(records, counts, strict=True) if count + 64 <= maker.length]
        if len(fitting) >= min(maker.count, len(records)) / 2:
            return fitting
    return []


def conversations(data: Data) -> str:
    """Talk on many topics, as filler."""
    prompts = [record["prompt"] for record in data.records("retrieval/longeval_topics_20.jsonl")]
    return " ".join(
        prompt.split("Now the record start. ", 1)[-1].split("Now the record ends.")[0] for prompt in prompts
    )


TASKS = [Task("key_value", key_value), Task("lines", lines), Task("topics", topics)]
