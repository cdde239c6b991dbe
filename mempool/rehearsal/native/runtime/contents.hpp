// Contents of memory: copies and fills, as the settings want values to be read from a device.
#pragma once

#include <cstddef>

#include "driver/gpu.hpp"

namespace standin {

// Copy at once. From device to host, zeros or random values arrive, unless the host has copied the same small range to
// the device, or values are `copied`.
void copy_contents(void* to, const void* from, std::size_t bytes);
// Fill at once; memory of a device stays as it is unless values are `copied`.
void fill_contents(void* to, int value, std::size_t bytes);

// A kernel writes to this address: bytes that were known there are unknown.
void forget_contents(const void* address);

// The same as work of a stream. Both return the driver's code: kInvalidHandle for no stream.
int queue_copy(void* to, const void* from, std::size_t bytes, fake::Stream* stream);
int queue_fill(void* to, int value, std::size_t bytes, fake::Stream* stream);

}  // namespace standin
