/* Row kernels for the "avx2" instruction set; see rows_kernels.inc.h. */
#define ROWS_SET avx2
#include "spi/rows_kernels.inc.h"
