#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#define S(n) \
  __attribute__((visibility("default"))) int n() { return 0; }
#define C(n)                                               \
  __attribute__((visibility("default"))) int n(void** p) { \
    *p = malloc(512);                                      \
    return 0;                                              \
  }
C(cublasLtMatmulDescCreate)
C(cublasLtMatmulPreferenceCreate) C(cublasLtMatrixLayoutCreate) S(cublasLtMatmulDescDestroy)
    S(cublasLtMatmulDescSetAttribute) S(cublasLtMatmulPreferenceDestroy) S(cublasLtMatmulPreferenceSetAttribute)
        S(cublasLtMatrixLayoutDestroy) S(cublasLtMatrixLayoutSetAttribute) S(cublasLtMatmul)
            __attribute__((visibility("default"))) int cublasLtMatmulAlgoGetHeuristic(void* h, void* d, void* a,
                                                                                      void* b, void* c, void* e,
                                                                                      void* p, int n, void* results,
                                                                                      int* found) {
  memset(results, 0, 96);
  *found = 1;
  return 0;
}
__attribute__((visibility("default"))) size_t cublasLtGetVersion() { return 130100; }
