/* What torch's caching allocator calls for a pool's segments: memory made by the CUDA driver's virtual memory management,
 * noted in a table that Python reads, so that an arena can take it over, give it back and bring it again.
 *
 * torch calls in here with its own lock held, with or without Python's interpreter lock: nothing here may wait for
 * Python, and nothing does. One mutex guards the table and is never held over a call of the driver. Each slot is one
 * pool (a tag of an arena): the function that torch was given determines the tag, so no thread has to know it.
 *
 * A segment is MADE; then TAKEN by an arena, which from then on alone gives its memory back; freed by torch it is gone
 * at once when it was only made, and waits for the arena (`is_freed`) when it was taken. Nothing here ends a process.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#define PUBLIC __attribute__((visibility("default")))
enum { MAX_DEVICES = 64 };
enum { OUT_OF_MEMORY = 2, RELAXED = 2, PINNED = 1, ON_DEVICE = 1, READ_WRITE = 3 };

typedef struct { int type, id; } location;
typedef struct {
  int type, handle_types;
  location where;
  void *win32;
  struct { unsigned char compression, rdma_capable; unsigned short usage; unsigned char reserved[4]; } flags;
} allocation_prop;
typedef struct { location where; int flags; } access_desc;
_Static_assert(sizeof(allocation_prop) == 32 && sizeof(access_desc) == 12, "layout of cuda.h");

static struct {
  int (*init)(unsigned);
  int (*device_get)(int *, int);
  int (*retain)(void **, int);
  int (*release_context)(int);
  int (*push)(void *);
  int (*pop)(void **);
  int (*synchronise)(void);
  int (*memory_info)(size_t *, size_t *);
  int (*exchange_mode)(int *);
  int (*granularity)(size_t *, const allocation_prop *, int);
  int (*reserve)(uint64_t *, size_t, size_t, uint64_t, uint64_t);
  int (*free_reservation)(uint64_t, size_t);
  int (*create)(uint64_t *, size_t, const allocation_prop *, uint64_t);
  int (*release)(uint64_t);
  int (*map)(uint64_t, size_t, size_t, uint64_t, uint64_t);
  int (*unmap)(uint64_t, size_t);
  int (*set_access)(uint64_t, size_t, const access_desc *, size_t);
} cuda;

static const struct { const char *name; size_t at; } SYMBOLS[] = {
#define SYMBOL(exported, member) {exported, offsetof(__typeof__(cuda), member)}
    SYMBOL("cuInit", init), SYMBOL("cuDeviceGet", device_get), SYMBOL("cuDevicePrimaryCtxRetain", retain),
    SYMBOL("cuDevicePrimaryCtxRelease_v2", release_context),
    SYMBOL("cuCtxPushCurrent_v2", push), SYMBOL("cuCtxPopCurrent_v2", pop), SYMBOL("cuCtxSynchronize", synchronise),
    SYMBOL("cuMemGetInfo_v2", memory_info),
    SYMBOL("cuThreadExchangeStreamCaptureMode", exchange_mode), SYMBOL("cuMemGetAllocationGranularity", granularity),
    SYMBOL("cuMemAddressReserve", reserve), SYMBOL("cuMemAddressFree", free_reservation),
    SYMBOL("cuMemCreate", create), SYMBOL("cuMemRelease", release), SYMBOL("cuMemMap", map),
    SYMBOL("cuMemUnmap", unmap), SYMBOL("cuMemSetAccess", set_access),
};

typedef struct segment {
  struct segment *next;
  uint64_t address, num_bytes;  /* rounded up: the whole reservation */
  int device, slot, is_taken, is_freed;
  size_t num_chunks;
  uint64_t *handles;
} segment;

typedef struct {  /* as Python reads it */
  uint64_t address, num_bytes, num_chunks;
  int32_t device, slot, is_taken, is_freed;
} segment_view;

typedef struct {
  uint64_t num_failures, num_bytes, num_unknown;
  int32_t result, padding;
  char call[40];
} failure_view;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static segment *table;
static uint64_t chunk_bytes;
static int is_open;
static void *contexts[MAX_DEVICES];
static size_t granularities[MAX_DEVICES];
static allocation_prop props[MAX_DEVICES];
static char library_path[4096];
static failure_view last_failure;

static int failed(const char *call, int result, uint64_t num_bytes) {
  if (!result) return 0;
  pthread_mutex_lock(&lock);
  last_failure.num_failures++;
  last_failure.num_bytes = num_bytes;
  last_failure.result = result;
  snprintf(last_failure.call, sizeof last_failure.call, "%s", call);
  pthread_mutex_unlock(&lock);
  return result;
}

/* The device's context, its allocation properties and granularity, asked for once. */
static int know_device(int device) {
  void *context = NULL;
  size_t granularity = 0;
  int handle = 0, result, is_known;
  if (device < 0 || device >= MAX_DEVICES) return failed("cuDeviceGet", 101, 0);
  pthread_mutex_lock(&lock);
  is_known = is_open && contexts[device] != NULL;
  result = is_open ? 0 : 3;
  pthread_mutex_unlock(&lock);
  if (is_known || result) return failed("myxa_segments_open", result, 0);
  if ((result = cuda.device_get(&handle, device))) return failed("cuDeviceGet", result, 0);
  allocation_prop prop = {.type = PINNED, .where = {ON_DEVICE, handle}};
  if ((result = cuda.granularity(&granularity, &prop, 0)))
    return failed("cuMemGetAllocationGranularity", result, 0);
  if ((result = cuda.retain(&context, handle))) return failed("cuDevicePrimaryCtxRetain", result, 0);
  pthread_mutex_lock(&lock);
  is_known = contexts[device] != NULL;
  if (!is_known) {
    granularities[device] = granularity;
    props[device] = prop;
    contexts[device] = context;
  }
  pthread_mutex_unlock(&lock);
  if (is_known) cuda.release_context(handle);  /* another thread was faster */
  return 0;
}

typedef struct { int mode, is_pushed, is_exchanged; } scope;

/* A graph may be being captured on this thread: what follows is not part of it. */
static int enter(int device, scope *scope) {
  int result;
  scope->mode = RELAXED;
  scope->is_exchanged = scope->is_pushed = 0;
  if ((result = know_device(device))) return result;
  if ((result = cuda.push(contexts[device]))) return failed("cuCtxPushCurrent_v2", result, 0);
  scope->is_pushed = 1;
  scope->is_exchanged = !cuda.exchange_mode(&scope->mode);
  return 0;
}

static void leave(scope *scope) {
  void *popped;
  if (scope->is_exchanged) cuda.exchange_mode(&scope->mode);
  if (scope->is_pushed) cuda.pop(&popped);
}

static uint64_t size_of(const segment *it, size_t index) {
  uint64_t start = index * chunk_bytes;
  return it->num_bytes - start < chunk_bytes ? it->num_bytes - start : chunk_bytes;
}

/* Takes down the first `num_mapped` chunks, the memory of the first `num_created`, and the addresses. */
static int take_down(segment *it, size_t num_mapped, size_t num_created) {
  int first = 0, result;
  for (size_t i = 0; i < num_mapped; i++)
    if ((result = cuda.unmap(it->address + i * chunk_bytes, size_of(it, i))) && !first)
      first = failed("cuMemUnmap", result, size_of(it, i));
  for (size_t i = 0; i < num_created; i++)
    if ((result = cuda.release(it->handles[i])) && !first)
      first = failed("cuMemRelease", result, size_of(it, i));
  if ((result = cuda.free_reservation(it->address, it->num_bytes)) && !first)
    first = failed("cuMemAddressFree", result, it->num_bytes);
  return first;
}

static int build(segment *it) {
  access_desc access = {props[it->device].where, READ_WRITE};
  size_t num_created = 0, num_mapped = 0, num_free = 0, total = 0;
  int result;
  /* A hundred gibibytes that lack the last one would be made and unmade for nothing. */
  if (!cuda.memory_info(&num_free, &total) && num_free < it->num_bytes)
    return failed("cuMemGetInfo", OUT_OF_MEMORY, it->num_bytes);
  if ((result = cuda.reserve(&it->address, it->num_bytes, 0, 0, 0)))
    return failed("cuMemAddressReserve", result, it->num_bytes);
  while (num_mapped < it->num_chunks) {
    uint64_t size = size_of(it, num_mapped);
    if ((result = cuda.create(&it->handles[num_created], size, &props[it->device], 0))) {
      failed("cuMemCreate", result, size);
      break;
    }
    num_created++;
    if ((result = cuda.map(it->address + num_mapped * chunk_bytes, size, 0, it->handles[num_mapped], 0))) {
      failed("cuMemMap", result, size);
      break;
    }
    num_mapped++;
  }
  if (!result && (result = cuda.set_access(it->address, it->num_bytes, &access, 1)))
    failed("cuMemSetAccess", result, it->num_bytes);
  if (result) {
    failure_view failure;
    pthread_mutex_lock(&lock);
    failure = last_failure;
    pthread_mutex_unlock(&lock);
    take_down(it, num_mapped, num_created);
    pthread_mutex_lock(&lock);  /* the cause, not what followed from it */
    failure.num_failures = last_failure.num_failures;
    last_failure = failure;
    pthread_mutex_unlock(&lock);
  }
  return result;
}

static void *segment_alloc(ssize_t size, int device, int slot) {
  scope scope;
  segment *it = NULL;
  if (size <= 0 || enter(device, &scope)) return NULL;
  uint64_t granularity = granularities[device];
  uint64_t rounded = ((uint64_t)size + granularity - 1) / granularity * granularity;
  if ((it = calloc(1, sizeof *it))) {
    *it = (segment){.num_bytes = rounded, .device = device, .slot = slot};
    it->num_chunks = (size_t)((rounded + chunk_bytes - 1) / chunk_bytes);
    it->handles = calloc(it->num_chunks, sizeof *it->handles);
  }
  if (!it || !it->handles || build(it)) {
    if (it) free(it->handles);
    free(it);
    leave(&scope);
    return NULL;  /* torch takes this for out of memory; `myxa_segments_failure` has the driver's word */
  }
  leave(&scope);
  pthread_mutex_lock(&lock);
  it->next = table;
  table = it;
  pthread_mutex_unlock(&lock);
  return (void *)(uintptr_t)it->address;
}

static segment **find(uint64_t address) { /* the lock is held */
  segment **at = &table;
  while (*at && (*at)->address != address) at = &(*at)->next;
  return at;
}

static int end_segment(segment *it) { /* out of the table already; back into it, freed, when the device cannot be waited for */
  scope scope;
  int result = enter(it->device, &scope);
  if (!result) {
    if ((result = cuda.synchronise())) failed("cuCtxSynchronize", result, it->num_bytes);
    else take_down(it, it->num_chunks, it->num_chunks);
    leave(&scope);
  }
  if (result) {
    pthread_mutex_lock(&lock);
    it->is_freed = 1;
    it->next = table;
    table = it;
    pthread_mutex_unlock(&lock);
    return result;
  }
  free(it->handles);
  free(it);
  return 0;
}

static void segment_free(void *pointer, int slot) {
  pthread_mutex_lock(&lock);
  segment **at = find((uint64_t)(uintptr_t)pointer), *it = *at;
  if (!it || it->is_freed || it->slot != slot) {
    if (pointer) last_failure.num_unknown++;
    it = NULL;
  } else if (it->is_taken) {
    it->is_freed = 1;
    it = NULL;
  } else {
    *at = it->next;
  }
  pthread_mutex_unlock(&lock);
  if (it) end_segment(it);
}

#define SLOT(n)                                                                              \
  PUBLIC void *myxa_segment_alloc_##n(ssize_t size, int device, void *stream) {            \
    (void)stream;                                                                            \
    return segment_alloc(size, device, n);                                                   \
  }                                                                                          \
  PUBLIC void myxa_segment_free_##n(void *pointer, ssize_t size, int device, void *stream) { \
    (void)size, (void)device, (void)stream;                                                  \
    segment_free(pointer, n);                                                                \
  }
#define SLOTS(d) SLOT(d##0) SLOT(d##1) SLOT(d##2) SLOT(d##3) SLOT(d##4) SLOT(d##5) SLOT(d##6) SLOT(d##7)
SLOTS(1) SLOTS(2) SLOTS(3) SLOTS(4) SLOTS(5) SLOTS(6)  /* 10 to 17, 20 to 27, and so on */

/* 0; -1: cannot be loaded; -2: lacks a function; -3: another library is in use; else what cuInit answers. `words` gets
 * what is wrong. */
PUBLIC int myxa_segments_open(const char *path, uint64_t bytes, char *words, size_t size) {
  int result = 0;
  pthread_mutex_lock(&lock);
  if (is_open && table && (strcmp(path, library_path) || bytes != chunk_bytes)) {
    snprintf(words, size, "segments made through %s in chunks of %llu bytes are still there", library_path,
             (unsigned long long)chunk_bytes);
    result = -3;
  } else if (!is_open || strcmp(path, library_path)) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
      snprintf(words, size, "%s", dlerror());
      result = -1;
    }
    for (size_t i = 0; !result && i < sizeof SYMBOLS / sizeof *SYMBOLS; i++) {
      void *function = dlsym(library, SYMBOLS[i].name);
      if (!function) {
        snprintf(words, size, "%s has no %s", path, SYMBOLS[i].name);
        result = -2;
      }
      memcpy((char *)&cuda + SYMBOLS[i].at, &function, sizeof function);
    }
    if (!result && (result = cuda.init(0))) snprintf(words, size, "cuInit answers %d", result);
    memset(contexts, 0, sizeof contexts);
    is_open = !result;
    snprintf(library_path, sizeof library_path, "%s", path);
  }
  if (!result) chunk_bytes = bytes;
  pthread_mutex_unlock(&lock);
  return result;
}

/* Gives the contexts back when no segment is left; the number of segments that are. */
PUBLIC int myxa_segments_close(void) {
  int left = 0, gone[MAX_DEVICES], num_gone = 0;
  pthread_mutex_lock(&lock);
  for (segment *it = table; it; it = it->next) left++;
  for (int device = 0; !left && is_open && device < MAX_DEVICES; device++)
    if (contexts[device]) {
      gone[num_gone++] = props[device].where.id;
      contexts[device] = NULL;
    }
  pthread_mutex_unlock(&lock);
  for (int i = 0; i < num_gone; i++) cuda.release_context(gone[i]);
  return left;
}

PUBLIC int myxa_segments_list(segment_view *out, int capacity) { /* how many there are, listed or not */
  int number = 0;
  pthread_mutex_lock(&lock);
  for (segment *it = table; it; it = it->next, number++)
    if (number < capacity)
      out[number] = (segment_view){it->address, it->num_bytes, it->num_chunks, it->device, it->slot,
                                   it->is_taken, it->is_freed};
  pthread_mutex_unlock(&lock);
  return number;
}

/* The arena has it from now on; handles and sizes of its chunks. -1: it is gone, freed, or taken already. */
PUBLIC int myxa_segments_take(uint64_t address, uint64_t *handles, uint64_t *sizes, int capacity) {
  int number = -1;
  pthread_mutex_lock(&lock);
  segment *it = *find(address);
  if (it && !it->is_taken && !it->is_freed && it->num_chunks <= (size_t)capacity) {
    it->is_taken = 1;
    number = (int)it->num_chunks;
    for (int i = 0; i < number; i++) {
      handles[i] = it->handles[i];
      sizes[i] = size_of(it, (size_t)i);
    }
  }
  pthread_mutex_unlock(&lock);
  return number;
}

/* The arena would not have it. 1: torch has freed it meanwhile and it was ended here; -1: it is not taken. */
PUBLIC int myxa_segments_untake(uint64_t address) {
  int result = -1;
  pthread_mutex_lock(&lock);
  segment **at = find(address), *it = *at;
  if (it && it->is_taken) {
    it->is_taken = 0;
    result = it->is_freed;
    if (it->is_freed) *at = it->next;
  }
  pthread_mutex_unlock(&lock);
  if (result == 1) end_segment(it);
  return result;
}

/* The arena has given a taken segment back to the device: its line goes. -1: there is none. */
PUBLIC int myxa_segments_forget(uint64_t address) {
  pthread_mutex_lock(&lock);
  segment **at = find(address), *it = *at;
  if (it && !it->is_taken) it = NULL;
  if (it) *at = it->next;
  pthread_mutex_unlock(&lock);
  if (!it) return -1;
  free(it->handles);
  free(it);
  return 0;
}

/* Ends segments that torch freed while the device could not be waited for; 0, or the first result that was not. */
PUBLIC int myxa_segments_reap(void) {
  segment *ended = NULL;
  int first = 0, result;
  pthread_mutex_lock(&lock);
  for (segment **at = &table; *at;) {
    segment *it = *at;
    if (!it->is_freed || it->is_taken) {
      at = &it->next;
      continue;
    }
    *at = it->next;
    it->next = ended;
    ended = it;
  }
  pthread_mutex_unlock(&lock);
  while (ended) {
    segment *it = ended;
    ended = it->next;
    if ((result = end_segment(it)) && !first) first = result;
  }
  return first;
}

PUBLIC void myxa_segments_failure(failure_view *out) {
  pthread_mutex_lock(&lock);
  *out = last_failure;
  pthread_mutex_unlock(&lock);
}
