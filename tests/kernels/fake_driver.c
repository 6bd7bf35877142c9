/* A CUDA driver library for tests: host memory stands in for the device's.
 *
 * Names, types and constants are those of NVIDIA's cuda.h and cudaTypedefs.h (CUDA Toolkit 13.0, where
 * cudaTypedefs.h keeps PFN_cuMemcpyBatchAsync_v12080, the form that 12.8 introduced). With FAKE_USE_CUDA_HEADER
 * the real headers take the place of the declarations here, and the compiler compares every function with them.
 */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#ifdef FAKE_USE_CUDA_HEADER
#include <cuda.h>
#include <cudaTypedefs.h>
#else
typedef enum cudaError_enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_ILLEGAL_ADDRESS = 700,
    CUDA_ERROR_LAUNCH_TIMEOUT = 702,
    CUDA_ERROR_NOT_SUPPORTED = 801,
} CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef uint64_t cuuint64_t;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef enum {
    CU_GET_PROC_ADDRESS_SUCCESS = 0,
    CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND = 1,
    CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT = 2,
} CUdriverProcAddressQueryResult;
typedef enum { CU_MEM_LOCATION_TYPE_INVALID = 0 } CUmemLocationType;
typedef enum {
    CU_MEMCPY_SRC_ACCESS_ORDER_STREAM = 1,
    CU_MEMCPY_SRC_ACCESS_ORDER_ANY = 3,
} CUmemcpySrcAccessOrder;
typedef struct {
    CUmemLocationType type;
    int id;
} CUmemLocation;
typedef struct {
    CUmemcpySrcAccessOrder srcAccessOrder;
    CUmemLocation srcLocHint;
    CUmemLocation dstLocHint;
    unsigned int flags;
} CUmemcpyAttributes;
typedef CUresult (*PFN_cuMemcpyBatchAsync_v12080)(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes,
                                                  size_t count, CUmemcpyAttributes *attrs, size_t *attrIdxs,
                                                  size_t numAttrs, size_t *failIdx, CUstream hStream);
#endif

/* ---- what a test sets and reads, mirrored in fake_driver.py ---- */

enum { MAX_DEVICES = 8, MAX_CALLS = 4096, MAX_COPIES = 4096 };

typedef struct {
    int version;
    int version_result;
    int lookup_result;       /* of cuGetProcAddress */
    int lookup_status;       /* not 0: the symbol is not found */
    int context_result;      /* of cuDevicePrimaryCtxRetain */
    int batch_result;
    int copy_result;
    int synchronize_result;
    int64_t fail_index;      /* range at which batch_result or copy_result comes; -1: no range in particular */
    unsigned int devices_without_batches; /* bit by ordinal */
    int deferred;            /* copies happen in cuStreamSynchronize */
    int hold;                /* the batch call waits for fake_release */
    int idle;                /* no copies and no records, for timing */
} fake_knobs_type;

typedef struct {
    uint64_t dst, src, size, stream;
} fake_copy;

typedef struct {
    uint64_t count, num_attributes, first_attribute, source_order, hints, flags;
} fake_batch;

static const fake_knobs_type defaults = {.version = 13000, .fail_index = -1};

fake_knobs_type fake_knobs;
char fake_calls[MAX_CALLS][48]; /* names in order, with the arguments of a look-up */
int fake_num_calls;
fake_copy fake_copies[MAX_COPIES]; /* in the order submitted */
int fake_num_copies;
fake_batch fake_last_batch;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int held, released; /* a batch call waits; it may go on */
static int num_done; /* of fake_copies */
static char contexts[MAX_DEVICES];
static _Thread_local CUcontext current_context;

void fake_reset(void);
int fake_wait_until_held(void);
void fake_release(void);
void fake_layout(uint64_t layout[6]);

void fake_reset(void)
{
    fake_knobs = defaults;
    fake_num_calls = fake_num_copies = num_done = held = released = 0;
    memset(&fake_last_batch, 0, sizeof fake_last_batch);
    current_context = NULL;
}

static int wait_until(const int *flag)
{
    struct timespec deadline;
    clock_gettime(CLOCK_REALTIME, &deadline);
    deadline.tv_sec += 20;
    int error = 0;
    while (!*flag && error == 0) {
        error = pthread_cond_timedwait(&changed, &lock, &deadline);
    }
    return *flag;
}

/* Waits until a batch call is held; called from another thread. */
int fake_wait_until_held(void)
{
    pthread_mutex_lock(&lock);
    int result = wait_until(&held);
    pthread_mutex_unlock(&lock);
    return result;
}

/* Lets it go on. */
void fake_release(void)
{
    pthread_mutex_lock(&lock);
    released = 1;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static int hold(void)
{
    pthread_mutex_lock(&lock);
    held = 1;
    pthread_cond_broadcast(&changed);
    int result = wait_until(&released);
    pthread_mutex_unlock(&lock);
    return result;
}

/* Size and field offsets of CUmemcpyAttributes as this library was compiled. */
void fake_layout(uint64_t layout[6])
{
    layout[0] = sizeof(CUmemcpyAttributes);
    layout[1] = offsetof(CUmemcpyAttributes, srcAccessOrder);
    layout[2] = offsetof(CUmemcpyAttributes, srcLocHint);
    layout[3] = offsetof(CUmemcpyAttributes, dstLocHint);
    layout[4] = offsetof(CUmemcpyAttributes, flags);
    layout[5] = sizeof(CUmemLocation);
}

static void record(const char *call)
{
    if (!fake_knobs.idle && fake_num_calls < MAX_CALLS) {
        snprintf(fake_calls[fake_num_calls++], sizeof fake_calls[0], "%s", call);
    }
}

/* Last submitted first: a batch promises no order. */
static void run_copies(void)
{
    for (int i = fake_num_copies - 1; i >= num_done; i--) {
        memcpy((void *)(uintptr_t)fake_copies[i].dst, (const void *)(uintptr_t)fake_copies[i].src,
               fake_copies[i].size);
    }
    num_done = fake_num_copies;
}

static CUresult add_copy(CUdeviceptr dst, CUdeviceptr src, size_t size, CUstream stream)
{
    if (size == 0 || fake_num_copies == MAX_COPIES) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    fake_copies[fake_num_copies++] = (fake_copy){dst, src, size, (uint64_t)(uintptr_t)stream};
    return CUDA_SUCCESS;
}

/* ---- the driver's functions ---- */

#ifdef FAKE_WITHOUT_LOOKUP
#define cuGetProcAddress_v2 not_cuGetProcAddress_v2
#endif

CUresult cuDriverGetVersion(int *version);
CUresult cuGetErrorName(CUresult error, const char **name);
CUresult cuCtxGetCurrent(CUcontext *context);
CUresult cuCtxSetCurrent(CUcontext context);
CUresult cuDeviceGet(CUdevice *device, int ordinal);
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t size, CUstream stream);
CUresult cuStreamSynchronize(CUstream stream);
CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status);

CUresult cuDriverGetVersion(int *version)
{
    *version = fake_knobs.version;
    return (CUresult)fake_knobs.version_result;
}

CUresult cuGetErrorName(CUresult error, const char **name)
{
    static const struct {
        CUresult error;
        const char *name;
    } names[] = {
        {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
        {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
        {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
        {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
        {CUDA_ERROR_LAUNCH_TIMEOUT, "CUDA_ERROR_LAUNCH_TIMEOUT"},
        {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
    };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (names[i].error == error) {
            *name = names[i].name;
            return CUDA_SUCCESS;
        }
    }
    *name = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuCtxGetCurrent(CUcontext *context)
{
    *context = current_context;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context)
{
    record("cuCtxSetCurrent");
    current_context = context;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    if (ordinal < 0 || ordinal >= MAX_DEVICES) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    record("cuDevicePrimaryCtxRetain");
    *context = (CUcontext)(void *)&contexts[device];
    return (CUresult)fake_knobs.context_result;
}

#ifndef FAKE_WITHOUT_COPY
CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t size, CUstream stream)
{
    record("cuMemcpyAsync");
    if (current_context == NULL) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    if (fake_knobs.idle) {
        return CUDA_SUCCESS;
    }
    if (fake_knobs.copy_result != 0 && fake_num_copies == fake_knobs.fail_index) {
        return (CUresult)fake_knobs.copy_result;
    }
    CUresult result = add_copy(dst, src, size, stream);
    if (!fake_knobs.deferred) {
        run_copies();
    }
    return result;
}
#endif

CUresult cuStreamSynchronize(CUstream stream)
{
    (void)stream;
    record("cuStreamSynchronize");
    run_copies();
    return (CUresult)fake_knobs.synchronize_result;
}

static CUresult batch_as_of_12080(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                                  CUmemcpyAttributes *attrs, size_t *attrIdxs, size_t numAttrs, size_t *failIdx,
                                  CUstream hStream)
{
    record("cuMemcpyBatchAsync");
    if (current_context == NULL) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    if (count == 0 || numAttrs == 0 || numAttrs > count || (uintptr_t)hStream <= 1) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (fake_knobs.idle) {
        return CUDA_SUCCESS;
    }
    int device = (int)((char *)(void *)current_context - contexts);
    if (fake_knobs.devices_without_batches & (1u << device)) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (fake_knobs.hold && !hold()) {
        return CUDA_ERROR_LAUNCH_TIMEOUT;
    }
    fake_last_batch = (fake_batch){
        .count = count,
        .num_attributes = numAttrs,
        .first_attribute = attrIdxs[0],
        .source_order = (uint64_t)attrs[0].srcAccessOrder,
        .hints = (uint64_t)attrs[0].srcLocHint.type | (uint64_t)attrs[0].srcLocHint.id |
                 (uint64_t)attrs[0].dstLocHint.type | (uint64_t)attrs[0].dstLocHint.id,
        .flags = attrs[0].flags,
    };
    CUresult result = (CUresult)fake_knobs.batch_result;
    if (result != CUDA_SUCCESS) {
        *failIdx = SIZE_MAX;
        count = 0;
        if (fake_knobs.fail_index >= 0) {
            *failIdx = count = (size_t)fake_knobs.fail_index;
        }
    }
    for (size_t i = 0; i < count; i++) {
        CUresult added = add_copy(dsts[i], srcs[i], sizes[i], hStream);
        if (added != CUDA_SUCCESS) {
            *failIdx = i;
            return added;
        }
    }
    if (!fake_knobs.deferred) {
        run_copies();
    }
    return result;
}

#ifndef FAKE_USE_CUDA_HEADER
/* What the library must not call: the plain symbols, whose signature depends on the version that made them. */
CUresult cuMemcpyBatchAsync(void);
CUresult cuMemcpyBatchAsync_v2(void);

CUresult cuMemcpyBatchAsync(void)
{
    record("decoy cuMemcpyBatchAsync");
    return CUDA_ERROR_ILLEGAL_ADDRESS;
}

CUresult cuMemcpyBatchAsync_v2(void)
{
    record("decoy cuMemcpyBatchAsync_v2");
    return CUDA_ERROR_ILLEGAL_ADDRESS;
}
#endif

CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status)
{
    char call[48];
    snprintf(call, sizeof call, "%s@%d/%d", symbol, version, (int)flags);
    record(call);
    *function = NULL;
    *status = (CUdriverProcAddressQueryResult)fake_knobs.lookup_status;
    if (fake_knobs.lookup_result != 0) {
        return (CUresult)fake_knobs.lookup_result;
    }
    if (version > fake_knobs.version) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (fake_knobs.lookup_status == 0) {
        PFN_cuMemcpyBatchAsync_v12080 batch = batch_as_of_12080;
        memcpy(function, &batch, sizeof batch);
    }
    return CUDA_SUCCESS;
}
