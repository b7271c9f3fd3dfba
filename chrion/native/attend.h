/* The computation of a tile. The includer defines LANES, and ATTEND as the function with its attributes. */
#include <math.h>
#include <string.h>

#include "attention.h"
#include "vectors.h"

/* The queries whose scores are computed at a time. */
#define SCORED_QUERIES 2
/* The queries to whose results values are added at a time, and the vectors of each result; and those of one query. */
#define SUMMED_QUERIES 4
#define VECTORS 2
#define VECTORS_OF_ONE_QUERY 4

/* Compute the products of some queries with keys. */
INLINE void score_some(const float *const *query, int queries, const float *keys, int64_t stride, int64_t count,
                       int64_t width, float (*scores)[KEYS]) {
  for (int64_t first = 0; first < count; first += LANES) {
    Floats parts[SCORED_QUERIES][LANES / 4];
    for (int q = 0; q < queries; q++)
      for (int n = 0; n < LANES / 4; n++) parts[q][n] = (Floats){0};
    for (int64_t k = first; k < first + LANES && k < count; k += 4) {
      const float *key[4]; /* beyond the last key, the last one again: the scores there are not used */
      for (int at = 0; at < 4; at++) key[at] = keys + (k + at < count ? k + at : count - 1) * stride;
      Floats sums[SCORED_QUERIES][4];
      for (int q = 0; q < queries; q++)
        for (int n = 0; n < 4; n++) sums[q][n] = (Floats){0};
      for (int64_t at = 0; at + LANES <= width; at += LANES)
        for (int q = 0; q < queries; q++) {
          Floats part = *(const Floats *)(query[q] + at);
          for (int n = 0; n < 4; n++) sums[q][n] += part * *(const Floats *)(key[n] + at);
        }
      for (int q = 0; q < queries; q++) sum_fours(sums[q], &parts[q][(k - first) / 4]);
    }
    for (int q = 0; q < queries; q++) sum_groups(parts[q], (Floats *)(scores[q] + first));
  }
  for (int64_t k = 0; k < count && width % LANES; k++)
    for (int q = 0; q < queries; q++)
      for (int64_t at = width / LANES * LANES; at < width; at++) scores[q][k] += query[q][at] * keys[k * stride + at];
}

/* Compute the products of all queries with keys. */
INLINE void score(const Tile *tile, const float *keys, int64_t stride, int64_t count, int64_t width,
                  float (*scores)[KEYS]) {
  int first = 0;
  for (; first + SCORED_QUERIES <= tile->count; first += SCORED_QUERIES)
    score_some(tile->query + first, SCORED_QUERIES, keys, stride, count, width, scores + first);
  for (; first < tile->count; first++) score_some(tile->query + first, 1, keys, stride, count, width, scores + first);
}

/* Add values, weighted, to some elements of the results of some queries. */
INLINE void add_weighted(float (*weights)[KEYS], int queries, const float *value, int64_t stride, int64_t count,
                         int64_t at, int vectors, float (*results)[WIDTH]) {
  Floats sums[SUMMED_QUERIES][VECTORS_OF_ONE_QUERY];
  for (int q = 0; q < queries; q++)
    for (int c = 0; c < vectors; c++) sums[q][c] = *(const Floats *)(results[q] + at + c * LANES);
  value += at;
  for (int64_t k = 0; k < count; k++, value += stride)
    for (int q = 0; q < queries; q++)
      for (int c = 0; c < vectors; c++) sums[q][c] += *(const Floats *)(value + c * LANES) * weights[q][k];
  for (int q = 0; q < queries; q++)
    for (int c = 0; c < vectors; c++) *(Floats *)(results[q] + at + c * LANES) = sums[q][c];
}

/* Add values, weighted, to the results of some queries, to some vectors of each at a time. */
INLINE void accumulate_some(float (*weights)[KEYS], int queries, const float *values, int64_t stride, int64_t count,
                            int64_t width, int vectors, float (*results)[WIDTH]) {
  int64_t at = 0;
  for (; at + vectors * LANES <= width; at += vectors * LANES)
    add_weighted(weights, queries, values, stride, count, at, vectors, results);
  for (; at + LANES <= width; at += LANES) add_weighted(weights, queries, values, stride, count, at, 1, results);
  for (; at < width; at++)
    for (int q = 0; q < queries; q++)
      for (int64_t k = 0; k < count; k++) results[q][at] += weights[q][k] * values[k * stride + at];
}

/* Add values, weighted, to the results of all queries. */
INLINE void accumulate(float (*weights)[KEYS], int queries, const float *values, int64_t stride, int64_t count,
                       int64_t width, float (*results)[WIDTH]) {
  int first = 0;
  for (; first + SUMMED_QUERIES <= queries; first += SUMMED_QUERIES)
    accumulate_some(weights + first, SUMMED_QUERIES, values, stride, count, width, VECTORS, results + first);
  for (; first < queries; first++)
    accumulate_some(weights + first, 1, values, stride, count, width, VECTORS_OF_ONE_QUERY, results + first);
}

ATTEND(const Attention *a, const Tile *tile, const float *keys, const float *values) {
  float scores[QUERIES][KEYS], results[QUERIES][WIDTH], largest[QUERIES], total[QUERIES];
  int64_t stride = a->shared * a->width, width = a->width, most = 0;
  int count = tile->count;
  for (int q = 0; q < count; q++) {
    memset(results[q], 0, sizeof(float) * (size_t)width);
    largest[q] = -INFINITY;
    total[q] = 0.0f;
    if (tile->seen[q] > most) most = tile->seen[q];
  }
  for (int64_t first = 0; first < most; first += KEYS) {
    int64_t length = most - first < KEYS ? most - first : KEYS;
    int64_t padded = (length + LANES - 1) / LANES * LANES;
    score(tile, keys + first * stride, stride, length, width, scores);
    for (int q = 0; q < count; q++) {
      int64_t own = tile->seen[q] - first;
      own = own < 0 ? 0 : own < length ? own : length;
      float *row = scores[q];
      if (!own) { /* a later token of the tile sees this block, this one does not */
        memset(row, 0, sizeof(float) * (size_t)padded);
        continue;
      }
      const Ints numbers = NUMBERS;
      const Floats zeros = {0}, hidden = zeros - INFINITY;
      Floats top = hidden;
      for (int64_t k = 0; k < padded; k += LANES) {
        Floats part = *(Floats *)(row + k) * a->scale;
        if (a->cap != 0.0f) {
          float capped[LANES];
          memcpy(capped, &part, sizeof capped);
          for (int lane = 0; lane < LANES && k + lane < own; lane++) capped[lane] = a->cap * tanhf(capped[lane]);
          memcpy(&part, capped, sizeof capped);
        }
        Ints later = numbers >= (int32_t)(own - k);
        select_lanes(&part, &hidden, &later);
        *(Floats *)(row + k) = part;
        keep_greater(&top, &part);
      }
      float now = greatest(&top);
      now = now > largest[q] ? now : largest[q];
      float base = now == -INFINITY ? 0.0f : now; /* if all scores so far are -inf, the correction clears the sums */
      float correction = largest[q] == now ? 1.0f : first ? expf(largest[q] - now) : 0.0f;
      Floats sums = {0};
      for (int64_t k = 0; k < padded; k += LANES) {
        Floats part = *(Floats *)(row + k) - base;
        exponential(&part);
        Ints later = numbers >= (int32_t)(own - k);
        select_lanes(&part, &zeros, &later);
        *(Floats *)(row + k) = part;
        sums += part;
      }
      total[q] = total[q] * correction + sum(&sums);
      largest[q] = now;
      if (correction != 1.0f && first)
        for (int64_t at = 0; at < width; at++) results[q][at] *= correction;
    }
    accumulate(scores, count, values + first * stride, stride, length, width, results);
  }
  for (int q = 0; q < count; q++) {
    float factor = largest[q] == -INFINITY ? NAN : 1.0f / total[q]; /* as softmax has it */
    for (int64_t at = 0; at < width; at++) tile->output[q][at] = results[q][at] * factor;
  }
}
