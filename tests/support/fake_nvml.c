// A libnvidia-ml.so.1 that nvidia-ml-py can load: FAKE_GPUS GPUs (1), each a little busier than the one before.
// FAKE_MIG=1: they are MIG instances, which report their memory alone. FAKE_NVML_DRIVER=0: there is no driver.
// The GPUs are lost as soon as the file FAKE_NVML_LOST names is there.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, DRIVER_NOT_LOADED = 9, LOST = 15 };
struct utilization { unsigned gpu, memory; };
struct memory { unsigned long long total, free, used; };

static int number(const char* name, int otherwise) {
  const char* value = getenv(name);
  return value ? atoi(value) : otherwise;
}
static int is_lost(void) {
  const char* file = getenv("FAKE_NVML_LOST");
  return file && !access(file, F_OK);
}
static int index_of(void* device) { return (int)(size_t)device - 1; }
static int refuses(void) { return is_lost() ? LOST : number("FAKE_MIG", 0) ? NOT_SUPPORTED : OK; }
static void write_uuid(int index, char* to) {  // those of fake_cuda.cpp
  sprintf(to, "%s-66616b65-6661-6b65-6661-6b6566616b%02x", number("FAKE_MIG", 0) ? "MIG" : "GPU", '0' + index);
}

int nvmlInitWithFlags(unsigned flags) { return number("FAKE_NVML_DRIVER", 1) ? OK : DRIVER_NOT_LOADED; }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return OK; }
const char* nvmlErrorString(int code) { return "an error of the fake NVML"; }
int nvmlDeviceGetCount_v2(unsigned* count) { return *count = number("FAKE_GPUS", 1), OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  if (is_lost()) return LOST;
  if ((int)index >= number("FAKE_GPUS", 1)) return INVALID;
  return *device = (void*)(size_t)(index + 1), OK;
}
int nvmlDeviceGetUUID(void* device, char* uuid, unsigned length) { return write_uuid(index_of(device), uuid), OK; }
int nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  char own[80];
  if (is_lost()) return LOST;
  for (int index = 0; index < number("FAKE_GPUS", 1); index++) {
    write_uuid(index, own);
    if (!strcmp(uuid, own)) return nvmlDeviceGetHandleByIndex_v2(index, device);
  }
  return NOT_FOUND;
}
int nvmlDeviceGetUtilizationRates(void* device, struct utilization* rates) {
  rates->gpu = 40 + 20 * index_of(device);
  return refuses();
}
int nvmlDeviceGetPowerUsage(void* device, unsigned* milliwatts) {
  *milliwatts = 300000 + 100000 * index_of(device);
  return refuses();
}
int nvmlDeviceGetMemoryInfo(void* device, struct memory* memory) {
  memory->total = 1ull << 37;
  memory->used = (5ull + index_of(device)) << 30;
  memory->free = memory->total - memory->used;
  return is_lost() ? LOST : OK;
}
int nvmlDeviceGetPcieThroughput(void* device, int counter, unsigned* kib_per_s) {
  *kib_per_s = 1000000 * (1 + counter);
  return refuses();
}
