"""The brokers of one command (`brokers=N`): what each is called, where it stores, where it listens.

All have the settings of the command, but for names, directories and ports. They register with each
other, so that each answers with the routes of all, and share the name-server port.
"""

import ipaddress
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from halfmq.store.files.json_table import read_table, save_table
from halfmq.store.format.digest import DIRECTORY as DIGESTS
from halfmq.store.queue.deleted_topics import DELETED_KEY

from .config import PORT_STEP, BrokerConfig
from .config_file import LoadedConfig
from .errors import BrokerConfigError
from .http.endpoint import DEFAULT_PORT
from .store_service import make_tables_directory

_TRACES: Final = ("commitlog", "checkpoint", "lock")
"""Names of which at least one is in every store."""

_USERS: Final = "halfmqAccess.json"
_TABLES: Final = (
    *("topics.json", "subscriptionGroup.json", "messageRequestMode.json", "kvConfig.json"),
    _USERS,
)
"""What operators have created on all brokers."""


def member_names(config: BrokerConfig) -> list[str]:
    """Return the names of all brokers of a command."""
    return [f"{config.topics.broker_name}-{number}" for number in range(config.network.brokers)]


def as_member(loaded: LoadedConfig, number: int) -> LoadedConfig:
    """Return the configuration of one of several brokers; changes go to the file of all."""
    return replace(loaded, config=member_config(loaded.config, number))


def member_config(config: BrokerConfig, number: int) -> BrokerConfig:
    """Return the settings of one of several brokers."""
    network, store, names = config.network, config.store, member_names(config)
    above, bound = number * PORT_STEP, ipaddress.ip_address(network.bind_address)
    reached = f"{bound}"
    if bound.is_unspecified:
        reached = "127.0.0.1" if bound.version == 4 else "::1"
    host = f"[{reached}]" if ":" in reached else reached
    siblings = [
        f"{host}:{network.listen_port + other * PORT_STEP}"
        for other in range(network.brokers)
        if other != number
    ]
    replication, ha_port = config.replication, config.replication.ha_listen_port
    http = DEFAULT_PORT if network.http_listen_port is None else network.http_listen_port
    return replace(
        config,
        network=replace(
            network,
            listen_port=network.listen_port + above,
            namesrv_listen_port=0,
            http_listen_port=http + above if http > 0 else http,
            console_enabled=network.console_enabled and number == 0,
            namesrv_addr=";".join([*siblings, *filter(None, [network.namesrv_addr])]),
            registration_addresses=_with_address(network.registration_addresses, reached),
        ),
        topics=replace(config.topics, broker_name=names[number]),
        replication=replace(replication, ha_listen_port=ha_port and ha_port + above),
        store=replace(
            store,
            root=store.root / names[number],
            archive_url=store.archive_url and f"{store.archive_url}/{names[number]}",
            commit_log_path=store.commit_log_path and store.commit_log_path / names[number],
        ),
    )


def _with_address(pattern: str, address: str) -> str:
    return pattern if pattern == "*" else ",".join(filter(None, [pattern, address]))


def check_members(config: BrokerConfig) -> None:
    """Check what concerns several brokers, and that no store of `storePathRootDir` is left out.

    Messages in a store that no broker serves would be invisible.

    Raises:
        BrokerConfigError: A setting is missing, or a store would not be served.
    """
    network, access, root = config.network, config.access, config.store.root
    has_access_control = access.acl_enabled or access.authentication_enabled
    if network.brokers > 1 and has_access_control and access.inner_credentials is None:
        raise BrokerConfigError(
            f"brokers={network.brokers}",
            "innerClientAuthenticationCredentials",
            "",
            "credentials with which the brokers register with each other",
        )
    if network.brokers > 1 and _is_store(root):
        moved = root / member_names(config)[0]
        raise _left_out(config, [root], f"brokers=1, or its contents moved to {moved}")
    served = member_names(config) if network.brokers > 1 else []
    own = (*served, DIGESTS)  # a broker's digests lie in folders as its store does
    others = [path for path in sorted(root.glob("*/")) if path.name not in own]
    if left := [path for path in others if _is_store(path)]:
        raise _left_out(config, left, "as many brokers and the brokerName of before, or move it")


def _left_out(config: BrokerConfig, left: list[Path], remedy: str) -> BrokerConfigError:
    stores = ", ".join(map(str, left))
    return BrokerConfigError(
        f"{stores} has messages that no broker would serve",
        "brokers",
        str(config.network.brokers),
        remedy,
    )


def _is_store(root: Path) -> bool:
    try:
        return any((root / name).exists() for name in _TRACES)
    except PermissionError:
        return False  # the start of the store reports it


def prepare_new_members(config: BrokerConfig) -> None:
    """Give brokers without a store the topics, groups and users that the others have.

    Raises:
        StoreError: A table cannot be read or written.
    """
    make_tables_directory(config.store.root / "config")  # for changed settings
    roots = [member_config(config, number).store.root for number in range(config.network.brokers)]
    known = [root for root in roots if _is_store(root)]
    for root in roots if known else ():
        if root in known:
            continue
        make_tables_directory(root / "config")
        for name, content in _tables_of(known[0]):
            save_table(root / "config" / name, content, private=name == _USERS)


def _tables_of(root: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield what another broker has, without what concerns its own log."""
    for name in _TABLES:
        content = read_table(root / "config" / name).content
        content.pop(DELETED_KEY, None)
        content.get("topicConfigTable", {}).pop(root.name, None)
        if content:
            yield name, content
