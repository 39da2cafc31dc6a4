"""A hostile peer takes neither memory nor messages from others."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Final

import pytest

from halfmq.broker.config import BrokerConfig, NetworkConfig, StoreSettings
from halfmq.broker.service import Broker
from halfmq.client.testing import broker_process
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.header_tables import response_header
from halfmq.remoting.headers import EndTransactionRequestHeader, SendMessageResponseHeader
from halfmq.store.format.ids import parse_offset_message_id
from halfmq.store.format.properties import encode_properties
from tests.support.broker_parts import router_of
from tests.support.peers import COMMIT
from tests.support.rocketmq_broker import Wire
from tests.support.seeds import printed_seed
from tests.support.small_disk import small_disk
from tests.support.usual_headers import send_header

from .attacker import frame
from .attacks import ATTACKS
from .extremes import NOT_SENT, SENT
from .rig import run, run_on

MIXED: Final = 3
"""Attacks of a mix, which lasts some ten seconds."""


@pytest.mark.campaign
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_harms_nobody_else(name: str, tmp_path: Path) -> None:
    """Nothing is lost, cut off or kept, and memory stays below its ceiling."""
    result = run(name, ATTACKS[name], tmp_path, Random(printed_seed()))

    print(result)
    assert not result.complaints


def test_a_mix_of_attacks_harms_nobody_else(tmp_path: Path) -> None:
    """What one attack leaves does not help the next."""
    random = Random(printed_seed())
    usual = {name: attack for name, attack in ATTACKS.items() if name != "many names"}
    names = [name for name, one in usual.items() if not one.settings and not one.descriptors]
    chosen = {name: ATTACKS[name] for name in random.sample(names, min(MIXED, len(names)))}
    with broker_process(tmp_path) as broker:
        result = run_on(broker, chosen, random)

    print(result)
    assert not result.complaints


def test_extreme_requests_are_sent_for_every_code_that_is_served(tmp_path: Path) -> None:
    """A new code is among them, or is named with the reason why it is not."""
    network = NetworkConfig(listen_port=0, namesrv_listen_port=0, http_listen_port=-1)
    broker = Broker(BrokerConfig(network=network, store=StoreSettings(root=tmp_path)))

    assert router_of(broker).codes <= {*SENT, *NOT_SENT}


HALVES: Final = 40


def _prepare(wire: Wire, number: int) -> EndTransactionRequestHeader:
    """Prepare a half; return the header that commits it."""
    texts = {"TRAN_MSG": "true", "PGROUP": "pg", "UNIQ_KEY": f"key-{number}"}
    properties = encode_properties(texts).decode()
    header = send_header(topic="decided", sys_flag=4, properties=properties)
    answer = wire.ask(RequestCode.SEND_MESSAGE_V2, header, b"%d" % number)
    assert answer.code == 0, answer.remark
    half = response_header(answer, SendMessageResponseHeader)
    return EndTransactionRequestHeader(
        producer_group="pg",
        tran_state_table_offset=half.queue_offset,
        commit_log_offset=parse_offset_message_id(half.msg_id).physical_offset,
        commit_or_rollback=COMMIT,
        msg_id=half.transaction_id or "",
        transaction_id=half.transaction_id,
    )


@pytest.mark.slow
@pytest.mark.parametrize("body", [1_000, 20_000, 1_000_000])
@pytest.mark.parametrize("size", [96 << 20, 128 << 20])
def test_decisions_pass_on_a_full_disk(tmp_path: Path, size: int, body: int) -> None:
    """Room for them and their queue files is kept back from messages."""
    settings = {"mappedFileSizeCommitLog": 16 << 20}
    with small_disk(tmp_path, "tmpfs", size) as disk, broker_process(disk, **settings) as broker:
        with Wire(broker.address) as wire:
            ends = [_prepare(wire, number) for number in range(HALVES)]
            filler, refused = send_header(topic="filling"), 0
            request = frame(RequestCode.SEND_MESSAGE_V2, filler, bytes(body))
            at_once = max(100_000 // body, 1)
            while refused < 3:
                wire.send(request * at_once)
                sent: list[RemotingCommand] = []
                while len(sent) < at_once:
                    sent += wire.receive()
                refused += sum(answer.code != 0 for answer in sent)
            answers = [wire.ask(RequestCode.END_TRANSACTION, end) for end in ends]
            assert [(one.code, one.remark) for one in answers if one.code] == []
        broker.restart()
        with Wire(broker.address) as wire:
            records = [one for queue_id in range(4) for one in wire.records("decided", queue_id)]
        assert {int(one.body) for one in records} == {*range(HALVES)}
