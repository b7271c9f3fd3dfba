/* A matrix product in bfloat16, as an operator of onnxruntime: Linear of the domain "chrion".
 *
 * Y = X * W + B, as MatMul and Gemm of ONNX compute it with a constant W. X and W are rounded to bfloat16 to be multiplied;
 * sums are float32. Denormals count as zeros in products.
 *
 * Inputs: X, [..., inputs] in up to 16 dimensions; W, [outputs, inputs], or [inputs, outputs] with the attribute `columns`;
 * and B, [outputs], which is optional. W and B are constant.
 * Output: Y, [..., outputs].
 * Attributes: width, the number of outputs; columns; and split, the number of threads that outputs are divided among.
 */
#include <stdlib.h>
#include <string.h>

#include "operators.h"
#include "recurrent.h"

enum { X, W, B, INPUTS };

/* The bytes of rounded rows that are multiplied at once, if there are so many: enough to read weights once for many rows,
 * few enough to stay in the second cache (a choice, not measured). */
#define BLOCK_BYTES (256 << 10)
#define MOST_DIMENSIONS 16
/* Multiplications that are worth a second thread (a choice, not measured). */
#define PARALLEL (1 << 17)

typedef struct {
  Weights *weights;
  float *bias;
  bool biased, tiles;
  int64_t split;
} Kernel;

/* One run of the operator, and the scratch memory of each thread. */
typedef struct {
  Product product;
  int64_t split;
  char *scratch;
  size_t each, rounded, products, pointers;
} Run;

static OrtStatus *invalid(const char *message) { return chrion_error(INVALID_ARGUMENT, message); }

static void destroy(void *given) {
  Kernel *kernel = given;
  chrion_release_weights(kernel->weights);
  free(kernel->bias);
  free(kernel);
  chrion_end_operator();
}

static OrtStatus *read_weights(const OrtKernelInfo *info, Kernel *kernel) {
  int64_t outputs, columns;
  const float *w, *bias;
  size_t w_bytes, bias_bytes;
  OrtStatus *status;
  if ((status = chrion_read_integer(info, "width", &outputs)) ||
      (status = chrion_read_integer(info, "columns", &columns)) ||
      (status = chrion_read_integer(info, "split", &kernel->split)) ||
      (status = chrion_read_constant(info, W, &w, &w_bytes)) ||
      (status = chrion_read_constant(info, B, &bias, &bias_bytes)))
    return status;
  if (outputs < 1 || outputs > MOST_ELEMENTS) return invalid("Linear: expected 1 to 4294967296 outputs");
  if (kernel->split < 1 || kernel->split > MOST_PARTS) return invalid("Linear: expected a split of 1 to 64");
  size_t row = sizeof(float) * (size_t)outputs;
  if (!w) return invalid("Linear: expected constant weights");
  if (!w_bytes || w_bytes % row || (bias && bias_bytes != row)) return invalid("Linear: sizes of weights do not match");
  kernel->biased = bias != NULL;
  const Weights format = {.kind = LINEAR, .lanes = TILE, .inputs = (int64_t)(w_bytes / row), .hidden = outputs,
                          .rounded = true, .columns = columns};
  kernel->weights = chrion_pack_weights(&format, w, NULL);
  kernel->bias = kernel->weights ? calloc((size_t)kernel->weights->input.vectors, TILE * sizeof(float)) : NULL;
  if (!kernel->bias) return chrion_error(FAIL, "Linear: out of memory");
  if (bias) memcpy(kernel->bias, bias, row);
  return NULL;
}

static OrtStatus *create(const OperatorDescription *description, const void *table, const OrtKernelInfo *info,
                         void **result) {
  (void)description, (void)table;
  if (!chrion_bfloat16) return invalid("Linear: the processor has no instructions for bfloat16");
  Kernel *kernel = calloc(1, sizeof *kernel);
  if (!kernel) return chrion_error(FAIL, "Linear: out of memory");
  chrion_begin_operator();
  kernel->tiles = chrion_allow_tiles();
  OrtStatus *status = read_weights(info, kernel);
  if (status)
    destroy(kernel);
  else
    *result = kernel;
  return status;
}

/* Take the scratch memory of all threads; return whether there is some. */
static bool take_scratch(Run *run) {
  Product *product = &run->product;
  const Matrix *matrix = &product->weights->input;
  size_t row = sizeof(float) * (size_t)matrix->stride, padded = sizeof(float) * (size_t)(matrix->vectors * TILE);
  int64_t block = (int64_t)(BLOCK_BYTES / row) / TILE * TILE;
  if (block < TILE) block = TILE;
  if (block > product->rows) block = product->rows;
  product->block = block;
  run->rounded = row * (size_t)block;
  run->pointers = (sizeof(void *) * (size_t)block + 63) / 64 * 64;
  run->products = product->weights->hidden % TILE ? padded * (size_t)block : 0;
  run->each = run->rounded + run->products + 2 * run->pointers;
  run->scratch = chrion_take_scratch(run->each * (size_t)run->split);
  return run->scratch;
}

static void run_part(void *data, size_t part) {
  ACQUIRE(data);
  const Run *run = data;
  Product product = run->product;
  int64_t vectors = product.weights->input.vectors, panels = (vectors + PANEL - 1) / PANEL, at = (int64_t)part;
  char *place = run->scratch + part * run->each;
  product.first = panels * at / run->split * PANEL;
  product.last = panels * (at + 1) / run->split * PANEL;
  if (product.last > vectors) product.last = vectors;
  product.rounded = (float *)place;
  product.products = run->products ? (float *)(place + run->rounded) : NULL;
  product.sources = (const float **)(place + run->rounded + run->products);
  product.sums = (float **)(place + run->rounded + run->products + run->pointers);
#if HAS_BFLOAT16
  if (product.first < product.last) chrion_multiply_bfloat16(&product);
#endif
  RELEASE(data);
}

/* Compute the output of a run that is described; without a context, on this thread alone. */
static OrtStatus *carry_out(Run *run, const OrtKernelContext *context) {
  const Product *product = &run->product;
  if (!take_scratch(run)) return chrion_error(FAIL, "Linear: out of memory");
  double work = (double)product->rows * (double)product->weights->inputs * (double)product->weights->hidden;
  OrtStatus *status = chrion_for_each(context, context && work >= PARALLEL, (size_t)run->split, run_part, run);
  chrion_return_scratch(run->scratch);
  return status;
}

static OrtStatus *repeat(void *run) { return carry_out(run, NULL); }

static OrtStatus *compute(void *given, OrtKernelContext *context) {
  const Kernel *kernel = given;
  const Weights *weights = kernel->weights;
  void *x, *bias;
  size_t bytes, bias_bytes, count, rank = MOST_DIMENSIONS;
  int64_t sizes[MOST_DIMENSIONS];
  float *y;
  OrtStatus *status;
  if ((status = CALL(OrtStatus *, KernelContextGetInputCount, const OrtKernelContext *, size_t *)(context, &count)) ||
      (status = chrion_read_input(context, X, &x, &bytes)) || (status = chrion_read_sizes(context, X, sizes, &rank)))
    return status;
  if (count > B) {
    if ((status = chrion_read_input(context, B, &bias, &bias_bytes))) return status;
    if (bias && !kernel->biased) return invalid("Linear: expected a constant bias");
  }
  if (!rank || sizes[rank - 1] != weights->inputs) return invalid("Linear: X has another number of inputs than W");
  sizes[rank - 1] = weights->hidden;
  if ((status = chrion_make_optional(context, 0, sizes, rank, &y))) return status;
  Run run = {.split = kernel->split,
             .product = {.weights = weights, .bias = kernel->bias, .x = x, .y = y, .tiles = kernel->tiles,
                         .rows = (int64_t)(bytes / sizeof(float)) / weights->inputs}};
  if (!run.product.rows || !y) return NULL;
  if (!chrion_records()) return carry_out(&run, context);
  return run.split > 1 ? NULL : chrion_record(repeat, &run, sizeof run);
}

static const char *name(const OperatorDescription *d) { return (void)d, "Linear"; }
static size_t input_count(const OperatorDescription *d) { return (void)d, INPUTS; }
static int input_kind(const OperatorDescription *d, size_t at) { return (void)d, at <= W ? REQUIRED : OPTIONAL; }

const OperatorDescription chrion_linear = {
    COMMON_DESCRIPTION,
    .name = name,
    .input_type = chrion_float,
    .input_count = input_count,
    .input_kind = input_kind,
    .output_count = chrion_one_value,
    .output_kind = chrion_required,
    .try_create = create,
    .try_compute = compute,
    .destroy = destroy,
};
