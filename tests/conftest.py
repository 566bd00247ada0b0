"""Shared by all tests."""

import os
import random
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run, so that a change is judged by what it changed; `make fuzz` draws new ones.
# No deadline for one example: on a busy machine any of them may be slow; pytest's time-out ends what hangs.
_LENIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("repeatable", derandomize=True, **_LENIENT)
settings.register_profile("fuzz", print_blob=True, **_LENIENT)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

sys.path.append(str(Path(__file__).parent))
for room in sorted(Path(__file__).parent.rglob("*")):
    if room.is_dir() and room.name != "__pycache__":
        sys.path.append(str(room))  # so that a room's tests find the helper modules beside them


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """Random tensors and choices that a test draws without a seed of its own are the same in every run."""
    random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
