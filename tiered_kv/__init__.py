"""Tiered KV cache for Hugging Face transformers: the whole cache in host memory, what attention needs on the GPU.

Importing this package changes nothing in torch or transformers.
"""

import os as _os

# In a source checkout kernels/, offload/ and policies/ stand beside this folder; installed, they stand inside it.
_root = _os.path.dirname(_os.path.dirname(_os.path.abspath(__file__)))
_is_installed = _os.path.isdir(_os.path.join(__path__[0], "kernels"))
if not _is_installed and _os.path.isfile(_os.path.join(_root, "pyproject.toml")):
    __path__.append(_root)
del _os, _root, _is_installed

from tiered_kv.config import TieredKVConfig  # noqa: E402
from tiered_kv.errors import TieredKVError, TieredKVMemoryError  # noqa: E402

__version__ = "0.1.0"

_HOMES = {
    "TieredCache": "tiered_kv.cache",
    "dispatch_kv_cache": "tiered_kv.dispatch",
    "infer_auto_kv_config": "tiered_kv.planning",
    "kv_cache_dispatched": "tiered_kv.dispatch",
    "kv_cache_stats": "tiered_kv.dispatch",
    "remove_kv_dispatch": "tiered_kv.dispatch",
}
__all__ = ["TieredKVConfig", "TieredKVError", "TieredKVMemoryError", *_HOMES]


def __getattr__(name: str):
    """Import what needs torch and transformers when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
