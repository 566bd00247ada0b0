"""Has Transformers read a checkpoint, and makes sure that every weight found its place."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headrace.core.errors import ModelError
from headrace.model import attention
from headrace.model.shape import count_experts


def read_model(path: Path, config: Any, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The causal model in eval mode, its weights mapped from the files where their type allows.

    Raises: ModelError if Transformers cannot read it, or if weights are missing, left over, or of another shape.
    """
    attention.register()
    try:
        try:
            model, info = _from_pretrained(path, config, dtype, device, "grouped_mm" if count_experts(config) else None)
        except ValueError as error:
            if "setting experts implementation" not in str(error):
                raise
            model, info = _from_pretrained(path, config, dtype, device, None)
    except (ValueError, ImportError, RuntimeError, LookupError, OSError, TypeError, AttributeError) as error:
        method = _quantisation(config)
        reason = (str(error) or type(error).__name__).splitlines()[0]
        if method is not None:
            raise ModelError(
                f"{path} is quantised with {method}, which cannot be run here ({reason}); use an unquantised checkpoint"
            ) from error
        raise ModelError(f"{path}: Transformers cannot load this {config.model_type} model: {reason}") from error
    _check_complete(path, info)
    whole: nn.Module = model.eval().requires_grad_(False)
    return whole


def _from_pretrained(
    path: Path, config: Any, dtype: torch.dtype, device: torch.device, experts: str | None
) -> tuple[Any, dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    extra: dict[str, Any] = {"device_map": device} if device.type == "cuda" else {}
    if experts is not None:
        extra["experts_implementation"] = experts
    with _quiet():
        model, info = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=attention.NAME,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # Refused by `_check_complete`, with the weight's name.
            output_loading_info=True,
            **extra,
        )
    return model, info


def _check_complete(path: Path, info: dict[str, Any]) -> None:
    for name, stored, wanted in sorted(info.get("mismatched_keys", ())):
        raise ModelError(
            f"{path}: weight {name} has shape {tuple(stored)}, its config.json says {tuple(wanted)}; use the right one"
        )
    for name in sorted(info.get("missing_keys", ())):
        raise ModelError(f"{path} lacks the weight {name} that its config.json asks for; fetch the model again")
    for name in sorted(info.get("unexpected_keys", ())):
        raise ModelError(f"{path} has the weight {name}, which its config.json does not use; do they belong together?")


def _quantisation(config: Any) -> str | None:
    described = getattr(config, "quantization_config", None)
    if described is None:
        return None
    method = described.get("quant_method") if isinstance(described, dict) else getattr(described, "quant_method", None)
    return str(getattr(method, "value", method) or "an unnamed method")


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars or load reports of Transformers on our terminal: what they would say becomes an error."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
