/* What a run counts, and what processor time it took. */
#ifndef HALFMQ_BENCHMARKS_COUNTERS_H
#define HALFMQ_BENCHMARKS_COUNTERS_H

#include "wire.h"

#include <sys/types.h>

enum { RESPONSE_CODES = 256 }; /* codes above are counted in the last place */

/* What is counted over the whole run, and again over the measured window alone. */
struct counters {
    uint64_t sent, ok, failed, ended, messages, bytes;
    uint64_t failed_by_code[RESPONSE_CODES];
};

struct usage {
    uint64_t wall, own, servers;
    double machine_busy; /* seconds of all cores */
};

void count_failure(struct counters *counters, int code);
struct usage take_usage(const pid_t *servers, int server_count);

/* One member of the JSON object, with the comma behind it. */
void print_counters(const char *name, const struct counters *counters);

#endif
