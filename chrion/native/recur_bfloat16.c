/* Products of weights and rows in bfloat16, with sums in float32: AVX512-BF16, or AMX.
 *
 * Both count denormals as zeros. Tiles multiply rows at equal distances: all inputs of some steps, and the states of a
 * step unless some rows have ended. For a single row they are faster as well, since a tile of weights is read at once.
 */
#include "operators.h"

#if HAS_BFLOAT16
#include <immintrin.h>
#include <string.h>

#define LANES 16
#include "recurrent.h"
#include "vectors.h"

#define TARGET BFLOAT16
#define RECUR BFLOAT16 void chrion_recur_bfloat16
#define ADD_PRODUCT(sum, weights, element) \
  (sum = (Floats)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)(weights), (__m512bh)_mm512_set1_ps(element)))
#define MULTIPLY_TILES multiply_tiles
#define END_TILES end_tiles

/* Round a row to bfloat16, with zeros up to a whole number of tiles; return it. */
static BFLOAT16 const float *round_row(const float *row, int64_t count, float *target) {
  char *place = (char *)target;
  for (int64_t at = 0; at < count; at += 2 * TILE, place += 4 * TILE)
    for (int half = 0; half < 2; half++) {
      int64_t left = count - at - half * TILE;
      __mmask16 mask = left >= TILE ? 0xffff : left > 0 ? (__mmask16)((1u << left) - 1) : 0;
      __m512 values = _mm512_maskz_loadu_ps(mask, row + at + half * TILE);
      _mm256_storeu_si256((__m256i *)(place + half * 2 * TILE), (__m256i)_mm512_cvtneps_pbh(values));
    }
  return target;
}

/* The layout of tiles: 0 to 3 for sums, 4 and 5 for rows, 6 and 7 for weights. */
typedef struct {
  uint8_t palette, start, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} Tiles;

/* The rows of tiles for sums and rows in this thread, or 0 if it uses none. */
static __thread int64_t tile_rows;

static BFLOAT16 void use_tiles(int64_t rows) {
  if (rows == tile_rows) return;
  Tiles tiles = {.palette = 1};
  for (int tile = 0; tile < 8; tile++) {
    tiles.row_bytes[tile] = 4 * TILE;
    tiles.rows[tile] = (uint8_t)(tile < 6 ? rows : TILE);
  }
  _tile_loadconfig(&tiles);
  tile_rows = rows;
}

static BFLOAT16 void end_tiles(void) {
  if (tile_rows) _tile_release();
  tile_rows = 0;
}

/* Return the distance between the items of a list, or 0 if they are not at equal ones. */
static int64_t distance(const float *const *items, int64_t count) {
  int64_t step = count > 1 ? items[1] - items[0] : 1;
  for (int64_t at = 2; at < count; at++)
    if (items[at] - items[at - 1] != step) return 0;
  return step;
}

/* Add the products of the rows of a tile with some vectors of a panel; four sums hide the latency of products. */
INLINE BFLOAT16 void multiply_tile(const float *rows, int64_t rows_step, const float *panel, int64_t depth, int vectors,
                                   float *sums, int64_t sums_step) {
  int64_t panel_step = 4 * vectors * LANES;
  _tile_loadd(0, sums, sums_step);
  if (vectors > 1) _tile_loadd(1, sums + LANES, sums_step);
  if (vectors > 2) _tile_loadd(2, sums + 2 * LANES, sums_step);
  if (vectors > 3) _tile_loadd(3, sums + 3 * LANES, sums_step);
  for (int64_t k = 0; k < depth; k += TILE, panel += TILE * vectors * LANES) {
    _tile_loadd(4, rows + k, rows_step);
    _tile_loadd(6, panel, panel_step);
    _tile_dpbf16ps(0, 4, 6);
    if (vectors > 1) {
      _tile_loadd(7, panel + LANES, panel_step);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (vectors > 2) {
      _tile_loadd(6, panel + 2 * LANES, panel_step);
      _tile_dpbf16ps(2, 4, 6);
    }
    if (vectors > 3) {
      _tile_loadd(7, panel + 3 * LANES, panel_step);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  _tile_stored(0, sums, sums_step);
  if (vectors > 1) _tile_stored(1, sums + LANES, sums_step);
  if (vectors > 2) _tile_stored(2, sums + 2 * LANES, sums_step);
  if (vectors > 3) _tile_stored(3, sums + 3 * LANES, sums_step);
}

/* Add the products of the rows of two tiles with two vectors of a panel of four: as many loads as products. */
static BFLOAT16 void multiply_square(const float *rows, int64_t rows_step, const float *panel, int64_t depth, float *sums,
                                     int64_t sums_step) {
  const int64_t panel_step = 4 * PANEL * LANES;
  const float *more_rows = rows + TILE * rows_step / 4;
  float *more_sums = sums + TILE * sums_step / 4;
  _tile_loadd(0, sums, sums_step);
  _tile_loadd(1, sums + LANES, sums_step);
  _tile_loadd(2, more_sums, sums_step);
  _tile_loadd(3, more_sums + LANES, sums_step);
  for (int64_t k = 0; k < depth; k += TILE, panel += TILE * PANEL * LANES) {
    _tile_loadd(4, rows + k, rows_step);
    _tile_loadd(6, panel, panel_step);
    _tile_loadd(7, panel + LANES, panel_step);
    _tile_loadd(5, more_rows + k, rows_step);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, sums_step);
  _tile_stored(1, sums + LANES, sums_step);
  _tile_stored(2, more_sums, sums_step);
  _tile_stored(3, more_sums + LANES, sums_step);
}

/* Add the products of rows with some vectors of a matrix to sums, if they are at equal distances, as unless some rows have
 * ended. */
static BFLOAT16 bool multiply_tiles(const float *const *rows, bool tiles, const Matrix *matrix, int64_t first_vector,
                                    int64_t last_vector, int64_t count, float *const *sums, int64_t at) {
  int64_t rows_step = 4 * distance(rows, count), sums_step = 4 * distance((const float *const *)sums, count);
  if (!tiles || !rows_step || !sums_step) return false;
  for (int64_t row = 0, end; row < count; row = end) { /* all whole tiles, then the rest */
    int64_t height = count - row < TILE ? count - row : TILE;
    end = row + (count - row) / height * height;
    use_tiles(height);
    for (int64_t vector = first_vector; vector < last_vector; vector += PANEL) {
      const float *panel = matrix->panels + vector * matrix->stride * LANES;
      int64_t first = row;
      for (; matrix->vectors - vector >= PANEL && first + 2 * TILE <= end; first += 2 * TILE)
        for (int64_t half = 0; half < PANEL * LANES; half += 2 * LANES)
          multiply_square(rows[first], rows_step, panel + half, matrix->stride, sums[first] + at + vector * LANES + half,
                          sums_step);
      for (; first < end; first += height) {
        const float *source = rows[first];
        float *target = sums[first] + at + vector * LANES;
        switch (matrix->vectors - vector) {
          case 1: multiply_tile(source, rows_step, panel, matrix->stride, 1, target, sums_step); break;
          case 2: multiply_tile(source, rows_step, panel, matrix->stride, 2, target, sums_step); break;
          case 3: multiply_tile(source, rows_step, panel, matrix->stride, 3, target, sums_step); break;
          default: multiply_tile(source, rows_step, panel, matrix->stride, 4, target, sums_step);
        }
      }
    }
  }
  return true;
}

#include "recur.h"

BFLOAT16 void chrion_multiply_bfloat16(const Product *p) {
  const Matrix *matrix = &p->weights->input;
  int64_t inputs = p->weights->inputs, outputs = p->weights->hidden, padded = matrix->vectors * LANES;
  int64_t from = p->first * LANES, end = p->last * LANES, to = end < outputs ? end : outputs;
  for (int64_t first = 0; first < p->rows; first += p->block) {
    int64_t count = p->rows - first < p->block ? p->rows - first : p->block;
    for (int64_t at = 0; at < count; at++) {
      p->sources[at] = round_row(p->x + (first + at) * inputs, inputs, p->rounded + at * matrix->stride);
      p->sums[at] = p->products ? p->products + at * padded : p->y + (first + at) * outputs;
      memcpy(p->sums[at] + from, p->bias + from, sizeof(float) * (size_t)(end - from));
    }
    multiply(p->sources, p->tiles, matrix, p->first, p->last, count, p->sums, 0);
    for (int64_t at = 0; p->products && at < count; at++)
      memcpy(p->y + (first + at) * outputs + from, p->sums[at] + from, sizeof(float) * (size_t)(to - from));
  }
  END_TILES();
}
#endif
