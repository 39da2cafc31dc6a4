import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.Map;

/**
 * Runs scenarios with an unmodified RocketMQ client and prints what it saw, one JSON object a line.
 *
 * Commands come on standard input, one a line, tab-separated: run number, scenario, arguments. Each
 * runs in a thread of its own; its lines carry the run's number, and the last one has the event
 * "done" or "failed". The process ends with its standard input.
 *
 * java Driver NAMESRV
 */
public final class Driver {
    interface Scenario {
        void run(Scope scope) throws Exception;
    }

    private static final Map<String, Scenario> SCENARIOS = new HashMap<>();

    static {
        SCENARIOS.put("send", Sending::send);
        SCENARIOS.put("batch", Sending::batch);
        SCENARIOS.put("delay", Sending::delay);
        SCENARIOS.put("timers", Sending::timers);
        SCENARIOS.put("sizes", Sending::sizes);
        SCENARIOS.put("refused", Sending::refused);
        SCENARIOS.put("look_up", Sending::lookUp);
        SCENARIOS.put("produce", Sending::produce);
        SCENARIOS.put("compress", Producing::compress);
        SCENARIOS.put("queues", Producing::queues);
        SCENARIOS.put("limits", Producing::limits);
        SCENARIOS.put("created", Producing::created);
        SCENARIOS.put("namespaces", Producing::namespaces);
        SCENARIOS.put("vip", Producing::vip);
        SCENARIOS.put("unknown", Producing::unknown);
        SCENARIOS.put("retrying", Producing::retrying);
        SCENARIOS.put("positions", Grouping::positions);
        SCENARIOS.put("strategies", Grouping::strategies);
        SCENARIOS.put("assigned", Grouping::assigned);
        SCENARIOS.put("member", Grouping::member);
        SCENARIOS.put("share", Grouping::share);
        SCENARIOS.put("consume_status", Grouping::consumeStatus);
        SCENARIOS.put("consume", Consuming::consume);
        SCENARIOS.put("orderly_dead", Consuming::orderlyDead);
        SCENARIOS.put("orderly", Consuming::orderly);
        SCENARIOS.put("retry", Consuming::retry);
        SCENARIOS.put("broadcasting", Consuming::broadcasting);
        SCENARIOS.put("sharing", Consuming::sharing);
        SCENARIOS.put("pull", Pulling::pull);
        SCENARIOS.put("lite_pull", scope -> newer("LitePulling", "litePull", scope));
        SCENARIOS.put("request_reply", scope -> newer("Replying", "requestReply", scope));
        SCENARIOS.put("requesting", scope -> newer("Replying", "ask", scope));
        SCENARIOS.put("replying", scope -> newer("Replying", "answer", scope));
        SCENARIOS.put("traced", scope -> newer("Tracing", "traced", scope));
        SCENARIOS.put("popping", scope -> newer("Popping", "popping", scope));
        SCENARIOS.put("pulling_poppers", scope -> newer("Popping", "litePulling", scope));
        SCENARIOS.put("sql", Filtering::sql);
        SCENARIOS.put("transactions", Transactions::transactions);
        SCENARIOS.put("leaving", Transactions::leaving);
        SCENARIOS.put("flow", Flowing::flow);
        SCENARIOS.put("die_undecided", Transactions::dieUndecided);
        SCENARIOS.put("take_over", Transactions::takeOver);
        SCENARIOS.put("undecided", Transactions::undecided);
        SCENARIOS.put("attempt", Access::attempt);
        SCENARIOS.put("until_refused", Access::untilRefused);
        SCENARIOS.put("ask", Access::ask);
        SCENARIOS.put("mqadmin", Access::mqadmin);
        SCENARIOS.put("online", Online::online);
        SCENARIOS.put("methods", Administering::methods);
        SCENARIOS.put("call", Administering::call);
    }

    private Driver() {
    }

    public static void main(String[] arguments) throws Exception {
        BufferedReader commands =
            new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        String line;
        while ((line = commands.readLine()) != null) {
            Scope scope = new Scope(arguments[0], line.split("\t", -1));
            Scenario scenario = SCENARIOS.get(scope.scenario);
            Thread thread = new Thread(() -> run(scenario, scope), "run-" + scope.run);
            thread.setDaemon(true);
            thread.start();
        }
        Runtime.getRuntime().halt(0);  // clients start threads that would keep the process alive
    }

    private static void run(Scenario scenario, Scope scope) {
        try {
            scenario.run(scope);
            scope.close();
            scope.say("done");
        } catch (Throwable failure) {  // also a NoSuchMethodError of another client version
            failure.printStackTrace();
            scope.say("failed", "reason", String.valueOf(failure));
            scope.close();
        }
    }

    /** The class is compiled only for clients that have what it uses (since 4.6, 5.0). */
    private static void newer(String name, String method, Scope scope) throws Exception {
        Class.forName(name).getDeclaredMethod(method, Scope.class).invoke(null, scope);
    }
}
