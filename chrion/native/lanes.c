/* Lanes that carry out a program without the interpreter.
 *
 * A request is one call: the caller's thread carries out the first lane, threads of this library the others. Between
 * two segments a lane does nothing but read and write counters, so a handoff takes a fraction of a microsecond and no
 * lane ever waits for the interpreter's lock.
 *
 * onnxruntime is met through its C API. The table of its functions, and session options, are handed over as they are
 * to any library of custom operators (RegisterCustomOps), so that no second copy of onnxruntime is loaded.
 *
 * Guarantees. Each lane takes requests in the order in which they were submitted, the same for all lanes, so two
 * requests never wait for each other crosswise. A lane that fails, or sees that another has failed, sets its counter
 * to the end and stops; so every wait ends. chrion_run returns when all lanes have let go of the frame.
 * Assumptions. A frame serves one request at a time. chrion_stop comes after the last chrion_run has returned.
 */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__) || defined(__i386__)
#define RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ volatile("yield")
#else
#define RELAX() ((void)0)
#endif

/* ---- onnxruntime's C API: positions in its table of functions, which only ever grows. ---- */

typedef struct OrtStatus OrtStatus;
typedef struct OrtEnv OrtEnv;
typedef struct OrtSession OrtSession;
typedef struct OrtSessionOptions OrtSessionOptions;
typedef struct OrtMemoryInfo OrtMemoryInfo;
typedef struct OrtValue OrtValue;
typedef struct OrtIoBinding OrtIoBinding;
typedef struct {
  void *const *(*GetApi)(uint32_t version);
  const char *(*GetVersionString)(void);
} OrtApiBase;

enum {
  GetErrorCode = 1,
  GetErrorMessage = 2,
  CreateEnv = 3,
  CreateSessionFromArray = 8,
  CloneSessionOptions = 12,
  CreateTensorWithDataAsOrtValue = 49,
  CreateCpuMemoryInfo = 69,
  ReleaseStatus = 93,
  ReleaseSession = 95,
  ReleaseValue = 96,
  ReleaseSessionOptions = 100,
  RunWithBinding = 133,
  CreateIoBinding = 134,
  ReleaseIoBinding = 135,
  BindInput = 136,
  BindOutput = 137,
};
/* Of its enumerations: OrtLoggingLevel, OrtAllocatorType, OrtMemType. */
enum { WARNING = 2, DEVICE_ALLOCATOR = 0, DEFAULT_MEMORY = 0 };
#define API_VERSION 17
#define CALL(result, name, ...) ((result(*)(__VA_ARGS__))api[name])

static void *const *api;
static OrtEnv *environment;
static OrtMemoryInfo *host;
/* What RegisterCustomOps was last given on this thread: chrion_open takes it at once. */
static _Thread_local OrtSessionOptions *given;

/* Why something failed; code is onnxruntime's, 0 for success. */
typedef struct {
  int32_t code;
  int32_t segment;
  char message[2048];
} Failure;

/* Turn a status into a failure; true if there is none. */
static bool succeeded(OrtStatus *status, Failure *failure) {
  if (!status) return true;
  if (failure) {
    failure->code = CALL(int, GetErrorCode, const OrtStatus *)(status);
    snprintf(failure->message, sizeof failure->message, "%s",
             CALL(const char *, GetErrorMessage, const OrtStatus *)(status));
  }
  CALL(void, ReleaseStatus, OrtStatus *)(status);
  return false;
}

/* Called by onnxruntime for session options that are to know this library: it adds no operators to them. */
OrtStatus *RegisterCustomOps(OrtSessionOptions *options, const OrtApiBase *base) {
  if (!api) {
    void *const *table = base->GetApi(API_VERSION);
    if (!table) return NULL; /* chrion_open says so */
    api = table;
  }
  return CALL(OrtStatus *, CloneSessionOptions, const OrtSessionOptions *, OrtSessionOptions **)(options, &given);
}

/* What all sessions share: onnxruntime's environment, of which a process has one, and a name for the host's memory. */
static bool prepared(Failure *failure) {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  pthread_mutex_lock(&lock);
  bool done = (environment || succeeded(CALL(OrtStatus *, CreateEnv, int, const char *, OrtEnv **)(
                                            WARNING, "chrion", &environment),
                                        failure)) &&
              (host || succeeded(CALL(OrtStatus *, CreateCpuMemoryInfo, int, int, OrtMemoryInfo **)(
                                     DEVICE_ALLOCATOR, DEFAULT_MEMORY, &host),
                                 failure));
  pthread_mutex_unlock(&lock);
  return done;
}

/* A session of a serialised model, with the options given last on this thread; NULL where it fails. */
OrtSession *chrion_open(const void *model, size_t bytes, Failure *failure) {
  OrtSessionOptions *options = given;
  OrtSession *session = NULL;
  failure->code = 0;
  given = NULL;
  if (!options) {
    failure->code = 1;
    snprintf(failure->message, sizeof failure->message, "no session options were given");
    return NULL;
  }
  if (prepared(failure))
    succeeded(CALL(OrtStatus *, CreateSessionFromArray, OrtEnv *, const void *, size_t, const OrtSessionOptions *,
                   OrtSession **)(environment, model, bytes, options, &session),
              failure);
  CALL(void, ReleaseSessionOptions, OrtSessionOptions *)(options);
  return failure->code ? NULL : session;
}

void chrion_close(OrtSession *session) { CALL(void, ReleaseSession, OrtSession *)(session); }

OrtIoBinding *chrion_binding(OrtSession *session, Failure *failure) {
  OrtIoBinding *binding = NULL;
  failure->code = 0;
  succeeded(CALL(OrtStatus *, CreateIoBinding, OrtSession *, OrtIoBinding **)(session, &binding), failure);
  return binding;
}

void chrion_unbind(OrtIoBinding *binding) { CALL(void, ReleaseIoBinding, OrtIoBinding *)(binding); }

/* Bind memory of the host's, which has to stay, to an input or output; false where it fails. */
bool chrion_bind(OrtIoBinding *binding, bool output, const char *name, void *data, size_t bytes, const int64_t *shape,
                 size_t rank, int type, Failure *failure) {
  OrtValue *value = NULL;
  failure->code = 0;
  if (!succeeded(CALL(OrtStatus *, CreateTensorWithDataAsOrtValue, const OrtMemoryInfo *, void *, size_t,
                      const int64_t *, size_t, int, OrtValue **)(host, data, bytes, shape, rank, type, &value),
                 failure))
    return false;
  bool bound = succeeded(CALL(OrtStatus *, output ? BindOutput : BindInput, OrtIoBinding *, const char *,
                              const OrtValue *)(binding, name, value),
                         failure);
  CALL(void, ReleaseValue, OrtValue *)(value);
  return bound;
}

/* ---- Counters: one thread advances, any number wait, spinning first, then parked in the kernel. ---- */

/* Twice the count, and one more if somebody may be parked. On a cache line of its own. */
typedef struct {
  _Alignas(64) _Atomic uint32_t word;
} Counter;

/* Counts are 31 bits wide and may wrap around: of two, the later one is less than half the way ahead. */
#define BITS 0x7fffffffu
#define ENDED 0x3fffffffu

static double now_us(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec * 1e6 + (double)time.tv_nsec / 1e3;
}

static void advance(Counter *counter, uint32_t count) {
  /* After the exchange the counter may be gone, with the request it belonged to: only its address is used. A wake-up
   * that hits memory used anew is no harm, since whoever parks looks again. */
  if (atomic_exchange_explicit(&counter->word, count << 1, memory_order_acq_rel) & 1)
    syscall(SYS_futex, &counter->word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

static bool reached(uint32_t word, uint32_t count) { return (((word >> 1) - count) & BITS) <= ENDED; }

static uint32_t look(Counter *counter) { return atomic_load_explicit(&counter->word, memory_order_acquire); }

static void wait_for(Counter *counter, uint32_t count, double patience_us) {
  double until = 0;
  for (int turn = 0; !reached(look(counter), count); turn++) {
    RELAX();
    if (turn % 64 == 63) { /* the clock is dearer than a look */
      double now = now_us();
      if (until == 0) until = now + patience_us;
      if (now >= until) break;
    }
  }
  for (;;) {
    uint32_t word = look(counter);
    if (reached(word, count)) return;
    /* The flag is set before sleeping, and the kernel compares again: an advance in between is not missed. */
    if ((word & 1) || atomic_compare_exchange_weak(&counter->word, &word, word | 1))
      syscall(SYS_futex, &counter->word, FUTEX_WAIT_PRIVATE, word | 1, NULL, NULL, 0);
  }
}

/* ---- Programs, frames and lanes. ---- */

enum { WAIT, RUN, SIGNAL };

/* wait: lane and count; run: segment; signal: count. */
typedef struct {
  int32_t kind, a, b;
} Step;

typedef struct {
  const Step *steps;
  int32_t count;
  /* The logical CPU the lane has to itself, or -1. */
  int32_t core;
} Part;

/* One lane's share of a request, while it waits for the lane. */
typedef struct Request {
  struct Frame *frame;
  struct Request *next;
} Request;

/* What one request works on. */
typedef struct Frame {
  OrtSession **sessions;
  OrtIoBinding **bindings;
  /* Where to note start and end of each segment, in microseconds of the monotonic clock, or NULL. */
  double *times;
  Counter *counters;
  Request *requests;
  Failure *failure;
  _Atomic bool claimed, failed;
} Frame;

typedef struct {
  struct Lanes *lanes;
  Part part;
  int index;
  /* How many requests it has been given, and those that it has not begun. */
  Counter submitted;
  pthread_mutex_t lock;
  Request *first, *last;
  pthread_t thread;
} Lane;

typedef struct Lanes {
  int count, started;
  double patience_us;
  /* Held while a request is given to all lanes. */
  pthread_mutex_t order;
  uint32_t requests;
  Lane lane[];
} Lanes;

/* A lane without a core of its own spins at the cost of one that works: no longer than parking takes. */
static double patience_us(const Lane *lane) { return lane->part.core < 0 ? 3 : lane->lanes->patience_us; }

static void run(Frame *frame, int32_t segment) {
  if (frame->times) frame->times[2 * segment] = now_us();
  OrtStatus *status = CALL(OrtStatus *, RunWithBinding, OrtSession *, const void *, const OrtIoBinding *)(
      frame->sessions[segment], NULL, frame->bindings[segment]);
  if (frame->times) frame->times[2 * segment + 1] = now_us();
  if (status) { /* several lanes may fail at once: the first one counts */
    bool first = !atomic_exchange(&frame->claimed, true);
    if (first) frame->failure->segment = segment;
    succeeded(status, first ? frame->failure : NULL);
    atomic_store_explicit(&frame->failed, true, memory_order_release);
  }
}

static void perform(Lane *lane, Frame *frame) {
  Counter *own = &frame->counters[lane->index];
  for (int32_t at = 0; at < lane->part.count; at++) {
    const Step *step = &lane->part.steps[at];
    if (step->kind == WAIT)
      wait_for(&frame->counters[step->a], (uint32_t)step->b, patience_us(lane));
    else if (step->kind == SIGNAL)
      advance(own, (uint32_t)step->a);
    else if (atomic_load_explicit(&frame->failed, memory_order_acquire))
      break;
    else
      run(frame, step->a);
  }
  advance(own, ENDED); /* from here on the frame belongs to the caller again */
}

static void pin(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  sched_setaffinity(0, sizeof set, &set); /* where it is refused, the system chooses */
}

static void give(Lane *lane, Request *request, uint32_t number) {
  request->next = NULL;
  pthread_mutex_lock(&lane->lock);
  if (lane->last)
    lane->last->next = request;
  else
    lane->first = request;
  lane->last = request;
  pthread_mutex_unlock(&lane->lock);
  advance(&lane->submitted, number & BITS);
}

static Frame *take(Lane *lane) {
  pthread_mutex_lock(&lane->lock);
  Request *request = lane->first;
  lane->first = request->next;
  if (!lane->first) lane->last = NULL;
  Frame *frame = request->frame;
  pthread_mutex_unlock(&lane->lock);
  return frame;
}

static void *work(void *argument) {
  Lane *lane = argument;
  if (lane->part.core >= 0) pin(lane->part.core);
  for (uint32_t number = 1;; number++) {
    wait_for(&lane->submitted, number & BITS, patience_us(lane));
    Frame *frame = take(lane);
    if (!frame) return NULL;
    perform(lane, frame);
  }
}

/* Let all lanes end what they have been given, then stop them, waiting for it no longer than that; true if they have
 * ended, and all is freed. */
bool chrion_stop(Lanes *lanes, double seconds) {
  Request *last = calloc((size_t)lanes->count, sizeof *last); /* frames that are none */
  struct timespec until;
  bool ended = last != NULL;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += (time_t)seconds;
  until.tv_nsec += (long)((seconds - (double)(time_t)seconds) * 1e9);
  until.tv_sec += until.tv_nsec / 1000000000;
  until.tv_nsec %= 1000000000;
  pthread_mutex_lock(&lanes->order);
  lanes->requests++;
  for (int at = 1; last && at <= lanes->started; at++) give(&lanes->lane[at], &last[at], lanes->requests);
  pthread_mutex_unlock(&lanes->order);
  for (int at = 1; last && at <= lanes->started; at++)
    ended &= pthread_timedjoin_np(lanes->lane[at].thread, NULL, &until) == 0;
  if (!ended) return false; /* a lane may still read them */
  free(last);
  free(lanes);
  return true;
}

/* Lanes for a program, and their threads; NULL where the system gives none. The first part is the callers'. */
Lanes *chrion_start(int count, const Part *parts, double patience_us) {
  size_t bytes = sizeof(Lanes) + (size_t)count * sizeof(Lane);
  Lanes *lanes = aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (!lanes) return NULL;
  memset(lanes, 0, bytes);
  lanes->count = count;
  lanes->patience_us = patience_us;
  pthread_mutex_init(&lanes->order, NULL);
  /* Lanes inherit the mask. Asynchronous signals are for the interpreter's threads. Synchronous ones are not blocked: a
   * lane raises them itself, and a blocked one would kill the process without running an installed handler. */
  static const int synchronous[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT};
  sigset_t blocked, before;
  sigfillset(&blocked);
  for (size_t at = 0; at < sizeof synchronous / sizeof *synchronous; at++) sigdelset(&blocked, synchronous[at]);
  pthread_sigmask(SIG_BLOCK, &blocked, &before);
  for (int at = 0; at < count; at++) {
    Lane *lane = &lanes->lane[at];
    lane->lanes = lanes;
    lane->part = parts[at];
    lane->index = at;
    pthread_mutex_init(&lane->lock, NULL);
    if (at != lanes->started + 1 || pthread_create(&lane->thread, NULL, work, lane)) continue;
    lanes->started = at;
    char name[16];
    snprintf(name, sizeof name, "chrion-lane-%d", at % 1000);
    pthread_setname_np(lane->thread, name);
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (lanes->started == count - 1) return lanes;
  chrion_stop(lanes, 60);
  return NULL;
}

void chrion_free_frame(Frame *frame) {
  if (!frame) return;
  free(frame->sessions);
  free(frame->bindings);
  free(frame->counters);
  free(frame->requests);
  free(frame);
}

/* A frame for so many segments, whose sessions and bindings are the caller's; NULL where memory is short. */
Frame *chrion_frame(const Lanes *lanes, int segments, OrtSession *const *sessions, OrtIoBinding *const *bindings) {
  Frame *frame = calloc(1, sizeof *frame);
  if (!frame) return NULL;
  size_t pointers = (size_t)segments * sizeof(void *), n = (size_t)lanes->count;
  frame->sessions = malloc(pointers);
  frame->bindings = malloc(pointers);
  frame->counters = aligned_alloc(64, n * sizeof *frame->counters);
  frame->requests = calloc(n, sizeof *frame->requests);
  if (!frame->sessions || !frame->bindings || !frame->counters || !frame->requests) {
    chrion_free_frame(frame);
    return NULL;
  }
  memcpy(frame->sessions, sessions, pointers);
  memcpy(frame->bindings, bindings, pointers);
  for (size_t at = 0; at < n; at++) frame->requests[at].frame = frame;
  return frame;
}

/* Serve a request on a frame; true if all went well. */
bool chrion_run(Lanes *lanes, Frame *frame, double *times, Failure *failure) {
  cpu_set_t before;
  Lane *own = &lanes->lane[0];
  failure->code = 0;
  frame->failure = failure;
  frame->times = times;
  atomic_store(&frame->claimed, false);
  atomic_store(&frame->failed, false);
  for (int at = 0; at < lanes->count; at++) atomic_store(&frame->counters[at].word, 0);
  pthread_mutex_lock(&lanes->order);
  lanes->requests++;
  for (int at = 1; at < lanes->count; at++) give(&lanes->lane[at], &frame->requests[at], lanes->requests);
  pthread_mutex_unlock(&lanes->order);
  bool pinned = own->part.core >= 0 && sched_getaffinity(0, sizeof before, &before) == 0;
  if (pinned) pin(own->part.core);
  perform(own, frame);
  /* Still pinned: a waiting caller elsewhere would take a core from a lane that works. */
  for (int at = 1; at < lanes->count; at++)
    wait_for(&frame->counters[at], ENDED, patience_us(own));
  if (pinned) sched_setaffinity(0, sizeof before, &before);
  return !atomic_load(&frame->failed);
}
