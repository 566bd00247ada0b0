"""GET /v1/models: what is served."""

from typing import Any

from headrace.api.state import ALIAS, ServerState


def model_list(state: ServerState) -> dict[str, Any]:
    """The served model and the alias that always names it."""
    names = [state.model] if state.model == ALIAS else [state.model, ALIAS]
    return {"object": "list", "data": [model_card(state, name) for name in names]}


def model_card(state: ServerState, name: str) -> dict[str, Any]:
    """One model; raises the 404 of one that is not served."""
    state.check_model(name)
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "headrace",
        "root": state.model,
        "parent": None,
        "max_model_len": state.info.max_model_len,
    }
