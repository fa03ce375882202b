// cuda-probe: what does a CUDA process in this container see?
//
//   cuda-probe [--fill MAX_MIB] [--hold SECONDS] [--timeout SECONDS]
//
// Prints one line of JSON. Without a GPU it is {"cuInit":100} where no MPS daemon is reachable and
// {"cuInit":805} where one is. With one:
//
//   {"cuInit":0,"devices":[{"uuid":"GPU-…","name":"…","sms":32,"free_mib":3776,"total_mib":143771,
//    "obtained_mib":1728}]}
//
// --fill     allocate on every visible device, in steps of 64 MiB, until it fails or MAX_MIB are held
// --hold     stay so long after printing, memory and contexts held, as a client the daemon can list
// --timeout  give up after so long (20 s): a wedged daemon blocks cuInit for ever
//
// Exit status 0 when the driver answered, whatever it said; 1 when there is no libcuda or no answer.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// The driver's ABI, declared here so that no CUDA header is needed. The suffix _v2 is what cuda.h's
// macros resolve the plain names to; the plain symbols are the 32-bit interface of CUDA 3.
typedef int CUresult;
typedef int CUdevice;
typedef void *CUcontext;
typedef unsigned long long CUdeviceptr;
typedef struct { unsigned char bytes[16]; } CUuuid;
enum { MULTIPROCESSOR_COUNT = 16 };
enum { STEP_MIB = 64 };

static CUresult (*cuInit)(unsigned);
static CUresult (*cuDeviceGetCount)(int *);
static CUresult (*cuDeviceGet)(CUdevice *, int);
static CUresult (*cuDeviceGetName)(char *, int, CUdevice);
static CUresult (*cuDeviceGetUuid)(CUuuid *, CUdevice);
static CUresult (*cuDeviceGetAttribute)(int *, int, CUdevice);
static CUresult (*cuDevicePrimaryCtxRetain)(CUcontext *, CUdevice);
static CUresult (*cuCtxSetCurrent)(CUcontext);
static CUresult (*cuMemGetInfo)(size_t *, size_t *);
static CUresult (*cuMemAlloc)(CUdeviceptr *, size_t);

static const struct { const char *name; void **to; } symbols[] = {
    {"cuInit", (void **)&cuInit},
    {"cuDeviceGetCount", (void **)&cuDeviceGetCount},
    {"cuDeviceGet", (void **)&cuDeviceGet},
    {"cuDeviceGetName", (void **)&cuDeviceGetName},
    {"cuDeviceGetUuid_v2", (void **)&cuDeviceGetUuid},
    {"cuDeviceGetAttribute", (void **)&cuDeviceGetAttribute},
    {"cuDevicePrimaryCtxRetain", (void **)&cuDevicePrimaryCtxRetain},
    {"cuCtxSetCurrent", (void **)&cuCtxSetCurrent},
    {"cuMemGetInfo_v2", (void **)&cuMemGetInfo},
    {"cuMemAlloc_v2", (void **)&cuMemAlloc},
};

// The process may be blocked anywhere inside the driver, stdio's lock included: write(2) only.
static void give_up(int signal_number)
{
    static const char text[] = "{\"error\":\"the driver does not answer\"}\n";
    (void)signal_number;
    _exit(write(STDOUT_FILENO, text, sizeof text - 1) < 0 ? 2 : 1);
}

static int no_driver(const char *why)
{
    printf("{\"error\":\"");
    for (; *why; why++) {
        if (*why == '"' || *why == '\\')
            putchar('\\');
        putchar((unsigned char)*why < ' ' ? ' ' : *why);
    }
    printf("\"}\n");
    return 1;
}

static void print_uuid(CUdevice device)
{
    CUuuid id;
    CUresult r = cuDeviceGetUuid(&id, device);
    if (r) {
        printf("\"cuDeviceGetUuid\":%d", r);
        return;
    }
    printf("\"uuid\":\"GPU-");
    for (int i = 0; i < 16; i++)
        printf("%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", id.bytes[i]);
    putchar('"');
}

// A call that fails is printed under its name with its code, and ends what is said of this device.
static void print_device(int index, long fill_mib)
{
    CUdevice device;
    CUcontext context;
    CUdeviceptr memory;
    CUresult r;
    char name[128] = "";
    size_t free_bytes, total_bytes;
    int sms;

    if ((r = cuDeviceGet(&device, index))) {
        printf("\"cuDeviceGet\":%d", r);
        return;
    }
    print_uuid(device);
    if (!cuDeviceGetName(name, sizeof name, device))
        printf(",\"name\":\"%s\"", name);
    // Before the count of SMs: a client's thread percentage is settled when it has a context.
    if ((r = cuDevicePrimaryCtxRetain(&context, device)) || (r = cuCtxSetCurrent(context))) {
        printf(",\"context\":%d", r);
        return;
    }
    if (!cuDeviceGetAttribute(&sms, MULTIPROCESSOR_COUNT, device))
        printf(",\"sms\":%d", sms);
    if ((r = cuMemGetInfo(&free_bytes, &total_bytes)))
        printf(",\"cuMemGetInfo\":%d", r);
    else
        printf(",\"free_mib\":%zu,\"total_mib\":%zu", free_bytes >> 20, total_bytes >> 20);
    if (fill_mib < 0)
        return;
    long obtained = 0;
    while (obtained + STEP_MIB <= fill_mib && !(r = cuMemAlloc(&memory, (size_t)STEP_MIB << 20)))
        obtained += STEP_MIB;
    printf(",\"obtained_mib\":%ld", obtained);
}

static long argument(char **argv, int *i)
{
    char *end = NULL;
    const char *text = argv[*i + 1];
    long n = text ? strtol(text, &end, 10) : -1;
    if (!text || end == text || *end || n < 0) {
        fprintf(stderr, "cuda-probe: %s takes a number\n", argv[*i]);
        exit(2);
    }
    ++*i;
    return n;
}

int main(int argc, char **argv)
{
    long fill_mib = -1, hold_s = 0, timeout_s = 20;

    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--fill"))
            fill_mib = argument(argv, &i);
        else if (!strcmp(argv[i], "--hold"))
            hold_s = argument(argv, &i);
        else if (!strcmp(argv[i], "--timeout"))
            timeout_s = argument(argv, &i);
        else {
            fprintf(stderr, "usage: cuda-probe [--fill MAX_MIB] [--hold SECONDS] [--timeout SECONDS]\n");
            return 2;
        }
    }
    // As the first process of a PID namespace it would ignore signals it has no handler for.
    signal(SIGTERM, _exit);
    signal(SIGALRM, give_up);
    alarm((unsigned)timeout_s);

    void *libcuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!libcuda)
        return no_driver(dlerror());
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        *symbols[i].to = dlsym(libcuda, symbols[i].name);
        if (!*symbols[i].to)
            return no_driver(dlerror());
    }

    int count = 0;
    CUresult r = cuInit(0);
    printf("{\"cuInit\":%d", r);
    if (!r && (r = cuDeviceGetCount(&count)))
        printf(",\"cuDeviceGetCount\":%d", r);
    else if (!r) {
        printf(",\"devices\":[");
        for (int i = 0; i < count; i++) {
            printf(i ? ",{" : "{");
            print_device(i, fill_mib);
            putchar('}');
        }
        putchar(']');
    }
    printf("}\n");
    fflush(stdout);
    alarm(0);
    // sleep(3) returns early when a handler ran.
    for (unsigned left = (unsigned)hold_s; left;)
        left = sleep(left);
    return 0;
}
