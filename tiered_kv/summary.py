"""What a run did, in figures: for people as a table, for machines as a dictionary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiered_kv.timed import Timed


def numbers(run: Timed) -> dict[str, Any]:
    keys = ("hit_rate", "recalled_bytes", "kv_gpu_bytes", "kv_host_bytes", "kv_full_bytes")
    times = {"ttft_s": run.ttft_s, "second_token_s": run.second_token_s, "tokens_per_s": run.tokens_per_s}
    return {"text": run.text, "new_tokens": len(run.token_ids), **times, **{key: run.stats[key] for key in keys}}


def first_difference(tokens: Sequence[int], others: Sequence[int]) -> int | None:
    """Index of the first token that differs, the end of the shorter included; ``None`` if there is none."""
    for index, (token, other) in enumerate(zip(tokens, others, strict=False)):
        if token != other:
            return index
    return None if len(tokens) == len(others) else min(len(tokens), len(others))


def summary(token_budget: int, tiered: Timed, full: Timed | None) -> str:
    columns = [("", f"budget {token_budget}"), *((name, show(tiered)) for name, show in SUMMARY_ROWS)]
    if full is None:
        return "\n".join(f"{name:24}{value:>14}" for name, value in columns)
    others = ["full cache", *(show(full) for _, show in SUMMARY_ROWS)]
    return "\n".join(f"{name:24}{value:>14}{other:>14}" for (name, value), other in zip(columns, others, strict=True))


SUMMARY_ROWS: list[tuple[str, Callable[[Timed], str]]] = [
    ("prompt tokens", lambda run: str(run.prompt_tokens)),
    ("new tokens", lambda run: str(len(run.token_ids))),
    ("time to first token", lambda run: f"{run.ttft_s:.2f} s"),
    ("time to second token", lambda run: _or_dash(run.second_token_s, "{:.2f} s")),
    ("tokens per second after", lambda run: _or_dash(run.tokens_per_s, "{:.1f}")),
    ("hit rate", lambda run: _or_dash(run.stats["hit_rate"], "{:.1%}")),
    ("recalled", lambda run: _in_units(run.stats["recalled_bytes"])),
    ("KV on the device", lambda run: _in_units(run.stats["kv_gpu_bytes"])),
    ("KV in host memory", lambda run: _in_units(run.stats["kv_host_bytes"])),
    ("the full KV takes", lambda run: _in_units(run.stats["kv_full_bytes"])),
]


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _in_units(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def difference(tokenizer: Any, tiered: Timed, full: Timed) -> str:
    """Whether both runs gave the same text, and what each went on with where they part."""
    index = first_difference(tiered.token_ids, full.token_ids)
    if index is None:
        return "both runs gave the same text"
    shared = tokenizer.decode(tiered.token_ids[:index], skip_special_tokens=True)
    after = [tokenizer.decode(run.token_ids[index : index + 8]) for run in (tiered, full)]
    where = f"the texts part at token {index + 1}, after {shared[-40:]!r}"
    return f"{where}: {after[0]!r} here, {after[1]!r} with the full cache"
