import java.util.Collection;
import java.util.Collections;
import java.util.List;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** The lite pull consumer: subscribed, committed, sought, and with a queue of its own choice. */
final class LitePulling {
    private LitePulling() {
    }

    static void litePull(Scope scope) throws Exception {
        DefaultMQProducer producer = scope.producer();
        for (int i = 0; i < 8; i++) {
            String body = "l-" + i;
            scope.sent(body, producer.send(Scope.message(scope.topic(), "T", body),
                (queues, message, choice) -> queues.get((Integer) choice % 4), i));
            Thread.sleep(2);  // a store time of its own, for the search by time
        }
        DefaultLitePullConsumer subscribed = consumer(scope);
        subscribed.subscribe(scope.topic(), "*");
        subscribed.start();
        poll(scope, subscribed, "subscribed", 8);
        subscribed.commitSync();
        MessageQueue queue = queueZero(subscribed, scope);
        subscribed.seek(queue, 1);
        poll(scope, subscribed, "sought", 1);
        subscribed.shutdown();

        DefaultLitePullConsumer assigned = consumer(scope);
        assigned.start();
        scope.say("committed", "queue_offset", assigned.committed(queue));
        assigned.assign(Collections.singletonList(queue));
        assigned.seek(queue, 0);
        poll(scope, assigned, "assigned", 2);
        assigned.seekToBegin(queue);
        poll(scope, assigned, "from_the_beginning", 2);
        assigned.seek(queue, assigned.offsetForTimestamp(queue, lastStored(scope, queue)));
        poll(scope, assigned, "from_a_time", 1);
        assigned.seekToEnd(queue);
        scope.sent("l-8", producer.send(Scope.message(scope.topic(), "T", "l-8"), queue));
        poll(scope, assigned, "from_the_end", 1);
        assigned.shutdown();
        selected(scope, producer);
    }

    /** The store time of the last message of a queue with two. */
    private static long lastStored(Scope scope, MessageQueue queue) throws Exception {
        return scope.pullConsumer(scope.group("reader")).pull(queue, "*", 1, 1)
            .getMsgFoundList().get(0).getStoreTimestamp();
    }

    /** Subscribed by an SQL92 expression. */
    private static void selected(Scope scope, DefaultMQProducer producer) throws Exception {
        String topic = scope.topic() + "-sql";
        for (int i = 0; i < 4; i++) {
            Message message = Scope.message(topic, "T", "s-" + i);
            message.putUserProperty("number", String.valueOf(i));
            producer.send(message);
        }
        DefaultLitePullConsumer selecting = scope.named(
            new DefaultLitePullConsumer(scope.group("selecting"), scope.signing()));
        selecting.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        selecting.subscribe(topic, MessageSelector.bySql("number BETWEEN 1 AND 2"));
        selecting.start();
        poll(scope, selecting, "selected", 2);
        selecting.shutdown();
    }

    private static DefaultLitePullConsumer consumer(Scope scope) {
        DefaultLitePullConsumer consumer =
            scope.named(
                new DefaultLitePullConsumer(scope.group("consumer"), scope.signing()));
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setAutoCommit(false);
        return consumer;
    }

    private static MessageQueue queueZero(DefaultLitePullConsumer consumer, Scope scope)
            throws Exception {
        Collection<MessageQueue> queues = consumer.fetchMessageQueues(scope.topic());
        for (MessageQueue queue : queues) {
            if (queue.getQueueId() == 0) {
                return queue;
            }
        }
        throw new IllegalStateException("no queue 0");
    }

    private static void poll(Scope scope, DefaultLitePullConsumer consumer, String how, int count) {
        long deadline = System.currentTimeMillis() + Scope.WAIT_MS;
        int seen = 0;
        while (seen < count && System.currentTimeMillis() < deadline) {
            List<MessageExt> messages = consumer.poll(1000);
            for (MessageExt message : messages) {
                scope.saw("polled", message, "how", how);
                seen++;
            }
        }
    }
}
