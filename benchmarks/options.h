/* The generator's command line. */
#ifndef HALFMQ_BENCHMARKS_OPTIONS_H
#define HALFMQ_BENCHMARKS_OPTIONS_H

#include "frames.h"

#include <sys/types.h>

enum {
    SERVERS_MAX = 8,
    TOPICS_MAX = 64,
};

enum scenario { SCENARIO_SEND, SCENARIO_BATCH, SCENARIO_PULL, SCENARIO_TRANSACTION, SCENARIO_COUNT };
extern const char *const SCENARIO_NAMES[SCENARIO_COUNT];

struct options {
    enum scenario scenario;
    enum header_type header;
    enum message message;
    const char *host;
    int port, namesrv_port;
    const char *topic, *group, *broker_name;
    const char *tag;  /* pulls: the filter, or NULL */
    int topics;
    int connections, window;
    size_t body_size, units;
    int queues, pull_count;
    double warmup, seconds;
    double rate;      /* requests per second that are due; 0: the next leaves when one is answered */
    uint64_t requests_max;
    bool one_way_end, fixed_queues, from_start;
    int cpu;
    pid_t servers[SERVERS_MAX];
    int server_count;
};

/* Ends the program with status 2 and the usage when the arguments make no run. */
struct options read_options(int argc, char **argv);

#endif
