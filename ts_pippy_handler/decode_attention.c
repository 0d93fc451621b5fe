/*
 * Attention of decode rows, one token each, over a key/value cache in the memory of a CPU, in float32.
 *
 * native_attention.py compiles this while a stage loads, for one shape of attention layers:
 *   KEY_DIM, VALUE_DIM   width of a head's keys and values
 *   GROUP                query heads that share a key/value head
 * All sums of a row are its own and go over its tokens one by one, wherever they lie: its result does not depend on what
 * else is in the batch, on threads, nor on how the cache was handed out.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#ifdef _OPENMP
#include <omp.h>
#endif

/* How many numbers of a value are summed in one pass over the cache: what fits the registers of a CPU for a group. */
#define WIDTH (VALUE_DIM % 32 == 0 ? 32 : VALUE_DIM % 16 == 0 ? 16 : VALUE_DIM % 8 == 0 ? 8 : 1)

/* Reading the cache is most of the time: keys are fetched so many tokens ahead, values while their keys are used. */
#define AHEAD 8
#define LINE 16

/* One row, and the heads that share one key/value head. `scores` has room for GROUP * length numbers. */
static void attend_group(const float *query, int64_t head_stride, const float *keys, const float *values,
                         const int64_t *slots, int64_t length, float scale, float *scores, float *out)
{
    float scaled[GROUP][KEY_DIM];
    float total[GROUP];

    for (int head = 0; head < GROUP; head++)
        for (int i = 0; i < KEY_DIM; i++)
            scaled[head][i] = query[head * head_stride + i] * scale;

    for (int64_t position = 0; position < length; position++) {
        const float *key = keys + slots[position] * KEY_DIM;
        const int64_t ahead = slots[position + AHEAD < length ? position + AHEAD : length - 1];
        for (int i = 0; i < KEY_DIM; i += LINE)
            __builtin_prefetch(keys + ahead * KEY_DIM + i);
        for (int i = 0; i < VALUE_DIM; i += LINE)
            __builtin_prefetch(values + slots[position] * VALUE_DIM + i);
        for (int head = 0; head < GROUP; head++) {
            float score = 0;
            for (int i = 0; i < KEY_DIM; i++)
                score += scaled[head][i] * key[i];
            scores[head * length + position] = score;
        }
    }

    for (int head = 0; head < GROUP; head++) {
        float *own = scores + head * length;
        float most = own[0], sum = 0;
        for (int64_t i = 1; i < length; i++)
            most = own[i] > most ? own[i] : most;
        for (int64_t i = 0; i < length; i++) {
            own[i] = expf(own[i] - most);
            sum += own[i];
        }
        total[head] = sum;
    }

    for (int begin = 0; begin < VALUE_DIM; begin += WIDTH) {
        float sums[GROUP][WIDTH] = {{0}};
        for (int64_t position = 0; position < length; position++) {
            const float *value = values + slots[position] * VALUE_DIM + begin;
            for (int head = 0; head < GROUP; head++)
                for (int i = 0; i < WIDTH; i++)
                    sums[head][i] += scores[head * length + position] * value[i];
        }
        for (int head = 0; head < GROUP; head++)
            for (int i = 0; i < WIDTH; i++)
                out[head * VALUE_DIM + begin + i] = sums[head][i] / total[head];
    }
}

/*
 * query    [num_groups * GROUP heads, T rows, KEY_DIM] with the given strides, in numbers; the last one is 1
 * keys     [num_groups, num_slots, KEY_DIM], values [num_groups, num_slots, VALUE_DIM], contiguous
 * rows     [num_rows]: which rows of query and out
 * offsets  [num_rows + 1]: row i attends to slots[offsets[i]] ... slots[offsets[i + 1] - 1], at least one
 * longest  the most slots of any row
 * out      [T, num_groups * GROUP, VALUE_DIM], contiguous
 *
 * Returns 0, or 1 if there is no memory.
 */
int attend(const float *query, int64_t head_stride, int64_t row_stride, const float *keys, const float *values,
           int64_t num_groups, int64_t num_slots, const int64_t *rows, const int64_t *offsets, int64_t num_rows,
           const int64_t *slots, int64_t longest, float scale, int num_threads, float *out)
{
    float *scores = malloc(sizeof(float) * GROUP * (size_t)longest * (size_t)num_threads);
    if (!scores)
        return 1;
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(num_threads) if (num_threads > 1)
    for (int64_t i = 0; i < num_rows; i++)
        for (int64_t group = 0; group < num_groups; group++) {
#ifdef _OPENMP
            float *own = scores + (size_t)omp_get_thread_num() * GROUP * longest;
#else
            float *own = scores;
#endif
            const int64_t head = group * GROUP;
            attend_group(query + head * head_stride + rows[i] * row_stride, head_stride,
                         keys + group * num_slots * KEY_DIM, values + group * num_slots * VALUE_DIM,
                         slots + offsets[i], offsets[i + 1] - offsets[i], scale, own,
                         out + (rows[i] * num_groups * GROUP + head) * VALUE_DIM);
        }
    free(scores);
    return 0;
}
