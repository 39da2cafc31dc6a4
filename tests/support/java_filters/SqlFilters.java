import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.Base64;
import java.util.HashMap;
import java.util.Map;
import org.apache.rocketmq.filter.expression.BooleanExpression;
import org.apache.rocketmq.filter.expression.EvaluationContext;
import org.apache.rocketmq.filter.expression.MQFilterException;
import org.apache.rocketmq.filter.parser.SelectorParser;

/**
 * Evaluates SQL92 filters with RocketMQ's own classes.
 *
 * A line of standard input is an expression and the names and values of properties, in Base64 and
 * separated by tabs. The answer is one line: true, false, null, invalid (not compiled) or failed
 * (the message does not match, whatever the rest of the expression says).
 */
public final class SqlFilters {
    public static void main(String[] arguments) throws Exception {
        BufferedReader lines = new BufferedReader(
            new InputStreamReader(System.in, StandardCharsets.US_ASCII));
        StringBuilder answers = new StringBuilder();
        String line;
        while ((line = lines.readLine()) != null) {
            String[] fields = line.split("\t", -1);
            Map<String, String> properties = new HashMap<>();
            for (int at = 1; at + 1 < fields.length; at += 2) {
                properties.put(text(fields[at]), text(fields[at + 1]));
            }
            answers.append(answer(text(fields[0]), properties)).append('\n');
        }
        System.out.print(answers);
    }

    private static String text(String field) {
        return new String(Base64.getDecoder().decode(field), StandardCharsets.UTF_8);
    }

    private static String answer(String expression, Map<String, String> properties) {
        BooleanExpression compiled;
        try {
            compiled = SelectorParser.parse(expression);
        } catch (MQFilterException invalid) {
            return "invalid";
        }
        try {
            return String.valueOf(compiled.evaluate(new Properties(properties)));
        } catch (Throwable failed) {
            return "failed";
        }
    }

    private static final class Properties implements EvaluationContext {
        private final Map<String, String> properties;

        Properties(Map<String, String> properties) {
            this.properties = properties;
        }

        @Override
        public Object get(String name) {
            return properties.get(name);
        }

        @Override
        public Map<String, Object> keyValues() {
            return new HashMap<>(properties);
        }
    }
}
