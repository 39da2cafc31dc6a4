"""docs/deployment.md, Containerfile and the systemd unit, as far as they run anywhere."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import yaml

from halfmq.client import Decision, Message
from halfmq.client.blocking import Admin, Consumer, Producer, TransactionProducer
from halfmq.client.testing import broker_process
from tests.support.patience import PATIENCE_S

ROOT: Final = Path(__file__).parents[2]
CONTAINERFILE: Final = (ROOT / "Containerfile").read_text(encoding="utf-8")
UNIT: Final = ROOT / "conf" / "systemd" / "halfmq.service"
STORE: Final = "/var/lib/halfmq/store"


def _instruction(name: str) -> str:
    """Return the arguments of the last such line of the Containerfile."""
    found: list[str] = re.findall(rf"^{name} (.*)$", CONTAINERFILE, re.MULTILINE)
    return found[-1]


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that other users can reach, unlike those of pytest."""
    path = Path(tempfile.mkdtemp(dir="/var/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("setpriv") is None,
    reason="only root can take root's rights away; the image's entry point is NOT tested",
)
def test_the_entry_point_runs_as_a_user_on_a_read_only_root(place: Path) -> None:
    """Only the volume is writable; the health check agrees, and SIGTERM stops it in order."""
    user, data = _instruction("USER"), place / "data"
    data.mkdir()
    assert " HOME=/data " in _instruction("ENV")
    entry = json.loads(_instruction("ENTRYPOINT"))
    assert entry[0] == "broker"
    as_user = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    reached = subprocess.run(
        [*as_user, sys.executable, "-c", "import halfmq.broker"], capture_output=True, check=False
    )
    if reached.returncode:
        pytest.skip(f"user {user} may not read this environment: {sys.executable}")
    words = [sys.executable, "-m", "halfmq.broker", *entry[1:]]
    ports = [f"--set={key}=0" for key in ("listenPort", "namesrvListenPort", "httpListenPort")]
    command = shlex.join([*words, *ports]).replace("=/data", f"={data}")
    script = (
        f"mount -t tmpfs -o uid={user} tmpfs {data} && mount -o remount,bind,ro / && "
        f"exec setpriv --reuid={user} --regid={user} --clear-groups --bounding-set=-all {command}"
    )
    with subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PATH": os.environ["PATH"], "HOME": "/data"},
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("ready"), process.communicate(timeout=PATIENCE_S)[1]
            ready = dict(field.partition("=")[::2] for field in line.split()[1:])
            assert f"Uid:\t{user}" in Path(f"/proc/{process.pid}/status").read_text()
            check = json.loads(_instruction("HEALTHCHECK").partition(" CMD ")[2])
            port = ready["http"].rpartition(":")[2]
            check = [word.replace(":9877/", f":{port}/") for word in check]
            subprocess.run([sys.executable, *check[1:]], check=True, timeout=PATIENCE_S)
        finally:
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, log


def test_the_image_has_what_the_package_needs() -> None:
    """What is not named is not copied into it."""
    kept = {
        line[1:]
        for line in (ROOT / ".containerignore").read_text().splitlines()
        if line.startswith("!")
    }
    project = (ROOT / "pyproject.toml").read_text()
    packages = re.findall(r'^"halfmq\.\w+" = "(\w+)"', project, re.MULTILINE)

    assert kept == {*packages, "LICENSE", "README.md", "pyproject.toml"}


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="no systemd: its unit is NOT verified"
)
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """With the broker of this environment; its rating of exposure is near 0, the best of 100."""
    unit = tmp_path / UNIT.name
    text = UNIT.read_text(encoding="utf-8")
    assert "ExecStart=/opt/halfmq/bin/broker --conf" in text
    broker = shutil.which("broker", path=str(Path(sys.executable).parent))
    unit.write_text(text.replace("/opt/halfmq/bin/broker", f"{broker}"))
    for words in (["verify"], ["security", "--offline=true", "--threshold=20"]):
        done = subprocess.run(
            ["systemd-analyze", *words, unit], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stdout


def _blocks(title: str, language: str = "bash") -> list[str]:
    document = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    section = document.split(f"## {title}\n")[1].split("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


def test_kubernetes_accepts_the_manifests() -> None:
    """By its own schemas, which refuse keys that they do not know; ports are the image's."""
    validator = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is missing: manifests are NOT validated"
    )
    (text,) = _blocks("Kubernetes", "yaml")
    service, broker = manifests = list(yaml.safe_load_all(text))
    for one in manifests:
        validator.validate(one, validator.latest_version(), strict=True)
    pod = broker["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    ports = {port["containerPort"] for port in container["ports"]}

    assert {port["port"] for port in service["spec"]["ports"]} == ports
    assert ports <= {int(port) for port in _instruction("EXPOSE").split()}
    assert str(pod["securityContext"]["fsGroup"]) == _instruction("USER")
    with pytest.raises(validator.ValidationError):
        validator.validate({**broker, "replica": 2}, validator.latest_version(), strict=True)


def test_a_backup_is_made_and_restored_as_written(tmp_path: Path) -> None:
    """From a running broker; messages, offsets and undecided transactions are there again."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "halfmq").write_text(f'#!/bin/sh\nexec {sys.executable} -m halfmq "$@"\n')
    (commands / "halfmq").chmod(0o755)
    (tmp_path / "backup").mkdir()
    copy, restore = _blocks("Backup and restore")
    restore, start = restore.rsplit("\n", 2)[:2]
    assert start == f"broker --set storePathRootDir={STORE}"

    def shell(text: str, root: str) -> str:
        text = text.replace(STORE, root).replace("/backup/", f"{tmp_path}/backup/")
        path = f"{commands}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE_S,
        ).stdout

    with broker_process(tmp_path / "b", mappedFileSizeCommitLog=1 << 20) as broker:
        with Producer("p", namesrv=broker.address) as producer:
            for number in range(5):
                producer.send(Message("orders", b"%d" % number))
        with Consumer("mail", {"orders": "*"}, namesrv=broker.address) as consumer:
            message = consumer.receive(PATIENCE_S)
            assert message is not None
            first = message.body
            message.ack()
        with TransactionProducer(
            "pay", lambda _half: Decision.UNKNOWN, namesrv=broker.address
        ) as transactions:
            with transactions.transaction(Message("orders", b"undecided")) as one:
                one.decide(Decision.UNKNOWN)
            half = one.id
        broker.restart()  # offsets are on disk after five seconds, or a stop
        assert "sound" in shell(copy, broker.ready["store"])
        with Producer("p", namesrv=broker.address) as producer:
            producer.send(Message("orders", b"after the copy"))
        broker.stop()
        shell(restore, broker.ready["store"])
        broker.start()
        with Admin(namesrv=broker.address) as admin:
            assert sum(one.end for one in admin.queues("orders")) == 5
            found = admin.transaction(half)
            assert found is not None
            assert found.state == "prepared"
        with Consumer("mail", {"orders": "*"}, namesrv=broker.address) as consumer:
            left = {b"%d" % number for number in range(5)} - {first}
            while left:
                message = consumer.receive(PATIENCE_S)
                assert message is not None
                assert message.body != first
                left.discard(message.body)
                message.ack()
