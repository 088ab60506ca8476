"""Command line of the quality benchmark.

python -m benchmarks.quality                              # the CI suite: SmolLM2-135M on a CPU, a few minutes
python -m benchmarks.quality --suite full --device cuda   # everything, both small models
python -m benchmarks.quality --model PATH --tasks passkey,ppl_books --length 16000 --budgets 1024,2048
python -m benchmarks.quality ablate                       # variations of ours
python -m benchmarks.quality report                       # tables and plots from the rows
"""

from __future__ import annotations

import argparse
import ast
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.quality.rows import RESULTS
from benchmarks.quality.suites import SUITES, Suite

ROWS = RESULTS / "quality.jsonl"
BEGAN = time.monotonic()


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(_with_verb(list(sys.argv[1:] if arguments is None else arguments)))
    return options.action(options)


def _with_verb(arguments: list[str]) -> list[str]:
    """``run`` is the verb when none is given."""
    verbs = ("run", "report", "ablate", "list", "-h", "--help")
    return arguments if arguments and arguments[0] in verbs else ["run", *arguments]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True)
    run = verbs.add_parser("run", help="measure (the default)")
    _add_common(run)
    run.add_argument("--suite", choices=SUITES, default="ci")
    run.add_argument("--methods", help="baselines, comma-separated, or 'none'; ours is always there")
    run.add_argument("--tasks", help="comma-separated; items after a colon: passkey:20,ppl_books:2")
    run.add_argument("--budgets", help="tokens, comma-separated")
    run.add_argument("--shard", default="0/1", help="i/n: every n-th task from the i-th on, for n processes at once")
    run.add_argument("--stop-after", type=float, default=float("inf"), help="begin no task after so many seconds")
    run.add_argument("--no-ours", action="store_true", help="baselines only")
    run.set_defaults(action=_run)
    ablate = verbs.add_parser("ablate", help="measure variations of ours")
    _add_common(ablate)
    ablate.add_argument("--only", help="variations, comma-separated (see 'list')")
    ablate.add_argument("--budget", type=int, default=512)
    ablate.set_defaults(action=_ablate)
    report = verbs.add_parser("report", help="write tables and plots")
    report.add_argument("--rows", type=Path, default=ROWS)
    report.add_argument("--out", type=Path, default=RESULTS)
    report.set_defaults(action=_report)
    verbs.add_parser("list", help="name suites, tasks, methods and variations").set_defaults(action=_list)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a name of benchmarks.models, a hub id or a folder; default: the suite's")
    parser.add_argument("--length", type=int, help="tokens of a prompt")
    parser.add_argument("--steps", type=int, help="decode steps of a running text")
    parser.add_argument("--data", type=Path, help="folder of evaluation data (TIERED_KV_DATA)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", help="weights and cache; float32 keeps rounding out of the KL")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="CPU threads; 1 is best where the cores have other work")
    parser.add_argument("--rows", type=Path, default=ROWS, help="file that rows are appended to")
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="option of TieredKVConfig")


def _run(options: argparse.Namespace) -> int:
    from benchmarks.quality.methods import make_methods
    from benchmarks.quality.ours import schedule_of
    from benchmarks.quality.run import Plan
    from tiered_kv import TieredKVConfig

    suite = SUITES[options.suite]
    budgets = [int(b) for b in options.budgets.split(",")] if options.budgets else list(suite.budgets)
    names = suite.methods if options.methods is None else [m for m in options.methods.split(",") if m != "none"]
    configs = [("ours", TieredKVConfig(token_budget=b, **_settings(options))) for b in budgets]
    schedule = schedule_of(configs[0][1])
    plan = Plan(make_methods(names, budgets), [] if options.no_ours else configs, schedule, options.rows)
    for model in [options.model] if options.model else suite.models:
        _run_model(model, suite, _tasks(options, suite), plan, options)
    return 0


def _tasks(options: argparse.Namespace, suite: Suite) -> dict[str, int]:
    """Items of each task asked for."""
    from benchmarks.quality.tasks import TASKS

    if not options.tasks:
        return _shard(suite.tasks, options.shard)
    asked = dict(part.partition(":")[::2] for part in options.tasks.split(","))
    unknown = sorted(set(asked) - set(TASKS))
    if unknown:
        raise SystemExit(f"unknown task {unknown[0]!r}: expected any of {', '.join(TASKS)}")
    return _shard({name: int(count or suite.tasks.get(name, 4)) for name, count in asked.items()}, options.shard)


def _shard(tasks: dict[str, int], shard: str) -> dict[str, int]:
    index, _, count = shard.partition("/")
    return dict(list(tasks.items())[int(index) :: int(count)])


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """Options of ours given as ``name=value``; what is no Python literal is a string."""
    pairs = [pair.partition("=") for pair in options.set]
    return {name: _literal(value) for name, _, value in pairs}


def _literal(value: str) -> Any:
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value


def _run_model(name: str, suite: Suite, tasks: dict[str, int], plan: Any, options: argparse.Namespace) -> None:
    from benchmarks.quality.run import run_task
    from benchmarks.quality.tasks import TASKS
    from benchmarks.quality.tasks.items import Maker

    subject, encoder, data = _load(name, options)
    longest = getattr(subject.model.config.get_text_config(), "max_position_embeddings", suite.length)
    length = options.length or min(suite.models.get(name, suite.length), longest - 640)
    for task, count in tasks.items():
        if time.monotonic() - BEGAN > options.stop_after:
            print(f"{task}: left to the next run", file=sys.stderr)
            continue
        run_task(
            subject, TASKS[task], Maker(encoder, data, length, count, options.seed, options.steps or suite.steps), plan
        )


def _load(name: str, options: argparse.Namespace) -> tuple[Any, Any, Any]:
    """The model as a subject, its encoder, the data."""
    import torch

    from benchmarks.models import MODELS, load_model, load_tokenizer
    from benchmarks.quality.run import Subject
    from benchmarks.quality.tasks.data import Data
    from benchmarks.quality.tasks.items import Encoder

    if options.threads:
        torch.set_num_threads(options.threads)
    model = load_model(name, dtype=getattr(torch, options.dtype), device=options.device)
    sha256 = MODELS[name].sha256 if name in MODELS else None
    return Subject(model, name, sha256, options.dtype), Encoder(load_tokenizer(name)), Data(options.data)


def _ablate(options: argparse.Namespace) -> int:
    from benchmarks.quality.ablate import ablate

    only = options.only.split(",") if options.only else None
    for name in [options.model] if options.model else SUITES["full"].models:
        length = options.length or SUITES["full"].models.get(name, SUITES["full"].length)
        ablate(*_load(name, options), length=length, budget=options.budget, only=only, options=options)
    return 0


def _report(options: argparse.Namespace) -> int:
    from benchmarks.quality.report import write_report

    for path in write_report(options.rows, options.out):
        print(path)
    return 0


def _list(options: argparse.Namespace) -> int:
    from benchmarks.quality.ablate import VARIATIONS
    from benchmarks.quality.methods import BASELINES
    from benchmarks.quality.tasks import TASKS

    for title, names in (("suites", SUITES), ("tasks", TASKS), ("methods", BASELINES), ("variations", VARIATIONS)):
        print(f"{title}: {', '.join(names)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
