// A libnvidia-ml.so.1 that nvidia-ml-py can load: FAKE_GPUS GPUs (1), each a little busier than the one before.
// The GPUs are lost as soon as the file FAKE_NVML_LOST names is there.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, INVALID = 2, NOT_FOUND = 6, LOST = 15 };
struct utilization { unsigned gpu, memory; };

static int number(const char* name, int otherwise) {
  const char* value = getenv(name);
  return value ? atoi(value) : otherwise;
}
static int is_lost(void) {
  const char* file = getenv("FAKE_NVML_LOST");
  return file && !access(file, F_OK);
}
static int index_of(void* device) { return (int)(size_t)device - 1; }
static void write_uuid(int index, char* to) {  // those of fake_cuda.cpp
  sprintf(to, "GPU-66616b65-6661-6b65-6661-6b6566616b%02x", '0' + index);
}

int nvmlInitWithFlags(unsigned flags) { return OK; }
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
  return is_lost() ? LOST : OK;
}
