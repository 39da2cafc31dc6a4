"""The audit reads an archive in place, and says what it says of the files in the store."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from halfmq.client import Decision, Message
from halfmq.client.blocking import TransactionProducer
from halfmq.client.testing import broker_process
from halfmq.spark_jobs.__main__ import main
from tests.support.archives import BUCKET, S3_ENVIRONMENT, content_of_archive, s3_server
from tests.support.patience import wait_until

LOG_FILE = 1 << 16
FILES = 4


def _produce(address: str, is_enough: Callable[[], bool]) -> None:
    """Commit, roll back and leave open, in turn."""
    with TransactionProducer("g", lambda _half: Decision.UNKNOWN, namesrv=address) as producer:
        number = 0
        while not is_enough():
            with producer.transaction(Message("a|b%c", bytes(1000))) as transaction:
                transaction.decide(list(Decision)[number % 3])
            number += 1


def _audit(directory: str, summary: Path) -> dict[str, object]:
    assert main(["audit", directory, "--json", str(summary)]) == 0
    found: dict[str, object] = json.loads(summary.read_text())
    return {key: found[key] for key in ("log", "transactions", "anomalies", "delays")}


@pytest.mark.filterwarnings("default")  # PySpark's own
def test_the_audit_of_an_archive_is_that_of_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In S3, with the queue files that are full by then."""
    for name, value in S3_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    sizes = {"mappedFileSizeCommitLog": LOG_FILE, "mappedFileSizeConsumeQueue": 80}
    with s3_server() as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT", endpoint)
        url = f"s3://{BUCKET}/archive"
        last = f"commitlog/{(FILES - 1) * LOG_FILE:020d}"
        with broker_process(tmp_path, archiveUrl=url, transactionTimeOut="1h", **sizes) as broker:
            ahead = f"{(FILES + 1) * LOG_FILE:020d}"  # it may have been made before it is used
            _produce(broker.address, (tmp_path / "store" / "commitlog" / ahead).exists)
            wait_until(lambda: last in content_of_archive(url), "it is not archived")
        archive = content_of_archive(url)
        copy = shutil.copytree(tmp_path / "store", tmp_path / "copy")
        for path in (copy / "commitlog").iterdir():
            if f"commitlog/{path.name}" not in archive:
                path.unlink()
        (copy / "abort").touch()  # entries of what is not there are left
        host = endpoint.removeprefix("http://")
        query = f"scheme=http&endpoint_override={host}"
        of_archive = _audit(f"{url}?{query}", tmp_path / "archive.json")

        assert any(name.startswith("consumequeue/a|b%c/") for name in archive)
        assert of_archive == _audit(str(copy), tmp_path / "copy.json")
        assert of_archive["anomalies"] == []
