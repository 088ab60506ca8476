"""Errors that callers may want to catch."""

from __future__ import annotations


class TieredKVError(RuntimeError):
    """Something this library cannot do with the model or the call at hand; the message says what and why."""


class TieredKVMemoryError(TieredKVError):
    """What was asked for needs more memory than there is; the message says what would fit."""
