"""The shop: an order is a row and a message, both or neither. Run it with ``uvicorn shop:app``."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from database import Order, create_tables, engine, ledger, new_session
from fastapi import Depends, FastAPI, HTTPException
from pydantic import BaseModel
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from halfmq.client import Message, TransactionProducer

producer = TransactionProducer("shop", ledger.async_checker(engine.connect))


@asynccontextmanager
async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
    """The producer lives as long as the application."""
    await create_tables()
    async with producer:
        yield
    await engine.dispose()


app = FastAPI(lifespan=lifespan)


async def session() -> AsyncIterator[AsyncSession]:
    """A session that nobody has used: the producer begins and commits its transaction."""
    async with new_session() as opened:
        yield opened


class NewOrder(BaseModel):
    """What a customer sends."""

    number: str
    customer: str


@app.post("/orders", status_code=201)
async def order(new: NewOrder, session: Annotated[AsyncSession, Depends(session)]) -> NewOrder:
    """Store the order, and publish it."""
    message = Message("orders", new.model_dump_json().encode(), keys=new.number)
    try:
        async with producer.transaction(message, order_key=new.customer, session=session):
            session.add(Order(number=new.number, customer=new.customer))
    except IntegrityError as error:  # of the flush before COMMIT: nothing is stored or published
        raise HTTPException(409, f"order {new.number} exists") from error
    return new


@app.get("/healthz")
async def healthz() -> dict[str, object]:
    """For a probe: whether a broker is connected."""
    health = await producer.health()
    if not health.connected:
        raise HTTPException(503, f"waiting for {', '.join(health.waiting_for)}")
    return {"connected": True}
