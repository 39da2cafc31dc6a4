import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.producer.TransactionSendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** Transactional producers. The body of a message says what becomes of it. */
final class Transactions {
    private static final int DIED = 3;  // exit status

    private Transactions() {
    }

    /** Decides by the words of the body: LOCAL or LOCAL-CHECK, such as "unknown-commit". */
    static class Listener implements TransactionListener {
        final CountDownLatch decided;
        private final Scope scope;
        private final Map<String, Integer> asked = new ConcurrentHashMap<>();

        Listener(Scope scope, int decisions) {
            this.scope = scope;
            this.decided = new CountDownLatch(decisions);
        }

        @Override
        public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
            switch (Scope.text(message).split("-")[0]) {
                case "commit":
                    return LocalTransactionState.COMMIT_MESSAGE;
                case "rollback":
                    return LocalTransactionState.ROLLBACK_MESSAGE;
                case "exception":
                    throw new IllegalStateException("the local transaction fails");
                default:
                    return LocalTransactionState.UNKNOW;
            }
        }

        @Override
        public LocalTransactionState checkLocalTransaction(MessageExt message) {
            String body = Scope.text(message);
            int times = asked.merge(body, 1, Integer::sum);
            scope.saw("checked", message, "asked", times);
            if (body.endsWith("late") && times == 1) {
                return LocalTransactionState.UNKNOW;
            }
            decided.countDown();
            return body.endsWith("rollback")
                ? LocalTransactionState.ROLLBACK_MESSAGE
                : LocalTransactionState.COMMIT_MESSAGE;
        }
    }

    static void transactions(Scope scope) throws Exception {
        Listener listener = new Listener(scope, 4);
        TransactionMQProducer producer = scope.producer(scope.group("producer"), listener);
        String[] bodies = {"commit", "rollback", "unknown-commit", "unknown-rollback",
            "unknown-late", "exception-commit"};
        for (String body : bodies) {
            inTransaction(scope, producer, body);
        }
        Inbox inbox = new Inbox(scope);
        inbox.fill("push", scope.pushConsumer(scope.group("consumer"), scope.topic(), "*"));
        inbox.await(4);
        if (!listener.decided.await(Scope.WAIT_MS, TimeUnit.MILLISECONDS)) {
            throw new IllegalStateException("a transaction was not asked about");
        }
        // Whoever sees these has seen all that lies before them in every queue.
        for (MessageQueue queue : producer.fetchPublishMessageQueues(scope.topic())) {
            producer.send(Scope.message(scope.topic(), "T", "marker"), queue);
        }
        for (int markers = 0; markers < 4; ) {
            markers += inbox.next().equals("marker") ? 1 : 0;
        }
    }

    private static void inTransaction(Scope scope, TransactionMQProducer producer, String body)
            throws Exception {
        Message message = Scope.message(scope.topic(), "T", body);
        message.putUserProperty("colour", "gr\u00fcn-\u20ac");
        TransactionSendResult result = producer.sendMessageInTransaction(message, null);
        scope.say("decided", "body", body, "state", result.getLocalTransactionState().name(),
            "status", result.getSendStatus().name(), "id", result.getMsgId(),
            "queue", result.getMessageQueue().getQueueId());
    }

    /** One of two producers leaves its transactions undecided; the other one is asked. */
    static void leaving(Scope scope) throws Exception {
        String group = scope.group("producer");
        TransactionMQProducer leaving = scope.producer(group, new Listener(scope, 0));
        Listener listener = new Listener(scope, 2);
        TransactionMQProducer staying = scope.producer(group, listener);
        staying.send(Scope.message(scope.topic(), "T", "hello"));
        for (String body : new String[] {"unknown-commit", "unknown-rollback"}) {
            inTransaction(scope, leaving, body);
        }
        leaving.shutdown();
        scope.say("left");
        Inbox inbox = new Inbox(scope);
        inbox.fill("push", scope.pushConsumer(scope.group("consumer"), scope.topic(), "*"));
        inbox.await(2);
        if (!listener.decided.await(Scope.WAIT_MS, TimeUnit.MILLISECONDS)) {
            throw new IllegalStateException("a transaction was not asked about");
        }
    }

    /** die_undecided TOPIC GROUP: the process ends between half message and decision. */
    static void dieUndecided(Scope scope) throws Exception {
        TransactionListener listener = new Listener(scope, 0) {
            @Override
            public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
                scope.say("dying", "body", Scope.text(message), "id", message.getTransactionId());
                Runtime.getRuntime().halt(DIED);
                return null;
            }
        };
        TransactionMQProducer producer = scope.producer(scope.argument(1), listener);
        producer.sendMessageInTransaction(
            Scope.message(scope.argument(0), "T", "undecided-commit"), null);
    }

    /** take_over TOPIC GROUP: another member of the group is asked, and the message appears. */
    static void takeOver(Scope scope) throws Exception {
        Listener listener = new Listener(scope, 1);
        TransactionMQProducer producer = scope.producer(scope.argument(1), listener);
        // It knows no broker, and none knows it, before it sends.
        producer.send(Scope.message(scope.argument(0), "T", "hello"));
        Inbox inbox = new Inbox(scope);
        inbox.fill("push", scope.pushConsumer(scope.group("consumer"), scope.argument(0), "*"));
        inbox.await(2);
    }

    /** undecided TOPIC GROUP BODY: leaves a message undecided, whenever asked, as long as it runs. */
    static void undecided(Scope scope) throws Exception {
        TransactionListener listener = new Listener(scope, 0) {
            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                scope.saw("checked", message);
                return LocalTransactionState.UNKNOW;
            }
        };
        TransactionMQProducer producer = scope.producer(scope.argument(1), listener);
        Message message = Scope.message(scope.argument(0), "T", scope.argument(2));
        scope.sent(scope.argument(2), producer.sendMessageInTransaction(message, null));
        new CountDownLatch(1).await();
    }
}
