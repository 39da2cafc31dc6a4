import java.util.HashSet;
import java.util.Set;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.common.message.MessageRequestMode;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/** Push consumers that the broker tells to pop. */
final class Popping {
    private static final int MEMBERS = 6;  // more than queues
    private static final int MESSAGES = 24;

    private Popping() {
    }

    /** All messages come to some member; one of each member comes again to some member. */
    static void popping(Scope scope) throws Exception {
        String group = scope.group("consumer");
        DefaultMQProducer producer = scope.producer();
        producer.send(Scope.message(scope.topic(), "T", "p-0"));
        DefaultMQAdminExt admin = scope.named(new DefaultMQAdminExt(scope.signing()));
        admin.start();
        admin.setMessageRequestMode(
            scope.namesrv(), scope.topic(), group, MessageRequestMode.POP, 0, 20_000);
        admin.shutdown();
        Inbox inbox = new Inbox(scope);
        for (int i = 0; i < MEMBERS; i++) {
            String name = "member-" + i;
            DefaultMQPushConsumer member = scope.pushConsumer(group, scope.topic(), "*");
            member.setClientRebalance(false);
            member.setPopBatchNums(1);
            member.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                messages.forEach(message -> inbox.put(name, message));
                return messages.get(0).getReconsumeTimes() == 0
                        && Scope.text(messages.get(0)).endsWith("0")
                    ? ConsumeConcurrentlyStatus.RECONSUME_LATER
                    : ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
            member.start();
        }
        Set<String> bodies = new HashSet<>();
        for (int i = 1; i < MESSAGES; i++) {
            bodies.add("p-" + i);
            producer.send(Scope.message(scope.topic(), "T", "p-" + i));
        }
        inbox.await(bodies);
        int again = 0;
        while (again < 3) {  // p-0, p-10 and p-20, ten seconds after the first time
            again += inbox.next().endsWith("0") ? 1 : 0;
        }
    }

    /** A lite pull consumer of a group that pops: it asks nobody, and pulls and commits. */
    static void litePulling(Scope scope) throws Exception {
        String group = scope.group("consumer");
        DefaultMQProducer producer = scope.producer();
        for (int i = 0; i < 8; i++) {
            producer.send(Scope.message(scope.topic(), "T", "l-" + i));
        }
        DefaultMQAdminExt admin = scope.named(new DefaultMQAdminExt(scope.signing()));
        admin.start();
        admin.setMessageRequestMode(
            scope.namesrv(), scope.topic(), group, MessageRequestMode.POP, 0, 20_000);
        admin.shutdown();
        DefaultLitePullConsumer consumer =
            scope.named(new DefaultLitePullConsumer(group, scope.signing()));
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setAutoCommit(false);
        consumer.subscribe(scope.topic(), "*");
        consumer.start();
        long deadline = System.currentTimeMillis() + Scope.WAIT_MS;
        int seen = 0;
        while (seen < 8 && System.currentTimeMillis() < deadline) {
            for (MessageExt message : consumer.poll(1000)) {
                scope.saw("polled", message);
                seen++;
            }
        }
        consumer.commitSync();
        for (MessageQueue queue : consumer.fetchMessageQueues(scope.topic())) {
            scope.say("committed", "queue_offset", consumer.committed(queue));
        }
        consumer.shutdown();
    }
}
