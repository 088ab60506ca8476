"""One prompt, all methods: a shared exact prefill, then forced decode steps, a batch row for each method and budget."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedConfig
from transformers.cache_utils import Cache, get_layer_types_and_kwargs

from benchmarks.quality.graph import StepRunner
from benchmarks.quality.layer import ResearchLayer, Scoring
from benchmarks.quality.methods.base import Method
from benchmarks.quality.schedule import Schedule

ATTENTION = "tkv_research"
PREFILL_CHUNK = 4096
"""Tokens a forward pass of the prefill takes; bounds the mask's size."""


class ResearchCache(Cache):
    """The layers of one sequence, later of one row a method.

    Args:
        config: The model's configuration. Full and sliding attention layers are known; methods act on the full ones.
        schedule: Sinks and window.
        collect_sums: Sum the attention every prompt token receives.

    Raises:
        ValueError: The model has layers of another type.
    """

    def __init__(self, config: PreTrainedConfig, schedule: Schedule, collect_sums: bool = False) -> None:
        text_config = config.get_text_config(decoder=True)
        types, _ = get_layer_types_and_kwargs(text_config)
        unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
        if unknown:
            raise ValueError(f"layer types: expected full_attention or sliding_attention, got {', '.join(unknown)}")
        window = getattr(text_config, "sliding_window", None)
        windows = [window if kind == "sliding_attention" else None for kind in types]
        super().__init__(layers=[ResearchLayer(window, collect_sums) for window in windows])
        self.schedule = schedule

    def start_decoding(self, methods: list[Method], capacity: int) -> None:
        """End the prefill: from now on rows are methods, and at most ``capacity`` tokens follow."""
        length, device = self.get_seq_length(), self.layers[0].keys.device
        self.prompt_length, self.capacity = length, capacity
        self.place = torch.zeros(1, dtype=torch.int64, device=device)
        self.unseen: dict[int | None, torch.Tensor] = {}
        self.window_start = self.schedule.before_step(length, self.schedule.after_prefill(length))
        first = self.schedule.num_sink_tokens
        for layer in self.layers:
            layer.start_decoding(methods, first, max(first, self.window_start), self.place, capacity)
            places = layer.kept + capacity
            layer.unseen = self.unseen.setdefault(layer.window, torch.zeros(places, dtype=torch.bool, device=device))

    def begin_step(self, step: int) -> bool:
        """Before decode step ``step``, counted from 0; returns whether the window was cut, which changes shapes."""
        self.place.fill_(step)
        for window, unseen in self.unseen.items():
            self._mark_unseen(unseen, window)
        start = self.schedule.before_step(self.prompt_length + step, self.window_start)
        is_cut, self.window_start = start != self.window_start, start
        for layer in self.layers if is_cut and start > self.schedule.num_sink_tokens else ():
            if layer.window is None:
                layer.absorb(start)
        return is_cut

    def steps_to_cut(self, step: int) -> int:
        """Decode steps from ``step`` on, itself included, before the window is cut again."""
        full = self.schedule.window_size + self.schedule.decode_segment
        return full - (self.prompt_length + step - self.window_start)

    def _mark_unseen(self, unseen: torch.Tensor, window: int | None) -> None:
        """Write, in place, which positions no row may attend to in this step."""
        places = torch.arange(len(unseen), device=unseen.device)
        newest = len(unseen) - self.capacity + self.place
        torch.gt(places, newest, out=unseen)
        if window is not None:
            unseen |= places <= newest - window


def research_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function transformers calls; the cache layer that tagged the keys does the work."""
    layer: ResearchLayer | None = getattr(key, "research_layer", None)
    if layer is None:
        raise ValueError(
            f"{type(module).__name__} changes keys after the cache; the research attention cannot serve it"
        )
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    scoring = Scoring(scale=scale, softcap=softcap, attention_sinks=s_aux)
    out = layer.attend_token(query, scoring) if layer.decoding else layer.attend_chunk(query, scoring)
    return out.transpose(1, 2).contiguous(), None


class Session:
    """A model whose attention is the research attention; a context manager that puts the model's own back.

    Args:
        model: A transformers causal language model.
        methods: What to compare. Row 0 is the full cache.
        schedule: Sinks and window granted to every method.
        cuda_graph: Replay decode steps from CUDA graphs; ``None`` means on a GPU.
    """

    def __init__(self, model: Any, methods: list[Method], schedule: Schedule, cuda_graph: bool | None = None) -> None:
        AttentionInterface.register(ATTENTION, research_attention)
        self.model, self.schedule = model, schedule
        self.methods = [Method(), *methods]
        self._before = model.config._attn_implementation
        model.set_attn_implementation(ATTENTION)
        self.runner = StepRunner(self._forward, model.device.type == "cuda" if cuda_graph is None else cuda_graph)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.model.set_attn_implementation(self._before)

    @property
    def rows(self) -> int:
        return sum(method.rows for method in self.methods)

    @torch.inference_mode()
    def prefill(self, prompt: list[int]) -> None:
        """Take the prompt into a fresh cache with exact attention."""
        sums = any(method.needs_sums for method in self.methods)
        self.cache = ResearchCache(self.model.config, self.schedule, sums)
        ids = torch.tensor([prompt], device=self.model.device)
        for first in range(0, len(prompt), PREFILL_CHUNK):
            chunk = ids[:, first : first + PREFILL_CHUNK]
            self._forward(chunk, torch.arange(first, first + chunk.shape[1], device=ids.device)[None])

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        out = self.model(input_ids=ids, position_ids=positions, past_key_values=self.cache, logits_to_keep=1)
        return out.logits[:, -1]

    @torch.inference_mode()
    def decode(self, tokens: list[int]) -> Iterator[torch.Tensor]:
        """Feed tokens to all rows one at a time; yields float32 logits ``[rows, vocabulary]`` after each."""
        self.cache.start_decoding(self.methods, len(tokens))
        for step, token in enumerate(tokens):
            yield self._step(step, torch.full((self.rows, 1), token, device=self.model.device))

    @torch.inference_mode()
    def continue_greedily(self, first: int, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Feed ``first``, then the full cache's own choices; yields the token fed ``[1]`` and logits as ``decode``."""
        self.cache.start_decoding(self.methods, count)
        token = torch.tensor([first], device=self.model.device)
        for step in range(count):
            logits = self._step(step, token.expand(self.rows)[:, None])
            yield token, logits
            token = logits[:1].argmax(1)

    def _step(self, step: int, ids: torch.Tensor) -> torch.Tensor:
        if self.cache.begin_step(step) or not step:
            self.runner.reset()
        position = self.cache.prompt_length + step
        positions = torch.full((self.rows, 1), position, device=ids.device)
        left = min(self.cache.capacity - step, self.cache.steps_to_cut(step))
        return self.runner.run(ids, positions, left).float()
