import java.io.ByteArrayOutputStream;
import java.io.PrintStream;
import java.lang.reflect.Field;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.remoting.netty.NettyClientConfig;
import org.apache.rocketmq.remoting.netty.NettyRemotingClient;
import org.apache.rocketmq.remoting.netty.TlsSystemConfig;
import org.apache.rocketmq.remoting.protocol.RemotingCommand;
import org.apache.rocketmq.tools.command.MQAdminStartup;

/** What a client is told that signs with given keys, and the official tool. */
final class Access {
    private static final String NOBODY = "-";
    private static final int TIMEOUT_MS = 10_000;
    private static final int HASTE_MS = 50;
    private static final Object STREAMS = new Object();

    private Access() {
    }

    private static void sign(Scope scope) {
        String key = scope.argument(0);
        scope.signWith(key.equals(NOBODY) ? "" : key, scope.argument(1));
    }

    /** attempt KEY SECRET HOW TOPIC [GROUP]: one operation; "allowed", or "refused" and why. */
    static void attempt(Scope scope) throws Exception {
        sign(scope);
        try {
            attempt(scope, scope.argument(2), scope.argument(3));
            scope.say("allowed");
        } catch (Exception failure) {
            refused(scope, failure);
        }
    }

    private static void refused(Scope scope, Throwable failure) {
        for (Throwable cause = failure; cause != null; cause = cause.getCause()) {
            if (cause instanceof MQBrokerException) {
                MQBrokerException refusal = (MQBrokerException) cause;
                scope.say("refused", "code", refusal.getResponseCode(),
                    "text", refusal.getErrorMessage());
                return;
            }
        }
        int code = failure instanceof MQClientException
            ? ((MQClientException) failure).getResponseCode() : -1;
        scope.say("refused", "code", code, "text", String.valueOf(failure.getMessage()));
    }

    private static void attempt(Scope scope, String how, String topic) throws Exception {
        Message message = Scope.message(topic, "T", "attempted-" + how);
        switch (how) {
            case "send":
                scope.producer().send(message);
                break;
            case "async":
                CompletableFuture<SendResult> told = new CompletableFuture<>();
                scope.producer().send(message, telling(told));
                try {
                    told.get(Scope.WAIT_MS, TimeUnit.MILLISECONDS);
                } catch (java.util.concurrent.ExecutionException failure) {
                    throw (Exception) failure.getCause();
                }
                break;
            case "one_way":
                scope.producer().sendOneway(message);
                break;
            case "batch":
                scope.producer().send(Arrays.asList(message, Scope.message(topic, "T", "second")));
                break;
            case "prepare":
                prepare(scope, message);
                break;
            case "pull":
                scope.pullConsumer(scope.argument(4))
                    .pull(new MessageQueue(topic, "broker-a", 0), "*", 0, 32);
                break;
            default:
                throw new IllegalArgumentException(how);
        }
    }

    private static SendCallback telling(CompletableFuture<SendResult> told) {
        return new SendCallback() {
            @Override
            public void onSuccess(SendResult result) {
                told.complete(result);
            }

            @Override
            public void onException(Throwable failure) {
                told.completeExceptionally(failure);
            }
        };
    }

    /** A half message that stays undecided. */
    private static void prepare(Scope scope, Message message) throws Exception {
        TransactionListener undecided = new TransactionListener() {
            @Override
            public LocalTransactionState executeLocalTransaction(Message sent, Object ignored) {
                return LocalTransactionState.UNKNOW;
            }

            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt asked) {
                return LocalTransactionState.UNKNOW;
            }
        };
        scope.producer(scope.group("producer-" + scope.run), undecided)
            .sendMessageInTransaction(message, null);
    }

    /** until_refused KEY SECRET TOPIC: sends until that is refused; says the first success. */
    static void untilRefused(Scope scope) throws Exception {
        sign(scope);
        DefaultMQProducer producer = scope.producer();
        long deadline = System.currentTimeMillis() + Scope.WAIT_MS;
        boolean told = false;
        while (System.currentTimeMillis() < deadline) {
            try {
                producer.send(Scope.message(scope.argument(2), "T", "rotated"));
            } catch (Exception failure) {
                refused(scope, failure);
                return;
            }
            if (!told) {
                scope.say("allowed");
                told = true;
            }
            Thread.sleep(20);
        }
    }

    /** ask KEY SECRET CODE FIELDS BODY: any request, signed by the official hook; the answer. */
    static void ask(Scope scope) throws Exception {
        sign(scope);
        NettyClientConfig config = new NettyClientConfig();
        config.setUseTLS(TlsSystemConfig.tlsEnable);
        NettyRemotingClient client = new NettyRemotingClient(config);
        if (scope.signing() != null) {
            client.registerRPCHook(scope.signing());
        }
        client.start();
        // It takes three seconds, for which nobody has to wait.
        scope.closeAtTheEnd(() -> new Thread(client::shutdown).start());
        RemotingCommand request = RemotingCommand.createRequestCommand(
            Integer.parseInt(scope.argument(2)), null);
        request.setExtFields(new HashMap<>());
        for (String field : scope.argument(3).split(",")) {
            if (!field.isEmpty()) {
                request.addExtField(field.split("=")[0], field.split("=")[1]);
            }
        }
        String body = scope.argument(4);
        request.setBody(body.isEmpty() ? null : body.getBytes(StandardCharsets.UTF_8));
        RemotingCommand answer = client.invokeSync(scope.namesrv(), request, TIMEOUT_MS);
        Map<String, String> told = answer.getExtFields();
        scope.say("answer", "code", answer.getCode(), "text", answer.getRemark(),
            "id", told == null ? null : told.get("msgId"),
            "queue_offset", told == null ? null : told.get("queueOffset"));
    }

    /** mqadmin ARGUMENTS: one command of the tool; what it prints, of which there is one at a time. */
    static void mqadmin(Scope scope) throws Exception {
        ByteArrayOutputStream printed = new ByteArrayOutputStream();
        ByteArrayOutputStream failed = new ByteArrayOutputStream();
        synchronized (STREAMS) {
            PrintStream output = System.out;
            PrintStream errors = System.err;
            System.setOut(new PrintStream(printed, true, "UTF-8"));
            System.setErr(new PrintStream(failed, true, "UTF-8"));
            forgetCommands();
            Thread hastening = hastenShutdown(Thread.currentThread());
            try {
                MQAdminStartup.main0(scope.arguments(), null);
            } finally {
                hastening.interrupt();
                System.setOut(output);
                System.setErr(errors);
            }
        }
        scope.say("printed", "text", printed.toString("UTF-8"), "failure", failed.toString("UTF-8"));
    }

    /** A command may keep a client that it has shut down; the tool runs one for each process. */
    private static void forgetCommands() throws IllegalAccessException {
        for (Field field : MQAdminStartup.class.getDeclaredFields()) {
            if (List.class.isAssignableFrom(field.getType())) {
                field.setAccessible(true);
                ((List<?>) field.get(null)).clear();
            }
        }
    }

    /**
     * A client that shuts down joins its threads; the one of network events looks every 3 s only
     * whether it should end, unless it is interrupted.
     */
    private static Thread hastenShutdown(Thread command) {
        Thread hastening = new Thread(() -> {
            try {
                while (true) {
                    Thread.sleep(HASTE_MS);
                    if (Arrays.stream(command.getStackTrace()).anyMatch(
                            frame -> frame.getClassName().endsWith("NettyRemotingClient")
                                && frame.getMethodName().equals("shutdown"))) {
                        Thread.getAllStackTraces().keySet().stream()
                            .filter(thread -> thread.getName().contains("NettyEventExecutor"))
                            .forEach(Thread::interrupt);
                    }
                }
            } catch (InterruptedException ended) {
                Thread.currentThread().interrupt();
            }
        });
        hastening.start();
        return hastening;
    }
}
