"""A flag, with reasons, that makes the broker refuse new messages.

It is set for a full disk, for a disk that is too slow, and after a failed flush. It stops messages,
halves and retries, which fill the log. Consumption, decisions, checks and delayed deliveries ignore
it; after a failed flush the store itself refuses their appends.
"""

from threading import Lock

from halfmq.remoting.codes import ResponseCode

from ..errors import MessageRefusedError, RequestRefusedError


class SendRefusal:
    """The flag, with one reason per cause; causes may be set from different threads."""

    def __init__(self) -> None:
        self.refusing = False
        self.count = 0  # messages refused since the start
        self._reasons: dict[str, tuple[ResponseCode, str]] = {}
        self._lock = Lock()

    def begin(self, cause: str, code: ResponseCode, reason: str) -> None:
        """Refuse messages until `end`, with a code and a reason that says how to resolve it."""
        with self._lock:
            self._reasons = {**self._reasons, cause: (code, reason)}
            self.refusing = True

    def end(self, cause: str) -> None:
        """Remove a reason, if it is set."""
        with self._lock:
            self._reasons = {key: why for key, why in self._reasons.items() if key != cause}
            self.refusing = bool(self._reasons)

    @property
    def reason(self) -> str:
        """Why messages are refused; empty if they are not."""
        return next((reason for _, reason in self._reasons.values()), "")

    def refusal(self) -> RequestRefusedError:
        """Return the refusal of one message; call it only while `refusing`."""
        self.count += 1
        code, reason = next(iter(self._reasons.values()))
        return MessageRefusedError(reason, code)
