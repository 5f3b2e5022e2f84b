// Compiled in front of DeepSpeed's deepspeed_aio_common.cpp (see deepnvme_build.py).
//
// DeepSpeed reaps its transfers with io_pgetevents and drops what the kernel says about each. Here the same call keeps
// every result that is not the number of bytes asked for, by the address of the transfer's buffer, until
// monai_gds_take_error asks for it.

#pragma once
#include <libaio.h>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>

namespace monai_gds {
struct failure {
    const char* buffer;
    long result;  // negative: an errno; else how many bytes were transferred
};

static std::mutex mutex;
static std::deque<failure> failures;  // bounded: nobody may be asking

static int pgetevents(io_context_t context, long least, long most, io_event* events, timespec* timeout, sigset_t* mask)
{
    const int count = io_pgetevents(context, least, most, events, timeout, mask);
    for (int i = 0; i < count; ++i) {
        const auto& asked = events[i].obj->u.c;
        const auto result = static_cast<long>(events[i].res);
        if (result == static_cast<long>(asked.nbytes)) { continue; }
        std::lock_guard<std::mutex> lock(mutex);
        if (failures.size() == 65536) { failures.pop_front(); }
        failures.push_back({static_cast<const char*>(asked.buf), result});
    }
    return count;
}
}  // namespace monai_gds

// Takes the failures of transfers from or to a piece of memory. Returns 0 when there are none; else 1, and the first
// one's address and result.
extern "C" __attribute__((visibility("default"))) int monai_gds_take_error(const char* memory,
                                                                           size_t nbytes,
                                                                           const char** buffer,
                                                                           long* result)
{
    std::lock_guard<std::mutex> lock(monai_gds::mutex);
    int found = 0;
    for (auto failure = monai_gds::failures.begin(); failure != monai_gds::failures.end();) {
        if (failure->buffer < memory || failure->buffer >= memory + nbytes) {
            ++failure;
            continue;
        }
        if (!found) {
            *buffer = failure->buffer;
            *result = failure->result;
            found = 1;
        }
        failure = monai_gds::failures.erase(failure);
    }
    return found;
}

#define io_pgetevents monai_gds::pgetevents
