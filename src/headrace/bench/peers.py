"""Others that run the same batch: plain Transformers in this process, or any program that prints one JSON line."""

import json
import shlex
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headrace.bench.workload import Item
from headrace.core.errors import ConfigError, HeadraceError


@dataclass(frozen=True)
class PeerRun:
    """One pass of a peer over the batch."""

    wall_s: float
    total_tokens_per_s: float


class Peer(Protocol):
    """Runs the batch once per call."""

    name: str

    def run(self) -> PeerRun:
        """One timed pass."""
        ...


class TransformersPeer:
    """`generate` of plain Transformers on left-padded batches of requests that ask for equally many tokens.

    Args:
        path: the model's folder.
        dtype: of weights and computation.
        batch: the requests; greedy, whatever their sampling parameters.
        batch_size: requests per call of `generate`.
    """

    name = "transformers"

    def __init__(self, path: str | Path, dtype: str, batch: Sequence[Item], batch_size: int = 16) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
        ordered = sorted(batch, key=lambda item: (item.max_tokens, len(item.prompt)))
        self._groups: list[list[Item]] = []
        for item in ordered:
            group = self._groups[-1] if self._groups else []
            if group and group[0].max_tokens == item.max_tokens and len(group) < batch_size:
                group.append(item)
            else:
                self._groups.append([item])

    def run(self) -> PeerRun:
        """One timed pass."""
        start, tokens = time.perf_counter(), 0
        with self._torch.inference_mode():
            for group in self._groups:
                tokens += self._generate(group)
        wall = time.perf_counter() - start
        return PeerRun(wall, tokens / wall)

    def _generate(self, group: list[Item]) -> int:
        torch = self._torch
        width = max(len(item.prompt) for item in group)
        ids = torch.zeros(len(group), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, item in enumerate(group):
            ids[row, width - len(item.prompt) :] = torch.tensor(item.prompt)
            mask[row, width - len(item.prompt) :] = 1
        count = group[0].max_tokens
        fixed = {"min_new_tokens": count} if all(item.params.ignore_eos for item in group) else {}
        out = self._model.generate(
            ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0, **fixed
        )
        generated = int(out.shape[1]) - width
        return sum(len(item.prompt) for item in group) + len(group) * generated


class CommandPeer:
    """A program whose last JSON line on stdout has `wall_s` and `total_tokens_per_s`; run anew for each pass.

    Args:
        command: split as a shell would; `{requests}` stands for the batch's file.
        requests: that file.
    """

    def __init__(self, command: str, requests: Path) -> None:
        self.name = "command"
        try:
            self._words = [word.replace("{requests}", str(requests)) for word in shlex.split(command)]
        except ValueError as error:
            raise ConfigError(f"--peer-command cannot be split into words: {error}") from error
        if not self._words:
            raise ConfigError("--peer-command is empty")

    def run(self) -> PeerRun:
        """One pass; the program times itself, so that its loading does not count."""
        done = subprocess.run(self._words, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise HeadraceError(f"{self._words[0]} ended with code {done.returncode}: {last}")
        result = _last_json(done.stdout)
        if result is None:
            raise HeadraceError(f"{self._words[0]} printed no JSON line with total_tokens_per_s")
        self.name = str(result.get("peer", self.name))
        return PeerRun(float(result.get("wall_s", 0.0)), float(result["total_tokens_per_s"]))


def _last_json(output: str) -> dict[str, Any] | None:
    for line in reversed(output.splitlines()):
        if not line.startswith("{"):
            continue
        try:
            result: dict[str, Any] = json.loads(line)
        except ValueError:
            continue
        if "total_tokens_per_s" in result:
            return result
    return None
