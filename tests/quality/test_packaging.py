"""The wheel holds what the tree holds, and runs without the tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (
    *("broker", "client", "command", "conf", "console", "integrations", "remoting", "spark_jobs"),
    *("store", "testing"),
)


def _run(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tree: an old build directory would hide a missing module."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for folder in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__", ".*_cache", "calls.pyi")
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignored)
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", "out", ".", cwd=tree)
    return next((tree / "out").glob("*.whl"))


def _tree_modules() -> set[str]:
    return {
        f"halfmq/{path.relative_to(ROOT)}".replace("command/package/", "")  # the package itself
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
    }


def test_the_wheel_holds_every_module(wheel: Path) -> None:
    """A package forgotten in `pyproject.toml` would be missing only at the user's."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())

    assert {name for name in names if name.endswith(".py")} == _tree_modules()
    conf = {"broker.conf", "grafana/halfmq.json", "prometheus/alerts.yml", "systemd/halfmq.service"}
    assert names >= {f"halfmq/conf/{name}" for name in conf}
    assert "halfmq/client/threads/calls.pyi" in names  # which the build has written
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert {name for name in names if name.endswith("py.typed")} == {
        f"{name.rpartition('/')[0]}/py.typed" for name in _tree_modules()
    }


def test_the_wheel_runs_like_the_editable_install(wheel: Path, tmp_path: Path) -> None:
    """Both say the same configuration, the wheel without any file of the tree in reach."""
    target = tmp_path / "site"
    _run(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"),
        *("--no-index", "--target", str(target), str(wheel)),
        cwd=tmp_path,
    )
    command = (sys.executable, "-m", "halfmq.broker", "--print-config")

    from_wheel = _run(*command, cwd=tmp_path, PYTHONPATH=str(target))
    from_tree = _run(*command, cwd=tmp_path)

    assert from_wheel == from_tree
    assert "listenPort=10911" in from_wheel


def test_the_command_is_named_broker() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    assert project["scripts"]["broker"] == "halfmq.broker.cli:main"
