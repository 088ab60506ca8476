"""Tiered KV cache for Hugging Face transformers: the whole cache in host memory, what attention needs on the GPU.

Importing this package changes nothing in torch or transformers.
"""

import os as _os

# In a source checkout kernels/, offload/ and policies/ stand beside this folder; installed, they stand inside it.
_root = _os.path.dirname(_os.path.dirname(_os.path.abspath(__file__)))
if not _os.path.isdir(_os.path.join(__path__[0], "kernels")) and _os.path.isfile(_os.path.join(_root, "pyproject.toml")):
    __path__.append(_root)
del _os, _root

from tiered_kv.config import TieredKVConfig  # noqa: E402

__version__ = "0.1.0"
__all__ = ["TieredKVConfig"]
