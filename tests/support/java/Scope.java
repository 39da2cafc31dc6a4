import java.io.PrintStream;
import java.lang.management.ManagementFactory;
import java.nio.charset.StandardCharsets;
import java.util.ArrayDeque;
import java.util.Arrays;
import java.util.Deque;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.concurrent.Callable;
import java.util.zip.CRC32;
import org.apache.rocketmq.acl.common.AclClientRPCHook;
import org.apache.rocketmq.acl.common.SessionCredentials;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageClientExt;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.remoting.RPCHook;

/**
 * What one run of a scenario has: its names, its clients, which end with it, and its output.
 *
 * Clients sign with the system properties halfmq.accessKey and halfmq.secretKey if they are set, or
 * with the keys that a scenario chooses.
 */
final class Scope implements AutoCloseable {
    // For what is expected to happen; a busy machine is slow.
    static final long WAIT_MS = Integer.getInteger("patience", 60) * 1000L;
    private static final int HEARTBEAT_MS = 1000;  // instead of 30 s: a producer is known by it
    private static final int API_MS = 20_000;  // instead of 3 s, in which a busy machine starts none
    private static final int POLL_MS = 20;
    private static final int TEXT_SIZE = 200;  // bytes; larger bodies are told by size and checksum

    final String run;
    final String scenario;
    private final String namesrv;
    private final String[] command;
    private final Deque<Runnable> closers = new ArrayDeque<>();
    private static final String PROCESS =
        ManagementFactory.getRuntimeMXBean().getName().split("@")[0];
    private static final PrintStream OUTPUT = System.out;  // mqadmin's own output is taken away
    private RPCHook signing = signing(
        System.getProperty("halfmq.accessKey", ""), System.getProperty("halfmq.secretKey", ""));
    private int clients;

    Scope(String namesrv, String[] command) {
        this.namesrv = namesrv;
        this.command = command;
        this.run = command[0];
        this.scenario = command[1];
    }

    String argument(int index) {
        return command[2 + index];
    }

    String[] arguments() {
        return Arrays.copyOfRange(command, 2, command.length);
    }

    /** How a client signs; null without a key: it does not. */
    private static RPCHook signing(String key, String secret) {
        return key.isEmpty() ? null : new AclClientRPCHook(new SessionCredentials(key, secret));
    }

    /** Clients made from now on sign with these keys. */
    void signWith(String key, String secret) {
        signing = signing(key, secret);
    }

    RPCHook signing() {
        return signing;
    }

    String namesrv() {
        return namesrv;
    }

    /** The topic of the run: no other run sends to it. */
    String topic() {
        return "java-" + scenario;
    }

    String group(String role) {
        return "java-" + scenario + "-" + role;
    }

    /**
     * Settings of every client. Its id is the address of the host with its name: two processes
     * would be one client, and old versions share a connection, unless the names differ.
     */
    <C extends ClientConfig> C named(C client) {
        client.setNamesrvAddr(namesrv);
        client.setInstanceName(PROCESS + "-run" + run + "-" + clients++);
        client.setHeartbeatBrokerInterval(HEARTBEAT_MS);
        try {
            client.getClass().getMethod("setMqClientApiTimeout", int.class).invoke(client, API_MS);
        } catch (ReflectiveOperationException missing) {
            // Old versions do not have the setting.
        }
        return client;
    }

    DefaultMQProducer producer() throws Exception {
        return producer(group("producer"));
    }

    DefaultMQProducer producer(String group) throws Exception {
        return started(named(new DefaultMQProducer(group, signing)));
    }

    TransactionMQProducer producer(String group, TransactionListener listener) throws Exception {
        TransactionMQProducer producer = named(new TransactionMQProducer(group, signing));
        producer.setTransactionListener(listener);
        return started(producer);
    }

    <P extends DefaultMQProducer> P started(P producer) throws Exception {
        producer.setSendMsgTimeout(10_000);
        producer.start();
        closers.push(producer::shutdown);
        return producer;
    }

    /** Not started: the scenario sets its model and listener first. */
    DefaultMQPushConsumer pushConsumer(String group, String topic, String expression)
            throws Exception {
        return subscribed(
            new DefaultMQPushConsumer(group, signing, new AllocateMessageQueueAveragely()),
            topic, expression);
    }

    DefaultMQPushConsumer pushConsumer(
            String namespace, String group, String topic, String expression) throws Exception {
        return subscribed(inNamespace(namespace, new DefaultMQPushConsumer(
            group, signing, new AllocateMessageQueueAveragely())), topic, expression);
    }

    /** By name, for clients up to 4.4 know no namespaces. */
    static <C> C inNamespace(String namespace, C client) throws Exception {
        client.getClass().getMethod("setNamespace", String.class).invoke(client, namespace);
        return client;
    }

    DefaultMQPushConsumer subscribed(
            DefaultMQPushConsumer made, String topic, String expression) throws Exception {
        DefaultMQPushConsumer consumer = named(made);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(topic, expression);
        closers.push(consumer::shutdown);
        return consumer;
    }

    DefaultMQPullConsumer pullConsumer(String group) throws Exception {
        DefaultMQPullConsumer consumer = named(new DefaultMQPullConsumer(group, signing));
        consumer.start();
        closers.push(consumer::shutdown);
        return consumer;
    }

    void closeAtTheEnd(Runnable closer) {
        closers.push(closer);
    }

    @Override
    public void close() {
        while (!closers.isEmpty()) {
            closers.pop().run();
        }
    }

    /** Ask until the answer is not null; a failure counts as not yet, the last one is thrown. */
    static <T> T await(Callable<T> question) throws Exception {
        long deadline = System.currentTimeMillis() + WAIT_MS;
        Exception last = new IllegalStateException("did not happen in time");
        while (System.currentTimeMillis() < deadline) {
            try {
                T answer = question.call();
                if (answer != null) {
                    return answer;
                }
            } catch (Exception failure) {
                last = failure;
            }
            Thread.sleep(POLL_MS);
        }
        throw last;
    }

    static Message message(String topic, String tags, String body) {
        return new Message(topic, tags, body, body.getBytes(StandardCharsets.UTF_8));
    }

    static String text(Message message) {
        return new String(message.getBody(), StandardCharsets.UTF_8);
    }

    static long checksum(byte[] body) {
        CRC32 checksum = new CRC32();
        checksum.update(body);
        return checksum.getValue();
    }

    void say(String event, Object... pairs) {
        say(event, new LinkedHashMap<>(), pairs);
    }

    void sent(String body, SendResult result) {
        say("sent", "body", body, "status", result.getSendStatus().name(),
            "id", result.getMsgId(), "offset_id", result.getOffsetMsgId(),
            "queue", result.getMessageQueue().getQueueId(),
            "queue_offset", result.getQueueOffset(), "transaction_id", result.getTransactionId());
    }

    void saw(String event, MessageExt message, Object... pairs) {
        Map<String, Object> fields = new LinkedHashMap<>();
        fields.put("topic", message.getTopic());
        fields.put("body", message.getBody().length <= TEXT_SIZE ? text(message) : null);
        fields.put("size", message.getBody().length);
        fields.put("crc", checksum(message.getBody()));
        fields.put("tags", message.getTags());
        fields.put("keys", message.getKeys());
        fields.put("colour", message.getUserProperty("colour"));
        fields.put("id", message.getMsgId());
        if (message instanceof MessageClientExt) {
            fields.put("offset_id", ((MessageClientExt) message).getOffsetMsgId());
        }
        fields.put("queue", message.getQueueId());
        fields.put("queue_offset", message.getQueueOffset());
        fields.put("times", message.getReconsumeTimes());
        fields.put("sys_flag", message.getSysFlag());
        fields.put("born_ms", message.getBornTimestamp());
        fields.put("store_ms", message.getStoreTimestamp());
        fields.put("transaction_id", message.getTransactionId());
        say(event, fields, pairs);
    }

    private void say(String event, Map<String, Object> fields, Object... pairs) {
        Map<String, Object> line = new LinkedHashMap<>();
        line.put("run", run);
        line.put("event", event);
        line.putAll(fields);
        for (int i = 0; i < pairs.length; i += 2) {
            line.put((String) pairs[i], pairs[i + 1]);
        }
        OUTPUT.println(Json.object(line));  // one call per line: PrintStream writes it whole
    }
}
