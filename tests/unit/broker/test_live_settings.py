"""Settings are shown, and changed while the broker runs."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from halfmq.broker.config import BrokerConfig
from halfmq.broker.config_file import LoadedConfig, known_settings, load_config, with_value
from halfmq.broker.errors import BrokerConfigError, RequestRefusedError
from halfmq.broker.handlers.admin.broker_config import SETTINGS_BYTES_MAX
from halfmq.broker.live_settings import LiveSettings
from halfmq.broker.logs import LogLevel
from halfmq.broker.service import Broker
from halfmq.remoting.codes import RequestCode, ResponseCode
from tests.support.broker_parts import tables_of
from tests.support.peers import Peer
from tests.support.race_windows import Rig, windowed

FILE: Final = """# our broker
fileReservedTime=48

  deleteWhen = 03
#deleteWhen=05
someUnknownKey=kept
initAuthenticationUser={"username":"root","password":"geheim"}
"""
PEER: Final = "127.0.0.1:50001"
OPERATIONS: Final = Path(__file__).parents[3] / "docs" / "operations.md"


def settings_of(
    loaded: LoadedConfig, apply: Callable[[BrokerConfig], None] = lambda _: None
) -> LiveSettings:
    return LiveSettings(loaded, apply, now_ms=lambda: 7, disk_used=lambda: 60)


class Front:
    """Live settings of a file, and what was applied."""

    def __init__(self, directory: Path, content: str = FILE, *overrides: str) -> None:
        self.file = directory / "broker.conf"
        self.file.write_text(content)
        self.applied: list[BrokerConfig] = []
        loaded = load_config(self.file, overrides)
        self.settings = settings_of(loaded, self.applied.append)

    async def refused(self, **wanted: str) -> RequestRefusedError:
        """Try a change; nothing of it happens."""
        before = self.file.read_bytes()
        with pytest.raises(RequestRefusedError) as caught:
            await self.settings.change(wanted, PEER)
        assert self.file.read_bytes() == before
        assert not self.applied
        return caught.value


async def test_a_change_is_kept_in_the_file_and_takes_effect(tmp_path: Path) -> None:
    """Only the lines of the settings change; what is not there is added."""
    front = Front(tmp_path)
    front.file.chmod(0o600)
    await front.settings.change({"deleteWhen": "02;14", "transactionCheckMax": "3"}, PEER)

    assert front.file.read_text() == (
        FILE.replace("  deleteWhen = 03", "deleteWhen=02;14") + "transactionCheckMax=3\n"
    )
    assert front.file.stat().st_mode & 0o777 == 0o600
    assert not front.file.with_name("broker.conf.tmp").exists()
    (config,) = front.applied
    assert (config.store.delete_when, config.transaction.check_max) == ("02;14", 3)
    assert config.store.file_reserved_hours == 48
    assert load_config(front.file).config == config
    lines = front.settings.text().splitlines()
    assert "deleteWhen=02;14" in lines
    assert front.settings.data_version["counter"] == 1


async def test_the_last_line_of_a_key_is_replaced_and_line_ends_stay(tmp_path: Path) -> None:
    """The last of two lines of a key counts; a file may come from Windows."""
    front = Front(tmp_path, "deleteWhen=01\r\ndeleteWhen=02\r\nfileReservedTime=1")
    await front.settings.change({"deleteWhen": "03", "transactionCheckMax": "3"}, PEER)

    assert front.file.read_bytes() == (
        b"deleteWhen=01\r\ndeleteWhen=03\r\nfileReservedTime=1\ntransactionCheckMax=3\n"
    )


async def test_a_symbolic_link_to_the_file_stays(tmp_path: Path) -> None:
    """Configurations are often linked into place."""
    front = Front(tmp_path)
    link = tmp_path / "link.conf"
    link.symlink_to(front.file)
    linked = settings_of(load_config(link), front.applied.append)
    await linked.change({"fileReservedTime": "96"}, PEER)

    assert link.is_symlink()
    assert "fileReservedTime=96\n" in front.file.read_text()


async def test_a_change_is_logged_with_old_and_new_value(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log shows what was changed."""
    caplog.set_level("INFO")
    front = Front(tmp_path)
    await front.settings.change({"fileReservedTime": "24"}, PEER)

    line = f"key=fileReservedTime old=48 new=24 peer={PEER} file={front.file}"
    assert line in caplog.text


@pytest.mark.parametrize(
    ("key", "now", "refused", "accepted"),
    [
        ("fileReservedTime", "48", ["0", "23"], ["24", "72"]),
        ("fileReservedTime", "2", ["1"], ["2", "3"]),
        ("diskMaxUsedSpaceRatio", "75", ["10", "60"], ["61", "100"]),
        ("diskSpaceWarningLevelRatio", "50", ["10", "49"], ["51", "55", "100"]),
        ("transactionPendingMax", "100000", ["1", "999"], ["1000"]),
        ("transactionPendingMaxPerGroup", "0", ["1", "9"], ["10", "0"]),
        ("transactionPendingMaxPerGroup", "20", ["9"], ["10", "0"]),
        ("rejectTransactionMessage", "false", ["true"], ["false"]),
    ],
)
async def test_no_live_value_deletes_or_refuses_at_once(
    tmp_path: Path, key: str, now: str, refused: list[str], accepted: list[str]
) -> None:
    """The file and a restart can have it; 60 % of the disk are in use."""
    front = Front(tmp_path, f"{key}={now}\n")
    for value in refused:
        refusal = await front.refused(**{key: value})
        assert (refusal.code, key in refusal.remark) == (ResponseCode.NO_PERMISSION, True)
    for value in accepted:
        front = Front(tmp_path, f"{key}={now}\n")
        await front.settings.change({key: value}, PEER)


@pytest.mark.parametrize(
    ("key", "value", "code", "remark"),
    [
        ("listenPort", "1", ResponseCode.NO_PERMISSION, "listenPort takes effect at a start only"),
        ("initAuthenticationUser", "x", ResponseCode.NO_PERMISSION, "at a start only"),
        ("brokerRole", "SLAVE", ResponseCode.INVALID_PARAMETER, "without effect here"),
        ("deleteWen", "04", ResponseCode.INVALID_PARAMETER, "did you mean deleteWhen?"),
        ("deleteWhen", "24", ResponseCode.INVALID_PARAMETER, "deleteWhen=24: expected hours"),
    ],
)
async def test_a_setting_that_cannot_be_changed_is_refused_by_name(
    tmp_path: Path, key: str, value: str, code: ResponseCode, remark: str
) -> None:
    """Nothing else of the request is changed."""
    front = Front(tmp_path)
    refusal = await front.refused(**{"fileReservedTime": "50", key: value})

    assert refusal.code == code
    assert remark in refusal.remark


async def test_a_change_that_would_not_survive_a_restart_is_refused(tmp_path: Path) -> None:
    """A setting of --set, and one whose file cannot be written."""
    front = Front(tmp_path, FILE, "fileReservedTime=9")
    assert "--set gives it" in (await front.refused(fileReservedTime="50")).remark

    front.file.unlink()
    with pytest.raises(RequestRefusedError, match="cannot be written"):
        await front.settings.change({"deleteWhen": "01"}, PEER)
    assert not front.applied


async def test_without_a_file_changes_are_kept_in_the_store(tmp_path: Path) -> None:
    """They hold at the next start, below the file of --conf and --set, and show where they are."""
    store = f"storePathRootDir={tmp_path}"
    (tmp_path / "config").mkdir()
    for value in ("24", "48"):
        settings = settings_of(load_config(None, [store]))
        await settings.change({"fileReservedTime": value, "deleteWhen": "05"}, PEER)
    kept = tmp_path / "config" / "halfmqSettings.conf"
    conf = tmp_path / "broker.conf"
    conf.write_text(f"{store}\nfileReservedTime=12\n")

    lines = list(load_config(None, [store]).lines())
    assert f"fileReservedTime=48 default=72 source={kept}:1" in lines
    assert f"deleteWhen=05 default=04 source={kept}:2" in lines
    lines = list(load_config(conf, ["deleteWhen=06"]).lines())
    assert f"fileReservedTime=12 default=72 source={conf}:2" in lines
    assert "deleteWhen=06 default=04 source=--set" in lines

    kept.write_text("listenPort=1\n")
    with pytest.raises(BrokerConfigError, match="only settings that can be changed live"):
        load_config(conf)


async def test_a_change_keeps_every_other_byte_of_the_file(tmp_path: Path) -> None:
    """Comments may hold any bytes, and a byte-order mark is no part of a key."""
    front = Front(tmp_path)
    front.file.write_bytes(
        b"\xef\xbb\xbfdeleteWhen=01\n# M\xfcll \x85 \xe2\x80\xa8 fileReservedTime=2\n"
    )
    await front.settings.change({"deleteWhen": "03", "fileReservedTime": "90"}, PEER)

    assert front.file.read_bytes() == (
        b"deleteWhen=03\n# M\xfcll \x85 \xe2\x80\xa8 fileReservedTime=2\nfileReservedTime=90\n"
    )


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    """Neither by 26 nor in the objects' text."""
    front = Front(tmp_path)
    assert "geheim" not in front.settings.text()
    assert "initAuthenticationUser=***\n" in front.settings.text()
    keys = {line.partition("=")[0] for line in front.settings.text().splitlines()}
    assert keys >= known_settings().keys() | {"brokerId", "brokerRole", "useTLS"}


def test_the_document_lists_what_is_live() -> None:
    """An operator reads which settings need no restart."""
    (listed,) = re.findall(r"take effect at once:((?:.|\n)*?)\n\n", OPERATIONS.read_text())
    live = {key for key, (_, item) in known_settings().items() if item.is_live}
    assert set(re.findall(r"`(\w+)`", listed)) == live


def _changed(value: Any) -> str:
    if isinstance(value, bool):
        return str(not value).lower()
    if isinstance(value, LogLevel):
        return LogLevel.ERROR
    return "05" if isinstance(value, str) else str(value + 1)


@pytest.fixture
def _level() -> Iterator[None]:
    before = logging.getLogger("halfmq").level
    yield
    logging.getLogger("halfmq").setLevel(before)


@pytest.mark.usefixtures("_level")
def test_every_live_setting_reaches_the_part_that_uses_it(tmp_path: Path) -> None:
    """Each change is visible in a part of the broker."""
    for key, (_, item) in known_settings().items():
        if not item.is_live:
            continue
        front = Front(tmp_path, f"storePathRootDir={tmp_path}\nlistenPort=0\nnamesrvListenPort=0\n")
        loaded = load_config(front.file)
        before, after = _held(Broker(loaded)), _held(broker := Broker(loaded))
        assert before == after
        broker.configure(with_value(loaded.config, key, _changed(item.default)))
        assert _held(broker) != after, key


def _held(broker: Broker) -> list[Any]:
    """Return the settings of the parts; private, because parts only act on them."""
    tables = tables_of(broker)
    prepares, checker = broker.transactions.prepares, broker.transactions._checker
    retention = broker._retention
    return [
        (tables.topics._auto_create, tables.topics.default_queue_nums),
        tables.groups.auto_create,
        tables.registry.refuse_unequal,
        broker._handlers.group_offsets.in_broker,
        (retention._reserved_ms, retention._hours),
        broker._disk_limits._config,
        (prepares._config, prepares.pending_max),
        (checker._config, checker._timeout_ms),
        logging.getLogger("halfmq").level,
    ]


async def ask(peer: Peer, code: RequestCode, body: bytes = b"") -> tuple[int, str, str]:
    answer = await peer.call(code, None, body)
    return answer.code, answer.body.decode(), answer.remark or ""


@windowed()
async def test_requests_show_and_change_settings(rig: Rig) -> None:
    """Of the broker, and of the name server, which is the same process."""
    peer = await rig.peer()
    for code in (RequestCode.GET_BROKER_CONFIG, RequestCode.GET_NAMESRV_CONFIG):
        assert "fileReservedTime=72\n" in (await ask(peer, code))[1]
    for code in (RequestCode.UPDATE_BROKER_CONFIG, RequestCode.UPDATE_NAMESRV_CONFIG):
        assert (await ask(peer, code, b"fileReservedTime=96\n"))[0] == ResponseCode.SUCCESS
        assert "fileReservedTime=96\n" in (await ask(peer, RequestCode.GET_BROKER_CONFIG))[1]
        answered, _, remark = await ask(peer, code, b"listenPort=1\n")
        assert answered == ResponseCode.NO_PERMISSION
        assert "at a start only" in remark
        answered, _, remark = await ask(peer, code, b"nonsense")
        assert answered == ResponseCode.INVALID_PARAMETER
        assert "a line of the form key=value" in remark
        answered, _, _ = await ask(peer, code, b"#" * (SETTINGS_BYTES_MAX + 1))
        assert answered == ResponseCode.INVALID_PARAMETER
        assert (await ask(peer, code, b""))[0] == ResponseCode.SUCCESS


@windowed()
async def test_topics_are_created_as_soon_as_that_is_enabled(rig: Rig) -> None:
    """With the template topic for clients, which a start without the setting does not create."""
    peer, config = await rig.peer(), rig.broker.config
    rig.broker.configure(with_value(config, "autoCreateTopicEnable", "false"))
    assert (await peer.plain("K", topic="new")).code == ResponseCode.TOPIC_NOT_EXIST
    await rig.restart()
    del rig.tables.topics._topics["TBW102"]  # as after a start with the setting from the beginning
    rig.broker.configure(with_value(config, "autoCreateTopicEnable", "true"))
    peer = await rig.peer()

    assert rig.tables.topics.offered("TBW102") is not None
    assert (await peer.plain("K", topic="new")).code == ResponseCode.SUCCESS
