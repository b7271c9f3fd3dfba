/* Recurrent operators with the instructions of any processor. */
#define LANES 4
#define TARGET
#define RECUR void chrion_recur
#include "recur.h"
