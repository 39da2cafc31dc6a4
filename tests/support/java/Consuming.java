import java.lang.reflect.Method;
import java.util.Arrays;
import java.util.HashSet;
import java.util.Set;
import java.util.concurrent.atomic.AtomicBoolean;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** Push consumers. */
final class Consuming {
    private static final int QUEUES = 4;  // of a topic that a producer makes

    private Consuming() {
    }

    /** consume TOPIC EXPRESSION COUNT. */
    static void consume(Scope scope) throws Exception {
        Inbox inbox = new Inbox(scope);
        inbox.fill("push", scope.pushConsumer(
            scope.group("consumer-" + scope.run), scope.argument(0), scope.argument(1)));
        inbox.await(Integer.parseInt(scope.argument(2)));
    }

    /** In the order of each queue, also when one is refused; then another one goes on. */
    static void orderly(Scope scope) throws Exception {
        DefaultMQProducer producer = scope.producer();
        for (int i = 0; i < 12; i++) {
            sendOrdered(scope, producer, i);
        }
        AtomicBoolean refuse = new AtomicBoolean(true);
        Inbox inbox = new Inbox(scope);
        DefaultMQPushConsumer first = orderly(scope, inbox, "first", refuse);
        inbox.await(13);
        first.shutdown();
        orderly(scope, inbox, "second", refuse);
        for (int i = 12; i < 14; i++) {
            sendOrdered(scope, producer, i);
        }
        inbox.await(new HashSet<>(Arrays.asList("o-12", "o-13")));
    }

    private static void sendOrdered(Scope scope, DefaultMQProducer producer, int number)
            throws Exception {
        Message message = Scope.message(scope.topic(), "T", "o-" + number);
        SendResult result = producer.send(
            message, (queues, sent, choice) -> queues.get((Integer) choice % 2), number);
        scope.sent("o-" + number, result);
    }

    private static DefaultMQPushConsumer orderly(
            Scope scope, Inbox inbox, String name, AtomicBoolean refuse) throws Exception {
        DefaultMQPushConsumer consumer =
            scope.pushConsumer(scope.group("consumer"), scope.topic(), "*");
        consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
            messages.forEach(message -> inbox.put(name, message));
            if (Scope.text(messages.get(0)).equals("o-4") && refuse.getAndSet(false)) {
                return ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT;
            }
            return ConsumeOrderlyStatus.SUCCESS;
        });
        consumer.start();
        return consumer;
    }

    /** "once" is accepted when it comes again; "never" becomes a dead letter. */
    static void retry(Scope scope) throws Exception {
        DefaultMQProducer producer = scope.producer();
        scope.sent("once", producer.send(Scope.message(scope.topic(), "T", "once")));
        // The retry topic comes with the group. The consumer that made the group would look for it
        // again after 20 s only.
        DefaultMQPushConsumer founder =
            scope.pushConsumer(scope.group("consumer"), scope.topic(), "nothing");
        new Inbox(scope).fill("founder", founder).shutdown();
        scope.sent("never", producer.send(Scope.message(scope.topic(), "T", "never")));
        Inbox inbox = new Inbox(scope);
        DefaultMQPushConsumer consumer =
            scope.pushConsumer(scope.group("consumer"), scope.topic(), "*");
        consumer.setMaxReconsumeTimes(1);
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            MessageExt message = messages.get(0);
            inbox.put("push", message);
            boolean again = message.getReconsumeTimes() == 0 || Scope.text(message).equals("never");
            return again
                ? ConsumeConcurrentlyStatus.RECONSUME_LATER
                : ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        inbox.await(4);
        readDead(scope);
    }

    /** Tells of the group's dead letters, of which there must be one. */
    private static void readDead(Scope scope) throws Exception {
        String dead = "%DLQ%" + scope.group("consumer");
        DefaultMQPullConsumer reader = scope.pullConsumer(scope.group("reader"));
        MessageQueue queue =
            Scope.await(() -> reader.fetchSubscribeMessageQueues(dead).iterator().next());
        PullResult pulled = Scope.await(() -> {
            PullResult result = reader.pull(queue, "*", 0, 32);
            return result.getMsgFoundList() == null ? null : result;
        });
        for (MessageExt message : pulled.getMsgFoundList()) {
            scope.saw("dead", message);
        }
    }

    /** Consumed in order, "never" is refused until it becomes a dead letter; others wait for it. */
    static void orderlyDead(Scope scope) throws Exception {
        DefaultMQProducer producer = scope.producer();
        producer.send(Scope.message(scope.topic(), "T", "founding"));
        MessageQueue queue = producer.fetchPublishMessageQueues(scope.topic()).get(0);
        for (String body : new String[] {"before", "never", "after"}) {
            scope.sent(body, producer.send(Scope.message(scope.topic(), "T", body), queue));
        }
        Inbox inbox = new Inbox(scope);
        DefaultMQPushConsumer consumer =
            scope.pushConsumer(scope.group("consumer"), scope.topic(), "*");
        consumer.setMaxReconsumeTimes(2);
        consumer.setSuspendCurrentQueueTimeMillis(50);
        consumer.setConsumeMessageBatchMaxSize(1);
        consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
            inbox.put("push", messages.get(0));
            return Scope.text(messages.get(0)).equals("never")
                ? ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT
                : ConsumeOrderlyStatus.SUCCESS;
        });
        consumer.start();
        inbox.await(new HashSet<>(Arrays.asList("after")));
        readDead(scope);
    }

    static void broadcasting(Scope scope) throws Exception {
        DefaultMQProducer producer = scope.producer();
        for (int i = 0; i < 6; i++) {
            scope.sent("b-" + i, producer.send(Scope.message(scope.topic(), "T", "b-" + i)));
        }
        Inbox inbox = new Inbox(scope);
        for (String name : new String[] {"first", "second"}) {
            DefaultMQPushConsumer consumer =
                scope.pushConsumer(scope.group("consumer"), scope.topic(), "*");
            broadcast(consumer);
            inbox.fill(name, consumer);
        }
        inbox.await(12);
    }

    /** The enumeration moved to another package in 5.0. */
    @SuppressWarnings({"unchecked", "rawtypes"})
    static void broadcast(DefaultMQPushConsumer consumer) throws Exception {
        for (Method method : DefaultMQPushConsumer.class.getMethods()) {
            if (method.getName().equals("setMessageModel")) {
                Class<? extends Enum> kind = (Class<? extends Enum>) method.getParameterTypes()[0];
                method.invoke(consumer, Enum.valueOf(kind, "BROADCASTING"));
            }
        }
    }

    /** Two consumers have half the queues each; when one leaves, the other has them all. */
    static void sharing(Scope scope) throws Exception {
        DefaultMQProducer producer = scope.producer();
        scope.sent("s-0", producer.send(Scope.message(scope.topic(), "T", "s-0")));
        Inbox inbox = new Inbox(scope);
        DefaultMQPushConsumer first = inbox.fill(
            "first", scope.pushConsumer(scope.group("consumer"), scope.topic(), "*"));
        awaitQueues(scope, first, QUEUES);  // it takes one after the other
        DefaultMQPushConsumer second = inbox.fill(
            "second", scope.pushConsumer(scope.group("consumer"), scope.topic(), "*"));
        awaitQueues(scope, first, QUEUES / 2);
        awaitQueues(scope, second, QUEUES / 2);
        scope.say("shared");
        inbox.await(sendToEach(scope, producer, 1));
        second.shutdown();
        long left = System.nanoTime();
        awaitQueues(scope, first, QUEUES);
        scope.say("left", "taken_over_after_ms", (System.nanoTime() - left) / 1_000_000);
        inbox.await(sendToEach(scope, producer, 1 + QUEUES));
    }

    private static Set<String> sendToEach(Scope scope, DefaultMQProducer producer, int number)
            throws Exception {
        Set<String> bodies = new HashSet<>();
        for (MessageQueue queue : producer.fetchPublishMessageQueues(scope.topic())) {
            String body = "s-" + number++;
            scope.sent(body, producer.send(Scope.message(scope.topic(), "T", body), queue));
            bodies.add(body);
        }
        return bodies;
    }

    private static void awaitQueues(Scope scope, DefaultMQPushConsumer consumer, int count)
            throws Exception {
        Scope.await(() -> {
            long owned = consumer.getDefaultMQPushConsumerImpl().getRebalanceImpl()
                .getProcessQueueTable().keySet().stream()
                .filter(queue -> queue.getTopic().equals(scope.topic())).count();
            return owned == count ? true : null;
        });
    }
}
