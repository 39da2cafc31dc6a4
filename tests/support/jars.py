"""Single jars from Maven Central, fetched once by Maven and kept for all later runs."""

import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from benchmarks.build import being_made
from tests.support.cache import cache_directory

_FETCH_SECONDS: Final = 300.0


def jar(group: str, artifact: str, version: str) -> Path:
    """Return a jar, without what it depends on.

    The test is skipped if Maven is not installed, or cannot fetch it.
    """
    folder = cache_directory() / f"{artifact}-{version}"
    if not folder.is_dir():
        maven = shutil.which("mvn")
        if maven is None:
            pytest.skip(f"not installed: mvn; NOT tested with {artifact}")
        with being_made(folder) as unfinished:
            _fetch(maven, f"{group}:{artifact}:{version}", unfinished)
    return folder / f"{artifact}-{version}.jar"


def _fetch(maven: str, coordinates: str, folder: Path) -> None:
    command = [maven, "-q", "-B", "dependency:copy", f"-Dartifact={coordinates}"]
    try:
        subprocess.run(
            [*command, f"-DoutputDirectory={folder}"],
            cwd=folder,
            check=True,
            timeout=_FETCH_SECONDS,
            stdout=subprocess.DEVNULL,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"Maven could not fetch {coordinates}, NOT tested: {error}")
