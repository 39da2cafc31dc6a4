/* Load generator for RocketMQ's remoting protocol: one thread, epoll, nothing but libc.
 *
 * Every connection keeps `window` requests in flight. A reply frees its slot, and the slot's next request
 * leaves with the same write as all others that became free in that read. A reply counts only if its
 * response code is 0; everything else is counted by its code and never as a message.
 *
 * Time runs warm-up, measured window, drain. In the drain nothing new is sent, and what is not answered by
 * its end is lost, so that at the end: sent = ok + failed + lost. Rates, latencies and CPU are those of the
 * measured window. One JSON object goes to standard output; anything that makes the figures worthless
 * (a closed connection, an unreadable reply) ends the program with status 1 and a line on standard error.
 */
#define _GNU_SOURCE
#include "counters.h"
#include "frames.h"
#include "histogram.h"
#include "options.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    SMALL_FRAME = 2048,                /* a pull or a commit; checked when written */
    INBOX_SIZE = 4 * 1024 * 1024,      /* the largest reply that can be read */
    RECEIVE_MAX = 256 * 1024,          /* bytes per read: enough for 64 replies of a window */
    EVENTS_MAX = 256,
    REFUSAL_MAX = 400,                 /* bytes of a refusal's header that are shown */
    SETUP_TRIES = 150,                 /* of 200 ms: a JVM broker needs a while for its first route */
};

static const uint64_t SECOND = 1000000000u;
static const uint64_t DRAIN = 10u * 1000000000u; /* a broker that needs longer for one window has lost it */
static const uint32_t OPAQUE_FIRST = 1000000000u;   /* ten digits from the first to the last */
static const uint32_t OPAQUE_ONE_WAY = 2000000000u; /* requests that want no reply are numbered from here */

/* One request in flight, and where its slot stands in what it repeats. */
struct slot {
    bool busy, ending;    /* ending: the half message is answered, its END_TRANSACTION is out */
    uint32_t opaque;
    uint64_t sent_at;     /* of a transaction: when its half message was sent */
    uint64_t key;
    int queue;            /* pull: the queue this slot reads, and where it stands */
    int64_t offset;
};

struct connection {
    int fd;
    bool waits_to_write;
    struct slot *slots;
    unsigned char *out;   /* requests not yet taken by the socket: out[out_start … out_end) */
    size_t out_start, out_end, out_size;
    unsigned char *kept;  /* the beginning of a frame of which the rest has not arrived */
    size_t kept_size, kept_room;
};

struct generator {
    struct options options;
    struct dialect dialect;
    struct template template;
    struct connection *connections;
    int epoll;
    unsigned char *inbox;
    uint64_t now, next_key;
    uint32_t next_one_way;
    int64_t in_flight;
    bool measuring, draining;
    struct counters total, window;
    uint64_t unmatched, server_requests, one_way_answers;
    struct histogram latency;
    struct usage window_start, window_end;
    unsigned char refusal[REFUSAL_MAX];
    size_t refusal_size;
};

/* ---- counting ------------------------------------------------------------------------------------------ */

/* What the first refusal said, for whoever wonders why a run failed. */
static void note_refusal(struct generator *g, const struct reply *reply)
{
    if (g->refusal_size > 0)
        return;
    g->refusal_size = reply->header_size < REFUSAL_MAX ? reply->header_size : REFUSAL_MAX;
    memcpy(g->refusal, reply->header, g->refusal_size);
}

static void count_ok(struct generator *g)
{
    g->total.ok++;
    g->window.ok += g->measuring;
}

static void count_messages(struct generator *g, struct slot *slot, uint64_t messages, uint64_t bytes)
{
    g->total.messages += messages;
    g->total.bytes += bytes;
    if (g->measuring) {
        g->window.messages += messages;
        g->window.bytes += bytes;
        histogram_add(&g->latency, g->now - slot->sent_at);
    }
}

/* ---- requests ------------------------------------------------------------------------------------------ */

static unsigned char *reserve(struct connection *c, size_t size)
{
    if (c->out_start == c->out_end)
        c->out_start = c->out_end = 0;
    if (c->out_size - c->out_end < size) {
        memmove(c->out, c->out + c->out_start, c->out_end - c->out_start);
        c->out_end -= c->out_start;
        c->out_start = 0;
    }
    if (c->out_size - c->out_end < size)
        fail("an output buffer is too small for its window");
    return c->out + c->out_end;
}

/* The slot's number is the remainder by the window; the rest counts how often the slot was used. */
static uint32_t next_opaque(const struct generator *g, struct slot *slot)
{
    slot->opaque += (uint32_t)g->options.window;
    if (slot->opaque >= OPAQUE_ONE_WAY)
        fail("request numbers are used up");
    return slot->opaque;
}

static void sent(struct generator *g, struct slot *slot)
{
    slot->busy = true;
    g->in_flight++;
    g->total.sent++;
    g->window.sent += g->measuring;
}

static size_t write_request(struct generator *g, struct connection *c, struct slot *slot)
{
    uint32_t opaque = next_opaque(g, slot);
    if (g->options.scenario == SCENARIO_PULL)
        return make_pull(&g->dialect, reserve(c, SMALL_FRAME), SMALL_FRAME, opaque, slot->queue, slot->offset,
                         g->options.pull_count);
    slot->key = g->next_key;
    g->next_key += g->template.key_count;
    int queue = (int)(slot->key / g->template.key_count % (uint64_t)g->options.queues);
    stamp(&g->template, reserve(c, g->template.size), opaque, queue, slot->key);
    return g->template.size;
}

static void next_request(struct generator *g, struct connection *c, struct slot *slot)
{
    slot->busy = slot->ending = false;
    if (g->options.requests_max > 0 && g->total.sent >= g->options.requests_max)
        g->draining = true;
    if (g->draining)
        return;
    c->out_end += write_request(g, c, slot);
    slot->sent_at = g->now;
    sent(g, slot);
}

/* The half message is stored: decide it. True while its answer is awaited. */
static bool send_commit(struct generator *g, struct connection *c, struct slot *slot, const struct reply *reply)
{
    int64_t queue_offset = 0, log_offset = 0;
    if (!read_half_position(reply, &queue_offset, &log_offset))
        fail("the answer to a half message has no usable msgId and queueOffset");
    bool one_way = g->options.one_way_end;
    uint32_t opaque = one_way ? g->next_one_way++ : next_opaque(g, slot);
    c->out_end += make_commit(&g->dialect, reserve(c, SMALL_FRAME), SMALL_FRAME, opaque, one_way, queue_offset,
                              log_offset, slot->key);
    if (one_way) {
        g->total.one_way++;
        g->window.one_way += g->measuring;
        return false;
    }
    slot->ending = true;
    sent(g, slot);
    return true;
}

/* ---- replies ------------------------------------------------------------------------------------------- */

static void take_pulled(struct generator *g, struct slot *slot, const struct reply *reply)
{
    struct pull_answer answer;
    int64_t records = count_records(reply->body, reply->body_size);
    if (!read_pull_answer(reply, &answer) || records < 1 || answer.next_offset - slot->offset != records)
        fail("a pull answer is malformed, or its records and offsets disagree");
    count_messages(g, slot, (uint64_t)records, reply->body_size);
    slot->offset = answer.next_offset < answer.max_offset ? answer.next_offset : answer.min_offset;
}

static void take_ok(struct generator *g, struct connection *c, struct slot *slot, const struct reply *reply)
{
    count_ok(g);
    switch (g->options.scenario) {
    case SCENARIO_PULL:
        take_pulled(g, slot, reply);
        break;
    case SCENARIO_TRANSACTION:
        if (!slot->ending && send_commit(g, c, slot, reply))
            return;
        /* fall through */
    default:
        count_messages(g, slot, g->template.key_count, g->template.key_count * g->options.body_size);
    }
    next_request(g, c, slot);
}

static void take_reply(struct generator *g, struct connection *c, const struct reply *reply)
{
    if (!(reply->flag & FLAG_RESPONSE)) {
        g->server_requests++; /* a broker may ask us about a transaction; we are no producer it can count on */
        return;
    }
    if (reply->opaque >= OPAQUE_ONE_WAY) {
        g->one_way_answers++; /* a refusal that a real one-way sender would never see */
        return;
    }
    struct slot *slot = &c->slots[reply->opaque % (uint32_t)g->options.window];
    if (!slot->busy || slot->opaque != reply->opaque) {
        g->unmatched++;
        return;
    }
    g->in_flight--;
    slot->busy = false;
    if (reply->code == 0) {
        take_ok(g, c, slot, reply);
    } else {
        note_refusal(g, reply);
        count_failure(&g->total, reply->code);
        if (g->measuring)
            count_failure(&g->window, reply->code);
        next_request(g, c, slot);
    }
}

/* Take every whole frame; returns the bytes used. */
static size_t take_frames(struct generator *g, struct connection *c, const unsigned char *data, size_t size)
{
    size_t used = 0;
    while (size - used >= FRAME_HEAD) {
        size_t frame_size = 4 + (size_t)get_u32(data + used);
        if (frame_size < FRAME_HEAD || frame_size > INBOX_SIZE - RECEIVE_MAX)
            fail("a reply announces an impossible size");
        if (size - used < frame_size)
            break;
        struct reply reply;
        if (!read_reply(data + used, frame_size, &reply))
            fail("a reply has a header that cannot be read");
        take_reply(g, c, &reply);
        used += frame_size;
    }
    return used;
}

/* ---- sockets ------------------------------------------------------------------------------------------- */

static void watch(struct generator *g, struct connection *c, bool to_write, int operation)
{
    struct epoll_event event = {.events = EPOLLIN | (to_write ? EPOLLOUT : 0u), .data = {.ptr = c}};
    if (epoll_ctl(g->epoll, operation, c->fd, &event) != 0)
        fail_errno("epoll_ctl");
    c->waits_to_write = to_write;
}

static void flush(struct generator *g, struct connection *c)
{
    while (c->out_start < c->out_end) {
        ssize_t n = send(c->fd, c->out + c->out_start, c->out_end - c->out_start, MSG_NOSIGNAL);
        if (n < 0 && errno == EAGAIN)
            break;
        if (n < 0 && errno != EINTR)
            fail_errno("send");
        c->out_start += n > 0 ? (size_t)n : 0;
    }
    bool to_write = c->out_start < c->out_end;
    if (to_write != c->waits_to_write)
        watch(g, c, to_write, EPOLL_CTL_MOD);
}

static void keep(struct connection *c, const unsigned char *rest, size_t size)
{
    if (size > c->kept_room) {
        free(c->kept);
        c->kept_room = size * 2;
        c->kept = allocate(c->kept_room);
    }
    if (size > 0)
        memcpy(c->kept, rest, size);
    c->kept_size = size;
}

/* One inbox for all connections stays in the processor's cache, where hundreds of own buffers would not. */
static void receive(struct generator *g, struct connection *c)
{
    if (c->kept_size > 0)
        memcpy(g->inbox, c->kept, c->kept_size);
    ssize_t n = recv(c->fd, g->inbox + c->kept_size, RECEIVE_MAX, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n < 0)
        fail_errno("recv");
    if (n == 0)
        fail("the broker closed a connection");
    g->now = now_ns();
    size_t size = c->kept_size + (size_t)n;
    size_t used = take_frames(g, c, g->inbox, size);
    keep(c, g->inbox + used, size - used);
}

static int connect_to(const char *host, int port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    if (inet_pton(AF_INET, host, &address.sin_addr) != 1)
        fail("--host wants an IPv4 address");
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) != 0)
        fail_errno("connect");
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return fd;
}

/* ---- setup: the topic and its queues ------------------------------------------------------------------- */

static void receive_all(int fd, unsigned char *to, size_t size)
{
    while (size > 0) {
        ssize_t n = recv(fd, to, size, 0);
        if (n <= 0)
            fail("no answer while setting up the topic");
        to += n;
        size -= (size_t)n;
    }
}

/* Send one frame and wait for the reply, which stays in the inbox. */
static struct reply ask(struct generator *g, int fd, const unsigned char *frame, size_t size)
{
    if (send(fd, frame, size, MSG_NOSIGNAL) != (ssize_t)size)
        fail_errno("send");
    receive_all(fd, g->inbox, FRAME_HEAD);
    size_t frame_size = 4 + (size_t)get_u32(g->inbox);
    if (frame_size < FRAME_HEAD || frame_size > INBOX_SIZE)
        fail("a reply announces an impossible size");
    receive_all(fd, g->inbox + FRAME_HEAD, frame_size - FRAME_HEAD);
    struct reply reply;
    if (!read_reply(g->inbox, frame_size, &reply))
        fail("a reply has a header that cannot be read");
    return reply;
}

/* The first send creates the topic where the broker allows it. */
static void create_topic(struct generator *g)
{
    struct send_plan plan = {.kind = SEND_SINGLE, .body_size = 16, .topic_queues = g->options.queues};
    struct template first = make_send(&g->dialect, &plan);
    unsigned char *frame = allocate(first.size);
    template_set_time(&first, clock_ns(CLOCK_REALTIME) / 1000000);
    stamp(&first, frame, OPAQUE_FIRST, 0, g->next_key++);
    int fd = connect_to(g->options.host, g->options.port);
    int code = -1;
    for (int tries = 0; tries < SETUP_TRIES && code != 0; tries++) {
        code = ask(g, fd, frame, first.size).code;
        if (code != 0)
            usleep(200000);
    }
    if (code != 0) {
        fprintf(stderr, "the first send to the topic is refused with code %d\n", code);
        exit(1);
    }
    close(fd);
    free(frame);
    free(first.bytes);
}

/* As many queues as the route tells, at most QUEUES_MAX. */
static void learn_queues(struct generator *g)
{
    int fd = connect_to(g->options.host, g->options.namesrv_port);
    unsigned char frame[SMALL_FRAME];
    size_t size = make_route(&g->dialect, frame, sizeof frame, OPAQUE_FIRST);
    int64_t queues = 0;
    for (int tries = 0; tries < SETUP_TRIES && queues < 1; tries++) {
        struct reply reply = ask(g, fd, frame, size);
        const unsigned char *at = find_behind(reply.body, reply.body_size, "\"writeQueueNums\":");
        if (reply.code != 0 || at == NULL || !read_decimal(at, reply.body + reply.body_size, &queues))
            usleep(200000);
    }
    close(fd);
    if (queues < 1)
        fail("the name server knows no route to the topic");
    g->options.queues = queues > QUEUES_MAX ? QUEUES_MAX : (int)queues;
}

/* Readers of one queue start spread over it, so that they do not all ask for the same records; unless they replay. */
static void place_readers(struct generator *g)
{
    int fd = connect_to(g->options.host, g->options.port);
    unsigned char frame[SMALL_FRAME];
    const struct options *o = &g->options;
    int readers = o->connections * o->window;
    for (int queue = 0; queue < o->queues; queue++) {
        struct pull_answer answer;
        size_t size = make_pull(&g->dialect, frame, sizeof frame, OPAQUE_FIRST, queue, 0, 1);
        struct reply reply = ask(g, fd, frame, size);
        if (reply.code != 0 || !read_pull_answer(&reply, &answer))
            fail("a queue is empty or cannot be pulled: fill the topic first");
        int64_t span = answer.max_offset - answer.min_offset;
        for (int i = queue; i < readers; i += o->queues) {
            struct slot *slot = &g->connections[i / o->window].slots[i % o->window];
            slot->queue = queue;
            slot->offset = answer.min_offset + (o->from_start ? 0 : span * i / readers);
        }
    }
    close(fd);
}

static void open_connection(struct generator *g, struct connection *c)
{
    const struct options *o = &g->options;
    size_t frame = g->template.size > SMALL_FRAME ? g->template.size : SMALL_FRAME;
    c->out_size = 2 * (size_t)o->window * frame; /* a half message's slot may hold its end as well */
    c->out = allocate(c->out_size);
    c->slots = allocate((size_t)o->window * sizeof *c->slots);
    uint32_t first = OPAQUE_FIRST + (uint32_t)o->window - OPAQUE_FIRST % (uint32_t)o->window;
    for (int i = 0; i < o->window; i++)
        c->slots[i].opaque = first + (uint32_t)i;
    c->fd = connect_to(o->host, o->port);
    if (fcntl(c->fd, F_SETFL, O_NONBLOCK) != 0)
        fail_errno("fcntl");
    watch(g, c, false, EPOLL_CTL_ADD);
}

static void set_up(struct generator *g)
{
    struct options *o = &g->options;
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    snprintf(g->dialect.key_head, sizeof g->dialect.key_head, "%08X%08X", (unsigned)getpid(), (unsigned)t.tv_sec);
    g->inbox = allocate(INBOX_SIZE);
    g->next_one_way = OPAQUE_ONE_WAY;
    if (o->scenario != SCENARIO_PULL && !o->fixed_queues)
        create_topic(g);
    if (!o->fixed_queues)
        learn_queues(g);
    enum send_kind kind = o->scenario == SCENARIO_BATCH         ? SEND_BATCH
                          : o->scenario == SCENARIO_TRANSACTION ? SEND_HALF
                                                                : SEND_SINGLE;
    struct send_plan plan = {.kind = kind, .body_size = o->body_size, .units = o->units, .topic_queues = o->queues};
    g->template = make_send(&g->dialect, &plan);
    if (g->template.size > FRAME_MAX)
        fail("the request is larger than a frame may be");
    g->epoll = epoll_create1(EPOLL_CLOEXEC);
    g->connections = allocate((size_t)o->connections * sizeof *g->connections);
    for (int i = 0; i < o->connections; i++)
        open_connection(g, &g->connections[i]);
    if (o->scenario == SCENARIO_PULL)
        place_readers(g);
}

/* ---- the run ------------------------------------------------------------------------------------------- */

static void turn_loop(struct generator *g)
{
    struct epoll_event events[EVENTS_MAX];
    int count = epoll_wait(g->epoll, events, EVENTS_MAX, 20);
    if (count < 0 && errno != EINTR)
        fail_errno("epoll_wait");
    for (int i = 0; i < count; i++) {
        struct connection *c = events[i].data.ptr;
        if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR))
            receive(g, c);
        flush(g, c);
    }
    g->now = now_ns();
    template_set_time(&g->template, clock_ns(CLOCK_REALTIME) / 1000000);
}

static void start_requests(struct generator *g)
{
    g->now = now_ns();
    template_set_time(&g->template, clock_ns(CLOCK_REALTIME) / 1000000);
    for (int i = 0; i < g->options.connections; i++) {
        struct connection *c = &g->connections[i];
        for (int s = 0; s < g->options.window; s++)
            next_request(g, c, &c->slots[s]);
        flush(g, c);
    }
}

static void run(struct generator *g)
{
    uint64_t window_opens = now_ns() + (uint64_t)(g->options.warmup * (double)SECOND);
    uint64_t window_closes = window_opens + (uint64_t)(g->options.seconds * (double)SECOND);
    start_requests(g);
    while (!g->draining && now_ns() < window_opens)
        turn_loop(g);
    g->window_start = take_usage(g->options.watched, g->options.watched_count);
    g->measuring = true;
    while (!(g->draining && g->in_flight == 0) && now_ns() < window_closes)
        turn_loop(g);
    g->window_end = take_usage(g->options.watched, g->options.watched_count);
    g->measuring = false;
    g->draining = true;
    for (uint64_t end = now_ns() + DRAIN; g->in_flight > 0 && now_ns() < end;)
        turn_loop(g);
}

/* ---- output -------------------------------------------------------------------------------------------- */

static double seconds_between(uint64_t start, uint64_t end)
{
    return (double)(end - start) / (double)SECOND;
}

static double microseconds(uint64_t ns)
{
    return (double)ns / 1000;
}

/* As a JSON string; what is not plain ASCII becomes a question mark. */
static void print_quoted(const unsigned char *text, size_t size)
{
    putchar('"');
    for (size_t i = 0; i < size; i++) {
        if (text[i] == '"' || text[i] == '\\')
            putchar('\\');
        putchar(text[i] >= ' ' && text[i] < 127 ? text[i] : '?');
    }
    putchar('"');
}

static void print_result(const struct generator *g)
{
    const struct options *o = &g->options;
    const struct usage *a = &g->window_start, *b = &g->window_end;
    printf("{\"scenario\": \"%s\", \"header\": \"%s\", \"connections\": %d, \"window\": %d, \"queues\": %d, ",
           SCENARIO_NAMES[o->scenario], o->header == HEADER_JSON ? "json" : "msgpack", o->connections, o->window,
           o->queues);
    printf("\"body_size\": %zu, \"units\": %zu, \"frame_size\": %zu, ", o->body_size, g->template.key_count,
           g->template.size);
    print_counters("total", &g->total);
    print_counters("measured", &g->window);
    printf("\"lost\": %" PRId64 ", \"unmatched\": %" PRIu64 ", \"server_requests\": %" PRIu64
           ", \"one_way_answers\": %" PRIu64 ", ",
           g->in_flight, g->unmatched, g->server_requests, g->one_way_answers);
    printf("\"first_refusal\": ");
    print_quoted(g->refusal, g->refusal_size);
    printf(", \"seconds\": %.6f, \"own_cpu_seconds\": %.6f, \"watched_cpu_seconds\": %.6f, "
           "\"machine_cpu_seconds\": %.2f, ",
           seconds_between(a->wall, b->wall), seconds_between(a->own, b->own), seconds_between(a->watched, b->watched),
           b->machine_busy - a->machine_busy);
    printf("\"latency_us\": {\"p50\": %.1f, \"p99\": %.1f, \"max\": %.1f}}\n",
           microseconds(histogram_percentile(&g->latency, 0.50)), microseconds(histogram_percentile(&g->latency, 0.99)),
           microseconds(g->latency.max));
}

static void pin(int cpu)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET((size_t)cpu, &set);
    if (sched_setaffinity(0, sizeof set, &set) != 0)
        fail_errno("--cpu");
}

int main(int argc, char **argv)
{
    static struct generator g; /* zeroed, and too large for a stack because of its histogram */
    g.options = read_options(argc, argv);
    if (g.options.cpu >= 0)
        pin(g.options.cpu);
    g.dialect = (struct dialect){.type = g.options.header, .group = g.options.group, .topic = g.options.topic,
                                 .broker_name = g.options.broker_name};
    set_up(&g);
    run(&g);
    print_result(&g);
    return 0;
}
