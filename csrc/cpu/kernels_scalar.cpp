// The row kernels in plain C++.
#include "core/rotate.h"
#include "cpu/blocks_scalar.h"
#include "cpu/kernels.h"
// Order matters: the rows are written in terms of the blocks above.
#include "cpu/minmax_rows.h"
#include "cpu/rotate_rows.h"
