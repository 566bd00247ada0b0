"""Shared by all tests."""

import sys
from pathlib import Path

for room in sorted(Path(__file__).parent.iterdir()):
    if room.is_dir():
        sys.path.append(str(room))  # so that a room's tests find the helper modules beside them
