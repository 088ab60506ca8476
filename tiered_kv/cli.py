"""The command line: ``tiered-kv generate`` and ``tiered-kv demo``.

A sub-command is one function that adds its parser and names the function to run, listed in ``COMMANDS``. What needs
torch is imported only when a command runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tiered_kv import demo_task
from tiered_kv.config import TieredKVConfig
from tiered_kv.errors import TieredKVError
from tiered_kv.models import DEFAULT_MODEL, load_model
from tiered_kv.options import Parser, UsageError, add_cache_options, add_prompt_options, add_run_options
from tiered_kv.summary import difference, first_difference, numbers, summary

if TYPE_CHECKING:
    import torch

    from tiered_kv.timed import Timed


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
    add_prompt_options(parser)
    add_run_options(parser)
    add_cache_options(parser)
    parser.set_defaults(run=generate)


def add_demo(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="question a long document with a small budget, beside the full cache",
        description=f"Ask {DEFAULT_MODEL} about 7,300 tokens of the Python reference, attending"
        f" {demo_task.TOKEN_BUDGET} tokens a step, and again with the full cache.",
    )
    add_run_options(parser)
    add_cache_options(parser)
    parser.set_defaults(
        run=demo, prompt_file=None, chat=False, compare_full=True,
        token_budget=demo_task.TOKEN_BUDGET, max_new_tokens=demo_task.NEW_TOKENS, stop=demo_task.STOP,
    )  # fmt: skip


COMMANDS: list[Callable[[Any], None]] = [add_generate, add_demo]


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
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of each retry, twice
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
    import torch

    from tiered_kv.timed import generate_tiered

    try:
        with _Display(input_ids.shape[1], "prefill", shows_text=not arguments.json) as display:
            return generate_tiered(model, tokenizer, input_ids, kv_config, **_run_options(arguments, display))
    except torch.OutOfMemoryError:
        raise UsageError(
            f"{model.device} ran out of memory: try a smaller --prefill-segment and --prefill-chunk, or --token-budget"
        ) from None


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

    names = [field.name for field in dataclasses.fields(Sampling)]
    return {
        "sampling": Sampling(**{name: getattr(arguments, name) for name in names}),
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
