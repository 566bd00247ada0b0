"""A tier's place that is full, is unmounted, moves away or is removed under load, and comes back."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from soak_world import PART, Right, Server, await_true, loaded, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")


def growing(server: Server, figure: str, by: float = 10.0) -> None:
    """Wait until a figure of the tier has grown."""
    before = server.tier(figure)
    await_true(lambda: server.tier(figure) >= before + by, f"more {figure}")


def test_a_disk_that_fills_and_is_unmounted_under_load(tmp_path: Path, home: Path, model: Path, right: Right) -> None:
    if not shutil.which("unshare") or subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode:
        pytest.skip("mount namespaces are not allowed here")
    base, away = tmp_path / "disk", tmp_path / "away"
    base.mkdir()
    away.mkdir()
    inside = [*NAMESPACE, "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs "$0" && exec "$@"', str(base)]
    with serving(model, home, "--tier", f"dir:{base}:64MiB", inside=inside) as server:
        enter = ["nsenter", "-t", str(server.process.pid), "-U", "--preserve-credentials", "-m"]

        def mount(*words: str) -> None:
            subprocess.run([*enter, "mount", *words], check=True)

        with loaded(server, right, 2) as load:
            await_true(lambda: server.tier("degraded") == 1 and server.tier("write_errors") > 0, "a full disk")
            load.more(len(right))
            assert server.tier("used") <= (1 << 20) + PART
            mount("-o", "remount,size=32m", str(base))
            growing(server, "writes")
            growing(server, "reads")
            await_true(lambda: server.tier("degraded") == 0, "a tier that works again")

            mount("--move", str(base), str(away))
            load.more(len(right))
            assert list(Path(f"/proc/{server.process.pid}/root{base}").iterdir()) == [], "written below the mount point"
            mount("--move", str(away), str(base))
            growing(server, "reads")
        assert (tmp_path / "disk" / "headrace-kv").exists() is False, "the disk was mounted for the server alone"


def test_a_folder_that_moves_away_and_comes_back_or_is_removed(
    tmp_path: Path, home: Path, model: Path, right: Right
) -> None:
    base, away = tmp_path / "tier", tmp_path / "away"
    with (
        serving(model, home, "--tier", f"dir:{base}:64MiB") as server,
        loaded(server, right, 3) as load,
    ):
        growing(server, "writes")
        growing(server, "reads")
        for _ in range(3):
            os.rename(base, away)
            load.more(len(right))
            assert not base.exists()
            os.rename(away, base)
            growing(server, "reads")
        for doomed in (base / "headrace-kv", base):
            shutil.rmtree(doomed, ignore_errors=True)  # the server may write meanwhile
            load.more(len(right))
        base.mkdir(exist_ok=True)
        growing(server, "writes")
        growing(server, "reads")
