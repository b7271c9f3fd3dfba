/* Gates with AVX2. */
#include "operators.h"

#if defined(__x86_64__)
#define LANES 8
#define MULTIPLY_ROW AVX2 void chrion_multiply_row_avx2
#include "multiply_row.h"
#endif
