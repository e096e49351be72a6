/* Stand-ins for cuBLASLt and cuDNN: handles that torch makes. cuBLASLt finds no algorithm, so that torch takes cuBLAS;
   no layer of cuDNN works. */
#include <stdlib.h>

static int make(void **out) { *out = calloc(1, 256); return 0; }

int cublasLtCreate(void **out) { return make(out); }
int cublasLtMatmulDescCreate(void **out, int compute, int scale) { (void)compute; (void)scale; return make(out); }
int cublasLtMatrixLayoutCreate(void **out, ...) { return make(out); }
int cublasLtMatmulPreferenceCreate(void **out) { return make(out); }
int cublasLtMatmulDescDestroy(void *p) { free(p); return 0; }
int cublasLtMatrixLayoutDestroy(void *p) { free(p); return 0; }
int cublasLtMatmulPreferenceDestroy(void *p) { free(p); return 0; }
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *desc, void *a, void *b, void *c, void *d, void *preference,
                                   int requested, void *results, int *returned) {
    (void)handle; (void)desc; (void)a; (void)b; (void)c; (void)d; (void)preference; (void)requested; (void)results;
    *returned = 0;
    return 0;
}

size_t cudnnGetVersion(void) { return 92400; }
size_t cudnnGetCudartVersion(void) { return 13000; }
int cudnnCreate(void **out) { return make(out); }
const char *cudnnGetErrorString(int code) { return code ? "CUDNN_STATUS_NOT_SUPPORTED" : "CUDNN_STATUS_SUCCESS"; }
