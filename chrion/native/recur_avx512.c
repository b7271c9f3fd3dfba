/* Recurrent operators with AVX-512. */
#include "operators.h"

#if defined(__x86_64__)
#define LANES 16
#define TARGET AVX512
#define RECUR AVX512 void chrion_recur_avx512
#include "recur.h"
#endif
