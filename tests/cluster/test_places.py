"""Parts of a machine for several workers."""

import pytest

from headrace.cluster.places import ANYWHERE, Place, split_machine
from headrace.core.errors import ConfigError


def test_one_worker_may_use_everything() -> None:
    assert split_machine(1, range(8)) == [ANYWHERE]


def test_cores_are_shared_out_in_neighbours_with_one_accelerator_each() -> None:
    assert split_machine(3, [0, 1, 2, 3, 8, 9, 10], "4,GPU-x,6,7") == [
        Place((0, 1, 2), "4"),
        Place((3, 8), "GPU-x"),
        Place((9, 10), "6"),
    ]
    for none in ("", "-1", "-1,0,1"):
        assert [place.device for place in split_machine(2, range(2), none)] == ["", ""]  # told to use none


def test_accelerators_are_numbered_where_nobody_named_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [place.device for place in split_machine(2, range(2))] == ["0", "1"]


@pytest.mark.parametrize(
    ("cpus", "devices", "said"),
    [(range(1), None, "cores"), (range(4), "0", "accelerators"), (range(4), "0,-1,1", "accelerators")],
)
def test_too_small_a_machine_is_refused(cpus: range, devices: str | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        split_machine(2, cpus, devices)
