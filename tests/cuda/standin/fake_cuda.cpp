// A fake CUDA: runtime and driver, over host memory. Streams are threads, copies take their time, kernels do nothing
// (but spin_kernel, which sleeps, and FAKE_KERNEL_US). Rules of capture, registration, contexts and fork are enforced.
#define CUDART_VERSION_FAKE 13000
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>
using Lock = std::unique_lock<std::recursive_mutex>;
static std::recursive_mutex& M = *new std::recursive_mutex;
static std::condition_variable_any& CV = *new std::condition_variable_any;
static pid_t owner_pid = 0;
static double envd(const char* n, double d) {
  const char* v = getenv(n);
  return v ? atof(v) : d;
}
static int ngpus() {
  static int n = (int)envd("FAKE_GPUS", 1);
  return n;
}
static size_t gpu_total() {
  static size_t n = (size_t)(envd("FAKE_GIB", 139.8) * (1 << 30));
  return n;
}
static double bw() {
  static double b = envd("FAKE_GBPS", 25) * 1e9;
  return b;
}
static bool trace() {
  static bool t = getenv("FAKE_TRACE");
  return t;
}
#define TR(...)                               \
  do {                                        \
    if (trace()) {                            \
      fprintf(stderr, "[fake] " __VA_ARGS__); \
      fputc('\n', stderr);                    \
    }                                         \
  } while (0)
struct Op {
  std::function<void()> run;
  std::function<bool()> ready;
  double seconds = 0;
};
struct Graph {
  std::vector<Op> ops;
};
struct Capture {
  unsigned long long id;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  bool valid = true;
  std::shared_ptr<Graph> graph = std::make_shared<Graph>();
};
struct Stream {
  int device = 0;
  std::deque<Op> q;
  bool busy = false, started = false;
  int priority = 0;
  std::shared_ptr<Capture> cap;
};
struct EvState {
  int left = 0;
  std::chrono::steady_clock::time_point t;
};
struct Event {
  int device = 0;
  std::shared_ptr<EvState> st;
  std::shared_ptr<Capture> cap;
};
static std::vector<Stream*>& streams = *new std::vector<Stream*>;
static Stream* defaults[16];
static std::set<std::shared_ptr<Capture>>& captures = *new std::set<std::shared_ptr<Capture>>;
static unsigned long long next_id = 1;
static thread_local int cur_dev = 0;
static thread_local cudaError_t last_error = cudaSuccess;
static thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
static thread_local std::vector<int>* ctx_stack = nullptr;
static std::map<uintptr_t, std::pair<size_t, int>>& dev_mem =
    *new std::map<uintptr_t, std::pair<size_t, int>>;  // start -> size, device
static std::map<uintptr_t, std::pair<size_t, int>>& host_mem =
    *new std::map<uintptr_t, std::pair<size_t, int>>;  // start -> size, 1 registered 2 allocated
static size_t used[16];
static long counts_registered = 0, counts_unregistered = 0, counts_ctxsync = 0, counts_fences = 0, violations = 0;
static cudaError_t fail(cudaError_t e, const char* what) {
  if (e && e != cudaErrorNotReady) {
    last_error = e;
    TR("%s -> %d", what, e);
  }
  return e;
}
static volatile bool broken = false;
static bool in_child() { return owner_pid && getpid() != owner_pid; }
#define GUARD(name)                                                                               \
  do {                                                                                            \
    if (!owner_pid) owner_pid = getpid();                                                         \
    if (in_child()) {                                                                             \
      if (getenv("FAKE_FORKTELL")) fprintf(stderr, "[fake] %s called in a forked child\n", name); \
      return fail(cudaErrorInitializationError, name);                                            \
    }                                                                                             \
    if (broken) return fail(cudaErrorIllegalAddress, name);                                       \
  } while (0)
static void worker(Stream* s) {
  Lock l(M);
  while (true) {
    while (s->q.empty() || (s->q.front().ready && !s->q.front().ready())) CV.wait(l);
    Op op = std::move(s->q.front());
    s->busy = true;
    s->q.pop_front();
    l.unlock();
    if (op.seconds > 0) usleep((useconds_t)(op.seconds * 1e6));
    if (op.run) op.run();
    l.lock();
    s->busy = false;
    CV.notify_all();
  }
}
static Stream* stream_of(cudaStream_t h) {
  if ((uintptr_t)h <= 2) {
    if (!defaults[cur_dev]) {
      auto* s = new Stream;
      s->device = cur_dev;
      defaults[cur_dev] = s;
      streams.push_back(s);
    }
    return defaults[cur_dev];
  }
  return (Stream*)h;
}
static void submit(Stream* s, Op op) {
  if (s->cap) {
    s->cap->graph->ops.push_back(std::move(op));
    return;
  }
  s->q.push_back(std::move(op));
  if (!s->started) {
    s->started = true;
    std::thread(worker, s).detach();
  }
  CV.notify_all();
}
static bool idle(Stream* s) { return s->q.empty() && !s->busy; }
static void invalidate_all(int device) {
  for (auto* s : streams)
    if (s->cap && (device < 0 || s->device == device)) {
      s->cap->valid = false;
      violations++;
    }
}
// "potentially unsafe API calls"
static bool unsafe_refused(const char* what) {
  if (captures.empty() || thread_mode == cudaStreamCaptureModeRelaxed) return false;
  for (auto& c : captures) {
    bool mine = c->thread == std::this_thread::get_id();
    if ((mine && c->mode != cudaStreamCaptureModeRelaxed) ||
        (!mine && thread_mode == cudaStreamCaptureModeGlobal && c->mode == cudaStreamCaptureModeGlobal)) {
      c->valid = false;
      violations++;
      TR("unsafe call %s while capturing", what);
      return true;
    }
  }
  return false;
}
#define UNSAFE(name)                                                                \
  do {                                                                              \
    if (unsafe_refused(name)) return fail(cudaErrorStreamCaptureUnsupported, name); \
  } while (0)
static bool pinned(const void* p, size_t n, bool* straddles = nullptr) {
  uintptr_t a = (uintptr_t)p;
  auto it = host_mem.upper_bound(a);
  if (straddles) *straddles = false;
  if (it != host_mem.begin()) {
    auto pr = std::prev(it);
    if (a < pr->first + pr->second.first) {
      bool in = a + n <= pr->first + pr->second.first;
      if (!in && straddles) *straddles = true;
      return in;
    }
  }
  if (it != host_mem.end() && it->first < a + n && straddles) *straddles = true;
  return false;
}
static int device_of_ptr(const void* p) {
  uintptr_t a = (uintptr_t)p;
  auto it = dev_mem.upper_bound(a);
  if (it == dev_mem.begin()) return -1;
  --it;
  return a < it->first + it->second.first ? it->second.second : -1;
}
extern "C" {
#define API __attribute__((visibility("default")))
// ── devices
API cudaError_t cudaGetDeviceCount(int* n) {
  *n = ngpus();
  return cudaSuccess;
}
API cudaError_t cudaSetDevice(int d) {
  if (in_child()) return cudaErrorInitializationError;
  if (d < 0 || d >= ngpus()) return fail(cudaErrorInvalidDevice, "cudaSetDevice");
  cur_dev = d;
  return cudaSuccess;
}
API cudaError_t cudaGetDevice(int* d) {
  if (in_child()) return cudaErrorInitializationError;
  *d = cur_dev;
  return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int* v) {
  *v = 13000;
  return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int* v) {
  *v = 13000;
  return cudaSuccess;
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int d) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "Fake H200");
  memcpy(p->uuid.bytes, "fakefakefakefak0", 16);
  p->uuid.bytes[15] += d;
  p->totalGlobalMem = gpu_total();
  p->sharedMemPerBlock = 49152;
  p->regsPerBlock = 65536;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->major = 9;
  p->minor = 0;
  p->multiProcessorCount = 132;
  p->canMapHostMemory = 1;
  p->pciBusID = 10 + d;
  p->pciDeviceID = 0;
  p->unifiedAddressing = 1;
  p->l2CacheSize = 60 << 20;
  p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerMultiprocessor = 233472;
  p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlockOptin = 232448;
  p->asyncEngineCount = 3;
  p->concurrentKernels = 1;
  p->memoryBusWidth = 5120;
  p->streamPrioritiesSupported = 1;
  p->maxBlocksPerMultiProcessor = 32;
  p->memoryPoolsSupported = 1;
  p->hostRegisterSupported = 1;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int d) {
  switch ((int)a) {
    case cudaDevAttrComputeCapabilityMajor:
      *v = 9;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *v = 0;
      break;
    case cudaDevAttrMultiProcessorCount:
      *v = 132;
      break;
    case cudaDevAttrMaxThreadsPerBlock:
      *v = 1024;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *v = 232448;
      break;
    case cudaDevAttrMaxGridDimX:
      *v = 2147483647;
      break;
    case cudaDevAttrWarpSize:
      *v = 32;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *v = 2048;
      break;
    default:
      *v = 1;
  }
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* s, int n, int d) {
  snprintf(s, n, "0000:%02X:00.0", 10 + d);
  return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* c, int, int) {
  *c = 1;
  return cudaSuccess;
}
API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
API cudaError_t cudaDeviceGetStreamPriorityRange(int* lo, int* hi) {
  if (lo) *lo = 0;
  if (hi) *hi = -5;
  return cudaSuccess;
}
API cudaError_t cudaDeviceSynchronize() {
  GUARD("cudaDeviceSynchronize");
  Lock l(M);
  for (auto* s : streams)
    if (s->cap && s->device == cur_dev) {
      invalidate_all(cur_dev);
      return fail(cudaErrorStreamCaptureUnsupported, "cudaDeviceSynchronize");
    }
  UNSAFE("cudaDeviceSynchronize");
  int d = cur_dev;
  CV.wait(l, [&] {
    for (auto* s : streams)
      if (s->device == d && !idle(s)) return false;
    return true;
  });
  return cudaSuccess;
}
API cudaError_t cudaMemGetInfo(size_t* f, size_t* t) {
  GUARD("cudaMemGetInfo");
  Lock l(M);
  *t = gpu_total();
  *f = gpu_total() - used[cur_dev] - (600u << 20);
  return cudaSuccess;
}
// ── errors
API cudaError_t cudaGetLastError() {
  auto e = last_error;
  last_error = cudaSuccess;
  return e;
}
API cudaError_t cudaPeekAtLastError() { return last_error; }
API const char* cudaGetErrorString(cudaError_t e) {
  static thread_local char b[64];
  snprintf(b, 64, "fake cuda error %d", e);
  return e == cudaErrorMemoryAllocation           ? "out of memory"
         : e == cudaErrorStreamCaptureUnsupported ? "operation not permitted when stream is capturing"
         : e == cudaErrorStreamCaptureInvalidated ? "operation failed due to a previous error during capture"
                                                  : b;
}
API const char* cudaGetErrorName(cudaError_t e) { return "cudaErrorFake"; }
// ── memory
API cudaError_t cudaMalloc(void** p, size_t n) {
  GUARD("cudaMalloc");
  Lock l(M);
  UNSAFE("cudaMalloc");
  if (used[cur_dev] + n + (600u << 20) > gpu_total()) return fail(cudaErrorMemoryAllocation, "cudaMalloc");
  void* a = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (a == MAP_FAILED) return fail(cudaErrorMemoryAllocation, "mmap");
  dev_mem[(uintptr_t)a] = {n, cur_dev};
  used[cur_dev] += n;
  *p = a;
  return cudaSuccess;
}
API cudaError_t cudaFree(void* p) {
  GUARD("cudaFree");
  if (!p) return cudaSuccess;
  Lock l(M);
  UNSAFE("cudaFree");
  auto it = dev_mem.find((uintptr_t)p);
  if (it == dev_mem.end()) return fail(cudaErrorInvalidValue, "cudaFree");
  int d = it->second.second;
  size_t n = it->second.first;
  CV.wait(l, [&] {
    for (auto* s : streams)
      if (s->device == d && !idle(s)) return false;
    return true;
  });
  munmap(p, n);
  used[d] -= n;
  dev_mem.erase((uintptr_t)p);
  return cudaSuccess;
}
API cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) {
  GUARD("cudaHostAlloc");
  Lock l(M);
  UNSAFE("cudaHostAlloc");
  *p = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  host_mem[(uintptr_t)*p] = {n, 2};
  return cudaSuccess;
}
API cudaError_t cudaFreeHost(void* p) {
  GUARD("cudaFreeHost");
  Lock l(M);
  UNSAFE("cudaFreeHost");
  auto it = host_mem.find((uintptr_t)p);
  if (it == host_mem.end()) return fail(cudaErrorInvalidValue, "cudaFreeHost");
  munmap(p, it->second.first);
  host_mem.erase(it);
  return cudaSuccess;
}
static int do_register(void* p, size_t n) {
  uintptr_t a = (uintptr_t)p;
  auto it = host_mem.upper_bound(a + n - 1);
  if (it != host_mem.begin()) {
    auto pr = std::prev(it);
    if (pr->first + pr->second.first > a) return 712;
  }
  if (!n) return 1;
  static double cap = envd("FAKE_PIN_MIB", 1e9) * (1 << 20);
  static double taken = 0;
  if (taken + n > cap) return 2;
  taken += n;
  host_mem[a] = {n, 1};
  counts_registered++;
  TR("register %p %zu", p, n);
  return 0;
}
static int do_unregister(void* p) {
  auto it = host_mem.find((uintptr_t)p);
  if (it == host_mem.end() || it->second.second != 1) return 713;
  TR("unregister %p", p);
  host_mem.erase(it);
  counts_unregistered++;
  return 0;
}
API cudaError_t cudaHostRegister(void* p, size_t n, unsigned) {
  GUARD("cudaHostRegister");
  Lock l(M);
  UNSAFE("cudaHostRegister");
  return fail((cudaError_t)do_register(p, n), "cudaHostRegister");
}
API cudaError_t cudaHostUnregister(void* p) {
  GUARD("cudaHostUnregister");
  Lock l(M);
  UNSAFE("cudaHostUnregister");
  return fail((cudaError_t)do_unregister(p), "cudaHostUnregister");
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  GUARD("cudaPointerGetAttributes");
  Lock l(M);
  memset(a, 0, sizeof *a);
  int d = device_of_ptr(p);
  if (d >= 0) {
    a->type = cudaMemoryTypeDevice;
    a->device = d;
    a->devicePointer = (void*)p;
  } else if (pinned(p, 1)) {
    a->type = cudaMemoryTypeHost;
    a->hostPointer = a->devicePointer = (void*)p;
    a->device = 0;
  } else {
    a->type = cudaMemoryTypeUnregistered;
    a->device = -2;
  }
  return cudaSuccess;
}
static cudaError_t copy(void* dst, const void* src, size_t n, Stream* s, bool async) {
  Lock l(M);
  int dd = device_of_ptr(dst), sd = device_of_ptr(src);
  const void* host = dd < 0 ? dst : sd < 0 ? src : nullptr;
  double secs = host ? n / bw() : n / 4e12;
  bool straddles = false;
  bool pin = !host || pinned(host, n, &straddles);
  if (straddles) {
    fprintf(stderr, "[fake] a copy straddles registered memory\n");
    return fail(cudaErrorInvalidValue, "memcpy straddles");
  }
  if (!pin && s->cap) {
    s->cap->valid = false;
    return fail(cudaErrorStreamCaptureUnsupported, "pageable copy in capture");
  }
  if (pin) {
    submit(s, {[=] { memcpy(dst, src, n); }, nullptr, secs});
  } else if (sd < 0) {  // pageable H2D: stream sync, staging, then the rest
    CV.wait(l, [&] { return idle(s); });
    l.unlock();
    usleep((useconds_t)(secs * 2e6));
    l.lock();
    auto buf = std::make_shared<std::vector<char>>((const char*)src, (const char*)src + n);
    submit(s, {[=] { memcpy(dst, buf->data(), n); }, nullptr, secs});
  } else {
    submit(s, {[=] { memcpy(dst, src, n); }, nullptr, secs * 3});
    CV.wait(l, [&] { return idle(s); });
  }
  if (!async) CV.wait(l, [&] { return idle(s); });
  return cudaSuccess;
}
API cudaError_t cudaMemcpyAsync(void* d, const void* s, size_t n, cudaMemcpyKind, cudaStream_t st) {
  GUARD("cudaMemcpyAsync");
  return copy(d, s, n, stream_of(st), true);
}
API cudaError_t cudaMemcpy(void* d, const void* s, size_t n, cudaMemcpyKind) {
  GUARD("cudaMemcpy");
  {
    Lock l(M);
    UNSAFE("cudaMemcpy");
  }
  return copy(d, s, n, stream_of(0), false);
}
API cudaError_t cudaMemcpyPeerAsync(void* d, int, const void* s, int, size_t n, cudaStream_t st) {
  GUARD("cudaMemcpyPeerAsync");
  return copy(d, s, n, stream_of(st), true);
}
API cudaError_t cudaMemcpy2DAsync(void* d, size_t, const void* s, size_t, size_t w, size_t h, cudaMemcpyKind,
                                  cudaStream_t st) {
  return cudaSuccess;
}
API cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
// Large zeros on a GPU give their pages back to the system: models of billions of parameters fit into a small machine.
static void fill(void* p, int v, size_t n, bool on_device) {
  const size_t page = 4096;
  char *begin = (char*)(((uintptr_t)p + page - 1) / page * page), *end = (char*)(((uintptr_t)p + n) / page * page);
  if (v || !on_device || n < (1u << 20)) {
    memset(p, v, n);
    return;
  }
  memset(p, 0, begin - (char*)p);
  madvise(begin, end - begin, MADV_DONTNEED);
  memset(end, 0, (char*)p + n - end);
}
API cudaError_t cudaMemset(void* p, int v, size_t n) { return cudaMemsetAsync(p, v, n, 0); }
API cudaError_t cudaMemsetAsync(void* p, int v, size_t n, cudaStream_t st) {
  GUARD("cudaMemsetAsync");
  Lock l(M);
  bool on_device = device_of_ptr(p) >= 0;
  submit(stream_of(st), {[=] { fill(p, v, n, on_device); }});
  return cudaSuccess;
}
API cudaError_t cudaMallocAsync(void** p, size_t n, cudaStream_t) { return cudaMalloc(p, n); }
API cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return cudaFree(p); }
API cudaError_t cudaGetSymbolAddress(void** p, const void*) {
  static char z[1 << 16];
  *p = z;
  return cudaSuccess;
}
// ── streams
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* h, unsigned, int prio) {
  GUARD("cudaStreamCreate");
  Lock l(M);
  auto* s = new Stream;
  s->device = cur_dev;
  s->priority = prio;
  streams.push_back(s);
  *h = (cudaStream_t)s;
  return cudaSuccess;
}
API cudaError_t cudaStreamCreate(cudaStream_t* h) { return cudaStreamCreateWithPriority(h, 0, 0); }
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* h, unsigned f) { return cudaStreamCreateWithPriority(h, f, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamGetPriority(cudaStream_t h, int* p) {
  *p = stream_of(h)->priority;
  return cudaSuccess;
}
API cudaError_t cudaStreamQuery(cudaStream_t h) {
  GUARD("cudaStreamQuery");
  Lock l(M);
  auto* s = stream_of(h);
  if (s->cap) {
    s->cap->valid = false;
    violations++;
    return fail(cudaErrorStreamCaptureUnsupported, "cudaStreamQuery");
  }
  UNSAFE("cudaStreamQuery");
  return idle(s) ? cudaSuccess : cudaErrorNotReady;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t h) {
  GUARD("cudaStreamSynchronize");
  Lock l(M);
  auto* s = stream_of(h);
  if (s->cap) {
    s->cap->valid = false;
    violations++;
    return fail(cudaErrorStreamCaptureUnsupported, "cudaStreamSynchronize");
  }
  UNSAFE("cudaStreamSynchronize");
  CV.wait(l, [&] { return idle(s); });
  return cudaSuccess;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t h, cudaEvent_t ev, unsigned) {
  GUARD("cudaStreamWaitEvent");
  Lock l(M);
  auto* s = stream_of(h);
  auto* e = (Event*)ev;
  if (e->cap) {
    if (s->cap && s->cap != e->cap) {
      return fail(cudaErrorStreamCaptureMerge, "merge");
    }
    s->cap = e->cap;
    return cudaSuccess;
  }
  if (s->cap) {
    if (e->st) {
      s->cap->valid = false;
      violations++;
      return fail(cudaErrorStreamCaptureIsolation, "cudaStreamWaitEvent on an event outside of the capture");
    }
    return cudaSuccess;
  }
  auto st = e->st;
  if (st) submit(s, {nullptr, [st] { return st->left <= 0; }});
  return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t h, cudaHostFn_t f, void* u) {
  GUARD("cudaLaunchHostFunc");
  Lock l(M);
  submit(stream_of(h), {[=] { f(u); }});
  return cudaSuccess;
}
API cudaError_t cudaStreamAddCallback(cudaStream_t h, cudaStreamCallback_t f, void* u, unsigned) {
  Lock l(M);
  submit(stream_of(h), {[=] { f(h, cudaSuccess, u); }});
  return cudaSuccess;
}
// ── events
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* h, unsigned) {
  GUARD("cudaEventCreate");
  auto* e = new Event;
  e->device = cur_dev;
  *h = (cudaEvent_t)e;
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* h) { return cudaEventCreateWithFlags(h, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t h) {
  if (in_child()) return cudaSuccess;
  Lock l(M);
  delete (Event*)h;
  return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t h, cudaStream_t sh) {
  GUARD("cudaEventRecord");
  Lock l(M);
  auto* e = (Event*)h;
  auto* s = stream_of(sh);
  if (e->device != s->device)
    return fail(cudaErrorInvalidResourceHandle, "cudaEventRecord: event and stream of different devices");
  if (s->cap) {
    e->cap = s->cap;
    e->st = nullptr;
    return cudaSuccess;
  }
  e->cap = nullptr;
  auto st = std::make_shared<EvState>();
  st->left = 1;
  e->st = st;
  submit(s, {[st] {
           Lock l2(M);
           st->left--;
           st->t = std::chrono::steady_clock::now();
           CV.notify_all();
         }});
  return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t h, cudaStream_t s, unsigned) { return cudaEventRecord(h, s); }
static int event_query(Event* e) {
  if (broken) return 700;
  if (e->cap) {
    if (captures.count(e->cap)) {
      e->cap->valid = false;
      violations++;
    }
    return 907;
  }
  if (unsafe_refused("cudaEventQuery")) return 900;
  return !e->st || e->st->left <= 0 ? 0 : 600;
}
static int event_sync(Event* e, Lock& l) {
  if (broken) return 700;
  if (e->cap) {
    if (captures.count(e->cap)) {
      e->cap->valid = false;
      violations++;
    }
    return 907;
  }
  if (unsafe_refused("cudaEventSynchronize")) return 900;
  auto st = e->st;
  CV.wait(l, [&] { return !st || st->left <= 0; });
  return 0;
}
API cudaError_t cudaEventQuery(cudaEvent_t h) {
  GUARD("cudaEventQuery");
  Lock l(M);
  return fail((cudaError_t)event_query((Event*)h), "cudaEventQuery");
}
API cudaError_t cudaEventSynchronize(cudaEvent_t h) {
  GUARD("cudaEventSynchronize");
  Lock l(M);
  return fail((cudaError_t)event_sync((Event*)h, l), "cudaEventSynchronize");
}
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  auto *x = (Event*)a, *y = (Event*)b;
  *ms = x->st && y->st ? std::chrono::duration<float, std::milli>(y->st->t - x->st->t).count() : 0;
  return cudaSuccess;
}
// ── capture
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* m) {
  std::swap(*m, thread_mode);
  return cudaSuccess;
}
API cudaError_t cudaStreamBeginCapture(cudaStream_t h, cudaStreamCaptureMode mode) {
  GUARD("cudaStreamBeginCapture");
  Lock l(M);
  auto* s = stream_of(h);
  if (s->cap || (uintptr_t)h <= 2) return fail(cudaErrorStreamCaptureUnsupported, "begin");
  auto c = std::make_shared<Capture>();
  c->id = next_id++;
  c->mode = mode;
  c->thread = std::this_thread::get_id();
  s->cap = c;
  captures.insert(c);
  return cudaSuccess;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t h, cudaGraph_t* g) {
  GUARD("cudaStreamEndCapture");
  Lock l(M);
  auto* s = stream_of(h);
  auto c = s->cap;
  if (!c) return fail(cudaErrorIllegalState, "end");
  captures.erase(c);
  for (auto* o : streams)
    if (o->cap == c) o->cap = nullptr;
  if (!c->valid) {
    *g = nullptr;
    return fail(cudaErrorStreamCaptureInvalidated, "cudaStreamEndCapture");
  }
  *g = (cudaGraph_t) new std::shared_ptr<Graph>(c->graph);
  return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t h, cudaStreamCaptureStatus* st) {
  Lock l(M);
  auto* s = stream_of(h);
  *st = !s->cap         ? cudaStreamCaptureStatusNone
        : s->cap->valid ? cudaStreamCaptureStatusActive
                        : cudaStreamCaptureStatusInvalidated;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t h, cudaStreamCaptureStatus* st, unsigned long long* id,
                                         cudaGraph_t* g, const cudaGraphNode_t** deps, const cudaGraphEdgeData** ed,
                                         size_t* nd) {
  Lock l(M);
  auto* s = stream_of(h);
  cudaStreamIsCapturing(h, st);
  if (id) *id = s->cap ? s->cap->id : 0;
  if (nd) *nd = 0;
  if (deps) *deps = nullptr;
  if (g) *g = nullptr;
  return cudaSuccess;
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* x, cudaGraph_t g, unsigned long long) {
  *x = (cudaGraphExec_t) new std::shared_ptr<Graph>(*(std::shared_ptr<Graph>*)g);
  return cudaSuccess;
}
API cudaError_t cudaGraphLaunch(cudaGraphExec_t x, cudaStream_t h) {
  GUARD("cudaGraphLaunch");
  Lock l(M);
  auto* s = stream_of(h);
  for (auto& op : (*(std::shared_ptr<Graph>*)x)->ops) submit(s, op);
  return cudaSuccess;
}
API cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
API cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t*, size_t* n) {
  *n = g ? (*(std::shared_ptr<Graph>*)g)->ops.size() : 0;
  return cudaSuccess;
}
API cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*, size_t* n) {
  *n = 0;
  return cudaSuccess;
}
API cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned) { return cudaSuccess; }
// ── kernels
static std::unordered_map<const void*, std::string>& names = *new std::unordered_map<const void*, std::string>;
struct Conf {
  dim3 g, b;
  size_t sh;
  cudaStream_t s;
};
static thread_local std::vector<Conf>* confs = nullptr;
API void** __cudaRegisterFatBinary(void* f) { return (void**)f; }
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 1; }
API void __cudaRegisterFunction(void**, const char* h, char*, const char* n, int, uint3*, uint3*, dim3*, dim3*, int*) {
  if (strstr(n, "spin_kernel")) {
    Lock l(M);
    names[h] = n;
  }
}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, size_t, int, int) {}
API unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t sh, void* s) {
  if (!confs) confs = new std::vector<Conf>;
  confs->push_back({g, b, sh, (cudaStream_t)s});
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* g, dim3* b, size_t* sh, void* s) {
  auto c = confs->back();
  confs->pop_back();
  *g = c.g;
  *b = c.b;
  *sh = c.sh;
  *(cudaStream_t*)s = c.s;
  return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* k, const void* f) {
  *k = (cudaKernel_t)f;
  return cudaSuccess;
}
static cudaError_t launch(const void* f, void** args, cudaStream_t h) {
  GUARD("launch");
  static double us = envd("FAKE_KERNEL_US", 0);
  Lock l(M);
  double s = us * 1e-6;
  if (names.count(f)) s = *(int64_t*)args[0] / 1.98e9;
  submit(stream_of(h), {nullptr, nullptr, s});
  return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3, dim3, void** a, size_t, cudaStream_t s) {
  return launch((const void*)k, a, s);
}
API cudaError_t cudaLaunchKernel(const void* k, dim3, dim3, void** a, size_t, cudaStream_t s) {
  return launch(k, a, s);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* k, void** a) {
  return launch(k, a, c->stream);
}
API cudaError_t cudaLaunchCooperativeKernel(const void* k, dim3, dim3, void** a, size_t, cudaStream_t s) {
  return launch(k, a, s);
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->ptxVersion = a->binaryVersion = 90;
  return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) {
  *n = 2;
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int, size_t) {
  *n = 2;
  return cudaSuccess;
}
// ── the rest
API cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** f, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* st) {
  *f = nullptr;
  if (st) *st = cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
API cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) { return cudaErrorNotSupported; }
API cudaError_t cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) { return cudaErrorNotSupported; }
API cudaError_t cudaIpcCloseMemHandle(void*) { return cudaSuccess; }
API cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t*, cudaEvent_t) { return cudaErrorNotSupported; }
API cudaError_t cudaIpcOpenEventHandle(cudaEvent_t*, cudaIpcEventHandle_t) { return cudaErrorNotSupported; }
API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* p, int) {
  *p = nullptr;
  return cudaSuccess;
}
API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
API cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return cudaSuccess; }
API cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }
// ── the driver
#undef cuMemHostRegister
#undef cuMemcpyHtoDAsync
#undef cuEventDestroy
#undef cuCtxPushCurrent
#undef cuCtxPopCurrent
#define CHILD                                                            \
  do {                                                                   \
    if (in_child()) {                                                    \
      fprintf(stderr, "[fake] %s called in a forked child\n", __func__); \
      return (CUresult)3;                                                \
    }                                                                    \
  } while (0)
static int ctx_dev(CUcontext c) { return (int)((uintptr_t)c - 0xC000); }
API CUresult f_cuInit(unsigned) __asm__("cuInit");
CUresult f_cuInit(unsigned) {
  if (!owner_pid) owner_pid = getpid();
  return CUDA_SUCCESS;
}
API CUresult f_cuDeviceGet(CUdevice* d, int i) __asm__("cuDeviceGet");
CUresult f_cuDeviceGet(CUdevice* d, int i) {
  if (i >= ngpus()) return CUDA_ERROR_INVALID_DEVICE;
  *d = i;
  return CUDA_SUCCESS;
}
static bool active[16];
API CUresult f_count(int* n) __asm__("cuDeviceGetCount");
CUresult f_count(int* n) {
  CHILD;
  *n = ngpus();
  return CUDA_SUCCESS;
}
API CUresult f_screate(CUstream* s, unsigned f) __asm__("cuStreamCreate");
CUresult f_screate(CUstream* s, unsigned f) {
  CHILD;
  return (CUresult)cudaStreamCreateWithFlags((cudaStream_t*)s, f);
}
API CUresult f_iscap(CUstream h, CUstreamCaptureStatus* st) __asm__("cuStreamIsCapturing");
CUresult f_iscap(CUstream h, CUstreamCaptureStatus* st) {
  CHILD;
  return (CUresult)cudaStreamIsCapturing((cudaStream_t)h, (cudaStreamCaptureStatus*)st);
}
API CUresult f_retain(CUcontext* c, CUdevice d) __asm__("cuDevicePrimaryCtxRetain");
CUresult f_retain(CUcontext* c, CUdevice d) {
  CHILD;
  active[d] = true;
  *c = (CUcontext)(uintptr_t)(0xC000 + d);
  return CUDA_SUCCESS;
}
API CUresult f_state(CUdevice d, unsigned* f, int* a) __asm__("cuDevicePrimaryCtxGetState");
CUresult f_state(CUdevice d, unsigned* f, int* a) {
  *f = 0;
  *a = active[d];
  for (auto* s : streams)
    if (s->device == d) *a = 1;
  return CUDA_SUCCESS;
}
API CUresult f_pci(char* s, int n, CUdevice d) __asm__("cuDeviceGetPCIBusId");
CUresult f_pci(char* s, int n, CUdevice d) {
  cudaDeviceGetPCIBusId(s, n, d);
  return CUDA_SUCCESS;
}
API CUresult f_push(CUcontext c) __asm__("cuCtxPushCurrent_v2");
CUresult f_push(CUcontext c) {
  CHILD;
  if (!ctx_stack) ctx_stack = new std::vector<int>;
  ctx_stack->push_back(cur_dev);
  cur_dev = ctx_dev(c);
  return CUDA_SUCCESS;
}
API CUresult f_pop(CUcontext* c) __asm__("cuCtxPopCurrent_v2");
CUresult f_pop(CUcontext* c) {
  CHILD;
  if (!ctx_stack || ctx_stack->empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *c = (CUcontext)(uintptr_t)(0xC000 + cur_dev);
  cur_dev = ctx_stack->back();
  ctx_stack->pop_back();
  return CUDA_SUCCESS;
}
API CUresult f_reg(void* p, size_t n, unsigned f) __asm__("cuMemHostRegister_v2");
CUresult f_reg(void* p, size_t n, unsigned f) {
  CHILD;
  Lock l(M);
  if (unsafe_refused("cuMemHostRegister")) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  return (CUresult)do_register(p, n);
}
API CUresult f_unreg(void* p) __asm__("cuMemHostUnregister");
CUresult f_unreg(void* p) {
  CHILD;
  Lock l(M);
  if (unsafe_refused("cuMemHostUnregister")) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  return (CUresult)do_unregister(p);
}
API CUresult f_sync() __asm__("cuCtxSynchronize");
CUresult f_sync() {
  CHILD;
  counts_ctxsync++;
  auto e = cudaDeviceSynchronize();
  last_error = cudaSuccess;
  TR("cuCtxSynchronize -> %d", e);
  return (CUresult)e;
}
API CUresult f_evc(CUevent* e, unsigned f) __asm__("cuEventCreate");
CUresult f_evc(CUevent* e, unsigned f) {
  CHILD;
  return (CUresult)cudaEventCreateWithFlags((cudaEvent_t*)e, f);
}
API CUresult f_evd(CUevent e) __asm__("cuEventDestroy_v2");
CUresult f_evd(CUevent e) {
  CHILD;
  return (CUresult)cudaEventDestroy((cudaEvent_t)e);
}
API CUresult f_evq(CUevent e) __asm__("cuEventQuery");
CUresult f_evq(CUevent e) {
  CHILD;
  Lock l(M);
  return (CUresult)event_query((Event*)e);
}
API CUresult f_evs(CUevent e) __asm__("cuEventSynchronize");
CUresult f_evs(CUevent e) {
  CHILD;
  Lock l(M);
  return (CUresult)event_sync((Event*)e, l);
}
API CUresult f_rec(CUcontext c, CUevent h) __asm__("cuCtxRecordEvent");
CUresult f_rec(CUcontext c, CUevent h) {
  CHILD;
  Lock l(M);
  counts_fences++;
  auto* e = (Event*)h;
  int d = ctx_dev(c);
  if (e->device != d) return CUDA_ERROR_INVALID_HANDLE;
  for (auto* s : streams)
    if (s->cap && s->device == d) {
      fprintf(stderr, "[fake] cuCtxRecordEvent while a stream of the context captures: captures invalidated\n");
      invalidate_all(d);
      return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
  auto st = std::make_shared<EvState>();
  for (auto* s : streams)
    if (s->device == d && !idle(s)) {
      st->left++;
      submit(s, {[st] {
               Lock l2(M);
               st->left--;
               CV.notify_all();
             }});
    }
  e->st = st;
  e->cap = nullptr;
  return CUDA_SUCCESS;
}
API CUresult f_recs(CUevent e, CUstream s) __asm__("cuEventRecord");
CUresult f_recs(CUevent e, CUstream s) {
  CHILD;
  return (CUresult)cudaEventRecord((cudaEvent_t)e, (cudaStream_t)s);
}
API CUresult f_wait(CUstream s, CUevent e, unsigned f) __asm__("cuStreamWaitEvent");
CUresult f_wait(CUstream s, CUevent e, unsigned f) {
  CHILD;
  return (CUresult)cudaStreamWaitEvent((cudaStream_t)s, (cudaEvent_t)e, f);
}
API CUresult f_h2d(CUdeviceptr d, const void* s, size_t n, CUstream st) __asm__("cuMemcpyHtoDAsync_v2");
CUresult f_h2d(CUdeviceptr d, const void* s, size_t n, CUstream st) {
  CHILD;
  return (CUresult)cudaMemcpyAsync((void*)d, s, n, cudaMemcpyHostToDevice, (cudaStream_t)st);
}
API CUresult f_mode(CUstreamCaptureMode* m) __asm__("cuThreadExchangeStreamCaptureMode");
CUresult f_mode(CUstreamCaptureMode* m) {
  CHILD;
  return (CUresult)cudaThreadExchangeStreamCaptureMode((cudaStreamCaptureMode*)m);
}
API CUresult f_name(CUresult r, const char** s) __asm__("cuGetErrorName");
CUresult f_name(CUresult r, const char** s) {
  *s = r == 712 ? "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED" : r == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_FAKE";
  return CUDA_SUCCESS;
}
API CUresult f_cur(CUcontext* c) __asm__("cuCtxGetCurrent");
CUresult f_cur(CUcontext* c) {
  *c = (CUcontext)(uintptr_t)(0xC000 + cur_dev);
  return CUDA_SUCCESS;
}
API void fake_break() { broken = true; }
API void fake_counts(long* out) {
  Lock l(M);
  out[0] = counts_registered;
  out[1] = counts_unregistered;
  out[2] = counts_ctxsync;
  out[3] = counts_fences;
  out[4] = violations;
  out[5] = (long)host_mem.size();
}
}
