"""A headless Chromium, driven through the pipes of its DevTools protocol, without a library.

`HALFMQ_BROWSER` names the program, which must then start; without it the usual names are tried.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from tests.support.patience import PATIENCE_S

NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
VARIABLE: Final = "HALFMQ_BROWSER"
_STOP_SECONDS: Final = 10.0
_OPTIONS: Final = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe", "about:blank"),
)

# Chromium reads commands from descriptor 3 and writes answers to 4.
_LAUNCHER: Final = """\
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for end, wanted in zip(ends, (3, 4)):
    os.dup2(end, wanted)
os.execvp(sys.argv[3], sys.argv[3:])
"""

Json = dict[str, Any]


class BrowserMissingError(Exception):
    """There is none that starts; the message says what is missing."""


def find_browser() -> str:
    """Return the program.

    Raises:
        BrowserMissingError: There is none.
    """
    named = os.environ.get(VARIABLE)
    if named:
        assert shutil.which(named), f"{VARIABLE}={named}: no such program"
        return named
    for name in NAMES:
        if shutil.which(name):
            return name
    raise BrowserMissingError(
        f"no browser opens the report here: apt-get install chromium, or set {VARIABLE};"
        f" looked for {', '.join(NAMES)}"
    )


class Pipe:
    """Commands to a browser, and what it says: JSON texts that end with a zero byte."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._read = b""
        self._number = 0

    def ask(self, method: str, session: str | None, parameters: Json, events: list[Json]) -> Json:
        """Send a command and return its answer; events that come first go into the list."""
        self._number += 1
        command: Json = {"id": self._number, "method": method, "params": parameters}
        if session:
            command["sessionId"] = session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        end = time.monotonic() + PATIENCE_S
        while True:
            said = self.next(end)
            if said.get("id") == self._number:
                assert "error" not in said, f"{method}: {said['error']}"
                result: Json = said["result"]
                return result
            events.append(said)

    def next(self, end: float) -> Json:
        """Return the next thing that the browser says."""
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._answers], [], [], max(end - time.monotonic(), 0))
            assert ready, "the browser does not answer"
            read = os.read(self._answers, 1 << 20)
            if not read:
                raise EOFError("the browser has ended")
            self._read += read
        said, _, self._read = self._read.partition(b"\0")
        told: Json = json.loads(said)
        return told


@dataclass
class Page:
    """One tab."""

    pipe: Pipe
    session: str
    events: list[Json] = field(default_factory=list)

    def ask(self, method: str, **parameters: Any) -> Json:
        return self.pipe.ask(method, self.session, parameters, self.events)

    def open(self, file: Path | str, fragment: str = "") -> None:
        """Load a file, or an address, and wait until it is there."""
        self.events.clear()
        url = file if isinstance(file, str) else file.as_uri()
        self.ask("Page.navigate", url=url + fragment)
        self._wait("Page.loadEventFired")

    def look(
        self, *, width: int, height: int = 800, scheme: str = "light", media: str = ""
    ) -> None:
        """Choose the size of the window, the colour scheme, and screen or print."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", media=media, features=features)

    def run(self, script: str) -> Any:
        """Return the value of an expression, or what its promise brings."""
        told = self.ask(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def follow(self, selector: str) -> None:
        """Click with the mouse into the middle of a link inside the page; wait for its effect."""
        x, y = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self._wait("Page.navigatedWithinDocument")

    def picture(self, *, whole: bool = False) -> bytes:
        """Return what can be seen, or the whole page, as PNG."""
        told = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(told["data"])

    def pdf(self) -> bytes:
        """Print on A4."""
        told = self.ask(
            "Page.printToPDF", paperWidth=8.27, paperHeight=11.69, preferCSSPageSize=True
        )
        return base64.b64decode(told["data"])

    @property
    def complaints(self) -> list[Json]:
        """What a developer would see on the console: errors, warnings, what a policy blocked."""
        kinds = {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}
        return [event["params"] for event in self.events if event.get("method") in kinds]

    @property
    def requests(self) -> list[str]:
        """The addresses that were asked for."""
        return [
            event["params"]["request"]["url"] for event in self._all("Network.requestWillBeSent")
        ]

    def _all(self, method: str) -> list[Json]:
        return [event for event in self.events if event.get("method") == method]

    def _wait(self, method: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not self._all(method):
            self.events.append(self.pipe.next(end))


@contextmanager
def browser() -> Iterator[Pipe]:
    """Start a browser with an empty profile, and end it with all its processes.

    Raises:
        BrowserMissingError: There is none.
    """
    program = find_browser()
    command_end, commands = os.pipe()
    answers, answer_end = os.pipe()
    with (
        tempfile.TemporaryDirectory(prefix="halfmq-browser-", ignore_cleanup_errors=True) as home,
        tempfile.TemporaryFile() as said,
    ):
        profile = f"--user-data-dir={home}"
        launcher = [sys.executable, "-c", _LAUNCHER, str(command_end), str(answer_end)]
        process = subprocess.Popen(
            [*launcher, program, profile, *_OPTIONS],
            pass_fds=(command_end, answer_end),
            stdout=said,
            stderr=said,
            env={**os.environ, "HOME": home},
            start_new_session=True,
        )
        os.close(command_end)
        os.close(answer_end)
        try:
            pipe = Pipe(commands, answers)
            _greet(pipe, program, said)
            yield pipe
        finally:
            os.close(commands)  # it ends when nobody is there to command it
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            os.close(answers)


def _greet(pipe: Pipe, program: str, said: IO[bytes]) -> None:
    """Wait for the browser's first answer; a name may stand for something that only complains."""
    try:
        pipe.ask("Browser.getVersion", None, {}, [])
    except (EOFError, BrokenPipeError) as error:
        said.seek(0)
        reason = f"{program} does not start: {said.read().decode(errors='replace').strip()}"
        assert VARIABLE not in os.environ, reason
        raise BrowserMissingError(reason) from error


@contextmanager
def new_page(pipe: Pipe) -> Iterator[Page]:
    """Open a tab that tells of everything that happens in it."""
    events: list[Json] = []
    target = pipe.ask("Target.createTarget", None, {"url": "about:blank"}, events)["targetId"]
    attach = {"targetId": target, "flatten": True}
    page = Page(pipe, pipe.ask("Target.attachToTarget", None, attach, events)["sessionId"])
    for domain in ("Page", "Runtime", "Log", "Network"):
        page.ask(f"{domain}.enable")
    try:
        yield page
    finally:
        pipe.ask("Target.closeTarget", None, {"targetId": target}, events)
