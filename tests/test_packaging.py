"""What is installed and imported: our modules only, and Hugging Face's kernels beside them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SUBPACKAGES = ("kernels", "offload", "policies")


def run_python(code: str, *, python_path: Path | None = None) -> None:
    """Run ``code`` in a fresh interpreter whose working directory is the repository root."""
    environment = {**os.environ, "PYTHONPATH": str(python_path or "")}
    outcome = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr


@pytest.mark.parametrize("name", SUBPACKAGES)
def test_folders_are_no_regular_packages(name):
    """With an ``__init__.py``, ./kernels would hide Hugging Face's from whoever runs Python in the repository root."""
    assert (ROOT / name).is_dir()
    assert not (ROOT / name / "__init__.py").exists()


@pytest.fixture(scope="module")
def hf_kernels(tmp_path_factory) -> Path:
    """A folder into which pip has installed Hugging Face's package."""
    folder = tmp_path_factory.mktemp("hf_kernels")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    outcome = subprocess.run(
        [*command, "kernels>=0.16,<0.17", "kernels-data", "tomlkit"], capture_output=True, text=True
    )
    if outcome.returncode:
        pytest.skip(f"pip cannot install Hugging Face's kernels: {outcome.stderr.strip().splitlines()[-1]}")
    return folder


def test_hugging_face_kernels_still_import_from_the_repository_root(hf_kernels):
    code = (
        "import sys, kernels, transformers.integrations.hub_kernels, tiered_kv.kernels.score\n"
        "from transformers.utils import is_kernels_available\n"
        f"assert kernels.__file__.startswith({str(hf_kernels)!r}), kernels.__file__\n"
        "assert is_kernels_available()\n"
        "assert tiered_kv.kernels.score is not sys.modules.get('kernels.score')\n"
        "from transformers import LlamaForCausalLM"
    )
    run_python(code, python_path=hf_kernels)


def test_transformers_imports_from_the_repository_root_without_them():
    run_python("from transformers import LlamaForCausalLM; import tiered_kv.dispatch")


@pytest.mark.parametrize("name", SUBPACKAGES)
def test_subpackages_import_under_our_name(name):
    run_python(
        f"import importlib, pathlib, sys\n"
        f"for path in pathlib.Path({name!r}).glob('*.py'):\n"
        f"    importlib.import_module('tiered_kv.{name}.' + path.stem)\n"
        f"assert {name!r} not in sys.modules"
    )


def test_importing_us_imports_nothing_heavy():
    run_python("import sys, tiered_kv; assert not {'torch', 'transformers', 'triton', 'numpy'} & set(sys.modules)")


def test_importing_everything_registers_nothing_and_starts_no_device():
    code = (
        "import torch\n"
        "from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING\n"
        "from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS\n"
        "from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS\n"
        "registries = [DYNAMIC_LAYER_TYPE_MAPPING, ALL_MASK_ATTENTION_FUNCTIONS, ALL_ATTENTION_FUNCTIONS]\n"
        "before = [set(registry.keys()) for registry in registries]\n"
        "import tiered_kv\n"
        "for name in tiered_kv.__all__: getattr(tiered_kv, name)\n"
        "assert before == [set(registry.keys()) for registry in registries]\n"
        "assert not torch.cuda.is_initialized()"
    )
    run_python(code)


def test_every_public_name_exists():
    run_python("from tiered_kv import *")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> list[str]:
    """Names of the files in a wheel built from a copy of the sources."""
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path_factory.mktemp("source")
    for name in ("tiered_kv", *SUBPACKAGES):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(source / "out"), str(source)]
    outcome = subprocess.run(command, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    (path,) = (source / "out").glob("*.whl")
    return zipfile.ZipFile(path).namelist()


def test_the_wheel_holds_exactly_our_modules(wheel):
    ours = {f"tiered_kv/{path.name}" for path in (ROOT / "tiered_kv").glob("*.py")} | {"tiered_kv/py.typed"}
    ours |= {f"tiered_kv/{name}/{path.name}" for name in SUBPACKAGES for path in (ROOT / name).glob("*.py")}
    assert {name for name in wheel if ".dist-info/" not in name} == ours


def test_the_wheel_holds_licence_and_command(wheel):
    described = {name.split(".dist-info/")[1] for name in wheel if ".dist-info/" in name}
    assert described == {"METADATA", "WHEEL", "RECORD", "top_level.txt", "entry_points.txt", "licenses/LICENSE"}
