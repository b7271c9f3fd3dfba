/* The registration of the operators of the domain "chrion", and what they share. */
#include "operators.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#if HAS_BFLOAT16
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

/* Identifies the sources of the library, so that one that was compiled from others is not used. */
#ifndef CHRION_SOURCE
#define CHRION_SOURCE ""
#endif
#define EXPORT __attribute__((visibility("default"))) /* the library is compiled with -fvisibility=hidden */
EXPORT const char *chrion_source(void) { return CHRION_SOURCE; }

/* The most bytes that describe a run. */
#define MOST_DATA 2048

void *const *chrion_api;
int chrion_level;
int chrion_bfloat16;

/* Return the instructions for bfloat16 that the processor has. */
static int find_bfloat16(void) {
#if HAS_BFLOAT16
  unsigned a = 0, b = 0, c = 0, d = 0, first = 0;
  const unsigned tiles = 1u << 22 | 1u << 24; /* AMX-BF16 and AMX-TILE */
  if (!__get_cpuid_count(7, 0, &first, &b, &c, &d) || !first) return 0;
  unsigned features = d;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & 1u << 5)) return 0;
  return (features & tiles) == tiles ? 2 : 1;
#else
  return 0;
#endif
}

/* Return the best instructions up to a level that the processor has, without those for bfloat16. */
static int find_level(int level) {
  int found = 0;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (level > 0 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found = 1;
  if (level > 1 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw"))
    found = 2;
#endif
  (void)level;
  return found;
}

/* Return whether operators can multiply bfloat16 on this processor. */
EXPORT int chrion_has_bfloat16(void) { return find_level(2) == 2 && find_bfloat16(); }

/* Use the best instructions up to a level that the processor has, of which 3 and 4 are those for bfloat16; return their
 * level. Tests compare them. */
EXPORT int chrion_choose(int level) {
  chrion_level = find_level(level);
  chrion_bfloat16 = chrion_level == 2 && level > 2 ? find_bfloat16() : 0;
  if (level == 3 && chrion_bfloat16 > 1) chrion_bfloat16 = 1;
  return chrion_level + chrion_bfloat16;
}

bool chrion_allow_tiles(void) {
#if HAS_BFLOAT16 && defined(__linux__)
  return chrion_bfloat16 == 2 && !syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */);
#else
  return false;
#endif
}

OrtStatus *chrion_error(int code, const char *message) {
  return CALL(OrtStatus *, CreateStatus, int, const char *)(code, message);
}

OrtStatus *chrion_read_shape(const OrtKernelInfo *info, int64_t elements, int64_t *shape, int64_t *rank) {
  size_t count = 8;
  int64_t product = 1;
  OrtStatus *status = CALL(OrtStatus *, KernelInfoGetAttributeInts, const OrtKernelInfo *, const char *, int64_t *,
                           size_t *)(info, "shape", shape, &count);
  if (status) return status;
  for (size_t at = 1; at < count && product; at++)
    product = shape[at] > 0 && shape[at] <= MOST_ELEMENTS / product ? product * shape[at] : 0;
  if (count < 2 || !product || (elements && product != elements))
    return chrion_error(INVALID_ARGUMENT, "shape: expected fixed dimensions after the first, as many elements as a row has");
  *rank = (int64_t)count;
  return NULL;
}

OrtStatus *chrion_read_input(const OrtKernelContext *context, size_t at, void **data, size_t *bytes) {
  const OrtValue *value;
  OrtStatus *status;
  *data = NULL;
  *bytes = 0;
  if ((status = CALL(OrtStatus *, KernelContextGetInput, const OrtKernelContext *, size_t, const OrtValue **)(
           context, at, &value)) ||
      !value ||
      (status = CALL(OrtStatus *, GetTensorSizeInBytes, const OrtValue *, size_t *)(value, bytes)))
    return status;
  return CALL(OrtStatus *, GetTensorMutableData, const OrtValue *, void **)(value, data);
}

OrtStatus *chrion_make_output(OrtKernelContext *context, const int64_t *shape, int64_t rank, int64_t first, size_t bytes,
                              void **data) {
  int64_t sizes[8];
  size_t produced;
  OrtValue *output;
  OrtStatus *status;
  memcpy(sizes, shape, sizeof *sizes * (size_t)rank);
  sizes[0] = first;
  if ((status = CALL(OrtStatus *, KernelContextGetOutput, OrtKernelContext *, size_t, const int64_t *, size_t,
                     OrtValue **)(context, 0, sizes, (size_t)rank, &output)) ||
      (status = CALL(OrtStatus *, GetTensorSizeInBytes, const OrtValue *, size_t *)(output, &produced)))
    return status;
  if (produced != bytes) return chrion_error(INVALID_ARGUMENT, "the shape of the output has another size");
  return CALL(OrtStatus *, GetTensorMutableData, OrtValue *, void **)(output, data);
}

OrtStatus *chrion_read_integer(const OrtKernelInfo *info, const char *name, int64_t *value) {
  return CALL(OrtStatus *, KernelInfoGetAttributeInt, const OrtKernelInfo *, const char *, int64_t *)(info, name, value);
}

OrtStatus *chrion_read_constant(const OrtKernelInfo *info, size_t at, const float **data, size_t *bytes) {
  const OrtValue *value = NULL;
  int constant = 0;
  OrtStatus *status;
  *data = NULL;
  *bytes = 0;
  if ((status = CALL(OrtStatus *, KernelInfoGetConstantInput, const OrtKernelInfo *, size_t, int *, const OrtValue **)(
           info, at, &constant, &value)) ||
      !constant || !value ||
      (status = CALL(OrtStatus *, GetTensorSizeInBytes, const OrtValue *, size_t *)(value, bytes)))
    return status;
  return CALL(OrtStatus *, GetTensorMutableData, const OrtValue *, void **)(value, (void **)data);
}

OrtStatus *chrion_read_sizes(const OrtKernelContext *context, size_t at, int64_t *sizes, size_t *rank) {
  const OrtValue *value;
  OrtTensorInfo *info;
  size_t most = *rank;
  OrtStatus *status;
  if ((status = CALL(OrtStatus *, KernelContextGetInput, const OrtKernelContext *, size_t, const OrtValue **)(
           context, at, &value)) ||
      (status = CALL(OrtStatus *, GetTensorTypeAndShape, const OrtValue *, OrtTensorInfo **)(value, &info)))
    return status;
  status = CALL(OrtStatus *, GetDimensionsCount, const OrtTensorInfo *, size_t *)(info, rank);
  if (!status && *rank <= most)
    status = CALL(OrtStatus *, GetDimensions, const OrtTensorInfo *, int64_t *, size_t)(info, sizes, *rank);
  CALL(void, ReleaseTensorTypeAndShapeInfo, OrtTensorInfo *)(info);
  return status || *rank <= most ? status : chrion_error(INVALID_ARGUMENT, "an input has too many dimensions");
}

OrtStatus *chrion_make_optional(OrtKernelContext *context, size_t at, const int64_t *sizes, size_t rank, float **data) {
  OrtValue *output = NULL;
  *data = NULL;
  OrtStatus *status = CALL(OrtStatus *, KernelContextGetOutput, OrtKernelContext *, size_t, const int64_t *, size_t,
                           OrtValue **)(context, at, sizes, rank, &output);
  if (status || !output) return status;
  return CALL(OrtStatus *, GetTensorMutableData, OrtValue *, void **)(output, (void **)data);
}

OrtStatus *chrion_make_kernel(const void *attributes, size_t size, void **kernel) {
  *kernel = malloc(size);
  if (!*kernel) return chrion_error(FAIL, "out of memory");
  memcpy(*kernel, attributes, size);
  return NULL;
}

OrtStatus *chrion_for_each(const OrtKernelContext *context, bool parallel, size_t count, void (*run)(void *, size_t),
                           void *data) {
  OrtStatus *status = NULL;
  RELEASE(data);
  if (parallel && count > 1)
    status = CALL(OrtStatus *, KernelContextParallelFor, const OrtKernelContext *, void (*)(void *, size_t), size_t,
                  size_t, void *)(context, run, count, 0, data);
  else
    for (size_t at = 0; at < count; at++) run(data, at);
  ACQUIRE(data);
  return status;
}

/* A recorded call, and those after it. */
typedef struct Call {
  struct Call *next;
  OrtStatus *(*run)(void *);
  size_t size;
  _Alignas(64) char data[];
} Call;

/* The place of the next call while the thread records, otherwise NULL, and the number of calls. */
static _Thread_local Call **next_call;
static _Thread_local Call *recorded;
static _Thread_local size_t calls;

bool chrion_records(void) { return next_call; }

OrtStatus *chrion_record(OrtStatus *(*run)(void *), const void *data, size_t size) {
  size_t bytes = (sizeof(Call) + size + 63) / 64 * 64;
  Call *call = size <= MOST_DATA ? aligned_alloc(64, bytes) : NULL;
  if (!call) return chrion_error(FAIL, "out of memory");
  *call = (Call){.run = run, .size = size};
  memcpy(call->data, data, size);
  *next_call = call;
  next_call = &call->next;
  calls++;
  return NULL;
}

EXPORT void chrion_free_calls(Call *call) {
  while (call) {
    Call *next = call->next;
    free(call);
    call = next;
  }
}

/* Record the operators that this thread runs, until chrion_end_recording. */
EXPORT void chrion_begin_recording(void) { next_call = &recorded; }

/* Return the calls, or NULL if their number is another one. */
EXPORT Call *chrion_end_recording(size_t expected) {
  Call *found = calls == expected ? recorded : NULL;
  if (!found) chrion_free_calls(recorded);
  next_call = NULL;
  recorded = NULL;
  calls = 0;
  return found;
}

/* Carry out recorded calls, also on several threads at the same time. */
EXPORT OrtStatus *chrion_call(const Call *call) {
  _Alignas(64) char data[MOST_DATA];
  OrtStatus *status = NULL;
  for (; call && !status; call = call->next) {
    memcpy(data, call->data, call->size);
    status = call->run(data);
  }
  return status;
}

const char *chrion_provider(const OperatorDescription *d) { return (void)d, "CPUExecutionProvider"; }
int chrion_one(const OperatorDescription *d) { return (void)d, 1; }
int chrion_any(const OperatorDescription *d) { return (void)d, INT32_MAX; }
int chrion_required(const OperatorDescription *d, size_t at) { return (void)d, (void)at, REQUIRED; }
int chrion_default_memory(const OperatorDescription *d, size_t at) { return (void)d, (void)at, DEFAULT_MEMORY; }
int chrion_float(const OperatorDescription *d, size_t at) { return (void)d, (void)at, FLOAT; }
size_t chrion_one_value(const OperatorDescription *d) { return (void)d, 1; }
void chrion_destroy(void *kernel) { free(kernel); }

static OrtStatus *make_domain(OrtCustomOpDomain **domain) {
  const OperatorDescription *const operators[] = {&chrion_linear, &chrion_pooled_attention, &chrion_recurrent,
                                                  &chrion_silu_and_mul};
  OrtStatus *status = CALL(OrtStatus *, CreateCustomOpDomain, const char *, OrtCustomOpDomain **)("chrion", domain);
  for (size_t at = 0; at < sizeof operators / sizeof *operators && !status; at++)
    status = CALL(OrtStatus *, CustomOpDomainAdd, OrtCustomOpDomain *, const OperatorDescription *)(*domain,
                                                                                                   operators[at]);
  return status;
}

/* Called by onnxruntime when this library is registered with session options. */
EXPORT OrtStatus *RegisterCustomOps(OrtSessionOptions *options, const OrtApiBase *base) {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  static OrtCustomOpDomain *domain; /* of all sessions, to the end of the process */
  OrtStatus *status = NULL;
  pthread_mutex_lock(&lock);
  if (!domain) {
    void *const *table = base->GetApi(API_VERSION);
    if (table) { /* otherwise a session with an operator reports that it is unknown */
      chrion_api = table;
      chrion_choose(4);
      OrtCustomOpDomain *created = NULL;
      if (!(status = make_domain(&created))) domain = created;
    }
  }
  pthread_mutex_unlock(&lock);
  if (status || !domain) return status;
  return CALL(OrtStatus *, AddCustomOpDomain, OrtSessionOptions *, OrtCustomOpDomain *)(options, domain);
}
