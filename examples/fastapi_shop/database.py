"""Tables of the shop, and where the database is."""

import os

from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from halfmq.client import Inbox, TransactionLedger

engine = create_async_engine(os.environ.get("DATABASE_URL", "sqlite+aiosqlite:///shop.db"))
new_session = async_sessionmaker(engine, expire_on_commit=False)
ledger = TransactionLedger()  # rows that prove which transactions have committed
inbox = Inbox("shipping")  # messages whose work is done


class Base(DeclarativeBase):
    """All tables."""


class Order(Base):
    """What a customer ordered."""

    __tablename__ = "orders"
    number: Mapped[str] = mapped_column(primary_key=True)
    customer: Mapped[str]


class Parcel(Base):
    """What is on its way: one for each order."""

    __tablename__ = "parcels"
    id: Mapped[int] = mapped_column(primary_key=True)
    order: Mapped[str]


async def create_tables() -> None:
    """Create what is missing; a real shop has migrations (see docs/ledger.md)."""
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    async with engine.connect() as connection:
        await ledger.create_table_async(connection)
        await inbox.create_table_async(connection)
