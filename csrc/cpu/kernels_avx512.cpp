// The row kernels for AVX-512.
#if defined(__x86_64__)
#include "core/rotate.h"
#include "cpu/blocks_avx512.h"
#include "cpu/kernels.h"
// Order matters: the rows are written in terms of the blocks above.
#include "cpu/minmax_rows.h"
#include "cpu/rotate_rows.h"
#endif
