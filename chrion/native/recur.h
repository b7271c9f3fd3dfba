/* The computation of one direction. The includer defines LANES, TARGET as attributes of functions, and RECUR. */
#include <math.h>
#include <sched.h>
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

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() ((void)0)
#endif

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

/* Add the products of rows with some vectors of a matrix to sums, which begin at the elements `at` of each. The first
 * vector is that of a panel. */
static TARGET void multiply(const float *const *rows, bool tiles, const Matrix *matrix, int64_t first_vector,
                            int64_t last_vector, int64_t count, float *const *sums, int64_t at) {
  if (MULTIPLY_TILES(rows, tiles, matrix, first_vector, last_vector, count, sums, at)) return;
  int64_t blocks = (count + ROWS - 1) / ROWS;
  int64_t step = blocks > 1 ? DEPTH : matrix->depth; /* one block reads each panel once */
  for (int64_t vector = first_vector; vector < last_vector; vector += PANEL) {
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

/* Units whose states a thread computes: vectors of them. */
typedef struct {
  int64_t first, last;
} Units;

/* Compute the states of a row of an LSTM from the sums of its gates: i, o, f and c of each vector of units. */
INLINE void finish_lstm(const Sequence *s, Units units, const float *sums, float *h, float *c) {
  const Activation *f = s->activations;
  const float *peepholes = s->peepholes;
  int64_t padded = s->cell->units * LANES;
  sums += 4 * units.first * LANES;
  for (int64_t at = units.first * LANES; at < units.last * LANES; at += LANES, sums += 4 * LANES) {
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
INLINE void reset_gru(const Sequence *s, Units units, float *sums, const float *h, float *reset) {
  sums += 2 * units.first * LANES;
  for (int64_t at = units.first * LANES; at < units.last * LANES; at += LANES, sums += 2 * LANES) {
    Floats update = *(const Floats *)sums, share = *(const Floats *)(sums + LANES);
    apply_clipped(s, &s->activations[0], &update);
    apply_clipped(s, &s->activations[2], &share);
    *(Floats *)sums = update;
    *(Floats *)(sums + LANES) = share;
    if (!s->cell->linear_before_reset) *(Floats *)(reset + at) = share * *(const Floats *)(h + at);
  }
}

/* Compute the state of a row of a GRU from its gates and the sums of the hidden gate. */
INLINE void finish_gru(const Sequence *s, Units units, const float *sums, const float *before, float *h,
                       const float *reset) {
  const float *hidden = sums + 2 * s->cell->units * LANES;
  sums += 2 * units.first * LANES;
  for (int64_t at = units.first * LANES; at < units.last * LANES; at += LANES, sums += 2 * LANES) {
    Floats update = *(const Floats *)sums, share = *(const Floats *)(sums + LANES);
    Floats value = *(const Floats *)(hidden + at), one = (Floats){0} + 1.0f;
    if (s->cell->linear_before_reset) value += share * *(const Floats *)(reset + at);
    apply_clipped(s, &s->activations[1], &value);
    *(Floats *)(h + at) = (one - update) * value + update * *(const Floats *)(before + at);
  }
}

INLINE void finish_rnn(const Sequence *s, Units units, const float *sums, float *h) {
  for (int64_t at = units.first * LANES; at < units.last * LANES; at += LANES) {
    Floats value = *(const Floats *)(sums + at);
    apply_clipped(s, &s->activations[0], &value);
    *(Floats *)(h + at) = value;
  }
}

/* ---- Phases: the products of the inputs of some steps, then one or two phases for each of these steps ---- */

/* The threads that wait look so often whether a phase has ended before they compute the part of another thread, which
 * takes some 25 us, and so often before they let others run (choices, not measured). */
#define PATIENCE 512
#define LONG_PATIENCE 16384

INLINE int64_t length_of(const Sequence *s, int64_t row) { return s->lengths ? s->lengths[row] : s->steps; }

/* Return the states of a row after some steps. */
INLINE float *state_of(const Sequence *s, int64_t row, int64_t steps) {
  return s->h + ((steps & 1) * s->batch + row) * s->cell->units * LANES;
}

/* The phases of a step: a GRU multiplies the reset states of all units. */
INLINE int64_t phases_of_step(const Cell *cell) { return cell->kind == GRU && !cell->linear_before_reset ? 2 : 1; }

/* Multiply the inputs of some steps, from `first` on, with a part of the panels. A row that has ended is multiplied with
 * any of its inputs. */
static TARGET void multiply_inputs(const Sequence *s, int64_t first, int64_t count, int64_t part) {
  const Matrix *matrix = &s->weights->input;
  int64_t gates = matrix->vectors * LANES, panels = (matrix->vectors + PANEL - 1) / PANEL;
  int64_t from = panels * part / s->team->parts * PANEL, to = panels * (part + 1) / s->team->parts * PANEL;
  if (to > matrix->vectors) to = matrix->vectors;
  if (from >= to) return;
  for (int64_t step = 0, at = 0; step < count; step++)
    for (int64_t row = 0; row < s->batch; row++, at++) {
      int64_t time = first + step, length = length_of(s, row);
      if (s->reverse) time = time < length ? length - 1 - time : 0;
      const float *x = s->x + time * s->x_step + row * s->x_row;
      s->sources[at] = round_row(x, s->cell->inputs, s->rounded + at * matrix->stride);
      s->sums[at] = s->products + at * gates;
      memcpy(s->sums[at] + from * LANES, s->bias + from * LANES, sizeof(float) * (size_t)((to - from) * LANES));
    }
  multiply(s->sources, s->tiles, matrix, from, to, count * s->batch, s->sums, 0);
}

/* Return the units of a part: whole panels of all of their matrices. */
INLINE Units units_of(const Sequence *s, int64_t part) {
  if (s->team->parts == 1) return (Units){0, s->cell->units};
  int64_t step = s->cell->kind == LSTM ? 1 : PANEL, groups = (s->cell->units + step - 1) / step;
  Units units = {groups * part / s->team->parts * step, groups * (part + 1) / s->team->parts * step};
  if (units.last > s->cell->units) units.last = s->cell->units;
  return units;
}

/* Compute the states of some units after a step, and store them in the result. */
INLINE void finish_row(const Sequence *s, Units units, int64_t row, int64_t step, const float *sums, const float *reset) {
  const Cell *cell = s->cell;
  float *before = state_of(s, row, step), *h = state_of(s, row, step + 1);
  if (cell->kind == LSTM)
    finish_lstm(s, units, sums, h, s->c + row * cell->units * LANES);
  else if (cell->kind == GRU)
    finish_gru(s, units, sums, before, h, reset);
  else
    finish_rnn(s, units, sums, h);
  if (!s->y) return;
  int64_t time = s->reverse ? length_of(s, row) - 1 - step : step, first = units.first * LANES;
  int64_t last = units.last * LANES < cell->hidden ? units.last * LANES : cell->hidden;
  memcpy(s->y + time * s->y_step + row * s->y_row + first, h + first, sizeof(float) * (size_t)(last - first));
}

/* Compute a phase of one step for a part of the units of the rows that have not ended, from the products of inputs. */
static TARGET void run_step(const Sequence *s, int64_t step, bool second, float *products, int64_t part) {
  const Cell *cell = s->cell;
  const Matrix *recurrent = &s->weights->recurrent, *candidate = &s->weights->candidate;
  Units units = units_of(s, part);
  if (units.first >= units.last) return;
  int64_t padded = cell->units * LANES, gates = s->weights->input.vectors * LANES, count = 0;
  int64_t stride = recurrent->stride, vectors = cell->kind == LSTM ? 4 : cell->kind == GRU ? 2 : 1;
  (void)stride;
  for (int64_t row = 0; row < s->batch; row++)
    if (step < length_of(s, row)) {
      s->active[count] = row;
      const float *source = second ? s->reset + row * padded : state_of(s, row, step);
      s->sources[count] = round_row(source, cell->hidden, s->rounded + count * stride);
      s->others[count] = s->reset + row * padded;
      s->sums[count++] = products + row * gates;
    }
  if (!second) {
    multiply(s->sources, s->tiles, recurrent, vectors * units.first, vectors * units.last, count, s->sums, 0);
    for (int64_t at = 0; cell->kind == GRU && at < count; at++) {
      reset_gru(s, units, s->sums[at], state_of(s, s->active[at], step), s->others[at]);
      if (cell->linear_before_reset)
        memcpy(s->others[at] + units.first * LANES, s->bias + gates + units.first * LANES,
               sizeof(float) * (size_t)((units.last - units.first) * LANES));
    }
    if (phases_of_step(cell) > 1) return;
    if (cell->kind == GRU)
      multiply(s->sources, s->tiles, candidate, units.first, units.last, count, s->others, 0);
  } else {
    multiply(s->sources, s->tiles, candidate, units.first, units.last, count, s->sums, 2 * padded);
  }
  for (int64_t at = 0; at < count; at++) finish_row(s, units, s->active[at], step, s->sums[at], s->others[at]);
}

/* Compute a part of the phase of a block of steps from `first` on that has a number, with 0 for the products of inputs. */
static TARGET void run_phase(const Sequence *s, int64_t first, int64_t number, int64_t part) {
  int64_t own = phases_of_step(s->cell), step = own > 1 ? (number - 1) / 2 : number - 1;
  int64_t count = s->steps - first < s->block ? s->steps - first : s->block;
  if (!number)
    multiply_inputs(s, first, count, part);
  else
    run_step(s, first + step, number - 1 > step * own, s->products + step * s->batch * s->weights->input.vectors * LANES,
             part);
}

/* Compute a part of a phase if no other thread does; return whether it did. */
static TARGET bool claim_part(const Sequence *s, int64_t phase, int64_t part) {
  int64_t expected = phase;
  if (!__atomic_compare_exchange_n(&s->team->claims[part].phases, &expected, phase + 1, false, __ATOMIC_ACQ_REL,
                                   __ATOMIC_ACQUIRE))
    return false;
  int64_t each = 1 + s->block * phases_of_step(s->cell);
  run_phase(s, phase / each * s->block, phase % each, part);
  __atomic_add_fetch(&s->team->done, 1, __ATOMIC_ACQ_REL);
  return true;
}

/* Compute a thread's share of all phases. */
static TARGET void join_team(const Sequence *s, int64_t phases) {
  Team *team = s->team;
  __atomic_add_fetch(&team->joined, 1, __ATOMIC_ACQ_REL);
  for (int64_t phase; (phase = __atomic_load_n(&team->done, __ATOMIC_ACQUIRE) / team->parts) < phases;) {
    claim_part(s, phase, s->part);
    for (int64_t turns = 0; __atomic_load_n(&team->done, __ATOMIC_ACQUIRE) / team->parts == phase; turns++) {
      bool absent = __atomic_load_n(&team->joined, __ATOMIC_ACQUIRE) < team->parts;
      for (int64_t part = 0; (absent || turns >= PATIENCE) && part < team->parts; part++) claim_part(s, phase, part);
      PAUSE();
      if (turns >= LONG_PATIENCE) sched_yield();
    }
  }
}

RECUR(const Sequence *s) {
  int64_t own = phases_of_step(s->cell), blocks = (s->steps + s->block - 1) / s->block;
  if (s->team->parts > 1)
    join_team(s, blocks + s->steps * own);
  else
    for (int64_t first = 0; first < s->steps; first += s->block) {
      int64_t count = s->steps - first < s->block ? s->steps - first : s->block;
      for (int64_t number = 0; number <= count * own; number++) run_phase(s, first, number, 0);
    }
  END_TILES();
}
