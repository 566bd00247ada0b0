"""OpenAI's lists: `limit`, `after`, `order`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from headrace.core.errors import InvalidRequest

T = TypeVar("T")
MAX_DIGITS = 9


def page(items: Sequence[T], query: Mapping[str, str], most: int, id_of: Callable[[T], str]) -> dict[str, Any]:
    """A part of a list.

    Args:
        items: all, the newest first.
        query: `limit` (1 to `most`; default 20, or `most` where that is the rule), `after` (an id), `order`.
        most: items of a page at most.
        id_of: an item's id.

    Raises:
        InvalidRequest: a parameter is wrong.
    """
    text = query.get("limit")
    default = most if most > 100 else 20
    limit = default
    if text is not None:
        limit = int(text) if text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS else 0
        if not 1 <= limit <= most:
            raise InvalidRequest(f"`limit` must be a number from 1 to {most}, got {text[:100]!r}", "limit")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"`order` must be asc or desc, got {order[:100]!r}", "order")
    sorted_ = list(items) if order == "desc" else list(reversed(items))
    after = query.get("after")
    begin = 0
    if after is not None:
        begin = next((i + 1 for i, item in enumerate(sorted_) if id_of(item) == after), -1)
        if begin < 0:
            raise InvalidRequest(f"`after` names {after[:100]!r}, which is not in the list", "after")
    data = sorted_[begin : begin + limit]
    return {
        "object": "list",
        "data": data,
        "first_id": id_of(data[0]) if data else None,
        "last_id": id_of(data[-1]) if data else None,
        "has_more": begin + limit < len(sorted_),
    }
