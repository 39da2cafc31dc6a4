import com.alibaba.fastjson.JSON;
import com.alibaba.fastjson.serializer.SerializerFeature;
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import java.lang.reflect.Type;
import java.util.Arrays;
import java.util.stream.Collectors;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;
import org.apache.rocketmq.tools.admin.MQAdminExt;

/** The official programming interface for operators, method by method. */
final class Administering {
    private static DefaultMQAdminExt shared;  // it ends with the JVM

    private Administering() {
    }

    /** methods: the interface's methods, each as its name and its number of arguments. */
    static void methods(Scope scope) {
        scope.say("methods", "names", Arrays.stream(MQAdminExt.class.getMethods())
            .map(method -> method.getName() + "/" + method.getParameterCount())
            .sorted().collect(Collectors.joining(" ")));
    }

    /**
     * call METHOD ARGUMENT...: calls a method with arguments in JSON; says what it returns, in JSON,
     * or how it fails.
     */
    static void call(Scope scope) throws Exception {
        String[] words = scope.arguments();
        DefaultMQAdminExt admin = admin(scope);
        Method method = Arrays.stream(MQAdminExt.class.getMethods())
            .filter(one -> one.getName().equals(words[0]))
            .filter(one -> one.getParameterCount() == words.length - 1)
            .findFirst().orElseThrow(() -> new NoSuchMethodException(words[0]));
        Object[] arguments = new Object[words.length - 1];
        for (int i = 0; i < arguments.length; i++) {
            arguments[i] = argument(admin, method.getGenericParameterTypes()[i], words[i + 1]);
        }
        try {
            Object result = method.invoke(admin, arguments);
            scope.say("returned", "json",
                JSON.toJSONString(result, SerializerFeature.DisableCircularReferenceDetect));
        } catch (InvocationTargetException failure) {
            failed(scope, failure.getCause());
        }
    }

    private static synchronized DefaultMQAdminExt admin(Scope scope) throws Exception {
        if (shared == null) {
            shared = scope.named(new DefaultMQAdminExt(scope.signing()));
            shared.start();
        }
        return shared;
    }

    /** A message is given by its topic and id, and looked up. */
    private static Object argument(DefaultMQAdminExt admin, Type type, String json)
            throws Exception {
        if (type == MessageExt.class) {
            String[] place = JSON.parseObject(json, String[].class);
            return admin.viewMessage(place[0], place[1]);
        }
        return JSON.parseObject(json, type);
    }

    private static void failed(Scope scope, Throwable failure) {
        String name = failure.getClass().getSimpleName();
        if (failure instanceof MQBrokerException) {
            MQBrokerException refusal = (MQBrokerException) failure;
            scope.say("failed_call", "error", name, "code", refusal.getResponseCode(),
                "text", refusal.getErrorMessage());
        } else if (failure instanceof MQClientException) {
            MQClientException refusal = (MQClientException) failure;
            scope.say("failed_call", "error", name, "code", refusal.getResponseCode(),
                "text", refusal.getErrorMessage());
        } else {
            scope.say("failed_call", "error", name, "code", null,
                "text", String.valueOf(failure.getMessage()));
        }
    }
}
