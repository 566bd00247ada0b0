"""The times and token counts of one client request."""

import time
from dataclasses import dataclass, field

from headrace.api.metrics import Metrics
from headrace.front.output import TextDelta


@dataclass(slots=True)
class Sequence:
    """One sequence's progress."""

    tokens: int = 0
    last: float = 0.0


@dataclass(slots=True)
class Meter:
    """Watches the deltas of a request go by.

    Attributes:
        metrics: where observations go.
        started: `time.perf_counter` at the request's arrival.
        ttft: seconds to the first token, once there.
        prompt_tokens: of all prompts.
        cached_tokens: of them, those not computed.
        cached_by_source: these by where their KV came from: `pool`, or a tier of the KV store.
        output_tokens: of all sequences.
        finish: how the last sequence ended.
    """

    metrics: Metrics
    started: float = field(default_factory=time.perf_counter)
    ttft: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cached_by_source: dict[str, int] = field(default_factory=dict)
    output_tokens: int = 0
    finish: str | None = None
    _sequences: dict[tuple[int, int], Sequence] = field(default_factory=dict)
    _prompts: dict[int, int] = field(default_factory=dict)

    def see(self, batch: list[tuple[int, TextDelta]]) -> None:
        """Count one batch of deltas as they come out of the mailbox."""
        now = time.perf_counter()
        for prompt, delta in batch:
            new = len(delta.tokens)
            key = (prompt, delta.index)
            sequence = self._sequences.get(key)
            if sequence is None:
                sequence = self._sequences[key] = Sequence()
                self._first(prompt, delta)
            elif new and sequence.tokens:
                for _ in range(new):
                    self.metrics.itl.observe((now - sequence.last) / new)
            if new:
                if self.ttft is None:
                    self.ttft = now - self.started
                    self.metrics.ttft.observe(self.ttft)
                sequence.tokens += new
                sequence.last = now
                self.output_tokens += new
            if delta.finish is not None:
                self.finish = delta.finish
                self.metrics.finish(delta.finish)
                self.metrics.output.observe(sequence.tokens)
                self.metrics.e2e.observe(now - self.started)

    def _first(self, prompt: int, delta: TextDelta) -> None:
        if prompt not in self._prompts:
            self._prompts[prompt] = delta.prompt_tokens
            self.prompt_tokens += delta.prompt_tokens
            self.cached_tokens += delta.cached_tokens
            for source, tokens in (delta.cached_by_source or {}).items():
                self.cached_by_source[source] = self.cached_by_source.get(source, 0) + tokens
            self.metrics.prompt.observe(delta.prompt_tokens)
