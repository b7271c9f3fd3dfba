/* Attention to keys and values in a pool, as an operator of onnxruntime: PooledAttention of the domain "chrion".
 *
 * Each row of the batch is one token. It brings its keys and values, which are first written to their row of the pool,
 * for all tokens. Then each token attends to the rows of its request up to its own. So one run serves prompts and
 * requests that decode, whatever their lengths (selective batching: Yu et al., Orca, OSDI 2022, section 3.2), and
 * nothing is copied out of the pool.
 *
 * A tile is a number of queries that share their keys and values: those of consecutive tokens of a request, and of the
 * heads of a group (Ainslie et al., GQA, 2023). It reads keys and values in blocks, with the softmax corrected from
 * block to block (Milakov and Gimelshein, Online normalizer calculation for softmax, 2018), so that it needs no memory
 * beside the stack.
 *
 * Inputs: queries, keys and values of the tokens, [N, heads, width] and twice [N, shared, width] in any shape, or all
 * three side by side in the first one, [N, heads + 2 * shared, width]; the pools of keys and of values,
 * [rows, shared, width] in any shape, which are written to; the number of past tokens and the first row of the request
 * of each token, int64 [N]; and, if queries and keys are to be rotated (Su et al., RoFormer, 2021), the cosines and the
 * sines of each token, twice [N, rotated] or [N, rotated / 2] in any shape.
 * Output: [N, heads, width] in the shape that an attribute gives.
 * Attributes: heads, shared (heads of keys and values), width, scale, cap, shape, rotated, interleaved and columns (of
 * the cosines and of the sines). A score is scale * q.k, or cap * tanh(scale * q.k) if cap is not 0. In the shape, the
 * first dimension stands for N. Of each head the first elements are rotated, so many as `rotated` says: the first half
 * with the second half, or each even element with the next one if `interleaved` is not 0.
 */
#include <stdlib.h>
#include <string.h>

#include "attention.h"
#include "operators.h"

/* Multiplications that are worth a second thread. */
#define PARALLEL (1 << 17)

/* One run of the operator. */
typedef struct {
  const Attention *attention;
  const float *cosines, *sines; /* if elements are rotated */
  const float *queries, *keys, *values; /* the latter two are pools */
  int64_t stride; /* from the queries of a token to those of the next one */
  const int64_t *past, *start;
  float *output;
  const int64_t *tiles; /* the first token of each tile, and the number of tokens */
} Run;

#if defined(__x86_64__)
static void (*const variants[])(const Attention *, const Tile *, const float *, const float *) = {
    chrion_attend, chrion_attend_avx2, chrion_attend_avx512};
#else
static void (*const variants[])(const Attention *, const Tile *, const float *, const float *) = {chrion_attend};
#endif

/* Write the first elements of a head of a token, rotated, and the others. */
static void rotate(const Run *run, int64_t token, const float *head, float *result) {
  const Attention *a = run->attention;
  const float *cosines = run->cosines + token * a->columns, *sines = run->sines + token * a->columns;
  int64_t half = a->rotated / 2;
  if (a->interleaved) {
    int64_t step = a->columns / half;
    for (int64_t at = 0; at < half; at++) {
      int64_t column = step * at, next = column + step - 1;
      result[2 * at] = head[2 * at] * cosines[column] - head[2 * at + 1] * sines[column];
      result[2 * at + 1] = head[2 * at + 1] * cosines[next] + head[2 * at] * sines[next];
    }
  } else {
    int64_t second = a->columns - half; /* the column of the second half's first element */
    for (int64_t at = 0; at < half; at++) result[at] = head[at] * cosines[at] - head[half + at] * sines[at];
    for (int64_t at = 0; at < half; at++)
      result[half + at] = head[half + at] * cosines[second + at] + head[at] * sines[second + at];
  }
  memcpy(result + a->rotated, head + a->rotated, sizeof(float) * (size_t)(a->width - a->rotated));
}

/* Compute one head of keys and values of one tile. */
static void run_tile(void *data, size_t index) {
  ACQUIRE(data);
  const Run *run = data;
  const Attention *a = run->attention;
  int64_t group = a->heads / a->shared, shared = (int64_t)index % a->shared;
  int64_t first = run->tiles[2 * ((int64_t)index / a->shared)], tokens = run->tiles[2 * ((int64_t)index / a->shared) + 1];
  int64_t row = (run->start[first] * a->shared + shared) * a->width;
  float turned[QUERIES][WIDTH];
  /* More heads than a tile has take several turns. */
  for (int64_t from = 0; from < group; from += QUERIES) {
    int64_t heads = group - from < QUERIES ? group - from : QUERIES;
    Tile tile = {.count = 0};
    for (int64_t token = first; token < first + tokens; token++)
      for (int64_t head = 0; head < heads; head++) {
        int64_t at = (shared * group + from + head) * a->width;
        const float *query = run->queries + token * run->stride + at;
        tile.query[tile.count] = query;
        if (a->rotated) {
          rotate(run, token, query, turned[tile.count]);
          tile.query[tile.count] = turned[tile.count];
        }
        tile.output[tile.count] = run->output + token * a->heads * a->width + at;
        tile.seen[tile.count++] = run->past[token] + 1;
      }
    variants[chrion_level](a, &tile, run->keys + row, run->values + row);
  }
  RELEASE(data);
}

/* ---- The operator ---- */

enum { QUERY, KEY, VALUE, KEY_POOL, VALUE_POOL, PAST, START, COSINES, SINES, INPUTS };

static OrtStatus *create(const OperatorDescription *description, const void *table, const OrtKernelInfo *info,
                         void **kernel) {
  (void)description, (void)table;
  Attention a = {0};
  struct {
    const char *name;
    int64_t *value;
  } numbers[] = {{"heads", &a.heads}, {"shared", &a.shared}, {"width", &a.width}, {"rotated", &a.rotated},
                 {"interleaved", &a.interleaved}, {"columns", &a.columns}};
  struct {
    const char *name;
    float *value;
  } reals[] = {{"scale", &a.scale}, {"cap", &a.cap}};
  OrtStatus *status = NULL;
  for (size_t at = 0; at < sizeof numbers / sizeof *numbers && !status; at++)
    status = CALL(OrtStatus *, KernelInfoGetAttributeInt, const OrtKernelInfo *, const char *, int64_t *)(
        info, numbers[at].name, numbers[at].value);
  for (size_t at = 0; at < sizeof reals / sizeof *reals && !status; at++)
    status = CALL(OrtStatus *, KernelInfoGetAttributeFloat, const OrtKernelInfo *, const char *, float *)(
        info, reals[at].name, reals[at].value);
  if (status) return status;
  if (a.width < 1 || a.width > WIDTH || a.shared < 1 || a.heads < a.shared || a.heads > MOST_ELEMENTS / WIDTH ||
      a.heads % a.shared)
    return chrion_error(INVALID_ARGUMENT, "PooledAttention: expected heads that share keys evenly, and a width up to 256");
  if ((status = chrion_read_shape(info, a.heads * a.width, a.shape, &a.rank))) return status;
  if (a.rotated < 0 || a.rotated > a.width || a.rotated % 2)
    return chrion_error(INVALID_ARGUMENT, "PooledAttention: expected an even number of rotated elements, up to the width");
  if (a.columns != a.rotated && a.columns != a.rotated / 2)
    return chrion_error(INVALID_ARGUMENT, "PooledAttention: expected a column for each rotated element, or for each pair");
  return chrion_make_kernel(&a, sizeof a, kernel);
}

/* Write tiles of consecutive tokens of a request, up to `most` each. Return their number. */
static size_t make_tiles(const Run *run, int64_t count, int64_t most, int64_t *tiles) {
  size_t found = 0;
  for (int64_t token = 0, length; token < count; token += length) {
    for (length = 1; length < most && token + length < count; length++)
      if (run->start[token + length] != run->start[token] || run->past[token + length] != run->past[token] + length)
        break;
    tiles[2 * found] = token;
    tiles[2 * found++ + 1] = length;
  }
  return found;
}

/* Return whether an input has a number of rows. */
static bool has_rows(size_t bytes, int64_t count, size_t row) {
  return row && count ? bytes % row == 0 && bytes / row == (size_t)count : bytes == 0;
}

static OrtStatus *compute(void *kernel, OrtKernelContext *context) {
  const Attention *a = kernel;
  void *data[INPUTS] = {0};
  size_t bytes[INPUTS] = {0}, given;
  OrtStatus *status;
  if ((status = CALL(OrtStatus *, KernelContextGetInputCount, const OrtKernelContext *, size_t *)(context, &given)))
    return status;
  if (given != (a->rotated ? INPUTS : COSINES))
    return chrion_error(INVALID_ARGUMENT,
                        "PooledAttention: expected cosines and sines if elements are rotated, only then");
  for (size_t at = 0; at < given; at++)
    if ((status = chrion_read_input(context, at, &data[at], &bytes[at]))) return status;
  int64_t count = (int64_t)(bytes[PAST] / sizeof(int64_t)), own = a->shared * a->width;
  size_t row = (size_t)own * sizeof(float), all = (size_t)(a->heads * a->width) * sizeof(float);
  bool packed = !data[KEY];
  int64_t stride = a->heads * a->width + (packed ? 2 * own : 0);
  if (bytes[START] != bytes[PAST] || !has_rows(bytes[QUERY], count, (size_t)stride * sizeof(float)) ||
      !has_rows(bytes[KEY], packed ? 0 : count, row) || bytes[VALUE] != bytes[KEY] ||
      bytes[KEY_POOL] != bytes[VALUE_POOL] || !has_rows(bytes[COSINES], count, (size_t)a->columns * sizeof(float)) ||
      bytes[SINES] != bytes[COSINES])
    return chrion_error(INVALID_ARGUMENT, "PooledAttention: sizes of inputs do not match");
  Run run = {.attention = a, .queries = data[QUERY], .keys = data[KEY_POOL], .values = data[VALUE_POOL],
             .past = data[PAST], .start = data[START], .stride = stride,
             .cosines = data[COSINES], .sines = data[SINES]};
  status = chrion_make_output(context, a->shape, a->rank, count, (size_t)count * all, (void **)&run.output);
  if (status) return status;

  int64_t rows = (int64_t)(bytes[KEY_POOL] / row);
  double work = 0;
  for (int64_t token = 0; token < count; token++) {
    int64_t past = run.past[token], start = run.start[token];
    if (past < 0 || start < 0 || past >= rows || start >= rows - past)
      return chrion_error(INVALID_ARGUMENT, "PooledAttention: a row is outside the pool");
    work += 2.0 * (double)(past + 1) * (double)(a->heads * a->width);
  }
  for (int64_t token = 0; token < count; token++) {
    int64_t at = (run.start[token] + run.past[token]) * own;
    float *key = (float *)data[KEY_POOL] + at;
    const float *behind = run.queries + token * stride + a->heads * a->width;
    const float *given_key = packed ? behind : (const float *)data[KEY] + token * own;
    const float *given_value = packed ? behind + own : (const float *)data[VALUE] + token * own;
    if (a->rotated)
      for (int64_t first = 0; first < own; first += a->width) rotate(&run, token, given_key + first, key + first);
    else
      memcpy(key, given_key, row);
    memcpy((float *)data[VALUE_POOL] + at, given_value, row);
  }

  int64_t few[2 * 64], *tiles = count <= 64 ? few : malloc(2 * sizeof(int64_t) * (size_t)count);
  if (!tiles) return chrion_error(FAIL, "PooledAttention: out of memory");
  int64_t most = QUERIES / (a->heads / a->shared);
  size_t total = make_tiles(&run, count, most < 1 ? 1 : most, tiles) * (size_t)a->shared;
  run.tiles = tiles;
  status = chrion_for_each(context, work >= PARALLEL, total, run_tile, &run);
  if (tiles != few) free(tiles);
  return status;
}

static const char *name(const OperatorDescription *d) { return (void)d, "PooledAttention"; }
static int input_type(const OperatorDescription *d, size_t at) { return (void)d, at == PAST || at == START ? INT64 : FLOAT; }
static size_t input_count(const OperatorDescription *d) { return (void)d, INPUTS; }
static int input_kind(const OperatorDescription *d, size_t at) {
  return (void)d, at == KEY || at == VALUE || at >= COSINES ? OPTIONAL : REQUIRED;
}

const OperatorDescription chrion_pooled_attention = {
    COMMON_DESCRIPTION,
    .name = name,
    .input_type = input_type,
    .input_count = input_count,
    .input_kind = input_kind,
    .output_count = chrion_one_value,
    .output_kind = chrion_required,
    .try_create = create,
    .try_compute = compute,
    .destroy = chrion_destroy,
};
