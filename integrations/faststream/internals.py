"""What FastStream keeps in its private modules and a broker needs: imported here and nowhere else.

There is no public way to add a broker. Patch releases have moved these names, so the extra
``halfmq[faststream]`` allows 0.7.6 to below 0.8, and a move is mended in this file.
"""

from fast_depends import dependency_provider
from faststream._internal.broker import BrokerUsecase
from faststream._internal.broker.registrator import Registrator
from faststream._internal.broker.router import ArgsContainer, BrokerRouter, SubscriberRoute
from faststream._internal.configs import (
    BrokerConfig,
    PublisherSpecificationConfig,
    PublisherUsecaseConfig,
    SubscriberUsecaseConfig,
)
from faststream._internal.constants import EMPTY
from faststream._internal.context import Context
from faststream._internal.context.repository import ContextRepo
from faststream._internal.di import FastDependsConfig
from faststream._internal.endpoint.publisher import PublisherSpecification, PublisherUsecase
from faststream._internal.endpoint.publisher.fake import FakePublisher
from faststream._internal.endpoint.subscriber import SubscriberSpecification, SubscriberUsecase
from faststream._internal.endpoint.subscriber.call_item import CallsCollection
from faststream._internal.endpoint.subscriber.mixins import TasksMixin
from faststream._internal.endpoint.utils import ParserComposition, process_msg
from faststream._internal.logger import DefaultLoggerStorage, make_logger_state
from faststream._internal.logger.logging import get_broker_logger
from faststream._internal.parser import DefaultCodec
from faststream._internal.producer import ProducerProto
from faststream._internal.testing.broker import TestBroker, change_producer
from faststream.specification.asyncapi.utils import resolve_payloads

try:
    from faststream._internal.fastapi.router import StreamRouter
except ImportError:  # without FastAPI
    StreamRouter = None  # type: ignore[assignment,misc]
