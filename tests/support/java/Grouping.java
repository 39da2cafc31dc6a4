import java.text.SimpleDateFormat;
import java.util.Arrays;
import java.util.Collections;
import java.util.Date;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.stream.Collectors;
import org.apache.rocketmq.client.consumer.AllocateMessageQueueStrategy;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMachineRoomNearby;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragelyByCircle;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueByConfig;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueByMachineRoom;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueConsistentHash;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/** Groups of push consumers: where they begin, how they share queues, what outlives a member. */
final class Grouping {
    private static final int POLL_MS = 20;
    private static final int QUEUES = 4;  // of a topic that a producer makes
    private static final long SECOND_MS = 1000;  // a start by time has no smaller unit

    private Grouping() {
    }

    /**
     * Groups that begin first, last and at a time. The topic was there before: where nothing is
     * gone yet, every new group gets all, whatever it asks for.
     */
    static void positions(Scope scope) throws Exception {
        DefaultMQProducer producer = scope.producer();
        producer.send(Scope.message(scope.topic(), "T", "founding"));
        List<MessageQueue> queues = producer.fetchPublishMessageQueues(scope.topic());
        sendToEach(scope, producer, queues, "old");
        DefaultMQAdminExt admin = scope.named(new DefaultMQAdminExt(scope.signing()));
        admin.start();
        scope.closeAtTheEnd(admin::shutdown);
        admin.deleteTopicInBroker(
            new HashSet<>(Arrays.asList(scope.namesrv())), scope.topic());
        sendToEach(scope, producer, queues, "early");
        Thread.sleep(2 * SECOND_MS);
        String time = new SimpleDateFormat("yyyyMMddHHmmss").format(new Date());
        sendToEach(scope, producer, queues, "late");
        Map<String, Inbox> inboxes = new LinkedHashMap<>();
        for (ConsumeFromWhere where : Arrays.asList(
                ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET,
                ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET,
                ConsumeFromWhere.CONSUME_FROM_TIMESTAMP)) {
            Inbox inbox = new Inbox(scope);
            DefaultMQPushConsumer consumer =
                scope.pushConsumer(scope.group(where.name()), scope.topic(), "*");
            consumer.setConsumeFromWhere(where);
            consumer.setConsumeTimestamp(time);
            inbox.fill(where.name(), consumer);
            awaitOwned(scope, consumer, false, QUEUES);
            inboxes.put(where.name(), inbox);
        }
        sendToEach(scope, producer, queues, "new");
        inboxes.get("CONSUME_FROM_FIRST_OFFSET").await(3 * QUEUES);
        inboxes.get("CONSUME_FROM_TIMESTAMP").await(3 * QUEUES);
        inboxes.get("CONSUME_FROM_LAST_OFFSET").await(3 * QUEUES);
    }

    private static void sendToEach(
            Scope scope, DefaultMQProducer producer, List<MessageQueue> queues, String word)
            throws Exception {
        for (int i = 0; i < QUEUES; i++) {
            String body = word + "-" + i;
            producer.send(Scope.message(scope.topic(), "T", body), queues.get(i));
        }
    }

    /** Two consumers share the queues by each of the official strategies. */
    static void strategies(Scope scope) throws Exception {
        DefaultMQProducer producer = scope.producer();
        producer.send(Scope.message(scope.topic(), "T", "founding"));
        List<MessageQueue> queues = producer.fetchPublishMessageQueues(scope.topic());
        for (String name : Arrays.asList(
                "averagely", "circle", "hash", "config", "room", "nearby")) {
            DefaultMQPushConsumer[] members = members(scope, name);
            for (int i = 0; i < members.length; i++) {
                members[i].setAllocateMessageQueueStrategy(strategy(name, i, members, queues));
            }
            share(scope, name, members);
        }
    }

    /** Two consumers (since 5.0) ask the broker which queues they own. */
    static void assigned(Scope scope) throws Exception {
        scope.producer().send(Scope.message(scope.topic(), "T", "founding"));
        for (String name : Arrays.asList("averagely", "circle")) {
            DefaultMQPushConsumer[] members = members(scope, name);
            for (DefaultMQPushConsumer member : members) {
                member.getClass().getMethod("setClientRebalance", boolean.class)
                    .invoke(member, false);
                member.setAllocateMessageQueueStrategy(strategy(name, 0, members, null));
            }
            share(scope, name, members);
        }
    }

    private static DefaultMQPushConsumer[] members(Scope scope, String name) throws Exception {
        DefaultMQPushConsumer[] members = new DefaultMQPushConsumer[2];
        for (int i = 0; i < members.length; i++) {
            members[i] = scope.pushConsumer(scope.group(name), scope.topic(), "*");
        }
        return members;
    }

    private static void share(Scope scope, String name, DefaultMQPushConsumer[] members)
            throws Exception {
        for (int i = 0; i < members.length; i++) {
            new Inbox(scope).fill(name + "-" + i, members[i]);
        }
        List<List<Integer>> shares = Scope.await(() -> shares(scope, members, name));
        for (int i = 0; i < members.length; i++) {
            scope.say("owns", "strategy", name, "member", i, "queues", shares.get(i).toString());
        }
    }

    /** What each owns, once every queue has one owner; null before. */
    private static List<List<Integer>> shares(
            Scope scope, DefaultMQPushConsumer[] members, String strategy) {
        List<Integer> first = owned(scope, members[0], false);
        List<Integer> second = owned(scope, members[1], false);
        Set<Integer> all = new HashSet<>(first);
        all.addAll(second);
        boolean settled = all.size() == QUEUES && first.size() + second.size() == QUEUES;
        // A hash may give all to one.
        boolean shared = strategy.equals("hash") || !first.isEmpty() && !second.isEmpty();
        return settled && shared ? Arrays.asList(first, second) : null;
    }

    private static AllocateMessageQueueStrategy strategy(
            String name, int member, DefaultMQPushConsumer[] members, List<MessageQueue> queues) {
        switch (name) {
            case "averagely":
                return new AllocateMessageQueueAveragely();
            case "circle":
                return new AllocateMessageQueueAveragelyByCircle();
            case "hash":
                return new AllocateMessageQueueConsistentHash();
            case "room":
                AllocateMessageQueueByMachineRoom room = new AllocateMessageQueueByMachineRoom();
                room.setConsumeridcs(Collections.singleton(
                    queues.get(0).getBrokerName().split("@")[0]));
                return room;
            case "nearby":
                return new AllocateMachineRoomNearby(
                    new AllocateMessageQueueAveragely(), rooms(members[0].buildMQClientId()));
            default:
                AllocateMessageQueueByConfig config = new AllocateMessageQueueByConfig();
                config.setMessageQueueList(
                    member == 0 ? queues.subList(3, QUEUES) : queues.subList(0, 3));
                return config;
        }
    }

    /** One room has the even queues and the consumer of this id; another one the rest. */
    private static AllocateMachineRoomNearby.MachineRoomResolver rooms(String client) {
        return new AllocateMachineRoomNearby.MachineRoomResolver() {
            @Override
            public String brokerDeployIn(MessageQueue queue) {
                return queue.getQueueId() % 2 == 0 ? "even" : "odd";
            }

            @Override
            public String consumerDeployIn(String clientId) {
                return clientId.equals(client) ? "even" : "odd";
            }
        };
    }

    /** member TOPIC GROUP KIND COUNTS: owns so many queues, one count after the other; reads all. */
    static void member(Scope scope) throws Exception {
        boolean orderly = scope.argument(2).equals("orderly");
        DefaultMQPushConsumer consumer =
            scope.pushConsumer(scope.argument(1), scope.argument(0), "*");
        Inbox inbox = new Inbox(scope);
        if (orderly) {
            consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
                messages.forEach(message -> inbox.put("member", message));
                return ConsumeOrderlyStatus.SUCCESS;
            });
            consumer.start();
        } else {
            inbox.fill("member", consumer);
        }
        for (String count : scope.argument(3).split(",")) {
            awaitOwned(scope, scope.argument(0), consumer, orderly, Integer.parseInt(count));
            scope.say("owns", "count", Integer.parseInt(count));
        }
        Set<String> rest = new HashSet<>();
        for (int i = 0; i < 2 * QUEUES; i++) {
            rest.addAll(Arrays.asList("after-" + i, "last-" + i));
        }
        inbox.await(rest);
    }

    /** share TOPIC GROUP: reads as long as it runs; says its queues whenever they change. */
    static void share(Scope scope) throws Exception {
        String topic = scope.argument(0);
        DefaultMQPushConsumer consumer = scope.pushConsumer(scope.argument(1), topic, "*");
        new Inbox(scope).fill("share", consumer);
        for (List<Integer> before = null; ; Thread.sleep(POLL_MS)) {
            List<Integer> queues = owned(topic, consumer, false);
            if (!queues.equals(before)) {
                scope.say("owns", "queues", queues.toString());
                before = queues;
            }
        }
    }

    /** consume_status TOPIC GROUP CLIENT: the offsets that the broker gets from that client. */
    static void consumeStatus(Scope scope) throws Exception {
        DefaultMQAdminExt admin = scope.named(new DefaultMQAdminExt(scope.signing()));
        admin.start();
        scope.closeAtTheEnd(admin::shutdown);
        Map<String, Map<MessageQueue, Long>> clients =
            admin.getConsumeStatus(scope.argument(0), scope.argument(1), scope.argument(2));
        clients.forEach((client, offsets) -> offsets.forEach((queue, offset) ->
            scope.say("offset", "client", client, "queue", queue.getQueueId(), "offset", offset)));
    }

    private static void awaitOwned(
            Scope scope, DefaultMQPushConsumer consumer, boolean locked, int count)
            throws Exception {
        awaitOwned(scope, scope.topic(), consumer, locked, count);
    }

    private static void awaitOwned(
            Scope scope, String topic, DefaultMQPushConsumer consumer, boolean locked, int count)
            throws Exception {
        Scope.await(() -> owned(topic, consumer, locked).size() == count ? true : null);
    }

    private static List<Integer> owned(
            Scope scope, DefaultMQPushConsumer consumer, boolean locked) {
        return owned(scope.topic(), consumer, locked);
    }

    /** Queue ids that a consumer reads; of an orderly one, that it has locked. */
    private static List<Integer> owned(
            String topic, DefaultMQPushConsumer consumer, boolean locked) {
        return consumer.getDefaultMQPushConsumerImpl().getRebalanceImpl()
            .getProcessQueueTable().entrySet().stream()
            .filter(entry -> entry.getKey().getTopic().equals(topic))
            .filter(entry -> !locked || entry.getValue().isLocked())
            .map(entry -> entry.getKey().getQueueId()).sorted().collect(Collectors.toList());
    }
}
