/* Lanes that run a program without the GIL.
 *
 * A request is one call: the caller's thread runs the first lane, and threads of this library run the others. Between
 * two segments a lane only reads and writes counters. Therefore a handoff takes a fraction of a microsecond, and no
 * lane waits for the GIL.
 *
 * onnxruntime is used through its C API. The library receives the table of its functions and the session options like a
 * library of custom operators (RegisterCustomOps), so that no second copy of onnxruntime is loaded.
 *
 * Guarantees: All lanes process requests in the order of submission, so two requests cannot wait for each other. A lane
 * that fails, or finds that another lane has failed, sets its counter to the end and leaves the request, so every wait
 * ends. When chrion_run returns, no lane uses the frame.
 * Assumptions: A frame serves one request at a time. chrion_stop is called after the last chrion_run has returned.
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
#include <sys/resource.h>
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

/* Identifies the source of the library, so that one that was compiled from another source is not used. */
#ifndef CHRION_SOURCE
#define CHRION_SOURCE ""
#endif
#define EXPORT __attribute__((visibility("default"))) /* the library is compiled with -fvisibility=hidden */
EXPORT const char *chrion_source(void) { return CHRION_SOURCE; }

/* ---- onnxruntime's C API: indices into its table of functions, which stay valid in later versions. ---- */

typedef struct OrtStatus OrtStatus;
typedef struct OrtEnv OrtEnv;
typedef struct OrtSession OrtSession;
typedef struct OrtSessionOptions OrtSessionOptions;
typedef struct OrtMemoryInfo OrtMemoryInfo;
typedef struct OrtValue OrtValue;
typedef struct OrtIoBinding OrtIoBinding;
typedef struct OrtRunOptions OrtRunOptions;
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
  CreateRunOptions = 39,
  RunOptionsSetTerminate = 46,
  CreateTensorWithDataAsOrtValue = 49,
  CreateCpuMemoryInfo = 69,
  ReleaseStatus = 93,
  ReleaseSession = 95,
  ReleaseValue = 96,
  ReleaseRunOptions = 97,
  ReleaseSessionOptions = 100,
  RunWithBinding = 133,
  CreateIoBinding = 134,
  ReleaseIoBinding = 135,
  BindInput = 136,
  BindOutput = 137,
};
/* Values of OrtLoggingLevel, OrtAllocatorType and OrtMemType. */
enum { WARNING = 2, DEVICE_ALLOCATOR = 0, DEFAULT_MEMORY = 0 };
#define API_VERSION 17
#define CALL(result, name, ...) ((result(*)(__VA_ARGS__))api[name])

static void *const *api;
static OrtEnv *environment;
static OrtMemoryInfo *host;
/* The options of the last call of RegisterCustomOps on this thread, for the call of chrion_open that follows. */
static _Thread_local OrtSessionOptions *given;

/* The reason for a failure. The code is onnxruntime's, or 0 for success. */
typedef struct {
  int32_t code;
  int32_t segment;
  char message[2048];
} Failure;

/* Convert a status to a failure, and release it. Return true if the status is success. */
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

/* Called by onnxruntime when this library is registered with session options. Keeps a copy of the options in place of
 * one that chrion_open has not used; there are no operators to add. */
EXPORT OrtStatus *RegisterCustomOps(OrtSessionOptions *options, const OrtApiBase *base) {
  if (!api) {
    void *const *table = base->GetApi(API_VERSION);
    if (!table) return NULL; /* chrion_open then reports an error */
    api = table;
  }
  if (given) CALL(void, ReleaseSessionOptions, OrtSessionOptions *)(given);
  given = NULL;
  return CALL(OrtStatus *, CloneSessionOptions, const OrtSessionOptions *, OrtSessionOptions **)(options, &given);
}

/* Create the objects that all sessions share, once: onnxruntime's environment, of which a process has one, and the
 * description of host memory. */
static bool prepare(Failure *failure) {
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

/* Open a serialised model with the options that were last registered on this thread. Return NULL on failure. */
EXPORT OrtSession *chrion_open(const void *model, size_t bytes, Failure *failure) {
  OrtSessionOptions *options = given;
  OrtSession *session = NULL;
  failure->code = 0;
  given = NULL;
  if (!options) {
    failure->code = 1;
    snprintf(failure->message, sizeof failure->message, "no session options are registered");
    return NULL;
  }
  if (prepare(failure))
    succeeded(CALL(OrtStatus *, CreateSessionFromArray, OrtEnv *, const void *, size_t, const OrtSessionOptions *,
                   OrtSession **)(environment, model, bytes, options, &session),
              failure);
  CALL(void, ReleaseSessionOptions, OrtSessionOptions *)(options);
  return failure->code ? NULL : session;
}

EXPORT void chrion_close(OrtSession *session) { CALL(void, ReleaseSession, OrtSession *)(session); }

EXPORT OrtIoBinding *chrion_binding(OrtSession *session, Failure *failure) {
  OrtIoBinding *binding = NULL;
  failure->code = 0;
  succeeded(CALL(OrtStatus *, CreateIoBinding, OrtSession *, OrtIoBinding **)(session, &binding), failure);
  return binding;
}

EXPORT void chrion_unbind(OrtIoBinding *binding) { CALL(void, ReleaseIoBinding, OrtIoBinding *)(binding); }

/* Bind host memory, which the caller keeps alive, to an input or output. Return false on failure. */
EXPORT bool chrion_bind(OrtIoBinding *binding, bool output, const char *name, void *data, size_t bytes,
                        const int64_t *shape, size_t rank, int type, Failure *failure) {
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

/* Options with which the runs of a request can be terminated, also while they run. */
typedef struct {
  OrtRunOptions *runs;
  _Atomic bool terminated;
} Options;

EXPORT void chrion_free_options(Options *options) {
  if (options->runs) CALL(void, ReleaseRunOptions, OrtRunOptions *)(options->runs);
  free(options);
}

/* Return NULL on failure. */
EXPORT Options *chrion_options(void) {
  Options *options = api ? calloc(1, sizeof *options) : NULL;
  if (!options || succeeded(CALL(OrtStatus *, CreateRunOptions, OrtRunOptions **)(&options->runs), NULL)) return options;
  chrion_free_options(options);
  return NULL;
}

/* End the runs with these options at their next operators, and all later ones. */
EXPORT void chrion_terminate(Options *options) {
  succeeded(CALL(OrtStatus *, RunOptionsSetTerminate, OrtRunOptions *)(options->runs), NULL);
  options->terminated = true;
}

/* ---- Counters: one thread advances, any number wait. Waiters first spin and then park in the kernel. ---- */

/* The upper 31 bits are the count; the lowest bit is set if a waiter may be parked. Each counter has its own cache
 * line. */
typedef struct {
  _Alignas(64) _Atomic uint32_t word;
} Counter;

/* Counts have 31 bits and may wrap around: the later of two counts is less than half of the range ahead. ENDED is the
 * count of a lane that has left a request; it has reached every count that a step waits for. */
#define BITS 0x7fffffffu
#define ENDED 0x3fffffffu

static double clock_us(clockid_t clock) {
  struct timespec time;
  clock_gettime(clock, &time);
  return (double)time.tv_sec * 1e6 + (double)time.tv_nsec / 1e3;
}

static double now_us(void) { return clock_us(CLOCK_MONOTONIC); }

static void advance(Counter *counter, uint32_t count) {
  /* After the exchange the counter may have been freed with its frame; only its address is used. A wake-up of an
   * unrelated waiter at the same address is harmless, since waiters check their condition again. */
  if (atomic_exchange_explicit(&counter->word, count << 1, memory_order_acq_rel) & 1)
    syscall(SYS_futex, &counter->word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

static bool reached(uint32_t word, uint32_t count) { return (((word >> 1) - count) & BITS) <= ENDED; }

static uint32_t load(Counter *counter) { return atomic_load_explicit(&counter->word, memory_order_acquire); }

/* The time in microseconds that the thread has been parked. */
static _Thread_local double parked_us;

static void wait_for(Counter *counter, uint32_t count, double spin_us) {
  double until = 0;
  for (int spins = 0; !reached(load(counter), count); spins++) {
    RELAX();
    if (spins % 64 == 63) { /* reading the clock takes longer than reading the counter */
      double now = now_us();
      if (until == 0) until = now + spin_us;
      if (now >= until) break;
    }
  }
  for (;;) {
    uint32_t word = load(counter);
    if (reached(word, count)) return;
    /* The flag is set before sleeping, and the kernel compares the word again, so that no advance is missed. */
    if ((word & 1) || atomic_compare_exchange_weak(&counter->word, &word, word | 1)) {
      double since = now_us();
      syscall(SYS_futex, &counter->word, FUTEX_WAIT_PRIVATE, word | 1, NULL, NULL, 0);
      parked_us += now_us() - since;
    }
  }
}

/* ---- Programs, frames and lanes. ---- */

enum { WAIT, RUN, SIGNAL, PARK };

/* The arguments a and b are lane and count for WAIT and PARK, segment for RUN, and count for SIGNAL. A lane that parks
 * does not spin, since a segment of the other lane uses its core meanwhile. */
typedef struct {
  int32_t kind, a, b;
} Step;

typedef struct {
  const Step *steps;
  int32_t count;
  /* The logical CPU that the lane is pinned to, or -1. */
  int32_t core;
} Part;

/* An entry of a lane's queue of requests. */
typedef struct Request {
  struct Frame *frame;
  struct Request *next;
} Request;

/* The state of one request. */
typedef struct Frame {
  OrtSession **sessions;
  OrtIoBinding **bindings;
  /* Recorded calls that take the place of a segment's run, or NULL for a segment without, and what carries them out. */
  void **calls;
  OrtStatus *(*call)(const void *);
  /* The options of all runs of the request, or NULL. */
  const Options *options;
  /* Receives the start and the end of each segment, in microseconds of the monotonic clock; or NULL. */
  double *times;
  Counter *counters;
  Request *requests;
  Failure *failure;
  /* Whether a lane has begun to report a failure, and whether a failure has been reported. */
  _Atomic bool claimed, failed;
  /* Whether lanes have to share cores, with one another or with other work; set before the lanes receive the request. */
  bool crowded;
  /* Whether a lane other than the caller's was interrupted; see interrupted. */
  _Atomic bool interrupted;
} Frame;

/* What a thread has done: how often the system has preempted it, its CPU time in microseconds, and the time now without
 * that in which it was parked. */
typedef struct {
  long preemptions;
  double cpu_us, awake_us;
} Work;

typedef struct {
  struct Lanes *lanes;
  Part part;
  int index;
  /* Whether the lane's thread could be pinned to its core, and whether it is pinned now. Both are true for the first
   * lane, whose callers pin themselves. */
  _Atomic bool owns, pinned;
  /* The number of submitted requests, and the queue of those that the lane has not started. */
  Counter submitted;
  pthread_mutex_t lock;
  Request *first, *last;
  pthread_t thread;
} Lane;

typedef struct Lanes {
  /* The number of lanes, and the index of the last lane whose thread was created. */
  int count, started;
  /* The longest time in microseconds that a lane spins within a request, and while it waits for the next one. */
  double spin_us, idle_us;
  /* Held while a request is submitted to all lanes. */
  pthread_mutex_t order;
  /* The number of submitted requests. */
  uint32_t requests;
  /* The affinity of lanes that are not pinned: that of the thread that has created them. */
  cpu_set_t home;
  /* See count_interruption. */
  int limit;
  _Atomic int pressure;
  Lane lane[];
} Lanes;

/* A lane that has no core of its own may occupy that of a working lane while it spins, so it spins no longer than parking
 * takes. */
#define BRIEF_US 3

static double spin_us(const Lane *lane, const Frame *frame) {
  return frame->crowded || !lane->pinned ? BRIEF_US : lane->lanes->spin_us;
}

/* Return what the calling thread has done. */
static Work work_done(void) {
  struct rusage usage;
  double awake_us = now_us() - parked_us;
  if (getrusage(RUSAGE_THREAD, &usage)) return (Work){0, 0, 0};
  return (Work){usage.ru_nivcsw, clock_us(CLOCK_THREAD_CPUTIME_ID), awake_us};
}

/* The least time of an interruption in microseconds, and its least share of the CPU time of a request. */
#define LONG_US 500
#define LARGE_SHARE 0.1

/* Return whether other work has kept the calling thread from its core for long since a time. Other work of the same
 * priority takes 3 to 4 ms at a time; the system's own work, which also preempts lanes, some tens of microseconds. */
static bool interrupted(Work since) {
  Work now = work_done();
  double cpu_us = now.cpu_us - since.cpu_us, lost_us = now.awake_us - since.awake_us - cpu_us;
  return now.preemptions > since.preemptions && lost_us > LONG_US && lost_us > LARGE_SHARE * cpu_us;
}

/* Other work on the cores of pinned, spinning lanes multiplies the latency: a lane that spins uses up its share of the
 * core, is interrupted for milliseconds while the other core may be idle, and all lanes wait for it. Lanes that may run
 * on any core and park at once take about as long as a plain session then. Each request in which a lane was interrupted
 * raises the pressure, each other one lowers it; from the limit on, lanes are not pinned. One such request after many
 * others does not suffice. */
enum { RISE = 8, HIGHEST = 64 };

static bool contended(const Lanes *lanes) { return lanes->pressure >= lanes->limit; }

/* Lanes that are not pinned preempt each other, so their preemptions say nothing: they are pinned again after a number of
 * requests, and each time one request shows whether the other work has ended. */
static void count_interruption(Lanes *lanes, bool pinned, bool interrupted) {
  int pressure = lanes->pressure; /* requests of several callers may overwrite each other's counts */
  if (pinned && interrupted)
    pressure = pressure + RISE >= lanes->limit ? HIGHEST : pressure + RISE;
  else if (pressure > 0)
    pressure--;
  lanes->pressure = pressure;
}

static OrtStatus *run_session(OrtSession *session, const Options *options, const OrtIoBinding *binding) {
  return CALL(OrtStatus *, RunWithBinding, OrtSession *, const OrtRunOptions *, const OrtIoBinding *)(
      session, options ? options->runs : NULL, binding);
}

/* Run a session on this thread, outside of any request, while its operators record their calls, which the last argument
 * receives; NULL if their number is not the expected one. A single function, so that no signal is handled between its
 * parts. Return false on failure. */
EXPORT bool chrion_record_session(OrtSession *session, const OrtIoBinding *binding, void (*begin)(void),
                                  void *(*end)(size_t), size_t expected, Failure *failure, void **calls) {
  failure->code = 0;
  begin();
  OrtStatus *status = run_session(session, NULL, binding);
  *calls = end(expected);
  return succeeded(status, failure);
}

static void run(Frame *frame, int32_t segment) {
  if (frame->times) frame->times[2 * segment] = now_us();
  bool terminated = frame->options && frame->options->terminated; /* which the run reports */
  const void *calls = terminated ? NULL : frame->calls[segment];
  OrtStatus *status = calls ? frame->call(calls)
                            : run_session(frame->sessions[segment], frame->options, frame->bindings[segment]);
  if (frame->times) frame->times[2 * segment + 1] = now_us();
  if (status) { /* several lanes may fail at the same time; the first failure is reported */
    bool first = !atomic_exchange(&frame->claimed, true);
    if (first) frame->failure->segment = segment;
    succeeded(status, first ? frame->failure : NULL);
    atomic_store_explicit(&frame->failed, true, memory_order_release);
  }
}

/* Carry out a lane's steps; then the lane has to set its counter to the end. */
static void perform(Lane *lane, Frame *frame) {
  Counter *own = &frame->counters[lane->index];
  for (int32_t at = 0; at < lane->part.count; at++) {
    const Step *step = &lane->part.steps[at];
    if (step->kind == WAIT)
      wait_for(&frame->counters[step->a], (uint32_t)step->b, spin_us(lane, frame));
    else if (step->kind == PARK)
      wait_for(&frame->counters[step->a], (uint32_t)step->b, 0);
    else if (step->kind == SIGNAL)
      advance(own, (uint32_t)step->a);
    else if (atomic_load_explicit(&frame->failed, memory_order_acquire))
      break;
    else
      run(frame, step->a);
  }
}

/* Pin the calling thread to a logical CPU. If this fails, the system chooses a CPU, and the result is false. */
static bool pin(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  return sched_setaffinity(0, sizeof set, &set) == 0;
}

/* Return whether the calling thread is pinned to a logical CPU; not if its affinity was set meanwhile from outside. */
static bool only(int core) {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) == 1 && CPU_ISSET(core, &set);
}

static void submit(Lane *lane, Request *request, uint32_t number) {
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

/* Wait for the next request. Return whether it came within the time that an idle lane may spin.
 *
 * Spinning saves a wake-up if the next request follows at once, and wastes the whole time if it does not. So a lane spins
 * only if its last wait was short: requests at intervals cost a wake-up each, and one wait is spent after each burst. */
static bool wait_idle(Lane *lane, uint32_t number, bool spin) {
  double idle_us = lane->pinned ? lane->lanes->idle_us : BRIEF_US, start = now_us();
  wait_for(&lane->submitted, number & BITS, spin ? idle_us : BRIEF_US);
  return now_us() - start <= idle_us;
}

/* Pin a lane's thread to its core, or end that. An affinity that was set from outside is kept. */
static void set_pinned(Lane *lane, bool pinned) {
  cpu_set_t set;
  if (!pinned) {
    if (only(lane->part.core)) sched_setaffinity(0, sizeof lane->lanes->home, &lane->lanes->home);
    lane->pinned = false;
  } else if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_ISSET(lane->part.core, &set)) {
    lane->pinned = pin(lane->part.core);
  }
}

static void *work(void *argument) {
  Lane *lane = argument;
  bool spin = false;
  lane->owns = lane->pinned = lane->part.core >= 0 && pin(lane->part.core);
  for (uint32_t number = 1;; number++) {
    spin = wait_idle(lane, number, spin);
    Frame *frame = take(lane);
    if (!frame) return NULL;
    if (lane->owns && lane->pinned == contended(lane->lanes)) set_pinned(lane, !lane->pinned);
    Work before = work_done();
    perform(lane, frame);
    if (interrupted(before)) frame->interrupted = true;
    advance(&frame->counters[lane->index], ENDED); /* after this the lane does not use the frame */
  }
}

/* Interval at which the end of a lane's thread is awaited. */
#define JOIN_INTERVAL_NS 50000

/* Stop all lanes after the requests that were submitted to them, waiting for at most the given time. Return true if the
 * lanes have stopped and are freed. */
EXPORT bool chrion_stop(Lanes *lanes, double seconds) {
  Request *last = calloc((size_t)lanes->count, sizeof *last); /* a request without a frame stops its lane */
  bool ended = last != NULL;
  double until_us = now_us() + seconds * 1e6;
  pthread_mutex_lock(&lanes->order);
  lanes->requests++;
  for (int at = 1; last && at <= lanes->started; at++) submit(&lanes->lane[at], &last[at], lanes->requests);
  pthread_mutex_unlock(&lanes->order);
  /* pthread_timedjoin_np would wait on the system's clock, which may be set back. */
  for (int at = 1; ended && at <= lanes->started; at++)
    while (pthread_tryjoin_np(lanes->lane[at].thread, NULL) && (ended = now_us() < until_us))
      nanosleep(&(struct timespec){.tv_nsec = JOIN_INTERVAL_NS}, NULL);
  if (!ended) return false; /* a lane may still use the memory */
  free(last);
  free(lanes);
  return true;
}

/* Create the lanes of a program and their threads. Return NULL if that fails. The first part runs on the threads of the
 * callers of chrion_run. */
EXPORT Lanes *chrion_start(int count, const Part *parts, double spin_us, double idle_us, int limit) {
  size_t bytes = sizeof(Lanes) + (size_t)count * sizeof(Lane);
  Lanes *lanes = aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (!lanes) return NULL;
  memset(lanes, 0, bytes);
  lanes->count = count;
  lanes->spin_us = spin_us;
  lanes->idle_us = idle_us;
  lanes->limit = limit;
  sched_getaffinity(0, sizeof lanes->home, &lanes->home);
  pthread_mutex_init(&lanes->order, NULL);
  /* Lanes inherit the mask. Asynchronous signals are for Python's threads. Synchronous ones are not blocked: a
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
    lane->owns = lane->pinned = at == 0;
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

EXPORT void chrion_free_frame(Frame *frame) {
  if (!frame) return;
  free(frame->sessions);
  free(frame->bindings);
  free(frame->calls);
  free(frame->counters);
  free(frame->requests);
  free(frame);
}

/* Create a frame for a number of lanes and segments, whose sessions, bindings and calls the caller keeps alive. Any lanes
 * of the same program may run it. Return NULL if memory cannot be allocated. */
EXPORT Frame *chrion_frame(int lanes, int segments, OrtSession *const *sessions, OrtIoBinding *const *bindings,
                           void *const *calls, OrtStatus *(*call)(const void *)) {
  Frame *frame = calloc(1, sizeof *frame);
  if (!frame) return NULL;
  size_t pointers = (size_t)segments * sizeof(void *), n = (size_t)lanes;
  frame->sessions = malloc(pointers);
  frame->bindings = malloc(pointers);
  frame->calls = malloc(pointers);
  frame->call = call;
  frame->counters = aligned_alloc(64, n * sizeof *frame->counters);
  frame->requests = calloc(n, sizeof *frame->requests);
  if (!frame->sessions || !frame->bindings || !frame->calls || !frame->counters || !frame->requests) {
    chrion_free_frame(frame);
    return NULL;
  }
  memcpy(frame->sessions, sessions, pointers);
  memcpy(frame->bindings, bindings, pointers);
  memcpy(frame->calls, calls, pointers);
  for (size_t at = 0; at < n; at++) frame->requests[at].frame = frame;
  return frame;
}

/* Return whether a caller may only use cores of other lanes. */
static bool shares_core(const Lanes *lanes, const cpu_set_t *caller) {
  cpu_set_t own = *caller;
  for (int at = 1; at < lanes->count; at++)
    if (lanes->lane[at].part.core >= 0) CPU_CLR(lanes->lane[at].part.core, &own);
  return CPU_COUNT(&own) == 0;
}

/* Return whether a lane's thread may no longer use its core, for example after the affinity of all threads was set from
 * outside of the process. Threads are asked only if the caller may not use all cores either. */
static bool moved(const Lanes *lanes, const cpu_set_t *caller) {
  bool all = true;
  for (int at = 0; at < lanes->count; at++)
    all &= lanes->lane[at].part.core < 0 || CPU_ISSET(lanes->lane[at].part.core, caller);
  for (int at = 1; at < lanes->count && !all; at++) {
    cpu_set_t set;
    const Lane *lane = &lanes->lane[at];
    if (lane->owns && pthread_getaffinity_np(lane->thread, sizeof set, &set) == 0 &&
        !CPU_ISSET(lane->part.core, &set))
      return true;
  }
  return false;
}

enum { FAILED, SERVED, MOVED };

/* Serve a request on a frame. Return FAILED if a segment failed, and MOVED if the lanes need other cores from now on. */
EXPORT int chrion_run(Lanes *lanes, Frame *frame, const Options *options, double *times, Failure *failure) {
  cpu_set_t before;
  Lane *own = &lanes->lane[0];
  bool known = own->part.core >= 0 && sched_getaffinity(0, sizeof before, &before) == 0;
  /* The affinity that the application has given to the thread is respected. */
  bool allowed = known && CPU_ISSET(own->part.core, &before), crowded = contended(lanes);
  bool pinned = allowed && !crowded;
  failure->code = 0;
  frame->failure = failure;
  frame->options = options;
  frame->times = times;
  frame->crowded = crowded || !known || (!allowed && shares_core(lanes, &before));
  frame->interrupted = false;
  atomic_store(&frame->claimed, false);
  atomic_store(&frame->failed, false);
  for (int at = 0; at < lanes->count; at++) atomic_store(&frame->counters[at].word, 0);
  pthread_mutex_lock(&lanes->order);
  lanes->requests++;
  for (int at = 1; at < lanes->count; at++) submit(&lanes->lane[at], &frame->requests[at], lanes->requests);
  pthread_mutex_unlock(&lanes->order);
  if (pinned) pin(own->part.core);
  Work before_run = work_done();
  perform(own, frame);
  advance(&frame->counters[0], ENDED);
  /* The caller stays pinned while it waits; on another core it would disturb a working lane. */
  for (int at = 1; at < lanes->count; at++)
    wait_for(&frame->counters[at], ENDED, spin_us(own, frame));
  count_interruption(lanes, !crowded, interrupted(before_run) || frame->interrupted);
  if (pinned && only(own->part.core)) sched_setaffinity(0, sizeof before, &before);
  if (atomic_load(&frame->failed)) return FAILED;
  return known && moved(lanes, &before) ? MOVED : SERVED;
}
