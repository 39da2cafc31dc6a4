import java.util.HashSet;
import java.util.Set;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageQueue;

/** A stream of messages through a broker that fails, and a group whose members come and go. */
final class Flowing {
    private static final int QUEUES = 4;  // of a topic that a producer makes
    private static final long PACE_MS = 5;
    private static final int STEP = 50;  // messages between two lines about how far it is

    private Flowing() {
    }

    /** flow TOPIC KIND COUNT: a second member joins after a third, and leaves after two. */
    static void flow(Scope scope) throws Exception {
        String topic = scope.argument(0);
        boolean orderly = scope.argument(1).equals("orderly");
        int count = Integer.parseInt(scope.argument(2));
        DefaultMQProducer producer = scope.producer(topic + "-producer");
        producer.send(Scope.message(topic, "T", "founding"));
        Inbox inbox = new Inbox(scope);
        member(scope, inbox, "first", topic, orderly);
        DefaultMQPushConsumer second = null;
        Set<String> bodies = new HashSet<>();
        for (int i = 0; i < count; i++) {
            String body = "n-" + i;
            bodies.add(body);
            send(producer, Scope.message(topic, "T", body),
                new MessageQueue(topic, "broker-a", i % QUEUES));
            if (i == count / 3) {
                second = member(scope, inbox, "second", topic, orderly);
            } else if (i == 2 * count / 3) {
                second.shutdown();
            }
            if (i % STEP == 0) {
                scope.say("sent", "count", i);
            }
            Thread.sleep(PACE_MS);
        }
        inbox.await(bodies);
    }

    /** Until it is acknowledged: the next one in its queue must not come before it. */
    private static void send(DefaultMQProducer producer, Message message, MessageQueue queue)
            throws Exception {
        Scope.await(() -> producer.send(message, queue));
    }

    private static DefaultMQPushConsumer member(
            Scope scope, Inbox inbox, String name, String topic, boolean orderly)
            throws Exception {
        DefaultMQPushConsumer consumer = scope.pushConsumer(topic + "-consumer", topic, "*");
        if (!orderly) {
            return inbox.fill(name, consumer);
        }
        consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
            messages.forEach(message -> inbox.put(name, message));
            return ConsumeOrderlyStatus.SUCCESS;
        });
        consumer.start();
        return consumer;
    }
}
