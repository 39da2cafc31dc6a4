/* The limits M and D: what memory and disk of this machine allow.
 *
 * M: copy one stored record of 1213 bytes into fresh memory, and CRC-32 of its 1 KiB body.
 * D: write one record and fdatasync, one after another, into a file whose blocks exist already.
 * Sequential: write 4 MiB and fdatasync, one after another.
 *
 * Usage: limits DIRECTORY SECONDS [--single-only]. Prints one JSON object; the file it writes is removed.
 */
#define _GNU_SOURCE
#include "wire.h"

#include <fcntl.h>
#include <unistd.h>

enum {
    RECORD_SIZE = 1213,               /* a stored message with a 1 KiB body */
    BODY_SIZE = 1024,
    CHUNK = 4 * 1024 * 1024,
    FILE_SIZE = 64 * 1024 * 1024,
    ARENA_SIZE = 128 * 1024 * 1024,   /* larger than the caches: a log is written once and left */
    SLICES = 16,
};

static const double SECOND = 1e9;

/* ---- CRC-32, sixteen bytes at a time ------------------------------------------------------------------- */

static uint32_t crc_table[SLICES][256];

static void make_crc_table(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
        crc_table[0][byte] = crc;
    }
    for (int slice = 1; slice < SLICES; slice++)
        for (int byte = 0; byte < 256; byte++) {
            uint32_t before = crc_table[slice - 1][byte];
            crc_table[slice][byte] = before >> 8 ^ crc_table[0][before & 255];
        }
}

/* `size` is a multiple of SLICES. */
static uint32_t crc32_of(const unsigned char *bytes, size_t size)
{
    uint32_t crc = 0xffffffffu;
    for (const unsigned char *end = bytes + size; bytes < end; bytes += SLICES) {
        unsigned char head[4] = {(unsigned char)(bytes[0] ^ crc), (unsigned char)(bytes[1] ^ crc >> 8),
                                 (unsigned char)(bytes[2] ^ crc >> 16), (unsigned char)(bytes[3] ^ crc >> 24)};
        uint32_t next = 0;
        for (int i = 0; i < 4; i++)
            next ^= crc_table[SLICES - 1 - i][head[i]];
        for (int i = 4; i < SLICES; i++)
            next ^= crc_table[SLICES - 1 - i][bytes[i]];
        crc = next;
    }
    return ~crc;
}

static void check_crc(void)
{
    unsigned char zeros[32] = {0};
    if (crc32_of(zeros, sizeof zeros) != 0x190A55ADu) /* as zlib computes it */
        fail("the CRC is wrong");
}

/* ---- measurements -------------------------------------------------------------------------------------- */

/* Nanoseconds that `step` takes, called with growing numbers for about `seconds`. */
static double time_of(void (*step)(size_t number, void *state), void *state, double seconds, size_t *count)
{
    uint64_t start = now_ns(), now = start;
    *count = 0;
    while ((double)(now - start) < seconds * SECOND) {
        step((*count)++, state);
        now = now_ns();
    }
    return (double)(now - start) / (double)*count;
}

struct memory {
    unsigned char *arena;
    unsigned char record[RECORD_SIZE];
    uint32_t crc;
};

enum { RECORDS_PER_STEP = 1000 }; /* the clock is read once per step */

static void copy_records(size_t number, void *state)
{
    struct memory *m = state;
    size_t places = ARENA_SIZE / RECORD_SIZE;
    for (size_t i = number * RECORDS_PER_STEP; i < (number + 1) * RECORDS_PER_STEP; i++)
        memcpy(m->arena + i % places * RECORD_SIZE, m->record, RECORD_SIZE);
}

static void sum_bodies(size_t number, void *state)
{
    struct memory *m = state;
    for (size_t i = 0; i < RECORDS_PER_STEP; i++) {
        m->record[0] = (unsigned char)(number + i);
        m->crc ^= crc32_of(m->record, BODY_SIZE);
    }
}

struct disk {
    int fd;
    size_t step;
    unsigned char *chunk;
};

static void write_and_sync(size_t number, void *state)
{
    struct disk *d = state;
    size_t at = number % (FILE_SIZE / d->step) * d->step;
    if (pwrite(d->fd, d->chunk, d->step, (off_t)at) != (ssize_t)d->step || fdatasync(d->fd) != 0)
        fail_errno("writing to the disk");
}

/* The file is gone from its directory at once, so that nothing can leave it behind. */
static int open_file(const char *directory, const unsigned char *chunk)
{
    int fd = open(directory, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0)
        fail_errno(directory);
    for (size_t at = 0; at < FILE_SIZE; at += CHUNK)
        if (pwrite(fd, chunk, CHUNK, (off_t)at) != CHUNK)
            fail_errno("writing to the disk");
    if (fsync(fd) != 0)
        fail_errno("fsync");
    return fd;
}

static void measure_memory(double seconds)
{
    struct memory m = {.arena = allocate(ARENA_SIZE)};
    size_t count = 0;
    memset(m.arena, 1, ARENA_SIZE);
    double copy = time_of(copy_records, &m, seconds, &count) / RECORDS_PER_STEP;
    double crc = time_of(sum_bodies, &m, seconds, &count) / RECORDS_PER_STEP;
    volatile uint32_t used = m.crc; /* or the compiler could leave the sums out */
    (void)used;
    printf("\"copy_us\": %.3f, \"crc_us\": %.3f, ", copy / 1000, crc / 1000);
    free(m.arena);
}

static void measure_disk(const char *directory, double seconds, bool single_only)
{
    struct disk d = {.step = RECORD_SIZE, .chunk = allocate(CHUNK)};
    memset(d.chunk, 1, CHUNK);
    d.fd = open_file(directory, d.chunk);
    size_t count = 0;
    double single = time_of(write_and_sync, &d, seconds, &count);
    printf("\"fdatasync_per_second\": %.0f", SECOND / single);
    if (!single_only) {
        d.step = CHUNK;
        double chunk = time_of(write_and_sync, &d, seconds, &count);
        printf(", \"sequential_mb_per_second\": %.0f", CHUNK / chunk * 1e3);
    }
    close(d.fd);
    free(d.chunk);
}

int main(int argc, char **argv)
{
    bool single_only = argc == 4 && strcmp(argv[3], "--single-only") == 0;
    if (argc != 3 && !single_only)
        fail("usage: limits DIRECTORY SECONDS [--single-only]");
    double seconds = strtod(argv[2], NULL);
    make_crc_table();
    check_crc();
    printf("{");
    if (!single_only)
        measure_memory(seconds);
    measure_disk(argv[1], seconds, single_only);
    printf("}\n");
    return 0;
}
