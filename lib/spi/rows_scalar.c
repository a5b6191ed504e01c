/* Row kernels for the "scalar" instruction set; see rows_kernels.inc.h. */
#define ROWS_SET scalar
#include "spi/rows_kernels.inc.h"
