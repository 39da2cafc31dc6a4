import java.util.Arrays;
import java.util.HashSet;
import java.util.concurrent.atomic.AtomicBoolean;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** Consumers that select messages by their properties, with SQL92 expressions. */
final class Filtering {
    private static final String WANTED =
        "amount > 100 AND region IN ('EU', 'US') AND note NOT CONTAINS 'test'";

    private Filtering() {
    }

    /** Messages before and after the consumers start; f-2 and f-5 match, f-2 is refused once. */
    static void sql(Scope scope) throws Exception {
        DefaultMQProducer producer = scope.producer();
        MessageQueue queue = null;
        for (int i = 0; i < 4; i++) {
            queue = send(scope, producer, i, queue);
        }
        AtomicBoolean refuse = new AtomicBoolean(true);
        Inbox inbox = new Inbox(scope);
        founder(scope);
        DefaultMQPushConsumer push = scope.pushConsumer(scope.group("consumer"), scope.topic(), "*");
        push.subscribe(scope.topic(), MessageSelector.bySql(WANTED));
        push.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            messages.forEach(message -> inbox.put("push", message));
            return refuse.getAndSet(false)
                ? ConsumeConcurrentlyStatus.RECONSUME_LATER
                : ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        push.start();
        inbox.await(2);
        for (int i = 4; i < 7; i++) {
            send(scope, producer, i, queue);
        }
        inbox.await(new HashSet<>(Arrays.asList("f-2", "f-5")));
        pull(scope, queue);
        refused(scope);
    }

    /** The retry topic comes with the group; see Consuming.retry. */
    private static void founder(Scope scope) throws Exception {
        DefaultMQPushConsumer founder =
            scope.pushConsumer(scope.group("consumer"), scope.topic(), "nothing");
        new Inbox(scope).fill("founder", founder).shutdown();
    }

    private static MessageQueue send(
            Scope scope, DefaultMQProducer producer, int number, MessageQueue queue)
            throws Exception {
        String[] regions = {"CN", "CN", "EU", "CN", "CN", "US", "EU"};
        Message message = Scope.message(scope.topic(), "T", "f-" + number);
        message.putUserProperty("amount", String.valueOf(number == 1 ? 7 : 100 + number));
        message.putUserProperty("region", regions[number]);
        message.putUserProperty("note", number == 6 ? "a test" : "none");
        MessageQueue used = queue == null
            ? producer.send(message).getMessageQueue()
            : producer.send(message, queue).getMessageQueue();
        scope.say("stored", "body", "f-" + number);
        return used;
    }

    private static void pull(Scope scope, MessageQueue queue) throws Exception {
        DefaultMQPullConsumer consumer = scope.pullConsumer(scope.group("puller"));
        long offset = 0;
        while (offset < 7) {
            long next = offset;
            // It learns with a heartbeat that the broker has such filters.
            PullResult result = Scope.await(
                () -> consumer.pull(queue, MessageSelector.bySql(WANTED), next, 32));
            offset = result.getNextBeginOffset();
            if (result.getMsgFoundList() != null) {
                for (MessageExt message : result.getMsgFoundList()) {
                    scope.saw("pulled", message);
                }
            }
        }
    }

    private static void refused(Scope scope) throws Exception {
        DefaultMQPushConsumer wrong =
            scope.pushConsumer(scope.group("wrong"), scope.topic(), "*");
        wrong.subscribe(scope.topic(), MessageSelector.bySql("amount == 5"));
        wrong.registerMessageListener((MessageListenerConcurrently) (messages, context) ->
            ConsumeConcurrentlyStatus.CONSUME_SUCCESS);
        try {
            wrong.start();
            scope.say("started");
        } catch (MQClientException refusal) {
            scope.say("refused", "code", refusal.getResponseCode(), "text",
                refusal.getErrorMessage());
        }
    }
}
