/* Row kernels for the "avx512" instruction set; see rows_kernels.inc.h. */
#define ROWS_SET avx512
#include "spi/rows_kernels.inc.h"
