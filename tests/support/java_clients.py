"""Unmodified Java clients of Apache RocketMQ, driven by the programs in `tests/support/java`.

Maven fetches each version's jars once into a cache directory, those of its tools among them, and
`javac` compiles the programs against them. A `JavaClient` is one JVM: it runs scenarios side by
side and says what it saw.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from benchmarks.build import being_made
from tests.support.cache import cache_directory, forget_others

SOURCES: Final = Path(__file__).parent / "java"
SINCE_4_6: Final = ("LitePulling.java", "Replying.java", "Tracing.java")
SINCE_5: Final = ("Popping.java",)
"""Programs that older clients do not have the classes for."""
TOOLS: Final = ("java", "javac", "mvn")
_FETCH_SECONDS: Final = 900.0  # about 80 jars on a first run
_COMPILE_SECONDS: Final = 120.0
RUN_SECONDS: Final = 120.0  # the programs themselves wait up to a minute for each thing
_LOG_TAIL: Final = 6000  # characters shown when something fails

_POM: Final = """\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>halfmq</groupId><artifactId>rocketmq-peer</artifactId><version>1</version>
  <dependencies>
    <dependency>
      <groupId>org.apache.rocketmq</groupId><artifactId>rocketmq-tools</artifactId>
      <version>{version}</version>
    </dependency>
  </dependencies>
</project>
"""

_JVM_OPTIONS: Final = (
    *("-Xmx192m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dfile.encoding=UTF-8"),
    # The netty of 4.4.0 looks into java.nio; Java 8 does not know how to allow it, nor needs it.
    *("-XX:+IgnoreUnrecognizedVMOptions", "--add-opens=java.base/java.nio=ALL-UNNAMED"),
)

Line = dict[str, Any]
"""What a scenario said: an event and its fields."""


class Kind(NamedTuple):
    """A client version and how it is run."""

    version: str
    options: tuple[str, ...] = ()

    @property
    def since_4_6(self) -> bool:
        """Whether this version has the lite pull consumer and request-reply."""
        major, minor, _ = map(int, self.version.split("."))
        return (major, minor) >= (4, 6)


def class_path(version: str) -> str:
    """Fetch and compile what is not there yet; return what `java -cp` needs.

    The test is skipped if a tool is not installed, or Maven cannot fetch the jars.
    """
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}; the Java client {version} is NOT tested")
    jars = cache_directory() / f"rocketmq-tools-{version}"
    if not jars.is_dir():
        with being_made(jars) as unfinished:
            _fetch(version, unfinished)
    sources = sorted(SOURCES.glob("*.java"))
    if not version.startswith("5."):
        sources = [source for source in sources if source.name not in SINCE_5]
    if not Kind(version).since_4_6:
        sources = [source for source in sources if source.name not in SINCE_4_6]
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    classes = cache_directory() / f"java-classes-{version}-{digest[:16]}"
    if not classes.is_dir():
        with being_made(classes) as unfinished:
            _compile(sources, jars, unfinished)
        forget_others(classes, f"java-classes-{version}-*")
    return f"{classes}{os.pathsep}{jars}/*"


def _fetch(version: str, jars: Path) -> None:
    with tempfile.TemporaryDirectory(dir=jars.parent) as home:
        (Path(home) / "pom.xml").write_text(_POM.format(version=version), encoding="utf-8")
        command = ["mvn", "-q", "-B", "dependency:copy-dependencies", f"-DoutputDirectory={jars}"]
        try:
            subprocess.run(
                command, cwd=home, check=True, timeout=_FETCH_SECONDS, stdout=subprocess.DEVNULL
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"Maven could not fetch the Java client {version}, NOT tested: {error}")


def _compile(sources: list[Path], jars: Path, classes: Path) -> None:
    options = ["-nowarn", "-encoding", "UTF-8", "-d", str(classes), "-cp", f"{jars}/*"]
    done = subprocess.run(
        ["javac", *options, *map(str, sources)],
        capture_output=True,
        text=True,
        timeout=_COMPILE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr


class JavaClient:
    """One JVM with a client library; made by `java_client`."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log
        self._runs: dict[str, queue.SimpleQueue[Line]] = {}
        self._ended: dict[str, list[Line]] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(self, scenario: str, *arguments: object) -> str:
        """Have a scenario run beside the others; return the number of the run."""
        assert self._process.stdin is not None
        run = str(len(self._runs))
        self._runs[run] = queue.SimpleQueue()
        self._process.stdin.write("\t".join([run, scenario, *map(str, arguments)]) + "\n")
        self._process.stdin.flush()
        return run

    def lines(self, run: str) -> list[Line]:
        """Wait for the end of a run; return what it said."""
        if run not in self._ended:
            self._ended[run] = self._until_the_end(run)
        return self._ended[run]

    def _until_the_end(self, run: str) -> list[Line]:
        deadline = time.monotonic() + RUN_SECONDS
        lines: list[Line] = []
        while True:
            try:
                line = self._runs[run].get(timeout=max(0, deadline - time.monotonic()))
            except queue.Empty:
                line = {"event": "failed", "reason": f"it took more than {RUN_SECONDS:.0f} s"}
            if line["event"] == "done":
                return lines
            assert line["event"] != "failed", self._report(line["reason"], lines)
            lines.append(line)

    def said(self, run: str, event: str, **fields: object) -> Line:
        """Wait until a run, which goes on, says this; return that line."""
        return self.until(run, event, **fields)[-1]

    def until(self, run: str, event: str, **fields: object) -> list[Line]:
        """Wait until a run, which goes on, says this; return that line after those before it."""
        lines: list[Line] = []
        while True:
            line = self._runs[run].get(timeout=RUN_SECONDS)
            assert line["event"] not in {"done", "failed"}, self._report(str(line), lines)
            lines.append(line)
            if line["event"] == event and fields.items() <= line.items():
                return lines

    def heard(self, run: str) -> list[Line]:
        """Return what a run, which goes on, has said since it was last listened to."""
        said = self._runs[run]
        return [said.get() for _ in range(said.qsize())]

    def run(self, scenario: str, *arguments: object) -> list[Line]:
        """Have a scenario run; return what it said."""
        return self.lines(self.start(scenario, *arguments))

    def dying_words(self, scenario: str, *arguments: object) -> tuple[int, list[Line]]:
        """Have a scenario run that ends the JVM; return its exit status and what was said."""
        run = self.start(scenario, *arguments)
        status = self._process.wait(RUN_SECONDS)
        self._reader.join()
        lines = []
        while (line := self._runs[run].get_nowait())["event"] != "failed":
            lines.append(line)
        return status, lines

    def kill(self) -> None:
        """End the JVM without a farewell of its clients."""
        self._process.kill()
        self._process.wait()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Let the JVM not run at all for the length of the block; its connections stay open."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End the JVM; its clients are gone with their scenarios."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()

    def _report(self, reason: str, lines: list[Line]) -> str:
        said = "\n".join(map(str, lines))
        log = self._log.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL:]
        return f"{reason}\n{said}\n{log}"

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for text in output:
                if text.startswith("{"):
                    line: Line = json.loads(text)
                    self._runs[line["run"]].put(line)
        for waiting in list(self._runs.values()):
            waiting.put({"event": "failed", "reason": "the JVM ended"})


@contextlib.contextmanager
def java_client(kind: Kind, namesrv: str, home: Path) -> Iterator[JavaClient]:
    """A JVM for the length of the block; it writes its logs and offsets below `home`."""
    home.mkdir(parents=True, exist_ok=True)
    log = home / "java.log"
    command = ["java", *_JVM_OPTIONS, f"-Duser.home={home}", *kind.options]
    command += ["-cp", class_path(kind.version), "Driver", namesrv]
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
            cwd=home,  # some tools write files
        )
    client = JavaClient(process, log)
    try:
        yield client
    finally:
        client.close()
