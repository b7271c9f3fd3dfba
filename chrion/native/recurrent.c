/* LSTM, GRU and RNN, as an operator of onnxruntime: Recurrent of the domain "chrion".
 *
 * It computes what the operators of ONNX with these names compute, as onnxruntime does: in float32, or with weights,
 * inputs and states that are rounded to bfloat16 to be multiplied, and everything else in float32. The inputs of
 * some steps are multiplied at once; the states of a step are multiplied with panels of packed weights, in which the
 * gates of a unit are neighbours, so that its functions are applied to sums that are still in the first cache.
 *
 * Inputs, as those of ONNX: X, W, R, B, sequence_lens, initial_h, initial_c and P, of which W, R, B and P are constant
 * and all after R are optional. X is [steps, batch, inputs] in any size.
 * Outputs, each optional: Y, Y_h and Y_c.
 * Attributes: kind (0 LSTM, 1 GRU, 2 RNN), hidden, directions, reverse (of a single direction), layout,
 * linear_before_reset, input_forget, clip (a positive limit, or 0 for none), bfloat16 (whether products are, which the
 * processor must have instructions for), split (the threads that compute it: units are divided among those of a
 * direction), squeezed (whether Y, of one direction and layout 0, has no axis of directions); and activations, alpha and beta, which
 * have an entry for each function of each direction: numbers of recurrent.h, and the parameters of all of them.
 *
 * A row of length 0 has final states of zeros, as in onnxruntime. Rows are independent, and the order of additions does
 * not depend on the number of threads, only on the number of rows.
 */
#include <stdlib.h>
#include <string.h>

#include "operators.h"
#include "recurrent.h"

enum { X, W, R, B, LENGTHS, FIRST_H, FIRST_C, PEEPHOLES, INPUTS };
enum { Y, LAST_H, LAST_C, OUTPUTS };

/* The most units, so that no size of weights overflows. */
#define MOST_UNITS ((int64_t)1 << 20)
/* The least rows of inputs that are multiplied at once, if there are so many: enough to read weights from the second
 * cache as fast as they are used, few enough for their products to stay there (a choice, not measured). */
#define BLOCK_ROWS 48
/* Multiplications that are worth a second thread (a choice, not measured). */
#define PARALLEL (1 << 17)

typedef struct {
  Cell cell;
  int variant;
  Activation activations[2][3];
  Weights *weights[2];
  float *bias[2], *peepholes[2]; /* the latter are NULL without */
  bool biased, tiles, squeezed;
  int64_t parts; /* of the units of each direction, for as many threads */
} Kernel;

#if defined(__x86_64__)
static void (*const variants[])(const Sequence *) = {chrion_recur, chrion_recur_avx2, chrion_recur_avx512,
#if HAS_BFLOAT16
                                                     chrion_recur_bfloat16,
#endif
};
#else
static void (*const variants[])(const Sequence *) = {chrion_recur};
#endif
static const int64_t lanes_of[] = {4, 8, 16, 16};
/* The variant for bfloat16. */
#define ROUNDED 3

static OrtStatus *invalid(const char *message) { return chrion_error(INVALID_ARGUMENT, message); }

/* ---- Creation ---- */

static OrtStatus *read_numbers(const OrtKernelInfo *info, Kernel *kernel) {
  Cell *cell = &kernel->cell;
  int64_t kind, directions, reverse, layout, linear, forget, hidden, bfloat16, split, squeezed;
  struct {
    const char *name;
    int64_t *value;
  } numbers[] = {{"kind", &kind}, {"hidden", &hidden}, {"directions", &directions}, {"reverse", &reverse},
                 {"layout", &layout}, {"linear_before_reset", &linear}, {"input_forget", &forget},
                 {"bfloat16", &bfloat16}, {"split", &split}, {"squeezed", &squeezed}};
  OrtStatus *status;
  for (size_t at = 0; at < sizeof numbers / sizeof *numbers; at++)
    if ((status = chrion_read_integer(info, numbers[at].name, numbers[at].value))) return status;
  if ((status = CALL(OrtStatus *, KernelInfoGetAttributeFloat, const OrtKernelInfo *, const char *, float *)(
           info, "clip", &cell->clip)))
    return status;
  if (kind < LSTM || kind > RNN) return invalid("Recurrent: expected kind 0, 1 or 2");
  if (hidden < 1 || hidden > MOST_UNITS) return invalid("Recurrent: expected 1 to 1048576 hidden units");
  if (directions < 1 || directions > 2) return invalid("Recurrent: expected 1 or 2 directions");
  if (bfloat16 && !chrion_bfloat16) return invalid("Recurrent: the processor has no instructions for bfloat16");
  if (split < 1 || split > MOST_PARTS) return invalid("Recurrent: expected a split of 1 to 64");
  if (squeezed && (directions == 2 || layout)) return invalid("Recurrent: only one direction of layout 0 is squeezed");
  if (!(cell->clip >= 0.0f)) return invalid("Recurrent: expected a clip of 0 or more");
  cell->kind = kind;
  cell->hidden = hidden;
  cell->directions = directions;
  cell->reverse = reverse;
  cell->batch_first = layout;
  cell->linear_before_reset = linear;
  cell->input_forget = forget;
  cell->rounded = bfloat16;
  kernel->squeezed = squeezed;
  kernel->parts = split > directions ? split / directions : 1;
  return NULL;
}

static OrtStatus *read_activations(const OrtKernelInfo *info, Kernel *kernel) {
  int64_t kinds[6], each = kernel->cell.kind == LSTM ? 3 : kernel->cell.kind == GRU ? 2 : 1;
  float parameters[2][6];
  size_t count = 6, counts[2] = {6, 6}, expected = (size_t)(each * kernel->cell.directions);
  OrtStatus *status = CALL(OrtStatus *, KernelInfoGetAttributeInts, const OrtKernelInfo *, const char *, int64_t *,
                           size_t *)(info, "activations", kinds, &count);
  for (int at = 0; at < 2 && !status; at++)
    status = CALL(OrtStatus *, KernelInfoGetAttributeFloats, const OrtKernelInfo *, const char *, float *, size_t *)(
        info, at ? "beta" : "alpha", parameters[at], &counts[at]);
  if (status) return status;
  if (count != expected || counts[0] != expected || counts[1] != expected)
    return invalid("Recurrent: expected activations, alpha and beta for each function of each direction");
  for (size_t at = 0; at < count; at++) {
    if (kinds[at] < 0 || kinds[at] >= FUNCTIONS) return invalid("Recurrent: unknown activation");
    Activation *activation = &kernel->activations[at / (size_t)each][at % (size_t)each];
    *activation = (Activation){.kind = kinds[at], .alpha = parameters[0][at], .beta = parameters[1][at]};
    if (kinds[at] == SIGMOID) activation->factor = activation->offset = 0.5f; /* (1 + tanh(x / 2)) / 2 */
    if (kinds[at] == TANH) activation->factor = 1.0f;
  }
  for (int at = 0; at < 2; at++) {
    Activation *own = kernel->activations[at];
    if (kernel->cell.kind == GRU) own[2] = own[0];
    own[0].keeps_nan = kernel->cell.kind != RNN;
    own[1].keeps_nan = kernel->cell.kind == LSTM;
  }
  return NULL;
}

static float *zeros(int64_t count) { return calloc((size_t)(count ? count : 1), sizeof(float)); }

/* Pack the bias of a direction, zeros without one. */
static float *pack_bias(const Cell *cell, const Weights *weights, const float *given) {
  int64_t vectors = weights->input.vectors, padded = cell->units * cell->lanes;
  float *bias = zeros(vectors * cell->lanes + (cell->kind == GRU ? padded : 0));
  if (!bias || !given) return bias;
  const float *recurrent = given + chrion_gates(cell->kind) * cell->hidden;
  bool separate = cell->kind == GRU && cell->linear_before_reset;
  int64_t summed = separate ? vectors - cell->units : vectors;
  chrion_add_packed(weights, given, 0, vectors, bias);
  chrion_add_packed(weights, recurrent, 0, summed, bias);
  if (separate) chrion_add_packed(weights, recurrent, summed, vectors, bias + vectors * cell->lanes);
  return bias;
}

static float *pack_peepholes(const Cell *cell, const Weights *weights, const float *given) {
  int64_t padded = cell->units * cell->lanes;
  float *peepholes = zeros(3 * padded);
  for (int64_t gate = 0; gate < 3 && peepholes; gate++)
    chrion_pad_units(weights, given + gate * cell->hidden, peepholes + gate * padded);
  return peepholes;
}

static OrtStatus *read_weights(const OrtKernelInfo *info, Kernel *kernel) {
  Cell *cell = &kernel->cell;
  const float *w, *r, *bias, *peepholes;
  size_t w_bytes, r_bytes, bias_bytes, peephole_bytes;
  OrtStatus *status;
  if ((status = chrion_read_constant(info, W, &w, &w_bytes)) || (status = chrion_read_constant(info, R, &r, &r_bytes)) ||
      (status = chrion_read_constant(info, B, &bias, &bias_bytes)) ||
      (status = chrion_read_constant(info, PEEPHOLES, &peepholes, &peephole_bytes)))
    return status;
  if (!w || !r) return invalid("Recurrent: expected constant weights");
  int64_t rows = chrion_gates(cell->kind) * cell->hidden;
  size_t row = (size_t)(cell->directions * rows) * sizeof(float);
  if (w_bytes % row || r_bytes / row != (size_t)cell->hidden || r_bytes % row || (bias && bias_bytes != 2 * row) ||
      (peepholes && (cell->kind != LSTM || peephole_bytes != row / 4 * 3)))
    return invalid("Recurrent: sizes of weights do not match");
  cell->inputs = (int64_t)(w_bytes / row);
  if (cell->inputs > MOST_ELEMENTS) return invalid("Recurrent: too many inputs");
  kernel->biased = bias != NULL;
  for (int64_t at = 0; at < cell->directions; at++) {
    const Weights format = {.kind = cell->kind, .lanes = cell->lanes, .inputs = cell->inputs, .hidden = cell->hidden,
                            .rounded = cell->rounded};
    Weights *weights = chrion_pack_weights(&format, w + at * rows * cell->inputs, r + at * rows * cell->hidden);
    if (!(kernel->weights[at] = weights)) return chrion_error(FAIL, "Recurrent: out of memory");
    kernel->bias[at] = pack_bias(cell, weights, bias ? bias + at * 2 * rows : NULL);
    if (peepholes) kernel->peepholes[at] = pack_peepholes(cell, weights, peepholes + at * 3 * cell->hidden);
    if (!kernel->bias[at] || (peepholes && !kernel->peepholes[at]))
      return chrion_error(FAIL, "Recurrent: out of memory");
  }
  return NULL;
}

static void destroy(void *given) {
  Kernel *kernel = given;
  for (int at = 0; at < 2; at++) {
    chrion_release_weights(kernel->weights[at]);
    free(kernel->bias[at]);
    free(kernel->peepholes[at]);
  }
  free(kernel);
  chrion_end_operator();
}

static OrtStatus *create(const OperatorDescription *description, const void *table, const OrtKernelInfo *info,
                         void **result) {
  (void)description, (void)table;
  Kernel *kernel = calloc(1, sizeof *kernel);
  if (!kernel) return chrion_error(FAIL, "Recurrent: out of memory");
  chrion_begin_operator();
  OrtStatus *status = read_numbers(info, kernel);
  if (!status) {
    kernel->variant = kernel->cell.rounded ? ROUNDED : chrion_level;
    kernel->tiles = kernel->cell.rounded && chrion_allow_tiles();
    kernel->cell.lanes = lanes_of[kernel->variant];
    kernel->cell.units = (kernel->cell.hidden + kernel->cell.lanes - 1) / kernel->cell.lanes;
    status = read_activations(info, kernel);
  }
  if (!status) status = read_weights(info, kernel);
  if (status)
    destroy(kernel);
  else
    *result = kernel;
  return status;
}

/* ---- Runs ---- */

/* One run of the operator: a sequence and a team for each direction, and the scratch memory of each thread. */
typedef struct {
  const Kernel *kernel;
  Sequence sequences[2];
  Team *teams;
  char *threads;
  size_t each, rounded, pointers;
} Run;

/* Copy the first states into padded rows, or clear them. */
static void begin_states(const Sequence *s, const float *first, float *states) {
  const Cell *cell = s->cell;
  for (int64_t row = 0; row < s->batch; row++, states += cell->units * cell->lanes)
    if (first)
      chrion_pad_units(s->weights, first + row * s->state_row, states);
    else
      memset(states, 0, sizeof(float) * (size_t)(cell->units * cell->lanes));
}

/* Write the last states, and zeros for the steps after the end of a row. */
static void finish_rows(const Sequence *s) {
  const Cell *cell = s->cell;
  size_t bytes = sizeof(float) * (size_t)cell->hidden;
  int64_t padded = cell->units * cell->lanes;
  for (int64_t row = 0; row < s->batch; row++) {
    int64_t length = s->lengths ? s->lengths[row] : s->steps;
    for (int64_t time = length; s->y && time < s->steps; time++)
      memset(s->y + time * s->y_step + row * s->y_row, 0, bytes);
    const float *h = s->h + ((length & 1) * s->batch + row) * padded, *c = s->c + row * padded;
    if (s->y_h && !length) memset(s->y_h + row * s->state_row, 0, bytes);
    if (s->y_h && length) memcpy(s->y_h + row * s->state_row, h, bytes);
    if (s->y_c && !length) memset(s->y_c + row * s->state_row, 0, bytes);
    if (s->y_c && length) memcpy(s->y_c + row * s->state_row, c, bytes);
  }
}

static void run_thread(void *data, size_t thread) {
  ACQUIRE(data);
  const Run *run = data;
  size_t parts = (size_t)run->kernel->parts;
  Sequence s = run->sequences[thread / parts];
  char *place = run->threads + thread * run->each;
  s.part = (int64_t)(thread % parts);
  s.rounded = (float *)place;
  s.sources = (const float **)(place += run->rounded);
  s.sums = (float **)(place += run->pointers);
  s.others = (float **)(place += run->pointers);
  s.active = (int64_t *)(place += run->pointers);
  variants[run->kernel->variant](&s);
  RELEASE(data);
}

/* Give the sequences and threads their parts of scratch memory, and return it; NULL if there is none. */
static void *divide_scratch(Run *run) {
  const Cell *cell = &run->kernel->cell;
  int64_t steps = run->sequences[0].steps, batch = run->sequences[0].batch, padded = cell->units * cell->lanes;
  int64_t block = (BLOCK_ROWS + batch - 1) / batch;
  if (block > steps) block = steps > 0 ? steps : 1;
  int64_t gates = chrion_gates(cell->kind) * padded, rows = block * batch;
  int64_t longest = cell->inputs > cell->hidden ? cell->inputs : cell->hidden;
  /* Far beyond any memory, and no product below overflows. */
  if (rows > INT64_MAX / 256 / MOST_PARTS / (gates + longest + 64)) return NULL;
  size_t states = sizeof(float) * (size_t)(batch * padded), products = sizeof(float) * (size_t)(rows * gates);
  size_t teams = sizeof(Team) * (size_t)cell->directions, direction = products + 4 * states;
  run->pointers = (sizeof(int64_t) * (size_t)rows + 63) / 64 * 64;
  run->rounded = cell->rounded ? sizeof(float) * (size_t)(rows * chrion_stride(true, longest)) : 0;
  run->each = run->rounded + 4 * run->pointers;
  size_t shared = (teams + (size_t)cell->directions * direction + 63) / 64 * 64;
  char *memory = chrion_take_scratch(shared + run->each * (size_t)(cell->directions * run->kernel->parts));
  if (!memory) return NULL;
  run->teams = (Team *)memory;
  run->threads = memory + shared;
  memset(run->teams, 0, teams);
  for (int64_t at = 0; at < cell->directions; at++) {
    Sequence *s = &run->sequences[at];
    char *place = memory + teams + (size_t)at * direction;
    s->team = &run->teams[at];
    s->team->parts = run->kernel->parts;
    s->block = block;
    s->tiles = run->kernel->tiles;
    s->products = (float *)place;
    s->h = (float *)(place += products);
    s->c = (float *)(place += 2 * states);
    s->reset = (float *)(place += states);
  }
  return memory;
}

/* Make all outputs, and describe where each direction finds its inputs and outputs. */
static OrtStatus *describe(OrtKernelContext *context, Run *run, void *const *data, int64_t steps, int64_t batch) {
  const Kernel *kernel = run->kernel;
  const Cell *cell = &kernel->cell;
  int64_t directions = cell->directions, hidden = cell->hidden, inputs = cell->inputs;
  const int64_t first[] = {steps, directions, batch, hidden}, squeezed[] = {steps, batch, hidden}, last[] = {batch, steps, directions, hidden};
  const int64_t states[] = {directions, batch, hidden}, row_states[] = {batch, directions, hidden};
  bool rows = cell->batch_first;
  size_t outputs, wanted = cell->kind == LSTM ? 3 : 2;
  float *made[OUTPUTS] = {0};
  OrtStatus *status = CALL(OrtStatus *, KernelContextGetOutputCount, const OrtKernelContext *, size_t *)(context,
                                                                                                       &outputs);
  for (size_t at = 0; at < outputs && at < wanted && !status; at++)
    status = at == Y && kernel->squeezed ? chrion_make_optional(context, at, squeezed, 3, &made[at])
             : at == Y ? chrion_make_optional(context, at, rows ? last : first, 4, &made[at])
                     : chrion_make_optional(context, at, rows ? row_states : states, 3, &made[at]);
  for (int64_t at = 0; at < directions && !status; at++) {
    int64_t own = at * (rows ? hidden : batch * hidden);
    run->sequences[at] = (Sequence){
        .cell = cell, .weights = kernel->weights[at], .activations = kernel->activations[at],
        .reverse = directions == 2 ? at == 1 : cell->reverse, .biased = kernel->biased,
        .steps = steps, .batch = batch,
        .x = data[X], .x_step = rows ? inputs : batch * inputs, .x_row = rows ? steps * inputs : inputs,
        .lengths = data[LENGTHS],
        .first_h = data[FIRST_H] ? (const float *)data[FIRST_H] + own : NULL,
        .first_c = data[FIRST_C] ? (const float *)data[FIRST_C] + own : NULL,
        .bias = kernel->bias[at], .peepholes = kernel->peepholes[at],
        .y = made[Y] ? made[Y] + own : NULL,
        .y_h = made[LAST_H] ? made[LAST_H] + own : NULL, .y_c = made[LAST_C] ? made[LAST_C] + own : NULL,
        .y_step = directions * hidden * (rows ? 1 : batch), .y_row = rows ? steps * directions * hidden : hidden,
        .state_row = rows ? directions * hidden : hidden,
    };
  }
  return status;
}

/* Return why inputs do not match, or NULL. */
static const char *find_mismatch(const Kernel *kernel, void *const *data, const size_t *bytes, int64_t steps,
                                 int64_t batch, int64_t inputs) {
  const Cell *cell = &kernel->cell;
  size_t state = (size_t)(cell->directions * cell->hidden) * sizeof(float);
  if (steps > MOST_ELEMENTS || batch > MOST_ELEMENTS) return "Recurrent: X has too many steps or rows";
  if (inputs != cell->inputs) return "Recurrent: X has another number of inputs than W";
  if (data[B] && !kernel->biased) return "Recurrent: expected a constant bias";
  if (data[PEEPHOLES] && !kernel->peepholes[0]) return "Recurrent: expected constant peepholes of an LSTM";
  if (data[FIRST_C] && cell->kind != LSTM) return "Recurrent: only an LSTM has an initial state of its cells";
  for (int at = FIRST_H; at <= FIRST_C; at++)
    if (data[at] && (bytes[at] % state || bytes[at] / state != (size_t)batch))
      return "Recurrent: an initial state has another size";
  if (!data[LENGTHS]) return NULL;
  if (bytes[LENGTHS] / sizeof(int32_t) != (size_t)batch) return "Recurrent: expected a length for each row";
  for (int64_t row = 0; row < batch; row++) {
    int64_t length = ((const int32_t *)data[LENGTHS])[row];
    if (length < 0 || length > steps) return "Recurrent: a length is negative, or more than the number of steps";
  }
  return NULL;
}

/* Compute the outputs of a run that is described; without a context, on this thread alone. */
static OrtStatus *carry_out(Run *run, const OrtKernelContext *context) {
  const Cell *cell = &run->kernel->cell;
  int64_t steps = run->sequences[0].steps, batch = run->sequences[0].batch;
  void *scratch = divide_scratch(run);
  if (!scratch) return chrion_error(FAIL, "Recurrent: out of memory");
  double work = (double)steps * (double)batch * (double)cell->hidden * (double)(cell->hidden + cell->inputs);
  for (int64_t at = 0; at < cell->directions; at++) {
    begin_states(&run->sequences[at], run->sequences[at].first_h, run->sequences[at].h);
    if (cell->kind == LSTM) begin_states(&run->sequences[at], run->sequences[at].first_c, run->sequences[at].c);
  }
  size_t threads = (size_t)(cell->directions * run->kernel->parts);
  OrtStatus *status = chrion_for_each(context, context && work >= PARALLEL, threads, run_thread, run);
  for (int64_t at = 0; at < cell->directions; at++) finish_rows(&run->sequences[at]);
  chrion_return_scratch(scratch);
  return status;
}

static OrtStatus *repeat(void *run) { return carry_out(run, NULL); }

static OrtStatus *compute(void *given, OrtKernelContext *context) {
  const Kernel *kernel = given;
  const Cell *cell = &kernel->cell;
  void *data[INPUTS] = {0};
  size_t bytes[INPUTS] = {0}, count;
  int64_t sizes[3];
  size_t rank = 3;
  OrtStatus *status;
  if ((status = CALL(OrtStatus *, KernelContextGetInputCount, const OrtKernelContext *, size_t *)(context, &count)))
    return status;
  for (size_t at = 0; at < count && at < INPUTS; at++)
    if ((status = chrion_read_input(context, at, &data[at], &bytes[at]))) return status;
  if ((status = chrion_read_sizes(context, X, sizes, &rank))) return status;
  if (rank != 3) return invalid("Recurrent: expected X of three dimensions");
  int64_t steps = sizes[cell->batch_first ? 1 : 0], batch = sizes[cell->batch_first ? 0 : 1];
  const char *mismatch = find_mismatch(kernel, data, bytes, steps, batch, sizes[2]);
  if (mismatch) return invalid(mismatch);
  Run run = {.kernel = kernel};
  if ((status = describe(context, &run, data, steps, batch)) || !batch) return status;
  if (!chrion_records()) return carry_out(&run, context);
  return data[LENGTHS] || kernel->parts > 1 ? NULL : chrion_record(repeat, &run, sizeof run); /* lengths may change */
}

static const char *name(const OperatorDescription *d) { return (void)d, "Recurrent"; }
static int input_type(const OperatorDescription *d, size_t at) { return (void)d, at == LENGTHS ? INT32 : FLOAT; }
static size_t input_count(const OperatorDescription *d) { return (void)d, INPUTS; }
static int input_kind(const OperatorDescription *d, size_t at) { return (void)d, at <= R ? REQUIRED : OPTIONAL; }
static size_t output_count(const OperatorDescription *d) { return (void)d, OUTPUTS; }
static int output_kind(const OperatorDescription *d, size_t at) { return (void)d, (void)at, OPTIONAL; }

const OperatorDescription chrion_recurrent = {
    COMMON_DESCRIPTION,
    .name = name,
    .input_type = input_type,
    .input_count = input_count,
    .input_kind = input_kind,
    .output_count = output_count,
    .output_kind = output_kind,
    .try_create = create,
    .try_compute = compute,
    .destroy = destroy,
};
