/* A CUDA driver made of Linux's memory, for tests of those who call one: the same exported names, argument layouts and
 * rules (what must be mapped, when, by whom), one memfd per created memory, mmap(MAP_FIXED) for cuMemMap.
 *
 * Copies are lazy: they run when an event, a stream or the context is waited for, never before. So whoever unmaps
 * without waiting is found out every time, and not once in a thousand runs. Every broken rule is a violation that the
 * tests read, on top of the error that a driver would give.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef int CUresult;
typedef uint64_t CUdeviceptr;
typedef struct { int type, id; } Location;
typedef struct {
  int type, handle_types;
  Location location;
  void *win32;
  struct { unsigned char compression, rdma; unsigned short usage; unsigned char reserved[4]; } flags;
} Prop;
typedef struct { Location location; int flags; } Access;

enum { OK = 0, INVALID_VALUE = 1, NO_MEMORY = 2, NOT_INITIALISED = 3, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
       INVALID_HANDLE = 400, NOT_READY = 600, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713 };
enum { NUM_DEVICES = 2, MAX = 1 << 15, DEPTH = 16, MAX_RULES = 16, TRACE = 1 << 20 };
static const size_t GRANULARITY = 2 << 20;

typedef struct { uint64_t address; size_t size; } Range;
typedef struct { uint64_t id; size_t size; int fd, num_maps, is_released, device; } Memory;
typedef struct { uint64_t address; size_t size; int memory, is_open; } Mapping;
typedef struct op { struct op *next; void *to; const void *from; size_t size; uint64_t device_at; uint64_t seq; } Op;
typedef struct { int is_live; Op *first, *last; uint64_t issued, done; } Stream;
typedef struct { int is_live; Stream *stream; uint64_t seq; } Event;
typedef struct { char name[48]; int after, result; } Rule;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Range reserved[MAX], registered[MAX];
static Memory memories[MAX];
static Mapping mappings[MAX];
static Stream streams[256];
static Event events[MAX];
static int num_reserved, num_registered, num_memories, num_mappings, is_initialised;
static int retained[NUM_DEVICES];
static size_t capacity[NUM_DEVICES] = {1 << 30, 1 << 30}, held[NUM_DEVICES];
static uint64_t next_handle = 0x1000, num_violations, num_calls;
static Rule rules[MAX_RULES];
static int num_rules;
static char trace[TRACE], violation[512];
static size_t trace_end;
static __thread void *stack[DEPTH];
static __thread int depth;
static __thread int capture_mode;

static void violate(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  if (!num_violations++) vsnprintf(violation, sizeof violation, format, arguments);
  va_end(arguments);
}

static int enter(const char *name, uint64_t a, uint64_t b) { /* takes the lock; an injected result, or 0 */
  pthread_mutex_lock(&lock);
  num_calls++;
  if (trace_end + 96 < TRACE)
    trace_end += (size_t)snprintf(trace + trace_end, TRACE - trace_end, "%s %llx %llx\n", name, (unsigned long long)a,
                                  (unsigned long long)b);
  if (!is_initialised) return NOT_INITIALISED;
  for (int i = 0; i < num_rules; i++)
    if (!strcmp(rules[i].name, name) && rules[i].after-- == 0) {
      int result = rules[i].result;
      rules[i] = rules[--num_rules];
      return result;
    }
  return OK;
}
static CUresult leave(CUresult result) { pthread_mutex_unlock(&lock); return result; }
#define ENTER(a, b) do { int early = enter(__func__, (uint64_t)(a), (uint64_t)(b)); if (early) return leave(early); } while (0)
#define NEED(condition, result) do { if (!(condition)) { violate("%s: %s", __func__, #condition); return leave(result); } } while (0)
#define CONTEXT() NEED(depth > 0 && stack[depth - 1], INVALID_CONTEXT)

static int overlaps(uint64_t a, size_t n, uint64_t b, size_t m) { return a < b + m && b < a + n; }

static int in_one_reservation(uint64_t address, size_t size) {
  for (int i = 0; i < num_reserved; i++)
    if (reserved[i].address <= address && address + size <= reserved[i].address + reserved[i].size) return 1;
  return 0;
}

static int is_open(uint64_t address, size_t size) { /* every byte mapped and accessible */
  uint64_t at = address;
  while (at < address + size) {
    int found = -1;
    for (int i = 0; i < num_mappings; i++)
      if (mappings[i].address <= at && at < mappings[i].address + mappings[i].size) found = i;
    if (found < 0 || !mappings[found].is_open) return 0;
    at = mappings[found].address + mappings[found].size;
  }
  return 1;
}

static int is_pinned(const void *host, size_t size) {
  for (int i = 0; i < num_registered; i++)
    if (registered[i].address <= (uint64_t)host && (uint64_t)host + size <= registered[i].address + registered[i].size)
      return 1;
  return 0;
}

static void run(Stream *stream, uint64_t until) {
  while (stream->first && stream->first->seq <= until) {
    Op *op = stream->first;
    if (!is_open(op->device_at, op->size)) violate("a copy ran over memory that had left: %llx", (unsigned long long)op->device_at);
    else if (op->from) memcpy(op->to, op->from, op->size);
    else memset(op->to, 0, op->size);
    stream->done = op->seq;
    stream->first = op->next;
    if (!stream->first) stream->last = NULL;
    free(op);
  }
}

static CUresult issue(Stream *stream, void *to, const void *from, size_t size, uint64_t device_at) {
  if (!stream || !stream->is_live) return INVALID_HANDLE;
  if (!is_open(device_at, size)) { violate("a copy of memory that is not mapped: %llx", (unsigned long long)device_at); return INVALID_VALUE; }
  Op *op = calloc(1, sizeof *op);
  *op = (Op){NULL, to, from, size, device_at, ++stream->issued};
  if (stream->last) stream->last->next = op; else stream->first = op;
  stream->last = op;
  return OK;
}

CUresult cuInit(unsigned flags) { (void)flags; pthread_mutex_lock(&lock); is_initialised = 1; return leave(OK); }
CUresult cuGetErrorName(int error, const char **name) {
  static const struct { int code; const char *name; } known[] = {
      {1, "CUDA_ERROR_INVALID_VALUE"}, {2, "CUDA_ERROR_OUT_OF_MEMORY"}, {3, "CUDA_ERROR_NOT_INITIALIZED"},
      {101, "CUDA_ERROR_INVALID_DEVICE"}, {201, "CUDA_ERROR_INVALID_CONTEXT"}, {400, "CUDA_ERROR_INVALID_HANDLE"},
      {600, "CUDA_ERROR_NOT_READY"}, {700, "CUDA_ERROR_ILLEGAL_ADDRESS"}, {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
      {719, "CUDA_ERROR_LAUNCH_FAILED"}, {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"}};
  *name = NULL;
  for (size_t i = 0; i < sizeof known / sizeof *known; i++) if (known[i].code == error) *name = known[i].name;
  return *name ? OK : INVALID_VALUE;
}
CUresult cuGetErrorString(int error, const char **text) { *text = error == 2 ? "out of memory" : "as told by the stand-in"; return OK; }
CUresult cuDeviceGet(int *device, int ordinal) {
  ENTER(ordinal, 0);
  if (ordinal < 0 || ordinal >= NUM_DEVICES) return leave(INVALID_DEVICE);
  *device = ordinal;
  return leave(OK);
}
CUresult cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
  ENTER(device, 0);
  for (int i = 0; i < 16; i++) uuid[i] = (unsigned char)(16 * device + i);
  return leave(OK);
}
CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
  ENTER(attribute, device);
  *value = attribute == 134 ? -1 : attribute == 33 || attribute == 34 || attribute == 50 ? 0 : 1;
  return leave(OK);
}
CUresult cuDevicePrimaryCtxRetain(void **context, int device) {
  ENTER(device, 0);
  retained[device]++;
  *context = (void *)(uintptr_t)(0xC0 + device);
  return leave(OK);
}
CUresult cuDevicePrimaryCtxRelease_v2(int device) { ENTER(device, 0); NEED(retained[device] > 0, INVALID_CONTEXT); retained[device]--; return leave(OK); }
CUresult cuCtxPushCurrent_v2(void *context) { ENTER(context, 0); NEED(depth < DEPTH, INVALID_VALUE); stack[depth++] = context; return leave(OK); }
CUresult cuCtxPopCurrent_v2(void **context) { ENTER(0, 0); NEED(depth > 0, INVALID_CONTEXT); *context = stack[--depth]; return leave(OK); }
CUresult cuCtxSynchronize(void) {
  ENTER(0, 0);
  CONTEXT();
  for (int i = 0; i < 256; i++) if (streams[i].is_live) run(&streams[i], UINT64_MAX);
  return leave(OK);
}
CUresult cuThreadExchangeStreamCaptureMode(int *mode) { ENTER(*mode, 0); int old = capture_mode; capture_mode = *mode; *mode = old; return leave(OK); }
CUresult cuMemGetInfo_v2(size_t *free_now, size_t *total) {
  ENTER(0, 0);
  CONTEXT();
  int device = (int)((uintptr_t)stack[depth - 1] - 0xC0);
  *total = capacity[device];
  *free_now = capacity[device] - held[device];
  return leave(OK);
}
static int is_good(const Prop *prop) {
  return prop->type == 1 && prop->handle_types == 0 && prop->location.type == 1 && prop->location.id >= 0 &&
         prop->location.id < NUM_DEVICES && !prop->win32 && !prop->flags.compression && prop->flags.rdma <= 1 && !prop->flags.usage;
}
CUresult cuMemGetAllocationGranularity(size_t *size, const Prop *prop, int option) {
  ENTER(option, 0);
  NEED(is_good(prop) && (option == 0 || option == 1), INVALID_VALUE);
  *size = GRANULARITY;
  return leave(OK);
}
CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr hint, unsigned long long flags) {
  ENTER(size, 0);
  NEED(size && size % GRANULARITY == 0 && !alignment && !hint && !flags && num_reserved < MAX, INVALID_VALUE);
  char *whole = mmap(NULL, size + GRANULARITY, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (whole == MAP_FAILED) return leave(NO_MEMORY);
  char *aligned = (char *)(((uintptr_t)whole + GRANULARITY - 1) / GRANULARITY * GRANULARITY);
  if (aligned > whole) munmap(whole, (size_t)(aligned - whole));
  munmap(aligned + size, (size_t)(whole + GRANULARITY - aligned));
  reserved[num_reserved++] = (Range){(uint64_t)(uintptr_t)aligned, size};
  *address = (uint64_t)(uintptr_t)aligned;
  return leave(OK);
}
CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
  ENTER(address, size);
  for (int i = 0; i < num_mappings; i++) NEED(!overlaps(address, size, mappings[i].address, mappings[i].size), INVALID_VALUE);
  for (int i = 0; i < num_reserved; i++)
    if (reserved[i].address == address && reserved[i].size == size) {
      munmap((void *)(uintptr_t)address, size);
      reserved[i] = reserved[--num_reserved];
      return leave(OK);
    }
  NEED(!"a reservation", INVALID_VALUE);
  return leave(OK);
}
static void end_if_unused(int index) {
  if (!memories[index].is_released || memories[index].num_maps) return;
  close(memories[index].fd);
  held[memories[index].device] -= memories[index].size;
  for (int i = 0; i < num_mappings; i++) if (mappings[i].memory == num_memories - 1) mappings[i].memory = index;
  memories[index] = memories[--num_memories];
}
CUresult cuMemCreate(uint64_t *handle, size_t size, const Prop *prop, unsigned long long flags) {
  ENTER(size, 0);
  NEED(is_good(prop) && size && size % GRANULARITY == 0 && !flags && num_memories < MAX, INVALID_VALUE);
  int device = prop->location.id;
  if (held[device] + size > capacity[device]) return leave(NO_MEMORY);
  int fd = memfd_create("standin-gpu", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, (off_t)size)) return leave(NO_MEMORY);
  held[device] += size;
  memories[num_memories++] = (Memory){next_handle, size, fd, 0, 0, device};
  *handle = next_handle++;
  return leave(OK);
}
static int find_memory(uint64_t handle) {
  for (int i = 0; i < num_memories; i++) if (memories[i].id == handle && !memories[i].is_released) return i;
  return -1;
}
CUresult cuMemRelease(uint64_t handle) {
  ENTER(handle, 0);
  int index = find_memory(handle);
  NEED(index >= 0, INVALID_VALUE);
  NEED(!memories[index].num_maps, INVALID_VALUE); /* lawful, but our drivers unmap first, so that memory leaves at once */
  memories[index].is_released = 1;
  end_if_unused(index);
  return leave(OK);
}
CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, uint64_t handle, unsigned long long flags) {
  ENTER(address, size);
  int index = find_memory(handle);
  NEED(index >= 0 && memories[index].size == size && !offset && !flags && num_mappings < MAX, INVALID_VALUE);
  NEED(in_one_reservation(address, size), INVALID_VALUE);
  for (int i = 0; i < num_mappings; i++) NEED(!overlaps(address, size, mappings[i].address, mappings[i].size), INVALID_VALUE);
  if (mmap((void *)(uintptr_t)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, memories[index].fd, 0) == MAP_FAILED)
    return leave(NO_MEMORY);
  memories[index].num_maps++;
  mappings[num_mappings++] = (Mapping){address, size, index, 0};
  return leave(OK);
}
CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const Access *access, size_t count) {
  ENTER(address, size);
  NEED(count == 1 && access->location.type == 1 && access->flags == 3, INVALID_VALUE);
  size_t covered = 0;
  for (int i = 0; i < num_mappings; i++)
    if (address <= mappings[i].address && mappings[i].address + mappings[i].size <= address + size) covered += mappings[i].size;
  NEED(covered == size, INVALID_VALUE);
  for (int i = 0; i < num_mappings; i++)
    if (overlaps(address, size, mappings[i].address, mappings[i].size)) {
      mappings[i].is_open = 1;
      mprotect((void *)(uintptr_t)mappings[i].address, mappings[i].size, PROT_READ | PROT_WRITE);
    }
  return leave(OK);
}
CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
  ENTER(address, size);
  size_t covered = 0;
  for (int i = 0; i < num_mappings; i++)
    if (address <= mappings[i].address && mappings[i].address + mappings[i].size <= address + size) covered += mappings[i].size;
  NEED(covered == size, INVALID_VALUE);
  for (int s = 0; s < 256; s++)
    for (Op *op = streams[s].first; op; op = op->next) NEED(!overlaps(address, size, op->device_at, op->size), INVALID_VALUE);
  for (int i = num_mappings - 1; i >= 0; i--)
    if (overlaps(address, size, mappings[i].address, mappings[i].size)) {
      Mapping gone = mappings[i];
      mmap((void *)(uintptr_t)gone.address, gone.size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
      mappings[i] = mappings[--num_mappings];
      memories[gone.memory].num_maps--;
      end_if_unused(gone.memory);
    }
  return leave(OK);
}
CUresult cuMemcpyDtoHAsync_v2(void *host, CUdeviceptr device, size_t size, void *stream) {
  ENTER(device, size);
  CONTEXT();
  return leave(issue(stream, host, (void *)(uintptr_t)device, size, device));
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr device, const void *host, size_t size, void *stream) {
  ENTER(device, size);
  CONTEXT();
  return leave(issue(stream, (void *)(uintptr_t)device, host, size, device));
}
CUresult cuMemsetD8Async(CUdeviceptr device, unsigned char value, size_t size, void *stream) {
  ENTER(device, size);
  CONTEXT();
  NEED(!value, INVALID_VALUE);
  return leave(issue(stream, (void *)(uintptr_t)device, NULL, size, device));
}
static char a_module, a_function;
CUresult cuModuleLoadData(void **module, const char *image) {
  ENTER(0, 0);
  CONTEXT();
  NEED(strstr(image, ".visible .entry copy_in("), INVALID_VALUE);
  *module = &a_module;
  return leave(OK);
}
CUresult cuModuleGetFunction(void **function, void *module, const char *name) {
  ENTER(module, 0);
  CONTEXT();
  NEED(module == &a_module && !strcmp(name, "copy_in"), INVALID_VALUE);
  *function = &a_function;
  return leave(OK);
}
/* The one kernel there is: copies from pinned memory of the host, in units of 16 bytes. Its arguments are read now. */
CUresult cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, void *stream, void **arguments, void **extra) {
  uint64_t to = *(uint64_t *)arguments[0], from = *(uint64_t *)arguments[1], size = *(uint64_t *)arguments[2];
  ENTER(to, size);
  CONTEXT();
  NEED(function == &a_function && gx && gy == 1 && gz == 1 && bx && bx <= 1024 && by == 1 && bz == 1 && !shared && !extra, INVALID_VALUE);
  NEED(!((to | from | size) % 16) && is_pinned((void *)(uintptr_t)from, size), INVALID_VALUE);
  return leave(issue(stream, (void *)(uintptr_t)to, (void *)(uintptr_t)from, size, to));
}
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device, void *host, unsigned flags) {
  ENTER(host, 0);
  CONTEXT();
  NEED(!flags, INVALID_VALUE);
  if (!is_pinned(host, 1)) return leave(INVALID_VALUE);
  *device = (CUdeviceptr)(uintptr_t)host;
  return leave(OK);
}
CUresult cuMemHostRegister_v2(void *host, size_t size, unsigned flags) {
  ENTER(host, size);
  CONTEXT();
  NEED(flags == 3 && size && num_registered < MAX, INVALID_VALUE);
  for (int i = 0; i < num_registered; i++)
    if (overlaps((uint64_t)(uintptr_t)host, size, registered[i].address, registered[i].size)) return leave(ALREADY_REGISTERED);
  registered[num_registered++] = (Range){(uint64_t)(uintptr_t)host, size};
  return leave(OK);
}
CUresult cuMemHostUnregister(void *host) {
  ENTER(host, 0);
  CONTEXT();
  for (int i = 0; i < num_registered; i++)
    if (registered[i].address == (uint64_t)(uintptr_t)host) {
      registered[i] = registered[--num_registered];
      return leave(OK);
    }
  NEED(!"registered", NOT_REGISTERED);
  return leave(OK);
}
CUresult cuStreamCreate(void **stream, unsigned flags) {
  ENTER(flags, 0);
  CONTEXT();
  NEED(flags == 1, INVALID_VALUE);
  for (int i = 0; i < 256; i++)
    if (!streams[i].is_live) { streams[i] = (Stream){.is_live = 1}; *stream = &streams[i]; return leave(OK); }
  return leave(NO_MEMORY);
}
CUresult cuStreamSynchronize(void *stream) {
  ENTER(stream, 0);
  CONTEXT();
  if (stream) run(stream, UINT64_MAX);
  return leave(OK);
}
CUresult cuStreamDestroy_v2(void *stream) {
  ENTER(stream, 0);
  NEED(((Stream *)stream)->is_live, INVALID_HANDLE);
  run(stream, UINT64_MAX);
  ((Stream *)stream)->is_live = 0;
  return leave(OK);
}
CUresult cuEventCreate(void **event, unsigned flags) {
  ENTER(flags, 0);
  CONTEXT();
  for (int i = 0; i < MAX; i++)
    if (!events[i].is_live) { events[i] = (Event){.is_live = 1}; *event = &events[i]; return leave(OK); }
  return leave(NO_MEMORY);
}
CUresult cuEventRecord(void *event, void *stream) {
  ENTER(event, stream);
  CONTEXT();
  Event *it = event;
  NEED(it->is_live && ((Stream *)stream)->is_live, INVALID_HANDLE);
  it->stream = stream;
  it->seq = it->stream->issued;
  return leave(OK);
}
CUresult cuEventQuery(void *event) {
  ENTER(event, 0);
  Event *it = event;
  return leave(it->stream && it->stream->done < it->seq ? NOT_READY : OK);
}
CUresult cuEventSynchronize(void *event) {
  ENTER(event, 0);
  Event *it = event;
  NEED(it->is_live, INVALID_HANDLE);
  if (it->stream) run(it->stream, it->seq);
  return leave(OK);
}
CUresult cuEventDestroy_v2(void *event) { ENTER(event, 0); NEED(((Event *)event)->is_live, INVALID_HANDLE); ((Event *)event)->is_live = 0; return leave(OK); }

/* -- what tests ask and arrange ----------------------------------------------------------------------------------- */

void standin_set_capacity(int device, size_t bytes) { pthread_mutex_lock(&lock); capacity[device] = bytes; leave(0); }
void standin_fail(const char *name, int after, int result) { /* the call number `after` (0: the next) of that name */
  pthread_mutex_lock(&lock);
  Rule *rule = &rules[num_rules++];
  snprintf(rule->name, sizeof rule->name, "%s", name);
  rule->after = after;
  rule->result = result;
  leave(0);
}
void standin_fail_nothing(void) { pthread_mutex_lock(&lock); num_rules = 0; leave(0); }
uint64_t standin_violations(char *text, size_t size) {
  pthread_mutex_lock(&lock);
  if (text && size) snprintf(text, size, "%s", num_violations ? violation : "");
  uint64_t number = num_violations;
  leave(0);
  return number;
}
void standin_forgive(void) { pthread_mutex_lock(&lock); num_violations = 0; leave(0); }
int standin_live(const char *kind) {
  pthread_mutex_lock(&lock);
  int number = 0;
  if (!strcmp(kind, "reservations")) number = num_reserved;
  else if (!strcmp(kind, "memories")) number = num_memories;
  else if (!strcmp(kind, "mappings")) number = num_mappings;
  else if (!strcmp(kind, "registrations")) number = num_registered;
  else if (!strcmp(kind, "streams")) { for (int i = 0; i < 256; i++) number += streams[i].is_live; }
  else if (!strcmp(kind, "events")) { for (int i = 0; i < MAX; i++) number += events[i].is_live; }
  else if (!strcmp(kind, "contexts")) { for (int i = 0; i < NUM_DEVICES; i++) number += retained[i]; }
  else if (!strcmp(kind, "pushed")) number = depth;
  else number = -1;
  leave(0);
  return number;
}
size_t standin_held(int device) { pthread_mutex_lock(&lock); size_t bytes = held[device]; leave(0); return bytes; }
int standin_is_pinned(const void *host, size_t size) { pthread_mutex_lock(&lock); int yes = is_pinned(host, size); leave(0); return yes; }
size_t standin_trace(char *text, size_t size) { /* calls since the last time, one a line: name, two arguments in hex */
  pthread_mutex_lock(&lock);
  size_t length = trace_end < size - 1 ? trace_end : size - 1;
  memcpy(text, trace, length);
  text[length] = 0;
  trace_end = 0;
  leave(0);
  return length;
}
