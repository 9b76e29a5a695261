/* The operations of `_native/tiles.h` in plain C, as Intel's manual defines the instructions (Software Developer's
 * Manual, volume 2: LDTILECFG, TILERELEASE, TILEZERO, TILELOADD, TILELOADDT1, TILESTORED, TDPBF16PS, TDPBSSD). What
 * raises an exception on a CPU ends the process.
 */
#include <float.h>
#include <math.h>
#include <stdlib.h>

#define REQUIRE(condition) ((condition) ? (void)0 : abort())

static _Thread_local struct tile_register {
    int rows, row_bytes; /* 0: not in use */
    uint8_t bytes[TILE_ROWS][TILE_BYTES];
} registers[8];

static void CONFIGURE_TILES(const struct tile_shapes *shapes)
{
    REQUIRE(sizeof *shapes == 64 && shapes->palette == 1 && shapes->start_row == 0);
    for (int i = 0; i < 14; i++)
        REQUIRE(!shapes->unused[i]);
    for (int t = 0; t < 16; t++) {
        const int rows = shapes->rows[t], row_bytes = shapes->row_bytes[t];
        REQUIRE(rows <= TILE_ROWS && row_bytes <= TILE_BYTES && !rows == !row_bytes && (t < 8 || !rows));
        if (t < 8)
            registers[t] = (struct tile_register){.rows = rows, .row_bytes = row_bytes};
    }
}

static void RELEASE_TILES(void)
{
    memset(registers, 0, sizeof registers);
}

static struct tile_register *used(int t)
{
    REQUIRE(registers[t].rows);
    return registers + t;
}

static void ZERO_TILE(int t)
{
    memset(used(t)->bytes, 0, sizeof registers->bytes);
}

static void LOAD_TILE(int t, const void *from, uint64_t stride)
{
    ZERO_TILE(t);
    for (int m = 0; m < registers[t].rows; m++)
        memcpy(registers[t].bytes[m], (const uint8_t *)from + m * stride, (size_t)registers[t].row_bytes);
}

#define LOAD_TILE_ONCE LOAD_TILE

static void STORE_TILE(int t, void *to, uint64_t stride)
{
    for (int m = 0; m < used(t)->rows; m++)
        memcpy((uint8_t *)to + m * stride, registers[t].bytes[m], (size_t)registers[t].row_bytes);
}

/* Return the number of columns of sums. */
static int checked(const struct tile_register *c, const struct tile_register *a, const struct tile_register *b)
{
    REQUIRE(c != a && c != b && a != b);
    REQUIRE(c->row_bytes % 4 == 0 && a->row_bytes % 4 == 0 && b->row_bytes % 4 == 0);
    REQUIRE(c->rows == a->rows && a->row_bytes / 4 == b->rows && c->row_bytes == b->row_bytes);
    return c->row_bytes / 4;
}

/* Subnormal numbers are zero, as operands and as results. */
static float flushed(float x)
{
    return fabsf(x) < FLT_MIN ? copysignf(0.0f, x) : x;
}

static float multiply_add(bf16 a, bf16 b, float sum)
{
    return flushed(fmaf(flushed(from_bf16(a)), flushed(from_bf16(b)), sum));
}

static void ADD_BF16_PRODUCTS(int sums, int activations, int weights)
{
    struct tile_register *c = used(sums);
    const struct tile_register *a = used(activations), *b = used(weights);
    const int columns = checked(c, a, b);
    for (int m = 0; m < a->rows; m++) {
        const bf16 *row = (const bf16 *)a->bytes[m];
        float parts[2][TILE_BYTES / 4] = {{0}};
        for (int k = 0; k < b->rows; k++)
            for (int n = 0; n < columns; n++)
                for (int i = 0; i < 2; i++)
                    parts[i][n] = multiply_add(row[2 * k + i], ((const bf16 *)b->bytes[k])[2 * n + i], parts[i][n]);
        float *to = (float *)c->bytes[m];
        for (int n = 0; n < columns; n++)
            to[n] = flushed(flushed(to[n]) + flushed(parts[0][n] + parts[1][n]));
    }
}

static void ADD_INT8_PRODUCTS(int sums, int activations, int weights)
{
    struct tile_register *c = used(sums);
    const struct tile_register *a = used(activations), *b = used(weights);
    const int columns = checked(c, a, b);
    for (int m = 0; m < a->rows; m++)
        for (int k = 0; k < b->rows; k++)
            for (int n = 0; n < columns; n++)
                for (int i = 0; i < 4; i++)
                    ((int32_t *)c->bytes[m])[n] += (int8_t)a->bytes[m][4 * k + i] * (int8_t)b->bytes[k][4 * n + i];
}
