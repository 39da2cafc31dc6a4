import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashSet;
import java.util.List;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.message.Message;

/** Producers and consumers that write traces of what they do. */
final class Tracing {
    private Tracing() {
    }

    /** traced NAME [TRACE_TOPIC]: everything that leaves a trace, until the message "last" comes. */
    static void traced(Scope scope) throws Exception {
        String name = scope.argument(0);
        String traces = scope.arguments().length > 1 ? scope.argument(1) : null;
        String topic = scope.topic() + "-" + name;
        DefaultMQProducer producer = scope.started(scope.named(new DefaultMQProducer(
            scope.group("producer-" + name), scope.signing(), true, traces)));
        scope.sent("again", producer.send(Scope.message(topic, "T", "again")));
        List<Message> batch = new ArrayList<>();
        for (int i = 0; i < 2; i++) {
            batch.add(Scope.message(topic, "T", "batch-" + i));
        }
        scope.sent("batch", producer.send(batch));
        TransactionMQProducer deciding = scope.named(new TransactionMQProducer(
            null, scope.group("deciding-" + name), scope.signing(), true, traces));
        deciding.setTransactionListener(new Transactions.Listener(scope, 1));
        scope.started(deciding);
        for (String body : new String[] {"commit", "rollback", "unknown-commit"}) {
            scope.sent(body, deciding.sendMessageInTransaction(
                Scope.message(topic, "T", body), null));
        }
        DefaultMQPushConsumer consumer = scope.subscribed(new DefaultMQPushConsumer(
            scope.group("consumer-" + name), scope.signing(),
            new AllocateMessageQueueAveragely(), true, traces), topic, "*");
        Inbox inbox = new Inbox(scope);
        inbox.refuseOnce("push", consumer, "again");
        inbox.await(new HashSet<>(
            Arrays.asList("again", "batch-0", "batch-1", "commit", "unknown-commit")));
        scope.say("traced");
        while (!inbox.next().equals("last")) {
            continue;
        }
    }
}
