/* What the recurrent operator, the operator Linear and the variants of their computation share. */
#ifndef CHRION_RECURRENT_H
#define CHRION_RECURRENT_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The vectors of a panel: with so many sums a row of inputs, and two such rows, fit into 16 registers. */
#define PANEL 4

/* The kinds of operators, and the functions of ONNX. */
enum { LSTM, GRU, RNN, LINEAR };
enum { SIGMOID, TANH, RELU, AFFINE, LEAKY_RELU, THRESHOLDED_RELU, SCALED_TANH, HARD_SIGMOID, ELU, SOFTSIGN, SOFTPLUS,
       FUNCTIONS };

/* A function of a gate: factor * tanh(factor * x) + offset if it is a sigmoid or tanh; others have factor 0. */
typedef struct {
  int64_t kind;
  float alpha, beta, factor, offset;
  bool keeps_nan; /* of a Relu: whether NaN stays, as in some of onnxruntime's gates */
} Activation;

/* A matrix for products row * matrix, [depth, vectors * lanes], in panels of PANEL vectors, the last with the rest. In
 * a panel the vectors of one row of the matrix follow each other. In bfloat16, an element of 32 bits has those of two
 * rows, and panels have zeros up to `stride` rows, a multiple of TILE. */
typedef struct {
  int64_t depth, stride, vectors;
  float *panels;
} Matrix;

/* The rows of a tile, and the elements of 32 bits in one. */
#define TILE 16

/* The weights of one direction, shared by all operators of the process that have equal ones. A unit's gates are
 * neighbours: vector u * 4 + g has gate g of the units u * lanes to (u + 1) * lanes - 1 of an LSTM. A GRU has z and r
 * in this way, then the hidden gate of all units, whose recurrent weights are the matrix `candidate`. Linear has a single
 * gate, its outputs in place of hidden units, and no recurrent weights. */
typedef struct Weights {
  struct Weights *next;
  int64_t users, kind, lanes, inputs, hidden;
  bool rounded; /* to bfloat16 */
  bool columns; /* whether the weights of Linear are given as [inputs, hidden], of which each unit has a column */
  uint64_t digest;
  size_t bytes;
  Matrix input, recurrent, candidate;
} Weights;

/* What the operator computes in both directions. */
typedef struct {
  int64_t kind, hidden, inputs, directions, lanes;
  int64_t units; /* vectors of units */
  bool reverse, batch_first, linear_before_reset, input_forget, rounded;
  float clip; /* a limit on the values that functions are applied to, or 0 for none */
} Cell;

/* The most threads that compute one direction. */
#define MOST_PARTS 64

/* What the threads that compute one direction have in common. A direction is a number of phases, of which each begins
 * when the one before has ended; the units of a phase are divided into parts. A thread claims its own part of each phase,
 * and those of threads that have not begun or do not get on, so that no number of threads is necessary. */
typedef struct {
  int64_t parts;  /* of each phase */
  int64_t joined; /* the threads that have begun */
  int64_t done;   /* the parts of all phases that have been computed */
  char rest_of_cache_line[40];
  struct {
    int64_t phases; /* in which the part has been claimed */
    char rest_of_cache_line[56];
  } claims[MOST_PARTS];
} Team;

/* One direction of one run, as a thread computes it. Strides are in elements. */
typedef struct {
  const Cell *cell;
  const Weights *weights;
  const Activation *activations; /* of an LSTM f, g and h; of a GRU f of z, g, and f of r; of an RNN f */
  bool reverse, biased;
  int64_t steps, batch;
  const float *x;
  int64_t x_step, x_row;
  const int32_t *lengths; /* of each row, or NULL */
  const float *first_h, *first_c; /* initial states, or NULL for zeros */
  const float *bias; /* in the order of the weights; of a GRU then the recurrent bias of the hidden gate */
  const float *peepholes; /* i, o and f, each of units * lanes elements, or NULL */
  float *y, *y_h, *y_c; /* each may be NULL */
  int64_t y_step, y_row, state_row;
  /* Scratch memory. */
  Team *team;
  int64_t block; /* the steps whose inputs are multiplied at once */
  float *products; /* [block * batch, gates]: of inputs, to which those of states are added */
  float *h; /* [2, batch, units * lanes], of which a row is in the second half after an odd number of steps */
  float *c, *reset; /* [batch, units * lanes] */
  /* Scratch memory of the thread. */
  int64_t part;
  float *rounded; /* the rows that are multiplied, in bfloat16 */
  bool tiles; /* whether AMX multiplies them */
  const float **sources; /* the rows that are multiplied */
  float **sums, **others; /* the sums that their products are added to, and of a GRU the rows of `reset` */
  int64_t *active; /* the rows that have not ended */
} Sequence;

/* A run of Linear. */
typedef struct {
  const Weights *weights;
  const float *bias; /* zeros without one, as many as vectors have */
  const float *x;    /* [rows, inputs] */
  float *y;          /* [rows, hidden] */
  int64_t rows;
  int64_t first, last; /* the vectors of outputs that are computed, of which the first is that of a panel */
  bool tiles; /* whether AMX multiplies them */
  /* Scratch memory. */
  int64_t block;   /* the rows that are multiplied at once */
  float *rounded;  /* these rows, in bfloat16 */
  float *products; /* their products, or NULL if rows of y are whole vectors */
  const float **sources;
  float **sums;
} Product;

/* Compute a thread's share of a direction with the instructions of any processor, AVX2 or AVX-512, and AVX-512 for bfloat16. */
void chrion_recur(const Sequence *sequence);
void chrion_recur_avx2(const Sequence *sequence);
void chrion_recur_avx512(const Sequence *sequence);
void chrion_recur_bfloat16(const Sequence *sequence);
/* Compute a run of Linear. */
void chrion_multiply_bfloat16(const Product *product);

/* The rows of 32 bits in a matrix of some rows, and with the zeros after them. */
static inline int64_t chrion_depth(bool rounded, int64_t rows) { return rounded ? (rows + 1) / 2 : rows; }
static inline int64_t chrion_stride(bool rounded, int64_t rows) {
  return rounded ? (rows + 2 * TILE - 1) / (2 * TILE) * TILE : rows;
}

/* The number of gates of a kind. */
static inline int64_t chrion_gates(int64_t kind) { return kind == LSTM ? 4 : kind == GRU ? 3 : 1; }

/* Return packed weights, [gates * hidden, inputs] and [gates * hidden, hidden] before, in the format of some others
 * (kind, lanes, inputs, hidden, rounded and columns), with one more user; NULL if there is no memory. */
Weights *chrion_pack_weights(const Weights *format, const float *w, const float *r);
/* Release packed weights, which the last user frees. */
void chrion_release_weights(Weights *weights);
/* Add a vector of each gate, [gates * hidden], in the order of the weights: their vectors `first` to `last` - 1. */
void chrion_add_packed(const Weights *weights, const float *source, int64_t first, int64_t last, float *target);
/* Copy a vector of units, with zeros up to a whole number of lanes. */
void chrion_pad_units(const Weights *weights, const float *source, float *target);

/* Return memory of at least a size, at a multiple of 64, which a run returns afterwards; NULL if there is none. */
void *chrion_take_scratch(size_t bytes);
void chrion_return_scratch(void *memory);
/* Count an operator; when the last one ends, free the memory that runs have returned. */
void chrion_begin_operator(void);
void chrion_end_operator(void);

#endif
