"""The audit command where it cannot even begin; neither Java nor Spark is needed here."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfmq.spark_jobs.__main__ import main
from tests.support.log_writer import LogWriter
from tests.support.python import python


@pytest.mark.parametrize("package", ["pyspark", "numpy", "pyarrow"])
def test_without_the_extra_it_says_what_to_install(package: str, tmp_path: Path) -> None:
    """The broker does not bring these packages."""
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from halfmq.spark_jobs.__main__ import main\n"
        f"sys.exit(main(['audit', {str(tmp_path)!r}]))"
    )

    ended = python("-c", code)

    assert ended.returncode == 2
    assert ended.stderr == f"{package} is not installed: run  pip install 'halfmq[spark]'\n"


def test_without_java_it_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Spark itself would say that JAVA_HOME is not set."""
    pytest.importorskip("pyspark")
    LogWriter(tmp_path / "commitlog").close()
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr("pyspark.sql.SparkSession.getActiveSession", lambda: None)

    assert main(["audit", str(tmp_path)]) == 2
    assert "halfmq[spark,spark-java]" in capsys.readouterr().err
