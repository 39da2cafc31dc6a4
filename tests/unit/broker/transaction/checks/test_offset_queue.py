"""The queue of due transactions."""

from __future__ import annotations

import gc
from collections import deque
from random import Random, randrange

from halfmq.broker.transaction.checks.group_queues import PART_COUNT, OffsetQueue


def test_offsets_are_returned_in_the_order_of_a_deque() -> None:
    """With offsets put at the front, and with queues joined."""
    seed = randrange(1 << 32)
    print(f"seed {seed}")
    random = Random(seed)
    queues = OffsetQueue(), OffsetQueue()
    models: tuple[deque[int], deque[int]] = deque(), deque()
    number = 0
    for _ in range(300):
        which = random.randrange(2)
        queue, model = queues[which], models[which]
        match random.randrange(4):
            case 0:
                for _ in range(random.choice((1, 7, PART_COUNT, 2 * PART_COUNT + 1))):
                    number += 1
                    queue.append(number)
                    model.append(number)
            case 1:
                number += 1
                queue.appendleft(number)
                model.appendleft(number)
            case 2:
                for _ in range(min(random.choice((1, 9, 3 * PART_COUNT)), len(model))):
                    assert queue.popleft() == model.popleft()
            case _:
                queue.take_all(queues[1 - which])
                model.extend(models[1 - which])
                models[1 - which].clear()
        assert (len(queue), bool(queue)) == (len(model), bool(model))
    for queue, model in zip(queues, models, strict=True):
        assert [queue.popleft() for _ in range(len(queue))] == list(model)


def test_garbage_collection_does_not_visit_the_offsets() -> None:
    """With a million it would repeatedly stop the broker for 20 ms or more."""
    queue = OffsetQueue()
    for number in range(50 * PART_COUNT):
        queue.append(number)
    other = OffsetQueue()
    other.take_all(queue)

    walked = [other, *gc.get_referents(other)]
    for found in walked[1:]:
        walked += gc.get_referents(found)
    assert len(walked) < 100
