/* Load generator for RocketMQ's remoting protocol: one thread, epoll, nothing but libc.
 *
 * Every connection keeps `window` requests in flight. A reply frees its slot, and the slot's next request
 * leaves with the same write as all others that became free in that read. A reply counts only if its
 * response code is 0; everything else is counted by its code and never as a message. With a rate, requests
 * leave when they are due instead, each in a free slot; one that finds none waits, and its latency with it.
 *
 * A transaction is a message when it can be read in its topic: the growth of all max offsets is asked for at
 * both ends of the measured window, and after a drain. So what a broker refuses of a one-way END_TRANSACTION,
 * or forgets, is none, though nobody is told.
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
#include <poll.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    SMALL_FRAME = 2048,                /* a pull, a commit, a question; checked when written */
    TOPIC_NAME = 72,                   /* an option's name, a dash, two digits */
    CODE_NONE_MATCHED = 20,            /* PULL_RETRY_IMMEDIATELY: go on behind what the filter let by */
    INBOX_SIZE = 4 * 1024 * 1024,      /* the largest reply that can be read */
    RECEIVE_MAX = 256 * 1024,          /* bytes per read: enough for 64 replies of a window */
    EVENTS_MAX = 256,
    REFUSAL_MAX = 400,                 /* bytes of a refusal's header that are shown */
    SETUP_TRIES = 150,                 /* of 200 ms: a JVM broker needs a while for its first route */
};

static const uint64_t SECOND = 1000000000u;
static const uint64_t DRAIN = 10u * 1000000000u; /* a broker that needs longer for one window has lost it */
static const uint64_t DELIVERY_PAUSE = 3u * 1000000000u; /* without a new delivery, what is left is taken for lost */
static const uint64_t TICK = 20u * 1000000u;
static const uint32_t OPAQUE_FIRST = 1000000000u;   /* ten digits from the first to the last */
static const uint32_t OPAQUE_ONE_WAY = 2000000000u; /* requests that want no reply are numbered from here */

/* One request in flight, and where its slot stands in what it repeats. */
struct slot {
    bool busy, ending;    /* ending: the half message is answered, its END_TRANSACTION is out */
    uint32_t opaque;
    uint64_t sent_at;     /* of a transaction: when its half message was sent; with a rate, when it was due */
    uint64_t key;
    int topic;
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

/* With a rate: the slots that wait for a request to be due, first in, first out. */
struct schedule {
    struct idle {
        struct connection *connection;
        struct slot *slot;
    } *ring;
    size_t room, first, count;
    double next_due, interval; /* nanoseconds */
};

struct generator {
    struct options options;
    struct dialect dialect;
    char topics[TOPICS_MAX][TOPIC_NAME];
    struct template *templates; /* row by row of variants, in a row one for each topic */
    int rows;
    struct connection *connections;
    struct schedule schedule;
    int asking;                 /* a connection of its own for questions, or -1 when nobody is asked */
    int epoll;
    unsigned char *inbox;
    uint64_t now, unix_ms, next_key, next_send;
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

static size_t units(const struct generator *g)
{
    return g->templates[0].key_count;
}

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

static size_t write_pull(struct generator *g, struct connection *c, const struct slot *slot, uint32_t opaque)
{
    struct pull_plan plan = {.topic = g->topics[slot->topic], .tag = g->options.tag, .queue = slot->queue,
                             .offset = slot->offset, .count = g->options.pull_count};
    return make_pull(&g->dialect, &plan, reserve(c, SMALL_FRAME), SMALL_FRAME, opaque);
}

/* Topics in turn; then queues; and when all queues had one, the next row, so that each queue gets all tags. */
static size_t write_request(struct generator *g, struct connection *c, struct slot *slot)
{
    uint32_t opaque = next_opaque(g, slot);
    if (g->options.scenario == SCENARIO_PULL)
        return write_pull(g, c, slot, opaque);
    uint64_t topics = (uint64_t)g->options.topics, queues = (uint64_t)g->options.queues, number = g->next_send++;
    uint64_t row = number / topics / queues % (uint64_t)g->rows;
    slot->topic = (int)(number % topics);
    const struct template *template = &g->templates[row * topics + number % topics];
    slot->key = g->next_key;
    g->next_key += template->key_count;
    stamp(template, reserve(c, template->size), opaque, (int)(number / topics % queues), g->unix_ms, slot->key);
    return template->size;
}

static void send_request(struct generator *g, struct connection *c, struct slot *slot, uint64_t due)
{
    c->out_end += write_request(g, c, slot);
    slot->sent_at = due;
    sent(g, slot);
}

static void next_request(struct generator *g, struct connection *c, struct slot *slot)
{
    slot->busy = slot->ending = false;
    if (g->options.requests_max > 0 && g->total.sent >= g->options.requests_max)
        g->draining = true;
    if (g->draining)
        return;
    struct schedule *s = &g->schedule;
    if (g->options.rate > 0)
        s->ring[(s->first + s->count++) % s->room] = (struct idle){c, slot};
    else
        send_request(g, c, slot, g->now);
}

/* The half message is stored: decide it. True while its answer is awaited. */
static bool send_commit(struct generator *g, struct connection *c, struct slot *slot, const struct reply *reply)
{
    int64_t queue_offset = 0, log_offset = 0;
    if (!read_half_position(reply, &queue_offset, &log_offset))
        fail("the answer to a half message has no usable msgId and queueOffset");
    bool one_way = g->options.one_way_end;
    uint32_t opaque = one_way ? g->next_one_way++ : next_opaque(g, slot);
    c->out_end += make_commit(&g->dialect, g->topics[slot->topic], reserve(c, SMALL_FRAME), SMALL_FRAME, opaque, one_way,
                              queue_offset, log_offset, slot->key);
    g->total.ended++;
    g->window.ended += g->measuring;
    if (one_way)
        return false;
    slot->ending = true;
    sent(g, slot);
    return true;
}

/* ---- replies ------------------------------------------------------------------------------------------- */

static void take_pulled(struct generator *g, struct slot *slot, const struct reply *reply)
{
    struct pull_answer answer;
    int64_t records = count_records(reply->body, reply->body_size, g->options.tag);
    if (!read_pull_answer(reply, &answer) || records < (reply->code == 0))
        fail("a pull answer is malformed, or has records that were not asked for");
    int64_t passed = answer.next_offset - slot->offset;
    if (g->options.tag == NULL ? passed != records : passed < 1 || passed < records)
        fail("records and offsets of a pull answer disagree");
    if (records > 0)
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
        count_messages(g, slot, units(g), units(g) * g->options.body_size);
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
    if (reply->code == 0 || (reply->code == CODE_NONE_MATCHED && g->options.tag != NULL)) {
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
            fail("a question is not answered");
        to += n;
        size -= (size_t)n;
    }
}

/* The next reply, which stays in the inbox. */
static struct reply receive_reply(struct generator *g, int fd)
{
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

static struct reply ask(struct generator *g, int fd, const unsigned char *frame, size_t size)
{
    if (send(fd, frame, size, MSG_NOSIGNAL) != (ssize_t)size)
        fail_errno("send");
    return receive_reply(g, fd);
}

/* The first send creates a topic where the broker allows it, and the first to a queue that queue's files: what
 * is measured should not. */
static void open_queue(struct generator *g, int fd, const char *topic, int queue)
{
    struct send_plan plan = {.kind = SEND_SINGLE, .topic = topic, .body_size = 16, .topic_queues = g->options.queues};
    struct template first = make_send(&g->dialect, &plan);
    unsigned char *frame = allocate(first.size);
    stamp(&first, frame, OPAQUE_FIRST, queue, g->unix_ms, g->next_key++);
    int code = -1;
    for (int tries = 0; tries < SETUP_TRIES && code != 0; tries++) {
        code = ask(g, fd, frame, first.size).code;
        if (code != 0)
            usleep(200000);
    }
    if (code != 0) {
        fprintf(stderr, "the first send to a queue is refused with code %d\n", code);
        exit(1);
    }
    free(frame);
    free(first.marks);
    free(first.bytes);
}

/* As many queues as the routes of all topics tell, at most QUEUES_MAX. */
static void learn_queues(struct generator *g)
{
    int fd = connect_to(g->options.host, g->options.namesrv_port);
    int64_t fewest = QUEUES_MAX;
    for (int topic = 0; topic < g->options.topics; topic++) {
        unsigned char frame[SMALL_FRAME];
        size_t size = make_route(g->topics[topic], frame, sizeof frame, OPAQUE_FIRST);
        int64_t queues = 0;
        for (int tries = 0; tries < SETUP_TRIES && queues < 1; tries++) {
            struct reply reply = ask(g, fd, frame, size);
            const unsigned char *at = find_behind(reply.body, reply.body_size, "\"writeQueueNums\":");
            if (reply.code != 0 || at == NULL || !read_decimal(at, reply.body + reply.body_size, &queues))
                usleep(200000);
        }
        if (queues < 1)
            fail("the name server knows no route to the topic");
        fewest = queues < fewest ? queues : fewest;
    }
    close(fd);
    g->options.queues = (int)fewest;
}

/* Readers of one queue start spread over it, so that they do not all ask for the same records; unless they replay. */
static void place_readers(struct generator *g)
{
    int fd = connect_to(g->options.host, g->options.port);
    const struct options *o = &g->options;
    int readers = o->connections * o->window;
    for (int i = 0; i < readers; i++) {
        struct slot *slot = &g->connections[i / o->window].slots[i % o->window];
        slot->topic = i % o->topics;
        slot->queue = i / o->topics % o->queues;
        struct pull_plan plan = {.topic = g->topics[slot->topic], .queue = slot->queue, .count = 1};
        unsigned char frame[SMALL_FRAME];
        size_t size = make_pull(&g->dialect, &plan, frame, sizeof frame, OPAQUE_FIRST);
        struct reply reply = ask(g, fd, frame, size);
        struct pull_answer answer;
        if (reply.code != 0 || !read_pull_answer(&reply, &answer))
            fail("a queue is empty or cannot be pulled: fill the topic first");
        int64_t span = answer.max_offset - answer.min_offset;
        slot->offset = answer.min_offset + (o->from_start ? 0 : span * i / readers);
    }
    close(fd);
}

/* Messages that can be read in all topics; the questions go out together, since each waits for the load's. */
static uint64_t readable(struct generator *g)
{
    int questions = g->options.topics * g->options.queues;
    unsigned char *frames = allocate((size_t)questions * SMALL_FRAME);
    size_t size = 0;
    for (int i = 0; i < questions; i++)
        size += make_max_offset(g->topics[i % g->options.topics], frames + size, SMALL_FRAME, OPAQUE_FIRST,
                                i / g->options.topics);
    if (send(g->asking, frames, size, MSG_NOSIGNAL) != (ssize_t)size)
        fail_errno("send");
    free(frames);
    uint64_t messages = 0;
    for (int i = 0; i < questions; i++) {
        struct reply reply = receive_reply(g, g->asking);
        int64_t offset = 0;
        if (!read_max_offset(&reply, &offset) || offset < 0)
            fail("a max offset is not answered");
        messages += (uint64_t)offset;
    }
    return messages;
}

static void open_connection(struct generator *g, struct connection *c)
{
    const struct options *o = &g->options;
    size_t frame = SMALL_FRAME;
    for (int i = 0; i < g->rows * o->topics; i++)
        frame = g->templates[i].size > frame ? g->templates[i].size : frame;
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

static void set_up_topics(struct generator *g)
{
    struct options *o = &g->options;
    for (int i = 0; i < o->topics; i++)
        snprintf(g->topics[i], TOPIC_NAME, o->topics > 1 ? "%s-%02d" : "%s", o->topic, i);
    g->asking = -1;
    if (o->fixed_queues)
        return;
    int fd = connect_to(o->host, o->port);
    for (int i = 0; o->scenario != SCENARIO_PULL && i < o->topics; i++)
        open_queue(g, fd, g->topics[i], 0);
    learn_queues(g);
    for (int i = 0; o->scenario != SCENARIO_PULL && i < o->topics; i++)
        for (int queue = 1; queue < o->queues; queue++)
            open_queue(g, fd, g->topics[i], queue);
    close(fd);
    if (o->scenario == SCENARIO_TRANSACTION)
        g->asking = connect_to(o->host, o->port);
}

/* Of a batch, all tags are in each; of other sends, each row has its own. */
static void make_templates(struct generator *g)
{
    const struct options *o = &g->options;
    enum send_kind kind = o->scenario == SCENARIO_BATCH         ? SEND_BATCH
                          : o->scenario == SCENARIO_TRANSACTION ? SEND_HALF
                                                                : SEND_SINGLE;
    g->rows = kind == SEND_BATCH || o->scenario == SCENARIO_PULL ? 1 : message_variants(o->message);
    g->templates = allocate((size_t)(g->rows * o->topics) * sizeof *g->templates);
    for (int i = 0; i < g->rows * o->topics; i++) {
        struct send_plan plan = {.kind = kind, .topic = g->topics[i % o->topics], .variant = i / o->topics + i % o->topics,
                                 .body_size = o->body_size, .units = o->units, .topic_queues = o->queues};
        g->templates[i] = make_send(&g->dialect, &plan);
        if (g->templates[i].size > FRAME_MAX)
            fail("the request is larger than a frame may be");
    }
}

static void read_clocks(struct generator *g)
{
    g->now = now_ns();
    g->unix_ms = clock_ns(CLOCK_REALTIME) / 1000000;
}

static void set_up(struct generator *g)
{
    struct options *o = &g->options;
    read_clocks(g);
    snprintf(g->dialect.key_head, sizeof g->dialect.key_head, "%08X%08X", (unsigned)getpid(),
             (unsigned)(g->unix_ms / 1000));
    g->inbox = allocate(INBOX_SIZE);
    g->next_one_way = OPAQUE_ONE_WAY;
    set_up_topics(g);
    make_templates(g);
    g->epoll = epoll_create1(EPOLL_CLOEXEC);
    g->connections = allocate((size_t)o->connections * sizeof *g->connections);
    for (int i = 0; i < o->connections; i++)
        open_connection(g, &g->connections[i]);
    if (o->scenario == SCENARIO_PULL)
        place_readers(g);
    g->schedule.room = (size_t)(o->connections * o->window);
    g->schedule.ring = allocate(g->schedule.room * sizeof *g->schedule.ring);
    g->schedule.interval = o->rate > 0 ? (double)SECOND / o->rate : 0;
}

/* ---- the run ------------------------------------------------------------------------------------------- */

/* With a rate: send what is due by now. */
static void send_due(struct generator *g)
{
    struct schedule *s = &g->schedule;
    while (s->count > 0 && !g->draining && s->next_due <= (double)g->now) {
        struct idle idle = s->ring[s->first];
        s->first = (s->first + 1) % s->room;
        s->count--;
        send_request(g, idle.connection, idle.slot, (uint64_t)s->next_due);
        s->next_due += s->interval;
        flush(g, idle.connection);
    }
}

/* Sleep until something arrives, a request is due, or a tick is over. */
static void wait_for_events(struct generator *g)
{
    const struct schedule *s = &g->schedule;
    double wait = (double)TICK;
    if (s->count > 0 && !g->draining)
        wait = s->next_due - (double)g->now;
    wait = wait < 0 ? 0 : wait < (double)TICK ? wait : (double)TICK;
    struct timespec timeout = {.tv_nsec = (long)wait};
    struct pollfd events = {.fd = g->epoll, .events = POLLIN};
    ppoll(&events, 1, &timeout, NULL);
}

static void turn_loop(struct generator *g)
{
    struct epoll_event events[EVENTS_MAX];
    bool scheduled = g->options.rate > 0;
    if (scheduled)
        wait_for_events(g);
    int count = epoll_wait(g->epoll, events, EVENTS_MAX, scheduled ? 0 : (int)(TICK / 1000000));
    if (count < 0 && errno != EINTR)
        fail_errno("epoll_wait");
    for (int i = 0; i < count; i++) {
        struct connection *c = events[i].data.ptr;
        if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR))
            receive(g, c);
        flush(g, c);
    }
    read_clocks(g);
    send_due(g);
}

static void start_requests(struct generator *g)
{
    read_clocks(g);
    g->schedule.next_due = (double)g->now;
    for (int i = 0; i < g->options.connections; i++) {
        struct connection *c = &g->connections[i];
        for (int s = 0; s < g->options.window; s++)
            next_request(g, c, &c->slots[s]);
        flush(g, c);
    }
}

/* What one end of the window finds: processor time, and right after that how much can be read. */
static uint64_t mark_window(struct generator *g, struct usage *usage)
{
    *usage = take_usage(g->options.servers, g->options.server_count);
    return g->asking < 0 ? 0 : readable(g);
}

/* Wait until all that was decided can be read, or nothing more comes. */
static uint64_t drain_deliveries(struct generator *g, uint64_t before)
{
    uint64_t found = readable(g), end = now_ns() + DRAIN, came_at = now_ns();
    while (found - before < g->total.ended && now_ns() < end && now_ns() - came_at < DELIVERY_PAUSE) {
        usleep(50000);
        uint64_t later = readable(g);
        if (later != found)
            came_at = now_ns();
        found = later;
    }
    return found;
}

static void count_delivered(const struct options *o, struct counters *counters, uint64_t messages)
{
    counters->messages = messages;
    counters->bytes = messages * o->body_size;
}

static void run(struct generator *g)
{
    uint64_t before = g->asking < 0 ? 0 : readable(g);
    uint64_t window_opens = now_ns() + (uint64_t)(g->options.warmup * (double)SECOND);
    start_requests(g);
    while (!g->draining && now_ns() < window_opens)
        turn_loop(g);
    uint64_t readable_first = mark_window(g, &g->window_start);
    uint64_t window_closes = g->window_start.wall + (uint64_t)(g->options.seconds * (double)SECOND);
    g->measuring = true;
    while (!(g->draining && g->in_flight == 0) && now_ns() < window_closes)
        turn_loop(g);
    uint64_t readable_last = mark_window(g, &g->window_end);
    g->measuring = false;
    g->draining = true;
    for (uint64_t end = now_ns() + DRAIN; g->in_flight > 0 && now_ns() < end;)
        turn_loop(g);
    if (g->asking >= 0) {
        count_delivered(&g->options, &g->window, readable_last - readable_first);
        count_delivered(&g->options, &g->total, drain_deliveries(g, before) - before);
    }
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
    static const char *const headers[] = {"json", "rocketmq", "msgpack"};
    printf("{\"scenario\": \"%s\", \"message\": \"%s\", \"header\": \"%s\", \"connections\": %d, \"window\": %d, ",
           SCENARIO_NAMES[o->scenario], MESSAGE_NAMES[o->message], headers[o->header], o->connections, o->window);
    printf("\"topics\": %d, \"queues\": %d, \"body_size\": %zu, \"units\": %zu, \"frame_size\": %zu, \"rate_due\": %.1f, ",
           o->topics, o->queues, o->body_size, units(g), g->templates[0].size, o->rate);
    print_counters("total", &g->total);
    print_counters("measured", &g->window);
    printf("\"lost\": %" PRId64 ", \"unmatched\": %" PRIu64 ", \"server_requests\": %" PRIu64
           ", \"one_way_answers\": %" PRIu64 ", ",
           g->in_flight, g->unmatched, g->server_requests, g->one_way_answers);
    printf("\"first_refusal\": ");
    print_quoted(g->refusal, g->refusal_size);
    printf(", \"seconds\": %.6f, \"own_cpu_seconds\": %.6f, \"server_cpu_seconds\": %.6f, "
           "\"machine_cpu_seconds\": %.2f, ",
           seconds_between(a->wall, b->wall), seconds_between(a->own, b->own), seconds_between(a->servers, b->servers),
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
    prctl(PR_SET_TIMERSLACK, 1); /* ns: a schedule of microseconds */
    g.dialect = (struct dialect){.type = g.options.header, .group = g.options.group, .message = g.options.message,
                                 .broker_name = g.options.broker_name};
    set_up(&g);
    run(&g);
    print_result(&g);
    return 0;
}
