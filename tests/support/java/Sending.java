import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Random;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.remoting.protocol.RemotingCommand;

/** Every way to send, and to find what was sent. */
final class Sending {
    private static final int COMPRESSED_SIZE = 6000;  // bytes; clients compress from 4096 on
    private static final int BIG_SIZE = 3 << 20;  // bytes that do not get smaller by compression

    private Sending() {
    }

    static void send(Scope scope) throws Exception {
        DefaultMQProducer producer = scope.producer();
        scope.say("client", "vip_channel", producer.isVipChannelEnabled(),
            "headers", RemotingCommand.getSerializeTypeConfigInThisServer().name());
        String[] tags = {"A", "B", "C"};
        for (int i = 0; i < 3; i++) {
            Message message = Scope.message(scope.topic(), tags[i], "sync-" + i);
            message.putUserProperty("colour", "gr\u00fcn-\u20ac");
            scope.sent(Scope.text(message), producer.send(message));
        }
        CountDownLatch answers = new CountDownLatch(3);
        for (int i = 0; i < 3; i++) {
            String body = "async-" + i;
            producer.send(Scope.message(scope.topic(), tags[i], body), told(scope, body, answers));
        }
        if (!answers.await(Scope.WAIT_MS, TimeUnit.MILLISECONDS)) {
            throw new IllegalStateException("no answer to an asynchronous send");
        }
        producer.sendOneway(Scope.message(scope.topic(), "A", "one-way"));
        Inbox inbox = new Inbox(scope);
        inbox.fill("push", scope.pushConsumer(scope.group("consumer"), scope.topic(), "A || B"));
        inbox.await(5);
    }

    private static SendCallback told(Scope scope, String body, CountDownLatch answers) {
        return new SendCallback() {
            @Override
            public void onSuccess(SendResult result) {
                scope.sent(body, result);
                answers.countDown();
            }

            @Override
            public void onException(Throwable failure) {
                failure.printStackTrace();
            }
        };
    }

    static void batch(Scope scope) throws Exception {
        DefaultMQProducer producer = scope.producer();
        List<Message> messages = new ArrayList<>();
        for (int i = 0; i < 5; i++) {
            messages.add(Scope.message(scope.topic(), "T" + i, "batch-" + i));
        }
        scope.sent("batch", producer.send(messages));
        Inbox inbox = new Inbox(scope);
        inbox.fill("push", scope.pushConsumer(scope.group("consumer"), scope.topic(), "*"));
        inbox.await(5);
    }

    static void delay(Scope scope) throws Exception {
        DefaultMQProducer producer = scope.producer();
        Message later = Scope.message(scope.topic(), "T", "later");
        later.setDelayTimeLevel(2);
        scope.sent("later", producer.send(later));
        scope.sent("now", producer.send(Scope.message(scope.topic(), "T", "now")));
        Inbox inbox = new Inbox(scope);
        inbox.fill("push", scope.pushConsumer(scope.group("consumer"), scope.topic(), "*"));
        inbox.await(2);
    }

    /** Delivery at any time, and a recall; since 5.0 and 5.3.2, so not known to the compiler. */
    static void timers(Scope scope) throws Exception {
        DefaultMQProducer producer = scope.producer();
        scope.sent("now", producer.send(Scope.message(scope.topic(), "T", "now")));
        long at = System.currentTimeMillis() + 1234;
        SendResult kept = producer.send(timed(scope, "setDeliverTimeMs", at, "at"));
        scope.sent("at", kept);
        scope.sent("after", producer.send(timed(scope, "setDelayTimeMs", 777, "after")));
        SendResult sent = producer.send(timed(scope, "setDelayTimeMs", 2000, "recalled"));
        scope.say("due", "at", at);
        scope.say("recalled", "id", recall(producer, scope.topic(), sent), "sent", sent.getMsgId());
        Inbox inbox = new Inbox(scope);
        inbox.fill("push", scope.pushConsumer(scope.group("consumer"), scope.topic(), "*"));
        inbox.await(3);
        try {
            scope.say("late", "id", recall(producer, scope.topic(), kept), "code", 0);
        } catch (java.lang.reflect.InvocationTargetException error) {
            MQBrokerException cause = (MQBrokerException) error.getCause();
            scope.say("late", "code", cause.getResponseCode());
        }
    }

    private static Message timed(Scope scope, String setter, long ms, String body)
        throws Exception {
        Message message = Scope.message(scope.topic(), "T", body);
        Message.class.getMethod(setter, long.class).invoke(message, ms);
        return message;
    }

    private static Object recall(DefaultMQProducer producer, String topic, SendResult sent)
        throws Exception {
        Object handle = SendResult.class.getMethod("getRecallHandle").invoke(sent);
        return DefaultMQProducer.class.getMethod("recallMessage", String.class, String.class)
            .invoke(producer, topic, handle);
    }

    static void sizes(Scope scope) throws Exception {
        DefaultMQProducer producer = scope.producer();
        byte[] even = new byte[COMPRESSED_SIZE];
        Arrays.fill(even, (byte) 'a');
        byte[] big = new byte[BIG_SIZE];
        new Random(1).nextBytes(big);
        scope.say("made", "even", Scope.checksum(even), "big", Scope.checksum(big));
        scope.sent("even", producer.send(new Message(scope.topic(), even)));
        scope.sent("big", producer.send(new Message(scope.topic(), big)));
        Inbox inbox = new Inbox(scope);
        inbox.fill("push", scope.pushConsumer(scope.group("consumer"), scope.topic(), "*"));
        inbox.await(2);
    }

    static void refused(Scope scope) throws Exception {
        DefaultMQProducer producer = scope.producer();
        char[] text = new char[1 << 15];
        Arrays.fill(text, 'x');
        Message message = Scope.message(scope.topic(), "T", "properties");
        message.putUserProperty("long", new String(text));
        try {
            producer.send(message);
        } catch (MQBrokerException refusal) {
            scope.say("refused", "code", refusal.getResponseCode());
        }
        scope.sent("after", producer.send(Scope.message(scope.topic(), "T", "after")));
    }

    static void lookUp(Scope scope) throws Exception {
        DefaultMQProducer producer = scope.producer();
        long begin = System.currentTimeMillis() - 60_000;
        List<SendResult> results = new ArrayList<>();
        for (int i = 0; i < 3; i++) {
            Message message = Scope.message(scope.topic(), "T", "look-up-" + i);
            message.setKeys(Arrays.asList("customer-" + i % 2, "invoice-" + i));
            results.add(producer.send(message));
            scope.sent(Scope.text(message), results.get(i));
        }
        for (SendResult result : results) {
            scope.saw("by_offset_id", producer.viewMessage(scope.topic(), result.getOffsetMsgId()));
            // Its index entry is made just after the answer to the send.
            scope.saw("by_unique_key", Scope.await(
                () -> producer.viewMessage(scope.topic(), result.getMsgId())));
        }
        long end = System.currentTimeMillis() + 60_000;
        for (String key : new String[] {"customer-0", "customer-1", "invoice-2"}) {
            for (MessageExt found
                    : producer.queryMessage(scope.topic(), key, 10, begin, end).getMessageList()) {
                scope.saw("by_key", found, "key", key);
            }
        }
    }

    /** produce TOPIC: one plain, one compressed, three in a batch. */
    static void produce(Scope scope) throws Exception {
        DefaultMQProducer producer = scope.producer();
        String topic = scope.argument(0);
        byte[] even = new byte[COMPRESSED_SIZE];
        Arrays.fill(even, (byte) 'a');
        Message plain = Scope.message(topic, "A", "plain");
        plain.putUserProperty("colour", "gr\u00fcn-\u20ac");
        scope.sent("plain", producer.send(plain));
        scope.sent("even", producer.send(new Message(topic, "B", "even", even)));
        List<Message> batch = new ArrayList<>();
        for (int i = 0; i < 3; i++) {
            batch.add(Scope.message(topic, "C", "batch-" + i));
        }
        scope.sent("batch", producer.send(batch));
    }
}
