import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.selector.SelectMessageQueueByHash;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/** What a producer may choose, and what it is refused. */
final class Producing {
    private static final int COMPRESSED_SIZE = 6000;  // bytes; clients compress from 4096 on
    private static final int PACE_MS = 5;  // between two messages of an endless run
    private static final int BODY_MAX = 4 << 20;  // bytes; the broker's default

    private Producing() {
    }

    /** compress TOPIC: a body in each way that the client knows; by default only zlib. */
    static void compress(Scope scope) throws Exception {
        String topic = scope.argument(0);
        byte[] even = new byte[COMPRESSED_SIZE];
        Arrays.fill(even, (byte) 'a');
        for (String type : new String[] {"ZLIB", "LZ4", "ZSTD"}) {
            // Producers read it when they are made. The setter of 4.9 changes only the flag.
            System.setProperty("rocketmq.message.compressType", type);
            DefaultMQProducer producer = scope.producer(scope.group("producer-" + type));
            scope.sent(type, producer.send(new Message(topic, type, type, even)));
        }
        System.clearProperty("rocketmq.message.compressType");
        Inbox inbox = new Inbox(scope);
        inbox.fill("push", scope.pushConsumer(scope.group("consumer"), topic, "*"));
        scope.say("made", "crc", Scope.checksum(even));
        inbox.await(3);
    }

    /** Queues chosen by the caller, by a hash of a key, and one after the other. */
    static void queues(Scope scope) throws Exception {
        DefaultMQProducer producer = scope.producer();
        scope.sent("first", producer.send(Scope.message(scope.topic(), "T", "first")));
        List<MessageQueue> queues =
            new ArrayList<>(producer.fetchPublishMessageQueues(scope.topic()));
        for (MessageQueue queue : queues) {
            String body = "chosen-" + queue.getQueueId();
            scope.sent(body, producer.send(Scope.message(scope.topic(), "T", body), queue));
        }
        for (int i = 0; i < 6; i++) {
            String body = "keyed-" + i % 2 + "-" + i / 2;
            scope.sent(body, producer.send(Scope.message(scope.topic(), "T", body),
                new SelectMessageQueueByHash(), "key-" + i % 2));
        }
        for (int i = 0; i < 8; i++) {
            scope.sent("any-" + i, producer.send(Scope.message(scope.topic(), "T", "any-" + i)));
        }
        Inbox inbox = new Inbox(scope);
        inbox.fill("push", scope.pushConsumer(scope.group("consumer"), scope.topic(), "*"));
        inbox.await(1 + queues.size() + 6 + 8);
    }

    /** What the broker refuses, and that the connection goes on. */
    static void limits(Scope scope) throws Exception {
        DefaultMQProducer producer = scope.producer();
        producer.setMaxMessageSize(2 * BODY_MAX);
        producer.setRetryTimesWhenSendFailed(0);
        producer.setCompressMsgBodyOverHowmuch(Integer.MAX_VALUE);
        String topic = scope.topic();
        scope.sent("largest", producer.send(new Message(topic, new byte[BODY_MAX])));
        attempt(scope, producer, "body", new Message(topic, new byte[BODY_MAX + 1]));
        List<Message> batch = new ArrayList<>();
        for (int i = 0; i < 5; i++) {
            batch.add(new Message(topic, new byte[1 << 20]));
        }
        try {
            producer.send(batch);
            scope.say("refused", "what", "batch", "code", 0);
        } catch (Exception failure) {
            refused(scope, "batch", failure);
        }
        attempt(scope, producer, "system", Scope.message("SCHEDULE_TOPIC_XXXX", "T", "system"));
        attempt(scope, producer, "name", Scope.message("not a name", "T", "name"));
        scope.sent("after", producer.send(Scope.message(topic, "T", "after")));
    }

    private static void attempt(
            Scope scope, DefaultMQProducer producer, String what, Message message) {
        try {
            producer.send(message);
            scope.say("refused", "what", what, "code", 0);
        } catch (Exception failure) {
            refused(scope, what, failure);
        }
    }

    private static void refused(Scope scope, String what, Throwable failure) {
        for (Throwable cause = failure; cause != null; cause = cause.getCause()) {
            if (cause instanceof MQBrokerException) {
                MQBrokerException refusal = (MQBrokerException) cause;
                scope.say("refused", "what", what, "code", refusal.getResponseCode(),
                    "text", refusal.getErrorMessage());
                return;
            }
        }
        int code = failure instanceof MQClientException
            ? ((MQClientException) failure).getResponseCode() : -1;
        scope.say("refused", "what", what, "code", code, "text", String.valueOf(failure));
    }

    /** Topics made by a first message, with queues and rights of the topic they are made after. */
    static void created(Scope scope) throws Exception {
        DefaultMQAdminExt admin = scope.named(new DefaultMQAdminExt(scope.signing()));
        admin.start();
        scope.closeAtTheEnd(admin::shutdown);
        String broker = scope.namesrv();  // both are one address
        admin.createAndUpdateTopicConfig(broker, new TopicConfig("java-template", 3, 3, 7));
        DefaultMQProducer few = scope.producer(scope.group("few"));
        few.setDefaultTopicQueueNums(2);
        DefaultMQProducer many = scope.producer(scope.group("many"));
        many.setDefaultTopicQueueNums(100);
        DefaultMQProducer after = scope.producer(scope.group("after"));
        after.setCreateTopicKey("java-template");
        for (DefaultMQProducer producer : new DefaultMQProducer[] {few, many, after}) {
            String topic = producer.getProducerGroup() + "-topic";
            attempt(scope, producer, topic, Scope.message(topic, "T", "first"));
            describe(scope, admin, broker, topic);
        }
    }

    private static void describe(
            Scope scope, DefaultMQAdminExt admin, String broker, String topic) {
        try {
            TopicConfig made = admin.examineTopicConfig(broker, topic);
            scope.say("topic", "topic", topic, "read", made.getReadQueueNums(),
                "write", made.getWriteQueueNums(), "perm", made.getPerm());
        } catch (Exception failure) {
            scope.say("topic", "topic", topic, "failure", String.valueOf(failure));
        }
    }

    /** Two producers and consumers of the same names, in two namespaces. */
    static void namespaces(Scope scope) throws Exception {
        for (String space : new String[] {"red", "blue"}) {
            DefaultMQProducer producer = scope.named(Scope.inNamespace(
                space, new DefaultMQProducer(scope.group("producer"), scope.signing())));
            producer.start();
            scope.closeAtTheEnd(producer::shutdown);
            SendResult result = producer.send(Scope.message(scope.topic(), "T", space));
            scope.sent(space, result);
            Inbox inbox = new Inbox(scope);
            inbox.refuseOnce(space, scope.pushConsumer(
                space, scope.group("consumer"), scope.topic(), "*"));
            inbox.await(2);
        }
    }

    /** Over the channel for producers that are important, two ports below. */
    static void vip(Scope scope) throws Exception {
        DefaultMQProducer producer = scope.named(
            new DefaultMQProducer(scope.group("producer"), scope.signing()));
        producer.setVipChannelEnabled(true);
        producer.start();
        scope.closeAtTheEnd(producer::shutdown);
        scope.sent("vip", producer.send(Scope.message(scope.topic(), "T", "vip")));
        Inbox inbox = new Inbox(scope);
        inbox.fill("push", scope.pushConsumer(scope.group("consumer"), scope.topic(), "*"));
        inbox.await(1);
    }

    /** retrying TOPIC RETRIES: sends one message after the other; a send that fails ends it. */
    static void retrying(Scope scope) throws Exception {
        DefaultMQProducer producer = scope.producer();
        producer.setRetryTimesWhenSendFailed(Integer.parseInt(scope.argument(1)));
        producer.setSendMsgTimeout((int) Scope.WAIT_MS);
        for (int i = 0; ; i++) {
            String body = "r-" + i;
            scope.sent(body, producer.send(Scope.message(scope.argument(0), "T", body)));
            Thread.sleep(PACE_MS);
        }
    }

    /** unknown TOPIC: a send to a topic that nobody makes; what the client says. */
    static void unknown(Scope scope) throws Exception {
        attempt(scope, scope.producer(), "unknown",
            Scope.message(scope.argument(0), "T", "unknown"));
    }
}
