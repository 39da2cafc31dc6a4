"""The meaning of each kind of anomaly, and what to do about it."""

from typing import Final, NamedTuple

from ..audit.rules.model import Kind


class Explanation(NamedTuple):
    """A kind of anomaly in words."""

    meaning: str
    remedy: str


_EFFECTS: Final = "Look for its effects where the topic is consumed."
_VERIFY: Final = (
    "Run halfmq store verify for details. A broker rebuilds its queues from the log if their folder"
    " is moved away while it is stopped."
)
_DISK: Final = "Check the disk and restore the range from a replica or backup, if there is one."

KINDS: Final = {
    Kind.COMMITTED_TWICE: Explanation(
        "Consumers see the message more than once.",
        f"Let consumers drop repeats by the transaction's id. {_EFFECTS}",
    ),
    Kind.COMMIT_AFTER_ROLLBACK: Explanation(
        "Consumers see a message whose producer got the answer that it is rolled back.",
        "Compare with the producer's database; compensate if its row is not there.",
    ),
    Kind.ROLLBACK_AFTER_COMMIT: Explanation(
        "Consumers see the message; a producer got the answer that it is rolled back.",
        "Compare with the producer's database; compensate if its row is not there.",
    ),
    Kind.DECISION_WITHOUT_HALF: Explanation(
        "A final message or a rollback record names a half message that is not in the log.",
        "If it is a final message, consumers have seen it: compare with the producer's database.",
    ),
    Kind.OP_WITHOUT_HALF: Explanation(
        "An op message marks something as done that was never prepared.",
        "Consumers do not see op messages. Find out what else wrote to the store.",
    ),
    Kind.PARKED_WITHOUT_HALF: Explanation(
        "A message was parked whose half message is not in the log.",
        "Compare with the producer's database, and send the message again if its row is there.",
    ),
    Kind.DUPLICATE_PREPARE: Explanation(
        "One message was prepared as two transactions, and both may be committed.",
        "Let producers keep the id of a message when they send it again to halfmq, which then"
        " answers with the first transaction.",
    ),
    Kind.MISSING_FINAL: Explanation(
        "A transaction was committed, and its message, or one of several, never reached its queue.",
        "Send the message again: its content is in the half message at the offset shown.",
    ),
    Kind.MISSING_DECISION: Explanation(
        "An op message says that the transaction was decided, but neither a final message nor a"
        " rollback record is in the log.",
        "Ask the producer's database. If its row is there, send the message again from the half"
        " message at the offset shown.",
    ),
    Kind.ALTERED_FINAL: Explanation(
        "Consumers see a message that differs from what was prepared; the row says what differs.",
        f"The half message at the offset shown has what the producer sent. {_EFFECTS}",
    ),
    Kind.UNLINKED_DELIVERY: Explanation(
        "A record delivers the message though it is no final message of the transaction.",
        f"Find out what wrote it: a broker delivers final messages only. {_EFFECTS}",
    ),
    Kind.INVISIBLE_MESSAGE: Explanation(
        "A message was stored with flags that keep it out of its queue, so nobody gets it.",
        "Find its sender: it set transaction flags without TRAN_MSG. Send the message again.",
    ),
    Kind.UNMARKED_FINAL: Explanation(
        "The record names its half message, but its flags do not say that it is a commit.",
        "Check the disk: a bit of the flags may have flipped. Consumers see it unless it is an"
        " invisible_message, too.",
    ),
    Kind.EARLY_DELIVERY: Explanation(
        "A message with a delay was put into its topic before it was due.",
        "Check messageDelayLevel against --delay-levels, and the broker's clock.",
    ),
    Kind.LATE_DELIVERY: Explanation(
        "A message with a delay was put into its topic more than a minute after it was due, while"
        " the broker was at work.",
        "Check messageDelayLevel against --delay-levels, and how busy the broker was.",
    ),
    Kind.ALTERED_DELIVERY: Explanation(
        "Consumers see a message that differs from the one that waited.",
        f"The waiting message at the offset shown has what was sent. {_EFFECTS}",
    ),
    Kind.OVERDUE_DELIVERY: Explanation(
        "A message with a delay, or a retry, is due and was never put into its topic.",
        "Restart the broker, which looks for due messages; else send the message again.",
    ),
    Kind.DELIVERED_TWICE: Explanation(
        "A message with a delay was put into its topic more than once.",
        f"Let consumers drop repeats by the transaction's id. {_EFFECTS}",
    ),
    Kind.SPLIT_GROUP: Explanation(
        "The messages of one transaction were not decided alike.",
        "Compare with the producer's database, and send the messages that are missing again.",
    ),
    Kind.OVERDUE_HALF: Explanation(
        "A half message has been undecided for longer than --pending-age. Copies whose original"
        " has left the log are not counted.",
        "See that a producer of the group is connected and answers checks: halfmq tx list.",
    ),
    Kind.LOST_PARKING: Explanation(
        "The broker stopped asking about a half message, and the log has neither a decision nor a"
        " parked copy.",
        "Compare with the producer's database, and send the message again if its row is there.",
    ),
    Kind.PARKED_TWICE: Explanation(
        "A message was parked twice, and not resumed in between.",
        "Decide it once: halfmq tx list. Find out what else wrote to the store.",
    ),
    Kind.ROLLED_BACK_TWICE: Explanation(
        "A transaction has more than one rollback record.",
        "Consumers see nothing of it. Find out what else wrote to the store.",
    ),
    Kind.MISPLACED_HALF: Explanation(
        "A half message lies in another queue than 0 of its topic, where no check of RocketMQ"
        " looks.",
        "Find out what wrote it. Compare with the producer's database if it is undecided.",
    ),
    Kind.HALF_AFTER_FINAL: Explanation(
        "By the times at which they were stored, the final message came before its half.",
        "Check the disk: no checksum covers these times. A clock that was set is a remark.",
    ),
    Kind.OUT_OF_ORDER: Explanation(
        "Queue offsets do not rise with the offsets in the log.",
        "Consumers may miss messages of this queue. Keep a copy of the store for an inquiry.",
    ),
    Kind.QUEUE_GAP: Explanation(
        "Offsets of a queue are missing from the log.",
        f"Messages of the queue may be lost. {_DISK}",
    ),
    Kind.WRONG_QUEUE_ENTRY: Explanation(
        "An entry of a consume queue differs from the log, or, of a message that waits by a delay"
        " level, says another due time; of a log that ends before its queues, one row says so.",
        _VERIFY,
    ),
    Kind.MISSING_QUEUE_ENTRY: Explanation(
        "A message in the log has no entry in its queue, so consumers do not get it.", _VERIFY
    ),
    Kind.UNKNOWN_QUEUE: Explanation(
        "The log has messages of a topic or a queue that is not in the broker's table.",
        "Create the topic again, or restore config/topics.json from its .bak.",
    ),
    Kind.CORRUPT_RECORD: Explanation("Bytes that are no record, where one should be.", _DISK),
    Kind.CRC: Explanation(
        "The bytes of a record do not match its CRC: they are not those that were written.", _DISK
    ),
    Kind.GAP: Explanation("A range of the log was never written, or is lost.", _DISK),
    Kind.OVERLAP: Explanation(
        "Two segments claim the same offsets.",
        "Remove the file that does not belong to the log, from a copy of the store.",
    ),
}
