/* Recurrent operators with AVX2. */
#include "operators.h"

#if defined(__x86_64__)
#define LANES 8
#define TARGET AVX2
#define RECUR AVX2 void chrion_recur_avx2
#include "recur.h"
#endif
