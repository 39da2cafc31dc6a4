import java.util.concurrent.FutureTask;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** The plain pull consumer: one queue, every outcome of a pull, and offsets. */
final class Pulling {
    private Pulling() {
    }

    static void pull(Scope scope) throws Exception {
        DefaultMQProducer producer = scope.producer();
        scope.sent("first", producer.send(Scope.message(scope.topic(), "T", "first")));
        DefaultMQPullConsumer consumer = scope.pullConsumer(scope.group("consumer"));
        MessageQueue used = null;
        for (MessageQueue queue : consumer.fetchSubscribeMessageQueues(scope.topic())) {
            if (consumer.maxOffset(queue) == 0) {
                used = queue;
            }
        }
        for (int i = 0; i < 5; i++) {
            String body = "p-" + i;
            scope.sent(body, producer.send(
                Scope.message(scope.topic(), i % 2 == 0 ? "A" : "B", body), used));
            Thread.sleep(5);  // a store time of its own, for the search by time
        }
        outcomes(scope, consumer, used);
        offsets(scope, consumer, used);
        longPoll(scope, consumer, producer, used);
    }

    private static void outcomes(Scope scope, DefaultMQPullConsumer consumer, MessageQueue queue)
            throws Exception {
        told(scope, "everything", consumer.pull(queue, "*", 0, 32));
        told(scope, "two", consumer.pull(queue, "*", 1, 2));
        told(scope, "tagged", consumer.pull(queue, "A", 0, 32));
        told(scope, "no_such_tag", consumer.pull(queue, "none", 0, 32));
        told(scope, "at_the_end", consumer.pull(queue, "*", 5, 32));
        told(scope, "behind_the_end", consumer.pull(queue, "*", 100, 32));
    }

    private static void told(Scope scope, String pull, PullResult result) {
        scope.say("pulled", "pull", pull, "status", result.getPullStatus().name(),
            "next", result.getNextBeginOffset(), "min", result.getMinOffset(),
            "max", result.getMaxOffset());
        if (result.getMsgFoundList() != null) {
            for (MessageExt message : result.getMsgFoundList()) {
                scope.saw("message", message, "pull", pull);
            }
        }
    }

    private static void offsets(Scope scope, DefaultMQPullConsumer consumer, MessageQueue queue)
            throws Exception {
        scope.say("bounds", "min", consumer.minOffset(queue), "max", consumer.maxOffset(queue),
            "earliest_ms", consumer.earliestMsgStoreTime(queue));
        for (MessageExt message : consumer.pull(queue, "*", 0, 32).getMsgFoundList()) {
            scope.say("by_time", "queue_offset", message.getQueueOffset(),
                "found", consumer.searchOffset(queue, message.getStoreTimestamp()));
        }
        scope.say("by_time", "queue_offset", 5L,
            "found", consumer.searchOffset(queue, System.currentTimeMillis() + 60_000));
        consumer.getDefaultMQPullConsumerImpl().getOffsetStore()
            .updateConsumeOffsetToBroker(queue, 3, false);
        scope.say("committed", "queue_offset", consumer.fetchConsumeOffset(queue, true));
    }

    /** A pull at the end of the queue waits for the next message. */
    private static void longPoll(Scope scope, DefaultMQPullConsumer consumer,
            DefaultMQProducer producer, MessageQueue queue) throws Exception {
        FutureTask<PullResult> waiting =
            new FutureTask<>(() -> consumer.pullBlockIfNotFound(queue, "*", 5, 32));
        new Thread(waiting).start();
        Thread.sleep(300);  // most likely it waits now; the outcome is the same if not
        scope.sent("p-5", producer.send(Scope.message(scope.topic(), "A", "p-5"), queue));
        long sent = System.nanoTime();
        PullResult result = waiting.get();
        scope.say("woken", "after_ms", (System.nanoTime() - sent) / 1_000_000);
        told(scope, "awaited", result);
    }
}
