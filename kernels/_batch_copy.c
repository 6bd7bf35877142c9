/* Copies between host and device memory, all ranges in one call to the CUDA driver.
 *
 * Nothing of CUDA is linked or included. load() opens the driver library and takes its functions by name;
 * cuMemcpyBatchAsync comes from the driver's own cuGetProcAddress, asked for the form of CUDA 12.8, and from
 * nowhere else: its nine arguments lost `failIdx` in CUDA 13.0, and newer drivers go on serving the old form
 * to those who ask for 12080.
 *
 * The declarations below restate the binary interface of NVIDIA's cuda.h and cudaTypedefs.h (CUDA Toolkit
 * 12.8 and 13.0; "CUDA Driver API", https://docs.nvidia.com/cuda/cuda-driver-api/), 64-bit Linux.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* ---- the driver's binary interface ---- */

typedef int driver_result;              /* CUresult */
typedef int driver_device;              /* CUdevice */
typedef unsigned long long driver_ptr;  /* CUdeviceptr_v2 */
typedef struct CUctx_st *driver_context;
typedef struct CUstream_st *driver_stream;

enum { SUCCESS = 0, ERROR_NOT_SUPPORTED = 801 };
enum { GET_PROC_ADDRESS_LEGACY_STREAM = 1, GET_PROC_ADDRESS_FOUND = 0 };
enum { SOURCE_ORDER_STREAM = 1, SOURCE_ORDER_ANY = 3 };
enum { BATCH_COPY_VERSION = 12080 };

typedef struct {
    int type; /* CUmemLocationType */
    int id;
} memory_location;

/* CUmemcpyAttributes_v1. The hints matter for managed and pageable memory alone: left zero. */
typedef struct {
    int source_order; /* CUmemcpySrcAccessOrder */
    memory_location source_hint;
    memory_location destination_hint;
    unsigned int flags;
} copy_attributes;

_Static_assert(sizeof(copy_attributes) == 24, "CUmemcpyAttributes_v1 has 24 bytes");
_Static_assert(sizeof(void *) == 8 && sizeof(size_t) == 8 && sizeof(driver_ptr) == 8, "64-bit only");

typedef struct {
    driver_result (*get_version)(int *version);
    driver_result (*get_error_name)(driver_result error, const char **name);
    driver_result (*get_current_context)(driver_context *context);
    driver_result (*set_current_context)(driver_context context);
    driver_result (*get_device)(driver_device *device, int ordinal);
    driver_result (*retain_primary_context)(driver_context *context, driver_device device);
    driver_result (*copy_async)(driver_ptr dst, driver_ptr src, size_t size, driver_stream stream);
    driver_result (*synchronize)(driver_stream stream);
    /* NULL when batches are not to be had. */
    driver_result (*copy_batch_async)(driver_ptr *dsts, driver_ptr *srcs, size_t *sizes, size_t count,
                                      copy_attributes *attributes, size_t *attribute_starts,
                                      size_t num_attributes, size_t *fail_index, driver_stream stream);
} driver_functions;

typedef driver_result (*get_proc_address_function)(const char *symbol, void **function, int version,
                                                   uint64_t flags, int *status);

/* In the order of driver_functions; every one is as old as CUDA 7. */
static const char *const required_symbols[] = {
    "cuDriverGetVersion", "cuGetErrorName", "cuCtxGetCurrent", "cuCtxSetCurrent",
    "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuMemcpyAsync", "cuStreamSynchronize",
};
enum { NUM_REQUIRED = sizeof(required_symbols) / sizeof(required_symbols[0]) };
_Static_assert(offsetof(driver_functions, copy_batch_async) == NUM_REQUIRED * sizeof(void *),
               "one name for each function before copy_batch_async");

/* ---- Driver objects ---- */

enum { MAX_DEVICES = 64 };

typedef struct {
    PyObject_HEAD
    driver_functions functions;
    int loaded; /* functions up to copy_batch_async are there */
    int version;
    char reason[256]; /* why not in batches; empty when they are to be had */
    /* Written with the GIL held. */
    unsigned char refuses_batches[MAX_DEVICES];
    driver_context contexts[MAX_DEVICES]; /* primary contexts that were retained */
} Driver;

static const char *error_name(const Driver *driver, driver_result error)
{
    const char *name = NULL;
    if (driver->functions.get_error_name(error, &name) != SUCCESS || name == NULL) {
        return "unknown CUresult";
    }
    return name;
}

static void *take_symbol(void *library, const char *name, void *function, size_t size)
{
    void *symbol = dlsym(library, name);
    memcpy(function, &symbol, size); /* ISO C has no cast from object to function pointers */
    return symbol;
}

/* The library stays open for the life of the process: the driver cannot be unloaded while in use. */
static void open_library(Driver *driver, const char *path)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        const char *error = dlerror();
        PyOS_snprintf(driver->reason, sizeof driver->reason, "no driver: %s", error ? error : path);
        return;
    }
    for (int i = 0; i < NUM_REQUIRED; i++) {
        char *field = (char *)&driver->functions + (size_t)i * sizeof(void *);
        if (take_symbol(library, required_symbols[i], field, sizeof(void *)) == NULL) {
            PyOS_snprintf(driver->reason, sizeof driver->reason, "symbol missing: %s", required_symbols[i]);
            return;
        }
    }
    driver_result result = driver->functions.get_version(&driver->version);
    if (result != SUCCESS) {
        PyOS_snprintf(driver->reason, sizeof driver->reason, "cuDriverGetVersion: %s (%d)",
                      error_name(driver, result), result);
        return;
    }
    driver->loaded = 1;
    if (driver->version < BATCH_COPY_VERSION) {
        PyOS_snprintf(driver->reason, sizeof driver->reason,
                      "driver too old: CUDA %d.%d, batched copies need 12.8", driver->version / 1000,
                      driver->version % 1000 / 10);
        return;
    }
    get_proc_address_function get_proc_address;
    if (take_symbol(library, "cuGetProcAddress_v2", &get_proc_address, sizeof get_proc_address) == NULL) {
        PyOS_snprintf(driver->reason, sizeof driver->reason, "symbol missing: cuGetProcAddress_v2");
        return;
    }
    void *function = NULL;
    int status = GET_PROC_ADDRESS_FOUND;
    result = get_proc_address("cuMemcpyBatchAsync", &function, BATCH_COPY_VERSION,
                              GET_PROC_ADDRESS_LEGACY_STREAM, &status);
    if (result != SUCCESS) {
        PyOS_snprintf(driver->reason, sizeof driver->reason, "cuGetProcAddress: %s (%d)",
                      error_name(driver, result), result);
    } else if (function == NULL || status != GET_PROC_ADDRESS_FOUND) {
        PyOS_snprintf(driver->reason, sizeof driver->reason,
                      "symbol missing: cuMemcpyBatchAsync as of CUDA 12.8 (status %d)", status);
    } else {
        memcpy(&driver->functions.copy_batch_async, &function, sizeof function);
    }
}

/* ---- copying; nothing here touches a Python object, and the GIL is not held ---- */

typedef struct {
    driver_ptr *dsts;
    driver_ptr *srcs;
    size_t *sizes;
    size_t count;
    driver_stream stream;
    int device;
    int batch;     /* in: whether to try; out: whether that was the way taken */
    int any_order; /* the source may be read before earlier work of the stream is done */
    driver_context context; /* primary context of the device, NULL when not yet retained */
    int not_supported;      /* out: the device refused batches */
} copy_request;

typedef struct {
    driver_result result;
    const char *call;
    size_t index; /* of the range that failed, SIZE_MAX when no single one did */
    driver_result synchronized;
} copy_outcome;

static copy_outcome outcome_of(const char *call, driver_result result)
{
    return (copy_outcome){.result = result, .call = call, .index = SIZE_MAX, .synchronized = SUCCESS};
}

/* A thread that has not yet used CUDA has no context; give it the primary one, as the CUDA runtime does. */
static copy_outcome bind_context(const driver_functions *cuda, copy_request *request)
{
    driver_context current = NULL;
    driver_result result = cuda->get_current_context(&current);
    if (result != SUCCESS || current != NULL) {
        return outcome_of("cuCtxGetCurrent", result);
    }
    if (request->context == NULL) {
        driver_device device;
        result = cuda->get_device(&device, request->device);
        if (result != SUCCESS) {
            return outcome_of("cuDeviceGet", result);
        }
        result = cuda->retain_primary_context(&request->context, device);
        if (result != SUCCESS) {
            request->context = NULL;
            return outcome_of("cuDevicePrimaryCtxRetain", result);
        }
    }
    return outcome_of("cuCtxSetCurrent", cuda->set_current_context(request->context));
}

static copy_outcome submit_batch(const driver_functions *cuda, const copy_request *request)
{
    copy_attributes attributes = {
        .source_order = request->any_order ? SOURCE_ORDER_ANY : SOURCE_ORDER_STREAM,
    };
    size_t attribute_start = 0;
    copy_outcome outcome = outcome_of("cuMemcpyBatchAsync", SUCCESS);
    outcome.result = cuda->copy_batch_async(request->dsts, request->srcs, request->sizes, request->count,
                                            &attributes, &attribute_start, 1, &outcome.index, request->stream);
    return outcome;
}

static copy_outcome submit_each(const driver_functions *cuda, const copy_request *request)
{
    copy_outcome outcome = outcome_of("cuMemcpyAsync", SUCCESS);
    for (size_t i = 0; i < request->count && outcome.result == SUCCESS; i++) {
        outcome.index = i;
        outcome.result =
            cuda->copy_async(request->dsts[i], request->srcs[i], request->sizes[i], request->stream);
    }
    return outcome;
}

static copy_outcome submit(const driver_functions *cuda, copy_request *request)
{
    copy_outcome outcome = bind_context(cuda, request);
    if (outcome.result != SUCCESS) {
        return outcome; /* nothing is in flight yet */
    }
    if (request->batch) {
        outcome = submit_batch(cuda, request);
        request->not_supported = outcome.result == ERROR_NOT_SUPPORTED;
        request->batch = !request->not_supported;
    }
    if (!request->batch) {
        outcome = submit_each(cuda, request);
    }
    if (outcome.result != SUCCESS) {
        outcome.synchronized = cuda->synchronize(request->stream);
    }
    return outcome;
}

/* ---- Python's side ---- */

static PyObject *raise_outcome(const Driver *driver, const copy_outcome *outcome, size_t count)
{
    char where[96] = "";
    char wait[96] = "";
    if (outcome->index < count) {
        PyOS_snprintf(where, sizeof where, " at range %zu of %zu", outcome->index, count);
    }
    if (outcome->synchronized != SUCCESS) {
        PyOS_snprintf(wait, sizeof wait, "; waiting for the stream: %s (%d)",
                      error_name(driver, outcome->synchronized), outcome->synchronized);
    }
    return PyErr_Format(PyExc_RuntimeError, "%s: %s (%d)%s%s", outcome->call,
                        error_name(driver, outcome->result), outcome->result, where, wait);
}

static const char *path_of(const Driver *driver)
{
    return !driver->loaded ? "none" : driver->functions.copy_batch_async ? "batch" : "ranges";
}

static int take_device(PyObject *argument, int *device)
{
    long value = PyLong_AsLong(argument);
    if (value == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (value < 0 || value >= MAX_DEVICES) {
        PyErr_Format(PyExc_ValueError, "device %ld is not in 0..%d", value, MAX_DEVICES - 1);
        return -1;
    }
    *device = (int)value;
    return 0;
}

/* Both tables of a copy() call: `rows` as numbers, `addresses` to be filled from it. */
typedef struct {
    Py_buffer rows;
    Py_buffer addresses;
} copy_tables;

static void release_tables(copy_tables *tables)
{
    PyBuffer_Release(&tables->rows);
    PyBuffer_Release(&tables->addresses);
}

static int take_tables(PyObject *rows, PyObject *addresses, copy_tables *tables)
{
    if (PyObject_GetBuffer(rows, &tables->rows, PyBUF_SIMPLE) < 0) {
        return -1;
    }
    if (PyObject_GetBuffer(addresses, &tables->addresses, PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&tables->rows);
        return -1;
    }
    Py_ssize_t size = tables->rows.len;
    uintptr_t bits = (uintptr_t)tables->rows.buf | (uintptr_t)tables->addresses.buf;
    if (size != tables->addresses.len || size % (Py_ssize_t)(3 * sizeof(uint64_t)) != 0 ||
        (size != 0 && bits % sizeof(uint64_t) != 0)) {
        PyErr_Format(PyExc_ValueError,
                     "both tables must be aligned 64-bit integers [3, n], got %zd and %zd bytes", size,
                     tables->addresses.len);
        release_tables(tables);
        return -1;
    }
    return 0;
}

static void fill_addresses(copy_request *request, const copy_tables *tables, uint64_t src, uint64_t dst,
                           uint64_t row_bytes)
{
    size_t count = (size_t)tables->rows.len / (3 * sizeof(uint64_t));
    const uint64_t *rows = tables->rows.buf;
    request->count = count;
    request->dsts = tables->addresses.buf;
    request->srcs = request->dsts + count;
    request->sizes = (size_t *)(void *)(request->srcs + count);
    for (size_t i = 0; i < count; i++) {
        request->dsts[i] = dst + rows[i] * row_bytes;
        request->srcs[i] = src + rows[count + i] * row_bytes;
        request->sizes[i] = rows[2 * count + i] * row_bytes;
    }
}

PyDoc_STRVAR(copy_doc,
             "copy(rows, addresses, src, dst, row_bytes, stream, device, batch, any_order, /)\n\n"
             "rows: contiguous 64-bit integers [3, n]: destination rows, source rows, numbers of rows.\n"
             "addresses: room for as many, overwritten. src, dst: addresses of row 0 of either side.\n"
             "stream: a CUstream handle of that device. Returns 'batch' or 'ranges' once submitted;\n"
             "raises RuntimeError with the driver's error after waiting for the stream.");

static PyObject *driver_copy(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Driver *driver = (Driver *)self;
    if (nargs != 9) {
        return PyErr_Format(PyExc_TypeError, "copy() takes 9 arguments, got %zd", nargs);
    }
    if (!driver->loaded) {
        return PyErr_Format(PyExc_RuntimeError, "nothing to copy with: %s", driver->reason);
    }
    uint64_t numbers[4]; /* src, dst, row_bytes, stream */
    for (int i = 0; i < 4; i++) {
        numbers[i] = PyLong_AsUnsignedLongLong(args[2 + i]);
        if (numbers[i] == UINT64_MAX && PyErr_Occurred()) {
            return NULL;
        }
    }
    copy_request request = {.stream = (driver_stream)(uintptr_t)numbers[3]};
    int batch = PyObject_IsTrue(args[7]);
    request.any_order = PyObject_IsTrue(args[8]);
    copy_tables tables;
    if (batch < 0 || request.any_order < 0 || take_device(args[6], &request.device) < 0 ||
        take_tables(args[0], args[1], &tables) < 0) {
        return NULL;
    }
    fill_addresses(&request, &tables, numbers[0], numbers[1], numbers[2]);
    request.context = driver->contexts[request.device];
    /* The batch call refuses the legacy default stream, handles NULL and CU_STREAM_LEGACY. */
    request.batch = batch && driver->functions.copy_batch_async != NULL &&
                    !driver->refuses_batches[request.device] && numbers[3] > 1;

    copy_outcome outcome = outcome_of("", SUCCESS);
    if (request.count != 0) {
        Py_BEGIN_ALLOW_THREADS
        outcome = submit(&driver->functions, &request);
        Py_END_ALLOW_THREADS
    }
    release_tables(&tables);
    if (request.context != NULL) {
        driver->contexts[request.device] = request.context;
    }
    if (request.not_supported) {
        driver->refuses_batches[request.device] = 1;
    }
    if (outcome.result != SUCCESS) {
        return raise_outcome(driver, &outcome, request.count);
    }
    return PyUnicode_FromString(request.batch ? "batch" : "ranges");
}

PyDoc_STRVAR(supports_doc,
             "supports(device, /) -> bool\n\nFalse once the device answered that it has no batches.");

static PyObject *driver_supports(PyObject *self, PyObject *argument)
{
    int device;
    if (take_device(argument, &device) < 0) {
        return NULL;
    }
    Driver *driver = (Driver *)self;
    return PyBool_FromLong(driver->functions.copy_batch_async != NULL && !driver->refuses_batches[device]);
}

static PyObject *driver_path(PyObject *self, void *Py_UNUSED(closure))
{
    return PyUnicode_FromString(path_of((Driver *)self));
}

static PyObject *driver_reason(PyObject *self, void *Py_UNUSED(closure))
{
    const char *reason = ((Driver *)self)->reason;
    if (*reason == '\0') {
        Py_RETURN_NONE;
    }
    return PyUnicode_DecodeFSDefault(reason);
}

static PyObject *driver_version(PyObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(((Driver *)self)->version);
}

static void driver_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef driver_methods[] = {
    {"copy", (PyCFunction)(void (*)(void))driver_copy, METH_FASTCALL, copy_doc},
    {"supports", driver_supports, METH_O, supports_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef driver_properties[] = {
    {"path", driver_path, NULL, "'batch', 'ranges' or 'none'", NULL},
    {"reason", driver_reason, NULL, "why path is not 'batch', or None", NULL},
    {"version", driver_version, NULL, "1000 * major + 10 * minor, 0 when unknown", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot driver_slots[] = {
    {Py_tp_doc, "A driver library, opened by load()."},
    {Py_tp_dealloc, (void *)driver_dealloc},
    {Py_tp_methods, driver_methods},
    {Py_tp_getset, driver_properties},
    {0, NULL},
};

static PyType_Spec driver_spec = {
    .name = "epd.kernels._batch_copy.Driver",
    .basicsize = sizeof(Driver),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = driver_slots,
};

PyDoc_STRVAR(load_doc, "load(path='libcuda.so.1', /) -> Driver\n\n"
                       "Never raises for what is missing: see Driver.reason.");

static PyObject *load(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs > 1) {
        return PyErr_Format(PyExc_TypeError, "load() takes at most 1 argument, got %zd", nargs);
    }
    PyObject *path = NULL;
    if (nargs == 1 && !PyUnicode_FSConverter(args[0], &path)) {
        return NULL;
    }
    PyTypeObject *type = *(PyTypeObject **)PyModule_GetState(module);
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Driver *driver = (Driver *)allocate(type, 0);
    if (driver != NULL) {
        const char *name = path ? PyBytes_AsString(path) : "libcuda.so.1";
        Py_BEGIN_ALLOW_THREADS
        open_library(driver, name);
        Py_END_ALLOW_THREADS
    }
    Py_XDECREF(path);
    return (PyObject *)driver;
}

static PyMethodDef module_methods[] = {
    {"load", (PyCFunction)(void (*)(void))load, METH_FASTCALL, load_doc},
    {NULL, NULL, 0, NULL},
};

static int module_exec(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &driver_spec, NULL);
    if (type == NULL) {
        return -1;
    }
    *(PyObject **)PyModule_GetState(module) = type;
    return PyModule_AddType(module, (PyTypeObject *)type);
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    PyObject **type = PyModule_GetState(module);
    if (type != NULL) {
        Py_VISIT(*type);
    }
    return 0;
}

static int module_clear(PyObject *module)
{
    PyObject **type = PyModule_GetState(module);
    if (type != NULL) {
        Py_CLEAR(*type);
    }
    return 0;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, (void *)module_exec},
    {0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "epd.kernels._batch_copy",
    .m_doc = "Batched copies through the CUDA driver, found at run time.",
    .m_size = sizeof(PyObject *),
    .m_methods = module_methods,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
};

PyMODINIT_FUNC PyInit__batch_copy(void)
{
    return PyModuleDef_Init(&module_definition);
}
