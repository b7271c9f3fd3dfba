/* Vectors of 4, 8 or 16 elements, as many as LANES says, which the includer defines. */
#pragma once
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

typedef float Floats __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(LANES * sizeof(int32_t))));

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else /* GCC has the same from version 12 */
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Ints){__VA_ARGS__})
#endif

/* The numbers of the lanes, and the lanes of one or two vectors in other orders. */
#if LANES == 4
#define NUMBERS {0, 1, 2, 3}
#define SWAP_LANES(x) SHUFFLE(x, x, 1, 0, 3, 2)
#define SWAP_PAIRS(x) SHUFFLE(x, x, 2, 3, 0, 1)
#define FIRST_LANES(x, y) SHUFFLE(x, y, 0, 4, 1, 5)
#define LAST_LANES(x, y) SHUFFLE(x, y, 2, 6, 3, 7)
#define FIRST_PAIRS(x, y) SHUFFLE(x, y, 0, 1, 4, 5)
#define LAST_PAIRS(x, y) SHUFFLE(x, y, 2, 3, 6, 7)
#elif LANES == 8
#define NUMBERS {0, 1, 2, 3, 4, 5, 6, 7}
#define SWAP_LANES(x) SHUFFLE(x, x, 1, 0, 3, 2, 5, 4, 7, 6)
#define SWAP_PAIRS(x) SHUFFLE(x, x, 2, 3, 0, 1, 6, 7, 4, 5)
#define SWAP_FOURS(x) SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3)
#define FIRST_LANES(x, y) SHUFFLE(x, y, 0, 8, 1, 9, 4, 12, 5, 13)
#define LAST_LANES(x, y) SHUFFLE(x, y, 2, 10, 3, 11, 6, 14, 7, 15)
#define FIRST_PAIRS(x, y) SHUFFLE(x, y, 0, 1, 8, 9, 4, 5, 12, 13)
#define LAST_PAIRS(x, y) SHUFFLE(x, y, 2, 3, 10, 11, 6, 7, 14, 15)
#define FIRST_FOURS(x, y) SHUFFLE(x, y, 0, 1, 2, 3, 8, 9, 10, 11)
#define LAST_FOURS(x, y) SHUFFLE(x, y, 4, 5, 6, 7, 12, 13, 14, 15)
#else
#define NUMBERS {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#define SWAP_LANES(x) SHUFFLE(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)
#define SWAP_PAIRS(x) SHUFFLE(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)
#define SWAP_FOURS(x) SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)
#define SWAP_HALVES(x) SHUFFLE(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)
#define FIRST_LANES(x, y) SHUFFLE(x, y, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
#define LAST_LANES(x, y) SHUFFLE(x, y, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)
#define FIRST_PAIRS(x, y) SHUFFLE(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define LAST_PAIRS(x, y) SHUFFLE(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define FIRST_FOURS(x, y) SHUFFLE(x, y, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
#define LAST_FOURS(x, y) SHUFFLE(x, y, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)
#define FIRST_EIGHTS(x, y) SHUFFLE(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
#define LAST_EIGHTS(x, y) SHUFFLE(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)
#endif

/* Store in `value` the lanes of `other` where the mask is set. */
INLINE void select_lanes(Floats *value, const Floats *other, const Ints *mask) {
  *value = (Floats)(((Ints)*value & ~*mask) | ((Ints)*other & *mask));
}

/* Replace x by exp(x), x <= 0. The relative error is below 2e-7; NaN stays NaN. */
INLINE void exponential(Floats *x) {
  Floats least = (Floats){0} - 87.0f, magic = (Floats){0} + 12582912.0f;
  Floats value = *x;
  Ints small = value < least;
  select_lanes(&value, &least, &small);
  Floats rounded = value * 1.44269504f + magic;
  Ints exponent = (Ints)rounded; /* the low bits are the rounded quotient */
  Floats quotient = rounded - magic;
  Floats rest = value - quotient * 0.693359375f;
  rest = rest + quotient * 2.12194440e-4f;
  Floats power = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  power = power * rest + 8.3334519073e-3f;
  power = power * rest + 4.1665795894e-2f;
  power = power * rest + 1.6666665459e-1f;
  power = power * rest + 5.0000001201e-1f;
  power = power * rest * rest + rest + 1.0f;
  Ints scale = (exponent << 23) + 0x3f800000;
  *x = power * (Floats)scale;
}

INLINE float sum(const Floats *x) {
  Floats value = *x;
#if LANES > 8
  value += SWAP_HALVES(value);
#endif
#if LANES > 4
  value += SWAP_FOURS(value);
#endif
  value += SWAP_PAIRS(value);
  value += SWAP_LANES(value);
  return value[0];
}

/* Store the greater ones of the lanes of two vectors in the first one. */
INLINE void keep_greater(Floats *x, const Floats *other) {
  Ints greater = *other > *x;
  select_lanes(x, other, &greater);
}

INLINE float greatest(const Floats *x) {
  Floats value = *x, other;
#if LANES > 8
  other = SWAP_HALVES(value);
  keep_greater(&value, &other);
#endif
#if LANES > 4
  other = SWAP_FOURS(value);
  keep_greater(&value, &other);
#endif
  other = SWAP_PAIRS(value);
  keep_greater(&value, &other);
  other = SWAP_LANES(value);
  keep_greater(&value, &other);
  return value[0];
}

/* Store partial sums of four vectors: lane 4 * g + n of the result is the sum of lanes 4 * g to 4 * g + 3 of vector n. */
INLINE void sum_fours(const Floats *x, Floats *sums) {
  Floats first = FIRST_LANES(x[0], x[1]) + LAST_LANES(x[0], x[1]);
  Floats second = FIRST_LANES(x[2], x[3]) + LAST_LANES(x[2], x[3]);
  *sums = FIRST_PAIRS(first, second) + LAST_PAIRS(first, second);
}

/* Store the sums of LANES / 4 vectors of such partial sums: lane 4 * m + n of the result is sum n of vector m. */
INLINE void sum_groups(const Floats *x, Floats *sums) {
#if LANES == 4
  *sums = x[0];
#elif LANES == 8
  *sums = FIRST_FOURS(x[0], x[1]) + LAST_FOURS(x[0], x[1]);
#else
  Floats first = FIRST_EIGHTS(x[0], x[1]) + LAST_EIGHTS(x[0], x[1]);
  Floats second = FIRST_EIGHTS(x[2], x[3]) + LAST_EIGHTS(x[2], x[3]);
  *sums = FIRST_FOURS(first, second) + LAST_FOURS(first, second);
#endif
}
