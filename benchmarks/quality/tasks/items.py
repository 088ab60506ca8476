"""What a task asks: a prompt to prefill, tokens to force, and which of them count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from benchmarks.quality.tasks.data import Data


@dataclass(frozen=True)
class Item:
    """One question, or one text.

    Attributes:
        prompt: Token ids that are prefilled.
        forced: Token ids fed one at a time after it. The first is the textual prompt's last, so that the answer's first
            token, too, is predicted by a decode step.
        answers: Ranges of ``forced`` that are scored.
        greedy: When above 0: feed this many of the full cache's own choices after ``forced``, and score every
            ``score_every``-th.
        meta: Where the needle was, and the like.
    """

    prompt: list[int]
    forced: list[int]
    answers: list[tuple[int, int]]
    greedy: int = 0
    score_every: int = 1
    meta: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def asked(cls, question: list[int], answer: list[int], **meta: Any) -> Item:
        """A single question with a single answer."""
        return cls(question[:-1], question[-1:] + answer, [(1, 1 + len(answer))], meta=meta)


class Encoder:
    """A model's tokenizer, with the special tokens where they belong."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.opening = list(tokenizer("").input_ids)

    def ids(self, text: str) -> list[int]:
        """Tokens of text in the middle of something."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def counts(self, texts: list[str]) -> list[int]:
        """Number of tokens of each text."""
        if not texts:
            return []
        return [len(ids) for ids in self.tokenizer(texts, add_special_tokens=False, verbose=False).input_ids]

    def start(self, text: str) -> list[int]:
        """Tokens of a text from its beginning."""
        return self.opening + self.ids(text)

    def ask(self, request: str, answer_opening: str = "") -> list[int]:
        """A request in the model's chat format, or plain without one, and the beginning of the answer."""
        if getattr(self.tokenizer, "chat_template", None) is None:
            return self.start(f"{request}\n{answer_opening}".rstrip(" "))
        turn = [{"role": "user", "content": request}]
        chat = self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        return self.ids((chat + answer_opening).rstrip(" "))


@dataclass(frozen=True)
class Maker:
    """What a generator needs.

    Attributes:
        encoder: The model's tokenizer.
        data: The evaluation data.
        length: Tokens of a prompt, at most and nearly.
        count: Items to make.
        seed: Of everything random.
        steps: Tokens at the end of a running text that are fed as decode steps, at most; a quarter of a short one.
    """

    encoder: Encoder
    data: Data
    length: int
    count: int
    seed: int = 0
    steps: int = 512

    def rngs(self, name: str) -> Iterator[Random]:
        """A generator of random numbers for each item; item i's do not depend on how many items there are."""
        return (Random(f"{name}/{self.seed}/{index}") for index in range(self.count))

    def depths(self, name: str) -> list[float]:
        """Depths from 0 to 0.95, evenly spaced over the items, in random order."""
        depths = [0.95 * (index + 0.5) / self.count for index in range(self.count)]
        Random(f"{name}/{self.seed}/depths").shuffle(depths)
        return depths


@dataclass(frozen=True)
class Task:
    """A kind of item.

    Attributes:
        name: In rows, on the command line and in plots.
        make: Generator of items.
        is_text: Scored as running text (perplexity), not as answers.
    """

    name: str
    make: Callable[[Maker], Iterator[Item]]
    is_text: bool = False
