/* silu(gate) * up of a row. The includer defines LANES, and MULTIPLY_ROW as the function with its attributes. */
#include <string.h>

#include "vectors.h"

/* Store silu(gate) * up in `gate`, with a relative error of some 2e-7, or 0 for a gate below -87. NaN stays NaN. */
INLINE void multiply(Floats *gate, const Floats *up) {
  Floats opposite = -*gate, power = *gate;
  Ints positive = *gate > 0.0f;
  select_lanes(&power, &opposite, &positive);
  exponential(&power); /* of a number that is not positive, so that it is at most 1 */
  Floats share = power, none = {0}, one = none + 1.0f;
  Ints below = *gate < -87.0f; /* where the exponential is no less than at -87 */
  select_lanes(&share, &none, &below);
  select_lanes(&share, &one, &positive);
  *gate = *gate * (share / (power + 1.0f)) * *up;
}

MULTIPLY_ROW(const float *gate, int64_t width, float *output) {
  const float *up = gate + width;
  int64_t at = 0;
  for (; at + LANES <= width; at += LANES) {
    Floats value = *(const Floats *)(gate + at), other = *(const Floats *)(up + at);
    multiply(&value, &other);
    *(Floats *)(output + at) = value;
  }
  if (at < width) {
    Floats value = {0}, other = {0};
    size_t rest = sizeof(float) * (size_t)(width - at);
    memcpy(&value, gate + at, rest);
    memcpy(&other, up + at, rest);
    multiply(&value, &other);
    memcpy(output + at, &value, rest);
  }
}
