"""A long document that every Python installation holds, and a question about its middle."""

from __future__ import annotations

from tiered_kv.errors import TieredKVError

TOPICS = ["string-methods", "strings"]
CHARACTERS = 29_000
"""Length the document is cut to: about 7,300 tokens of SmolLM2, which takes 8,192."""
ANSWER = "Return a string which is the concatenation of the strings in *iterable*."
QUESTION = "Question: What does str.join(iterable) do?\nAnswer: It returns a string which is"
TOKEN_BUDGET = 512
NEW_TOKENS = 64
STOP = "\n\n"


def document() -> str:
    """Sections of the Python language reference.

    Raises:
        TieredKVError: This Python lacks the module that holds them.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise TieredKVError(
            "this Python lacks pydoc_data, the part of the standard library with the document"
        ) from None
    text = "\n\n".join(topics[name].strip("\n") for name in TOPICS)
    return text[: text.rindex("\n\n", 0, CHARACTERS)]
