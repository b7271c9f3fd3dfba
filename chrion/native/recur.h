/* The computation of one direction. The includer defines LANES, TARGET as attributes of functions, and RECUR. */
#include <math.h>
#include <string.h>

#include "recurrent.h"
#include "vectors.h"

/* The most rows that a panel is multiplied with at a time: as many sums as registers allow. */
#if LANES > 8
#define ROWS 6
#else
#define ROWS 2
#endif
/* The elements of rows that are multiplied with a panel at a time, so that its part stays in the first cache (a choice, not
 * measured). */
#define DEPTH (2048 / LANES)

/* ---- Products ---- */

/* Unless the includer defines something else for weights and rows of another format. */
#ifndef ADD_PRODUCT
#define ADD_PRODUCT(sum, weights, element) sum += weights * element
#define MULTIPLY_TILES(...) false
#define END_TILES() ((void)0)
#define round_row(row, count, target) (row)
#endif

/* Add the products of one row with some vectors of a panel; two sums of each vector hide the latency of additions. */
INLINE TARGET void multiply_row(const float *row, const float *panel, int64_t depth, int vectors, float *sums) {
  Floats even[PANEL], odd[PANEL];
  for (int v = 0; v < vectors; v++) {
    even[v] = *(const Floats *)(sums + v * LANES);
    odd[v] = (Floats){0};
  }
  int64_t k = 0;
  for (; k + 2 <= depth; k += 2, panel += 2 * vectors * LANES)
    for (int v = 0; v < vectors; v++) {
      ADD_PRODUCT(even[v], *(const Floats *)(panel + v * LANES), row[k]);
      ADD_PRODUCT(odd[v], *(const Floats *)(panel + (vectors + v) * LANES), row[k + 1]);
    }
  if (k < depth)
    for (int v = 0; v < vectors; v++) ADD_PRODUCT(even[v], *(const Floats *)(panel + v * LANES), row[k]);
  for (int v = 0; v < vectors; v++) *(Floats *)(sums + v * LANES) = even[v] + odd[v];
}

/* Add the products of some rows with some vectors of a panel. */
INLINE TARGET void multiply_rows(const float *const *rows, int count, int64_t first, const float *panel, int64_t depth,
                          int vectors, float *const *sums, int64_t at) {
  if (count == 1) {
    multiply_row(rows[0] + first, panel, depth, vectors, sums[0] + at);
    return;
  }
  Floats all[ROWS][PANEL];
  const float *row[ROWS];
  for (int r = 0; r < count; r++) {
    row[r] = rows[r] + first;
    for (int v = 0; v < vectors; v++) all[r][v] = *(const Floats *)(sums[r] + at + v * LANES);
  }
  for (int64_t k = 0; k < depth; k++, panel += vectors * LANES) {
    Floats part[PANEL];
    for (int v = 0; v < vectors; v++) part[v] = *(const Floats *)(panel + v * LANES);
    for (int r = 0; r < count; r++)
      for (int v = 0; v < vectors; v++) ADD_PRODUCT(all[r][v], part[v], row[r][k]);
  }
  for (int r = 0; r < count; r++)
    for (int v = 0; v < vectors; v++) *(Floats *)(sums[r] + at + v * LANES) = all[r][v];
}

/* Add the products of some rows with a panel. */
INLINE TARGET void multiply_panel(const float *const *rows, int count, int64_t first, const float *panel, int64_t depth,
                           int64_t vectors, float *const *sums, int64_t at) {
  if (vectors == 4)
    multiply_rows(rows, count, first, panel, depth, 4, sums, at);
  else if (vectors == 3)
    multiply_rows(rows, count, first, panel, depth, 3, sums, at);
  else if (vectors == 2)
    multiply_rows(rows, count, first, panel, depth, 2, sums, at);
  else
    multiply_rows(rows, count, first, panel, depth, 1, sums, at);
}

/* Functions for each number of rows. */
#define MULTIPLY(count)                                                                                            \
  static TARGET void multiply_##count(const float *const *rows, int64_t first, const float *panel, int64_t depth,  \
                                      int64_t vectors, float *const *sums, int64_t at) {                           \
    multiply_panel(rows, count, first, panel, depth, vectors, sums, at);                                           \
  }
MULTIPLY(1)
MULTIPLY(2)
#if ROWS > 2
MULTIPLY(3)
MULTIPLY(4)
MULTIPLY(5)
MULTIPLY(6)
#endif

static void (*const by_rows[])(const float *const *, int64_t, const float *, int64_t, int64_t, float *const *,
                               int64_t) = {
    multiply_1, multiply_2,
#if ROWS > 2
    multiply_3, multiply_4, multiply_5, multiply_6,
#endif
};

/* Add the products of rows with a matrix to sums, from the elements `at` of each on. */
static TARGET void multiply(const Sequence *s, const Matrix *matrix, int64_t count, float *const *sums, int64_t at) {
  const float *const *rows = s->sources;
  if (MULTIPLY_TILES(s, matrix, count, sums, at)) return;
  int64_t blocks = (count + ROWS - 1) / ROWS;
  int64_t step = blocks > 1 ? DEPTH : matrix->depth; /* one block reads each panel once */
  for (int64_t vector = 0; vector < matrix->vectors; vector += PANEL) {
    int64_t width = matrix->vectors - vector < PANEL ? matrix->vectors - vector : PANEL;
    const float *panel = matrix->panels + vector * matrix->stride * LANES;
    for (int64_t first = 0; first < matrix->depth; first += step, panel += step * width * LANES) {
      int64_t depth = matrix->depth - first < step ? matrix->depth - first : step;
      for (int64_t block = 0, row = 0; block < blocks; block++) {
        int64_t next = count * (block + 1) / blocks;
        by_rows[next - row - 1](rows + row, first, panel, depth, width, sums + row, at + vector * LANES);
        row = next;
      }
    }
  }
}

/* ---- Functions of gates ---- */

/* Replace x by tanh(x): x * p(x^2) / q(x^2) with coefficients fitted to it on 0 to 9, where the next float is 1. The
 * relative error is below 3e-7; NaN stays NaN. */
INLINE void tangent(Floats *x) {
  const Floats most = (Floats){0} + 9.0f, least = (Floats){0} - 9.0f, one = (Floats){0} + 1.0f, minus = -one;
  Ints above = *x > most, below = *x < least;
  select_lanes(x, &most, &above);
  select_lanes(x, &least, &below);
  Floats square = *x * *x;
  Floats p = square * -8.488650456378935e-14f + 5.277929135405479e-11f;
  p = p * square - 2.0225195740408708e-08f;
  p = p * square + 1.11543040475226e-05f;
  p = p * square + 0.003103956114500761f;
  p = p * square + 0.13084009289741516f;
  p = p * square + 1.0f;
  Floats q = square * 0.00025461448240093887f + 0.02449517697095871f;
  q = q * square + 0.4641733765602112f;
  q = q * square + 1.0f;
  *x = *x * p / q;
  above = *x > one; /* by rounding */
  below = *x < minus;
  select_lanes(x, &one, &above);
  select_lanes(x, &minus, &below);
}

/* Apply one of the less frequent functions to the lanes of a vector, as onnxruntime does. */
static void apply_other(const Activation *activation, float *x) {
  float alpha = activation->alpha, beta = activation->beta;
  for (int lane = 0; lane < LANES; lane++) {
    float value = x[lane];
    switch (activation->kind) {
      case RELU: value = value > 0.0f || (activation->keeps_nan && value != value) ? value : 0.0f; break;
      case AFFINE: value = alpha * value + beta; break;
      case LEAKY_RELU: value = value >= 0.0f ? value : alpha * value; break;
      case THRESHOLDED_RELU: value = value > alpha ? value : 0.0f; break;
      case SCALED_TANH: value = alpha * tanhf(beta * value); break;
      case HARD_SIGMOID:
        value = alpha * value + beta;
        value = value > 0.0f ? value : 0.0f; /* also if it is NaN */
        value = value < 1.0f ? value : 1.0f;
        break;
      case ELU: value = value >= 0.0f ? value : alpha * (expf(value) - 1.0f); break;
      case SOFTSIGN: value = value / (1.0f + fabsf(value)); break;
      default: value = logf(1.0f + expf(value)); /* SOFTPLUS */
    }
    x[lane] = value;
  }
}

/* Replace x by a function of it. */
INLINE void apply(const Activation *activation, Floats *x) {
  if (activation->factor != 0.0f) {
    Floats value = *x * activation->factor;
    tangent(&value);
    *x = value * activation->factor + activation->offset;
  } else {
    float lanes[LANES];
    memcpy(lanes, x, sizeof lanes);
    apply_other(activation, lanes);
    memcpy(x, lanes, sizeof lanes);
  }
}

/* Limit x to -clip to clip, and replace it by a function of it. As in onnxruntime, NaN becomes the limit if there is a
 * bias, except in an RNN, and stays otherwise. */
INLINE void apply_clipped(const Sequence *s, const Activation *activation, Floats *x) {
  const float clip = s->cell->clip;
  if (clip != 0.0f) {
    Floats most = (Floats){0} + clip, least = -most;
    if (s->biased && s->cell->kind != RNN) {
      Ints inside = *x < most;
      select_lanes(&most, x, &inside);
      inside = most > least;
      select_lanes(&least, &most, &inside);
      *x = least;
    } else {
      Ints outside = *x > most;
      select_lanes(x, &most, &outside);
      outside = *x < least;
      select_lanes(x, &least, &outside);
    }
  }
  apply(activation, x);
}

/* Compute the states of a row of an LSTM from the sums of its gates: i, o, f and c of each vector of units. */
INLINE void finish_lstm(const Sequence *s, const float *sums, float *h, float *c) {
  const Activation *f = s->activations;
  const float *peepholes = s->peepholes;
  int64_t padded = s->cell->units * LANES;
  for (int64_t at = 0; at < padded; at += LANES, sums += 4 * LANES) {
    Floats input = *(const Floats *)sums, output = *(const Floats *)(sums + LANES);
    Floats forget = *(const Floats *)(sums + 2 * LANES), value = *(const Floats *)(sums + 3 * LANES);
    Floats state = *(const Floats *)(c + at), one = (Floats){0} + 1.0f;
    if (peepholes) input += *(const Floats *)(peepholes + at) * state;
    apply_clipped(s, &f[0], &input);
    if (s->cell->input_forget) {
      forget = one - input;
    } else {
      if (peepholes) forget += *(const Floats *)(peepholes + 2 * padded + at) * state;
      apply_clipped(s, &f[0], &forget);
    }
    apply_clipped(s, &f[1], &value);
    state = state * forget + input * value;
    *(Floats *)(c + at) = state;
    if (peepholes) output += *(const Floats *)(peepholes + padded + at) * state;
    apply_clipped(s, &f[0], &output);
    apply(&f[2], &state);
    *(Floats *)(h + at) = output * state;
  }
}

/* Compute the gates z and r of a row of a GRU, in place; and r * h, if that is multiplied next. */
INLINE void reset_gru(const Sequence *s, float *sums, const float *h, float *reset) {
  for (int64_t at = 0; at < s->cell->units * LANES; at += LANES, sums += 2 * LANES) {
    Floats update = *(const Floats *)sums, share = *(const Floats *)(sums + LANES);
    apply_clipped(s, &s->activations[0], &update);
    apply_clipped(s, &s->activations[2], &share);
    *(Floats *)sums = update;
    *(Floats *)(sums + LANES) = share;
    if (!s->cell->linear_before_reset) *(Floats *)(reset + at) = share * *(const Floats *)(h + at);
  }
}

/* Compute the state of a row of a GRU from its gates and the sums of the hidden gate. */
INLINE void finish_gru(const Sequence *s, const float *sums, float *h, const float *reset) {
  int64_t padded = s->cell->units * LANES;
  const float *hidden = sums + 2 * padded;
  for (int64_t at = 0; at < padded; at += LANES, sums += 2 * LANES) {
    Floats update = *(const Floats *)sums, share = *(const Floats *)(sums + LANES);
    Floats value = *(const Floats *)(hidden + at), one = (Floats){0} + 1.0f;
    if (s->cell->linear_before_reset) value += share * *(const Floats *)(reset + at);
    apply_clipped(s, &s->activations[1], &value);
    *(Floats *)(h + at) = (one - update) * value + update * *(const Floats *)(h + at);
  }
}

INLINE void finish_rnn(const Sequence *s, const float *sums, float *h) {
  for (int64_t at = 0; at < s->cell->units * LANES; at += LANES) {
    Floats value = *(const Floats *)(sums + at);
    apply_clipped(s, &s->activations[0], &value);
    *(Floats *)(h + at) = value;
  }
}

/* ---- Steps ---- */

INLINE int64_t length_of(const Sequence *s, int64_t row) { return s->lengths ? s->lengths[row] : s->steps; }

/* Multiply the inputs of some steps, from `first` on. A row that has ended is multiplied with any of its inputs. */
static TARGET void multiply_inputs(const Sequence *s, int64_t first, int64_t count) {
  int64_t gates = s->weights->input.vectors * LANES, stride = s->weights->input.stride;
  (void)stride;
  for (int64_t step = 0, at = 0; step < count; step++)
    for (int64_t row = 0; row < s->batch; row++, at++) {
      int64_t time = first + step, length = length_of(s, row);
      if (s->reverse) time = time < length ? length - 1 - time : 0;
      const float *x = s->x + time * s->x_step + row * s->x_row;
      s->sources[at] = round_row(x, s->cell->inputs, s->rounded + at * stride);
      s->sums[at] = s->products + at * gates;
      memcpy(s->sums[at], s->bias, sizeof(float) * (size_t)gates);
    }
  multiply(s, &s->weights->input, count * s->batch, s->sums, 0);
}

/* Compute one step of the rows that have not ended, from the products of its inputs. */
static TARGET void run_step(const Sequence *s, int64_t step, float *products) {
  const Cell *cell = s->cell;
  int64_t padded = cell->units * LANES, gates = s->weights->input.vectors * LANES, count = 0;
  int64_t stride = s->weights->recurrent.stride;
  (void)stride;
  for (int64_t row = 0; row < s->batch; row++)
    if (step < length_of(s, row)) {
      s->active[count] = row;
      s->sources[count] = round_row(s->h + row * padded, cell->hidden, s->rounded + count * stride);
      s->sums[count++] = products + row * gates;
    }
  multiply(s, &s->weights->recurrent, count, s->sums, 0);
  if (cell->kind == GRU) {
    for (int64_t at = 0; at < count; at++) {
      float *reset = s->reset + s->active[at] * padded;
      reset_gru(s, s->sums[at], s->h + s->active[at] * padded, reset);
      s->others[at] = reset;
      if (cell->linear_before_reset)
        memcpy(reset, s->bias + gates, sizeof(float) * (size_t)padded);
      else
        s->sources[at] = round_row(reset, cell->hidden, s->rounded + at * stride);
    }
    if (cell->linear_before_reset)
      multiply(s, &s->weights->candidate, count, s->others, 0);
    else
      multiply(s, &s->weights->candidate, count, s->sums, 2 * padded);
  }
  for (int64_t at = 0; at < count; at++) {
    int64_t row = s->active[at], time = s->reverse ? length_of(s, row) - 1 - step : step;
    float *h = s->h + row * padded;
    if (cell->kind == LSTM)
      finish_lstm(s, s->sums[at], h, s->c + row * padded);
    else if (cell->kind == GRU)
      finish_gru(s, s->sums[at], h, s->others[at]);
    else
      finish_rnn(s, s->sums[at], h);
    if (s->y) memcpy(s->y + time * s->y_step + row * s->y_row, h, sizeof(float) * (size_t)cell->hidden);
  }
}

RECUR(const Sequence *s) {
  int64_t gates = s->weights->input.vectors * LANES;
  for (int64_t first = 0; first < s->steps; first += s->block) {
    int64_t count = s->steps - first < s->block ? s->steps - first : s->block;
    multiply_inputs(s, first, count);
    for (int64_t step = 0; step < count; step++) run_step(s, first + step, s->products + step * s->batch * gates);
  }
  END_TILES();
}
