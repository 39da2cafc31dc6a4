/* What the load generator and the echo server share: big-endian fields, text search, the clock.
 *
 * A frame is: 4 bytes length of what follows, 4 bytes header type and header length, header, body.
 * Source: RocketMQ NettyDecoder, RemotingCommand.
 */
#ifndef HALFMQ_BENCHMARKS_WIRE_H
#define HALFMQ_BENCHMARKS_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    FRAME_HEAD = 8,                   /* length word and header word */
    FRAME_MAX = 16 * 1024 * 1024,     /* RocketMQ's limit for a whole frame */
    CODE_SEND = 310,                  /* SEND_MESSAGE_V2 */
    CODE_BATCH = 320,                 /* SEND_BATCH_MESSAGE */
    CODE_PULL = 11,                   /* PULL_MESSAGE */
    CODE_MAX_OFFSET = 30,             /* GET_MAX_OFFSET */
    CODE_END_TRANSACTION = 37,
    CODE_ROUTE = 105,                 /* GET_ROUTEINFO_BY_TOPIC */
    FLAG_RESPONSE = 1,
    FLAG_ONE_WAY = 2,
    RECORD_FIXED = 91,                /* a stored record with IPv4 hosts, without body, topic, properties */
    RECORD_BODY_SIZE_AT = 84,
};

static const uint32_t RECORD_MAGIC = 0xDAA320A7u; /* version 1 of the stored record */

enum header_type { HEADER_JSON = 0, HEADER_ROCKETMQ = 1, HEADER_MSGPACK = 2 };

static inline uint32_t get_u16(const unsigned char *at)
{
    return (uint32_t)at[0] << 8 | at[1];
}

static inline uint32_t get_u32(const unsigned char *at)
{
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static inline uint64_t get_u64(const unsigned char *at)
{
    return (uint64_t)get_u32(at) << 32 | get_u32(at + 4);
}

static inline void put_u16(unsigned char *at, uint32_t value)
{
    at[0] = (unsigned char)(value >> 8);
    at[1] = (unsigned char)value;
}

static inline void put_u32(unsigned char *at, uint32_t value)
{
    put_u16(at, value >> 16);
    put_u16(at + 2, value & 0xffff);
}

static inline void put_u64(unsigned char *at, uint64_t value)
{
    put_u32(at, (uint32_t)(value >> 32));
    put_u32(at + 4, (uint32_t)value);
}

/* Right-aligned decimal of exactly `width` digits. */
static inline void put_digits(unsigned char *at, size_t width, uint64_t value)
{
    for (size_t i = width; i-- > 0; value /= 10)
        at[i] = (unsigned char)('0' + value % 10);
}

/* The byte behind the first `needle`, or NULL. A key with its quotes and colon can only match a key: inside
 * a JSON string its closing quote would carry a backslash. */
static inline const unsigned char *find_behind(const unsigned char *text, size_t size, const char *needle)
{
    size_t length = strlen(needle);
    const unsigned char *hit = memmem(text, size, needle, length);
    return hit ? hit + length : NULL;
}

/* The decimal number that starts at `at`, at most 19 digits; false without a digit. */
static inline bool read_decimal(const unsigned char *at, const unsigned char *end, int64_t *value)
{
    bool negative = at < end && *at == '-';
    const unsigned char *digits = at + negative;
    int64_t number = 0;
    const unsigned char *p = digits;
    for (; p < end && p - digits < 18 && *p >= '0' && *p <= '9'; p++)
        number = number * 10 + (*p - '0');
    *value = negative ? -number : number;
    return p > digits;
}

static inline uint64_t clock_ns(clockid_t clock)
{
    struct timespec t;
    if (clock_gettime(clock, &t) != 0)
        return 0;
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline uint64_t now_ns(void)
{
    return clock_ns(CLOCK_MONOTONIC);
}

_Noreturn static inline void fail(const char *what)
{
    fprintf(stderr, "%s\n", what);
    exit(1);
}

_Noreturn static inline void fail_errno(const char *what)
{
    perror(what);
    exit(1);
}

static inline void *allocate(size_t size)
{
    void *memory = calloc(1, size ? size : 1);
    if (memory == NULL)
        fail("out of memory");
    return memory;
}

#endif
