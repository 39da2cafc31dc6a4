#define _GNU_SOURCE
#include "counters.h"

#include <inttypes.h>
#include <unistd.h>

void count_failure(struct counters *counters, int code)
{
    int place = code >= 0 && code < RESPONSE_CODES ? code : RESPONSE_CODES - 1;
    counters->failed++;
    counters->failed_by_code[place]++;
}

static uint64_t cpu_of(pid_t pid)
{
    clockid_t clock;
    return clock_getcpuclockid(pid, &clock) == 0 ? clock_ns(clock) : 0;
}

/* Seconds that all cores together were not idle, as far as the kernel tells. */
static double machine_busy(void)
{
    unsigned long long user = 0, nice = 0, system = 0, idle = 0, wait = 0, irq = 0, soft = 0;
    FILE *file = fopen("/proc/stat", "r");
    if (file == NULL)
        return 0;
    int fields = fscanf(file, "cpu %llu %llu %llu %llu %llu %llu %llu", &user, &nice, &system, &idle, &wait, &irq, &soft);
    fclose(file);
    return fields == 7 ? (double)(user + nice + system + irq + soft) / (double)sysconf(_SC_CLK_TCK) : 0;
}

struct usage take_usage(const pid_t *servers, int server_count)
{
    struct usage usage = {.wall = now_ns(), .own = clock_ns(CLOCK_PROCESS_CPUTIME_ID), .machine_busy = machine_busy()};
    for (int i = 0; i < server_count; i++)
        usage.servers += cpu_of(servers[i]);
    return usage;
}

void print_counters(const char *name, const struct counters *c)
{
    printf("\"%s\": {\"sent\": %" PRIu64 ", \"ok\": %" PRIu64 ", \"failed\": %" PRIu64 ", \"ended\": %" PRIu64
           ", \"messages\": %" PRIu64 ", \"bytes\": %" PRIu64 ", \"failed_by_code\": {",
           name, c->sent, c->ok, c->failed, c->ended, c->messages, c->bytes);
    const char *comma = "";
    for (int code = 0; code < RESPONSE_CODES; code++) {
        if (c->failed_by_code[code] > 0) {
            printf("%s\"%d\": %" PRIu64, comma, code, c->failed_by_code[code]);
            comma = ", ";
        }
    }
    printf("}}, ");
}
