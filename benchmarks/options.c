#define _GNU_SOURCE
#include "options.h"

#include <errno.h>
#include <getopt.h>
#include <sched.h>

enum {
    CONNECTIONS_MAX = 4096,  /* with WINDOW_MAX the output buffers may already want gigabytes */
    WINDOW_MAX = 4096,
    BODY_MAX = 1024 * 1024,
    UNITS_MAX = 1024,
    PULL_MAX = 32,           /* brokers answer no more from memory */
    SECONDS_MAX = 86400,
    RATE_MAX = 10000000,     /* a tenth of a microsecond each: no clock is read that often */
};

const char *const SCENARIO_NAMES[SCENARIO_COUNT] = {"send", "batch", "pull", "transaction"};

static const char USAGE[] =
    "loadgen --scenario send|batch|pull|transaction --port PORT [--host ADDRESS] [--namesrv-port PORT]\n"
    "        [--topic NAME] [--group NAME] [--broker-name NAME] [--header json|rocketmq|msgpack]\n"
    "        [--message lean|usual|wide] [--topics N] [--tag NAME] [--rate REQUESTS]\n"
    "        [--connections N] [--window N] [--body BYTES] [--units N] [--pull N] [--queues N] [--no-route]\n"
    "        [--from-start]\n"
    "        [--end two-way|one-way] [--warmup SECONDS] [--seconds SECONDS] [--requests N]\n"
    "        [--cpu N] [--server PID]...\n"
    "--topics above 1 uses NAME-00, NAME-01, … in turn; --tag filters pulls.\n"
    "--rate sends so many requests a second, on a schedule from which latencies are counted; at most\n"
    "connections times window of them are in flight.\n"
    "--queues is what a new topic is created with; --no-route takes it as given and asks nobody.\n"
    "--from-start has all pulls begin with the first message of their queue, else they are spread over it.\n"
    "--requests ends the run after that many; --server adds a process whose CPU time is reported.";

enum option_id {
    OPTION_SCENARIO = 1, OPTION_HEADER, OPTION_HOST, OPTION_PORT, OPTION_NAMESRV_PORT, OPTION_TOPIC, OPTION_GROUP,
    OPTION_BROKER_NAME, OPTION_CONNECTIONS, OPTION_WINDOW, OPTION_BODY, OPTION_UNITS, OPTION_PULL, OPTION_QUEUES,
    OPTION_NO_ROUTE, OPTION_END, OPTION_WARMUP, OPTION_SECONDS, OPTION_REQUESTS, OPTION_CPU, OPTION_SERVER,
    OPTION_FROM_START, OPTION_MESSAGE, OPTION_TOPICS, OPTION_TAG, OPTION_RATE,
};

static const struct option OPTIONS[] = {
    {"scenario", required_argument, NULL, OPTION_SCENARIO},
    {"header", required_argument, NULL, OPTION_HEADER},
    {"host", required_argument, NULL, OPTION_HOST},
    {"port", required_argument, NULL, OPTION_PORT},
    {"namesrv-port", required_argument, NULL, OPTION_NAMESRV_PORT},
    {"topic", required_argument, NULL, OPTION_TOPIC},
    {"group", required_argument, NULL, OPTION_GROUP},
    {"broker-name", required_argument, NULL, OPTION_BROKER_NAME},
    {"connections", required_argument, NULL, OPTION_CONNECTIONS},
    {"window", required_argument, NULL, OPTION_WINDOW},
    {"body", required_argument, NULL, OPTION_BODY},
    {"units", required_argument, NULL, OPTION_UNITS},
    {"pull", required_argument, NULL, OPTION_PULL},
    {"queues", required_argument, NULL, OPTION_QUEUES},
    {"no-route", no_argument, NULL, OPTION_NO_ROUTE},
    {"end", required_argument, NULL, OPTION_END},
    {"warmup", required_argument, NULL, OPTION_WARMUP},
    {"seconds", required_argument, NULL, OPTION_SECONDS},
    {"requests", required_argument, NULL, OPTION_REQUESTS},
    {"cpu", required_argument, NULL, OPTION_CPU},
    {"server", required_argument, NULL, OPTION_SERVER},
    {"message", required_argument, NULL, OPTION_MESSAGE},
    {"topics", required_argument, NULL, OPTION_TOPICS},
    {"tag", required_argument, NULL, OPTION_TAG},
    {"rate", required_argument, NULL, OPTION_RATE},
    {"from-start", no_argument, NULL, OPTION_FROM_START},
    {NULL, 0, NULL, 0},
};

_Noreturn static void usage_error(const char *what)
{
    fprintf(stderr, "%s\n%s\n", what, USAGE);
    exit(2);
}

static long whole(const char *text, long lowest, long highest)
{
    char *end = NULL;
    errno = 0;
    long value = strtol(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || value < lowest || value > highest) {
        fprintf(stderr, "'%s' is not a whole number from %ld to %ld\n", text, lowest, highest);
        exit(2);
    }
    return value;
}

static double number(const char *text, double highest)
{
    char *end = NULL;
    double value = strtod(text, &end);
    if (end == text || *end != '\0' || !(value >= 0 && value <= highest)) {
        fprintf(stderr, "'%s' is not a number from 0 to %.0f\n", text, highest);
        exit(2);
    }
    return value;
}

static int choice(const char *text, const char *const *names, int count)
{
    for (int i = 0; i < count; i++)
        if (strcmp(text, names[i]) == 0)
            return i;
    usage_error("unknown choice");
}

/* Names go into JSON and properties as they are. */
static const char *name_of(const char *text)
{
    static const char allowed[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-";
    size_t length = strlen(text);
    if (length == 0 || length > 64 || strspn(text, allowed) != length)
        usage_error("a name has 1 to 64 letters, digits, '_' or '-'");
    return text;
}

static void take_option(struct options *o, int id, const char *value)
{
    static const enum header_type types[] = {HEADER_JSON, HEADER_ROCKETMQ, HEADER_MSGPACK};
    static const char *const headers[] = {"json", "rocketmq", "msgpack"}, *const ends[] = {"two-way", "one-way"};
    switch (id) {
    case OPTION_SCENARIO: o->scenario = (enum scenario)choice(value, SCENARIO_NAMES, SCENARIO_COUNT); break;
    case OPTION_HEADER: o->header = types[choice(value, headers, 3)]; break;
    case OPTION_HOST: o->host = value; break;
    case OPTION_PORT: o->port = (int)whole(value, 1, 65535); break;
    case OPTION_NAMESRV_PORT: o->namesrv_port = (int)whole(value, 1, 65535); break;
    case OPTION_TOPIC: o->topic = name_of(value); break;
    case OPTION_GROUP: o->group = name_of(value); break;
    case OPTION_BROKER_NAME: o->broker_name = name_of(value); break;
    case OPTION_CONNECTIONS: o->connections = (int)whole(value, 1, CONNECTIONS_MAX); break;
    case OPTION_WINDOW: o->window = (int)whole(value, 1, WINDOW_MAX); break;
    case OPTION_BODY: o->body_size = (size_t)whole(value, 1, BODY_MAX); break;
    case OPTION_UNITS: o->units = (size_t)whole(value, 1, UNITS_MAX); break;
    case OPTION_PULL: o->pull_count = (int)whole(value, 1, PULL_MAX); break;
    case OPTION_QUEUES: o->queues = (int)whole(value, 1, QUEUES_MAX); break;
    case OPTION_NO_ROUTE: o->fixed_queues = true; break;
    case OPTION_MESSAGE: o->message = (enum message)choice(value, MESSAGE_NAMES, MESSAGE_COUNT); break;
    case OPTION_TOPICS: o->topics = (int)whole(value, 1, TOPICS_MAX); break;
    case OPTION_TAG: o->tag = name_of(value); break;
    case OPTION_RATE: o->rate = number(value, RATE_MAX); break;
    case OPTION_FROM_START: o->from_start = true; break;
    case OPTION_END: o->one_way_end = choice(value, ends, 2) == 1; break;
    case OPTION_WARMUP: o->warmup = number(value, SECONDS_MAX); break;
    case OPTION_SECONDS: o->seconds = number(value, SECONDS_MAX); break;
    case OPTION_REQUESTS: o->requests_max = (uint64_t)whole(value, 1, 2000000000); break;
    case OPTION_CPU: o->cpu = (int)whole(value, 0, CPU_SETSIZE - 1); break;
    case OPTION_SERVER:
        if (o->server_count == SERVERS_MAX)
            usage_error("too many --server");
        o->servers[o->server_count++] = (pid_t)whole(value, 1, 1 << 30);
        break;
    default: usage_error("unknown option");
    }
}

struct options read_options(int argc, char **argv)
{
    struct options o = {
        .host = "127.0.0.1", .topic = "BenchmarkTopic", .group = "benchmark", .broker_name = "broker-a",
        .topics = 1, .connections = 1, .window = 1, .body_size = 1024, .units = 64, .queues = 8, .pull_count = PULL_MAX,
        .warmup = 1, .seconds = 5, .cpu = -1,
    };
    for (int id; (id = getopt_long(argc, argv, "", OPTIONS, NULL)) != -1;)
        take_option(&o, id, optarg);
    if (optind != argc || o.port == 0)
        usage_error("--port is required, other arguments are not");
    if (o.namesrv_port == 0)
        o.namesrv_port = o.port;
    return o;
}
