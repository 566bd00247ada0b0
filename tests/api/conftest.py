"""The parrot's server, shared by the tests that change nothing about it."""

from collections.abc import Iterator

import pytest
from served import Served, serve_parrot


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Served]:
    with serve_parrot() as served:
        yield served


@pytest.fixture
def server(shared_server: Served) -> Iterator[Served]:
    """The shared server; after each test nothing of its requests may be left."""
    yield shared_server
    shared_server.idle()
