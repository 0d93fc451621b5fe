/*
 * Linear layers in the memory of a CPU, in float32, for processors with AVX2.
 *
 * native_linear.py compiles this while a stage loads. The weight comes in panels of 16 outputs, laid out so that it is
 * read from beginning to end: [panels, inputs, 16]. A tile of up to six rows and one panel keeps its sums in registers.
 * All sums of a row are its own and go over the inputs one by one: its result does not depend on what else is in the
 * batch, nor on threads.
 */
#include <stdint.h>

#define LANES 8
#define PANEL 16
#define TILE 6
/* As many inputs of a panel as stay in the first-level cache while the tiles pass, 4 bytes each times 16. */
#define MOST_INPUTS 640

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4)));

static const float zeros[PANEL];

static inline lanes load(const float *from) { return *(const lanes *)from; }

static inline lanes spread(float x) { return (lanes){x, x, x, x, x, x, x, x}; }

/*
 * What is multiplied next is fetched from memory meanwhile, its lines spread over all tiles of a panel: asked for at
 * once, they would be more than a core can wait for. `done` inputs of the panel's tiles came before this one, and
 * 2^shift inputs, of one tile or of several, pay for a line.
 */
typedef struct {
    const float *next;
    int64_t done;
    int shift;
} ahead;

/* `start` is what the sums begin with, for each row `start_stride` numbers further. */
static inline __attribute__((always_inline)) void multiply_tile(const int height, const float *rows, int64_t row_stride,
                                                                const float *panel, int64_t num_inputs,
                                                                const float *start, int64_t start_stride, float *out,
                                                                int64_t out_stride, ahead fetch)
{
    lanes left[TILE], right[TILE];

#pragma GCC unroll 6
    for (int row = 0; row < height; row++) {
        left[row] = load(start + row * start_stride);
        right[row] = load(start + row * start_stride + LANES);
    }
#pragma GCC unroll 2
    for (int64_t i = 0; i < num_inputs; i++) {
        if (height > 3) /* with less to multiply the processor's own prefetching is as fast */
            __builtin_prefetch(fetch.next + ((fetch.done + i) >> fetch.shift) * PANEL);
        const lanes left_weights = load(panel + i * PANEL), right_weights = load(panel + i * PANEL + LANES);
#pragma GCC unroll 6
        for (int row = 0; row < height; row++) {
            const lanes input = spread(rows[row * row_stride + i]);
            left[row] += input * left_weights;
            right[row] += input * right_weights;
        }
    }
#pragma GCC unroll 6
    for (int row = 0; row < height; row++) {
        *(lanes *)(out + row * out_stride) = left[row];
        *(lanes *)(out + row * out_stride + LANES) = right[row];
    }
}

/* The height must be known while compiling for the sums to be registers. */
#define MULTIPLY_TILE(height) \
    case height: \
        multiply_tile(height, rows, row_stride, panel, num_inputs, start, start_stride, out, out_stride, fetch); \
        break

static void multiply_tile_of(int64_t height, const float *rows, int64_t row_stride, const float *panel,
                             int64_t num_inputs, const float *start, int64_t start_stride, float *out,
                             int64_t out_stride, ahead fetch)
{
    switch (height) {
        MULTIPLY_TILE(1);
        MULTIPLY_TILE(2);
        MULTIPLY_TILE(3);
        MULTIPLY_TILE(4);
        MULTIPLY_TILE(5);
        MULTIPLY_TILE(6);
    }
}

/* Rows of the tile that begins at `row`: tiles of about equal height are faster than full ones and a low rest. */
static int64_t tile_height(int64_t row, int64_t num_rows)
{
    const int64_t left = num_rows - row, tiles = (left + TILE - 1) / TILE;
    return (left + tiles - 1) / tiles;
}

/* The largest power of two that is not above the number of tiles, as a shift: every line is asked for, some twice. */
static int fetch_shift(int64_t num_rows)
{
    const int64_t tiles = (num_rows + TILE - 1) / TILE;
    int shift = 0;

    while (2 << shift <= tiles)
        shift++;
    return shift;
}

/* A panel with all its outputs, some of the inputs at a time. */
static void multiply_panel(const float *rows, int64_t num_rows, int64_t num_inputs, const float *panel,
                           const float *bias, float *out, int64_t out_stride)
{
    const int64_t parts = (num_inputs + MOST_INPUTS - 1) / MOST_INPUTS;
    const int64_t part = (num_inputs + parts - 1) / parts;
    const int shift = fetch_shift(num_rows);

    for (int64_t first = 0; first < num_inputs; first += part) {
        const int64_t length = num_inputs - first < part ? num_inputs - first : part;
        ahead fetch = {panel + (first + length) * PANEL, 0, shift};
        for (int64_t row = 0, height; row < num_rows; row += height) {
            float *own = out + row * out_stride;
            height = tile_height(row, num_rows);
            multiply_tile_of(height, rows + row * num_inputs + first, num_inputs, panel + first * PANEL, length,
                             first ? own : bias, first ? out_stride : 0, own, out_stride, fetch);
            fetch.done += length;
        }
    }
}

/* The last panel, of which only `width` outputs are wanted; `bias` has room for all of them. */
static void multiply_partial_panel(const float *rows, int64_t num_rows, int64_t num_inputs, const float *panel,
                                   const float *bias, int64_t width, float *out, int64_t out_stride)
{
    float tile[TILE * PANEL];

    for (int64_t row = 0, height; row < num_rows; row += height) {
        height = tile_height(row, num_rows);
        multiply_tile_of(height, rows + row * num_inputs, num_inputs, panel, num_inputs, bias, 0, tile, PANEL,
                         (ahead){panel, 0, 0});
        for (int64_t i = 0; i < height; i++)
            for (int64_t j = 0; j < width; j++)
                out[(row + i) * out_stride + j] = tile[i * PANEL + j];
    }
}

/*
 * rows     [num_rows, num_inputs], contiguous
 * packed   [panels, num_inputs, 16], contiguous; outputs past num_outputs are ignored
 * bias     [num_outputs], or null
 * out      [num_rows, num_outputs], the rows out_stride numbers apart
 */
void multiply(const float *rows, int64_t num_rows, int64_t num_inputs, const float *packed, int64_t num_outputs,
              const float *bias, int num_threads, float *out, int64_t out_stride)
{
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
    for (int64_t first = 0; first < num_outputs; first += PANEL) {
        const float *panel = packed + first * num_inputs;
        const int64_t width = num_outputs - first < PANEL ? num_outputs - first : PANEL;
        if (width == PANEL) {
            multiply_panel(rows, num_rows, num_inputs, panel, bias ? bias + first : zeros, out + first, out_stride);
        } else {
            float padded[PANEL] = {0};
            for (int64_t i = 0; bias && i < width; i++)
                padded[i] = bias[first + i];
            multiply_partial_panel(rows, num_rows, num_inputs, panel, padded, width, out + first, out_stride);
        }
    }
}
