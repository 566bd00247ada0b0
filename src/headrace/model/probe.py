"""One small forward at load that finds what a configuration does not tell."""

from typing import Any

import torch
from torch import Tensor

from headrace.core.errors import ModelError
from headrace.model.attention import AttentionCall, Probe
from headrace.model.decoder import Decoder, Forward


def probe(decoder: Decoder) -> list[AttentionCall]:
    """Run a few rows through all layers and return how each layer calls its attention.

    Raises: ModelError if a layer does not attend exactly once through us, if layers differ in their heads, if their
    arguments depend on anything but positions, or if the numbers come out not finite.
    """
    name = type(decoder.model).__name__
    step = Probe()
    try:
        fwd = _whole(decoder, step)
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ModelError(f"{name} cannot be run layer by layer: {reason}") from error
    missing = set(range(len(decoder.layers))) - set(step.calls)
    if missing:
        kind = type(decoder.layers[min(missing)]).__name__
        raise ModelError(f"{name}: layer {min(missing)} ({kind}) has no attention that Headrace can serve")
    calls = [step.calls[index] for index in range(len(decoder.layers))]
    sizes = {(call.heads, call.kv_heads, call.head_dim) for call in calls}
    if len(sizes) != 1:
        raise ModelError(f"{name} has layers of different head counts or sizes {sorted(sizes)}, which is not supported")
    logits = decoder.logits(fwd, torch.tensor([2], device=decoder.device))
    if not bool(torch.isfinite(logits).all()):
        raise ModelError(f"{name} gives numbers that are not finite in {fwd.hidden.dtype}; try --dtype float32")
    return calls


def _whole(decoder: Decoder, step: Probe) -> Forward:
    positions = torch.arange(3, device=decoder.device)
    fwd = decoder.begin(torch.tensor([1, 0, 2], device=decoder.device), positions, step)
    other = decoder.begin(torch.tensor([2, 2, 1], device=decoder.device), positions, step)
    for index, (one, two) in enumerate(zip(fwd.calls, other.calls, strict=True)):
        if not _same(one, two):
            raise ModelError(f"layer {index} takes arguments that depend on the tokens, which is not supported")
    decoder.run(fwd, 0, len(decoder.layers))
    return fwd


@torch.inference_mode()
def trial_rows(decoder: Decoder) -> Forward:
    """A few rows at scattered positions, before the first layer, to try a layer's replacements on."""
    device = decoder.device
    last = decoder.shape.max_position - 1
    positions = torch.tensor([0, 1, 2, 7, last // 2, last], device=device).clamp(max=last)
    return decoder.begin(torch.arange(6, device=device) % decoder.shape.vocab_size, positions, Probe())


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(two, Tensor) and torch.equal(one, two)
    if isinstance(one, dict):
        return isinstance(two, dict) and one.keys() == two.keys() and all(_same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return isinstance(two, list | tuple) and len(one) == len(two) and all(map(_same, one, two))
    return bool(one is two or one == two)
