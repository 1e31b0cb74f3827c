// The schema of every op. Kernels register themselves in cpu/ and cuda/, fake kernels in ops.py.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(lightning_sylvie, m) {
  m.def("select_rows(Tensor rows, Tensor index, Tensor(a!) message, int offset) -> ()");
  m.def("scatter_add_rows(Tensor message, int offset, Tensor index, int[] counts, Tensor(a!) rows) -> ()");
}
