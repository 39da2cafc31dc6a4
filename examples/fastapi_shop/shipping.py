"""The shipping department: a parcel for each order, once. Run it with ``python shipping.py``."""

import asyncio
import json
import logging

from database import Parcel, create_tables, new_session

from halfmq.client import Consumer, MessageView

logger = logging.getLogger(__name__)
consumer = Consumer("shipping", {"orders": "*"}, start_from="first")


async def ship(message: MessageView) -> None:
    """Write the parcel. A message that comes again ends here without the block's work."""
    order = json.loads(message.body)
    async with new_session() as session, consumer.inbox(message, session=session):
        session.add(Parcel(order=order["number"]))


async def main() -> None:
    """Work until SIGTERM; a handler that raises gets its message again."""
    await create_tables()
    async with consumer:
        summary = await consumer.run(ship, concurrency=8)
    logger.info("%d handled, %d retried", summary.handled, summary.retried)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    asyncio.run(main())
