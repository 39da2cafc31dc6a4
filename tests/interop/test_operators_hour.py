"""An operator's hour: the usual tasks with mqadmin 5.3.3, at RocketMQ 5.3.3 and at halfmq."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from halfmq.store.format.ids import offset_message_id, pack_host
from tests.support.two_brokers import Difference, Measured, Operator, at_both, compare

pytestmark = pytest.mark.campaign

DIFFERENCES: Final = (
    Difference(
        "",
        "",
        r"It does not exist; the first (message|consumer) .* creates it\.",
        "what was not found has its cause in a line of its own",
    ),
    Difference(
        "topicList",
        r"(DefaultCluster )?(rmq_sys_REVIVE_LOG_DefaultCluster|rmq_sys_wheel_timer)",
        "",
        "there is no pop and no timer wheel, which have topics of their own",
    ),
    Difference(
        "wipeWritePerm, addWritePerm",
        ".* OK, 18",
        ".* OK, 1[56]",
        "these topics are not counted, nor is the retry topic of the tool's own group, unless a "
        "tool lives for the second after which it sends its first heartbeat",
    ),
    Difference(
        "brokerStatus",
        r"\w+ThreadPoolQueueCapacity ?: \d+",
        r"\w+ThreadPoolQueueCapacity ?: 0",
        "there are no thread pools: one event loop serves all requests",
    ),
    Difference("brokerStatus", "", r"halfmq\..*", "halfmq's own metrics"),
    Difference(
        "brokerStatus", "", "getTransferedTps N", "the spelling that tools of 4.9 ask for, too"
    ),
    Difference(
        "brokerStatus",
        r"putLatency\d+ ?:.*|putMessageFailedTimes ?:.*",
        "",
        "latencies and failures of appends are not measured",
    ),
    Difference(
        "getBrokerConfig",
        r"(?!fileReservedTime )\w+ =.*",
        r"(?!fileReservedTime )\w+ =.*",
        "each has settings of its own",
    ),
    Difference(
        "updateBrokerConfig -b {address} -k unknownKey",
        "update broker config success, ADDRESS",
        "(.*SubCommandException|Caused by|For more information).*",
        "a key that halfmq does not have is refused; RocketMQ says success and ignores it",
    ),
)

MEASURED: Final = (
    Measured("clusterList", r"\d+\.\d\d(?=[ (])|0\.\d{4}|\d+-\d+(?=\(0)"),
    Measured("checkMsgSendRT", r"\d+(\.\d+)?$"),
    Measured("sendMsgStatus", r"rt=\d+ms"),
    Measured("sendMessage", r"^broker-a \d "),
    Measured("statsAll", r"\d+\.\d\d \d+"),
    Measured("consumerProgress", r"Consume TPS: .*"),
    Measured("brokerStatus", r"(?<=Tps) ?:.*", " N"),
    Measured(
        "brokerStatus", r"^((?:put|get)Message(?:Distribute|Entire)Time(?:Max)?|runtime) ?: .*"
    ),
    Measured("brokerStatus", r"^(\w+Ratio(_\S+)?|commitLogDirCapacity|timerReadBehind) ?: .*"),
    Measured("producer -b", r".*\(CLIENT_INNER_PRODUCER\).*", ""),
    Measured("topicList", r"(DefaultCluster )?%RETRY%TOOLS_CONSUMER.*", ""),
    Measured("consumerProgress", r"TOOLS_CONSUMER.*", ""),
    # A consumer tells the offset of a queue after 5 s, that of its retry topic perhaps later.
    Measured("consumerProgress", r"%RETRY%java.*", ""),
)
"""Groups of clients themselves are there if a heartbeat was in time."""


def hour(operator: Operator) -> None:
    """Do it all, at one broker."""
    ask = operator.ask
    ask("clusterList", until="broker-a")
    ask("clusterList -m")
    _topics_and_groups(operator)
    _messages(operator)
    _consumers(operator)
    _offsets(operator)
    _permissions(operator)
    _settings(operator)
    _removal(operator)


def _topics_and_groups(operator: Operator) -> None:
    ask = operator.ask
    ask("updateTopic -b {address} -t orders -r 2 -w 2")
    ask("updateTopic -c DefaultCluster -t bills -r 1 -w 1 -a +message.type=FIFO")
    ask("updateTopic -b {address} -t TBW102")
    ask("updateTopic -b {address} -t sp@ce")
    ask("updateSubGroup -b {address} -g readers -r 5 -q 2")
    ask("updateSubGroup -c DefaultCluster -g others")
    ask("topicList")
    ask("topicList -c")
    ask("topicRoute -t orders")
    ask("topicRoute -t orders -l")
    ask("topicRoute -t unknown")
    ask("topicClusterList -t orders")
    ask("getConsumerConfig -g readers")
    ask("getConsumerConfig -g unknown")
    ask("topicStatus -t orders")
    ask("topicStatus -t unknown")
    ask("allocateMQ -t orders -i 10.0.0.1,10.0.0.2")


def _messages(operator: Operator) -> None:
    ask = operator.ask
    for queue in "01":
        sent = ask(f"sendMessage -t orders -k key{queue} -c tag -b broker-a -i {queue} -p hello")
    unique = sent[-1].split()[-1]
    found = ask("queryMsgByUniqueKey -t orders -i {id}", id=unique)
    at = next(line.split()[-1] for line in found if line.startswith("CommitLog Offset:"))
    ask("queryMsgById -t orders -i {id}", id=_offset_id(operator.place.address, int(at)))
    ask("queryMsgById -t orders -i {id}", id="7F000001" + "0" * 24)
    ask("queryMsgByKey -t orders -k key0")
    ask("queryMsgByKey -t orders -k unknown")
    ask("queryMsgByUniqueKey -t orders -i {id}", id="0" * 32)
    ask("queryMsgByOffset -t orders -b broker-a -i 0 -o 0")
    ask("queryMsgByOffset -t orders -b broker-a -i 0 -o 9")
    ask("printMsg -t orders -d true")
    ask("printMsgByQueue -t orders -a broker-a -i 0 -p true -d true")
    ask("queryCq -b {address} -t orders -q 0 -i 0 -c 1")
    ask("queryCq -t orders -q 0 -i 0 -c 1 -g nobody")
    ask("consumeMessage -t orders -c 2")
    ask("consumeMessage -t orders -b broker-a -i 0 -o 0 -c 1")
    ask("sendMessage -t unmade -p hello")
    ask("sendMsgStatus -b broker-a -s 10 -c 1")
    ask("checkMsgSendRT -t orders -a 2 -s 10")
    ask("topicStatus -t orders")
    ask("brokerStatus -b {address}", until="putMessageTimesTotal *: 7")
    ask("statsAll -t orders")


def _offset_id(address: str, physical_offset: int) -> str:
    host, _, port = address.rpartition(":")
    return offset_message_id(pack_host(host, int(port)), physical_offset)


def _consumers(operator: Operator) -> None:
    ask, client = operator.ask, operator.client
    run = client.start("online", "orders", "producer", "consumer")
    client.said(run, "online")
    group = "java-online-consumer"
    all_consumed = r"(?s)a 0 3 3 0 .*a 1 2 2 0 .*Diff Total: 0"
    ask(f"consumerConnection -g {group}", until="orders")
    ask("producerConnection -g java-online-producer -t orders", until="JAVA")
    ask("producer -b {address}")
    ask(f"consumerProgress -g {group}", until=all_consumed)
    ask(f"consumerProgress -g {group} -s true")
    ask("consumerProgress", until=group)
    ask(f"consumerStatus -g {group}")
    ask(f"consumerStatus -g {group} -i nobody")
    ask("brokerConsumeStats -b {address}")
    ask("consumerConnection -g readers")
    ask("consumerProgress -g readers")
    ask("consumerStatus -g readers")
    ask(f"cloneGroupOffset -s {group} -d readers -t orders")
    ask("consumerProgress -g readers")
    ask(f"resetOffsetByTime -g {group} -t orders -s 0")
    ask(f"consumerProgress -g {group}", until=all_consumed)
    ask("sendMessage -t orders -b broker-a -i 0 -p last")
    client.lines(run)


def _offsets(operator: Operator) -> None:
    ask = operator.ask
    ask("resetOffsetByTime -g readers -t orders -s 0")
    ask("consumerProgress -g readers")
    ask("resetOffsetByTime -g readers -t orders -s -1")
    ask("consumerProgress -g readers")
    ask("resetOffsetByTime -g readers -t orders -s 0 -b {address} -q 1 -o 1")
    ask("consumerProgress -g readers")
    ask("skipAccumulatedMessage -g readers -t orders")
    ask("consumerProgress -g readers")
    ask("resetOffsetByTime -g unknown -t orders -s 0")
    ask("resetOffsetByTime -g readers -t unknown -s 0")


def _permissions(operator: Operator) -> None:
    ask = operator.ask
    ask("updateTopicPerm -b {address} -t orders -p 4")
    ask("topicRoute -t orders")
    ask("sendMessage -t orders -p refused")
    ask("updateTopicPerm -c DefaultCluster -t orders -p 6")
    ask("updateTopicPerm -b {address} -t orders -p 6")
    ask("updateTopicPerm -b {address} -t unknown -p 6")
    ask("wipeWritePerm -b broker-a")
    ask("topicRoute -t orders")
    ask("addWritePerm -b broker-a")
    ask("topicRoute -t orders")
    ask("wipeWritePerm -b unknown")
    ask("updateOrderConf -m put -t orders -v broker-a:2")
    ask("updateOrderConf -m get -t orders")
    ask("topicRoute -t orders")
    ask("updateOrderConf -m delete -t orders")
    ask("updateOrderConf -m get -t orders")
    ask("updateTopic -c DefaultCluster -t bills -r 1 -w 1 -o true")
    ask("updateKvConfig -s NAMES -k key -v value")
    ask("deleteKvConfig -s NAMES -k key")
    ask("deleteKvConfig -s NAMES -k key")


def _settings(operator: Operator) -> None:
    ask = operator.ask
    ask("updateBrokerConfig -b {address} -k fileReservedTime -v 71")
    ask("updateBrokerConfig -c DefaultCluster -k fileReservedTime -v 72")
    assert "fileReservedTime = 72" in "\n".join(ask("getBrokerConfig -b {address}"))
    ask("updateBrokerConfig -b {address} -k unknownKey -v 1")
    for where in ("-b {address}", "-c DefaultCluster"):
        ask(f"cleanExpiredCQ {where}")
        ask(f"cleanUnusedTopic {where}")
        ask(f"deleteExpiredCommitLog {where}")
    ask("exportMetadata -c DefaultCluster -f {home}")
    ask("exportConfigs -c DefaultCluster -f {home}")
    ask("exportMetrics -c DefaultCluster -f {home}")


def _removal(operator: Operator) -> None:
    ask = operator.ask
    ask("deleteSubGroup -b {address} -g readers -r true")
    ask("deleteSubGroup -c DefaultCluster -g others")
    ask("deleteSubGroup -b {address} -g unknown")
    ask("deleteTopic -c DefaultCluster -t orders")
    ask("deleteTopic -c DefaultCluster -t bills")
    ask("deleteTopic -c DefaultCluster -t unknown")
    ask("topicList")
    ask("topicRoute -t orders")
    ask("clusterList")


def test_an_operator_sees_the_same_as_at_rocketmq(tmp_path: Path) -> None:
    """Every line that is printed is the same, or differs for a reason."""
    theirs, ours = at_both(hour, "5.3.3", tmp_path)

    compare(theirs, ours, DIFFERENCES, MEASURED)
