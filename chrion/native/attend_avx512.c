/* Attention with AVX-512. */
#include "operators.h"

#if defined(__x86_64__)
#define LANES 16
#define ATTEND AVX512 void chrion_attend_avx512
#include "attend.h"
#endif
