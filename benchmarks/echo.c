/* The limit F: a server that does nothing but the sockets.
 *
 * It takes the generator's frames and answers each with a reply as small and as valid as a broker's: a send,
 * a batch, a half message and a commit with a send reply, a pull with as many canned records as asked. What
 * it costs per message is the price of the connections alone; no broker on this machine can be cheaper.
 *
 * Usage: echo [--cpu N]. Prints "ready port=N" and serves until it is ended. One thread, epoll, 127.0.0.1.
 */
#define _GNU_SOURCE
#include "frames.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    INBOX_SIZE = 4 * 1024 * 1024,    /* the largest request */
    RECEIVE_MAX = 256 * 1024,        /* as a broker's event loop reads */
    OUTBOX_SIZE = 1024 * 1024,
    REPLY_MAX = 64 * 1024,           /* head and body of one reply; the outbox is sent when less is free */
    HEAD_MAX = 1024,
    EVENTS_MAX = 256,
    RECORD_SIZE = 1213,              /* what a broker stores of a 1 KiB message */
    RECORDS_MAX = 32,
    QUEUE_LENGTH = 1000000,          /* the offsets a canned queue pretends to have */
};

/* Input that is not a whole frame yet, and output that the socket did not take. */
struct rest {
    unsigned char *bytes;
    size_t size, room;
};

struct connection {
    int fd;
    struct rest input, output;
};

struct server {
    int epoll, listener, port;
    unsigned char *inbox, *outbox;
    size_t outbox_size;
    unsigned char records[RECORDS_MAX * RECORD_SIZE];
};

static void keep(struct rest *rest, const unsigned char *bytes, size_t size)
{
    if (size > rest->room) {
        unsigned char *larger = allocate(size * 2); /* `bytes` may lie in the old one */
        memcpy(larger, bytes, size);
        free(rest->bytes);
        *rest = (struct rest){larger, size, size * 2};
        return;
    }
    if (size > 0)
        memmove(rest->bytes, bytes, size);
    rest->size = size;
}

/* ---- replies ------------------------------------------------------------------------------------------- */

static void put_frame(struct server *s, enum header_type type, const void *header, size_t header_size,
                      const unsigned char *body, size_t body_size)
{
    unsigned char *at = s->outbox + s->outbox_size;
    put_u32(at, (uint32_t)(4 + header_size + body_size));
    put_u32(at + 4, (uint32_t)type << 24 | (uint32_t)header_size);
    memcpy(at + FRAME_HEAD, header, header_size);
    if (body_size > 0)
        memcpy(at + FRAME_HEAD + header_size, body, body_size);
    s->outbox_size += FRAME_HEAD + header_size + body_size;
}

/* Fixed but for the opaque: F is meant to be the floor, and snprintf alone would double it when pipelined. */
static const char SEND_REPLY[] =
    "{\"code\":0,\"extFields\":{\"MSG_REGION\":\"DefaultRegion\",\"TRACE_ON\":\"true\","
    "\"msgId\":\"7F00000100002A9F0000000000000000\",\"queueId\":\"0\",\"queueOffset\":\"0\","
    "\"transactionId\":\"00000000000000000000000000000000\"},\"flag\":1,\"language\":\"OTHER\","
    "\"opaque\":1000000000,\"serializeTypeCurrentRPC\":\"JSON\",\"version\":479}";
static const char SEND_REPLY_OPAQUE[] = "\"opaque\":";

/* [0, opaque, 1, OTHER, 479, nil, [id, 0, 0, id, nil, region, "true"]] */
static const unsigned char PACKED_SEND_REPLY[] =
    "\x97\x00\xce\x00\x00\x00\x00\x01\x07\xcd\x01\xdf\xc0\x97\xd9\x20"
    "7F00000100002A9F0000000000000000\x00\x00\xd9\x20"
    "00000000000000000000000000000000\xc0\xad"
    "DefaultRegion\xa4true";
enum { PACKED_OPAQUE_AT = 3 };

static void answer_send(struct server *s, const struct reply *request)
{
    unsigned char *header = s->outbox + s->outbox_size + FRAME_HEAD;
    if (request->type == HEADER_MSGPACK) {
        put_frame(s, HEADER_MSGPACK, PACKED_SEND_REPLY, sizeof PACKED_SEND_REPLY - 1, NULL, 0);
        put_u32(header + PACKED_OPAQUE_AT, request->opaque);
        return;
    }
    static size_t opaque_at = 0;
    if (opaque_at == 0)
        opaque_at = (size_t)(strstr(SEND_REPLY, SEND_REPLY_OPAQUE) - SEND_REPLY) + sizeof SEND_REPLY_OPAQUE - 1;
    put_frame(s, HEADER_JSON, SEND_REPLY, sizeof SEND_REPLY - 1, NULL, 0);
    put_digits(header + opaque_at, OPAQUE_DIGITS, request->opaque);
    for (size_t i = 0; i < OPAQUE_DIGITS - 1 && header[opaque_at + i] == '0'; i++)
        header[opaque_at + i] = ' '; /* JSON allows blanks before a number, but no zeros */
}

static int64_t between(int64_t lowest, int64_t value, int64_t highest)
{
    return value < lowest ? lowest : value > highest ? highest : value;
}

/* Pulls are answered in JSON whatever they came in; the generator reads both. */
static void answer_pull(struct server *s, const struct reply *request)
{
    int64_t offset = 0, count = 1;
    read_pull_request(request, &offset, &count);
    offset = between(0, offset, QUEUE_LENGTH - 1);
    count = between(1, count, QUEUE_LENGTH - offset < RECORDS_MAX ? QUEUE_LENGTH - offset : RECORDS_MAX);
    char header[HEAD_MAX];
    int size = snprintf(header, sizeof header,
                        "{\"code\":0,\"extFields\":{\"maxOffset\":\"%d\",\"minOffset\":\"0\","
                        "\"nextBeginOffset\":\"%lld\",\"suggestWhichBrokerId\":\"0\"},\"flag\":1,"
                        "\"language\":\"OTHER\",\"opaque\":%u,\"remark\":\"FOUND\",\"version\":479}",
                        QUEUE_LENGTH, (long long)(offset + count), request->opaque);
    put_frame(s, HEADER_JSON, header, (size_t)size, s->records, (size_t)count * RECORD_SIZE);
}

/* Clients that ask for a route are sent back here, with eight queues. */
static void answer_route(struct server *s, const struct reply *request)
{
    char header[HEAD_MAX], body[HEAD_MAX];
    int size = snprintf(header, sizeof header, "{\"code\":0,\"flag\":1,\"language\":\"OTHER\",\"opaque\":%u,\"version\":479}",
                        request->opaque);
    int body_size = snprintf(body, sizeof body,
                             "{\"brokerDatas\":[{\"brokerAddrs\":{\"0\":\"127.0.0.1:%d\"},\"brokerName\":\"broker-a\","
                             "\"cluster\":\"DefaultCluster\"}],\"filterServerTable\":{},\"queueDatas\":[{\"brokerName\":"
                             "\"broker-a\",\"perm\":6,\"readQueueNums\":8,\"topicSysFlag\":0,\"writeQueueNums\":8}]}",
                             s->port);
    put_frame(s, HEADER_JSON, header, (size_t)size, (const unsigned char *)body, (size_t)body_size);
}

static void answer(struct server *s, const struct reply *request)
{
    if (request->flag & FLAG_ONE_WAY)
        return;
    if (request->code == CODE_PULL)
        answer_pull(s, request);
    else if (request->code == CODE_ROUTE)
        answer_route(s, request);
    else
        answer_send(s, request);
}

/* ---- connections --------------------------------------------------------------------------------------- */

static void close_connection(struct connection *c)
{
    close(c->fd);
    free(c->input.bytes);
    free(c->output.bytes);
    free(c);
}

static void watch(struct server *s, struct connection *c, uint32_t events)
{
    struct epoll_event event = {.events = events, .data = {.ptr = c}};
    if (epoll_ctl(s->epoll, EPOLL_CTL_MOD, c->fd, &event) != 0)
        fail_errno("epoll_ctl");
}

/* What of `bytes` the socket took; −1 when the peer is gone. */
static ssize_t write_some(int fd, const unsigned char *bytes, size_t size)
{
    size_t done = 0;
    while (done < size) {
        ssize_t n = send(fd, bytes + done, size - done, MSG_NOSIGNAL);
        if (n < 0 && errno == EAGAIN)
            break;
        if (n < 0 && errno != EINTR)
            return -1;
        done += n > 0 ? (size_t)n : 0;
    }
    return (ssize_t)done;
}

/* Send the outbox. While something is left, the connection is not read. */
static bool send_outbox(struct server *s, struct connection *c)
{
    ssize_t done = write_some(c->fd, s->outbox, s->outbox_size);
    if (done < 0)
        return false;
    keep(&c->output, s->outbox + done, s->outbox_size - (size_t)done);
    s->outbox_size = 0;
    if (c->output.size > 0)
        watch(s, c, EPOLLOUT);
    return true;
}

/* Answer whole frames until the input or the room for output ends; SIZE_MAX for a frame that is none. */
static size_t answer_frames(struct server *s, const unsigned char *data, size_t size)
{
    size_t used = 0;
    while (size - used >= FRAME_HEAD && OUTBOX_SIZE - s->outbox_size >= REPLY_MAX) {
        size_t frame_size = 4 + (size_t)get_u32(data + used);
        struct reply request;
        if (frame_size < FRAME_HEAD || frame_size > INBOX_SIZE - RECEIVE_MAX)
            return SIZE_MAX;
        if (size - used < frame_size)
            break;
        if (!read_reply(data + used, frame_size, &request))
            return SIZE_MAX;
        answer(s, &request);
        used += frame_size;
    }
    return used;
}

/* Answer what lies in the inbox and keep the rest; false when the connection is to be closed. */
static bool serve(struct server *s, struct connection *c, size_t size)
{
    size_t done = 0;
    for (;;) {
        size_t used = answer_frames(s, s->inbox + done, size - done);
        if (used == SIZE_MAX || !send_outbox(s, c))
            return false;
        done += used;
        if (used == 0 || c->output.size > 0)
            break;
    }
    keep(&c->input, s->inbox + done, size - done);
    return true;
}

static bool readable(struct server *s, struct connection *c)
{
    if (c->input.size > 0)
        memcpy(s->inbox, c->input.bytes, c->input.size);
    ssize_t n = recv(c->fd, s->inbox + c->input.size, RECEIVE_MAX, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return true;
    return n > 0 && serve(s, c, c->input.size + (size_t)n);
}

static bool writable(struct server *s, struct connection *c)
{
    ssize_t done = write_some(c->fd, c->output.bytes, c->output.size);
    if (done < 0)
        return false;
    keep(&c->output, c->output.bytes + done, c->output.size - (size_t)done);
    if (c->output.size > 0)
        return true;
    watch(s, c, EPOLLIN);
    if (c->input.size > 0) /* whole frames may have waited for the room */
        memcpy(s->inbox, c->input.bytes, c->input.size);
    return serve(s, c, c->input.size);
}

static void accept_connection(struct server *s)
{
    int fd = accept4(s->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0)
        return;
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    struct connection *c = allocate(sizeof *c);
    c->fd = fd;
    struct epoll_event event = {.events = EPOLLIN, .data = {.ptr = c}};
    if (epoll_ctl(s->epoll, EPOLL_CTL_ADD, fd, &event) != 0)
        fail_errno("epoll_ctl");
}

/* ---- main ---------------------------------------------------------------------------------------------- */

/* Of every record, so that pulls that filter by this tag find it. */
static const char TAG_PROPERTY[] = "TAGS\001TagC\002";

static void make_records(struct server *s)
{
    for (int i = 0; i < RECORDS_MAX; i++) {
        unsigned char *record = s->records + i * RECORD_SIZE;
        put_u32(record, RECORD_SIZE);
        put_u32(record + 4, RECORD_MAGIC);
        put_u32(record + RECORD_BODY_SIZE_AT, 1024);
        unsigned char *properties = record + RECORD_FIXED - 2 + 1024; /* the topic is empty */
        put_u16(properties, RECORD_SIZE - RECORD_FIXED - 1024);
        memcpy(properties + 2, TAG_PROPERTY, sizeof TAG_PROPERTY - 1);
    }
}

static int listen_anywhere(int *port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t size = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, size) != 0 || listen(fd, 4096) != 0 ||
        getsockname(fd, (struct sockaddr *)&address, &size) != 0)
        fail_errno("listen");
    *port = ntohs(address.sin_port);
    return fd;
}

static void pin(const char *text)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET((size_t)strtoul(text, NULL, 10) % CPU_SETSIZE, &set);
    if (sched_setaffinity(0, sizeof set, &set) != 0)
        fail_errno("--cpu");
}

static void turn_loop(struct server *s)
{
    struct epoll_event events[EVENTS_MAX];
    int count = epoll_wait(s->epoll, events, EVENTS_MAX, -1);
    for (int i = 0; i < count; i++) {
        struct connection *c = events[i].data.ptr;
        if (c == NULL)
            accept_connection(s);
        else if (!(events[i].events & EPOLLOUT ? writable(s, c) : readable(s, c)))
            close_connection(c);
    }
}

int main(int argc, char **argv)
{
    static struct server s;
    if (argc == 3 && strcmp(argv[1], "--cpu") == 0)
        pin(argv[2]);
    else if (argc != 1)
        fail("usage: echo [--cpu N]");
    make_records(&s);
    s.inbox = allocate(INBOX_SIZE);
    s.outbox = allocate(OUTBOX_SIZE);
    s.listener = listen_anywhere(&s.port);
    s.epoll = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = {.events = EPOLLIN, .data = {.ptr = NULL}};
    if (epoll_ctl(s.epoll, EPOLL_CTL_ADD, s.listener, &event) != 0)
        fail_errno("epoll_ctl");
    printf("ready port=%d\n", s.port);
    fflush(stdout);
    for (;;)
        turn_loop(&s);
}
