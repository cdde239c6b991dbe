// Common parts of the stand-in for cuDNN: status codes, shapes, queued kernels, and the model of workspaces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "runtime/runtime.hpp"

namespace standin::cudnn {

// Values of cudnnStatus_t.
constexpr int kSuccess = 0, kBadParam = 2000, kUnsupported = 3000, kExecutionFailed = 5000;

// Values of cudnnDataType_t that the model tells apart.
constexpr int kFloat = 0, kDouble = 1, kHalf = 2, kBfloat16 = 9;
std::size_t element_bytes(int data_type);

struct Library {  // of a cudnnHandle_t
  Handle stream = 0;
};

struct Shape {
  int data_type = kFloat;
  std::vector<std::int64_t> sizes, strides;  // in elements; batch and channels first

  std::size_t elements() const;
  std::size_t bytes() const { return elements() * element_bytes(data_type); }
  std::size_t extent() const;  // bytes from the first element to the end of the last one
  bool channels_last() const { return sizes.size() > 1 && strides[1] == 1; }
};

// Queue a kernel that uses ranges of device memory.
int launch(const Library* library, std::vector<fake::Range> uses);

enum class Pass { forward, data_gradient, weight_gradient };

struct Convolution {
  Pass pass = Pass::forward;
  Shape x, w, y;  // input, filters and output of the forward pass, or their gradients
};

// Families of kernels for a convolution. The numbers are those of the engines of the graph API.
enum class Kernels { tensor_cores = 0, direct = 1, winograd = 2 };

// Return the families that can compute a convolution, the fastest first.
std::vector<Kernels> kernels_for(const Convolution& convolution);
std::size_t workspace_bytes(const Convolution& convolution, Kernels kernels);

struct Recurrence {  // of a cudnnRNNDescriptor_t
  int cell = 0;      // 0 and 1: plain, 2: LSTM, 3: GRU
  int bias = 2, directions = 1, data_type = kFloat;
  std::int64_t input = 0, hidden = 0, projected = 0, layers = 1;
  float dropout = 0;

  std::int64_t gates() const { return cell == 2 ? 4 : cell == 3 ? 3 : 1; }
  std::int64_t output() const { return projected > 0 ? projected : hidden; }
  // Columns of the matrix that a layer applies to its input.
  std::int64_t columns(std::int64_t layer) const { return layer == 0 ? input : directions * output(); }
};

std::size_t reserve_bytes(const Recurrence& recurrence, std::int64_t steps, std::int64_t batch);
std::size_t workspace_bytes(const Recurrence& recurrence, std::int64_t steps, std::int64_t batch);
std::size_t dropout_state_bytes();
// Label is the length of the longest label.
std::size_t loss_workspace_bytes(std::int64_t steps, std::int64_t batch, std::int64_t label);
constexpr std::int64_t kLongestLabel = 256;  // symbols; the documented limit of cuDNN's CTC loss

// Mode is a cudnnBatchNormMode_t, operations a cudnnBatchNormOps_t.
std::size_t norm_workspace_bytes(const Shape& x, int mode);
std::size_t norm_reserve_bytes(const Shape& x, int operations);

}  // namespace standin::cudnn
