/* Packed weights of recurrent operators, shared by all operators of the process, and scratch memory of their runs.
 *
 * Equal weights are one object: the sessions of a plan, the plans of a model and the directions of a chunk read the
 * same memory. They are looked up by a digest and then compared with the packed ones, so that different weights are
 * never shared.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "operators.h"
#include "recurrent.h"

#define ALIGNMENT 64
/* The most bytes of scratch memory that are kept for another run (a choice, not measured). */
#define MOST_KEPT ((size_t)4 << 20)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Weights *all; /* under the lock, as what follows */
static size_t packed_bytes;
/* Not the lock of weights, which packing holds. */
static pthread_mutex_t scratch_lock = PTHREAD_MUTEX_INITIALIZER;

/* No thread holds a lock at a fork, so that the child can destroy operators. */
static void take_locks(void) {
  pthread_mutex_lock(&lock);
  pthread_mutex_lock(&scratch_lock);
}

static void return_locks(void) {
  pthread_mutex_unlock(&scratch_lock);
  pthread_mutex_unlock(&lock);
}

__attribute__((constructor)) static void guard_forks(void) { pthread_atfork(take_locks, return_locks, return_locks); }

/* Return the bytes of all packed weights of the process, for tests. */
__attribute__((visibility("default"))) size_t chrion_packed_bytes(void) {
  pthread_mutex_lock(&lock);
  size_t bytes = packed_bytes;
  pthread_mutex_unlock(&lock);
  return bytes;
}

/* Return the row of the unpacked weights that is in a lane of a vector, or -1 if the lane is beyond the last unit. */
static int64_t row_of(int64_t kind, int64_t lanes, int64_t hidden, int64_t vector, int64_t lane) {
  int64_t units = (hidden + lanes - 1) / lanes, gate = 0, unit = vector;
  if (kind == LSTM) {
    gate = vector % 4;
    unit = vector / 4;
  } else if (kind == GRU && vector < 2 * units) {
    gate = vector % 2;
    unit = vector / 2;
  } else if (kind == GRU) {
    gate = 2;
    unit = vector - 2 * units;
  }
  unit = unit * lanes + lane;
  return unit < hidden ? gate * hidden + unit : -1;
}

/* Return two neighbours of a row in bfloat16, rounded to even as the processor does, with zeros after its end. Elements are
 * at some distance. */
static uint32_t round_pair(const float *row, int64_t at, int64_t depth, int64_t distance) {
  uint32_t pair = 0;
  for (int64_t k = at; row && k < at + 2 && k < depth; k++) {
    uint32_t bits;
    memcpy(&bits, row + k * distance, sizeof bits);
    if ((bits & 0x7f800000) == 0)
      bits &= 0x80000000; /* zero, or a denormal, which the instructions take for zero */
    else if ((bits & 0x7fffffff) > 0x7f800000)
      bits |= 0x400000; /* NaN */
    else
      bits += 0x7fff + (bits >> 16 & 1);
    pair |= bits >> 16 << 16 * (k - at);
  }
  return pair;
}

/* Copy weights of some depth into a matrix whose first vector has a number, or compare them. Return whether they are
 * equal. */
static bool arrange(const Weights *weights, const Matrix *matrix, int64_t first, int64_t depth, const float *source,
                    bool compare) {
  int64_t lanes = weights->lanes, row_step = weights->columns ? 1 : depth, step = weights->columns ? weights->hidden : 1;
  for (int64_t vector = 0; vector < matrix->vectors; vector++) {
    int64_t panel = vector / PANEL * PANEL;
    int64_t width = matrix->vectors - panel < PANEL ? matrix->vectors - panel : PANEL;
    float *target = matrix->panels + panel * matrix->stride * lanes + (vector - panel) * lanes;
    for (int64_t lane = 0; lane < lanes; lane++) {
      int64_t row = row_of(weights->kind, lanes, weights->hidden, first + vector, lane);
      const float *values = row < 0 ? NULL : source + row * row_step;
      for (int64_t k = 0; k < matrix->stride; k++) {
        uint32_t bits = weights->rounded ? round_pair(values, 2 * k, depth, step) : 0;
        if (!weights->rounded && values) memcpy(&bits, values + k * step, sizeof bits);
        float *place = target + k * width * lanes + lane;
        if (!compare)
          memcpy(place, &bits, sizeof bits);
        else if (memcmp(place, &bits, sizeof bits))
          return false;
      }
    }
  }
  return true;
}

static bool arrange_all(const Weights *weights, const float *w, const float *r, bool compare) {
  int64_t inputs = weights->inputs, hidden = weights->hidden;
  return arrange(weights, &weights->input, 0, inputs, w, compare) &&
         arrange(weights, &weights->recurrent, 0, hidden, r, compare) &&
         arrange(weights, &weights->candidate, weights->recurrent.vectors, hidden, r, compare);
}

static uint64_t mix(uint64_t digest, const float *values, int64_t count) {
  for (int64_t at = 0; at < count; at++) {
    uint32_t bits;
    memcpy(&bits, values + at, sizeof bits);
    digest = (digest ^ bits) * 0x9e3779b97f4a7c15u; /* the golden ratio, as in Fibonacci hashing */
    digest ^= digest >> 29;
  }
  return digest;
}

/* Return new weights of a format with room for their matrices. */
static Weights *allocate(const Weights *format) {
  int64_t lanes = format->lanes, hidden = format->hidden, inputs = format->inputs;
  int64_t units = (hidden + lanes - 1) / lanes, gates = chrion_gates(format->kind);
  int64_t own = format->kind == GRU ? 1 : 0, states = format->kind == LINEAR ? 0 : gates;
  Matrix input = {chrion_depth(format->rounded, inputs), chrion_stride(format->rounded, inputs), gates * units, NULL};
  Matrix recurrent = {chrion_depth(format->rounded, hidden), chrion_stride(format->rounded, hidden),
                      (states - own) * units, NULL};
  Matrix candidate = recurrent;
  candidate.vectors = own * units;
  size_t header = (sizeof(Weights) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  size_t vectors = (size_t)(gates * units) * (size_t)input.stride + (size_t)(states * units) * (size_t)recurrent.stride;
  size_t bytes = header + vectors * (size_t)lanes * sizeof(float);
  bytes = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  Weights *weights = aligned_alloc(ALIGNMENT, bytes);
  if (!weights) return NULL;
  *weights = *format;
  weights->bytes = bytes;
  input.panels = (float *)((char *)weights + header);
  recurrent.panels = input.panels + input.vectors * input.stride * lanes;
  candidate.panels = recurrent.panels + recurrent.vectors * recurrent.stride * lanes;
  weights->input = input;
  weights->recurrent = recurrent;
  weights->candidate = candidate;
  return weights;
}

/* Return equal weights, with one more user, or NULL. The lock is held. */
static Weights *find(const Weights *like, const float *w, const float *r) {
  for (Weights *one = all; one; one = one->next)
    if (one->digest == like->digest && one->kind == like->kind && one->lanes == like->lanes &&
        one->rounded == like->rounded && one->columns == like->columns && one->inputs == like->inputs &&
        one->hidden == like->hidden && arrange_all(one, w, r, true)) {
      one->users++;
      return one;
    }
  return NULL;
}

Weights *chrion_pack_weights(const Weights *format, const float *w, const float *r) {
  int64_t rows = chrion_gates(format->kind) * format->hidden;
  Weights like = *format;
  like.digest = mix(mix(0, w, rows * like.inputs), r, like.kind == LINEAR ? 0 : rows * like.hidden);
  pthread_mutex_lock(&lock);
  Weights *weights = find(&like, w, r);
  if (!weights && (weights = allocate(&like))) {
    weights->users = 1;
    arrange_all(weights, w, r, false);
    weights->next = all;
    all = weights;
    packed_bytes += weights->bytes;
  }
  pthread_mutex_unlock(&lock);
  return weights;
}

void chrion_release_weights(Weights *weights) {
  if (!weights) return;
  pthread_mutex_lock(&lock);
  if (!--weights->users) {
    Weights **place = &all;
    while (*place != weights) place = &(*place)->next;
    *place = weights->next;
    packed_bytes -= weights->bytes;
    free(weights);
  }
  pthread_mutex_unlock(&lock);
}

void chrion_add_packed(const Weights *weights, const float *source, int64_t first, int64_t last, float *target) {
  for (int64_t vector = first; vector < last; vector++)
    for (int64_t lane = 0; lane < weights->lanes; lane++, target++) {
      int64_t row = row_of(weights->kind, weights->lanes, weights->hidden, vector, lane);
      if (row >= 0) *target += source[row];
    }
}

void chrion_pad_units(const Weights *weights, const float *source, float *target) {
  int64_t hidden = weights->hidden, padded = (hidden + weights->lanes - 1) / weights->lanes * weights->lanes;
  memcpy(target, source, sizeof(float) * (size_t)hidden);
  memset(target + hidden, 0, sizeof(float) * (size_t)(padded - hidden));
}

/* ---- Scratch memory: of as many runs as were in progress at a time ---- */

typedef struct Scratch {
  struct Scratch *next;
  size_t bytes;
  char reserved[ALIGNMENT - sizeof(struct Scratch *) - sizeof(size_t)];
} Scratch;

static Scratch *unused;
static int64_t operators;

void *chrion_take_scratch(size_t bytes) {
  pthread_mutex_lock(&scratch_lock);
  Scratch *scratch = unused;
  if (scratch) unused = scratch->next;
  pthread_mutex_unlock(&scratch_lock);
  if (scratch && scratch->bytes < bytes) {
    free(scratch);
    scratch = NULL;
  }
  if (!scratch) {
    if (bytes > SIZE_MAX / 2) return NULL;
    size_t rounded = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (!(scratch = aligned_alloc(ALIGNMENT, sizeof(Scratch) + rounded))) return NULL;
    scratch->bytes = rounded;
  }
  return scratch + 1;
}

void chrion_return_scratch(void *memory) {
  Scratch *scratch = (Scratch *)memory - 1;
  if (scratch->bytes > MOST_KEPT) {
    free(scratch);
    return;
  }
  pthread_mutex_lock(&scratch_lock);
  scratch->next = unused;
  unused = scratch;
  pthread_mutex_unlock(&scratch_lock);
}

void chrion_begin_operator(void) {
  pthread_mutex_lock(&scratch_lock);
  operators++;
  pthread_mutex_unlock(&scratch_lock);
}

void chrion_end_operator(void) {
  pthread_mutex_lock(&scratch_lock);
  if (!--operators)
    while (unused) {
      Scratch *scratch = unused;
      unused = scratch->next;
      free(scratch);
    }
  pthread_mutex_unlock(&scratch_lock);
}
