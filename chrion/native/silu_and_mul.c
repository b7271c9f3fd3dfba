/* The gate of a feed-forward layer, as an operator of onnxruntime: SiluAndMul of the domain "chrion".
 *
 * SwiGLU (Shazeer, GLU Variants Improve Transformer, 2020) without its products: silu(gate) * up, in one pass over the
 * results of one product that has both side by side.
 *
 * Input: [N, 2 * width] in any shape, in each row the gate first. Output: [N, width] in the shape that an attribute
 * gives, in which the first dimension stands for N, and the last one is the width.
 */
#include "operators.h"

/* Elements that are worth a second thread. */
#define PARALLEL (1 << 15)

typedef struct {
  int64_t rank, width;
  int64_t shape[8];
} Gate;

/* One run of the operator. */
typedef struct {
  const float *input;
  float *output;
  int64_t width;
} Run;

/* Compute a row: the gate, and as many elements behind it that are multiplied by its SiLU. */
void chrion_multiply_row(const float *gate, int64_t width, float *output);
void chrion_multiply_row_avx2(const float *gate, int64_t width, float *output);

#if defined(__x86_64__)
static void (*const variants[])(const float *, int64_t, float *) = {chrion_multiply_row, chrion_multiply_row_avx2,
                                                                    chrion_multiply_row_avx2};
#else
static void (*const variants[])(const float *, int64_t, float *) = {chrion_multiply_row};
#endif

static void run_one(void *data, size_t row) {
  ACQUIRE(data);
  const Run *run = data;
  variants[chrion_level](run->input + 2 * (int64_t)row * run->width, run->width, run->output + (int64_t)row * run->width);
  RELEASE(data);
}

static OrtStatus *create(const OperatorDescription *description, const void *table, const OrtKernelInfo *info,
                         void **kernel) {
  (void)description, (void)table;
  Gate gate = {0};
  OrtStatus *status = chrion_read_shape(info, 0, gate.shape, &gate.rank);
  if (status) return status;
  gate.width = gate.shape[gate.rank - 1];
  return chrion_make_kernel(&gate, sizeof gate, kernel);
}

static OrtStatus *compute(void *kernel, OrtKernelContext *context) {
  const Gate *gate = kernel;
  void *input, *output;
  size_t bytes, row = 2 * sizeof(float) * (size_t)gate->width;
  OrtStatus *status = chrion_read_input(context, 0, &input, &bytes);
  if (status) return status;
  if (bytes % row) return chrion_error(INVALID_ARGUMENT, "SiluAndMul: the input has no whole number of rows");
  int64_t rows = (int64_t)(bytes / row);
  if ((status = chrion_make_output(context, gate->shape, gate->rank, rows, bytes / 2, &output))) return status;
  Run run = {.input = input, .output = output, .width = gate->width};
  return chrion_for_each(context, rows * gate->width >= PARALLEL, (size_t)rows, run_one, &run);
}

static const char *name(const OperatorDescription *d) { return (void)d, "SiluAndMul"; }

const OperatorDescription chrion_silu_and_mul = {
    COMMON_DESCRIPTION,
    .name = name,
    .input_type = chrion_float,
    .input_count = chrion_one_value,
    .input_kind = chrion_required,
    .output_count = chrion_one_value,
    .output_kind = chrion_required,
    .try_create = create,
    .try_compute = compute,
    .destroy = chrion_destroy,
};
