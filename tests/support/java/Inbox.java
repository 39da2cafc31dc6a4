import java.util.HashSet;
import java.util.Set;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.common.message.MessageExt;

/** Tells of what consumers are given, and lets the thread of the scenario wait for it. */
final class Inbox {
    private final LinkedBlockingQueue<String> arrived = new LinkedBlockingQueue<>();
    private final Set<String> seen = new HashSet<>();
    private final Scope scope;

    Inbox(Scope scope) {
        this.scope = scope;
    }

    /** Called by the consumer's thread, which goes on to change the message. */
    void put(String consumer, MessageExt message) {
        scope.saw("consumed", message, "consumer", consumer);
        arrived.add(Scope.text(message));
    }

    /** A started consumer that accepts everything. */
    DefaultMQPushConsumer fill(String name, DefaultMQPushConsumer consumer) throws Exception {
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            messages.forEach(message -> put(name, message));
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        return consumer;
    }

    /** A started consumer that has each message come again once. */
    DefaultMQPushConsumer refuseOnce(String name, DefaultMQPushConsumer consumer)
            throws Exception {
        return refuseOnce(name, consumer, "");
    }

    /** A started consumer that has messages come again once whose body begins so. */
    DefaultMQPushConsumer refuseOnce(String name, DefaultMQPushConsumer consumer, String body)
            throws Exception {
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            messages.forEach(message -> put(name, message));
            MessageExt first = messages.get(0);
            return first.getReconsumeTimes() == 0 && Scope.text(first).startsWith(body)
                ? ConsumeConcurrentlyStatus.RECONSUME_LATER
                : ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        return consumer;
    }

    void await(int count) throws Exception {
        for (int i = 0; i < count; i++) {
            next();
        }
    }

    /** Wait until each of these has come; some may come twice. */
    void await(Set<String> bodies) throws Exception {
        while (!seen.containsAll(bodies)) {
            next();
        }
    }

    String next() throws Exception {
        String body = arrived.poll(Scope.WAIT_MS, TimeUnit.MILLISECONDS);
        if (body == null) {
            throw new IllegalStateException("no message came; so far " + seen);
        }
        seen.add(body);
        return body;
    }
}
