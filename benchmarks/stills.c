/* When cores of this machine stood still, or crept: what a guest's kernel does not see of its host.
 *
 * One thread per core, bound to it and of the highest real-time priority, wakes every millisecond. When
 * one comes late, either the interrupt of its timer did, or it was held behind something in the kernel that
 * is not to be disturbed. The kernel says which: the time in the queue for the processor begins with that
 * interrupt. So a still lasts from when the thread should have woken to when the interrupt came. A
 * kernel turns interrupts off for microseconds: the core itself did not run, because its host let others have
 * the processor. What was held in the kernel may be the doing of whoever is measured, and is only counted.
 * A core that stops while the thread is queued is taken to be held; so a still is told too short, not too long.
 *
 * A host may also take the page tables away in which it keeps the guest's memory. Then whatever runs waits at the
 * first touch of each of its pages until the host has found it again, ten or a hundred times as long as it would
 * compute, and that looks like computing. So one more thread, of ordinary priority, goes through locked memory of its
 * own all the time. When many touches of one pass took long, by the clock of its own processor time, and the guest's
 * kernel had no page to bring, then all that ran meanwhile was slow. One long touch is none: it may be an interrupt.
 *
 * Usage: stills. Prints "ready cores=N" and watches until standard input is closed or SIGTERM comes, then
 * prints one JSON object; times are seconds of CLOCK_MONOTONIC. Without real-time priority it watches nothing
 * and says why: a thread of ordinary priority is late whenever its core has something to do.
 */
#define _GNU_SOURCE
#include "wire.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <unistd.h>

enum {
    PERIOD_NS = 1000 * 1000,     /* a wake-up costs a virtual machine some 40 us: more of them would disturb */
    STILL_MIN_NS = 1000 * 1000,  /* shorter ones are many, and no pause that counts */
    STILLS_MAX = 64 * 1024,      /* of each core, one MiB; an hour of eighteen in a second. Later ones are dropped */
    STACK_SIZE = 128 * 1024,
    SCHEDSTAT_SIZE = 128,        /* bytes; three numbers */
    REASON_SIZE = 256,
    PAGES = 8 * 1024,            /* 32 MiB, about what a broker's process goes through all the time */
    PASS_PAGES = 2 * 1024,       /* touched in one pass: 0.1 ms, so that all come in turn each 20 ms */
    PASS_PERIOD_NS = 5 * 1000 * 1000,
    STEP_PAGES = 64,             /* after which the clock of processor time is read */
    STEP_SLOW_NS = 100 * 1000,   /* a step takes 5 us */
    TOUCH_SLOW_NS = 2 * 1000,    /* a touch takes 0.1 us where the cache lacks the page */
    SLOW_TOUCHES_MIN = 16,       /* of one pass: no interrupt comes that often in 0.1 ms */
    SLOW_PASS_NS = 1000 * 1000,  /* processor time of a pass, as with stills */
};

static const uint64_t SECOND = 1000000000u;

struct still {
    uint64_t start, end;
};

struct core {
    pthread_t thread;
    int number;
    struct still *stills;
    size_t count;
    uint64_t held, dropped;
};

struct walker {
    pthread_t thread;
    unsigned char *memory;
    long page_size;
    struct still *slow;
    size_t count;
    uint64_t moved, dropped; /* moved: passes in which the guest's own kernel brought pages */
};

struct witness {
    struct core cores[CPU_SETSIZE];
    int count;
    struct walker walker;
    uint64_t began;
    double stolen; /* when it began */
    char refused[REASON_SIZE]; /* why nothing is watched, or empty */
};

static atomic_bool is_over;
static pthread_barrier_t all_watch;

static int open_schedstat(void)
{
    return open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
}

/* Nanoseconds that the thread was ready to run and waited for its core, since it began. */
static uint64_t queued_ns(int schedstat)
{
    char text[SCHEDSTAT_SIZE];
    ssize_t size = pread(schedstat, text, sizeof text - 1, 0);
    text[size > 0 ? size : 0] = '\0';
    uint64_t queued = 0;
    if (sscanf(text, "%*u %" SCNu64, &queued) != 1)
        fail("schedstat of a thread cannot be read any more");
    return queued;
}

static void sleep_until(uint64_t due)
{
    struct timespec at = {.tv_sec = (time_t)(due / SECOND), .tv_nsec = (long)(due % SECOND)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL) == EINTR)
        ;
}

static void note(struct still *stills, size_t *count, uint64_t *dropped, uint64_t start, uint64_t end)
{
    if (*count < STILLS_MAX)
        stills[(*count)++] = (struct still){start, end};
    else
        (*dropped)++;
}

static void *watch(void *state)
{
    struct core *c = state;
    int schedstat = open_schedstat();
    if (schedstat < 0)
        fail_errno("/proc/thread-self/schedstat");
    pthread_barrier_wait(&all_watch);
    uint64_t queued = queued_ns(schedstat), now = now_ns();
    while (!atomic_load_explicit(&is_over, memory_order_relaxed)) {
        uint64_t due = now + PERIOD_NS; /* no moment lies outside of a period: the core may stop at any */
        sleep_until(due);
        uint64_t before = queued;
        now = now_ns();
        queued = queued_ns(schedstat);
        if (now < due + STILL_MIN_NS)
            continue;
        uint64_t interrupted = now - (queued - before);
        if (interrupted >= due + STILL_MIN_NS)
            note(c->stills, &c->count, &c->dropped, due, interrupted);
        else
            c->held++;
    }
    close(schedstat);
    return NULL;
}

/* ---- memory that is slow ------------------------------------------------------------------------------- */

static long faults(void)
{
    struct rusage used;
    if (getrusage(RUSAGE_THREAD, &used) != 0)
        fail_errno("getrusage");
    return used.ru_minflt + used.ru_majflt;
}

/* Touch some pages; return how many touches took long. */
static int touch(const struct walker *w, size_t first)
{
    int slow = 0;
    uint64_t before = now_ns();
    for (size_t page = first; page < first + STEP_PAGES; page++) {
        (void)*(volatile unsigned char *)(w->memory + page * (size_t)w->page_size);
        uint64_t now = now_ns();
        slow += now - before >= TOUCH_SLOW_NS;
        before = now;
    }
    return slow;
}

/* Go through a part of the memory, and note the stretches of processor time that were too long for that. */
static void pass(struct walker *w, size_t first)
{
    enum { STEPS = PASS_PAGES / STEP_PAGES };
    struct still found[STEPS];
    size_t count = 0;
    int slow = 0;
    long brought = faults();
    uint64_t began = clock_ns(CLOCK_THREAD_CPUTIME_ID), before = began, start = now_ns();
    for (size_t step = 0; step < STEPS; step++) {
        slow += touch(w, first + step * STEP_PAGES);
        uint64_t computed = clock_ns(CLOCK_THREAD_CPUTIME_ID), now = now_ns(), took = computed - before;
        if (took >= STEP_SLOW_NS) /* the two clocks are read one after the other */
            found[count++] = (struct still){now - start > took ? now - took : start, now};
        before = computed;
        start = now;
    }
    if (slow < SLOW_TOUCHES_MIN || before - began < SLOW_PASS_NS)
        return;
    if (faults() != brought) {
        w->moved++;
        return;
    }
    for (size_t i = 0; i < count; i++)
        note(w->slow, &w->count, &w->dropped, found[i].start, found[i].end);
}

static void *walk(void *state)
{
    struct walker *w = state;
    pthread_barrier_wait(&all_watch);
    for (size_t first = 0; !atomic_load_explicit(&is_over, memory_order_relaxed); first = (first + PASS_PAGES) % PAGES) {
        pass(w, first);
        sleep_until(now_ns() + PASS_PERIOD_NS);
    }
    return NULL;
}

/* Lock the memory, as far as the system allows: where it may not, what was brought in again shows in `moved`. */
static void start_walker(struct walker *w)
{
    w->page_size = sysconf(_SC_PAGESIZE);
    size_t size = PAGES * (size_t)w->page_size;
    w->memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (w->memory == MAP_FAILED)
        fail_errno("mmap");
    madvise(w->memory, size, MADV_NOHUGEPAGE); /* of 2 MiB each, sixteen touches would be all */
    memset(w->memory, 1, size);
    (void)mlock(w->memory, size);
    w->slow = allocate(STILLS_MAX * sizeof *w->slow);
    if (pthread_create(&w->thread, NULL, walk, w) != 0)
        fail("the thread that goes through memory could not be started");
}

/* ---- start and end ------------------------------------------------------------------------------------- */

static void refuse(struct witness *w, const char *what, int error)
{
    snprintf(w->refused, sizeof w->refused, "%s: %s", what, strerror(error));
}

/* False when the system does not allow the first thread its priority. */
static bool start_thread(struct core *c, int *error)
{
    pthread_attr_t attributes;
    struct sched_param highest = {.sched_priority = sched_get_priority_max(SCHED_FIFO)};
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET((size_t)c->number, &set);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_SIZE);
    pthread_attr_setaffinity_np(&attributes, sizeof set, &set);
    pthread_attr_setinheritsched(&attributes, PTHREAD_EXPLICIT_SCHED);
    pthread_attr_setschedpolicy(&attributes, SCHED_FIFO);
    pthread_attr_setschedparam(&attributes, &highest);
    *error = pthread_create(&c->thread, &attributes, watch, c);
    pthread_attr_destroy(&attributes);
    return *error == 0;
}

static void find_cores(struct witness *w)
{
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0)
        fail_errno("sched_getaffinity");
    for (int number = 0; number < CPU_SETSIZE; number++)
        if (CPU_ISSET((size_t)number, &allowed)) {
            struct core *c = &w->cores[w->count++];
            c->number = number;
            c->stills = allocate(STILLS_MAX * sizeof *c->stills);
        }
}

static void start(struct witness *w)
{
    int error = 0, schedstat = open_schedstat();
    if (schedstat < 0) {
        refuse(w, "the kernel does not tell who waits for a processor", errno);
        return;
    }
    close(schedstat);
    pthread_barrier_init(&all_watch, NULL, (unsigned)w->count + 2);
    for (int i = 0; i < w->count; i++)
        if (!start_thread(&w->cores[i], &error)) {
            if (i > 0) /* others wait at the barrier */
                fail("only some of the threads could be started");
            refuse(w, "no real-time priority", error);
            return;
        }
    start_walker(&w->walker);
    pthread_barrier_wait(&all_watch);
}

/* Return when standard input is closed or one of `signals`, which are blocked, has come. */
static void wait_for_end(const sigset_t *signals)
{
    int told = signalfd(-1, signals, SFD_CLOEXEC);
    if (told < 0)
        fail_errno("signalfd");
    struct pollfd ends[] = {{.fd = STDIN_FILENO, .events = POLLIN}, {.fd = told, .events = POLLIN}};
    for (;;) {
        char ignored[64];
        if (poll(ends, 2, -1) < 0 && errno != EINTR)
            fail_errno("poll");
        if (ends[1].revents != 0 || (ends[0].revents != 0 && read(STDIN_FILENO, ignored, sizeof ignored) <= 0))
            return;
    }
}

static void stop(struct witness *w)
{
    atomic_store(&is_over, true);
    if (w->refused[0] != '\0')
        return;
    for (int i = 0; i < w->count; i++)
        pthread_join(w->cores[i].thread, NULL);
    pthread_join(w->walker.thread, NULL);
}

static double seconds(uint64_t ns)
{
    return (double)ns / (double)SECOND;
}

/* Seconds that all cores together were away, as far as the host tells; when, it does not. */
static double stolen_seconds(void)
{
    unsigned long long stolen = 0;
    FILE *file = fopen("/proc/stat", "r");
    if (file == NULL)
        return 0;
    int fields = fscanf(file, "cpu %*u %*u %*u %*u %*u %*u %*u %llu", &stolen);
    fclose(file);
    return fields == 1 ? (double)stolen / (double)sysconf(_SC_CLK_TCK) : 0;
}

static void print_stills(const struct witness *w)
{
    uint64_t held = 0, dropped = w->walker.dropped;
    const char *comma = "";
    printf("{\"refused\": \"%s\", \"seconds\": %.3f, \"cpu_seconds\": %.3f, \"stolen_seconds\": %.2f, \"stills\": [",
           w->refused, seconds(now_ns() - w->began), seconds(clock_ns(CLOCK_PROCESS_CPUTIME_ID)),
           stolen_seconds() - w->stolen);
    for (int i = 0; i < w->count; i++) {
        const struct core *c = &w->cores[i];
        held += c->held;
        dropped += c->dropped;
        for (size_t j = 0; j < c->count; j++) {
            printf("%s[%d, %.6f, %.6f]", comma, c->number, seconds(c->stills[j].start), seconds(c->stills[j].end));
            comma = ", ";
        }
    }
    printf("], \"slow\": [");
    for (size_t j = 0; j < w->walker.count; j++)
        printf("%s[%.6f, %.6f]", j > 0 ? ", " : "", seconds(w->walker.slow[j].start), seconds(w->walker.slow[j].end));
    printf("], \"moved\": %" PRIu64 ", \"held\": %" PRIu64 ", \"dropped\": %" PRIu64 "}\n", w->walker.moved, held,
           dropped);
}

int main(void)
{
    static struct witness w;
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT); /* comes to all of a terminal's processes: the list is still wanted */
    sigprocmask(SIG_BLOCK, &signals, NULL);
    w.began = now_ns();
    w.stolen = stolen_seconds();
    find_cores(&w);
    start(&w);
    printf("ready cores=%d\n", w.count);
    fflush(stdout);
    wait_for_end(&signals);
    stop(&w);
    print_stills(&w);
    return 0;
}
