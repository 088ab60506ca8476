"""A decode step of all rows as one CUDA graph: about 6,000 small kernels that a host takes 100 ms to launch one by one.

Between two cuts of the window a step's shapes and addresses do not change: positions, lengths and the token are read
from the device. The step after a cut runs eagerly, which warms up what the new shapes need; the next one is captured.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

WORTH_CAPTURING = 24
"""Steps of the same shapes from which on a capture pays (an untuned guess)."""


class CapturedStep:
    """A forward pass in a graph, with the buffers it reads its inputs from."""

    def __init__(self, forward: Forward, ids: torch.Tensor, positions: torch.Tensor) -> None:
        self._ids, self._positions = ids.clone(), positions.clone()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._logits = forward(self._ids, self._positions)

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The step's logits."""
        self._ids.copy_(ids)
        self._positions.copy_(positions)
        self._graph.replay()
        return self._logits.clone()


class StepRunner:
    """Run decode steps, from a graph where that can be done and pays.

    Args:
        forward: Token ids and positions ``[rows, 1]`` to logits.
        enabled: Try to capture.
        capture: What makes a graph of a step.
    """

    def __init__(self, forward: Forward, enabled: bool, capture: Callable[..., Forward] = CapturedStep) -> None:
        self.forward, self.enabled, self._capture = forward, enabled, capture
        self.captures = 0
        self.reset()

    def reset(self) -> None:
        """Shapes or addresses have changed."""
        self._captured: Forward | None = None
        self._is_warm = False

    def run(self, ids: torch.Tensor, positions: torch.Tensor, left: int) -> torch.Tensor:
        """One step; ``left`` more like it are expected, this one included."""
        if self._captured is None and self.enabled and self._is_warm and left >= WORTH_CAPTURING:
            self._try_to_capture(ids, positions)
        self._is_warm = True
        return (self._captured or self.forward)(ids, positions)

    def _try_to_capture(self, ids: torch.Tensor, positions: torch.Tensor) -> None:
        try:
            self._captured = self._capture(self.forward, ids, positions)
            self.captures += 1
        except RuntimeError as error:
            self.enabled = False
            warnings.warn(f"the research attention runs without a CUDA graph: {error}", stacklevel=2)
