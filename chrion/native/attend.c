/* Attention with the instructions of any processor. */
#define LANES 4
#define ATTEND void chrion_attend
#include "attend.h"
