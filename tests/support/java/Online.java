import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.message.MessageQueue;

/** Clients of many kinds, online while operators look at them. */
final class Online {
    private static final long ONLINE_MINUTES = 10;

    private Online() {
    }

    /**
     * online TOPIC ROLE...: a client for each role, in the group java-online-ROLE, until the
     * consumer is given the message "last".
     */
    static void online(Scope scope) throws Exception {
        CountDownLatch last = new CountDownLatch(1);
        for (int i = 1; i < scope.arguments().length; i++) {
            start(scope, scope.argument(0), scope.argument(i), last);
        }
        scope.say("online");
        if (!last.await(ONLINE_MINUTES, TimeUnit.MINUTES)) {
            throw new IllegalStateException("the last message did not come");
        }
    }

    private static void start(Scope scope, String topic, String role, CountDownLatch last)
            throws Exception {
        if (role.equals("producer")) {
            DefaultMQProducer producer = scope.producer();
            MessageQueue queue = new MessageQueue(topic, "broker-a", 0);
            scope.sent("first", producer.send(Scope.message(topic, "T", "first"), queue));
            return;
        }
        if (role.equals("pulling")) {
            DefaultMQPullConsumer pulling = scope.pullConsumer(scope.group(role));
            pulling.getRegisterTopics().add(topic);
            for (MessageQueue queue : pulling.fetchSubscribeMessageQueues(topic)) {
                pulling.updateConsumeOffset(queue, 0);
            }
            return;
        }
        String tags = role.equals("filtered") ? "other" : "*";
        DefaultMQPushConsumer consumer = scope.pushConsumer(scope.group(role), topic, tags);
        if (role.equals("broadcasting")) {
            Consuming.broadcast(consumer);
        }
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            messages.forEach(message -> scope.saw("consumed", message, "consumer", role));
            if (role.equals("blocked")) {
                await(last);
            } else if (messages.stream().anyMatch(one -> Scope.text(one).equals("last"))) {
                last.countDown();
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
    }

    private static void await(CountDownLatch latch) {
        try {
            latch.await();
        } catch (InterruptedException interrupted) {
            Thread.currentThread().interrupt();
        }
    }
}
