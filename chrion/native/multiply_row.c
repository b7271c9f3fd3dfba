/* Gates with the instructions of any processor. */
#define LANES 4
#define MULTIPLY_ROW void chrion_multiply_row
#include "multiply_row.h"
