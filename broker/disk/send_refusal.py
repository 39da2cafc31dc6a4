"""Whether new messages are refused, and why: one flag, whoever has a reason.

A full disk, a disk that is behind and a failed flush all set it. It stops messages, halves and
retries, which is all that fills the log; consumption, decisions, checks and delayed deliveries do
not look at it. After a failed flush the store itself takes none of these either.
"""

from __future__ import annotations

from threading import Lock

from halfmq.remoting.codes import ResponseCode

from ..errors import REFUSAL_FIELDS, RequestRefusedError


class SendRefusal:
    """The flag, with a reason of each part that refuses; parts may live on different threads."""

    def __init__(self) -> None:
        self.refusing = False
        self.count = 0  # messages refused since the start
        self._reasons: dict[str, tuple[ResponseCode, str]] = {}
        self._lock = Lock()

    def begin(self, cause: str, code: ResponseCode, reason: str) -> None:
        """Refuse messages with a code, and a reason that says what helps, until `end`."""
        with self._lock:
            self._reasons = {**self._reasons, cause: (code, reason)}
            self.refusing = True

    def end(self, cause: str) -> None:
        """Take a reason back; it may not be set."""
        with self._lock:
            self._reasons = {key: why for key, why in self._reasons.items() if key != cause}
            self.refusing = bool(self._reasons)

    def refusal(self) -> RequestRefusedError:
        """Return the answer to one message, while `refusing`."""
        self.count += 1
        code, reason = next(iter(self._reasons.values()))
        return RequestRefusedError(code, reason, REFUSAL_FIELDS)
