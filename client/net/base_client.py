"""BaseClient: start and stop, shared by producers, consumers and ``Admin``."""

from __future__ import annotations

from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Self, Unpack

from halfmq.remoting.bodies import HeartbeatData
from halfmq.store.format.topics import validate_group

from ..arguments import check_kind, check_seconds, check_text
from ..config import ClientConfig, ConnectionOptions
from ..errors import ClientClosedError, ConfigurationError, ConnectError
from ..events import Health
from .fork_safety import LoopBinding
from .session import Session
from .telemetry import Telemetry

# Official clients use these if no group is given, and reject them as explicit names.
RESERVED_GROUPS: Final = frozenset({"DEFAULT_PRODUCER", "DEFAULT_CONSUMER"})


class BaseClient:
    """Base of all clients. Has one session, from ``start`` to ``close``."""

    _runs_again = False
    """Whether it can be started again after ``close``: it keeps nothing of the run before."""

    _group_attribute = "messaging.rocketmq.producer.group"

    def __init__(self, group: str, **connection: Unpack[ConnectionOptions]) -> None:
        check_text("group", group)
        reason = "reserved" if group in RESERVED_GROUPS else validate_group(group)
        if reason is not None:
            raise ConfigurationError("group", group, f"another name ({reason})")
        unknown = connection.keys() - ConnectionOptions.__annotations__.keys()
        if unknown:
            known = ", ".join(ConnectionOptions.__annotations__)
            raise TypeError(f"unexpected argument {min(unknown)!r}; expected some of {known}")
        config = connection.pop("config", None)
        if config is None:
            config = ClientConfig()
        check_kind("config", config, ClientConfig)
        given: dict[str, Any] = {
            name: value for name, value in connection.items() if value is not None
        }
        if given.keys() & {"access_key", "secret_key", "credentials"}:  # those of config, no more
            given = {"access_key": None, "secret_key": None, "credentials": None} | given
        config = replace(config, **given)
        self.group = group
        self.config = config
        self._running: Session | None = None
        self._binding: LoopBinding | None = None
        self._used = False
        self._client_id = ""
        self.telemetry: Telemetry | None = None
        """What reports by OpenTelemetry, once the client is started; None without a provider."""

    @property
    def client_id(self) -> str:
        """The id by which brokers identify this client; empty before the start."""
        return self._client_id

    async def start(self) -> None:
        """Connect to the brokers; ``async with`` calls this.

        Raises:
            ConnectError: No name server can be reached; says which address, and why.
            RequestTimeoutError: The only name server does not answer.
            ConnectionLostError: The only name server closes the connection.
            BadAnswerError: The only name server speaks another protocol.
            TlsError: TLS on one side only, or a certificate is not accepted.
            AccessDeniedError: The credentials are not accepted, or a consumer may not consume.
            ClientClosedError: The client runs already; a consumer also: it ran before.
            UnequalSubscriptionsError: A broker refuses this consumer, because other members of its
                group subscribe differently.
        """
        if self._used:
            raise ClientClosedError(self._name)
        self._used = True
        self._binding = LoopBinding(self._name)
        self.telemetry = Telemetry.if_wanted(self.group, self._group_attribute)
        session = self._new_session()
        try:
            await self._start_session(session)
        except BaseException as error:
            await session.close()
            self._used = not self._runs_again
            if isinstance(error, ConnectError):  # its text says all; where it was raised, nothing
                raise error.with_traceback(None)  # noqa: B904 -- the same error
            raise
        self._running, self._client_id = session, session.client_id

    async def health(self) -> Health:
        """Return whether it is connected, what it waits for, and how far its queues are.

        It asks no broker, and works before the start and after ``close``.
        """
        if self._running is None:
            return Health(connected=False, waiting_for=("start",))
        self._check_binding()
        missing = self._running.missing_brokers()
        waits = (f"broker {address}: {reason}" for address, reason in missing.items())
        return Health(connected=not missing, waiting_for=tuple(waits))

    async def wait_until_available(self, timeout: float) -> None:  # noqa: ASYNC109 -- of all tries
        """Wait until a broker accepts connections, for at most ``timeout`` seconds.

        For services that start before their broker; call it before ``start`` or at any later time.

        Raises:
            ConnectError: There is no broker in time; says why.
            ClientError: Of ``start``.
        """
        check_seconds("timeout", timeout)
        config = replace(self.config, send_attempts_max=None)
        probe = Session(config, lambda client_id: HeartbeatData(client_id=client_id), {}, {})
        deadline = probe.clock() + timeout
        try:
            await probe.start(whole_cluster=True, seconds=timeout)
            await probe.wait_for_broker(deadline)
        except ConnectError as error:
            raise error.with_traceback(None)  # noqa: B904 -- as in start
        finally:
            await probe.close()

    async def close(self) -> None:
        """Unregister from the brokers and disconnect; safe to call twice.

        Requests under way get up to a second for their answers; a send without one raises
        ConnectionLostError, because its message may be stored.

        In a forked child it does nothing.

        Raises:
            WrongLoopError: The client runs on another event loop.
        """
        if self._is_inherited():
            return
        session, self._running = self._running, None
        if session is not None:
            await session.close()
            self._used = not self._runs_again

    @property
    def _session(self) -> Session:
        if self._running is None:
            raise ClientClosedError(self._name)
        self._check_binding()
        return self._running

    def _check_binding(self) -> None:
        """Raise ForkedError or WrongLoopError if the client was started elsewhere."""
        if self._binding is not None:
            self._binding.check()

    def _is_inherited(self) -> bool:
        """Return whether this is a forked child and the client runs in the parent.

        Raises:
            WrongLoopError: The client runs on another event loop.
        """
        if self._running is None or self._binding is None:
            return False
        if self._binding.forked:
            return True
        self._binding.check()
        return False

    @property
    def _name(self) -> str:
        """The name of this client in errors."""
        return f"{type(self).__name__} {self.group}"

    def _new_session(self) -> Session:
        raise NotImplementedError

    async def _start_session(self, session: Session) -> None:
        await session.start()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
