"""Messages survive encoding as properties, batches and compressed bodies."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from halfmq.client import ClientConfig, Message
from halfmq.client.arguments import is_tag
from halfmq.client.message import RESERVED_NAMES
from halfmq.client.net.compression import decompress_body
from halfmq.client.net.message_encoding import encode_message, encode_message_batch
from halfmq.store.format.batch import decode_batch
from halfmq.store.format.properties import decode_properties

CONFIG = ClientConfig(compress_over=64)

texts = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\x01\x02"), min_size=1, max_size=20
)
names = texts.filter(lambda name: name not in RESERVED_NAMES)
messages = st.builds(
    Message,
    st.just("orders"),
    st.binary(min_size=1, max_size=300),
    tags=st.none() | texts.filter(is_tag),
    properties=st.dictionaries(names, texts, max_size=5),
)


@given(messages)
def test_a_reader_gets_back_what_was_given(message: Message) -> None:
    """The broker's and Java's parser read the same values from any text."""
    draft = encode_message(message, "ID", CONFIG)

    expected = {"UNIQ_KEY": "ID", **(message.properties or {})}
    if message.tags:
        expected["TAGS"] = message.tags
    assert decode_properties(draft.properties) == expected
    assert decompress_body(draft.body, draft.sys_flag) == message.body


@given(st.lists(messages, min_size=1, max_size=5))
def test_a_batch_holds_every_message_unchanged(batch: list[Message]) -> None:
    """In order, with bodies and properties."""
    draft = encode_message_batch(batch, [str(n) for n in range(len(batch))], CONFIG)

    units = decode_batch(draft.body)
    assert [unit.body for unit in units] == [message.body for message in batch]
    for unit, message in zip(units, batch, strict=True):
        assert (message.properties or {}).items() <= decode_properties(unit.properties).items()
