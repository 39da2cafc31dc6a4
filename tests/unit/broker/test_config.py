"""`broker.conf`: what is accepted, what stops the start, and what it says then."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfmq.broker.config_file import known_settings, load_config
from halfmq.broker.errors import BrokerConfigError
from halfmq.store.config import FlushMode
from tests.support.documents import ROOT


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "broker.conf"
    path.write_text(text, encoding="utf-8")
    return path


def test_without_a_file_every_default_holds() -> None:
    """`broker` alone starts, acknowledges from the disk, and listens on this machine only."""
    config = load_config(None).config

    assert config.store.flush_mode is FlushMode.SYNC_FLUSH
    assert config.network.bind_address == "127.0.0.1"
    assert (config.network.listen_port, config.network.namesrv_listen_port) == (10_911, 9_876)


def test_a_rocketmq_file_is_read(tmp_path: Path) -> None:
    """Comments, blanks around the sign and RocketMQ's spelling have RocketMQ's meaning."""
    text = "# a comment\n\nbrokerName = broker-b\nflushDiskType=ASYNC_FLUSH\n! another\n"

    loaded = load_config(_file(tmp_path, text))

    assert loaded.config.topics.broker_name == "broker-b"
    assert loaded.config.store.flush_mode is FlushMode.ASYNC_FLUSH
    assert not loaded.warnings


def test_set_wins_over_the_file(tmp_path: Path) -> None:
    """An operator changes one value for one run without touching the file."""
    loaded = load_config(_file(tmp_path, "listenPort=1234\n"), ["listenPort=4321"])

    assert loaded.config.network.listen_port == 4321


@pytest.mark.parametrize(
    ("key", "instead"),
    [
        ("diskWarnFreeBytes", "diskMaxUsedSpaceRatio"),
        ("diskSlowDownRatio", "diskSpaceWarningLevelRatio"),
        ("diskSlowDownFreeBytes", "diskSpaceWarningLevelRatio"),
        ("diskRefuseFreeBytes", "diskSpaceWarningLevelRatio"),
        ("diskReserveBytes", "diskSpaceWarningLevelRatio"),
    ],
)
def test_a_setting_of_an_earlier_version_is_a_warning(
    tmp_path: Path, key: str, instead: str
) -> None:
    """It says that the setting is ignored, and which one to use."""
    (warning,) = load_config(_file(tmp_path, f"{key}=80\n")).warnings

    assert f"{key} is a setting of earlier versions; {instead} alone counts; ignored" in warning


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("listenPort=ten", "a whole number from 0 to 65535"),
        ("listenPort=65536", "a whole number from 0 to 65535"),
        ("autoCreateTopicEnable=yes", "true or false"),
        ("flushDiskType=SOMETIMES", "SYNC_FLUSH or ASYNC_FLUSH"),
        ("transactionTimeOut=soon", "milliseconds"),
        ("bindAddress=localhost:1", "an IP address"),
        ("messageDelayLevel=1s never", "times like"),
        ("storePathRootDir=", "the path of one directory"),
        ("deleteWhen=25", "hours of the day"),
        ("brokerName=a b", "a name of 1 to 127"),
        ("brokerName=..", "not with . or @ in front"),
        ("transactionAsyncFlushTopics=a b", "topics separated by ;"),
        ("just a line", "key=value"),
    ],
)
def test_a_wrong_value_says_where_and_what_was_expected(
    tmp_path: Path, line: str, expected: str
) -> None:
    """File, line, key, value and expectation are enough to correct it."""
    path = _file(tmp_path, f"# first line\n{line}\n")

    with pytest.raises(BrokerConfigError) as caught:
        load_config(path)

    message = str(caught.value)
    assert f"{path}:2" in message
    assert line.partition("=")[0] in message
    assert expected in message


def test_a_file_in_utf_8_may_have_a_mark_and_any_bytes_in_comments(tmp_path: Path) -> None:
    """Windows editors write the mark; a comment may be in an encoding of its own."""
    path = tmp_path / "broker.conf"
    path.write_bytes(
        b"\xef\xbb\xbfbrokerName=b\n# M\xfcller \x85 listenPort=2\r\n! \0\xff\nlistenPort=1\n"
    )

    loaded = load_config(path)

    assert (loaded.config.topics.broker_name, loaded.config.network.listen_port) == ("b", 1)
    assert loaded.origins["listenPort"].source == f"{path}:4"
    assert not loaded.warnings


@pytest.mark.parametrize(
    ("content", "line", "expected"),
    [
        ("brokerName=b\n".encode("utf-16"), 1, "UTF-8; the file is UTF-16"),
        ("# b\nbrokerName=b\n".encode("utf-32"), 1, "UTF-8; the file is UTF-32"),
        ("# b\nbrokerName=b\n".encode("utf-16-le"), 2, "NUL bytes are not; UTF-16?"),
        ("# ü\nbrokerName=ü\n".encode("latin-1"), 2, "byte 0xfc is not; ISO-8859-1"),
    ],
)
def test_another_encoding_is_named_with_file_and_line(
    tmp_path: Path, content: bytes, line: int, expected: str
) -> None:
    """Also in the file of TLS properties."""
    conf, tls = tmp_path / "broker.conf", tmp_path / "tls.properties"
    conf.write_bytes(content)
    tls.write_bytes(content)
    for given, file in (((conf, []), conf), ((None, [f"tlsConfigFile={tls}"]), tls)):
        with pytest.raises(BrokerConfigError) as caught:
            load_config(*given)
        assert str(caught.value).startswith(f"{file}:{line}: expected text in UTF-8")
        assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ("listenPort=10911 namesrvListenPort=10909", "--set: namesrvListenPort=10909: expected"),
        ("listenPort=9878", "default: namesrvListenPort=9876: expected another port: 9876 is the "),
        ("namesrvListenPort=10911", "expected another port: 10911 is listenPort"),
        ("listenPort=0 namesrvListenPort=0", None),
        ("brokers=0", "--set: brokers=0: expected a whole number from 1 to 32"),
        ("brokers=33", "--set: brokers=33: expected a whole number from 1 to 32"),
        ("brokers=2 listenPort=0", "--set: listenPort=0: expected a port from which 2 brokers"),
        ("brokers=2 listenPort=65530", "--set: listenPort=65530: expected a port from which 2"),
        ("brokers=2 httpListenPort=65530", "--set: httpListenPort=65530: expected a lower port"),
        ("brokers=2 listenPort=65525 httpListenPort=0", None),
        ("listenPort=10911 namesrvListenPort=0", None),
        ("listenPort=10911 namesrvListenPort=10910", None),
    ],
)
def test_two_listeners_on_one_port_are_named(settings: str, says: str | None) -> None:
    """Not another process has the port, but this broker."""
    if says is None:
        load_config(None, settings.split())
        return
    with pytest.raises(BrokerConfigError) as caught:
        load_config(None, settings.split())
    assert says in str(caught.value)


def test_several_names_are_separated_by_semicolons(tmp_path: Path) -> None:
    """Blanks around them do not count, nor does a semicolon at the end."""
    path = _file(tmp_path, "transactionAsyncFlushTopics=orders; bills;\n")
    loaded = load_config(path)

    assert loaded.config.transaction.unflushed_topics == {"orders", "bills"}
    assert any(
        line.startswith("transactionAsyncFlushTopics=bills;orders default= ")
        for line in loaded.lines()
    )


def test_an_unknown_key_warns_with_the_nearest_known_one(tmp_path: Path) -> None:
    """A typo must not pass silently, and must not keep the broker from starting."""
    loaded = load_config(_file(tmp_path, "transactionTimeout=7000\n"))

    assert "did you mean transactionTimeOut?" in loaded.warnings[0]
    assert loaded.config.transaction.timeout_ms == 6_000


def test_a_setting_that_only_rocketmq_has_is_named_as_such(tmp_path: Path) -> None:
    """A configuration brought along from RocketMQ says what it no longer does."""
    loaded = load_config(_file(tmp_path, "brokerRole=ASYNC_MASTER\n"))

    assert "RocketMQ setting without effect" in loaded.warnings[0]


def test_durations_accept_milliseconds_and_units() -> None:
    """RocketMQ's milliseconds stay valid; a unit is easier to read."""
    plain = load_config(None, ["transactionTimeOut=90000"]).config
    with_unit = load_config(None, ["transactionTimeOut=90s"]).config

    assert plain == with_unit


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A wrong path is a configuration error, not a traceback."""
    with pytest.raises(BrokerConfigError, match=r"missing\.conf"):
        load_config(tmp_path / "missing.conf")


def test_print_config_shows_value_default_and_source(tmp_path: Path) -> None:
    """Where a value comes from is the first question when a broker behaves oddly."""
    path = _file(tmp_path, "listenPort=1234\n")

    lines = list(load_config(path, ["brokerName=b"]).lines())

    assert f"listenPort=1234 default=10911 source={path}:1" in lines
    assert "brokerName=b default=broker-a source=--set" in lines
    assert "defaultTopicQueueNums=8 default=8 source=default" in lines


def test_the_shipped_file_describes_each_setting_as_the_code_does() -> None:
    """What a setting does and which values it takes stand in `config` and nowhere else."""
    described: dict[str, tuple[str, str]] = {}
    comment = ""
    for line in (ROOT / "conf" / "broker.conf").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            comment = f"{comment} {line[3:]}".strip()
        elif "=" in line:
            note, _, expected = comment.partition(" Expected: ")
            described[line.lstrip("#").partition("=")[0]] = note, expected.partition(". Default")[0]
            comment = ""
        else:
            comment = ""

    for key, (_, item) in known_settings().items():
        note, expected = described[key]
        assert note.partition(" Default: ")[0] == item.note
        assert not expected or expected.startswith(item.kind.expected), key


def test_the_shipped_file_lists_every_key_with_its_default() -> None:
    """`conf/broker.conf` is the reference: complete, and equal to running without it."""
    path = ROOT / "conf" / "broker.conf"
    text = path.read_text(encoding="utf-8")

    loaded = load_config(path)

    assert loaded.config == load_config(None).config
    for line in loaded.lines():
        key = line.partition("=")[0]
        assert any(entry.lstrip("#").startswith(f"{key}=") for entry in text.splitlines()), (
            f"{key} is not listed"
        )
