// The schema of every op. Kernels register themselves in cpu/ and cuda/, fake kernels in ops/.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(lightning_sylvie, m) {
  m.def("select_rows(Tensor rows, Tensor index, Tensor(a!) message, int offset) -> ()");
  m.def("scatter_add_rows(Tensor message, int offset, Tensor index, int[] counts, Tensor(a!) rows) -> ()");

  m.def(
      "quantize_rows(Tensor rows, Tensor? index, Tensor id, int key, int bits, Tensor(a!) message, int offset, "
      "Tensor(b!) bad) -> ()");
  m.def("dequantize_rows(Tensor message, int offset, int bits, Tensor(a!) rows) -> ()");
  m.def(
      "dequantize_add_rows(Tensor message, int offset, int bits, Tensor index, int[] counts, Tensor(a!) rows) -> "
      "()");

  m.def(
      "rotate_quantize_rows(Tensor rows, Tensor? index, Tensor id, int key, float bits, bool unbiased, "
      "Tensor(a!) message, int offset, Tensor(b!) bad) -> ()");
  m.def("rotate_dequantize_rows(Tensor message, int offset, Tensor id, int key, float bits, Tensor(a!) rows) -> ()");
  m.def(
      "rotate_dequantize_add_rows(Tensor message, int offset, Tensor id, int key, float bits, Tensor index, "
      "int[] counts, Tensor(a!) rows) -> ()");
}
