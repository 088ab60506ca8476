"""Which implementation serves a tensor: the Triton kernel, or the torch reference beside it.

Kernel files take ``triton`` and ``tl`` from here, so that the package imports, and the references run, where there is
no Triton (it is published for Linux only).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False
    triton: Any = SimpleNamespace(jit=lambda function: function)  # type: ignore[no-redef]
    tl: Any = SimpleNamespace()  # type: ignore[no-redef]

BACKENDS = ("triton", "torch")

_forced: str | None = None


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether a kernel on ``tensor`` runs in Triton: on CUDA if Triton is installed, on the CPU only when forced."""
    if _forced is not None:
        return _forced == "triton"
    return HAS_TRITON and tensor.is_cuda


@contextmanager
def force_backend(backend: str) -> Iterator[None]:
    """Use one implementation for everything inside, whatever the device.

    ``"triton"`` on CPU tensors needs Triton's interpreter: ``TRITON_INTERPRET=1`` before the first import of triton.

    Raises:
        ValueError: ``backend`` is not known.
        RuntimeError: ``"triton"`` was asked for and Triton is not installed.
    """
    global _forced
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "triton" and not HAS_TRITON:
        raise RuntimeError("backend 'triton': Triton is not installed on this machine")
    before, _forced = _forced, backend
    try:
        yield
    finally:
        _forced = before


def check_contiguous(**tensors: torch.Tensor | None) -> None:
    """Kernels address rows by shape alone; a strided view would be read wrongly.

    Raises:
        ValueError: A tensor is not contiguous.
    """
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            shape, strides = tuple(tensor.shape), tensor.stride()
            raise ValueError(f"{name}: expected a contiguous tensor, got shape {shape} with strides {strides}")
