"""A tiny model, prompts, and what a server without a store answers to them."""

import sys
from pathlib import Path

import pytest
from soak_world import HEAD_DIM, LAYERS, Right, answers, prompts, serving

sys.path.append(str(Path(__file__).parents[1] / "bench"))
import tiny_chat_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat_model.make(tmp_path_factory.mktemp("tiny"), num_hidden_layers=LAYERS, head_dim=HEAD_DIM)


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`HEADRACE_HOME` of all servers: what is measured and compiled at the first start is there for the others."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def right(model: Path, home: Path) -> Right:
    """Every prompt with its right answer."""
    with serving(model, home, "--no-store", "--no-prefix-caching") as plain:
        return answers(plain, prompts(1))
