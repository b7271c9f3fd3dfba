/* What the operators of the domain "chrion" share: onnxruntime's C API, and the instructions in use. */
#ifndef CHRION_OPERATORS_H
#define CHRION_OPERATORS_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- onnxruntime's C API: indices into its table of functions, which stay valid in later versions. ---- */

typedef struct OrtStatus OrtStatus;
typedef struct OrtSessionOptions OrtSessionOptions;
typedef struct OrtCustomOpDomain OrtCustomOpDomain;
typedef struct OrtKernelInfo OrtKernelInfo;
typedef struct OrtKernelContext OrtKernelContext;
typedef struct OrtValue OrtValue;
typedef struct OrtTensorTypeAndShapeInfo OrtTensorInfo;
typedef struct {
  void *const *(*GetApi)(uint32_t version);
  const char *(*GetVersionString)(void);
} OrtApiBase;

enum {
  CreateStatus = 0,
  CreateCustomOpDomain = 26,
  CustomOpDomainAdd = 27,
  AddCustomOpDomain = 28,
  GetTensorMutableData = 51,
  GetDimensionsCount = 61,
  GetDimensions = 62,
  GetTensorTypeAndShape = 65,
  KernelInfoGetAttributeFloat = 85,
  KernelInfoGetAttributeInt = 86,
  KernelContextGetInputCount = 88,
  KernelContextGetOutputCount = 89,
  KernelContextGetInput = 90,
  KernelContextGetOutput = 91,
  ReleaseTensorTypeAndShapeInfo = 99,
  KernelInfoGetAttributeFloats = 162,
  KernelInfoGetAttributeInts = 163,
  KernelInfoGetConstantInput = 249,
  KernelContextParallelFor = 274,
  GetTensorSizeInBytes = 318,
};
/* The version that has all of these, and the layout of OperatorDescription. */
#define API_VERSION 23
#define OPERATOR_VERSION 17
enum { FLOAT = 1, INT32 = 6, INT64 = 7, REQUIRED = 0, OPTIONAL = 1, DEFAULT_MEMORY = 0, FAIL = 1, INVALID_ARGUMENT = 2 };
#define CALL(result, name, ...) ((result(*)(__VA_ARGS__))chrion_api[name])

/* OrtCustomOp in version 17. */
typedef struct OperatorDescription {
  uint32_t version;
  void *(*create)(const struct OperatorDescription *, const void *, const OrtKernelInfo *);
  const char *(*name)(const struct OperatorDescription *);
  const char *(*provider)(const struct OperatorDescription *);
  int (*input_type)(const struct OperatorDescription *, size_t);
  size_t (*input_count)(const struct OperatorDescription *);
  int (*output_type)(const struct OperatorDescription *, size_t);
  size_t (*output_count)(const struct OperatorDescription *);
  void (*compute)(void *, OrtKernelContext *);
  void (*destroy)(void *);
  int (*input_kind)(const struct OperatorDescription *, size_t);
  int (*output_kind)(const struct OperatorDescription *, size_t);
  int (*input_memory)(const struct OperatorDescription *, size_t);
  int (*least_inputs)(const struct OperatorDescription *);
  int (*equal_inputs)(const struct OperatorDescription *);
  int (*least_outputs)(const struct OperatorDescription *);
  int (*equal_outputs)(const struct OperatorDescription *);
  OrtStatus *(*try_create)(const struct OperatorDescription *, const void *, const OrtKernelInfo *, void **);
  OrtStatus *(*try_compute)(void *, OrtKernelContext *);
  OrtStatus *(*infer_shape)(const struct OperatorDescription *, void *);
  int (*first_version)(const struct OperatorDescription *);
  int (*last_version)(const struct OperatorDescription *);
} OperatorDescription;

/* The most elements of a row, so that no product of attributes overflows. */
#define MOST_ELEMENTS ((int64_t)1 << 32)

/* Set before any operator is created. */
extern void *const *chrion_api;

OrtStatus *chrion_error(int code, const char *message);
/* Read the attribute `shape`, of 2 to 8 dimensions. Fail unless those after the first are positive and have `elements` in
 * all, or any number up to MOST_ELEMENTS if `elements` is 0. */
OrtStatus *chrion_read_shape(const OrtKernelInfo *info, int64_t elements, int64_t *shape, int64_t *rank);
/* Read the data of an input and its size in bytes; both are 0 if the input is not given. */
OrtStatus *chrion_read_input(const OrtKernelContext *context, size_t at, void **data, size_t *bytes);
/* Read an attribute that is an integer. */
OrtStatus *chrion_read_integer(const OrtKernelInfo *info, const char *name, int64_t *value);
/* Read the data of a constant input and its size in bytes; both are 0 if it is not given or not constant. */
OrtStatus *chrion_read_constant(const OrtKernelInfo *info, size_t at, const float **data, size_t *bytes);
/* Read the dimensions of an input, of which there are at most `rank`, and store their number there. */
OrtStatus *chrion_read_sizes(const OrtKernelContext *context, size_t at, int64_t *sizes, size_t *rank);
/* Make an output, and return its data; NULL if it is not wanted. */
OrtStatus *chrion_make_optional(OrtKernelContext *context, size_t at, const int64_t *sizes, size_t rank, float **data);
/* Make the output, of a shape with another first dimension; `bytes` is the size that it must have. */
OrtStatus *chrion_make_output(OrtKernelContext *context, const int64_t *shape, int64_t rank, int64_t first, size_t bytes,
                              void **data);
/* Return a copy of attributes as the kernel. */
OrtStatus *chrion_make_kernel(const void *attributes, size_t size, void **kernel);
/* Call a function with `data` and each number below `count`, by several threads if that is worth it. */
OrtStatus *chrion_for_each(const OrtKernelContext *context, bool parallel, size_t count, void (*run)(void *, size_t),
                           void *data);

/* The operators, and what their descriptions have in common. */
extern const OperatorDescription chrion_linear, chrion_pooled_attention, chrion_recurrent, chrion_silu_and_mul;
const char *chrion_provider(const OperatorDescription *description);
int chrion_one(const OperatorDescription *description);
int chrion_any(const OperatorDescription *description);
int chrion_required(const OperatorDescription *description, size_t at);
int chrion_default_memory(const OperatorDescription *description, size_t at);
int chrion_float(const OperatorDescription *description, size_t at);
size_t chrion_one_value(const OperatorDescription *description);
void chrion_destroy(void *kernel);
#define COMMON_DESCRIPTION                                                                                        \
  .version = OPERATOR_VERSION, .provider = chrion_provider, .output_type = chrion_float,                          \
  .input_memory = chrion_default_memory, .least_inputs = chrion_one, .equal_inputs = chrion_one,                  \
  .least_outputs = chrion_one, .equal_outputs = chrion_one, .first_version = chrion_one, .last_version = chrion_any

/* ---- Calls without onnxruntime ---- */

/* While a thread records, operators that it runs do not compute: they describe the run, with the memory that it reads and
 * writes. The calls that are recorded compute the same as the run, for as long as this memory and the session exist. */
bool chrion_records(void);
/* Record a call of a function on a copy of some data, which it may change. */
OrtStatus *chrion_record(OrtStatus *(*run)(void *data), const void *data, size_t size);

/* Annotations of the synchronisation of onnxruntime's threads, which the thread sanitiser cannot see. */
#ifdef __SANITIZE_THREAD__
void __tsan_acquire(void *);
void __tsan_release(void *);
#define ACQUIRE(object) __tsan_acquire(object)
#define RELEASE(object) __tsan_release(object)
#else
#define ACQUIRE(object) ((void)0)
#define RELEASE(object) ((void)0)
#endif

/* ---- Instructions ---- */

/* The instructions in use: 0 for those of any processor, 1 for AVX2, 2 for AVX-512. */
extern int chrion_level;
/* Those for bfloat16: 0 for none, 1 for AVX512-BF16, 2 for AMX as well. */
extern int chrion_bfloat16;
/* Return whether operators may use tiles: chrion_bfloat16 has them, and the system permits it. */
bool chrion_allow_tiles(void);
/* Whether the compiler has them. */
#if defined(__x86_64__) && (defined(__clang__) || __GNUC__ >= 11)
#define HAS_BFLOAT16 1
#define BFLOAT16 __attribute__((target("avx512bf16,avx512f,avx512dq,avx512vl,avx512bw,avx2,fma,amx-tile,amx-bf16")))
#else
#define HAS_BFLOAT16 0
#endif
#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2,fma")))
#define AVX512 __attribute__((target("avx512f,avx512dq,avx512vl,avx512bw,avx2,fma")))
#endif

#endif
