"""RocketMQ's own classes for SQL92 filters, run by `tests/support/java_filters`."""

from __future__ import annotations

import os
import shutil
import subprocess
from base64 import b64encode
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import pytest

from tests.support.jars import jar

VERSION: Final = "5.3.3"
_SOURCE: Final = Path(__file__).parent / "java_filters" / "SqlFilters.java"
_JARS: Final = (
    ("org.apache.rocketmq", "rocketmq-filter", VERSION),
    ("org.apache.rocketmq", "rocketmq-common", VERSION),
    ("com.google.guava", "guava", "32.0.1-jre"),
    ("com.google.guava", "failureaccess", "1.0.1"),
)
_RUN_SECONDS: Final = 120.0

Case = tuple[str, Mapping[str, str]]
"""An expression, and the properties of a message."""


def official_answers(cases: Iterable[Case]) -> list[str]:
    """Return for each case: true, false, null, invalid or failed.

    The test is skipped if Java or Maven is not installed, or the jars cannot be fetched.
    """
    if shutil.which("java") is None:
        pytest.skip("not installed: java; NOT compared with the official filters")
    class_path = os.pathsep.join(str(jar(*names)) for names in _JARS)
    lines = [
        "\t".join(
            b64encode(text.encode()).decode()
            for text in (expression, *(part for pair in properties.items() for part in pair))
        )
        for expression, properties in cases
    ]
    done = subprocess.run(
        ["java", "-Xmx128m", "-XX:TieredStopAtLevel=1", "-cp", class_path, str(_SOURCE)],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        timeout=_RUN_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()
