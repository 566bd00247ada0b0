"""A tiny model with a tokenizer, made once."""

from pathlib import Path

import pytest
import tiny_chat_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat_model.make(tmp_path_factory.mktemp("tiny"))
