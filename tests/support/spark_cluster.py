"""A Spark standalone cluster on this machine: a master and two workers, each a process."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyspark

from halfmq.spark_jobs.jobs.java import java_for_spark
from tests.support.stores import wait_until

BIN = Path(pyspark.__file__).parent / "bin"
WORKERS = 2


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """Start it, with its logs in ``folder``; give the master's URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"spark://127.0.0.1:{port}"
    with java_for_spark(), ExitStack() as running:
        master = ["master.Master", "--port", str(port)]
        log = running.enter_context(_service("master", folder, *master))
        wait_until(lambda: "Starting Spark master at" in log.read_text())
        for number in range(WORKERS):
            worker = ["worker.Worker", "--cores", "1", "--memory", "1g"]
            work = ["--work-dir", str(folder / f"work{number}"), url]
            running.enter_context(_service(f"worker{number}", folder, *worker, *work))
        wait_until(lambda: log.read_text().count("Registering worker") == WORKERS)
        yield url


@contextmanager
def _service(name: str, folder: Path, kind: str, *arguments: str) -> Iterator[Path]:
    log = folder / f"{name}.log"
    environment = os.environ | {
        "SPARK_LOCAL_IP": "127.0.0.1",  # where its web page listens too
        "SPARK_MASTER_OPTS": "-Dspark.master.rest.enabled=false",
        "SPARK_DAEMON_MEMORY": "256m",
    }
    where = ["--host", "127.0.0.1", "--webui-port", "0"]
    command = [str(BIN / "spark-class"), f"org.apache.spark.deploy.{kind}", *where, *arguments]
    with (
        log.open("wb") as output,
        subprocess.Popen(command, env=environment, stdout=output, stderr=output) as process,
    ):
        try:
            yield log
        finally:
            process.terminate()


def submit(
    url: str, archive: Path, program: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run a program on the cluster, as its documentation says, with nothing but the archive."""
    settings = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.executor.memory": "700m",
        "spark.ui.enabled": "false",
    }
    options = [part for key, value in settings.items() for part in ("--conf", f"{key}={value}")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with java_for_spark():
        environment |= {"JAVA_HOME": os.environ["JAVA_HOME"]} if "JAVA_HOME" in os.environ else {}
        return subprocess.run(
            [str(BIN / "spark-submit"), "--master", url, *options, "--py-files", str(archive),
             str(program), *arguments],
            env=environment, cwd=archive.parent, capture_output=True, text=True, check=False,
        )  # fmt: skip
