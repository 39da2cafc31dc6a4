/* Latencies in a log-linear histogram: 32 steps per power of two, so a reading is at most 3 % too high. */
#ifndef HALFMQ_BENCHMARKS_HISTOGRAM_H
#define HALFMQ_BENCHMARKS_HISTOGRAM_H

#include <stdint.h>

enum {
    HISTOGRAM_STEP_BITS = 5,
    HISTOGRAM_STEPS = 1 << HISTOGRAM_STEP_BITS,
    HISTOGRAM_BUCKETS = (64 - HISTOGRAM_STEP_BITS + 1) * HISTOGRAM_STEPS,
};

struct histogram {
    uint64_t count, max;
    uint64_t buckets[HISTOGRAM_BUCKETS];
};

static inline unsigned histogram_bucket(uint64_t value)
{
    if (value < HISTOGRAM_STEPS)
        return (unsigned)value;
    unsigned shift = 63u - (unsigned)__builtin_clzll(value) - HISTOGRAM_STEP_BITS;
    return (shift << HISTOGRAM_STEP_BITS) + (unsigned)(value >> shift);
}

/* The largest value that falls into the bucket. */
static inline uint64_t histogram_upper(unsigned bucket)
{
    if (bucket < HISTOGRAM_STEPS)
        return bucket;
    unsigned shift = (bucket >> HISTOGRAM_STEP_BITS) - 1;
    uint64_t step = (bucket & (HISTOGRAM_STEPS - 1)) | HISTOGRAM_STEPS;
    return ((step + 1) << shift) - 1;
}

static inline void histogram_add(struct histogram *histogram, uint64_t value)
{
    histogram->count++;
    histogram->buckets[histogram_bucket(value)]++;
    if (value > histogram->max)
        histogram->max = value;
}

/* The value that the given share (0 … 1) of all values does not exceed; 0 when there are none. */
static inline uint64_t histogram_percentile(const struct histogram *histogram, double share)
{
    uint64_t wanted = (uint64_t)(share * (double)histogram->count + 0.5);
    uint64_t seen = 0;
    for (unsigned bucket = 0; histogram->count > 0 && bucket < HISTOGRAM_BUCKETS; bucket++) {
        seen += histogram->buckets[bucket];
        if (seen >= wanted && seen > 0) {
            uint64_t upper = histogram_upper(bucket);
            return upper < histogram->max ? upper : histogram->max;
        }
    }
    return histogram->max;
}

#endif
