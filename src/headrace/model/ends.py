"""Short ways into and out of the layers, taken where they give what the model's own forward gives."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Head = Callable[[Tensor], Tensor]


def find_embedding(model: Any, recorded: Callable[[Tensor], Tensor], device: torch.device) -> nn.Module | None:
    """The token embedding, where its output alone enters the first layer.

    Args: recorded: ids [T] -> what enters the first layer [1, T, hidden], by the model's own forward.
    Returns: None where something is added or multiplied (learned positions, an embedding multiplier).
    """
    embedding: nn.Module = model.get_input_embeddings()
    ids = torch.tensor([3, 1, 1, 0], device=device)
    alone, entered = embedding(ids[None]), recorded(ids)
    return embedding if alone.shape == entered.shape and torch.equal(alone, entered) else None


def find_head(model: Any, owner: Any, recorded: Head, hidden: Tensor) -> Head | None:
    """Norm, head and soft-cap as one function of hidden states [1, R, hidden] -> [1, R, vocab].

    Args: recorded: the same by the model's own forward; hidden: rows to compare on.
    Returns: None where the model does something else as well.
    """
    norm, head = getattr(owner, "norm", None), model.get_output_embeddings()
    cap = getattr(model.config, "final_logit_softcapping", None)
    if norm is None or head is None:
        return None

    def short(rows: Tensor) -> Tensor:
        logits: Tensor = head(norm(rows))
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    wanted = recorded(hidden)
    worst = (short(hidden).float() - wanted.float()).abs().max()
    tolerance = 1e-5 if hidden.dtype == torch.float32 else 2e-2
    return short if bool(worst <= tolerance * wanted.float().abs().max()) else None
