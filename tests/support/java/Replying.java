import java.util.Arrays;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.exception.RequestTimeoutException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.RequestCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.utils.MessageUtil;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageExt;

/** Request-reply: producers that wait for what a consumer replies. */
final class Replying {
    private static final int LARGE_SIZE = 6000;  // bytes; clients compress from 4096 on

    private Replying() {
    }

    static void requestReply(Scope scope) throws Exception {
        DefaultMQProducer requester = scope.producer();
        requester.send(Scope.message(scope.topic(), "T", "founding"));  // makes the topic
        CountDownLatch replied = new CountDownLatch(3);
        replier(scope, replied);
        request(scope, requester);
        CountDownLatch calledBack = new CountDownLatch(2);
        for (String body : new String[] {"called-back", "large"}) {
            requester.request(Scope.message(scope.topic(), "T", body),
                telling(scope, body, calledBack), Scope.WAIT_MS);
        }
        // A client that gives up a request has had its reply if the replier is told so.
        await(calledBack);
        await(replied);
    }

    /** Sends requests to a consumer elsewhere. */
    static void ask(Scope scope) throws Exception {
        DefaultMQProducer requester = scope.producer();
        requester.send(Scope.message(scope.topic(), "T", "founding"));  // makes the topic
        CountDownLatch calledBack = new CountDownLatch(2);
        for (String body : new String[] {"small", "large"}) {
            requester.request(Scope.message(scope.topic(), "T", body),
                telling(scope, body, calledBack), Scope.WAIT_MS);
        }
        await(calledBack);
    }

    /** Replies to two requests from elsewhere; the topic is there. */
    static void answer(Scope scope) throws Exception {
        CountDownLatch replied = new CountDownLatch(2);
        replier(scope, replied);
        scope.say("ready");
        await(replied);
    }

    private static void await(CountDownLatch latch) throws Exception {
        if (!latch.await(Scope.WAIT_MS, TimeUnit.MILLISECONDS)) {
            throw new IllegalStateException("a reply is missing");
        }
    }

    private static void request(Scope scope, DefaultMQProducer requester) throws Exception {
        try {
            Message reply = requester.request(
                Scope.message(scope.topic(), "T", "waited"), Scope.WAIT_MS);
            scope.say("waited", "reply", Scope.text(reply));
        } catch (RequestTimeoutException failure) {
            scope.say("waited", "failure", failure.getErrorMessage());
        }
    }

    private static RequestCallback telling(Scope scope, String body, CountDownLatch calledBack) {
        return new RequestCallback() {
            @Override
            public void onSuccess(Message reply) {
                scope.say("called_back", "to", body,
                    "size", reply == null ? null : reply.getBody().length,
                    "crc", reply == null ? null : Scope.checksum(reply.getBody()));
                if (reply != null) {
                    calledBack.countDown();
                }
            }

            @Override
            public void onException(Throwable failure) {
                failure.printStackTrace();
            }
        };
    }

    private static byte[] replyTo(String body) {
        if (body.equals("large")) {
            byte[] even = new byte[LARGE_SIZE];
            Arrays.fill(even, (byte) 'a');
            return even;
        }
        return ("reply to " + body).getBytes();
    }

    /** Replies to every request; and once to nobody. */
    private static void replier(Scope scope, CountDownLatch replied) throws Exception {
        DefaultMQProducer sender = scope.producer(scope.group("replier"));
        DefaultMQPushConsumer consumer =
            scope.pushConsumer(scope.group("consumer"), scope.topic(), "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt request : messages) {
                if (MessageUtil.getReplyToClient(request) == null) {
                    continue;
                }
                try {
                    reply(scope, sender, request);
                } catch (Exception failure) {
                    failure.printStackTrace();
                    return ConsumeConcurrentlyStatus.RECONSUME_LATER;
                }
                replied.countDown();
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
    }

    private static void reply(Scope scope, DefaultMQProducer sender, MessageExt request)
            throws Exception {
        scope.saw("requested", request);
        String body = Scope.text(request);
        if (!body.equals("waited")) {
            scope.say("made", "crc", Scope.checksum(replyTo(body)));
        }
        Message reply = MessageUtil.createReplyMessage(request, replyTo(body));
        SendResult result = sender.send(reply);
        scope.say("replied", "body", body, "status", result.getSendStatus().name(),
            "queue_offset", result.getQueueOffset());
        if (body.equals("waited")) {
            toNobody(scope, sender, request);
        }
    }

    private static void toNobody(Scope scope, DefaultMQProducer sender, MessageExt request)
            throws Exception {
        Message reply = MessageUtil.createReplyMessage(request, replyTo("nobody"));
        MessageAccessor.putProperty(
            reply, MessageConst.PROPERTY_MESSAGE_REPLY_TO_CLIENT, "nobody@1");
        sender.setRetryTimesWhenSendFailed(0);
        try {
            sender.send(reply);
        } catch (MQClientException failure) {  // the last of its attempts is the cause
            MQBrokerException refusal = (MQBrokerException) failure.getCause();
            scope.say("refused", "code", refusal.getResponseCode(),
                "text", refusal.getErrorMessage());
        }
    }
}
