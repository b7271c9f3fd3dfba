/* Attention with AVX2. */
#include "operators.h"

#if defined(__x86_64__)
#define LANES 8
#define ATTEND AVX2 void chrion_attend_avx2
#include "attend.h"
#endif
