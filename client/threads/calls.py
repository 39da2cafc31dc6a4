"""The methods of the blocking clients, each made from the async method of the same name.

Type checkers, editors and documentation tools read ``calls.pyi``, which has the signatures and
docstrings of these methods and is written by setup.py at each installation.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from typing import Generic

from ..admin import Admin
from ..consumer import Consumer
from ..errors import ClientError
from ..producer import Producer
from ..transaction import TransactionProducer
from .portal import Facade

INTERNAL = {
    "check_and_finish",
    "finish",
    "handover",
    "look_and_finish",
    "new_key",
    "prepare",
    "use_listener",
}
"""Methods and attributes for the library's own classes."""


def _calls(kind, *by_hand):
    """Return a class with the constructor and methods of an async client, but those ``by_hand``."""
    members = {"__init__": _constructor(kind)}
    for name, member in inspect.getmembers(kind):
        if name.startswith("_") or hasattr(Facade, name) or name in INTERNAL.union(by_hand):
            continue
        if isinstance(member, property):
            members[name] = _property(name, member)
        elif inspect.isfunction(member):
            is_iterator = str(inspect.signature(member).return_annotation).startswith("Async")
            members[name] = (_iterator if is_iterator else _method)(member)
    parameters = getattr(kind, "__parameters__", ())
    bases = (Facade, Generic[parameters]) if parameters else (Facade,)
    return types.new_class(f"{kind.__name__}Calls", bases, {}, lambda body: body.update(members))


def _constructor(kind):
    @functools.wraps(kind.__init__)
    def init(self, *args, **kwargs):
        Facade.__init__(self, kind(*args, **kwargs))

    return init


def _property(name, member):
    return property(lambda self: getattr(self.asynchronous, name), doc=member.__doc__)


def _method(method):
    @functools.wraps(method)
    def call(self, *args, **kwargs):
        made = method(self.asynchronous, *args, **kwargs)
        return self.wait(made) if inspect.iscoroutine(made) else made

    return call


def _iterator(method):
    @functools.wraps(method)
    def iterate(self, *args, **kwargs):
        found, end = None, object()

        async def following():
            nonlocal found
            found = found or method(self.asynchronous, *args, **kwargs)
            return await anext(found, end)

        try:
            while (one := self.wait(following())) is not end:
                yield one
        finally:
            if hasattr(found, "aclose"):
                with contextlib.suppress(ClientError):  # closed before the loop has ended
                    self.wait(found.aclose())

    return iterate


ProducerCalls = _calls(Producer)
TransactionProducerCalls = _calls(TransactionProducer, "transaction", "send_in_transaction")
ConsumerCalls = _calls(Consumer, "inbox", "receive", "receive_many", "run", "stop")
AdminCalls = _calls(Admin)
