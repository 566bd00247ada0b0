"""The logits of every way through a device's engine against plain Transformers on the same device."""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headrace.bench.forced import ForcedRun
from headrace.engine.graphs import DecodePath, GraphRecorder
from headrace.engine.kv_group import KVGroup, KVShape
from headrace.kernels.attention import AttentionBackend, backend_for
from headrace.model.loader import load

#: Tokens of each sequence whose KV is stored first, and tokens in all: page edges, a window, unequal ends.
PROMPTS, LENGTHS = (1, 15, 16, 17, 100, 200), (9, 40, 33, 30, 130, 217)
PAGE_SIZE = 16

#: float32: largest difference of log-probabilities in standard deviations of the logits (DESIGN: parity).
TOLERANCE = 1e-3
#: 16 bits: our root mean square error may be so many times that of plain Transformers in the same type.
ROUNDING = 1.5


@dataclass(frozen=True)
class LogitsCheck:
    """One way through one model.

    Attributes:
        model, dtype: what ran.
        way: attention kernels, and `any plan`, `fixed shape` or `graphs`.
        error: its difference from plain Transformers in float32, in standard deviations of the logits.
        allowed: at most this.
    """

    model: str
    dtype: str
    way: str
    error: float
    allowed: float

    @property
    def holds(self) -> bool:
        """True when the error is a number and small enough."""
        return self.error <= self.allowed

    def __str__(self) -> str:
        """One line."""
        return f"{self.model}, {self.dtype}, {self.way}: {self.error:.2e} of {self.allowed:.2e}"


def check(name: str, folder: Path, dtype: str, device: str, threads: int = 0) -> list[LogitsCheck]:
    """Teacher-forced logits of a model folder on every way there is on this device.

    Args:
        name: of the model in the result.
        folder: of the model.
        dtype: `float32`, `bfloat16` or `float16`.
        device: `cuda`; or `cpu`, where graphs and FlashInfer are left out.
        threads: CPU threads; 0: all cores.
    """
    decoder = load(folder, dtype=dtype, device=device, threads=threads)
    generator = torch.Generator().manual_seed(5)
    sequences = [torch.randint(3, decoder.shape.vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]
    exact = _transformers(folder, torch.float32, decoder.device, sequences)
    measure, allowed = _worst, TOLERANCE
    if dtype != "float32":
        measure = _typical
        allowed = ROUNDING * measure(_transformers(folder, getattr(torch, dtype), decoder.device, sequences), exact)
    found = []
    for way, backend, capture in ways(device):
        shape = decoder.shape
        pages = sum(-(-length // PAGE_SIZE) for length in LENGTHS)
        kv = KVShape(range(shape.num_layers), range(shape.kv_heads), shape.head_dim, PAGE_SIZE, dtype)
        group = KVGroup(kv, pages, backend, device)
        run = ForcedRun(decoder, group, backend, sequences)
        run.prefill(PROMPTS)
        path = None
        if capture is not None:
            recorder = GraphRecorder(decoder.device) if capture else None
            path = DecodePath(decoder, group, backend, len(LENGTHS), max(LENGTHS), recorder)
        found.append(LogitsCheck(name, dtype, way, measure(run.decode(PROMPTS, path), exact), allowed))
    return found


def ways(device: str) -> Iterator[tuple[str, AttentionBackend, bool | None]]:
    """Name, attention kernels, and whether decode steps are captured (None: they take the way of any plan)."""
    names = ["torch"]
    if device == "cuda" and importlib.util.find_spec("flashinfer"):
        names.append("flashinfer")
    for name in names:
        backend = backend_for(device, name=name)
        yield f"{name}, any plan", backend, None
        yield f"{name}, fixed shape", backend, False
        if device == "cuda":
            yield f"{name}, graphs", backend, True


def _transformers(folder: Path, dtype: torch.dtype, device: torch.device, sequences: list[list[int]]) -> list[Tensor]:
    """Logits of the positions after each prompt, every sequence alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval().to(device)
    with torch.inference_mode():
        return [
            model(torch.tensor([tokens], device=device), use_cache=False).logits[0, prompt:].float()
            for tokens, prompt in zip(sequences, PROMPTS)
        ]


def _errors(ours: list[Tensor], exact: list[Tensor]) -> Tensor:
    """Differences of log-probabilities in standard deviations of the logits."""
    return torch.cat([((a.log_softmax(-1) - b.log_softmax(-1)) / b.std()).flatten() for a, b in zip(ours, exact)])


def _worst(ours: list[Tensor], exact: list[Tensor]) -> float:
    return float(_errors(ours, exact).abs().max())


def _typical(ours: list[Tensor], exact: list[Tensor]) -> float:
    return float(_errors(ours, exact).square().mean().sqrt())
