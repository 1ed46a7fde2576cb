#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#define S(n) \
  __attribute__((visibility("default"))) int n() { return 0; }
// A handle of its own for each thread, as cuBLAS gives: torch keeps a workspace for each.
__attribute__((visibility("default"))) int cublasCreate_v2(void** h) {
  *h = malloc(64);
  return 0;
}
S(cublasDestroy_v2)
S(cublasSetStream_v2) S(cublasSetWorkspace_v2) S(cublasSetMathMode) S(cublasSetPointerMode_v2)
    __attribute__((visibility("default"))) int cublasGetMathMode(void* h, int* m) {
  *m = 0;
  return 0;
}
__attribute__((visibility("default"))) int cublasGetPointerMode_v2(void* h, int* m) {
  *m = 0;
  return 0;
}
S(cublasSgemm_v2)
S(cublasGemmEx) S(cublasSgemmEx) S(cublasSgemmStridedBatched) S(cublasGemmStridedBatchedEx) S(cublasSgemv_v2)
    S(cublasSdot_v2) S(cublasDgemm_v2)
