"""The table of attacks on memory. The package's docstring says how to add a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from halfmq.remoting.bodies import (
    ConsumerData,
    HeartbeatData,
    ProducerData,
    encode_heartbeat,
)
from halfmq.remoting.codes import RequestCode

from .attacker import Attack, Attacker


def new_groups(attacker: Attacker) -> None:
    """Name five hundred new groups in one heartbeat."""
    data = HeartbeatData(
        client_id="c",
        producer_data_set=(ProducerData(group_name="pg"),),
        consumer_data_set=tuple(ConsumerData(group_name=f"new-{number}") for number in range(500)),
    )
    attacker.ask(RequestCode.HEART_BEAT, body=encode_heartbeat(data))


ATTACKS: Final[Mapping[str, Attack]] = {
    "new groups": Attack(new_groups),
}
